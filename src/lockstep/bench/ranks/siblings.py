"""One CPU of the measurement of which CPUs share a core: it multiplies matrices that fit into its own cache."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from typing import Any

import torch

SIZE = 96  # rows and columns: three such matrices are 110 KB, less than the second-level cache of a core
WARM_UP_S = 0.03


def measure(arguments: dict[str, Any]) -> Generator[float | None, str, None]:
    """Yield the products per second of this CPU, for commands that name it: "0,2,4". The others sleep meanwhile.

    Such products keep the multipliers of a core busy, so that two hardware threads get half of them each.
    """
    rank = os.environ["RANK"]
    a, b, product = (torch.rand(SIZE, SIZE) for _ in range(3))

    rate = None
    while True:
        command = yield rate

        rate = None
        if rank in command.split(","):
            # All of them are awake, at their clock rate, when the time begins; and busy for a little longer than it.
            _products_per_second(a, b, product, WARM_UP_S)
            rate = _products_per_second(a, b, product, arguments["seconds"])
            _products_per_second(a, b, product, WARM_UP_S)


def _products_per_second(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor, seconds: float) -> float:
    """Multiply for some time. All are [SIZE, SIZE]."""
    began = time.perf_counter()
    count = 0
    while (passed := time.perf_counter() - began) < seconds:
        torch.mm(a, b, out=product)
        count += 1

    return count / passed
