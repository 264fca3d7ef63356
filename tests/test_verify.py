"""`lockstep verify`: every mistake of the zoo is found and called by its name, and healthy tasks raise no alarm.

LOCKSTEP_ALL_PAIRS=1 runs healthy tasks in all default worlds and under fsdp too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import cli
from lockstep.causes import CAUSES, of_failure
from lockstep.errors import UserError
from lockstep.verify.command import WIDTH, VerifyReport, json_of, text_of, verify
from lockstep.verify.compare import FACTOR, compare, first_chaotic_step, gap, same_bits
from lockstep.verify.runner import Runner
from lockstep.verify.trials import Trial, VerifyOptions, check, choose
from zoo import borrowed, broken, healthy

ZOO = Path(__file__).parent / "zoo"
ALL = "LOCKSTEP_ALL_PAIRS" in os.environ
QUICK = VerifyOptions(worlds=(1, 2), steps=3)
FULL = VerifyOptions(strategies=("ddp", "fsdp"), steps=3)


pytestmark = pytest.mark.usefixtures("zygotes")


@pytest.fixture(scope="module")
def runner(zygotes: None) -> Iterator[Runner]:
    """The processes of all verifications are forked from one."""
    with Runner(borrowed.PRELOAD) as made:
        yield made


def assert_readable(report: VerifyReport) -> None:
    lines = text_of(report).splitlines()
    assert max(map(len, lines[1:])) <= WIDTH, text_of(report)  # the first line has a path of the user's
    assert lines[-1].startswith("PASS" if report.passed else "FAIL")
    json.dumps(json_of(report))


# ---- the zoo --------------------------------------------------------------------------------------------


# Every ninth in every run, all of them in `make test-long`; the start check names most of them in every run.
SOME = [
    task if number % 9 == 0 else pytest.param(task, marks=pytest.mark.long) for number, task in enumerate(broken.FOUND)
]


@pytest.mark.parametrize("task", SOME, ids=lambda task: task.__name__)
def test_a_mistake_is_called_by_its_name(runner: Runner, task: type) -> None:
    report = verify(f"{ZOO / 'broken.py'}:{task.__name__}", [], QUICK, runner)
    assert not report.passed
    assert [cause.key for cause in report.causes] == [broken.FOUND[task]], text_of(report)
    assert all(cause.evidence for cause in report.causes)
    assert_readable(report)
    if report.causes[0].key == "nondeterminism":
        others = {row.verdict for row in report.rows if row.role in ("world", "split")}
        assert others == {row["verdict"] for row in json_of(report)["layouts"][3:]} == {"not judged"}
        assert not any("last place" in note for note in report.notes)


@pytest.mark.parametrize(
    ("task", "follows"),
    [
        ("healthy.py:TiedWithDropout", "random numbers"),
        ("healthy.py:Noising", "random numbers"),
        ("broken.py:BatchNorm", "BatchNorm"),
    ],
)
def test_a_pass_that_is_due_to_verify_names_its_condition(runner: Runner, task: str, follows: str) -> None:
    """The same rule for dropout, noise and BatchNorm: only with micro_batch are the layouts those of the run."""
    report = verify(str(ZOO / task), [], QUICK, runner)
    assert report.passed, text_of(report)
    *_, last = text_of(report).splitlines()
    assert last.startswith("PASS with micro_batch=4; it is not set, so this run follows the number of processes")
    assert json_of(report)["condition"] == report.condition
    assert any(follows in note and "set micro_batch=4" in note for note in report.notes)
    assert_readable(report)

    # What the note says to type. Exact mode, which refuses BatchNorm, fixes the micro-batches by itself.
    for layer in ({"micro_batch": 4}, {"exact": True})[: 1 if follows == "BatchNorm" else 2]:
        report = verify(str(ZOO / task), [("test", layer)], QUICK, runner)
        assert report.passed, text_of(report)
        assert text_of(report).splitlines()[-1].startswith("PASS  the same training in every layout")
        assert json_of(report)["condition"] is None
        assert not any("set micro_batch" in note for note in report.notes)


DETECTS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from lockstep import Loss, Task


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x, y):
        boxes = self.body(x)
        return {"box": ((boxes - y) ** 2).sum()} if self.training else list(boxes)


class Detects(Task):
    defaults = {"global_batch": 8, "micro_batch": 4, "steps": 4}

    def model(self):
        return Detector()

    def data(self):
        g = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(32, 4, generator=g), torch.randn(32, 1, generator=g))

    def loss(self, model, batch):
        return Loss(sum(model(*batch).values()), len(batch[0]))
"""


def test_a_loss_that_fails_in_eval_mode_is_judged_by_the_layouts_in_training(runner: Runner, tmp_path: Path) -> None:
    """As models for detection do: they return no losses in eval mode, where only verify calls the loss."""
    (tmp_path / "detects.py").write_text(DETECTS)
    report = verify(f"{tmp_path / 'detects.py'}:Detects", [], QUICK, runner)
    assert report.passed, text_of(report)
    assert report.condition == "without other splits of the batch: the loss fails in eval mode"
    assert any("AttributeError: 'list' object has no attribute 'values'" in note for note in report.notes)
    assert {row.role for row in report.rows} == {"reference", "again", "rounding", "world"}
    assert_readable(report)


def test_batchnorm_is_the_cause_where_verify_cannot_choose_the_micro_batch(runner: Runner) -> None:
    layers = [("test", {"checks.loss": "batch-coupled"})]
    report = verify(f"{ZOO / 'broken.py'}:BatchNorm", layers, QUICK, runner)
    assert [cause.key for cause in report.causes] == ["batchnorm"], text_of(report)
    assert "eval mode" in report.causes[0].evidence
    assert not report.condition


def test_rows_that_are_gathered_by_hand_are_no_carried_state(runner: Runner) -> None:
    """An own loop is not checked at its start, so the comparison itself must tell the two apart."""
    report = verify(str(ZOO / "gathers_by_hand.py"), [], QUICK, runner)
    assert [cause.key for cause in report.causes] == ["rank-in-loss"], text_of(report)
    assert "run.all_gather(rows)" in report.causes[0].fix


HEALTHY = [("healthy", task) for task in healthy.TASKS] + [("borrowed", task) for task in borrowed.TASKS]


# Every ninth in every run, all of them in `make test-long`; the start check lets all of them pass in every run.
SOME_HEALTHY = [
    pair if number % 9 == 0 else pytest.param(*pair, marks=pytest.mark.long) for number, pair in enumerate(HEALTHY)
]


@pytest.mark.parametrize(("file", "task"), SOME_HEALTHY, ids=[task.__name__ for _, task in HEALTHY])
def test_no_false_alarm(runner: Runner, file: str, task: type) -> None:
    stream = task is healthy.PlainStream  # its batch of 8 cannot be divided among 3 processes; fsdp shards it as ddp
    options = QUICK if not ALL or stream else FULL
    report = verify(f"{ZOO / file}.py:{task.__name__}", [], options, runner)
    assert report.passed, text_of(report)
    assert {row.verdict for row in report.rows} <= {"reference", "yardstick", "ok"}
    assert_readable(report)


def test_settings_of_a_task_do_not_stop_it(runner: Runner) -> None:
    """Those that need an evaluation or a checkpoint, of which a trial has none."""
    settings = {"checkpoint": {"best": "eval_loss", "best_mode": "max"}, "evaluate": {"every": 2}}
    settings |= {"nonfinite": {"policy": "rewind"}, "spike": {"policy": "rewind"}, "goals": ["eval_loss <= 1"]}
    report = verify(f"{ZOO / 'healthy.py'}:Sound", [("task default", settings)], QUICK, runner)
    assert report.passed, text_of(report)


PROJECTS = Path(__file__).parent.parent / "examples" / "projects"


def test_a_loss_over_the_global_batch(runner: Runner) -> None:
    """Each rank has one micro-batch, whatever is configured, and the one of the reference is the global batch."""
    layers = [("test", {"micro_batch": 12})]
    report = verify(f"{PROJECTS / 'contrastive.py'}:Contrastive", layers, replace(QUICK, worlds=(1, 2, 3)), runner)
    assert report.passed, text_of(report)
    layouts = [(row.trial.world, row.trial.micro_batch) for row in report.rows if row.role in ("reference", "world")]
    assert layouts == [(1, 24), (2, 12), (3, 8)]
    assert any("run.all_gather" in note for note in report.notes)


def test_what_is_meant_is_not_compared(runner: Runner) -> None:
    layers = [("test", {"checks.loss": "batch-coupled", "micro_batch": 4})]
    report = verify(f"{ZOO / 'broken.py'}:InBatchNegatives", layers, QUICK, runner)
    assert report.passed, text_of(report)
    assert any("checks.loss=batch-coupled" in note for note in report.notes)


def test_the_zoo_is_large_enough() -> None:
    assert len(broken.FOUND) >= 12
    assert len(HEALTHY) >= 8
    assert set(broken.FOUND.values()) <= set(CAUSES)


def test_dropout_was_on_in_the_worlds_and_off_in_the_cuts(runner: Runner) -> None:
    report = verify(f"{ZOO / 'healthy.py'}:TiedWithDropout", [], QUICK, runner)
    assert [row.trial.eval_mode for row in report.rows if row.role == "world"] == [False]
    assert all(row.trial.eval_mode for row in report.rows if row.role == "split")
    assert any("set micro_batch" in note for note in report.notes)


def test_random_numbers_that_stay_are_said(runner: Runner) -> None:
    report = verify(f"{ZOO / 'healthy.py'}:Noising", [], QUICK, runner)
    assert not [row for row in report.rows if row.role == "split"]
    assert any("not compared" in note for note in report.notes)


@pytest.mark.parametrize(("file", "task"), [("healthy", "TiedWithDropout"), ("broken", "LastBit")])
def test_identical_bits_are_asked_for(runner: Runner, file: str, task: str) -> None:
    """What is sound has them under every strategy. A last bit that follows the ranks is found, and only so."""
    target, exact = f"{ZOO / file}.py:{task}", replace(QUICK, exact=True)
    if file == "broken":
        assert verify(target, [], QUICK, runner).passed
        found = verify(target, [], exact, runner)
        assert [cause.key for cause in found.causes] == ["bits"], text_of(found)
        assert [row.verdict for row in found.rows if row.role == "world"] == ["DIFFERS"]
        return
    found = verify(target, [], replace(exact, worlds=(1, 2, 3), strategies=("ddp", "fsdp")), runner)
    assert found.passed, text_of(found)
    assert [row.comparison.bits for row in found.rows if row.comparison and row.role == "world"] == [True] * 4


# ---- a loop of one's own, and the command ---------------------------------------------------------------


def test_a_script_with_its_own_loop(runner: Runner) -> None:
    assert verify(str(ZOO / "own_loop.py"), [], QUICK, runner).passed


WITH_ARGUMENTS = """# The other file calls lockstep.start().
import argparse, runpy
parser = argparse.ArgumentParser()
parser.add_argument("--loop", required=True)
runpy.run_path(parser.parse_args().loop, run_name="__main__")
"""


def test_a_script_gets_its_arguments(runner: Runner, tmp_path: Path) -> None:
    script = tmp_path / "with_arguments.py"
    script.write_text(WITH_ARGUMENTS)
    arguments = ["--loop", str(ZOO / "own_loop.py")]
    assert verify(str(script), [], replace(QUICK, worlds=(1, 2)), runner, arguments).passed

    # Without them argparse ends the script, in any layout.
    with pytest.raises(UserError, match=r"with_arguments\.py does not take the arguments") as refused:
        verify(str(script), [], QUICK, runner)
    assert refused.value.found == "no arguments: the following arguments are required: --loop"
    assert f"{script} -- --name value" in refused.value.fix


@pytest.mark.parametrize(
    ("broken", "cause", "fix", "kind"),
    [
        ("sum", "mean-for-sum", "reduction='sum'", "refused"),
        ("weight", "mean-of-means", "call step.backward(sum, weight=number of terms)", "loss weight"),
    ],
)
def test_the_command(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    broken: str,
    cause: str,
    fix: str,
    kind: str,
) -> None:
    """A broken script, through the command: exit code 1, the cause on the screen and in the file."""
    monkeypatch.setenv("BROKEN", broken)
    out = tmp_path / "verify.json"
    arguments = ["verify", str(ZOO / "own_loop.py"), "--worlds", "1,2", "--steps", "2", "--splits", "3", "lr.warmup=1"]
    assert cli.main([*arguments, "--json", str(out)]) == 1
    printed = capsys.readouterr().out
    assert f"[{cause}]" in printed
    assert fix in printed
    found = json.loads(out.read_text())
    assert found["passed"] is False

    # A mean is refused in the first backward, so that no layout gets to a step that could be compared.
    if kind == "refused":
        assert found["first"] is None
    else:
        assert found["first"]["kind"] == kind
        assert found["first"]["step"] == 1
        assert [row["micro_batch"] for row in found["layouts"] if row["role"] == "split"] == [3]

    assert not list(tmp_path.glob("runs")), "a verification leaves no run folder behind"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "the target nothing is not a recipe"),
        (["char_lm", "--worlds", "1,two"], "is not a list of whole numbers"),
        (["char_lm", "--worlds", "0,1"], "--worlds 0,1 has a count below 1"),
        (["char_lm", "--strategies", "pp"], "use some of ddp"),
        (["char_lm", "--exact", "--strategies", "ddp,hsdp"], "hsdp, which cannot be exact"),
        (["char_lm", "stepz=3"], "there is no key stepz"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("for step in range(3):\n    pass\n", "wrap its loop with lockstep.start: see docs/own_loop.md"),
        ("class Mine(lockstep.Task): ...\nclass Next(Mine): ...\nclass Other: ...\n", "plain.py:Mine or {}:Next\n"),
    ],
)
def test_a_script_without_a_run(source: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is shown the way into its loop, or to the tasks that it defines."""
    script = tmp_path / "plain.py"
    script.write_text(source)
    assert cli.main(["verify", str(script)]) == 2
    assert words.format(script) in capsys.readouterr().err


def test_ranks_that_wait_forever_are_ended_and_named() -> None:
    """The limit is short, and it does not matter whether it is met while starting or while waiting."""
    trial = Trial(2, 4)
    with Runner(limit=timedelta(seconds=4)) as runner:
        record = runner.run(f"{ZOO / 'broken.py'}:WaitsForRank0", [], 2, [trial])[trial]
    assert record.failure is not None
    assert record.failure.cause == "hang"


def test_a_task_that_cannot_run_is_the_users_to_fix(runner: Runner) -> None:
    with pytest.raises(UserError, match="neither global_batch nor local_batch is set"):
        verify(f"{ZOO / 'broken.py'}:MeanOfMeans", [("test", {"global_batch": None})], QUICK, runner)


# ---- which trials ---------------------------------------------------------------------------------------

FACTS: dict[str, Any] = {"global_batch": 16, "micro_batch_asked": None, "stream": False, "strategy": "ddp"}
FACTS |= {"gathers": False, "accepted": []}


def test_trials_by_default() -> None:
    matrix = choose(VerifyOptions(), FACTS)
    assert [trial.world for trial in matrix.worlds] == [2, 3, 4]
    assert len({trial.micro_batch for trial in (matrix.reference, *matrix.worlds)}) == 1, "one split for all worlds"
    assert -(-16 // (matrix.reference.micro_batch or 16)) >= 4, "work for every rank"
    sizes = [trial.micro_batch or 0 for trial in matrix.splits]
    assert 16 in sizes
    assert any(16 % size for size in sizes), "one of the splits leaves a ragged rest"


def test_a_micro_batch_that_was_asked_for_is_the_largest() -> None:
    matrix = choose(VerifyOptions(), FACTS | {"micro_batch_asked": 4})
    assert matrix.reference.micro_batch == 4
    assert all((trial.micro_batch or 99) <= 4 for trial in (matrix.reference, *matrix.worlds, *matrix.splits))


@pytest.mark.parametrize("facts", [{"gathers": True, "micro_batch_asked": 8}, {"accepted": ["batch-coupled"]}])
def test_a_micro_batch_for_each_world(facts: dict[str, Any]) -> None:
    matrix = choose(VerifyOptions(), FACTS | facts)
    assert [trial.micro_batch for trial in (matrix.reference, *matrix.worlds)] == [16, 8, 6, 4]
    assert matrix.one_each
    assert bool(matrix.splits) == ("gathers" not in facts)
    same = choose(VerifyOptions(), FACTS | {"accepted": ["batch-coupled"], "micro_batch_asked": 4})
    assert not same.one_each


def test_worlds_that_do_not_fit() -> None:
    small = FACTS | {"global_batch": 3}
    assert [trial.world for trial in choose(VerifyOptions(), small).worlds] == [2, 3]
    assert choose(VerifyOptions(), small).notes
    with pytest.raises(UserError, match="cannot be divided among 4"):
        choose(VerifyOptions(worlds=(1, 4)), small)
    stream = choose(VerifyOptions(), FACTS | {"stream": True})
    assert [trial.world for trial in stream.worlds] == [2, 4]
    assert all(16 // trial.world % (trial.micro_batch or 99) == 0 for trial in stream.worlds)


def test_unknown_strategies_are_refused() -> None:
    with pytest.raises(UserError, match="use some of"):
        check(VerifyOptions(strategies=("ddp", "pp")))


# ---- the rule -------------------------------------------------------------------------------------------


class Told:
    """A record of one step, told by hand."""

    steps = 1

    def __init__(self, weights: list[float], loss: float = 1.0):
        self._weights = np.array(weights, dtype=np.float32)
        self._loss = loss

    def tensors(self, kind: str, step: int) -> dict[str, np.ndarray]:
        return {"w": self._weights}

    def loss(self, step: int) -> float:
        return self._loss

    def weight(self, step: int) -> float:
        return 8.0

    def metrics(self, step: int) -> dict[str, float]:
        return {}


def judged(found: Told, nudged: Told) -> Any:
    kinds = ("gradient", "loss", "number of steps")
    return compare(found, Told([1.0, 2.0]), [nudged], kinds)  # pyrefly: ignore


def test_what_the_nudged_runs_do_is_allowed() -> None:
    """The measure is theirs, tensor by tensor; without any noise it is the last place of the largest element."""
    still, moved = Told([1.0, 2.0]), Told([1.0, 2.001])
    assert judged(Told([1.0, 2.0]), still).bits
    assert judged(Told([1.0, 2.0 + 1e-6]), still).first is None
    off = judged(Told([1.0, 2.0 + 1e-4]), still).first
    assert (off.kind, off.name, off.step) == ("gradient", "w", 0)
    assert judged(Told([1.0, 2.0 + 1e-4]), moved).first is None
    assert judged(Told([1.0, 2.001 + FACTOR * 0.001]), moved).first is not None
    assert judged(Told([1.0, 2.0], loss=1.0001), still).first.kind == "loss"


def test_gaps() -> None:
    assert gap(np.array([1.0, np.nan]), np.array([1.0, np.nan])) == 0.0
    assert gap(np.array([1.0]), np.array([np.nan])) == np.inf
    assert gap(np.array([1.0]), np.array([1.0, 2.0])) == np.inf
    assert gap(np.array([1, 5]), np.array([1, 2])) == 3.0


def test_bits() -> None:
    one = np.array([1.0, 0.0, np.nan], dtype=np.float32)
    assert same_bits(one, one.copy())
    assert not same_bits(one, np.array([1.0, -0.0, np.nan], dtype=np.float32))
    assert not same_bits(one, one.astype(np.float64))
    assert not same_bits(one, one[:2])


def test_a_yardstick_that_allows_everything_is_said() -> None:
    """What may be 32 times as far away as a nudged run must not be twice the gradient."""
    still, moved, turned = Told([1.0, 2.0]), Told([1.0, 2.001]), Told([1.0, -2.0])
    assert first_chaotic_step(still, [still, moved]) is None  # pyrefly: ignore
    assert first_chaotic_step(still, [moved, turned]) == 0  # pyrefly: ignore


def test_the_page_lists_the_causes() -> None:
    """After a change: print these, and paste them."""
    rows = [f"| `{cause.key}` | {cause.title} | {cause.fix} |" for cause in CAUSES.values()]
    page = (ZOO.parent.parent / "docs" / "verify.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows


def test_a_refusal_with_a_cause_of_its_own_says_only_what_was_found() -> None:
    cause = of_failure("changed-in-forward", "a forward that ...\n  found: it changes d.u\n  do:    use a norm", True)
    assert cause.evidence == "it changes d.u"
    assert of_failure("changed-in-forward", "no parts", True).evidence == "no parts"
    assert of_failure("", "a\n  found: b\n  do:    c", True).evidence == "a\n  found: b\n  do:    c"
