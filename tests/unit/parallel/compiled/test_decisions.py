"""What a run decides by time and by kernels: compile or not, capture or not, pause cuDNN or not; and what it leaves.

Whole runs on a faked GPU (fake_cuda.py). A fake clock says how long eager and compiled calls take, and `torch.compile`
returns the function itself: compiled code computes what eager code does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from again import Again
from fake_cuda import FakeClock, FakeGpu, FakeProfiler, fake_gpu
from lockstep.config import resolve
from lockstep.engine import loop
from lockstep.engine.setup import open_run
from lockstep.observe.sinks import read_jsonl
from lockstep.parallel.compiled import compilation, compiler, deadline, facts, targets
from lockstep.parallel.cudagraph import graphs, variants
from lockstep.runtime import context
from lockstep.runtime.world import World
from lockstep.task import Loss, Task

SETTINGS = {
    "device": "cpu",
    "precision": "fp32",
    "global_batch": 4,
    "lr.schedule": "constant",
    "checks.loss": "off",
    "log.progress": "off",
    "log.every": 1000,
    "checkpoint.at_end": False,
    "data.shuffle": False,
}

# The kernels of a step of a second.
FUSIBLE = [("void at::native::add", 0.9)]
FIXED = [("nvjet_x", 0.9)]
IDLE = [("void at::native::add", 0.69)]  # the rest of the step the GPU waits for the host


@dataclass
class Machine:
    """How long things take, in seconds, and what was switched on in each training call."""

    gpu: FakeGpu
    clock: FakeClock
    profiler: FakeProfiler
    call_s: float = 1.0
    compiled: float = 0.5  # the time of a compiled call, in that of an eager one
    compile_s: float = 2.0
    problem: Exception | None = None  # what compiling raises

    device: Again = field(default_factory=Again)  # what captures

    speed: float = 1.0  # now
    compiled_calls: int = 0
    cudnn: list[bool] = field(default_factory=list)  # whether cuDNN attention was on, by training call
    cudnn_between: list[bool] = field(default_factory=list)  # between two steps
    profiled: list[bool] = field(default_factory=list)

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Be torch.compile: the first call compiles."""
        ready = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal ready
            if not ready:
                self.clock.advance(self.compile_s)
                if self.problem:
                    raise self.problem
            ready = True
            before, self.speed = self.speed, self.compiled
            self.compiled_calls += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.speed = before

        return call

    def work(self) -> None:
        """Take the time of a call."""
        self.clock.advance(self.call_s * self.speed)
        if torch.is_grad_enabled():
            self.cudnn.append(torch.backends.cuda.cudnn_sdp_enabled())
            self.profiled.append(self.profiler.is_on)


MACHINE: list[Machine] = []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        for machine in MACHINE:
            machine.work()
        return self.layer(x)


class Plain(Task):
    def __init__(self, sizes: int = 1, keeps_graph_from: int | None = None, fails_at: int | None = None):
        self.sizes, self.keeps_graph_from, self.fails_at = sizes, keeps_graph_from, fails_at
        self.calls = 0

    def model(self) -> nn.Module:
        return Net()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def data(self) -> Any:
        x = torch.randn(64, 5, 3, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, torch.arange(64) // 4)

    def collate(self, samples: list[Any]) -> Any:
        x = torch.stack([row for row, _ in samples])
        return x[:, : 1 + int(samples[0][1]) % self.sizes + 1]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch).square().sum(), len(batch))

    def after_step(self, run: Any, result: Any) -> None:
        for machine in MACHINE:
            machine.cudnn_between.append(torch.backends.cuda.cudnn_sdp_enabled())

    def before_backward(self, run: Any, loss: Loss) -> Loss | None:
        self.calls += 1
        if self.fails_at == run.steps_done:
            raise ZeroDivisionError("in a step")
        return None


@dataclass
class Ran:
    weights: dict[str, Tensor]
    model: nn.Module
    compile: list[str]  # reasons, in order
    graph: list[str]


def train(task: Plain, folder: Path, **settings: Any) -> Ran:
    resolved = resolve([("test", SETTINGS | settings | {"run_dir": str(folder)})])
    with context.start(World(), resolved.config) as runtime:
        builder = open_run(resolved, runtime, "test")
        try:
            training = loop.Training(task, builder)
            model = builder.driver.model
            for _ in training.steps():
                # As a loss does that goes through its graph twice, in the next step for the first time.
                if training.run.steps_done == task.keeps_graph_from:
                    builder.driver.inner_gradients.keeps_graphs = True
            training.end()
        except BaseException as error:
            builder.fail(error)
            raise

    events = list(read_jsonl(folder / "events.jsonl"))
    reasons = {name: [event["reason"] for event in events if event["event"] == name] for name in ("compile", "graph")}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Ran(weights, model, **reasons)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A faked GPU, on which nothing was compiled so far by this model."""
    clock = FakeClock()
    clock.install(monkeypatch, facts, compiler, compilation, deadline, graphs, variants)
    found = Machine(fake_gpu(monkeypatch), clock, FakeProfiler(monkeypatch, FUSIBLE))
    monkeypatch.setattr(torch, "compile", found.compile)
    monkeypatch.setattr(targets, "BACKEND", lambda graph, inputs: graph)
    monkeypatch.setattr(facts, "history_path", lambda: tmp_path / "compile.json")
    monkeypatch.setattr(facts, "is_cold", lambda: False)
    monkeypatch.setattr(graphs, "CudaDevice", lambda device: found.device)
    MACHINE[:] = [found]
    return found


@pytest.fixture(autouse=True)
def no_machine() -> Any:
    yield
    MACHINE.clear()


def assert_nothing_is_left(ran_model: nn.Module, machine: Machine, cudnn: bool, tag: Any) -> None:
    assert ran_model._compiled_call_impl is None
    assert not machine.profiler.is_on
    assert all(machine.cudnn_between)
    assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
    assert torch.compiler.config.cache_key_tag == tag
    assert not torch._C._len_torch_dispatch_stack()


def assert_as_without(ran: Ran, task: Plain, folder: Path, steps: int) -> None:
    """Check that a run that compiles and captures nothing trains the same weights."""
    MACHINE.clear()
    eager = train(task, folder / "eager", steps=steps, compile=False, graph=False)
    for name, p in eager.weights.items():
        assert torch.equal(p, ran.weights[name]), name


# Seconds of a call, steps, kernels, what compiled code does, and: the reasons, how often kernels are measured, whether
# the last call ran compiled code.
NOT = "nothing: it would not pay"
CASES: dict[str, tuple[dict[str, Any], int, list[str], int, bool]] = {
    "too short": ({"call_s": 0.01}, 12, [NOT], 0, False),
    "it pays": (
        {"call_s": 4.0},
        120,
        ["* left", "begins with the loss", "compiled the loss", "steps are 2.00x"],
        0,
        True,
    ),
    "slower": (
        {"call_s": 4.0, "compiled": 1.5},
        120,
        ["* left", "begins with the loss", "compiled the loss", "nothing: compiled steps are slower"],
        0,
        False,
    ),
    "kernels decide for it": (
        {},
        45,
        ["* left", "begins with the loss", "compiled the loss", "steps are 2.00x"],
        1,
        True,
    ),
    "kernels decide against it": ({"kernels": FIXED}, 45, [NOT], 1, False),
    "kernels do not show it": ({"kernels": IDLE}, 45, [NOT], 1, False),
    "it fails": (
        {"call_s": 4.0, "problem": RuntimeError("no compiler")},
        120,
        ["* left", "begins with the loss", "begins with the model", "nothing: not the loss"],
        0,
        False,
    ),
    "it takes too long": (
        {"call_s": 4.0, "problem": deadline.TookTooLong(9.0)},
        120,
        ["* left", "begins with the loss", "nothing: not the loss with the model: it takes longer than 9 s"],
        0,
        False,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_decision_is_made_once_and_changes_no_result(case: str, tmp_path: Path, machine: Machine) -> None:
    changes, steps, reasons, measured, compiled = CASES[case]
    cudnn, tag = torch.backends.cuda.cudnn_sdp_enabled(), torch.compiler.config.cache_key_tag
    for name, value in changes.items():
        setattr(machine.profiler if name == "kernels" else machine, name, value)
    ran = train(Plain(), tmp_path / "gpu", steps=steps)

    assert len(ran.compile) == len(reasons), ran.compile
    for reason, expected in zip(ran.compile, reasons, strict=True):
        assert expected[2:] in reason if expected.startswith("* ") else reason.startswith(expected), reason
    assert machine.profiler.calls == ["start", "stop"] * measured
    assert machine.profiled.count(True) == measured

    # Compiled code runs to the end, or is called no more.
    before = machine.compiled_calls
    assert (before > steps / 2) == compiled

    # Sizes do not vary: cuDNN is on once that is known, after the steps that are timed.
    assert machine.cudnn[:5] == [False] * 5
    assert all(machine.cudnn[-5:])
    assert machine.gpu.calls.count("host waits for the device") < 25
    assert_nothing_is_left(ran.model, machine, cudnn, tag)

    assert_as_without(ran, Plain(), tmp_path, steps)


@pytest.mark.parametrize(("step", "measured"), [(2, 0), (5, 1)])
def test_a_loss_that_keeps_its_graph_stays_eager(
    step: int, measured: int, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it does so for the first time in the step whose kernels are measured: that is measured once."""
    captures = []
    monkeypatch.setattr(compiler, "capture_calls", lambda *_: captures.append(1))
    cudnn, tag = torch.backends.cuda.cudnn_sdp_enabled(), torch.compiler.config.cache_key_tag
    ran = train(Plain(keeps_graph_from=step), tmp_path / "gpu", steps=45)
    assert ran.compile == ["nothing: the loss computes a gradient through the model and keeps its graph"]
    assert machine.profiler.calls == ["start", "stop"] * measured
    assert captures == [1]
    assert machine.gpu.calls.count("host waits for the device") < 10
    assert_nothing_is_left(ran.model, machine, cudnn, tag)
    assert_as_without(ran, Plain(), tmp_path, 45)


@pytest.mark.parametrize("fails_at", [0, 3, 5, 8])
def test_a_step_that_fails_leaves_nothing_switched_on(fails_at: int, tmp_path: Path, machine: Machine) -> None:
    """Step 5 is the one whose kernels are measured; from step 6 on compiled code runs."""
    cudnn, tag = torch.backends.cuda.cudnn_sdp_enabled(), torch.compiler.config.cache_key_tag
    task, models = Plain(fails_at=fails_at), []
    make = task.model
    task.model = lambda: models.append(make()) or models[0]
    with pytest.raises(ZeroDivisionError):
        train(task, tmp_path / "gpu", steps=45)
    assert machine.profiled[-1] == (fails_at == 5)
    assert machine.profiler.calls == (["start", "stop"] if fails_at >= 5 else [])
    assert (machine.compiled_calls > 0) == (fails_at == 8)
    assert_nothing_is_left(models[0], machine, cudnn, tag)


# ---- captures ----

# Seconds of a call on the host and on the device, steps, and: why it is captured or not, once.
GRAPHS: dict[str, tuple[float, float, int, list[str]]] = {
    "launch-bound": (0.01, 0.0, 60, ["captured, and equal"]),
    "just launch-bound": (0.01, 0.0099, 60, ["captured, and equal"]),
    "the device is slower": (0.01, 0.0101, 60, ["not captured: not launch-bound"]),
    "too few steps are left": (0.01, 0.0, 20, []),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_what_is_captured(case: str, tmp_path: Path, machine: Machine) -> None:
    machine.call_s, machine.device.takes, steps, reasons = GRAPHS[case]
    cudnn, tag = torch.backends.cuda.cudnn_sdp_enabled(), torch.compiler.config.cache_key_tag
    ran = train(Plain(), tmp_path / "gpu", steps=steps)
    assert [reason[: len(expected)] for reason, expected in zip(ran.graph, reasons, strict=True)] == reasons
    captured = bool(reasons) and reasons[0].startswith("captured")
    assert (machine.device.replayed > steps) == captured  # forwards and backwards
    assert_nothing_is_left(ran.model, machine, cudnn, tag)
    assert_as_without(ran, Plain(), tmp_path, steps)


# ---- cuDNN ----

ON, OFF = [True], [False]
PAUSES: dict[str, tuple[int, dict[str, Any], list[bool]]] = {
    "one size": (1, {"compile": False}, ON * 12),
    "two sizes": (2, {"compile": False}, ON * 12),
    "three sizes": (3, {"compile": False}, ON * 2 + OFF * 10),
    "three sizes, repeatable": (3, {"compile": False, "deterministic": True}, ON * 12),
    "until it is known that sizes do not vary": (1, {}, OFF * 5 + ON * 7),
    "sizes vary": (2, {}, OFF * 12),
    "compiled at once": (3, {"compile": True}, []),
}


@pytest.mark.parametrize("case", PAUSES)
def test_when_cudnn_is_off(case: str, tmp_path: Path, machine: Machine) -> None:
    sizes, settings, expected = PAUSES[case]
    machine.call_s = 0.01
    cudnn, tag = torch.backends.cuda.cudnn_sdp_enabled(), torch.compiler.config.cache_key_tag
    assert cudnn
    ran = train(Plain(sizes), tmp_path / "gpu", steps=12, graph=False, **settings)
    assert machine.cudnn == expected if expected else all(machine.cudnn)
    assert_nothing_is_left(ran.model, machine, cudnn, tag)
