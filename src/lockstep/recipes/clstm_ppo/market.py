"""Trading: the rules, the indicators that may be shown, and many episodes at once as tensors.

Shapes in comments: n episodes, W days of window, D days of an episode, K assets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.recipes.clstm_ppo.game import CueRecall, Environments, GameShape
from lockstep.recipes.clstm_ppo.series import Series

# Rewards are in percent of the capital; scores are shares of it.
REWARD_SCALE = 100.0

# The usual spans of the indicators, in days.
FAST, SLOW, SPAN = 12, 26, 14
INDICATORS = 4


@dataclass(frozen=True)
class Rules:
    # Days that the agent sees at once.
    window: int = 20

    # Days of an episode.
    days: int = 252

    # The cost of a trade, as a share of its volume.
    cost: float = 0.0005

    # Positions are -lots ... +lots, in units of 1/lots of the capital.
    lots: int = 1

    # Also show MACD, RSI, CCI and ADX. They sum up the past: a policy that sees them needs no memory.
    indicators: bool = False

    # Halt trading on the day after one that is more turbulent than this share of all days.
    halt: float | None = None

    @property
    def choices(self) -> int:
        return 2 * self.lots + 1

    def features(self, assets: int) -> int:
        """Return the numbers per day of a window: returns, positions, and indicators if they are shown."""
        return assets * (2 + INDICATORS * self.indicators)

    def positions(self, actions: Tensor) -> Tensor:
        """Return the positions in [-1, 1] of actions 0 ... 2 * lots, float64."""
        return (actions - self.lots).double() / self.lots


@dataclass(frozen=True)
class Trading:
    series: Series
    rules: Rules

    @property
    def shape(self) -> GameShape:
        return GameShape(
            window=self.rules.window,
            features=self.rules.features(self.series.assets),
            assets=self.series.assets,
            choices=self.rules.choices,
            episode=self.rules.days,
        )

    def open(self, seed: int, envs: Tensor, stagger: bool = False) -> VectorMarket:
        return VectorMarket(replace(self.series, seed=seed), self.rules, envs, stagger)


Game = CueRecall | Trading


class VectorMarket(Environments):
    """The environments `envs` (n,) of a market; each trades one episode after another.

    Tables hold the returns of the current episode and of the next one. So the host need not know which episodes end,
    for which it would have to wait for the device every day.
    """

    def __init__(self, series: Series, rules: Rules, envs: Tensor, stagger: bool = False):
        super().__init__(Trading(series, rules).shape, series.seed, envs, stagger)
        self.series = series
        self.rules = rules

        # Rows of one episode in the tables.
        self._length = rules.window + rules.days
        self.draw()

    def draw(self) -> None:
        tables = zip(self._tables(slice(None), later=0), self._tables(slice(None), later=1), strict=True)
        self._returns, self._shown, self._halts = (torch.cat(pair, dim=1) for pair in tables)

        # (n,): the row of the tables with which the current episode begins, 0 or W + D.
        self._begin = torch.zeros_like(self.envs)
        self._span = torch.arange(self.rules.window, device=self.envs.device)
        self._steps_since_renewal = 0

    def renew(self) -> None:
        """Where the next episode has become the current one, draw the one after it."""
        # The host waits for the device here: how many rows there are decides the shapes below.
        moved_on = self._begin.nonzero().flatten()
        self._steps_since_renewal = 0
        if not len(moved_on):
            return

        length = self._length
        tables = self._returns, self._shown, self._halts
        for table, fresh in zip(tables, self._tables(moved_on, later=1), strict=True):
            table[moved_on, :length] = table[moved_on, length:]
            table[moved_on, length:] = fresh

        self._begin.zero_()

    @property
    def returns(self) -> Tensor:
        """The returns of the current episodes, with the windows before their first days (n, W + D, K)."""
        rows = self._begin[:, None] + torch.arange(self._length, device=self.envs.device)
        return torch.take_along_dim(self._returns, rows[..., None], dim=1)

    def windows(self) -> Tensor:
        """Return what a trader sees before the day begins: the last W days and its position (n, W, features)."""
        rows = (self._begin + self.day)[:, None] + self._span

        # One gather for all environments, each at its own day.
        seen = torch.take_along_dim(self._shown, rows[..., None], dim=1)
        held = self.position.float()[:, None].expand(-1, self.rules.window, -1)
        return torch.cat([seen, held], dim=-1)

    def step(self, actions: Tensor, costs: float = 1.0) -> tuple[Tensor, Tensor]:
        """Hold the positions of `actions` (n, K) for a day. What it earned is a share of the capital."""
        # After as many steps as an episode has days, an environment could need a third episode.
        if self._steps_since_renewal == self.rules.days:
            self.renew()

        self._steps_since_renewal += 1

        wanted = self.rules.positions(actions)
        today = (self._begin + self.rules.window + self.day)[:, None]
        if self.rules.halt is not None:
            wanted = torch.where(self._halts.gather(1, today), self.position, wanted)

        moved = torch.take_along_dim(self._returns, today[..., None], dim=1)[:, 0]
        self.moved = moved / self.series.scale
        self.gains = wanted * moved - costs * self.rules.cost * (wanted - self.position).abs()

        # Arithmetic in place of branches: which environments have ended stays on the device.
        day = self.day + 1
        ended = day == self.rules.days
        self.episode = self.episode + ended
        self.day = day * ~ended
        self._begin = self._begin + ended * self._length
        self.held = wanted
        self.position = wanted.masked_fill(ended[:, None], 0.0)
        return self.gains.mean(dim=1), ended

    def _tables(self, chosen: Tensor | slice, later: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw the episodes that come `later` after the current ones of the `chosen` environments.

        Return the returns (n, W + D, K), what is shown of them (n, W + D, features without the position), and
        whether trading is halted (n, W + D).
        """
        returns = self.series.draw(self.envs[chosen], self.episode[chosen] + later, self._length)

        # Shown in units of a usual return, so that the inputs of the network are about 1.
        parts = [returns / self.series.scale]
        if self.rules.indicators:
            parts += indicators(returns)

        shown = torch.cat(parts, dim=-1).float()

        if self.rules.halt is None:
            halted = torch.zeros(*returns.shape[:2], dtype=torch.bool, device=returns.device)
        else:
            halted = self.series.turbulence(self.rules.halt).halted(returns)

        return returns, shown, halted


def indicators(returns: Tensor) -> list[Tensor]:
    """Return MACD, RSI, CCI and ADX of log-returns (n, days, K), each (n, days, K) and about between -1 and 1.

    They are made from closing prices alone: highs and lows are the closes.
    """
    # Prices relative to the first day: the indicators do not depend on the level.
    log_price = returns.cumsum(dim=1)

    # The fast average minus the slow one, in tenths.
    macd = (smoothed(log_price, FAST) - smoothed(log_price, SLOW)) * 10

    # Gains against losses: 1 if there were only gains, -1 if there were only losses.
    gains = smoothed(returns.clamp(min=0), SPAN)
    losses = smoothed((-returns).clamp(min=0), SPAN)
    rsi = (gains - losses) / (gains + losses + 1e-12)

    # The distance of the price from its average, in units of its usual distance.
    away = log_price - smoothed(log_price, SPAN)
    cci = away / (smoothed(away.abs(), SPAN) + 1e-12) / 3

    # How much of the movement goes one way: the strength of a trend without its sign.
    adx = smoothed(rsi.abs(), SPAN)
    return [macd, rsi, cci, adx]


def smoothed(values: Tensor, days: int) -> Tensor:
    """Return the moving average along dim 1 in which a value fades to 1/e in about `days` / 2."""
    keep = 1 - 2 / (days + 1)
    averages = [values[:, 0]]
    # A loop over days: torch has no exponential moving average.
    for day in range(1, values.shape[1]):
        averages.append(keep * averages[-1] + (1 - keep) * values[:, day])

    return torch.stack(averages, dim=1)
