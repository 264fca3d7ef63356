"""Markets: series of daily log-returns, and many episodes of trading in them, side by side as tensors.

Shapes in comments: n episodes, W days of window, D days of an episode, K assets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from lockstep.recipes.clstm_ppo import noise
from lockstep.recipes.clstm_ppo.indicators import COUNT, indicators
from lockstep.recipes.clstm_ppo.turbulence import Calm, halted

REWARD_SCALE = 100.0  # rewards are in percent; scores are not
HELD_OUT = 1_000_000_000  # environments from this number on are for tests: no training run gets there


class Series(Protocol):
    """Where returns come from. The series of an episode is a pure function of (environment, episode)."""

    @property
    def seed(self) -> int: ...

    @property
    def assets(self) -> int: ...

    @property
    def scale(self) -> float:
        """What a usual daily return is divided by, to be about 1."""
        ...

    def seeded(self, seed: int) -> Series:
        """The same kind of market, with other days in it."""
        ...

    def draw(self, envs: Tensor, episodes: Tensor, length: int) -> Tensor:
        """Log-returns (n, length, K), float64."""
        ...

    def calm(self, share: float) -> Calm:
        """What usual days look like, to tell turbulent ones by: those beyond `share` of all."""
        ...


@dataclass(frozen=True)
class RegimeSeries:
    """Every asset drifts up or down, by a hidden regime that flips now and then. What the best policy earns can be
    computed (`yardsticks.py`)."""

    seed: int
    assets: int = 1
    flip: float = 1 / 40  # per day
    drift: float = 0.004
    volatility: float = 0.010
    correlation: float = 0.0  # of the noise of any two assets, through one market factor

    @property
    def scale(self) -> float:
        return self.volatility

    def seeded(self, seed: int) -> RegimeSeries:
        return replace(self, seed=seed)

    def calm(self, share: float) -> Calm:
        return _calm_regimes(replace(self, seed=0), share)  # the rules of a market do not depend on the run

    def draw(self, envs: Tensor, episodes: Tensor, length: int) -> Tensor:
        envs, episodes = envs[:, None], episodes[:, None]
        days = torch.arange(length, device=envs.device)
        shock = noise.normal(self.seed, noise.RETURN, *self._keys(envs, episodes, days))
        if self.correlation:
            together = noise.normal(self.seed, noise.RETURN, envs, episodes, days, -1)[..., None]
            shock = (1 - self.correlation) ** 0.5 * shock + self.correlation**0.5 * together
        return self.drift * self.regimes(envs[:, 0], episodes[:, 0], length) + self.volatility * shock

    def regimes(self, envs: Tensor, episodes: Tensor, length: int) -> Tensor:
        """+1 or -1 (n, length, K): what a trader would like to know."""
        days = torch.arange(length, device=envs.device)
        drawn = noise.uniform(self.seed, noise.REGIME, *self._keys(envs[:, None], episodes[:, None], days))
        flips = torch.where(drawn < self.flip, -1.0, 1.0).double()
        flips[:, 0] = torch.where(drawn[:, 0] < 0.5, -1.0, 1.0).double()  # the first day: either
        return flips.cumprod(dim=1)

    def _keys(self, envs: Tensor, episodes: Tensor, days: Tensor) -> tuple[Tensor, ...]:
        assets = torch.arange(self.assets, device=envs.device)
        return envs[..., None], episodes[..., None], days[:, None], assets


@lru_cache
def _calm_regimes(series: RegimeSeries, share: float) -> Calm:
    episodes = torch.arange(64)
    return Calm.of(series.draw(episodes, torch.zeros_like(episodes), 256).flatten(0, 1), share)


@dataclass(frozen=True)
class Rules:
    """How trading goes, whatever the series."""

    window: int = 20
    days: int = 252
    cost: float = 0.0005  # of what changes hands
    lots: int = 1  # positions are -lots .. +lots, in parts of the whole
    indicators: bool = False  # show them beside the returns; without them memory is needed
    halt: float | None = None  # no trading after a day more turbulent than this share of days

    @property
    def choices(self) -> int:
        return 2 * self.lots + 1

    def features(self, assets: int) -> int:
        """Numbers per day of the window: returns, positions, and indicators if they are shown."""
        return assets * (2 + COUNT * self.indicators)

    def positions(self, actions: Tensor) -> Tensor:
        return (actions - self.lots).double() / self.lots


@dataclass(frozen=True)
class Trading:
    """A game: trade by these rules in this series."""

    series: Series
    rules: Rules

    @property
    def assets(self) -> int:
        return self.series.assets

    @property
    def choices(self) -> int:
        return self.rules.choices

    @property
    def window(self) -> int:
        return self.rules.window

    @property
    def features(self) -> int:
        return self.rules.features(self.assets)

    @property
    def days(self) -> int:
        return self.rules.days

    def open(self, seed: int, envs: Tensor, stagger: bool = False) -> VectorMarket:
        return VectorMarket(self.series.seeded(seed), self.rules, envs, stagger)


class VectorMarket:
    """`envs` are numbers of environments; each trades one episode after another, for itself.

    Beside the series, which can be drawn again, its whole state is three numbers for each environment: `episode`,
    `day` and `position`. The series of the current episode and of the next one lie ready in a table, so that an
    episode may end without anybody asking which: on a GPU that would make the host wait, every day.
    """

    def __init__(self, series: Series, rules: Rules, envs: Tensor, stagger: bool = False):
        self.series, self.rules, self.envs = series, rules, envs
        self.episode = torch.zeros_like(envs)
        late = noise.uniform(series.seed, noise.OFFSET, envs) * rules.days
        self.day = late.long() if stagger else torch.zeros_like(envs)
        self.position = torch.zeros(len(envs), series.assets, dtype=torch.float64, device=envs.device)
        self.moved = self.held = self.gains = self.position
        self.draw()

    def draw(self) -> None:
        """The tables of all current episodes and of the next ones: after `episode` was set."""
        tables = [self._tables(slice(None), later) for later in (0, 1)]
        self._returns, self._shown, self._halts = (torch.cat(parts, dim=1) for parts in zip(*tables, strict=True))
        self._begin = torch.zeros_like(self.envs)  # the row of the tables with which the current episode begins
        self._span = torch.arange(self.rules.window, device=self.envs.device)
        self._steps = 0  # since the tables were renewed

    def renew(self) -> None:
        """Where the next episode has become the current one, draw the one after it."""
        places, length = self._begin.nonzero().flatten(), self._length  # the host waits for the device here
        self._steps = 0
        if not len(places):
            return
        for table, fresh in zip((self._returns, self._shown, self._halts), self._tables(places, 1), strict=True):
            table[places, :length] = table[places, length:]
            table[places, length:] = fresh
        self._begin.zero_()

    @property
    def returns(self) -> Tensor:
        """Of the current episodes, with the windows before their first days (n, W + D, K)."""
        rows = self._begin[:, None] + torch.arange(self._length, device=self.envs.device)
        return self._returns.gather(1, rows[..., None].expand(-1, -1, self._returns.shape[-1]))

    def windows(self) -> Tensor:
        """What a trader sees before the day begins: the last W days, and the position it holds, (n, W, features)."""
        rows = (self._begin + self.day)[:, None] + self._span
        seen = self._shown.gather(1, rows[..., None].expand(-1, -1, self._shown.shape[-1]))
        held = self.position.float()[:, None].expand(-1, self.rules.window, -1)
        return torch.cat([seen, held], dim=-1)

    def step(self, actions: Tensor, costs: float = 1.0) -> tuple[Tensor, Tensor]:
        """Hold the positions of `actions` (n, K) for a day. What it earned, as a share of the capital (n,), and whether
        the episode has ended; then the next one has begun."""
        if self._steps == self.rules.days:  # from here on an episode could be the second one to end
            self.renew()
        self._steps += 1
        wanted, today = self.rules.positions(actions), (self._begin + self.rules.window + self.day)[:, None]
        if self.rules.halt is not None:
            wanted = torch.where(self._halts.gather(1, today), self.position, wanted)
        moved = self._returns.gather(1, today[..., None].expand(-1, 1, wanted.shape[1]))[:, 0]
        self.moved = moved / self.series.scale
        fee = costs * self.rules.cost * (wanted - self.position).abs()
        self.gains = wanted * moved - fee
        day = self.day + 1
        ended = day == self.rules.days
        self.episode, self.day, self._begin = self.episode + ended, day * ~ended, self._begin + ended * self._length
        self.held, self.position = wanted, wanted.masked_fill(ended[:, None], 0.0)
        return self.gains.mean(dim=1), ended

    @property
    def _length(self) -> int:
        """Rows of one episode in the tables."""
        return self.rules.window + self.rules.days

    def _tables(self, places: Tensor | slice, later: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the episodes `later` after the current ones, W + D days each: returns (n, days, K), what is shown of them
        (n, days, features without the position), and whether trading is halted (n, days)."""
        returns = self.series.draw(self.envs[places], self.episode[places] + later, self._length)
        parts = [returns / self.series.scale, *(indicators(returns) if self.rules.indicators else [])]
        return returns, torch.cat(parts, dim=-1).float(), self._halted(returns)

    def _halted(self, returns: Tensor) -> Tensor:
        if self.rules.halt is None:
            return torch.zeros(*returns.shape[:2], dtype=torch.bool, device=returns.device)
        return halted(returns, self.series.calm(self.rules.halt))
