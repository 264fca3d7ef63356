"""Scores of other policies in the same episodes: holding, chance, a Bayes filter, and an oracle of the regime.

The score of an episode is the sum of what its days earned, as a share of the capital.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lockstep.recipes.clstm_ppo import counter_rng
from lockstep.recipes.clstm_ppo.game import Environments
from lockstep.recipes.clstm_ppo.market import Rules, VectorMarket
from lockstep.recipes.clstm_ppo.model import Agent, State
from lockstep.recipes.clstm_ppo.series import HELD_OUT, RegimeSeries, Series

# A policy returns the actions (n, K) for the coming day.
Policy = Callable[..., Tensor]

# Probabilities at which a Bayes filter turns; the best of them is the baseline.
THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8)


@dataclass(frozen=True)
class Played:
    """The results of one episode in each of n environments."""

    earned: Tensor  # (n, D): what every day earned
    trades: Tensor  # (n,): how often a position changed

    @property
    def scores(self) -> Tensor:
        return self.earned.sum(dim=1)

    def report(self) -> dict[str, Tensor]:
        """Return the measures of the trading literature for every episode (n,), with earnings as log-returns."""
        wealth = self.earned.cumsum(dim=1).exp()

        # The initial capital is the first peak: a fall below it is also a pullback.
        best = wealth.cummax(dim=1).values.clamp(min=1.0)
        gained = wealth[:, -1] - 1
        return {
            "cumulative_return": gained,
            "max_earning_rate": best[:, -1] - 1,
            "max_pullback": (1 - wealth / best).amax(dim=1),
            "profit_per_trade": gained / self.trades.clamp(min=1),
            # A year has 252 days of trading.
            "sharpe": self.earned.mean(dim=1) / (self.earned.std(dim=1) + 1e-12) * 252**0.5,
        }


def play(policy: Policy, market: Environments, days: int) -> Played:
    """Play an episode of `days` in every environment. None of them may have begun."""
    earned = []
    trades = torch.zeros(len(market.envs), dtype=torch.float64, device=market.envs.device)
    for _ in range(days):
        before = market.position
        earned.append(market.step(policy(market))[0])
        trades += (market.held != before).sum(dim=1)

    return Played(torch.stack(earned, dim=1), trades)


@dataclass
class Greedy:
    agent: Agent
    state: State | None = None

    @torch.no_grad()
    def __call__(self, market: Environments) -> Tensor:
        # The number of environments is not known before the first day.
        self.state = self.state or self.agent.initial_state(len(market.envs), market.envs.device)
        logits, _, self.state, *_ = self.agent(market.windows()[None], self.state, (market.day == 0)[None])
        return logits[0].argmax(-1)


def hold(market: VectorMarket) -> Tensor:
    return torch.full_like(market.position, 2 * market.rules.lots, dtype=torch.int64)


def at_random(market: VectorMarket) -> Tensor:
    # Not the seed of the run: the baseline is the same for every run.
    assets = torch.arange(market.series.assets, device=market.envs.device)
    drawn = counter_rng.uniform(counter_rng.RANDOM_POLICY, market.envs[:, None], market.day[:, None], assets)
    return (drawn * market.rules.choices).long()


class Oracle:
    """A policy that sees the regime of the coming day."""

    def __init__(self, series: RegimeSeries, market: VectorMarket):
        self.regimes = series.regimes(market.envs, market.episode, market.rules.window + market.rules.days)

    def __call__(self, market: VectorMarket) -> Tensor:
        # The days of the window come before the first day of trading.
        day = (market.rules.window + market.day)[:, None, None]
        regime = torch.take_along_dim(self.regimes, day, dim=1)[:, 0]
        return ((regime + 1) * market.rules.lots).long()


class Bayes:
    """A policy that knows how the market works and updates the probability of an upward regime day by day.

    It turns when that probability passes `threshold`, and stays as it is in between, since turning costs. It is exact
    for one asset; with correlated assets it ignores what the others reveal.
    """

    def __init__(self, series: RegimeSeries, threshold: float, market: VectorMarket):
        self.series = series
        self.threshold = threshold

        # (n, K): the logarithm of up against down, for the coming day.
        self.log_odds = torch.zeros_like(market.position)
        self.returns = market.returns
        for day in range(market.rules.window):
            self._observe(self.returns[:, day])

    def __call__(self, market: VectorMarket) -> Tensor:
        # All environments are on the same day: they began together.
        today = int(market.day[0])
        if today:
            self._observe(self.returns[:, market.rules.window + today - 1])

        # Actions count from the lowest position, -1, in steps of 1 / lots.
        lots = market.rules.lots
        up = torch.sigmoid(self.log_odds)
        action = ((market.position + 1) * lots).round().long()
        action = torch.where(up > self.threshold, 2 * lots, action)
        return torch.where(up < 1 - self.threshold, 0, action)

    def _observe(self, returns: Tensor) -> None:
        """Update with the returns (n, K) of a day, then let the regime flip as it may overnight."""
        series = self.series
        # The log-likelihood ratio of two normal distributions with means +drift and -drift.
        today = torch.sigmoid(self.log_odds + 2 * series.drift / series.volatility**2 * returns)
        tomorrow = today * (1 - series.flip) + (1 - today) * series.flip
        self.log_odds = torch.logit(tomorrow)


def baseline_scores(series: Series, rules: Rules, episodes: int) -> dict[str, float]:
    """Return the mean scores of all policies over the test episodes. `bayes` is the best of the Bayes filters."""

    def score(make: Callable[[VectorMarket], Policy]) -> float:
        market = VectorMarket(series, rules, HELD_OUT + torch.arange(episodes))
        return float(play(make(market), market, rules.days).scores.mean())

    scores = {"hold": score(lambda _: hold), "random": score(lambda _: at_random)}

    # For prices from a file neither the law nor the regime is known.
    if isinstance(series, RegimeSeries):
        scores["bayes"] = max(score(partial(Bayes, series, threshold)) for threshold in THRESHOLDS)
        scores["oracle"] = score(partial(Oracle, series))

    return scores
