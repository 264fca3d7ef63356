"""What a line of the log covers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from lockstep.engine.log.step_log import SampleLog, StepLog
from lockstep.observe.metrics import EndedInterval, Interval, MetricNames, Sums
from lockstep.observe.sinks import read_jsonl
from lockstep.parallel.progress import PassProgress
from lockstep.precision import PRECISIONS
from lockstep.task import StepBatches

COLLECTIVES: Any = SimpleNamespace(all_gather_json=lambda value: [value])


class Lines:
    """In place of a recorder: keeps the intervals."""

    def __init__(self) -> None:
        self.intervals: list[EndedInterval] = []

    def end_interval(self, interval: Interval, late_steps: int, names: Sequence[str], numbers: dict[str, Any]) -> None:
        self.intervals.append(interval.end(late_steps))

    def poll(self) -> None:
        pass


def logged(late: bool) -> tuple[StepLog, Lines, Any]:
    """A log with a line every 3 of 8 steps; on a GPU, outcomes come `late`."""
    stepper: Any = SimpleNamespace(
        steps_done=0,
        steps_skipped=0,
        lr=0.1,
        scaler=None,
        late_steps=int(late),
    )
    lines: Any = Lines()
    plan: Any = SimpleNamespace(epochs_after=lambda steps: None)
    return StepLog(3, plan, stepper, Interval(Sums(), MetricNames(new=False)), lines, COLLECTIVES), lines, stepper


def run_steps(log: StepLog, stepper: Any, last: int) -> None:
    while stepper.steps_done < last:
        stepper.steps_done += 1
        is_last = stepper.steps_done == 8
        stepper.late_steps &= not is_last  # the last line waits
        log.end_step(4, None, is_last)
        log.write_if_due()


def test_late_outcomes_belong_to_the_next_line() -> None:
    log, lines, stepper = logged(late=True)
    run_steps(log, stepper, 8)
    assert [(line.steps, line.samples, line.steps_in_sums) for line in lines.intervals] == [
        (3, 12, 2),
        (3, 12, 3),
        (2, 8, 3),
    ]


def test_outcomes_that_are_known_at_once_belong_to_their_line() -> None:
    log, lines, stepper = logged(late=False)
    run_steps(log, stepper, 8)
    assert [(line.steps, line.steps_in_sums) for line in lines.intervals] == [(3, 3), (3, 3), (2, 2)]


def test_a_rewind_leaves_no_outcome_open() -> None:
    """A checkpoint waits for the outcome of its step, so its sums have all losses."""
    log, lines, stepper = logged(late=True)
    run_steps(log, stepper, 3)
    log.load_state_dict({})
    run_steps(log, stepper, 6)
    assert [line.steps_in_sums for line in lines.intervals] == [2, 2]


def test_the_sample_log_numbers_steps_as_the_log_lines_do(tmp_path: Path) -> None:
    """The first step is step 1 in both: it is the step that ends as `step 1/8`."""
    folder: Any = SimpleNamespace(path=tmp_path, attempt=0)
    (tmp_path / "samples").mkdir()
    log = SampleLog(folder, 0)
    log.end_step(PassProgress(cast(Any, SimpleNamespace(precision=PRECISIONS["fp32"])), StepBatches(1, [], 4), 0))
    log.close()
    assert [line["step"] for line in read_jsonl(tmp_path / "samples" / "rank-0.jsonl")] == [1]


def test_names_from_a_checkpoint_do_not_end_an_exchange_that_is_due() -> None:
    names = MetricNames()
    names.see(["accuracy", "loss"])
    names.restore(["loss"])
    assert (names.new, names.unshared) == (True, {"accuracy"})
    names.agree(COLLECTIVES)
    assert (names.new, names.unshared, names.known) == (False, set(), ["loss", "accuracy"])
    names.announce()
    assert names.new
