"""Prices from a file: a CSV with the columns date, symbol, open, high, low, close, volume, one row a day and symbol."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.recipes.clstm_ppo import noise
from lockstep.recipes.clstm_ppo.market import HELD_OUT
from lockstep.recipes.clstm_ppo.turbulence import Calm

NEEDED = ("date", "close")
TEST_SHARE = 0.2  # the last part of the days is for tests: a policy must not have seen its future


@dataclass(frozen=True)
class PriceSeries:
    """Episodes are stretches of the days of a file, with all its symbols; test episodes come from its last part."""

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
        """Where the days for tests begin: nothing before it may know of them."""
        return round(len(self.returns) * (1 - TEST_SHARE))

    def seeded(self, seed: int) -> PriceSeries:
        return replace(self, seed=seed)

    def calm(self, share: float) -> Calm:
        return Calm.of(self.returns[: self.split], share)

    def draw(self, envs: Tensor, episodes: Tensor, length: int) -> Tensor:
        split = self.split
        test = envs >= HELD_OUT
        self._check_room(length, split, bool(test.any()), bool((~test).any()))
        lowest = torch.where(test, split, 0)
        room = torch.where(test, len(self.returns) - split, split) - length + 1
        first = lowest + (noise.uniform(self.seed, noise.EPISODE, envs, episodes) * room).long()
        rows = first[:, None] + torch.arange(length, device=envs.device)
        return self.returns.to(envs.device)[rows]

    def _check_room(self, length: int, split: int, tests: bool, trains: bool) -> None:
        for wanted, days, name in ((trains, split, "training"), (tests, len(self.returns) - split, "testing")):
            if wanted and days < length:
                raise UserError(
                    f"episodes of {length} days (task.window + task.days)",
                    f"{days} days for {name} in {self.path}",
                    f"type a task.window and a task.days of {days} together at most, or give it more days",
                )

    def too_short(self, window: int, days: int) -> list[UserError]:
        """Both parts must hold a whole episode."""
        room = min(self.split, len(self.returns) - self.split) - window
        if days <= room:
            return []
        fix = f"type task.days={room} or less" if room > 0 else "type a smaller task.window and task.days"
        parts = f"{self.split} days for training and {len(self.returns) - self.split} for testing"
        asked = f"episodes of {window + days} days (task.window={window}, task.days={days})"
        return [UserError(asked, f"{parts} in {self.path}", f"{fix}, or give it more days")]


def read_prices(path: Path) -> Tensor:
    """Closing prices (days, K), symbols in alphabetical order; only days on which every symbol has a price."""
    rows = _rows(path)
    symbols = sorted({symbol for _, symbol, _, _ in rows})
    table: dict[str, dict[str, float]] = {}
    for date, symbol, close, line in rows:
        if table.setdefault(date, {}).setdefault(symbol, close) != close:
            raise UserError(
                f"prices in {path}",
                f"close {close} in line {line}, after {table[date][symbol]} for the same day: {date} {symbol}".rstrip(),
                "give it one row for a day and symbol",
            )
    complete = [prices for _, prices in sorted(table.items()) if len(prices) == len(symbols)]
    if len(complete) < 2:
        raise UserError(
            f"prices in {path}",
            f"{len(complete)} days on which all of {', '.join(symbols) or 'no symbol'} have a price",
            "give it a row for every day and symbol",
        )
    return torch.tensor([[prices[symbol] for symbol in symbols] for prices in complete], dtype=torch.float64)


def _rows(path: Path) -> list[tuple[str, str, float, int]]:
    """(date, symbol, close, line) of every row; dates as YYYY-MM-DD sort by themselves."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise UserError(
                    f"prices in {path}",
                    f"no column {missing[0]!r}; there are {', '.join(reader.fieldnames or ['none'])}",
                    "give it a first line such as date,symbol,open,high,low,close,volume",
                )
            return [
                (row["date"], row.get("symbol") or "", _price(path, row["close"], reader.line_num), reader.line_num)
                for row in reader
            ]
    except FileNotFoundError:
        fix = f"check the path; it is looked up from {Path.cwd()}"
        raise UserError(f"prices in {path}", "no such file", fix) from None
    except OSError as error:
        raise UserError(f"prices in {path}", str(error.strerror), "give it a CSV file that can be read") from error


def _price(path: Path, text: str, line: int) -> float:
    try:
        price = float(text)
    except (TypeError, ValueError):
        price = math.nan
    if not 0 < price < math.inf:
        raise UserError(f"prices in {path}", f"close {text!r} in line {line}", "give every row a price above 0")
    return price
