"""Parameters stored in bfloat16: the same bits on one rank and on two, however they are sharded, saved and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.engine import loop
from lockstep.engine.setup import open_run
from lockstep.precision import PRECISIONS
from lockstep.recipes.char_lm import CharLM
from lockstep.runtime import context
from lockstep.runtime.world import World
from pool import Pool
from ranks.support import configured
from ranks.test_strategies import STRATEGIES, final

# Two micro-batches: their gradients are added in bfloat16 on one rank, and in float32, then rounded, on two. That is
# the same. (More of them round more often on one rank than on several.) No clipping: a norm is a sum in another order.
EXACT = {"global_batch": 4, "micro_batch": 2, "clip.norm": None, "steps": 6}
SINGLE: dict[str, dict[str, Tensor]] = {}


def single(pool: Pool, precision: str) -> dict[str, Tensor]:
    if precision not in SINGLE:
        SINGLE[precision] = pool.run(final, EXACT | {"precision": precision}, world=1)[0]["weights"]
    return SINGLE[precision]


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], expected[name]), name


STORED = [name for name, precision in PRECISIONS.items() if precision.stores_bf16]
MASTER, STOCHASTIC, COMPENSATED, *_ = STORED
CASES = [(MASTER, name) for name in ("ddp", "unused", "zero1", "fsdp-grads")]
CASES += [(STOCHASTIC, name) for name in ("ddp", "zero1", "fsdp")] + [(COMPENSATED, "fsdp"), (COMPENSATED, "meta")]
HOW = STRATEGIES | {"meta": {"strategy": "fsdp", "init": "meta"}}


@pytest.mark.parametrize(("precision", "name"), CASES)
def test_two_ranks_end_with_the_bits_of_one(pool: Pool, precision: str, name: str) -> None:
    for found in pool.run(final, EXACT | HOW[name] | {"precision": precision}, world=2):
        assert_same_bits(found["weights"], single(pool, precision))


def test_more_rounding_with_more_micro_batches(pool: Pool) -> None:
    """Five micro-batches and clipping, on four ranks of which two hold a copy: equal within bfloat16's rounding."""
    values = {"precision": "bf16-master"}
    expected = pool.run(final, values, world=1)[0]["weights"]
    found = pool.run(final, values | STRATEGIES["hsdp"], world=4)[0]["weights"]
    for name, weight in expected.items():
        error = float((found[name].float() - weight.float()).norm() / weight.float().norm())
        assert error < 2e-2, f"{name}: off by {error:.1e}"


PATHS = [
    (MASTER, "zero1", "fsdp", 2),
    (MASTER, "fsdp", "ddp", 1),
    (STOCHASTIC, "fsdp", "zero1", 2),
    (COMPENSATED, "fsdp", "ddp", 1),
    (COMPENSATED, "ddp", "zero1", 2),
]


@pytest.mark.parametrize(("precision", "before", "after", "world"), PATHS)
def test_a_resumed_run_has_the_same_bits(
    pool: Pool, tmp_path: Path, precision: str, before: str, after: str, world: int
) -> None:
    values = EXACT | {"precision": precision, "run_dir": str(tmp_path / "run")}
    assert pool.run(final, values | STRATEGIES[before], 3, world=2)[0]["summary"] == {"left": 3}
    found = pool.run(final, values | STRATEGIES[after] | {"resume": "auto"}, world=world)
    assert_same_bits(found[0]["weights"], single(pool, precision))


@pytest.mark.parametrize("precision", [MASTER, COMPENSATED])
def test_a_run_may_resume_in_another_format(pool: Pool, tmp_path: Path, precision: str) -> None:
    """fp32 -> this one -> fp32; at each change nothing but rounding happens to the parameters."""
    values = EXACT | {"run_dir": str(tmp_path / "run")}
    pool.run(final, values, 2, world=1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    plain = pool.run(final, values | {"resume": "auto"}, world=1)[0]["weights"]
    values |= {"run_dir": str(tmp_path / "copy"), "resume": "auto"}
    assert pool.run(final, values | {"precision": precision}, 4, world=1)[0]["summary"] == {"left": 4}
    found = pool.run(final, values, world=1)[0]["weights"]
    for name, weight in plain.items():
        assert found[name].dtype == torch.float32
        assert float((found[name] - weight).norm() / weight.norm()) < 2e-2, name


def trained(world: World, store: Any, values: dict[str, Any]) -> float:
    """A job: char_lm, small; its loss on held-out text."""
    usual = {"global_batch": 8, "steps": 60, "clip.norm": 1.0}
    usual |= {"lr.peak": 5e-3, "lr.warmup": 4, "lr.schedule": "cosine", "lr.min_ratio": 0.05}
    resolved = configured(usual | values)
    with context.start(world, resolved.config, store=store) as runtime:
        task = CharLM(width=32, layers=2, heads=2, context=32, max_bytes=200_000, eval_bytes=8192)
        return loop.fit(task, open_run(resolved, runtime, "test"))["eval_loss"]


def test_char_lm_learns_as_in_fp32(pool: Pool) -> None:
    fp32 = pool.run(trained, {}, world=1)[0]
    assert fp32 < 3.1  # a model that has learnt nothing costs 4.6
    for precision in STORED:
        assert pool.run(trained, {"precision": precision}, world=1)[0] == pytest.approx(fp32, rel=0.02), precision
