"""Steps whose gradient is not finite: all ranks skip them, or all stop. And the fp16 loss scale they agree on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.task import Loss
from pool import Pool
from ranks.support import JOBS, WeightedRegression, assert_user_errors, flat, weighted_regression

BAD_RANK, LENGTH, BATCH = 1, 64, 8
# One micro-batch per rank and step, and rates that differ from step to step.
BASE = {"global_batch": BATCH, "micro_batch": 4, "steps": 12, "lr.schedule": "linear", "lr.warmup": 2}
FP16 = {"precision": "fp16", "scaler.initial": 1024.0, "scaler.interval": 3}


class Injected(WeightedRegression):
    """Multiplies the loss of one rank by infinity in some steps."""

    bad_steps: frozenset[int] = frozenset()

    def optimizer(self, model: nn.Module) -> Any:
        self.calls = 0
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        if self.calls in self.bad_steps and dist.get_rank() == BAD_RANK:
            loss.total = loss.total * math.inf
        self.calls += 1
        return loss


def injected(*bad_steps: int) -> Injected:
    task = Injected(weighted_regression(LENGTH, seed=8, zeros=0.0).tensors)
    task.bad_steps = frozenset(bad_steps)
    return task


@pytest.mark.parametrize("job", sorted(JOBS))
def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: Pool, job: str) -> None:
    bad = 5
    traces = pool.run(JOBS[job], injected(bad), BASE | FP16, world=2)
    for trace in traces:
        assert [note.result.applied for note in trace.steps] == [step != bad for step in range(12)]
        assert torch.equal(flat(trace.steps[bad].weights), flat(trace.before(bad)))
        for step in set(range(12)) - {bad}:
            assert not torch.equal(flat(trace.steps[step].weights), flat(trace.before(step))), f"step {step}"
            assert math.isfinite(trace.steps[step].result.grad_norm)
        assert torch.equal(flat(trace.steps[-1].weights), flat(traces[0].steps[-1].weights))
        # Grows after every 3 good steps, halves at the bad one, and counts its 3 again from there.
        assert [note.scale for note in trace.steps] == [
            *(1024.0, 1024.0, 2048.0),
            *(2048.0, 2048.0, 1024.0),
            *(1024.0, 1024.0, 2048.0),
            *(2048.0, 2048.0, 4096.0),
        ]


def test_which_steps_overflow_does_not_depend_on_the_number_of_ranks(pool: Pool) -> None:
    """The loss scale is divided by a typical weight: that of one micro-batch, whoever computes it."""
    x, y, _ = weighted_regression(LENGTH, seed=8).tensors
    weights = 4 ** torch.randint(0, 6, (LENGTH,), generator=torch.Generator().manual_seed(1))
    values = BASE | {"precision": "fp16", "micro_batch": 1, "steps": 24}

    skipped = []
    for world in (1, 2, 4):
        for trace in pool.run(JOBS["fit"], WeightedRegression([x, y, weights]), values, world=world):
            skipped.append([step for step, note in enumerate(trace.steps) if not note.result.applied])

    assert skipped[0], "nothing overflows, so this shows nothing"
    assert all(steps == skipped[0] for steps in skipped)


def test_the_schedule_stands_still_while_a_step_is_skipped(pool: Pool) -> None:
    clean = pool.run(JOBS["fit"], injected(), BASE | FP16, world=2)[0]
    for trace in pool.run(JOBS["fit"], injected(5), BASE | FP16, world=2):
        rates = [note.lr for note in trace.steps]
        expected = [note.lr for note in clean.steps]
        assert rates[:6] == expected[:6]
        assert rates[6] == rates[5], "the rate of the skipped step is used by the next one"
        assert rates[6:] == expected[5:-1]


def test_the_scale_leaves_no_trace_in_the_gradient(pool: Pool) -> None:
    """Computed in fp16, so only near the reference; a scale left in it would be off by a factor of 2 or more."""
    task = injected()
    traces = pool.run(JOBS["fit"], task, BASE | FP16 | {"micro_batch": 2}, world=2)
    for step in range(12):
        ids = [i for trace in traces for i in trace.steps[step].ids]
        expected = flat(task.reference(traces[0].before(step), ids))
        for trace in traces:
            found = flat({name: grad for name, grad in trace.steps[step].grads.items() if grad is not None})
            assert float((found - expected).norm() / expected.norm()) < 5e-3


def test_in_fp32_a_bad_step_is_skipped_and_training_goes_on(pool: Pool) -> None:
    traces = pool.run(JOBS["fit"], injected(3, 4), BASE | {"nonfinite.max_in_a_row": 3}, world=2)
    for trace in traces:
        assert [note.result.applied for note in trace.steps] == [step not in (3, 4) for step in range(12)]
        assert torch.equal(flat(trace.steps[4].weights), flat(trace.before(3)))
        assert not torch.equal(flat(trace.steps[5].weights), flat(trace.before(5)))
        assert (trace.summary["applied"], trace.summary["skipped"]) == (10, 2)


@pytest.mark.parametrize(
    ("values", "last"),
    [({"nonfinite.max_in_a_row": 3}, "step 7"), ({"nonfinite.policy": "stop"}, "step 5")],
    ids=["three in a row", "policy=stop"],
)
@pytest.mark.parametrize("job", sorted(JOBS))
def test_in_fp32_it_stops_and_names_the_parameter(pool: Pool, job: str, values: dict[str, Any], last: str) -> None:
    errors = pool.errors(JOBS[job], injected(4, 5, 6, 7), BASE | values, world=2)
    assert_user_errors(errors, f"{last}:", "no finite gradient for 4 of 4 parameters, first 'hidden.weight'")


class OneBadParameter(Injected):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = WeightedRegression.loss(self, model, batch)
        if dist.get_rank() == BAD_RANK:
            loss.total = loss.total + math.inf * model.out.bias.sum()
        return loss


def test_it_names_the_one_bad_parameter(pool: Pool) -> None:
    task = OneBadParameter(injected().tensors)
    errors = pool.errors(JOBS["fit"], task, BASE | {"nonfinite.policy": "stop"}, world=2)
    assert_user_errors(errors, "step 1:", "no finite gradient for 1 of 4 parameters, first 'out.bias'")


def test_skips_that_are_not_in_a_row_do_not_stop(pool: Pool) -> None:
    values = BASE | {"nonfinite.max_in_a_row": 2}
    for trace in pool.run(JOBS["fit"], injected(1, 3, 5, 7), values, world=2):
        assert sum(not note.result.applied for note in trace.steps) == 4


def test_fp16_gives_up_at_the_smallest_scale(pool: Pool) -> None:
    """While halving can help it is not a failure; at the minimum it is."""
    values = BASE | FP16 | {"scaler.initial": 4.0, "scaler.minimum": 1.0, "nonfinite.max_in_a_row": 3}
    errors = pool.errors(JOBS["fit"], injected(*range(12)), values, world=2)
    assert_user_errors(
        errors, "step 5:", "first 'hidden.weight' (rank 1, micro-batch 1: loss inf, samples", "3 such steps in a row"
    )
