"""Trading with the current policy, and what PPO computes from it: advantages and running statistics.

Tensors hold the environment first: (n, T, ...), for T days of n environments. With credit for each asset, rewards,
values and what follows from them are (n, T, K), otherwise (n, T).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from lockstep.recipes.clstm_ppo import counter_rng
from lockstep.recipes.clstm_ppo.game import Environments
from lockstep.recipes.clstm_ppo.market import REWARD_SCALE
from lockstep.recipes.clstm_ppo.model import Agent, State

Days = dict[str, Tensor]
DAILY = ("windows", "starts", "actions", "logp", "values", "rewards", "moved")


@dataclass
class Block:
    """The environments of one micro-batch, which go through every forward together.

    A block is the same on every rank that may hold it: with a fixed `micro_batch` it trades bit for bit alike on any
    number of ranks.
    """

    # The number of its first environment; the others follow.
    first: int
    market: Environments

    # The agent's memory of each environment.
    state: State

    # (n,) or (n, K): discounted sums of recent rewards, whose spread is the scale of rewards.
    discounted: Tensor

    @torch.no_grad()
    def trade(self, agent: Agent, days: int, seed: int, update: int, costs: float) -> Days:
        """Trade `days` days in every environment; an episode that ends is followed by a new one."""
        market = self.market
        market.renew()
        hidden, cell = self.state

        # (n, T, K): exploration depends on seed, update and environment only, never on a rank.
        device = market.envs.device
        clock = torch.arange(days, device=device)[:, None]
        assets = torch.arange(market.position.shape[1], device=device)
        drawn = counter_rng.uniform(seed, counter_rng.EXPLORE, update, market.envs[:, None, None], clock, assets)

        found: dict[str, list[Tensor]] = {name: [] for name in DAILY}
        for day in range(days):
            windows = market.windows()
            starts = market.day == 0
            # One day at a time: what the agent does decides what it sees next.
            logits, value, self.state, *_ = agent(windows[None], self.state, starts[None])
            actions = sampled(logits[0], drawn[:, day])
            reward, _ = market.step(actions, costs)
            logp = log_probs(logits[0], actions)
            if agent.shape.value_per_asset:
                # Each asset is credited with what it earned itself.
                reward = market.gains
            else:
                logp = logp.sum(-1)
            parts = windows, starts, actions, logp, value[0], reward * REWARD_SCALE, market.moved
            for name, part in zip(DAILY, parts, strict=True):
                found[name].append(part)

        # The value of the day after the rollout, unless the episode has ended with it.
        over = market.day == 0
        _, after, *_ = agent(market.windows()[None], self.state, over[None])
        traded = {name: torch.stack(parts, dim=1) for name, parts in found.items()}
        return traded | {"hidden": hidden, "cell": cell, "after": after[0], "over": over}

    def running_sums(self, days: Days, discount: float) -> Tensor:
        """Return the discounted sum of rewards up to each day, within its episode."""
        found = []
        for day in range(days["rewards"].shape[1]):
            reward = days["rewards"][:, day]
            continues = _like(~days["starts"][:, day], reward)
            self.discounted = self.discounted * discount * continues + reward
            found.append(self.discounted)
        return torch.stack(found, dim=1)


def sampled(logits: Tensor, drawn: Tensor) -> Tensor:
    """Return actions (n, K) from logits (n, K, A) and one uniform number for each, `drawn` (n, K)."""
    # The last probability is not needed. A loop, since a cumulative sum of so few is slow on a GPU.
    *chances, _ = logits.double().softmax(-1).unbind(-1)
    reached = torch.zeros_like(drawn)
    actions = torch.zeros_like(drawn, dtype=torch.int64)
    for chance in chances:
        reached = reached + chance
        actions = actions + (drawn >= reached)
    return actions


def log_probs(logits: Tensor, actions: Tensor) -> Tensor:
    """Return the log-probability of every asset's action: (..., K, A) and (..., K) -> (..., K)."""
    return logits.float().log_softmax(-1).gather(-1, actions[..., None]).squeeze(-1)


def advantages(rewards: Tensor, values: Tensor, days: Days, discount: float, trace: float) -> Tensor:
    """Return generalised advantage estimates in the shape of `rewards`; `values` has one day more."""
    # A start ends the episode on the day before it.
    ends = torch.cat([days["starts"][:, 1:], days["over"][:, None]], dim=1)
    found = []
    later = torch.zeros_like(values[:, 0])
    for day in reversed(range(rewards.shape[1])):
        continues = _like(~ends[:, day], later)
        # The temporal-difference error; beyond the end of an episode nothing is expected.
        error = rewards[:, day] + discount * values[:, day + 1] * continues - values[:, day]
        later = error + discount * trace * later * continues
        found.append(later)
    return torch.stack(found[::-1], dim=1)


def _like(flags: Tensor, values: Tensor) -> Tensor:
    """Return flags of environments (n,) in a shape that broadcasts with `values`, (n,) or (n, K)."""
    return flags if values.dim() == 1 else flags[:, None]


# ---- running statistics ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunningStats:
    """Mean and variance of numbers that arrive in parts, merged by the formulas of Chan, Golub and LeVeque."""

    count: float = 0.0
    mean: float = 0.0
    # The sum of squared distances from the mean.
    squares: float = 0.0

    def merged(self, other: RunningStats) -> RunningStats:
        if other.count == 0:
            return self
        count = self.count + other.count

        # Differences of means, and never sums of squares, which would lose their digits.
        away = other.mean - self.mean
        mean = self.mean + away * other.count / count
        squares = self.squares + other.squares + away**2 * self.count * other.count / count
        return RunningStats(count, mean, squares)

    @property
    def std(self) -> float:
        """The standard deviation, or 1 if there is none yet: it is divided by."""
        if self.count and self.squares > 0:
            return (self.squares / self.count) ** 0.5
        return 1.0

    def as_list(self) -> list[float]:
        return list(astuple(self))


def stats_of(values: Tensor) -> Tensor:
    """Return (count, mean, squares) of all values as a tensor (3,), float64, on their device."""
    exact = values.double().flatten()
    mean = exact.mean()
    return torch.stack([torch.full_like(mean, exact.numel()), mean, (exact - mean).square().sum()])


def merge_all(parts: Iterable[list[float]], begin: RunningStats = RunningStats()) -> RunningStats:
    """Merge one part after the other. Their order decides the last bits, so it must not depend on the ranks."""
    for part in parts:
        begin = begin.merged(RunningStats(*part))
    return begin
