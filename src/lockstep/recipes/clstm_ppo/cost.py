"""How long a training takes on more GPUs, and what it costs. What was measured and what is estimated stand apart."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOST_PER_DOUBLING = 0.05  # of the efficiency: a rule of thumb, no measurement
SIZES = (1, 2, 4, 8)
PRICES = Path(__file__).with_name("gpu_prices.json")


@dataclass(frozen=True)
class Speedup:
    gpus: int
    efficiency: float
    measured: bool = False

    @property
    def actual(self) -> float:
        return self.gpus * self.efficiency


def estimate_training_speedup(num_gpus: int) -> Speedup:
    """An estimate: every doubling of the GPUs loses 5 % of the efficiency."""
    if num_gpus < 1:
        raise ValueError(f"{num_gpus} GPUs")
    return Speedup(num_gpus, 1 - LOST_PER_DOUBLING * math.log2(num_gpus))


def measured_speedup(num_gpus: int, rates: Mapping[int, float]) -> Speedup:
    """From rates (work a second) that were measured on one GPU and on `num_gpus`."""
    return Speedup(num_gpus, rates[num_gpus] / (num_gpus * rates[1]), measured=True)


def price_per_hour(name: str) -> float | None:
    """Of one GPU whose name contains one of those in gpu_prices.json; None: nobody has said."""
    known = json.loads(PRICES.read_text())["per_hour"]
    return next((price for kind, price in known.items() if kind in name), None)


def table(hours: float, price: float | None, rates: Mapping[int, float] | None = None) -> list[str]:
    """Lines for 1, 2, 4 and 8 GPUs, from the `hours` on one and the price of one for an hour. `rates` are measured
    rates by number of GPUs; whatever is not among them is an estimate, and says so."""
    rates = rates or {}
    lines = ["GPUs  speed-up  efficiency        time      cost"]
    for gpus in sorted({*SIZES, *rates}):
        measured = gpus in rates and 1 in rates
        found = measured_speedup(gpus, rates) if measured else estimate_training_speedup(gpus)
        took = hours / found.actual
        cost = "" if price is None else f"${price * gpus * took:.2f}"
        how = "measured" if measured else "estimate"
        lines.append(
            f"{gpus:4}  {found.actual:7.1f}x  {found.efficiency:10.0%}  {duration(took):>10}  {cost:>8}  {how}"
        )
    return lines


def duration(hours: float) -> str:
    if hours * 60 < 0.1:
        return f"{hours * 3600:.1f} s"
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"


def measured_rate(run_dir: Path, epochs: int) -> float:
    """Environment steps a second of a finished run: every day that is traded is learnt from `epochs` times. The first
    interval, in which everything warms up, is left out."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = lines[1:] or lines
    seconds = sum(line["weight"] / line["weight_per_s"] for line in lines)
    return sum(line["weight"] for line in lines) / seconds / epochs
