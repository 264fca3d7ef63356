"""Rollouts as a source of batches: trade for a while, then learn from it for a few epochs, and so on.

A sample is the days of one environment. Every place in the batch has environments of its own, one for each minibatch,
and every epoch deals them anew: a minibatch holds one environment of each place. Ranks hold places, as they hold
micro-batches. So no rank and no number of ranks decides who trades with which random numbers, nor who is in a minibatch
with whom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.recipes.clstm_ppo import noise
from lockstep.recipes.clstm_ppo.game import Game
from lockstep.recipes.clstm_ppo.model import Agent
from lockstep.recipes.clstm_ppo.moments import Moments, merge_all, moments_of
from lockstep.recipes.clstm_ppo.rollout import Block, Days, advantages
from lockstep.task import MicroBatch, SourceContext, StepBatches, StepResult

KEPT = ("windows", "starts", "actions", "logp", "hidden", "cell", "rewards", "advantages", "targets")
TAUGHT = ("moved",)  # also kept while the agent is taught to foresee


@dataclass(frozen=True)
class Settings:
    days: int = 64  # of a rollout
    minibatches: int = 4
    epochs: int = 4
    discount: float = 0.99
    trace: float = 0.95  # lambda of the advantages
    target_kl: float | None = None  # leave out the rest of the epochs when the policy has moved this far
    cost_warmup: int = 0  # updates until trading costs what it costs; before, less
    normalise: bool = True  # rewards, and what values are compared with
    foresight: int = 0  # updates that only teach the first stage what the coming day brings, before PPO begins


class Rollouts:
    """A BatchSource. Its state is the same on every rank: what the environments of all of them need to go on."""

    def __init__(self, game: Game, settings: Settings):
        self.game, self.settings = game, settings
        self.kept = KEPT + TAUGHT * bool(settings.foresight)
        self.update = self.cursor = 0  # rollouts ended; minibatches of this one that are done
        self.rewards, self.values = Moments(), Moments()
        self.days: Days | None = None  # of this rank's environments
        self._dealt: int | None = None  # the update for which the environments were dealt
        self.norms: list[list[float]] = []  # mean and deviation of the advantages of each minibatch

    def attach(self, around: SourceContext) -> str:
        """Place this rank's environments. What to say about the data."""
        if around.in_step and around.global_batch % (around.micro_batch * around.ranks):
            raise UserError(
                f"micro-batches of {around.micro_batch} on {around.ranks} ranks, whose forwards wait for each other",
                f"global_batch={around.global_batch}, with which they would trade in different numbers",
                f"type global_batch={around.micro_batch * around.ranks} or a multiple of it, or strategy=ddp",
            )
        self.around, self._dealt = around, None
        assert isinstance(around.model, Agent)
        self.agent = around.model
        self.count = -(-around.global_batch // around.micro_batch)  # blocks, on all ranks
        self.kl = torch.zeros(self.count, 2, dtype=torch.float64, device=around.device)  # sum and weight of each block
        self.blocks = [self._block(index) for index in around.mine]
        steps = self.settings.epochs * self.settings.minibatches
        return (
            f"rollouts of {self.settings.days} days in {self.environments} environments, up to "
            f"{around.micro_batch * self.settings.minibatches} at a time; at most {steps} steps from each"
        )

    @property
    def environments(self) -> int:
        """On all ranks."""
        return self.around.global_batch * self.settings.minibatches

    @property
    def teaching(self) -> bool:
        """This update teaches the first stage only."""
        return self.update < self.settings.foresight

    @property
    def first(self) -> int:
        """The first environment of this rank; the others follow it."""
        return self.around.mine[0] * self.around.micro_batch * self.settings.minibatches

    @property
    def sizes(self) -> list[int]:
        """Environments of each block of this rank."""
        return [len(block.market.envs) for block in self.blocks]

    # ---- batches ----

    def take(self) -> StepBatches:
        if self.days is None:
            self._collect()
        epoch, part = divmod(self.cursor, self.settings.minibatches)
        micros = [self._micro(place, epoch, part) for place in range(len(self.blocks))]
        return StepBatches(len(micros), micros, self.around.global_batch)

    def note_kl(self, block: int, total: Tensor, weight: int) -> None:
        """How far the policy has moved from the one that traded, from the loss of a micro-batch."""
        if self.settings.target_kl is not None:
            self.kl[block, 0] += total.detach()
            self.kl[block, 1] += weight

    def commit(self, share: StepBatches, result: StepResult | None) -> None:
        self.cursor += 1
        if self.cursor % self.settings.minibatches:
            return
        too_far = self._moved_too_far()
        if too_far or self.cursor == self.settings.epochs * self.settings.minibatches:
            self.days, self.cursor, self.update = None, 0, self.update + 1

    def _moved_too_far(self) -> bool:
        """At the end of an epoch, from the numbers of all ranks: all decide alike."""
        if self.settings.target_kl is None:
            return False
        total, weight = self._kl_of_all().sum(dim=0).tolist()  # the host waits for the device, once an epoch
        self.kl.zero_()
        return total > self.settings.target_kl * weight

    def _kl_of_all(self) -> Tensor:
        mine = self.around.mine
        return self._from_all(self.kl[mine[0] : mine[-1] + 1], mine[0], self.count)

    def _micro(self, place: int, epoch: int, part: int) -> MicroBatch:
        assert self.days is not None
        chosen, before = self._chosen(place, epoch, part), sum(self.sizes[:place])
        rows = before + self._rows(place, epoch, part)
        data: dict[str, Any] = {name: self.days[name][rows] for name in self.kept}
        mean, deviation = self.norms[epoch * self.settings.minibatches + part]
        data["advantages"] = (data["advantages"] - mean) / (deviation + 1e-8)
        block = self.around.mine[place]
        data |= {"block": block, "teaching": self.teaching}
        return MicroBatch(data, block, len(chosen), self.update, self.first + before + chosen)

    def _chosen(self, place: int, epoch: int, part: int) -> Tensor:
        """Which environments of a block are in a minibatch, counted from its first."""
        if self._dealt != self.update:
            self._deals, self._dealt = [self._deal(place) for place in range(len(self.blocks))], self.update
        return self._deals[place][epoch, :, part]

    def _rows(self, place: int, epoch: int, part: int) -> Tensor:
        """The same, to index what lies on the device."""
        return self._chosen(place, epoch, part).to(self.around.device, non_blocking=True)

    def _deal(self, place: int) -> Tensor:
        """Of all epochs of this update: (epochs, places of the batch, minibatches)."""
        envs = torch.arange(self.sizes[place]).view(-1, self.settings.minibatches)
        keys, epochs = self.first + sum(self.sizes[:place]) + envs, torch.arange(self.settings.epochs)[:, None, None]
        order = noise.hashed(self.around.seed, noise.ORDER, self.update, epochs, keys).argsort(dim=-1)
        return envs.expand_as(order).gather(-1, order)

    # ---- trading ----

    def _collect(self) -> None:
        settings = self.settings
        costs = min(1.0, self.update / settings.cost_warmup) if settings.cost_warmup else 1.0
        blocks = [b.trade(self.agent, settings.days, self.around.seed, self.update, costs) for b in self.blocks]
        sums = [b.running_sums(days, settings.discount) for b, days in zip(self.blocks, blocks, strict=True)]
        if settings.normalise:
            self.rewards = self._merged(sums, self.rewards)
        days = {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
        values = torch.cat([days["values"], days.pop("after")[:, None]], dim=1).double()
        values = values * self.values.deviation + self.values.mean
        scaled = days["rewards"] / self.rewards.deviation
        gained = advantages(scaled, values, days, settings.discount, settings.trace)
        returns = gained + values[:, :-1]
        if settings.normalise:
            self.values = self._merged(list(returns.split(self.sizes)), self.values)
        days["advantages"] = gained.float()
        days["targets"] = ((returns - self.values.mean) / self.values.deviation).float()
        self.days = {name: days[name] for name in self.kept}
        self.norms = self._norms(gained)

    def _norms(self, gained: Tensor) -> list[list[float]]:
        """Mean and deviation of the advantages in every minibatch to come, over all ranks, with one exchange."""
        epochs, parts = range(self.settings.epochs), range(self.settings.minibatches)
        per_block = [
            torch.stack([moments_of(block[self._rows(place, epoch, part)]) for epoch in epochs for part in parts])
            for place, block in enumerate(gained.split(self.sizes))
        ]
        everybody = self._from_blocks(per_block).transpose(0, 1)  # (minibatches, blocks, 3)
        merged = [merge_all(blocks) for blocks in everybody.tolist()]
        return [[found.mean, found.deviation] for found in merged]

    def _merged(self, per_block: list[Tensor], before: Moments) -> Moments:
        return merge_all(self._from_blocks([moments_of(part) for part in per_block]).tolist(), before)

    def _from_blocks(self, mine: list[Tensor]) -> Tensor:
        return self._from_all(torch.stack(mine), self.around.mine[0], self.count)

    def _from_all(self, mine: Tensor, first: int, total: int) -> Tensor:
        """The rows of every rank, in order; this rank's begin at `first`. Bytes are added, and all but one are 0: exact
        for any kind of number."""
        whole = torch.zeros(total, *mine.shape[1:], dtype=mine.dtype, device=mine.device)
        whole[first : first + len(mine)] = mine
        self.around.add(whole.flatten().view(torch.uint8))
        return whole

    # ---- state ----

    @property
    def shape(self) -> list[int]:
        """What must stay as it is while the run lasts."""
        return [self.around.global_batch, self.settings.minibatches, self.settings.epochs]

    def state_dict(self) -> dict[str, Any]:
        """All ranks must call this together."""
        parts = {
            "episode": [b.market.episode for b in self.blocks],
            "day": [b.market.day for b in self.blocks],
            "position": [b.market.position for b in self.blocks],
            "hidden": [b.state[0] for b in self.blocks],
            "cell": [b.state[1] for b in self.blocks],
            "discounted": [b.discounted for b in self.blocks],
        }
        return {
            "update": self.update,
            "cursor": self.cursor,
            "shape": self.shape,
            "rewards": self.rewards.as_list(),
            "values": self.values.as_list(),
            "environments": {name: self._of_environments(torch.cat(part)) for name, part in parts.items()},
            "kl": self._kl_of_all(),
            "days": self.days and {name: self._of_environments(part) for name, part in self.days.items()},
            "norms": self.norms if self.days else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["shape"] != self.shape:
            keys = ("global_batch", "task.minibatches", "task.epochs")
            now, then = (
                " ".join(f"{key}={value}" for key, value in zip(keys, shape, strict=True))
                for shape in (self.shape, state["shape"])
            )
            raise UserError("to go on with the same environments", f"{now}, and not {then}", f"type {then}")
        self.update, self.cursor = state["update"], state["cursor"]
        self.rewards, self.values = Moments(*state["rewards"]), Moments(*state["values"])
        parts, first = state["environments"], self.first
        for block in self.blocks:
            rows = slice(first, first := first + len(block.market.envs))
            for name in ("episode", "day", "position"):
                setattr(block.market, name, parts[name][rows].clone())
            block.market.draw()
            block.state = parts["hidden"][rows].clone(), parts["cell"][rows].clone()
            block.discounted = parts["discounted"][rows].clone()
        self.days = state["days"] and {name: part[self.first : first] for name, part in state["days"].items()}
        self.norms = state["norms"]
        self.kl.zero_()
        if len(state["kl"]) == self.count:
            self.kl += state["kl"]
        else:  # cut into other micro-batches since
            self.kl[0] += state["kl"].sum(dim=0)

    def _of_environments(self, mine: Tensor) -> Tensor:
        return self._from_all(mine, self.first, self.environments)

    def _block(self, index: int) -> Block:
        device, parts = self.around.device, self.settings.minibatches
        first, beyond = index * self.around.micro_batch, (index + 1) * self.around.micro_batch
        envs = torch.arange(first * parts, min(beyond, self.around.global_batch) * parts, device=device)
        market = self.game.open(self.around.seed, envs, stagger=True)
        blank = self.agent.blank(len(envs), device)
        each = (self.game.assets,) if self.agent.shape.each else ()
        return Block(market, blank, torch.zeros(len(envs), *each, dtype=torch.float64, device=device))
