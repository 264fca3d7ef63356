"""Runs whose host learns of an outcome one step late train as those on a CPU do. See fake_cuda.py for the GPU."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fake_cuda import FakeGpu, fake_gpu
from lockstep.config import resolve
from lockstep.engine import loop
from lockstep.engine.outcomes.late import LateOutcome
from lockstep.engine.own_loop import OwnRun
from lockstep.engine.passes import StepStatus
from lockstep.engine.setup import data as data_setup
from lockstep.engine.setup import open_run
from lockstep.engine.step import Stepper
from lockstep.errors import Preempted, UserError
from lockstep.observe.sinks import read_jsonl
from lockstep.optim.weight_average import WeightAverage
from lockstep.runtime import context
from lockstep.runtime.control_word import ControlWord, ControlWordCodec
from lockstep.runtime.world import World
from lockstep.task import Loss, StepResult, Task

SETTINGS = {
    "device": "cpu",
    "precision": "fp32",
    "compile": False,
    "graph": False,
    "global_batch": 8,
    "micro_batch": 4,
    "steps": 16,
    "lr.schedule": "constant",
    "clip.norm": 0.5,
    "ema.decay": 0.9,
    "log.progress": "off",
    "log.every": 3,
    "checkpoint.every": 5,
    "data.shuffle": False,
    "checks.loss": "off",
    "resume": "auto",
}

Hook = Callable[[Any, StepResult | None], None]


def without_limit(text: str) -> str:
    return re.sub(r", above [\d.]+", "", text)


@dataclass
class Trained:
    """What a run leaves behind."""

    weights: dict[str, Tensor]
    averages: dict[str, Tensor]
    summary: dict[str, Any]
    folder: Path
    results: dict[int, StepResult] = field(default_factory=dict)  # those that hooks saw, by step

    @property
    def lines(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.folder / "metrics.jsonl"))

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """Skips, rewinds and stops. The limit of a spike is left out: a GPU's lacks the loss of the step before."""
        found = self.events("skip", "rewind", "stop")
        return [{**event, "reason": without_limit(event["reason"])} for event in found]

    def events(self, *names: str) -> list[dict[str, Any]]:
        found = [event for event in read_jsonl(self.folder / "events.jsonl") if event["event"] in names]
        return [{key: value for key, value in event.items() if key != "time"} for event in found]


class Wobbly(Task):
    """Regression with samples whose loss is not finite, far too large, or has weight 0."""

    def __init__(self, nan: tuple[int, ...] = (), huge: tuple[int, ...] = (), empty: range = range(0)):
        self.nan, self.huge, self.empty = nan, huge, empty
        self.results: dict[int, StepResult] = {}
        self.reported: list[int] = []  # the steps whose results `after_step` got
        self.hook: Hook | None = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)

    def data(self) -> Any:
        x = torch.randn(96, 3, generator=torch.Generator().manual_seed(1))
        y, weight = x.sum(1), torch.ones(96)
        y[list(self.nan)] = math.nan
        y[list(self.huge)] = 1e4
        weight[list(self.empty)] = 0.0
        return TensorDataset(x, y, weight)

    def eval_data(self) -> Any:
        return TensorDataset(*(column[:8] for column in Wobbly().data().tensors))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y, weight = batch
        errors = (model(x)[:, 0] - y) ** 2
        return Loss((errors * weight).sum(), float(weight.sum()), {"first": (float(x[0, 0]), 1.0)})

    def after_step(self, run: Any, result: StepResult | None) -> None:
        if result is not None:
            self.results[result.step] = result
            self.reported.append(result.step)
        if self.hook:
            self.hook(run, result)


def trained(task: Wobbly, folder: Path, **settings: Any) -> Trained:
    resolved = resolve([("test", SETTINGS | settings | {"run_dir": str(folder)})])
    with context.start(World(), resolved.config) as runtime:
        builder = open_run(resolved, runtime, "test")
        try:
            training = loop.Training(task, builder)
            for _ in training.steps():
                pass
            summary = training.end()
            model, average = builder.driver.model, training.run.trained_model.average
        finally:
            builder.recorder.close()
            builder.folder.release_lock()

    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    averages = {name: t.clone() for name, t in average.parameter_tensors.items()} if average else {}
    return Trained(weights, averages, summary, folder, task.results)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], FakeGpu]:
    """A function after which runs believe that they are on a GPU."""
    return lambda: fake_gpu(monkeypatch)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def assert_same_run(cpu: Trained, late: Trained) -> None:
    """Check that both have trained the same: weights, averages, skips, checkpoints, and every result that was seen."""
    assert_same(cpu.weights, late.weights)
    assert_same(cpu.averages, late.averages)
    assert cpu.decisions == late.decisions
    for key in ("step", "applied", "skipped"):
        assert cpu.summary[key] == late.summary[key], key
    assert cpu.summary.get("eval_loss") == late.summary.get("eval_loss")
    for step, result in late.results.items():
        assert without_limit(repr(result)) == without_limit(repr(cpu.results[step]))
    assert saved(cpu.folder).keys() == saved(late.folder).keys()
    for step, (tensors, state) in saved(cpu.folder).items():
        assert_same(tensors, saved(late.folder)[step][0])
        assert state == saved(late.folder)[step][1]


def saved(folder: Path) -> dict[str, tuple[dict[str, Tensor], Any]]:
    """The tensors and the state in each checkpoint, by its name."""
    found = {}
    for path in sorted((folder / "checkpoints").glob("step-*")):
        values = json.loads((path / "manifest.json").read_text())["content"]["values"]
        found[path.name] = load_file(path / "rank-00000.safetensors"), values["state"]
    return found


def expected_lines(cpu: Trained, every: int) -> list[tuple[int, float, float | None]]:
    """The step, the weight and the loss of the lines of late outcomes: all but the last lack their own last step."""
    results = [cpu.results[step] for step in sorted(cpu.results)]
    ends = [*range(every, len(results), every), len(results)]
    lines, begin = [], 0
    for end in ends:
        until = end if end == len(results) else end - 1
        counted = [result for result in results[begin:until] if result.applied]
        weight = sum(result.weight for result in counted)
        total = sum(result.loss * result.weight for result in counted)
        lines.append((end, weight, total / weight if weight else None))
        begin = until
    return lines


CASES = {
    "nothing": (Wobbly, {}),
    "the first step": (lambda: Wobbly(nan=(3,)), {}),
    "the last step": (lambda: Wobbly(nan=(25,)), {}),
    "two in a row, and one before a save": (lambda: Wobbly(nan=(45, 50, 75)), {}),
    "weight 0": (lambda: Wobbly(empty=range(16, 32)), {}),
    "weight 0 at both ends": (lambda: Wobbly(empty=range(32)), {}),
    "a spike": (lambda: Wobbly(huge=(90,)), {"spike.policy": "skip", "spike.window": 16}),
    "rewind": (lambda: Wobbly(nan=(45,)), {"nonfinite.policy": "rewind"}),
    "rewind before a save": (lambda: Wobbly(nan=(75,)), {"nonfinite.policy": "rewind"}),
    "rewind after a save": (lambda: Wobbly(nan=(45, 83)), {"nonfinite.policy": "rewind"}),
    "rewind in the last step": (lambda: Wobbly(nan=(25,)), {"nonfinite.policy": "rewind", "steps": 19}),
    "rewind from a spike": (lambda: Wobbly(huge=(90,)), {"spike.policy": "rewind", "spike.window": 16}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_trains_as_on_a_cpu(case: str, tmp_path: Path, gpu: Callable[[], FakeGpu]) -> None:
    make, settings = CASES[case]
    cpu = trained(make(), tmp_path / "cpu", **settings)
    fake = gpu()
    task = make()
    late = trained(task, tmp_path / "late", **settings)
    assert_same_run(cpu, late)
    if not cpu.events("rewind"):
        # Each result once, also those that a save has read early. Only the last step reports its own in place of the
        # one before it.
        steps = sorted(cpu.results)
        assert task.reported == [*steps[:-2], steps[-1]]
        assert all("grad_norm" in line for line in late.lines)
    assert fake.calls.count("host waits for an event") >= late.summary["step"]
    assert {line["memory_mb"] for line in late.lines} == {3.0}
    assert all(math.isfinite(line["weight"]) for line in late.lines)  # read after they have arrived

    if not cpu.events("rewind"):
        lines = [(line["step"], line["weight"], line["loss"]) for line in late.lines]
        for found, expected in zip(lines, expected_lines(cpu, 3), strict=True):
            assert found[:2] == expected[:2]
            assert expected[2] is None or found[2] == pytest.approx(expected[2], rel=1e-6)
        for key in ("step", "samples", "lr", "epoch"):
            assert [line.get(key) for line in late.lines] == [line.get(key) for line in cpu.lines], key

    # The weight is that of the steps whose outcome is known, and so is the time that it is divided by.
    if case == "nothing":
        for line in late.lines:
            assert line["weight_per_s"] * line["step_s"] == pytest.approx(8)


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_a_policy_ends_the_run_one_step_later_with_the_same_words(
    policy: str, tmp_path: Path, gpu: Callable[[], FakeGpu]
) -> None:
    settings = {"nonfinite.policy": policy, "nonfinite.max_in_a_row": 2}
    words = []
    for name in ("cpu", "late"):
        task = Wobbly(nan=(45, 50))
        with pytest.raises(UserError) as caught:
            trained(task, tmp_path / name, **settings)
        words.append(str(caught.value).splitlines()[0])
        gpu()
    assert words[0] == words[1]
    assert words[0].startswith("step 6" if policy == "stop" else "step 7")


def test_the_host_judges_a_spike_by_the_limit_that_the_device_had(tmp_path: Path, gpu: Callable[[], FakeGpu]) -> None:
    """By the time it reads the outcome, another loss has moved the limit. Here many losses are close to it."""
    gpu()
    settings = {"spike.policy": "skip", "spike.factor": 1.5, "spike.window": 8, "nonfinite.max_in_a_row": 1000}
    late = trained(Wobbly(), tmp_path / "late", **settings, **{"steps": 70, "data.shuffle": True})
    assert late.summary["skipped"] > 5
    tensors, _ = saved(late.folder)["step-00000070"]
    assert tensors["optimizer.0.0.weight.step"].item() == late.summary["applied"]  # counted on the device


def test_only_the_step_after_a_skip_is_one_point_ahead_on_the_schedule(
    tmp_path: Path, gpu: Callable[[], FakeGpu]
) -> None:
    settings = {"lr.schedule": "linear", "lr.warmup": 2, "log.every": 1}
    cpu = trained(Wobbly(nan=(45,)), tmp_path / "cpu", **settings)
    gpu()
    late = trained(Wobbly(nan=(45,)), tmp_path / "late", **settings)
    rates = [[line["lr"] for line in run.lines] for run in (cpu, late)]
    assert [step for step in range(16) if rates[0][step] != rates[1][step]] == [6]
    assert rates[1][6] == rates[0][7]


@pytest.mark.parametrize("case", ["two in a row, and one before a save", "rewind after a save", "a stream"])
def test_batches_that_are_copied_ahead_belong_to_the_steps_that_count_them(
    case: str, tmp_path: Path, gpu: Callable[[], FakeGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rewind throws away what was copied ahead. What is used before it has arrived is nan."""
    make, settings = CASES.get(case, (lambda: Streaming(), {"steps": 5}))
    cpu = trained(make(), tmp_path / "cpu", **settings)
    fake = gpu()
    options = data_setup.SourceOptions
    monkeypatch.setattr(
        data_setup, "SourceOptions", lambda **others: options(**others | {"device": torch.device("cuda")})
    )
    late = trained(make(), tmp_path / "late", **settings)
    assert_same_run(cpu, late)
    assert fake.calls.count("copy 1 copies") >= 3 * 9  # three columns of nine micro-batches
    gc.collect()  # a run leaves iterators behind, which wait for their copies: while there is a fake to ask


# ---- saves, stops, evaluations ----


@pytest.mark.parametrize("policy", ["skip", "rewind"])
@pytest.mark.parametrize("resumed_late", [True, False])
def test_a_run_resumes_on_either_device(
    policy: str, resumed_late: bool, tmp_path: Path, gpu: Callable[[], FakeGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is that of a CPU, whose run may continue it. Lines are those of a run that was not interrupted."""
    settings = {"nonfinite.policy": policy, "checkpoint.asynchronous": False}
    cpu = trained(Wobbly(nan=(45, 83)), tmp_path / "cpu", **settings)
    with monkeypatch.context() as patch:
        fake_gpu(patch)
        whole = trained(Wobbly(nan=(45, 83)), tmp_path / "whole", **settings)

        def stop(run: Any, result: StepResult | None) -> None:
            if run.steps_done == 10:
                raise KeyboardInterrupt

        task = Wobbly(nan=(45, 83))
        task.hook = stop
        with pytest.raises(KeyboardInterrupt):
            trained(task, tmp_path / "run", **settings)
    if resumed_late:
        gpu()
    resumed = trained(Wobbly(nan=(45, 83)), tmp_path / "run", **settings)
    assert_same(resumed.weights, cpu.weights)
    assert_same(resumed.averages, cpu.averages)
    assert resumed.summary["applied"] == cpu.summary["applied"]
    if resumed_late:
        lines = [[(line["step"], line["loss"], line["weight"]) for line in run.lines] for run in (whole, resumed)]
        assert lines[0][-3:] == lines[1][-3:]


@pytest.mark.parametrize("when", [4, 5, 9])
def test_a_preemption_while_an_outcome_is_late(when: int, tmp_path: Path, gpu: Callable[[], FakeGpu]) -> None:
    """Every outcome is known when the last checkpoint is written, though it comes after steps that were skipped."""
    cpu = trained(Wobbly(nan=(45, 83)), tmp_path / "cpu")
    fake = gpu()
    task = Wobbly(nan=(45, 83))

    def preempt(run: Any, result: StepResult | None) -> None:
        if run.steps_done == when:
            os.kill(os.getpid(), signal.SIGTERM)

    task.hook = preempt
    with pytest.raises(Preempted) as caught:
        trained(task, tmp_path / "late")
    # The signal travels with the next step, whose control word is read with the one after it, or at a save.
    assert caught.value.step == (when + 2 if when == 5 else when + 1)
    task.hook = None
    late = trained(task, tmp_path / "late")
    assert_same(cpu.weights, late.weights)
    assert_same(cpu.averages, late.averages)
    assert cpu.events("skip") == late.events("skip")
    assert cpu.summary["applied"] == late.summary["applied"]
    assert fake.calls


def test_a_stop_that_is_requested_while_an_outcome_is_late(tmp_path: Path, gpu: Callable[[], FakeGpu]) -> None:
    def stop(run: Any, result: StepResult | None) -> None:
        if run.steps_done == 6:
            run.stop("enough")

    gpu()
    task = Wobbly(nan=(50,))  # in the step that carries the request
    task.hook = stop
    late = trained(task, tmp_path / "late")
    assert late.summary["step"] == 8
    assert [event["reason"] for event in late.events("stop")] == ["enough"]
    assert late.lines[-1]["step"] == 8


@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_evaluations_between_steps_see_the_same_averages(
    policy: str, tmp_path: Path, gpu: Callable[[], FakeGpu]
) -> None:
    settings = {"evaluate.every": 1, "nonfinite.policy": policy, "checkpoint.best": "eval_loss"}
    runs = []
    for name in ("cpu", "late"):
        run = trained(Wobbly(nan=(45, 83)), tmp_path / name, **settings)
        runs.append(({event["step"]: event["loss"] for event in run.events("eval")}, run))
        gpu()
    assert len(runs[0][0]) >= 15
    assert runs[0][0] == runs[1][0]
    assert_same_run(runs[0][1], runs[1][1])


def test_fp16_is_never_late(tmp_path: Path, gpu: Callable[[], FakeGpu], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next loss scale depends on the outcome."""
    settings = {"precision": "fp16", "scaler.initial": 2.0**24, "nonfinite.max_in_a_row": 100}
    cpu = trained(Wobbly(nan=(83,)), tmp_path / "cpu", **settings)
    fake = gpu()
    monkeypatch.setattr(Stepper, "_apply_late", None)
    late = trained(Wobbly(nan=(83,)), tmp_path / "late", **settings)
    assert_same_run(cpu, late)
    assert len(cpu.events("skip")) > 1
    assert "host waits for an event" not in fake.calls
    for key in ("scale", "step", "loss", "weight"):
        assert repr([line[key] for line in late.lines]) == repr([line[key] for line in cpu.lines]), key


@pytest.mark.parametrize(
    "settings",
    [{"clip.norm": None, "clip.value": 0.1}, {"clip.norm": None, "clip.adaptive": 0.1}, {"optimizer": "sgd"}],
)
def test_updates_that_cannot_skip_on_the_device_are_not_late(
    settings: dict[str, Any], tmp_path: Path, gpu: Callable[[], FakeGpu]
) -> None:
    cpu = trained(Wobbly(nan=(45,)), tmp_path / "cpu", **settings)
    fake = gpu()
    late = trained(Wobbly(nan=(45,)), tmp_path / "late", **settings)
    assert_same_run(cpu, late)
    assert late.results.keys() == cpu.results.keys()
    assert "host waits for an event" not in fake.calls


def test_a_late_outcome_is_what_the_device_has_decided() -> None:
    """It is read, not computed again: these numbers would be applied."""
    codec = ControlWordCodec(torch.device("cpu"), torch.float64)
    packed = codec.pack(ControlWord(weight=4.0, loss=2.0))
    reduced: Any = SimpleNamespace(codec=codec, packed_word=packed)
    progress: Any = None
    arrived: Any = SimpleNamespace(synchronize=lambda: None)
    for not_applied in (0.0, 1.0):
        row = torch.cat([torch.tensor([not_applied, 3.0], dtype=torch.float64), packed])
        outcome = LateOutcome(StepStatus(0), progress, reduced, (0,), math.inf, row, arrived).read()
        assert (outcome.applied, outcome.grad_norm, outcome.mean_loss) == (not not_applied, 3.0, 0.5)


# ---- custom loops ----


def own_loop(
    folder: Path, passes: int = 1, leave_at: int | None = None, **settings: Any
) -> tuple[dict[str, Tensor], list[Any], dict[str, Any]]:
    """A GAN-like loop: two models, each with an optimizer of its own, stepped in turn; one batch is not finite."""
    values = {key: value for key, value in (SETTINGS | settings).items() if key != "ema.decay"}
    resolved = resolve([("test", values | {"run_dir": str(folder)})])
    torch.manual_seed(0)
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.05, fused=True) for model in models]
    results = []
    with context.start(World(), resolved.config) as runtime:
        run = OwnRun(open_run(resolved, runtime, "test"))
        ran = run.setup(*models, *optimizers)
        one, other, first, second = ran
        for step in run.steps(Wobbly(nan=(45,)).data(), passes=passes):
            for index in range(passes):
                for x, y, weight in step:
                    model = (one, other)[(step.index + index) % 2]
                    step.backward(((model(x)[:, 0] - y) ** 2).sum(), float(weight.sum()))
                if index + 1 < passes and step.index % 3 == 0:
                    results.append(step.measure())
                else:
                    results.append(step.apply((first, second)[(step.index + index) % 2]))
            if step.number == leave_at:
                break
        run.close()
    summary = json.loads((folder / "summary.json").read_text())
    weights = {f"{i}.{name}": p.detach().clone() for i, m in enumerate(models) for name, p in m.named_parameters()}
    return weights, results, summary


@pytest.mark.parametrize(("passes", "leave_at"), [(1, None), (2, None), (1, 6), (2, 6)])
def test_an_own_loop_with_several_optimizers(
    passes: int, leave_at: int | None, tmp_path: Path, gpu: Callable[[], FakeGpu]
) -> None:
    """The loop may also be left in the step that the device skips."""
    cpu = own_loop(tmp_path / "cpu", passes, leave_at)
    fake = gpu()
    late = own_loop(tmp_path / "late", passes, leave_at)
    assert_same(cpu[0], late[0])
    for key in ("step", "applied", "skipped"):
        assert cpu[2][key] == late[2][key], key
    assert "host waits for an event" in fake.calls
    if passes == 1:
        seen = {result.step: repr(result) for result in late[1] if result is not None}
        expected = {result.step: repr(result) for result in cpu[1]}
        assert seen.items() <= expected.items()
        assert len(seen) == len(expected) - 1  # the last step reports its own result in place of the one before it
    assert logged(tmp_path / "cpu") == logged(tmp_path / "late")


def both_or_one(step: int, index: int) -> bool:
    """Both passes of every third step are empty, and the second one of the step before it."""
    return step % 3 == 2 or (index == 1 and step % 3 == 1)


def early_stop(
    folder: Path, is_empty: Callable[[int, int], bool] = both_or_one, callbacks: Sequence[Any] = (), **settings: Any
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Two passes, some of which have weight 0: `is_empty` gets the indices of the step and the pass."""
    resolved = resolve([("test", SETTINGS | {"run_dir": str(folder), "lr.warmup": 4, "steps": 6} | settings)])
    torch.manual_seed(0)
    plain = nn.Linear(3, 1)
    with context.start(World(), resolved.config) as runtime:
        run = OwnRun(open_run(resolved, runtime, "test"))
        model, _ = run.setup(plain, torch.optim.Adam(plain.parameters(), lr=0.05, fused=True))
        for callback in callbacks:
            run.add_callback(callback)
        for step in run.steps(Wobbly().data(), passes=2):
            for index in range(2):
                for x, y, _ in step:
                    empty = is_empty(step.index, index)
                    step.backward(((model(x)[:, 0] - y) ** 2).sum(), 0 if empty else len(x))
                step.apply()
        average = run._run.trained_model.average
        run.close()
    averaged = torch.cat([tensor.flatten() for tensor in average.parameter_tensors.values()])
    return plain.weight.detach().clone(), averaged, json.loads((folder / "summary.json").read_text())


def test_a_step_of_several_passes_is_applied_if_any_of_them_is(tmp_path: Path, gpu: Callable[[], FakeGpu]) -> None:
    cpu = early_stop(tmp_path / "cpu")
    fake = gpu()
    late = early_stop(tmp_path / "late")
    assert "host waits for an event" in fake.calls
    assert (cpu[2]["applied"], late[2]["applied"]) == (4, 4)


class Reported:
    """A callback that keeps what `after_step` gets: whether each step was applied."""

    def __init__(self) -> None:
        self.applied: dict[int, bool] = {}

    def after_step(self, run: Any, result: StepResult | None) -> None:
        if result is not None:
            self.applied[result.step] = result.applied


@pytest.mark.parametrize("every", [1, 100])
def test_what_is_reported_of_a_step_is_applied_if_any_pass_is(
    every: int, tmp_path: Path, gpu: Callable[[], FakeGpu]
) -> None:
    """A save reads the outcome of the last pass early. It is reported when a pass of the next step is known, too."""
    gpu()
    reported = Reported()
    early_stop(tmp_path / "run", lambda step, index: index == 1, [reported], **{"checkpoint.every": every})
    assert len(reported.applied) >= 5
    assert all(reported.applied.values())


def test_the_averages_move_if_any_pass_was_applied(tmp_path: Path, gpu: Callable[[], FakeGpu]) -> None:
    """On the device, too, where the host does not know it yet."""
    moves = []
    update = WeightAverage.update
    for name in ("cpu", "late"):
        told: list[bool] = []
        with pytest.MonkeyPatch.context() as patch:
            record = lambda self, skip, told=told: (told.append(bool(skip)), update(self, skip))
            patch.setattr(WeightAverage, "update", record)
            early_stop(tmp_path / name)
        moves.append(told)
        if name == "cpu":
            gpu()
    assert moves == [[False, False, True] * 2] * 2


def test_the_pass_whose_outcome_is_late_is_a_part_of_its_step(tmp_path: Path, gpu: Callable[[], FakeGpu]) -> None:
    gpu()
    own_loop(tmp_path / "run", passes=2, **{"log.every": 2})
    lines = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    steps = [line["weight"] / line["weight_per_s"] / line["step_s"] for line in lines]
    # One of the two updates of steps 2, 6, 8, ... is late, and the only one of step 4; the last line waits.
    late = [0, *(1.0 if line["step"] % 3 == 1 else 0.5 for line in lines[:-1]), 0]
    assert steps == pytest.approx([2 + late[i] - late[i + 1] for i in range(len(lines))])


def logged(folder: Path) -> list[Any]:
    events = [event for event in read_jsonl(folder / "events.jsonl") if event["event"] in ("skip", "rewind")]
    return [(event["step"], event["reason"], event["blame"]) for event in events]


# ---- streams ----


class Rows(torch.utils.data.IterableDataset):
    def __init__(self, count: int):
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        yield from list(zip(*(column[: self.count] for column in Wobbly().data().tensors), strict=True))


class Streaming(Wobbly):
    def data(self) -> Any:
        return Rows(36)  # the last step of an epoch is short


@pytest.mark.parametrize(
    ("settings", "applied"),
    [
        # Epochs of 5 steps. Their end is known one step late, or at once if the outcome of their last step is awaited.
        ({"checkpoint.every": 100}, 12),
        ({"checkpoint.every": 5}, 14),
        ({"checkpoint.every": 100, "evaluate.every": 5}, 14),
        ({"checkpoint.every": 11}, 13),
    ],
)
def test_the_end_of_an_epoch_of_a_stream(
    settings: dict[str, Any], applied: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may cost an empty step, and changes no update. A save or an evaluation makes it known."""
    with monkeypatch.context() as patch:
        fake_gpu(patch)
        late = trained(Streaming(), tmp_path / "late", **settings, **{"steps": 14})
    assert (late.summary["step"], late.summary["applied"], late.summary["skipped"]) == (14, applied, 0)

    # Without its empty steps it is a shorter run.
    cpu = trained(Streaming(), tmp_path / "cpu", **settings | {"steps": applied})
    assert_same(cpu.weights, late.weights)
    assert_same(cpu.averages, late.averages)


def test_a_run_that_stopped_with_an_epoch_goes_on_with_the_next(tmp_path: Path, gpu: Callable[[], FakeGpu]) -> None:
    """This stream has no position: a checkpoint that does not know that the epoch has ended would begin it again."""
    cpu = trained(Streaming(), tmp_path / "cpu", **{"steps": 10})
    gpu()
    trained(Streaming(), tmp_path / "late", **{"steps": 5})
    late = trained(Streaming(), tmp_path / "late", **{"steps": 10})
    assert_same(cpu.weights, late.weights)
    assert late.summary["applied"] == 10


# ---- memory ----


def test_nothing_of_a_step_is_kept_alive(tmp_path: Path, gpu: Callable[[], FakeGpu]) -> None:
    """A pending outcome holds numbers, and neither a batch nor a graph."""

    class Watched(Wobbly):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            found = super().loss(model, batch)
            seen.extend([weakref.ref(batch[0]), weakref.ref(found.total)])
            return found

    seen: list[weakref.ref[Tensor]] = []
    alive = []

    def look(run: Any, result: StepResult | None) -> None:
        alive.append(sum(ref() is not None for ref in seen))

    gpu()
    task = Watched(nan=(45,))
    task.hook = look
    trained(task, tmp_path / "late")
    assert alive == [0] * 16
