"""Random runs compute the same with compiled code as without it, and no hook, buffer or number is lost.

`python tests/ranks/compiled_draws.py 0 150` draws more of them, and names the seeds of those that differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pool import COMPILER, Pool
from ranks.compiled_draws import Draw, numbers_apart, tensors_apart, try_draw

# Two that cost little; `make test-long` runs the others.
SEEDS = (2, 14, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(100, 160)))
WITH_INDUCTOR = range(1000, 1008)

# Why an eager run may end: a mistake that Lockstep names, or a BatchNorm of torch that gets a single sample.
REFUSALS = ("UserError: ", "ValueError: Expected more than 1 value per channel")


@pytest.fixture(scope="module", autouse=True)
def compiler(pool: Pool) -> None:
    pool.preload(*COMPILER)


def check(pool: Any, draw: Draw, folder: Path) -> None:
    found = try_draw(pool, draw, folder)
    if found.refused:
        # Nothing else may go wrong in the eager run.
        assert found.refused.startswith(REFUSALS), f"{draw}\n{found.refused}"
        pytest.skip(f"does not work eagerly either: {found.refused}")
    assert not found.differences, f"{draw}\n" + "\n".join(found.differences)


@pytest.mark.parametrize("seed", SEEDS)
def test_compiled_is_eager(seed: int, pool: Any, tmp_path: Path) -> None:
    check(pool, Draw.of(seed), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", WITH_INDUCTOR)
def test_what_users_compile_is_eager(seed: int, pool: Any, tmp_path: Path) -> None:
    check(pool, Draw.of(seed, "inductor"), tmp_path)


def test_the_comparison_sees_a_difference() -> None:
    ones, others = {"a": torch.ones(3)}, {"a": torch.full((3,), 1.1)}
    assert tensors_apart(ones, ones, 1e-3) == []
    assert tensors_apart(ones, others, 1e-3) == ["a: off by 0.1"]
    assert tensors_apart({"n": torch.tensor(1)}, {"n": torch.tensor(2)}, 1.0) == ["n: eager 1, compiled 2"]
    assert numbers_apart([("loss", 1.0)], [("loss", 1.0)], 1e-3) == []
    assert numbers_apart([("loss", 1.0)], [("loss", 1.1)], 1e-3)
    assert numbers_apart([("loss", 1.0)], [], 1e-3) == ["the hooks were called 0 times, and eagerly 1 times"]
    assert Draw.of(7) == Draw.of(7) != Draw.of(8)
