"""The main test: whatever the ranks, the micro-batches and the weights, every step's gradient is the gradient of the
weighted mean over the step's samples, as one process with one big batch computes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.task import Loss
from pool import Pool
from ranks.support import (
    JOBS,
    Perceptron,
    ReferenceTask,
    Trace,
    WeightedRegression,
    assert_exact,
    fit,
    masked_tokens,
    steps_past_an_epoch,
    weighted_regression,
    windows,
)

EXCHANGES = {"plain": {}, "unused": {"ddp.find_unused_parameters": True}}


@dataclass(frozen=True)
class Case:
    world: int
    length: int
    global_batch: int
    micro_batch: int | None
    tail: str
    job: str  # `fit`, or the custom loop
    model: str
    dtype: torch.dtype
    optimizer: str
    indexed: bool
    exchange: str
    zeros: float
    seed: int

    @property
    def values(self) -> dict[str, Any]:
        return {
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "tail": self.tail,
            "steps": steps_past_an_epoch(self.length, self.global_batch, self.tail),
            "seed": self.seed,
            **EXCHANGES[self.exchange],
        }

    def task(self) -> ReferenceTask:
        make = {"regression": weighted_regression, "tokens": masked_tokens}[self.model]
        task = make(self.length, self.seed, self.zeros, dtype=self.dtype)
        task.indexed, task.optimizer_kind = self.indexed, self.optimizer
        return task

    def windows(self) -> list[list[int]]:
        return windows(self.length, self.global_batch, self.tail, self.values["steps"], self.seed)


@st.composite
def cases(draw: Any) -> Case:
    world = draw(st.integers(1, 4))
    global_batch = draw(st.integers(world, 14))
    largest = global_batch if world == 1 else (global_batch - 1) // (world - 1)  # or some rank never has work
    length = draw(st.integers(1, 40))
    return Case(
        world=world,
        length=length,
        global_batch=global_batch,
        micro_batch=draw(st.none() | st.integers(1, largest)),
        tail=draw(st.sampled_from(["short", "drop"])) if length >= global_batch else "short",
        job=draw(st.sampled_from(sorted(JOBS))),
        model=draw(st.sampled_from(["regression", "tokens"])),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        optimizer=draw(st.sampled_from(["sgd", "fused"])),
        indexed=draw(st.booleans()),
        exchange=draw(st.sampled_from(sorted(EXCHANGES))),
        zeros=draw(st.sampled_from([0.0, 0.4, 0.9])),
        seed=draw(st.integers(0, 1000)),
    )


def circumstances(case: Case, task: ReferenceTask, traces: list[Trace]) -> set[str]:
    """What happened in a run that could have gone wrong."""
    found = {f"world {case.world}", case.job, case.model, str(case.dtype), case.optimizer, case.exchange}
    found.add(f"tail {case.tail}")
    for number, ids in enumerate(case.windows()):
        parts = [trace.steps[number] for trace in traces]
        weights = [task.weight_of(part.ids) for part in parts]
        if len(ids) < case.global_batch:
            found.add("short window")
        if any(piece.padding for part in parts for piece in part.pieces):
            found.add("a rank without samples")
        if any(len(part.pieces) > 1 for part in parts):
            found.add("accumulation")
        if len({len(part.pieces) for part in parts}) > 1:
            found.add("uneven accumulation")
        if sum(weights) == 0:
            found.add("a step that weighs nothing")
        elif any(w == 0 and part.ids for w, part in zip(weights, parts, strict=True)):
            found.add("a rank that weighs nothing")
        if any(note.pieces[0].epoch == 1 for note in parts):
            found.add("second epoch")
    return found


EVERYTHING = {
    *(f"world {n}" for n in (1, 2, 3, 4)),
    *("fit", "own loop", "regression", "tokens", "torch.float32", "torch.float64", "sgd", "fused"),
    *("plain", "unused", "tail short", "tail drop", "second epoch"),
    *("short window", "a rank without samples", "accumulation", "uneven accumulation"),
    *("a step that weighs nothing", "a rank that weighs nothing"),
}


def test_the_gradient_is_the_reference_gradient(pool: Pool) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=24, derandomize=True, deadline=None, database=None)
    @given(cases())
    def check(case: Case) -> None:
        task = case.task()
        assume(any(task.weight_of(ids) for ids in case.windows()))  # nothing to learn at all: test_guards.py
        traces = pool.run(JOBS[case.job], task, case.values, world=case.world)
        assert_exact(task, traces, case.windows())
        seen.update(circumstances(case, task, traces))

    check()
    assert seen.keys() >= EVERYTHING, f"never happened: {EVERYTHING - seen.keys()}"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_mean_of_means_fails_the_same_check(pool: Pool, world: int) -> None:
    task = weighted_regression(24, seed=1, zeros=0.0)
    values = {"global_batch": 12, "micro_batch": 3, "steps": 3}
    samples = windows(24, 12, "short", 3)
    assert_exact(task, pool.run(fit, task, values, world=world), samples)
    task.mean_of_means = True
    with pytest.raises(AssertionError, match="gradient of step 0, rank 0: off by"):
        assert_exact(task, pool.run(fit, task, values, world=world), samples)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_weights_beyond_what_float32_counts(pool: Pool, world: int) -> None:
    task = weighted_regression(16, seed=2, zeros=0.0)
    task.tensors[-1] = task.tensors[-1] + 2**27 + 1  # 16 of them need 31 bits, float32 has 24
    values = {"global_batch": 16, "micro_batch": 2, "steps": 2}
    traces = pool.run(fit, task, values, world=world)
    assert_exact(task, traces, windows(16, 16, "short", 2))


class Means(WeightedRegression):
    """Returns means. Without a weight, a mean is 0 / 0, and its own backward is NaN."""

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Loss:
        total, weight = self.terms(model, batch)
        return Loss.mean(total / weight, int(weight))


def test_means_of_nothing_on_some_ranks(pool: Pool) -> None:
    task = Means(weighted_regression(16, seed=4, zeros=0.5).tensors)
    values = {"global_batch": 4, "micro_batch": 1, "steps": 4}
    traces, sharded = (pool.run(fit, task, values | {"strategy": name}, world=2) for name in ("ddp", "fsdp"))
    samples = windows(16, 4, "short", 4)
    assert_exact(task, traces, samples)
    norms = [[note.result.grad_norm for note in trace[0].steps if note.result.applied] for trace in (traces, sharded)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)

    weights = [[task.weight_of([micro]) for micro in step] for step in samples]
    assert any(0 in step[:2] and any(step) for step in weights)
    assert any(step[3] == 0 and any(step) for step in weights)  # the last backward, which all-reduces


class MixedFormats(WeightedRegression):
    """Half of the parameters in float64, so that gradients travel in two pieces."""

    def model(self) -> nn.Module:
        model = Mixed()
        model.hidden.double()
        return model

    def network(self) -> nn.Module:
        return Mixed()


class Mixed(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(x.to(self.hidden.weight.dtype)))
        return self.out(hidden.to(self.out.weight.dtype)).squeeze(-1)


@pytest.mark.parametrize("exchange", sorted(EXCHANGES))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_parameters_of_two_formats(pool: Pool, world: int, exchange: str) -> None:
    task = MixedFormats(weighted_regression(20, seed=11).tensors)
    values = {"global_batch": 12, "micro_batch": 3, "steps": 4} | EXCHANGES[exchange]
    assert_exact(task, pool.run(fit, task, values, world=world), windows(20, 12, "short", 4))


def test_seven_ranks(pool: Pool) -> None:
    """1/7 is rounded up in float32, so whatever is multiplied by 7 and then by 1/7 need not come back."""
    task = weighted_regression(40, seed=3)
    values = {"global_batch": 14, "micro_batch": 1, "steps": 12}
    traces = pool.run(fit, task, values, world=7)
    assert_exact(task, traces, windows(40, 14, "short", 12))
