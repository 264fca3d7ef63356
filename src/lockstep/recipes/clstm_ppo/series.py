"""Series of daily log-returns: generated ones, prices from a CSV file, and what counts as a turbulent day.

The returns of an episode are a pure function of the series, the environment and the episode.
A CSV file has the columns date, symbol, open, high, low, close, volume, with one row for each day and symbol.

Shapes in comments: n episodes, K assets.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.recipes.clstm_ppo import counter_rng

# Environments from this number on are for tests: no training run has that many.
HELD_OUT = 1_000_000_000

# The last fifth of a file's days is for tests: a policy must not have seen its future.
TEST_SHARE = 0.2


# ---- turbulent days --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turbulence:
    """The turbulence index of a day: the squared Mahalanobis distance of its returns from the usual ones."""

    # The mean (K,) and the inverse covariance (K, K) of usual log-returns.
    mean: Tensor
    precision: Tensor
    # A day is turbulent if its index is above this.
    limit: float = math.inf

    @classmethod
    def fitted(cls, returns: Tensor, share: float) -> Turbulence:
        """Fit to `returns` (days, K), so that `share` of the days stay below the limit."""
        # torch.cov of a single asset is a number, not a matrix.
        usual = cls(returns.mean(dim=0), torch.linalg.pinv(torch.atleast_2d(torch.cov(returns.T))))
        return replace(usual, limit=float(usual.index(returns).quantile(share)))

    def index(self, returns: Tensor) -> Tensor:
        """Return the index of every day, (..., K) -> (...)."""
        away = returns - self.mean.to(returns.device)
        return ((away @ self.precision.to(returns.device)) * away).sum(dim=-1)

    def halted(self, returns: Tensor) -> Tensor:
        """Return on which days (n, days) trading halts: those after a turbulent day of `returns` (n, days, K)."""
        turbulent = self.index(returns) > self.limit
        return torch.cat([torch.zeros_like(turbulent[:, :1]), turbulent[:, :-1]], dim=1)


# ---- generated returns -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RegimeSeries:
    """Every asset drifts up or down, by a hidden regime that flips now and then.

    Since the law of this market is known, so is the score of the best policy (`baselines.py`).
    """

    seed: int
    assets: int = 1
    # The probability of a flip of the regime on a day.
    flip: float = 1 / 40
    drift: float = 0.004
    volatility: float = 0.010
    # The correlation of the noise of any two assets, which comes from one market factor.
    correlation: float = 0.0

    @property
    def scale(self) -> float:
        """The size of a usual daily return; returns are divided by it to be about 1."""
        return self.volatility

    def turbulence(self, share: float) -> Turbulence:
        """Return the measure of turbulence that `share` of all days stay below."""
        # With a fixed seed, so that the rules of the market do not depend on the seed of the run.
        return _regime_turbulence(replace(self, seed=0), share)

    def draw(self, envs: Tensor, episodes: Tensor, length: int) -> Tensor:
        """Return the log-returns (n, length, K), float64, of environments (n,) in episodes (n,)."""
        shock = counter_rng.normal(self.seed, counter_rng.RETURN, *self._keys(envs, episodes, length))
        if self.correlation:
            # No asset has the number -1, so the factor has random numbers of its own.
            days = torch.arange(length, device=envs.device)
            factor = counter_rng.normal(self.seed, counter_rng.RETURN, envs[:, None], episodes[:, None], days, -1)
            shock = (1 - self.correlation) ** 0.5 * shock + self.correlation**0.5 * factor[..., None]

        return self.drift * self.regimes(envs, episodes, length) + self.volatility * shock

    def regimes(self, envs: Tensor, episodes: Tensor, length: int) -> Tensor:
        """Return the hidden regimes, +1 or -1 (n, length, K)."""
        drawn = counter_rng.uniform(self.seed, counter_rng.REGIME, *self._keys(envs, episodes, length))
        flips = torch.where(drawn < self.flip, -1.0, 1.0).double()
        # On the first day both regimes are equally likely.
        flips[:, 0] = torch.where(drawn[:, 0] < 0.5, -1.0, 1.0).double()
        return flips.cumprod(dim=1)

    def _keys(self, envs: Tensor, episodes: Tensor, length: int) -> tuple[Tensor, ...]:
        """Return keys that broadcast to (n, length, K)."""
        return (
            envs[:, None, None],
            episodes[:, None, None],
            torch.arange(length, device=envs.device)[:, None],
            torch.arange(self.assets, device=envs.device),
        )


@lru_cache
def _regime_turbulence(series: RegimeSeries, share: float) -> Turbulence:
    envs = torch.arange(64)
    return Turbulence.fitted(series.draw(envs, torch.zeros_like(envs), 256).flatten(0, 1), share)


# ---- prices from a file ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PriceSeries:
    """Prices from a CSV file. An episode is a range of its days, with all symbols; test episodes are at its end."""

    path: str
    seed: int = 0

    @cached_property
    def returns(self) -> Tensor:
        """Log-returns (days, K), float64."""
        return read_prices(Path(self.path)).log().diff(dim=0)

    @property
    def assets(self) -> int:
        return self.returns.shape[1]

    @property
    def scale(self) -> float:
        return float(self.returns[: self.split].std()) or 1.0

    @property
    def split(self) -> int:
        """The first day for tests. Nothing that training uses may be computed from this day or a later one."""
        return round(len(self.returns) * (1 - TEST_SHARE))

    @property
    def test_days(self) -> int:
        return len(self.returns) - self.split

    def turbulence(self, share: float) -> Turbulence:
        return Turbulence.fitted(self.returns[: self.split], share)

    def draw(self, envs: Tensor, episodes: Tensor, length: int) -> Tensor:
        test = envs >= HELD_OUT
        available = torch.where(test, self.test_days, self.split)
        if bool((available < length).any()):
            raise UserError(
                f"an episode takes {length} days (task.window + task.days), more than there are",
                self._days(),
                f"set a task.window and a task.days of {int(available.min())} together at most, or add days to the "
                "file",
            )

        # An episode may begin on any day that has `length` days left, for training or for testing.
        drawn = counter_rng.uniform(self.seed, counter_rng.EPISODE, envs, episodes)
        first = torch.where(test, self.split, 0) + (drawn * (available - length + 1)).long()
        return self.returns.to(envs.device)[first[:, None] + torch.arange(length, device=envs.device)]

    def too_short(self, window: int, days: int) -> Iterator[UserError]:
        """Yield a problem if the days for training, or those for testing, are too few for an episode."""
        # The window of the first day comes before it, from the same days.
        room = min(self.split, self.test_days) - window
        if days > room:
            shorter = f"set task.days={room} or less" if room > 0 else "set a smaller task.window and task.days"
            yield UserError(
                f"an episode takes {window + days} days (task.window={window}, task.days={days}), more than there are",
                self._days(),
                f"{shorter}, or add days to the file",
            )

    def _days(self) -> str:
        return f"{self.path} has {self.split} days for training and {self.test_days} for testing"


Series = RegimeSeries | PriceSeries


def read_prices(path: Path) -> Tensor:
    """Return closing prices (days, K), symbols in alphabetical order; only days with a price for every symbol."""
    rows = _read_rows(path)
    symbols = sorted({symbol for _, symbol, _, _ in rows})
    table: dict[str, dict[str, float]] = {}

    for date, symbol, close, line in rows:
        before = table.setdefault(date, {}).setdefault(symbol, close)
        if before != close:
            raise UserError(
                f"{path} has two prices for one day: {date} {symbol}".rstrip(),
                f"close {close} in line {line}, after {before}",
                "give it one row for each day and symbol",
            )

    # An asset without a price could not be traded on that day.
    complete = [prices for _, prices in sorted(table.items()) if len(prices) == len(symbols)]
    if len(complete) < 2:
        raise UserError(
            f"{path} has {len(complete)} days on which every symbol has a price; at least 2 are needed",
            f"its symbols are {', '.join(symbols) or 'none'}",
            "give it a row for every day and symbol",
        )

    return torch.tensor([[prices[symbol] for symbol in symbols] for prices in complete], dtype=torch.float64)


def _read_rows(path: Path) -> list[tuple[str, str, float, int]]:
    """Return (date, symbol, close, line) of every row. Dates as YYYY-MM-DD sort by themselves."""
    rows = []
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or ()

            # Without a column `symbol` there is one asset, and the other columns are not read.
            for name in ("date", "close"):
                if name not in columns:
                    raise UserError(
                        f"{path} has no column {name!r}",
                        f"its columns are {', '.join(columns) or 'none'}",
                        "give it a first line such as date,symbol,open,high,low,close,volume",
                    )

            for row in reader:
                line = reader.line_num
                rows.append((row["date"], row.get("symbol") or "", _price(path, row["close"], line), line))
    except FileNotFoundError:
        raise UserError(
            f"the price file {path} does not exist", "", f"check the path; a relative one starts at {Path.cwd()}"
        ) from None
    except OSError as error:
        raise UserError(
            f"the price file {path} cannot be read: {error.strerror}", "", "give it a CSV file that can be read"
        ) from error

    return rows


def _price(path: Path, text: str, line: int) -> float:
    try:
        price = float(text)
    except (TypeError, ValueError):
        # Refused below, in the same words as a number that cannot be a price.
        price = math.nan

    if not 0 < price < math.inf:
        raise UserError(
            f"the close {text!r} in line {line} of {path} is not a price", "", "give every row a price above 0"
        )

    return price
