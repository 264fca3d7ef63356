"""Markets: series of daily log-returns, and many episodes of trading in them, side by side as tensors.

Shapes in comments: n episodes, W days of window, D days of an episode, K assets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from lockstep.recipes.clstm_ppo import noise
from lockstep.recipes.clstm_ppo.indicators import COUNT, indicators

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


@dataclass(frozen=True)
class Rules:
    """How trading goes, whatever the series."""

    window: int = 20
    days: int = 252
    cost: float = 0.0005  # of what changes hands
    lots: int = 1  # positions are -lots .. +lots, in parts of the whole
    indicators: bool = False  # show them beside the returns; without them memory is needed

    @property
    def choices(self) -> int:
        return 2 * self.lots + 1

    def features(self, assets: int) -> int:
        """Numbers per day of the window: returns, positions, and indicators if they are shown."""
        return assets * (2 + COUNT * self.indicators)

    def positions(self, actions: Tensor) -> Tensor:
        return (actions - self.lots).double() / self.lots


class VectorMarket:
    """`envs` are numbers of environments; each trades one episode after another, for itself.

    Beside the series, which can be drawn again, its whole state is three numbers for each environment: `episode`,
    `day` and `position`.
    """

    def __init__(self, series: Series, rules: Rules, envs: Tensor, stagger: bool = False):
        """`stagger`: first episodes begin on different days, so that not all of them end together."""
        self.series, self.rules, self.envs = series, rules, envs
        self.episode = torch.zeros_like(envs)
        late = noise.uniform(series.seed, noise.OFFSET, envs) * rules.days
        self.day = late.long() if stagger else torch.zeros_like(envs)
        self.position = torch.zeros(len(envs), series.assets, dtype=torch.float64, device=envs.device)
        self.draw()

    def draw(self) -> None:
        """The tables of all current episodes: after `episode` was set."""
        self.returns = self._returns(slice(None))  # (n, W + D, K)
        self.shown = self._shown(self.returns)  # (n, W + D, features without the position)

    def windows(self) -> Tensor:
        """What a trader sees before the day begins: the last W days, and the position it holds, (n, W, features)."""
        rows = self.day[:, None] + torch.arange(self.rules.window, device=self.envs.device)
        seen = self.shown.gather(1, rows[..., None].expand(-1, -1, self.shown.shape[-1]))
        held = self.position.float()[:, None].expand(-1, self.rules.window, -1)
        return torch.cat([seen, held], dim=-1)

    def step(self, actions: Tensor, cost: float | None = None) -> tuple[Tensor, Tensor]:
        """Hold the positions of `actions` (n, K) for a day. What it earned, as a share of the capital (n,), and whether
        the episode has ended; then the next one has begun."""
        wanted = self.rules.positions(actions)
        today = self.returns.gather(1, (self.rules.window + self.day)[:, None, None].expand(-1, 1, wanted.shape[1]))
        fee = (self.rules.cost if cost is None else cost) * (wanted - self.position).abs()
        earned = (wanted * today[:, 0] - fee).mean(dim=1)
        self.position, self.day = wanted, self.day + 1
        ended = self.day == self.rules.days
        self._restart(ended)
        return earned, ended

    def _restart(self, ended: Tensor) -> None:
        places = ended.nonzero().flatten()  # the host waits for the device here
        if not len(places):
            return
        self.episode[places] += 1
        self.day[places] = 0
        self.position[places] = 0.0
        self.returns[places] = fresh = self._returns(places)
        self.shown[places] = self._shown(fresh)

    def _returns(self, places: Tensor | slice) -> Tensor:
        return self.series.draw(self.envs[places], self.episode[places], self.rules.window + self.rules.days)

    def _shown(self, returns: Tensor) -> Tensor:
        parts = [returns / self.series.scale, *(indicators(returns) if self.rules.indicators else [])]
        return torch.cat(parts, dim=-1).float()
