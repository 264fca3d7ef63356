"""Rollouts as a source of batches: trade for a while, learn from those days for a few epochs, and repeat.

A sample is the days of one environment. Every position of the global batch owns one environment for each minibatch,
and every epoch assigns them again: a minibatch holds one environment of each position. A rank trades in the
environments of its own micro-batches. So neither the rank nor the number of ranks decides which random
numbers an environment gets, or which environments share a minibatch.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.recipes.clstm_ppo import counter_rng
from lockstep.recipes.clstm_ppo.market import Game
from lockstep.recipes.clstm_ppo.model import Agent
from lockstep.recipes.clstm_ppo.rollout import Cohort, Days, RunningStats, advantages, stats_of
from lockstep.task import BatchSource, MicroBatch, SourceContext, StepBatches, StepResult

# What the loss needs of a rollout's days. A checkpoint in the middle of an update also holds it.
LOSS_FIELDS = ("windows", "starts", "actions", "logp", "hidden", "cell", "rewards", "advantages", "targets")


@dataclass(frozen=True)
class RolloutOptions:
    # Days that every environment trades between two updates.
    rollout: int = 64

    # Minibatches of an epoch; each is one optimizer step. Every position of the global batch has this many
    # environments.
    minibatches: int = 4

    # Passes over the days of a rollout.
    epochs: int = 4

    # Discount of later rewards for each day.
    discount: float = 0.99

    # Lambda of generalised advantage estimation.
    trace: float = 0.95

    # Skip the remaining epochs of an update when the policy has moved this far.
    target_kl: float | None = None

    # Updates during which the cost of trading grows to its full size.
    cost_warmup: int = 0

    # Scale rewards, and the targets of the value, by their running statistics.
    normalise: bool = True

    # Updates before PPO that only teach the first stage to predict the coming day.
    foresight: int = 0

    @property
    def steps(self) -> int:
        """Optimizer steps of an update, at most."""
        return self.epochs * self.minibatches


class Rollouts(BatchSource):
    """Batches from rollouts. The state is the same on every rank: what all environments need to continue."""

    def __init__(self, game: Game, options: RolloutOptions):
        self.game = game
        self.options = options

        # An agent that is taught to foresee also learns from how the assets moved.
        self.loss_fields = (*LOSS_FIELDS, "moved") if options.foresight else LOSS_FIELDS

        # Finished updates, and minibatches of the current update that are done.
        self.update = 0
        self.cursor = 0

        # Running statistics of discounted rewards and of the targets of the value.
        self.rewards = RunningStats()
        self.values = RunningStats()

        # The days of this rank's environments; None between two updates.
        self.days: Days | None = None

        # Mean and standard deviation of the advantages of every minibatch of the update.
        self.advantage_stats: list[list[float]] = []

        # For each cohort of this rank, which of its environments are in each minibatch of the update; see `assign`.
        self._assigned: list[Tensor] = []

    def attach(self, context: SourceContext) -> None:
        """Make this rank's environments."""
        if context.collective_forwards and context.global_batch % (context.micro_batch_size * context.ranks):
            raise UserError(
                f"global_batch={context.global_batch} gives {context.ranks} ranks different numbers of micro-batches",
                f"micro_batch={context.micro_batch_size}, and a strategy whose forwards wait for each other",
                f"set global_batch={context.micro_batch_size * context.ranks} or a multiple of it, or strategy=ddp",
            )

        assert isinstance(context.model, Agent)
        self.context = context
        self.agent = context.model

        # The settings that a resumed run must keep.
        self.shape = [context.global_batch, self.options.minibatches, self.options.epochs]

        # The cohorts of this rank, and the environments in each.
        self.cohorts = [self._make_cohort(index) for index in context.mine]
        self.sizes = [len(cohort.market.envs) for cohort in self.cohorts]

        # Environments on all ranks, and the number of this rank's first one; its others follow.
        self.environments = context.global_batch * self.options.minibatches
        self.first = self.cohorts[0].first

        # For each cohort of all ranks the sum and the weight of the KL divergence in this epoch.
        count = -(-context.global_batch // context.micro_batch_size)
        self.kl = torch.zeros(count, 2, dtype=torch.float64, device=context.device)
        self.banner = (
            f"rollouts of {self.options.rollout} days in {self.environments} environments, up to "
            f"{context.micro_batch_size * self.options.minibatches} at a time; at most {self.options.steps} steps from "
            "each"
        )

    def _make_cohort(self, index: int) -> Cohort:
        """Make the environments of micro-batch `index` of the global step."""
        context, minibatches = self.context, self.options.minibatches
        first = index * context.micro_batch_size
        end = min(first + context.micro_batch_size, context.global_batch)
        envs = torch.arange(first * minibatches, end * minibatches, device=context.device)
        assets = (self.agent.shape.assets,) if self.agent.shape.value_per_asset else ()
        return Cohort(
            first * minibatches,
            # Staggered, or all environments would be in the same part of their episodes in every rollout.
            self.game.open(context.seed, envs, stagger=True),
            self.agent.initial_state(len(envs), context.device),
            torch.zeros(len(envs), *assets, dtype=torch.float64, device=context.device),
        )

    # ---- batches ----

    def take(self) -> StepBatches:
        if self.days is None:
            self._collect()

        micro_batches = [self._micro_batch(local) for local in range(len(self.cohorts))]
        return StepBatches(len(micro_batches), micro_batches, self.context.global_batch)

    def note_kl(self, cohort: int, total: Tensor, weight: int) -> None:
        """Add the KL divergence of a micro-batch: how far the policy has moved from the one that traded."""
        if self.options.target_kl is not None:
            self.kl[cohort, 0] += total.detach()
            self.kl[cohort, 1] += weight

    def commit(self, batches: StepBatches, result: StepResult | None) -> None:
        self.cursor += 1
        if self.cursor % self.options.minibatches:
            return

        # At the end of an epoch. The KL divergence is checked first: every rank must take part in that.
        if self._moved_too_far() or self.cursor == self.options.steps:
            self.days = None
            self.cursor = 0
            self.update += 1

    def _moved_too_far(self) -> bool:
        """Compare the KL divergence of all ranks with its target, so that all ranks make the same decision."""
        if self.options.target_kl is None:
            return False

        # The host waits for the device here, once an epoch.
        total, weight = self._gathered_kl().sum(dim=0).tolist()
        self.kl.zero_()
        return total > self.options.target_kl * weight

    def _micro_batch(self, local: int) -> MicroBatch:
        """Return the environments of this rank's cohort number `local` that are in the current minibatch."""
        assert self.days is not None
        cohort, chosen = self.cohorts[local], self._assigned[local][self.cursor]
        rows = cohort.first - self.first + chosen.to(self.context.device, non_blocking=True)
        data: dict[str, Any] = {name: self.days[name][rows] for name in self.loss_fields}

        # Normalised over the whole minibatch, which all ranks share.
        mean, std = self.advantage_stats[self.cursor]
        data["advantages"] = (data["advantages"] - mean) / (std + 1e-8)

        # The first updates only teach the first stage to foresee.
        index = self.context.mine[local]
        data |= {"cohort": index, "teaching": self.update < self.options.foresight}
        return MicroBatch(data, index, len(chosen), self.update, cohort.first + chosen)

    def _assignments(self) -> list[Tensor]:
        cohorts = zip(self.cohorts, self.sizes, strict=True)
        return [assign(cohort.first, size, self.options, self.context.seed, self.update) for cohort, size in cohorts]

    # ---- trading ----

    def _collect(self) -> None:
        """Trade for a rollout and compute what the loss learns from it."""
        options, seed = self.options, self.context.seed

        # A cost from the start can teach an agent never to trade at all.
        costs = min(1.0, self.update / options.cost_warmup) if options.cost_warmup else 1.0
        traded = [cohort.trade(self.agent, options.rollout, seed, self.update, costs) for cohort in self.cohorts]
        sums = [cohort.running_sums(days, options.discount) for cohort, days in zip(self.cohorts, traded, strict=True)]
        if options.normalise:
            self.rewards = self._merged(sums, self.rewards)

        days = {name: torch.cat([part[name] for part in traded]) for name in traded[0]}

        # The value head predicts normalised targets: its outputs are brought back to the scale of rewards.
        values = torch.cat([days["values"], days.pop("after")[:, None]], dim=1).double()
        values = values * self.values.std + self.values.mean
        gained = advantages(days["rewards"] / self.rewards.std, values, days, options.discount, options.trace)
        returns = gained + values[:, :-1]
        if options.normalise:
            self.values = self._merged(list(returns.split(self.sizes)), self.values)

        days["advantages"] = gained.float()
        days["targets"] = ((returns - self.values.mean) / self.values.std).float()

        self.days = {name: days[name] for name in self.loss_fields}
        self._assigned = self._assignments()
        self.advantage_stats = self._advantage_stats(gained)

    def _advantage_stats(self, gained: Tensor) -> list[list[float]]:
        """Return mean and deviation of the advantages of every minibatch, over all ranks, with one all-reduce."""
        per_cohort = []
        for cohort, assigned in zip(gained.split(self.sizes), self._assigned, strict=True):
            minibatches = assigned.to(cohort.device, non_blocking=True)
            per_cohort.append(torch.stack([stats_of(cohort[rows]) for rows in minibatches]))

        per_minibatch = self._gather_cohorts(torch.stack(per_cohort)).transpose(0, 1)  # (minibatches, cohorts, 3)
        merged = [RunningStats().merged(cohorts) for cohorts in per_minibatch.tolist()]
        return [[stats.mean, stats.std] for stats in merged]

    def _merged(self, per_cohort: list[Tensor], before: RunningStats) -> RunningStats:
        parts = self._gather_cohorts(torch.stack([stats_of(values) for values in per_cohort]))
        return before.merged(parts.tolist())

    # ---- all ranks ----

    def _gathered_kl(self) -> Tensor:
        first = self.context.mine[0]
        return self._gather_cohorts(self.kl[first : first + len(self.cohorts)])

    def _gather_cohorts(self, local_rows: Tensor) -> Tensor:
        return self._gather(local_rows, self.context.mine[0], len(self.kl))

    def _gather(self, local_rows: Tensor, first: int, total: int) -> Tensor:
        """Return the rows of every rank in order; `local_rows`, those of this rank, begin at `first`."""
        full = torch.zeros(total, *local_rows.shape[1:], dtype=local_rows.dtype, device=local_rows.device)
        full[first : first + len(local_rows)] = local_rows
        # Summed as bytes, which are 0 on all ranks but one: exact for any kind of number.
        self.context.all_reduce(full.flatten().view(torch.uint8))
        return full

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all environments. Collective: every rank must call it."""
        parts = {
            "episode": [cohort.market.episode for cohort in self.cohorts],
            "day": [cohort.market.day for cohort in self.cohorts],
            "position": [cohort.market.position for cohort in self.cohorts],
            "hidden": [cohort.state[0] for cohort in self.cohorts],
            "cell": [cohort.state[1] for cohort in self.cohorts],
            "discounted": [cohort.discounted for cohort in self.cohorts],
        }
        environments = self.first, self.environments
        return {
            "update": self.update,
            "cursor": self.cursor,
            "shape": self.shape,
            "rewards": list(astuple(self.rewards)),
            "values": list(astuple(self.values)),
            "environments": {name: self._gather(torch.cat(part), *environments) for name, part in parts.items()},
            "kl": self._gathered_kl(),
            "days": self.days and {name: self._gather(part, *environments) for name, part in self.days.items()},
            "norms": self.advantage_stats if self.days else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["shape"] != self.shape:
            text = "global_batch={} task.minibatches={} task.epochs={}"
            saved = text.format(*state["shape"])
            raise UserError(
                f"the checkpoint has the environments of {saved}, and this run has {text.format(*self.shape)}",
                "",
                f"resume with {saved}",
            )

        self.update = state["update"]
        self.cursor = state["cursor"]
        self.rewards = RunningStats(*state["rewards"])
        self.values = RunningStats(*state["values"])

        # Every rank takes the rows of its own environments, however many ranks saved them.
        parts = state["environments"]
        for cohort, size in zip(self.cohorts, self.sizes, strict=True):
            rows = slice(cohort.first, cohort.first + size)
            for name in ("episode", "day", "position"):
                setattr(cohort.market, name, parts[name][rows].clone())

            cohort.market.draw()
            cohort.state = parts["hidden"][rows].clone(), parts["cell"][rows].clone()
            cohort.discounted = parts["discounted"][rows].clone()

        own_rows = slice(self.first, self.first + sum(self.sizes))
        self.days = state["days"] and {name: part[own_rows] for name, part in state["days"].items()}
        self.advantage_stats = state["norms"]
        self._assigned = self._assignments()

        # Another micro_batch makes other cohorts. Only the sum over cohorts is compared with target_kl.
        self.kl.zero_()
        if len(state["kl"]) == len(self.kl):
            self.kl += state["kl"]
        else:
            self.kl[0] += state["kl"].sum(dim=0)


def assign(first: int, count: int, options: RolloutOptions, seed: int, update: int) -> Tensor:
    """Assign the environments `first` ... `first + count - 1` to the minibatches of an update.

    Return (epochs * minibatches, positions): for every minibatch one environment of each position, counted from
    `first`.
    """
    envs = torch.arange(count).view(-1, options.minibatches)
    epochs = torch.arange(options.epochs)[:, None, None]

    # Sorting random bits is a permutation (epochs, positions, minibatches) that depends on no rank and no generator.
    order = counter_rng.random_bits(seed, counter_rng.ORDER, update, epochs, first + envs).argsort(dim=-1)
    return envs.expand_as(order).gather(-1, order).transpose(1, 2).flatten(0, 1)
