"""Rollouts as a source of batches: trade for a while, then learn from it for a few epochs, and so on.

A sample is the days of one environment. The environments are dealt to blocks, one for each micro-batch of a step, and
blocks to ranks: a minibatch takes equally many environments from every block. So no rank and no number of ranks decides
who trades with which random numbers, nor who is in a minibatch with whom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.recipes.clstm_ppo import noise
from lockstep.recipes.clstm_ppo.market import Rules, Series, VectorMarket
from lockstep.recipes.clstm_ppo.model import Agent
from lockstep.recipes.clstm_ppo.moments import Moments, merge_all, moments_of
from lockstep.recipes.clstm_ppo.rollout import Block, Days, advantages
from lockstep.task import MicroBatch, Share, StepResult, Surroundings

KEPT = ("windows", "starts", "actions", "logp", "hidden", "cell", "rewards", "advantages", "targets")


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


class Rollouts:
    """A BatchSource. Its state is the same on every rank: what the environments of all of them need to go on."""

    def __init__(self, series: Series, rules: Rules, settings: Settings):
        self.series, self.rules, self.settings = series, rules, settings
        self.update = self.cursor = 0  # rollouts ended; minibatches of this one that are done
        self.rewards, self.values = Moments(), Moments()
        self.days: Days | None = None  # of this rank's environments
        self.norms: list[list[float]] = []  # mean and deviation of the advantages of each minibatch

    def attach(self, around: Surroundings) -> str:
        """Place this rank's environments. What to say about the data."""
        count = -(-around.global_batch // around.micro_batch)
        self._check(around, count)
        self.around, self.count, self.size = around, count, around.micro_batch * self.settings.minibatches
        self.series = self.series.seeded(around.seed)
        assert isinstance(around.model, Agent)
        self.agent = around.model
        self.kl = torch.zeros(count, 2, dtype=torch.float64, device=around.device)  # sum and weight of each block
        self.blocks = [self._block(index) for index in around.mine]
        steps = self.settings.epochs * self.settings.minibatches
        return (
            f"rollouts of {self.settings.days} days in {count * self.size} environments, {self.size} at a time; up to "
            f"{steps} steps from each"
        )

    @property
    def envs(self) -> int:
        return self.count * self.size

    # ---- batches ----

    def take(self) -> Share:
        if self.days is None:
            self._collect()
        epoch, part = divmod(self.cursor, self.settings.minibatches)
        micros = [self._micro(place, epoch, part) for place in range(len(self.blocks))]
        return Share(len(micros), micros, self.around.global_batch)

    def note_kl(self, block: int, total: Tensor, weight: int) -> None:
        """How far the policy has moved from the one that traded, from the loss of a micro-batch."""
        if self.settings.target_kl is not None:
            self.kl[block, 0] += total.detach()
            self.kl[block, 1] += weight

    def commit(self, share: Share, result: StepResult | None) -> None:
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
        mine = torch.stack([self.kl[index] for index in self.around.mine])
        total, weight = self._from_all(mine).sum(dim=0).tolist()  # the host waits for the device, once an epoch
        self.kl.zero_()
        return total > self.settings.target_kl * weight

    def _micro(self, place: int, epoch: int, part: int) -> MicroBatch:
        assert self.days is not None
        chosen = self._chosen(place, epoch, part)
        rows = place * self.size + chosen
        data: dict[str, Any] = {name: self.days[name][rows] for name in KEPT}
        mean, deviation = self.norms[epoch * self.settings.minibatches + part]
        data["advantages"] = (data["advantages"] - mean) / (deviation + 1e-8)
        block = self.around.mine[place]
        ids = self.blocks[place].market.envs[chosen].cpu()
        return MicroBatch(data | {"block": block}, block, len(chosen), self.update, ids)

    def _chosen(self, place: int, epoch: int, part: int) -> Tensor:
        """Which environments of a block are in a minibatch: another deal in every epoch."""
        envs = self.blocks[place].market.envs
        order = noise.hashed(self.around.seed, noise.ORDER, self.update, epoch, envs).argsort()
        return order[part * self.around.micro_batch :][: self.around.micro_batch]

    # ---- trading ----

    def _collect(self) -> None:
        settings = self.settings
        warm = min(1.0, self.update / settings.cost_warmup) if settings.cost_warmup else 1.0
        cost = warm * self.rules.cost
        blocks = [b.trade(self.agent, settings.days, self.around.seed, self.update, cost) for b in self.blocks]
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
            self.values = self._merged(list(returns.split(self.size)), self.values)
        days["advantages"] = gained.float()
        days["targets"] = ((returns - self.values.mean) / self.values.deviation).float()
        self.days = {name: days[name] for name in KEPT}
        self.norms = self._norms(gained)

    def _norms(self, gained: Tensor) -> list[list[float]]:
        """Mean and deviation of the advantages in every minibatch to come, over all ranks, with one exchange."""
        epochs, parts = range(self.settings.epochs), range(self.settings.minibatches)
        per_block = [
            torch.stack([moments_of(block[self._chosen(place, epoch, part)]) for epoch in epochs for part in parts])
            for place, block in enumerate(gained.split(self.size))
        ]
        everybody = self._from_all(torch.stack(per_block)).transpose(0, 1)  # (minibatches, blocks, 3)
        merged = [merge_all(blocks) for blocks in everybody.tolist()]
        return [[found.mean, found.deviation] for found in merged]

    def _merged(self, per_block: list[Tensor], before: Moments) -> Moments:
        return merge_all(self._from_all(torch.stack([moments_of(part) for part in per_block])).tolist(), before)

    def _from_all(self, mine: Tensor) -> Tensor:
        """(my blocks, ...) or (my environments, ...) of every rank, in order. Bytes are added, and all but one are 0:
        exact for any kind of number."""
        each = len(mine) // len(self.blocks)
        whole = torch.zeros(self.count * each, *mine.shape[1:], dtype=mine.dtype, device=mine.device)
        first = self.around.mine[0] * each
        whole[first : first + len(mine)] = mine
        self.around.add(whole.flatten().view(torch.uint8))
        return whole

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """All ranks must call this together."""
        parts = {
            "episode": [b.market.episode for b in self.blocks],
            "day": [b.market.day for b in self.blocks],
            "position": [b.market.position for b in self.blocks],
            "hidden": [b.state[0] for b in self.blocks],
            "cell": [b.state[1] for b in self.blocks],
            "discounted": [b.discounted for b in self.blocks],
            "kl": [self.kl[index : index + 1] for index in self.around.mine],
        }
        days = None if self.days is None else {name: self._from_all(part) for name, part in self.days.items()}
        return {
            "update": self.update,
            "cursor": self.cursor,
            "blocks": [self.count, self.size],
            "rewards": self.rewards.as_list(),
            "values": self.values.as_list(),
            "environments": {name: self._from_all(torch.cat(part)) for name, part in parts.items()},
            "days": days,
            "norms": self.norms if days else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["blocks"] != [self.count, self.size]:
            count, size = state["blocks"]
            minibatches = self.settings.minibatches
            raise UserError(
                "to go on with the same environments",
                f"{self.count} blocks of {self.size}, {count} of {size} when the run was saved",
                f"type global_batch={count * size // minibatches} micro_batch={size // minibatches} "
                f"task.minibatches={minibatches}",
            )
        self.update, self.cursor = state["update"], state["cursor"]
        self.rewards, self.values = Moments(*state["rewards"]), Moments(*state["values"])
        parts = state["environments"]
        for index, block in zip(self.around.mine, self.blocks, strict=True):
            rows = slice(index * self.size, (index + 1) * self.size)
            for name in ("episode", "day", "position"):
                setattr(block.market, name, parts[name][rows].clone())
            block.market.draw()
            block.state = parts["hidden"][rows].clone(), parts["cell"][rows].clone()
            block.discounted = parts["discounted"][rows].clone()
        self.kl = parts["kl"].clone()
        mine = slice(self.around.mine[0] * self.size, (self.around.mine[-1] + 1) * self.size)
        self.days = state["days"] and {name: part[mine] for name, part in state["days"].items()}
        self.norms = state["norms"]

    def _block(self, index: int) -> Block:
        device = self.around.device
        envs = torch.arange(index * self.size, (index + 1) * self.size, device=device)
        market = VectorMarket(self.series, self.rules, envs, stagger=True)
        state = self.agent.blank(self.size, device)
        return Block(market, state, torch.zeros(self.size, dtype=torch.float64, device=device))

    def _check(self, around: Surroundings, count: int) -> None:
        if around.global_batch % around.micro_batch:
            raise UserError(
                f"global_batch={around.global_batch} in micro-batches of {around.micro_batch}",
                "a last one that is smaller; environments are dealt to equal blocks, one for each micro-batch",
                f"type micro_batch={max(d for d in range(1, around.micro_batch) if around.global_batch % d == 0)}",
            )
        if around.in_step and count != len(around.mine) * around.ranks:
            raise UserError(
                f"{count} micro-batches on {around.ranks} ranks, in a strategy whose forwards wait for each other",
                "ranks with different numbers of environments",
                f"type micro_batch={max(1, around.global_batch // around.ranks)}, or strategy=ddp",
            )
