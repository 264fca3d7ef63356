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


@dataclass
class Cohort:
    """The environments of one micro-batch, which go through every forward together.

    A cohort is the same on every rank that may hold it: with a fixed `micro_batch` it trades to the same bits on any
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

        # One day at a time: what the agent does decides what it sees next.
        traded: list[Days] = []
        for day in range(days):
            windows = market.windows()
            starts = market.day == 0
            logits, value, self.state, *_ = agent(windows[None], self.state, starts[None])
            actions = sampled(logits[0], drawn[:, day])
            reward, _ = market.step(actions, costs)

            # With credit for each asset, an asset is judged by what it earned itself.
            logp = log_probs(logits[0], actions)
            if agent.shape.value_per_asset:
                reward = market.gains
            else:
                logp = logp.sum(-1)

            traded.append(
                {
                    "windows": windows,
                    "starts": starts,
                    "actions": actions,
                    "logp": logp,
                    "values": value[0],
                    "rewards": reward * REWARD_SCALE,
                    "moved": market.moved,
                }
            )

        # The value of the day after the rollout, unless the episode has ended with it.
        over = market.day == 0
        _, after, *_ = agent(market.windows()[None], self.state, over[None])
        stacked = {name: torch.stack([day[name] for day in traded], dim=1) for name in traded[0]}
        return stacked | {"hidden": hidden, "cell": cell, "after": after[0], "over": over}

    def running_sums(self, days: Days, discount: float) -> Tensor:
        """Return the discounted sum of rewards up to each day, within its episode."""
        sums = []
        for reward, starts in zip(days["rewards"].unbind(1), days["starts"].unbind(1), strict=True):
            self.discounted = self.discounted * discount * _like(~starts, reward) + reward
            sums.append(self.discounted)

        return torch.stack(sums, dim=1)


def sampled(logits: Tensor, drawn: Tensor) -> Tensor:
    """Return actions (n, K) from logits (n, K, A) and one uniform number for each, `drawn` (n, K)."""
    # The last probability is not needed. A loop is faster on a GPU than a cumulative sum of a few numbers.
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
    estimates = []
    later = torch.zeros_like(values[:, 0])

    for day in reversed(range(rewards.shape[1])):
        continues = _like(~ends[:, day], later)

        # The temporal-difference error; beyond the end of an episode nothing is expected.
        error = rewards[:, day] + discount * values[:, day + 1] * continues - values[:, day]
        later = error + discount * trace * later * continues
        estimates.append(later)

    return torch.stack(estimates[::-1], dim=1)


def _like(flags: Tensor, values: Tensor) -> Tensor:
    """Return flags of environments (n,) in a shape that broadcasts with `values`, (n,) or (n, K)."""
    return flags if values.dim() == 1 else flags[:, None]


@dataclass(frozen=True)
class RunningStats:
    """Mean and variance of numbers that arrive in parts, merged by the formulas of Chan, Golub and LeVeque."""

    count: float = 0.0
    mean: float = 0.0
    # The sum of squared distances from the mean.
    squares: float = 0.0

    def merged(self, parts: Iterable[list[float]]) -> RunningStats:
        """Merge the `stats_of` further parts. Their order decides the last bits, so it must not depend on the ranks."""
        count, mean, squares = astuple(self)
        for part_count, part_mean, part_squares in parts:
            if part_count == 0:
                continue

            total = count + part_count

            # Differences of means, and never sums of squares, which would lose their digits.
            away = part_mean - mean
            mean = mean + away * part_count / total
            squares = squares + part_squares + away**2 * count * part_count / total
            count = total

        return RunningStats(count, mean, squares)

    @property
    def std(self) -> float:
        """The standard deviation, or 1 if there is none yet: it is divided by."""
        return (self.squares / self.count) ** 0.5 if self.squares > 0 else 1.0


def stats_of(values: Tensor) -> Tensor:
    """Return (count, mean, squares) of all values as a tensor (3,), float64, on their device."""
    exact = values.double().flatten()
    mean = exact.mean()
    return torch.stack([torch.full_like(mean, exact.numel()), mean, (exact - mean).square().sum()])
