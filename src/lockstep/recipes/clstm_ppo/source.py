"""Rollouts as a source of batches: trade for a while, then learn from those days for a few epochs, and so on.

A sample is the days of one environment. Every position of the global batch owns one environment for each minibatch,
and every epoch deals them again: a minibatch holds one environment of each position. Ranks hold positions as they hold
micro-batches. So neither the rank nor the number of ranks decides which random numbers an environment gets, or which
environments share a minibatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.recipes.clstm_ppo import counter_rng
from lockstep.recipes.clstm_ppo.game import Game
from lockstep.recipes.clstm_ppo.model import Agent
from lockstep.recipes.clstm_ppo.rollout import Block, Days, RunningStats, advantages, merge_all, stats_of
from lockstep.task import MicroBatch, SourceContext, StepBatches, StepResult

# What the loss needs of the days of a rollout; a checkpoint in the middle of an update holds it too.
KEPT = ("windows", "starts", "actions", "logp", "hidden", "cell", "rewards", "advantages", "targets")

# Kept as well where the agent is taught to foresee.
KEPT_FOR_FORESIGHT = ("moved",)


@dataclass(frozen=True)
class RolloutOptions:
    """Options of an update: how much is traded, and how often it is learnt from."""

    rollout: int = 64
    """Days that every environment trades between two updates."""

    minibatches: int = 4
    """Minibatches, each one optimizer step, of an epoch; also how many environments trade for each position of the
    global batch."""

    epochs: int = 4
    """Passes over the days of a rollout."""

    discount: float = 0.99
    """Discount of later rewards for each day."""

    trace: float = 0.95
    """Lambda of generalised advantage estimation."""

    target_kl: float | None = None
    """Skip the remaining epochs of an update when the policy has moved this far."""

    cost_warmup: int = 0
    """Updates until trading costs what it costs; before that it costs less."""

    normalise: bool = True
    """Scale rewards, and the targets of the value, by their running statistics."""

    foresight: int = 0
    """Updates before PPO that only teach the first stage what the coming day brings."""

    @property
    def steps(self) -> int:
        """Optimizer steps of an update, at most."""
        return self.epochs * self.minibatches


class Rollouts:
    """A BatchSource. Its state is the same on every rank: what all environments need to continue."""

    def __init__(self, game: Game, options: RolloutOptions):
        self.game = game
        self.options = options
        self.kept = KEPT + KEPT_FOR_FORESIGHT * bool(options.foresight)

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

        # For each block of this rank, which of its environments are in every minibatch of the update; see `deal`.
        self._deals: list[Tensor] = []

    def attach(self, context: SourceContext) -> str:
        """Make this rank's environments. Returns a line about the data."""
        if context.collective_forwards and context.global_batch % (context.micro_batch * context.ranks):
            raise UserError(
                f"global_batch={context.global_batch} gives {context.ranks} ranks different numbers of micro-batches",
                f"micro_batch={context.micro_batch}, and a strategy whose forwards wait for each other",
                f"type global_batch={context.micro_batch * context.ranks} or a multiple of it, or strategy=ddp",
            )
        assert isinstance(context.model, Agent)
        self.context = context
        self.agent = context.model

        # Blocks of all ranks, and for each the sum and the weight of the KL divergence in this epoch.
        self.block_count = -(-context.global_batch // context.micro_batch)
        self.kl = torch.zeros(self.block_count, 2, dtype=torch.float64, device=context.device)
        self.blocks = [self._block(index) for index in context.mine]
        return (
            f"rollouts of {self.options.rollout} days in {self.environments} environments, up to "
            f"{context.micro_batch * self.options.minibatches} at a time; at most {self.options.steps} steps from each"
        )

    def _block(self, index: int) -> Block:
        """Make the block of micro-batch `index` of the global step."""
        context, parts = self.context, self.options.minibatches
        first = index * context.micro_batch
        end = min(first + context.micro_batch, context.global_batch)
        envs = torch.arange(first * parts, end * parts, device=context.device)

        # Staggered, or all environments would be in the same part of their episodes in every rollout.
        market = self.game.open(context.seed, envs, stagger=True)
        state = self.agent.initial_state(len(envs), context.device)
        assets = (self.agent.shape.assets,) if self.agent.shape.value_per_asset else ()
        discounted = torch.zeros(len(envs), *assets, dtype=torch.float64, device=context.device)
        return Block(first * parts, market, state, discounted)

    @property
    def environments(self) -> int:
        """The number of environments on all ranks."""
        return self.context.global_batch * self.options.minibatches

    @property
    def teaching(self) -> bool:
        """Whether this update only teaches the first stage to foresee."""
        return self.update < self.options.foresight

    @property
    def first(self) -> int:
        """The number of this rank's first environment; its others follow."""
        return self.context.mine[0] * self.context.micro_batch * self.options.minibatches

    @property
    def sizes(self) -> list[int]:
        """Environments in each block of this rank."""
        return [len(block.market.envs) for block in self.blocks]

    # ---- batches ----

    def take(self) -> StepBatches:
        if self.days is None:
            self._collect()
        micros = [self._micro_batch(local) for local in range(len(self.blocks))]
        return StepBatches(len(micros), micros, self.context.global_batch)

    def note_kl(self, block: int, total: Tensor, weight: int) -> None:
        """Add the KL divergence of a micro-batch: how far the policy has moved from the one that traded."""
        if self.options.target_kl is not None:
            self.kl[block, 0] += total.detach()
            self.kl[block, 1] += weight

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
        """Compare the KL divergence of all ranks with its target, so that all ranks decide alike."""
        if self.options.target_kl is None:
            return False
        # The host waits for the device here, once an epoch.
        total, weight = self._gathered_kl().sum(dim=0).tolist()
        self.kl.zero_()
        return total > self.options.target_kl * weight

    def _gathered_kl(self) -> Tensor:
        mine = self.context.mine
        return self._gather(self.kl[mine[0] : mine[-1] + 1], mine[0], self.block_count)

    def _micro_batch(self, local: int) -> MicroBatch:
        """Return the part of block number `local` of this rank in the current minibatch."""
        assert self.days is not None
        block, chosen = self.blocks[local], self._deals[local][self.cursor]
        rows = block.first - self.first + chosen.to(self.context.device, non_blocking=True)
        data: dict[str, Any] = {name: self.days[name][rows] for name in self.kept}

        # Normalised over the minibatch of all ranks, of which this is one part.
        mean, std = self.advantage_stats[self.cursor]
        data["advantages"] = (data["advantages"] - mean) / (std + 1e-8)
        index = self.context.mine[local]
        data |= {"block": index, "teaching": self.teaching}
        return MicroBatch(data, index, len(chosen), self.update, block.first + chosen)

    def _deal(self) -> list[Tensor]:
        """Deal the environments of each block to the minibatches of this update."""
        blocks = zip(self.blocks, self.sizes, strict=True)
        return [deal(block.first, size, self.options, self.context.seed, self.update) for block, size in blocks]

    # ---- trading ----

    def _collect(self) -> None:
        """Trade for a rollout, and compute what the loss learns from it."""
        options, seed = self.options, self.context.seed
        # A cost from the start can teach an agent never to trade at all.
        costs = min(1.0, self.update / options.cost_warmup) if options.cost_warmup else 1.0
        traded = [block.trade(self.agent, options.rollout, seed, self.update, costs) for block in self.blocks]
        sums = [block.running_sums(days, options.discount) for block, days in zip(self.blocks, traded, strict=True)]
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

        self.days = {name: days[name] for name in self.kept}
        self._deals = self._deal()
        self.advantage_stats = self._advantage_stats(gained)

    def _advantage_stats(self, gained: Tensor) -> list[list[float]]:
        """Return mean and deviation of the advantages of every minibatch, over all ranks, with one all-reduce."""
        per_block = []
        for block, dealt in zip(gained.split(self.sizes), self._deals, strict=True):
            rows = dealt.to(block.device, non_blocking=True)
            per_block.append(torch.stack([stats_of(block[chosen]) for chosen in rows]))
        per_minibatch = self._gather_blocks(per_block).transpose(0, 1)  # (minibatches, blocks, 3)
        merged = [merge_all(blocks) for blocks in per_minibatch.tolist()]
        return [[stats.mean, stats.std] for stats in merged]

    def _merged(self, per_block: list[Tensor], before: RunningStats) -> RunningStats:
        return merge_all(self._gather_blocks([stats_of(part) for part in per_block]).tolist(), before)

    def _gather_blocks(self, mine: list[Tensor]) -> Tensor:
        return self._gather(torch.stack(mine), self.context.mine[0], self.block_count)

    def _gather(self, mine: Tensor, first: int, total: int) -> Tensor:
        """Return the rows of every rank in order, of which this rank's `mine` begin at `first`."""
        full = torch.zeros(total, *mine.shape[1:], dtype=mine.dtype, device=mine.device)
        full[first : first + len(mine)] = mine
        # Summed as bytes, of which all ranks but one have 0: exact for any kind of number.
        self.context.add(full.flatten().view(torch.uint8))
        return full

    # ---- state ----

    @property
    def shape(self) -> list[int]:
        """The settings that a resumed run must keep."""
        return [self.context.global_batch, self.options.minibatches, self.options.epochs]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all environments. Collective: every rank must call it."""
        parts = {
            "episode": [block.market.episode for block in self.blocks],
            "day": [block.market.day for block in self.blocks],
            "position": [block.market.position for block in self.blocks],
            "hidden": [block.state[0] for block in self.blocks],
            "cell": [block.state[1] for block in self.blocks],
            "discounted": [block.discounted for block in self.blocks],
        }
        return {
            "update": self.update,
            "cursor": self.cursor,
            "shape": self.shape,
            "rewards": self.rewards.as_list(),
            "values": self.values.as_list(),
            "environments": {name: self._gather_environments(torch.cat(part)) for name, part in parts.items()},
            "kl": self._gathered_kl(),
            "days": self.days and {name: self._gather_environments(part) for name, part in self.days.items()},
            "norms": self.advantage_stats if self.days else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check_shape(state["shape"])
        self.update = state["update"]
        self.cursor = state["cursor"]
        self.rewards = RunningStats(*state["rewards"])
        self.values = RunningStats(*state["values"])

        # Every rank takes the rows of its own environments, however many ranks have saved them.
        parts, first = state["environments"], self.first
        for block in self.blocks:
            rows = slice(first, first := first + len(block.market.envs))
            for name in ("episode", "day", "position"):
                setattr(block.market, name, parts[name][rows].clone())
            block.market.draw()
            block.state = parts["hidden"][rows].clone(), parts["cell"][rows].clone()
            block.discounted = parts["discounted"][rows].clone()
        self.days = state["days"] and {name: part[self.first : first] for name, part in state["days"].items()}
        self.advantage_stats = state["norms"]
        self._deals = self._deal()

        # Another micro_batch makes other blocks. Only the sum over blocks is compared with target_kl.
        self.kl.zero_()
        if len(state["kl"]) == self.block_count:
            self.kl += state["kl"]
        else:
            self.kl[0] += state["kl"].sum(dim=0)

    def _check_shape(self, saved: list[int]) -> None:
        if saved == self.shape:
            return
        keys = ("global_batch", "task.minibatches", "task.epochs")
        now = " ".join(f"{key}={value}" for key, value in zip(keys, self.shape, strict=True))
        then = " ".join(f"{key}={value}" for key, value in zip(keys, saved, strict=True))
        raise UserError(
            f"the checkpoint has the environments of {then}, and this run has {now}", "", f"resume with {then}"
        )

    def _gather_environments(self, mine: Tensor) -> Tensor:
        return self._gather(mine, self.first, self.environments)


def deal(first: int, count: int, options: RolloutOptions, seed: int, update: int) -> Tensor:
    """Deal the environments `first` ... `first + count - 1` to the minibatches of an update.

    Returns (epochs * minibatches, positions): for every minibatch one environment of each position, counted from
    `first`.
    """
    envs = torch.arange(count).view(-1, options.minibatches)
    epochs = torch.arange(options.epochs)[:, None, None]

    # Sorting random bits is a permutation that depends on no rank and no generator.
    bits = counter_rng.random_bits(seed, counter_rng.ORDER, update, epochs, first + envs)
    order = bits.argsort(dim=-1)  # (epochs, positions, minibatches)
    return envs.expand_as(order).gather(-1, order).transpose(1, 2).flatten(0, 1)
