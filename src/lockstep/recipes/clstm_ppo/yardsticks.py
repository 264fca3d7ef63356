"""What other policies earn in the same episodes: holding, chance, a Bayes filter, and one who sees the regime.

A score is what an episode earned in all, as a share of the capital: the sum of its days.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.recipes.clstm_ppo import noise
from lockstep.recipes.clstm_ppo.game import Environments
from lockstep.recipes.clstm_ppo.market import HELD_OUT, RegimeSeries, Rules, Series, VectorMarket
from lockstep.recipes.clstm_ppo.model import Agent, State

Policy = Callable[[VectorMarket], Tensor]  # actions (n, K) for the coming day

THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8)
DAYS_A_YEAR = 252


@dataclass(frozen=True)
class Played:
    """One episode in each of n environments."""

    earned: Tensor  # (n, D) a day
    trades: Tensor  # (n,) changes of a position

    @property
    def scores(self) -> Tensor:
        return self.earned.sum(dim=1)

    def report(self) -> dict[str, Tensor]:
        """The measures of the trading literature, of every episode (n,), with earnings taken as log-returns."""
        wealth = self.earned.cumsum(dim=1).exp()
        best = wealth.cummax(dim=1).values.clamp(min=1.0)
        a_year = self.earned.mean(dim=1) / (self.earned.std(dim=1) + 1e-12) * DAYS_A_YEAR**0.5
        return {
            "cumulative_return": wealth[:, -1] - 1,
            "max_earning_rate": best[:, -1] - 1,
            "max_pullback": (1 - wealth / best).amax(dim=1),
            "profit_per_trade": (wealth[:, -1] - 1) / self.trades.clamp(min=1),
            "sharpe": a_year,
        }


def play(policy: Callable[[Any], Tensor], market: Environments, days: int) -> Played:
    """A whole episode of `days` with every environment, of which none has begun."""
    earned, trades = [], torch.zeros(len(market.envs), dtype=torch.float64, device=market.envs.device)
    for _ in range(days):
        before = market.position
        earned.append(market.step(policy(market))[0])
        trades += (market.held != before).sum(dim=1)
    return Played(torch.stack(earned, dim=1), trades)


def test_market(series: Series, rules: Rules, episodes: Tensor) -> VectorMarket:
    """Episodes that no training run sees."""
    return VectorMarket(series, rules, HELD_OUT + episodes)


class Greedy:
    """The agent, always with the action it likes best."""

    def __init__(self, agent: Agent):
        self.agent = agent
        self.state: State | None = None

    @torch.no_grad()
    def __call__(self, market: Environments) -> Tensor:
        self.state = self.state or self.agent.blank(len(market.envs), market.envs.device)
        logits, _, self.state, *_ = self.agent(market.windows()[None], self.state, (market.day == 0)[None])
        return logits[0].argmax(-1)


def hold(market: VectorMarket) -> Tensor:
    """All of it, from the first day on."""
    return torch.full_like(market.position, 2 * market.rules.lots, dtype=torch.int64)


def at_random(market: VectorMarket) -> Tensor:
    kinds = torch.arange(market.series.assets, device=market.envs.device)
    drawn = noise.uniform(noise.RANDOM_POLICY, market.envs[:, None], market.day[:, None], kinds)
    return (drawn * market.rules.choices).long()


class Oracle:
    """Who sees the regime of the coming day."""

    def __init__(self, market: VectorMarket):
        assert isinstance(market.series, RegimeSeries)
        length = market.rules.window + market.rules.days
        self.regimes = market.series.regimes(market.envs, market.episode, length)

    def __call__(self, market: VectorMarket) -> Tensor:
        day = (market.rules.window + market.day)[:, None, None].expand(-1, 1, market.series.assets)
        return ((self.regimes.gather(1, day)[:, 0] + 1) * market.rules.lots).long()


class Bayes:
    """Knows how the market works, and sees returns: the chance that the regime is up, updated day by day. It turns
    when that chance passes `threshold`, and stays as it is in between, since turning costs. Exact for one asset; with
    a common market factor it leaves out what the other assets tell."""

    def __init__(self, market: VectorMarket, threshold: float):
        assert isinstance(market.series, RegimeSeries)
        self.series, self.threshold = market.series, threshold
        self.odds = torch.zeros_like(market.position)  # logarithm of up against down, for the coming day
        self.returns = market.returns
        for day in range(market.rules.window):
            self._see(self.returns[:, day])

    def __call__(self, market: VectorMarket) -> Tensor:
        if market.day[0]:  # what the last day brought
            self._see(self.returns[:, market.rules.window + int(market.day[0]) - 1])
        up, lots = torch.sigmoid(self.odds), market.rules.lots
        now = ((market.position + 1) * lots).round().long()
        now = torch.where(up > self.threshold, 2 * lots, now)
        return torch.where(up < 1 - self.threshold, 0, now)

    def _see(self, returns: Tensor) -> None:
        series = self.series
        known = torch.sigmoid(self.odds + 2 * series.drift / series.volatility**2 * returns)
        tomorrow = known * (1 - series.flip) + (1 - known) * series.flip
        self.odds = torch.logit(tomorrow)


def yardsticks(series: Series, rules: Rules, episodes: int) -> dict[str, float]:
    """Mean scores over the test episodes. Of the Bayes filters the best is taken."""

    def score(make: Callable[[VectorMarket], Policy]) -> float:
        market = test_market(series, rules, torch.arange(episodes))
        return float(play(make(market), market, rules.days).scores.mean())

    found = {"hold": score(lambda _: hold), "random": score(lambda _: at_random)}
    if isinstance(series, RegimeSeries):
        found["bayes"] = max(score(lambda market, t=t: Bayes(market, t)) for t in THRESHOLDS)
        found["oracle"] = score(Oracle)
    return found
