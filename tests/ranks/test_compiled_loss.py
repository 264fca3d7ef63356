"""The task's loss is compiled with its model, as far as it can be and as long as it pays. The result stays the same."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd import profiler
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity
from torch.utils.data import TensorDataset

import lockstep
from lockstep.bench.ranks.turns import by_lockstep
from lockstep.config import resolve
from lockstep.engine import loop
from lockstep.engine.own_loop import OwnRun
from lockstep.engine.setup import open_run
from lockstep.parallel import apply
from lockstep.parallel.compiled import compilation, deadline, facts, kernel_times, payoff, targets
from lockstep.parallel.compiled import compiler as compiler_module
from lockstep.parallel.compiled.compiler import Compiler
from lockstep.parallel.compiled.compiler import compiler_of as compiler_of_driver
from lockstep.parallel.compiled.deadline import Deadline
from lockstep.parallel.compiled.kernel_times import KernelTimer
from lockstep.runtime import context
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import COMPILER, Pool
from ranks.support import QUIET, compile_events

WORDS = 16


@pytest.fixture(scope="module", autouse=True)
def compiler(pool: Pool) -> None:
    pool.preload(*COMPILER)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Words(Task):
    """The loss is outside the model, as most people write it."""

    lengths = (6,)

    def model(self) -> nn.Module:
        return Net()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def data(self) -> Any:
        """Samples of different lengths."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(WORDS, (60, 12), generator=generator)
        return [row[: self.lengths[index // 4 % len(self.lengths)]] for index, row in enumerate(rows)]

    def collate(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Loss:
        logits = model(batch[:, :-1])
        total = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")
        right = (logits.argmax(-1) == batch[:, 1:]).sum()
        return Loss(total, batch[:, 1:].numel(), {"right": right})


class Ragged(Words):
    lengths = (5, 9, 3, 12, 8, 4, 7)


class Breaking(Words):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> Loss:
        torch._dynamo.graph_break()
        return super().loss(model, batch)


SEEN: list[int] = []


class Noting(Words):
    """Its loss has side effects, and must be called once for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.notes: dict[str, list[Any]] = {"batches": []}
        self.numbers = iter(range(1000))
        SEEN.clear()

    def state(self) -> Any:
        return self.calls, len(self.notes["batches"]), len(SEEN), next(self.numbers)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Loss:
        self.note(batch)
        return super().loss(model, batch)

    def note(self, batch: torch.Tensor) -> None:
        self.calls += 1


class Appending(Noting):
    def note(self, batch: torch.Tensor) -> None:
        self.notes["batches"].append(batch.sum())


class AppendingGlobally(Noting):
    def note(self, batch: torch.Tensor) -> None:
        SEEN.append(1)


class Reading(Noting):
    def note(self, batch: torch.Tensor) -> None:
        next(self.numbers)


class Drawing(Noting):
    """numpy's random numbers, which torch.compile draws with torch."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total * (1 + np.random.rand()), loss.weight)


def wrong(graph: Any, inputs: Any) -> Any:
    """A compiler with a bug."""
    return lambda *args: [2 * out if out.is_floating_point() else out for out in graph(*args)]


def slow(graph: Any, inputs: Any) -> Any:
    """A compiler whose code is slower than eager."""

    def run(*args: Any) -> Any:
        time.sleep(0.1)
        return graph(*args)

    return run


class Short:
    """A compiler whose code runs out of memory, in the first `times` targets."""

    def __init__(self, times: int):
        self.left = times

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.left -= 1
        fails = self.left >= 0

        def run(*args: Any) -> Any:
            if fails:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return graph(*args)

        return run


def slow_compiler(seconds: float) -> Any:
    """Return a compiler that takes so long for each forward."""

    def backend(graph: Any, inputs: Any) -> Any:
        time.sleep(seconds)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return backend


KERNEL = "ab/kernel.so"  # in torch's cache


def cached_compiler(graph: Any, inputs: Any) -> Any:
    """Loads its kernel from torch's cache if there is one, and otherwise needs none."""
    kernel = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / KERNEL
    if kernel.exists():
        spec = importlib.util.spec_from_file_location("kernel", kernel)
        assert spec is not None
        importlib.util.module_from_spec(spec)

    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def broken_compiler(graph: Any, inputs: Any) -> Any:
    """Writes a kernel that cannot be loaded."""
    (Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / KERNEL).write_bytes(b"\x7fELF")
    return cached_compiler(graph, inputs)


def trained_with_cache(world: World, store: Any, folder: str, cache: str, **options: Any) -> dict[str, Any]:
    with patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": cache}):
        return trained(world, store, folder, **options)


def trained(
    world: World,
    store: Any,
    folder: str,
    task: type[Task] = Words,
    backend: Any = "aot_eager",
    judged: bool = False,
    lag: float = 0.0,
    operation_s: float = 0.0,
    most_postponed: int = 16,
    **settings: Any,
) -> dict[str, Any]:
    """Train, and return the weights, the events about compiling, and how often something was compiled.

    judged: as with compile=auto on a GPU, with an estimate that it costs nothing, but `operation_s` for each operation.
    lag: seconds that rank 1 takes longer
    """
    values = {**QUIET, "compile": True, "steps": 4, "global_batch": 16, "micro_batch": 4, "run_dir": folder, **settings}
    if judged:
        values["compile"] = "auto"

    resolved = resolve([("test", values)])
    torch._dynamo.reset()
    counters.clear()
    with ExitStack() as stack:
        stack.enter_context(patch.object(targets, "BACKEND", backend))
        stack.enter_context(patch.object(compiler_module, "MOST_POSTPONED", most_postponed))
        compile_module = nn.Module.compile
        stack.enter_context(
            patch.object(
                nn.Module, "compile", lambda module, **given: compile_module(module, **{"backend": backend, **given})
            )
        )
        stack.enter_context(patch.object(facts, "history_path", lambda: Path(folder).parent / "compile.json"))
        if judged:
            stack.enter_context(patch.object(apply, "wants_compile", lambda *_: True))
            estimates = {"START_S": 0.0, "COLD_S": 0.0, "LAYER_S": 0.0, "BLOCK_S": 0.0, "OPERATION_S": operation_s}
            stack.enter_context(patch.multiple(payoff, **estimates, MOST_LOST=1e6))

        runtime = stack.enter_context(context.start(world, resolved.config, store))
        builder = open_run(resolved, runtime, "test")
        events = compile_events(builder)
        made = task()
        if world.rank == 1 and lag:
            collate = made.collate
            made.collate = lambda rows: time.sleep(lag) or collate(rows)  # type: ignore[method-assign]

        loop.fit(made, builder)
        weights = {name: full(value).clone() for name, value in builder.driver.model.state_dict().items()}
        state = made.state() if isinstance(made, Noting) else None
        return {"weights": weights, "events": events, "graphs": counters["stats"]["unique_graphs"], "state": state}


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def start(pool: Any, folder: Path, ranks: int = 1, **options: Any) -> list[dict[str, Any]]:
    return pool.run(partial(trained, **options), str(folder), world=ranks)


def assert_close(found: Any, expected: Any) -> None:
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_loss_is_compiled_with_the_model(ranks: int, pool: Any, tmp_path: Any) -> None:
    plain = start(pool, tmp_path / "plain", ranks=ranks, compile=False)
    found = start(pool, tmp_path / "compiled", ranks=ranks)
    for expected, rank in zip(plain, found, strict=True):
        assert rank["events"][0].startswith("compiled the loss with the model in")
        assert rank["graphs"] == 1
        assert expected["graphs"] == 0
        assert_close(rank, expected)


@pytest.mark.parametrize("backend", [cached_compiler, broken_compiler])
def test_a_file_that_a_killed_compiler_left_is_compiled_anew(backend: Any, pool: Any, tmp_path: Path) -> None:
    kernel = tmp_path / "cache" / KERNEL
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"\x7fELF")
    job = partial(trained_with_cache, cache=str(tmp_path / "cache"), backend=backend)
    (reason,) = pool.run(job, str(tmp_path / "run"), world=1)[0]["events"]
    if backend is cached_compiler:
        assert reason.startswith("compiled the loss with the model in")
        assert "not " not in reason
        assert not kernel.exists()
    else:
        # It is not tried for ever.
        assert reason.startswith("nothing: not the loss with the model: ImportError: ")
        assert str(kernel) in reason


@pytest.mark.parametrize("option", ["ddp.static_graph", "ddp.find_unused_parameters"])
def test_the_options_of_ddp_do_not_matter(option: str, pool: Any, tmp_path: Any) -> None:
    settings: dict[str, Any] = {option: True, "micro_batch": 8}
    plain = start(pool, tmp_path / "plain", ranks=2, compile=False, micro_batch=8)
    found = start(pool, tmp_path / "compiled", ranks=2, **settings)
    for expected, rank in zip(plain, found, strict=True):
        assert rank["events"][0].startswith("compiled the loss with the model in")
        assert_close(rank, expected)


def test_one_rank_compiles_the_loss_under_fsdp_too(pool: Any, tmp_path: Any) -> None:
    """Nothing is sharded there, so no forward waits for other ranks."""
    plain = start(pool, tmp_path / "plain", compile=False)[0]
    found = start(pool, tmp_path / "compiled", strategy="fsdp", blocks=["Block"])[0]
    assert found["events"][0].startswith("compiled the loss with the model in")
    assert found["graphs"] == 1
    assert_close(found, plain)


@pytest.mark.long
def test_a_short_last_batch_does_not_compile_anew(pool: Any, tmp_path: Any) -> None:
    """60 samples in steps of 16: the fourth step has 12, and with micro-batches of 5 there are short ones."""
    plain = start(pool, tmp_path / "plain", compile=False, micro_batch=5, steps=8)[0]
    found = start(pool, tmp_path / "compiled", micro_batch=5, steps=8)[0]
    assert found["graphs"] == 1
    assert_close(found, plain)


@pytest.mark.parametrize("judged", [pytest.param(False, marks=pytest.mark.long), True])
def test_ragged_batches_compile_at_most_twice(judged: bool, pool: Any, tmp_path: Any) -> None:
    settings = {"task": Ragged, "steps": 16}
    plain = start(pool, tmp_path / "plain", ranks=1, compile=False, **settings)[0]
    found = start(pool, tmp_path / "found", ranks=1, judged=judged, **settings)[0]
    compiled = [reason for reason in found["events"] if reason.startswith("compiled")]
    assert "dimensions dynamic" in compiled[-1]
    assert "the blocks" in compiled[-1]
    assert len(compiled) == (1 if judged else 2)
    assert found["graphs"] <= 2
    assert_close(found, plain)


def test_a_graph_break_leaves_the_model(pool: Any, tmp_path: Any) -> None:
    (found,) = start(pool, tmp_path / "run", task=Breaking)
    (reason,) = found["events"]
    assert reason.startswith("compiled the model in")
    assert "not the loss with the model: Unsupported" in reason
    assert "test_compiled_loss.py, line" in reason


@pytest.mark.parametrize(
    "task", [Noting, Appending, *(pytest.param(task, marks=pytest.mark.long) for task in (AppendingGlobally, Reading))]
)
def test_a_loss_with_side_effects_is_called_once_for_each_batch(task: type[Task], pool: Any, tmp_path: Any) -> None:
    plain = start(pool, tmp_path / "plain", task=task, compile=False)[0]
    found = start(pool, tmp_path / "compiled", task=task)[0]
    assert found["state"] == plain["state"]
    assert found["events"][0].startswith("compiled the model in")
    assert found["graphs"] == 1
    assert_close(found, plain)


@pytest.mark.long
def test_other_random_numbers_are_found(pool: Any, tmp_path: Any) -> None:
    (found,) = start(pool, tmp_path / "run", task=Drawing)
    assert "compiled the loss" not in found["events"][0]


class Adding(Words):
    """Its model gets a hook after two steps."""

    def model(self) -> nn.Module:
        self.net = super().model()
        return self.net

    def after_step(self, run: Any, result: Any) -> None:
        if run.steps_done == 2:
            self.net.blocks[1].linear.register_forward_hook(lambda module, args, x: 2 * x)


class Removing(Adding):
    """Its model loses a hook after two steps."""

    def model(self) -> nn.Module:
        net = super().model()
        self.handle = net.blocks[0].register_forward_hook(lambda module, args, x: 1.5 * x)
        return net

    def after_step(self, run: Any, result: Any) -> None:
        if run.steps_done == 2:
            self.handle.remove()


@pytest.mark.parametrize("task", [Adding, Removing])
@pytest.mark.parametrize("settings", [{}, {"strategy": "fsdp", "blocks": ["Block"]}])
def test_hooks_that_come_and_go_count(task: type[Task], settings: dict[str, Any], pool: Any, tmp_path: Any) -> None:
    ranks = 2 if settings else 1
    plain = start(pool, tmp_path / "plain", ranks, task=task, compile=False, **settings)[0]
    found = start(pool, tmp_path / "compiled", ranks, task=task, **settings)[0]
    assert found["graphs"] > 0
    assert_close(found, plain)


class Apart(Words):
    """In the first steps one rank calls a part of the model, and the other one the whole."""

    def __init__(self) -> None:
        self.calls = 0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Loss:
        torch._dynamo.graph_break()
        self.calls += 1
        if self.calls > 2 or dist.get_rank() == 0:
            return super().loss(model, batch)

        return Loss(model.embedding(batch).square().sum(), batch[:, 1:].numel())


@pytest.mark.parametrize("always", [False, pytest.param(True, marks=pytest.mark.long)])
def test_ranks_do_not_wait_for_one_that_calls_something_else(always: bool, pool: Any, tmp_path: Any) -> None:
    settings = {"micro_batch": 8, "ddp.find_unused_parameters": True, "hang.first": 20, "task": Apart}
    plain = start(pool, tmp_path / "plain", 2, compile=False, **settings)
    found = start(pool, tmp_path / "compiled", 2, most_postponed=1 if always else 16, **settings)
    for expected, rank in zip(plain, found, strict=True):
        (reason,) = rank["events"]
        if always:
            assert reason == "nothing: in each of 1 steps some rank did not call what was to be compiled"
        else:
            assert reason.startswith("compiled the model in")
        assert_close(rank, expected)


class Partly(Words):
    """torch breaks the graph of the model at a hook, and some losses call its blocks themselves."""

    def model(self) -> nn.Module:
        self.net = net = super().model()
        net.blocks[-1].register_forward_hook(lambda module, inputs, outputs: torch._dynamo.graph_break())
        return net

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Loss:
        if int(batch[0, 0]) % 2:
            return super().loss(model, batch)

        x = self.net.embedding(batch)
        for block in self.net.blocks:
            x = block(x)
        return Loss(self.net.head(x).square().sum(), batch[:, 1:].numel())


def test_blocks_that_are_recomputed_need_one_graph(pool: Any, tmp_path: Any) -> None:
    settings = {"task": Partly, "micro_batch": 2, "remat": "every-2", "blocks": ["Block"]}
    plain = start(pool, tmp_path / "plain", compile=False, **settings)[0]
    found = start(pool, tmp_path / "compiled", **settings)[0]
    assert "not the model: remat=every-2 needs one graph, and torch breaks it" in found["events"][0]
    assert_close(found, plain)


def test_wrong_code_is_found_and_not_used(pool: Any, tmp_path: Any) -> None:
    plain = start(pool, tmp_path / "plain", compile=False)[0]
    found = start(pool, tmp_path / "wrong", backend=wrong)[0]
    (reason,) = found["events"]
    assert reason.startswith("nothing: not the loss with the model: loss, gradients or buffers differ from eager by")
    assert all(torch.equal(value, found["weights"][name]) for name, value in plain["weights"].items())


@pytest.mark.parametrize("times", [1, pytest.param(100, marks=pytest.mark.long)])
def test_a_shortage_of_memory_leaves_less_or_nothing_compiled(times: int, pool: Any, tmp_path: Any) -> None:
    plain = start(pool, tmp_path / "plain", compile=False)[0]
    found = start(pool, tmp_path / "short", backend=Short(times))[0]
    (reason,) = found["events"]
    assert reason.startswith("compiled the model in" if times == 1 else "nothing: not the loss")
    assert "not the loss with the model: out of memory" in reason
    assert all(torch.equal(value, found["weights"][name]) for name, value in plain["weights"].items())


def test_a_compilation_that_takes_too_long_is_given_up(pool: Any, tmp_path: Any) -> None:
    """No other target is tried, and the run goes on as if nothing had happened."""
    plain = start(pool, tmp_path / "plain", compile=False)[0]
    found = pool.run(too_slow, str(tmp_path / "slow"), world=1)[0]
    (reason,) = found["events"]
    assert reason == "nothing: not the loss with the model: it takes longer than 1 s to compile"
    assert all(torch.equal(value, found["weights"][name]) for name, value in plain["weights"].items())


def too_slow(world: World, store: Any, folder: str) -> dict[str, Any]:
    return trained(world, store, folder, backend=slow_compiler(1.2), **{"hang.first": 1})


def too_slow_for_judgement(world: World, store: Any, folder: str) -> dict[str, Any]:
    return trained(world, store, folder, backend=slow_compiler(1.8), judged=True, steps=14, **{"hang.first": 2})


def test_how_long_it_took_is_remembered(pool: Any, tmp_path: Any) -> None:
    found = pool.run(too_slow_for_judgement, str(tmp_path / "slow"), world=1)[0]
    assert found["events"][-1] == "nothing: not the loss with the model: it takes longer than 2 s to compile"

    (of_model,) = json.loads((tmp_path / "compile.json").read_text()).values()
    record = of_model[targets.LOSS]
    assert not record["measured"]
    assert record["cost_s"] >= 1.5  # about the limit; a busy machine gives up before the slow compiler has ended


@pytest.mark.long
def test_ranks_with_different_speeds_decide_alike(pool: Any, tmp_path: Any) -> None:
    first, second = start(pool, tmp_path / "run", ranks=2, judged=True, lag=0.05, steps=12)
    begun = [reason for reason in first["events"] if "steps of" in reason]
    assert len(begun) == 1
    assert [text.split(" in ")[0] for text in first["events"]] == [text.split(" in ")[0] for text in second["events"]]
    assert first["events"][0] == second["events"][0]


def test_a_loss_of_many_operations_is_not_tried(pool: Any, tmp_path: Any) -> None:
    """A few layers in a long loop, by what they really take to compile."""
    (found,) = start(pool, tmp_path / "run", judged=True, operation_s=1e9, steps=14)
    assert found["events"][-1].startswith("nothing: it would not pay")


@pytest.mark.long
def test_code_that_is_slower_is_given_up(pool: Any, tmp_path: Any) -> None:
    (found,) = start(pool, tmp_path / "run", backend=slow, judged=True, steps=14)
    assert found["events"][-1].startswith("nothing: compiled steps are slower")

    # The record of this run keeps the next one from trying.
    (again,) = start(pool, tmp_path / "again", backend=slow, judged=True, steps=14)
    assert "the loss with the model compiled" not in again["events"][0]


def compiler_of(run: OwnRun) -> Compiler | None:
    assert run._builder.driver
    return compiler_of_driver(run._builder.driver)


def own_loop(world: World, store: Any, folder: str, compiled: bool, function: bool) -> dict[str, Any]:
    values = {**QUIET, "compile": compiled, "steps": 4, "global_batch": 16, "micro_batch": 4, "run_dir": folder}
    resolved = resolve([("test", values)])
    torch._dynamo.reset()
    counters.clear()
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(x).square().sum(), len(x)

    with (
        patch.object(targets, "BACKEND", "aot_eager"),
        context.start(world, resolved.config, store) as runtime,
    ):
        run = OwnRun(open_run(resolved, runtime, "test"))
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        wrapped, _ = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        call = run.compile(loss) if function else loss
        for step in run.steps(TensorDataset(x)):
            for (batch,) in step:
                step.backward(*call(wrapped, batch))
            step.apply()

        compiler = compiler_of(run)
        target = compiler.code.target.name if compiler and compiler.code else None
        run.close()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        return {"weights": weights, "target": target, "graphs": counters["stats"]["unique_graphs"]}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_own_loop(ranks: int, pool: Any, tmp_path: Any) -> None:
    plain = pool.run(own_loop, str(tmp_path / "plain"), False, True, world=ranks)[0]
    model = pool.run(own_loop, str(tmp_path / "model"), True, False, world=ranks)[0]
    function = pool.run(own_loop, str(tmp_path / "function"), True, True, world=ranks)[0]
    assert (plain["target"], model["target"], function["target"]) == (None, targets.MODEL, targets.LOSS)
    assert (plain["graphs"], model["graphs"], function["graphs"]) == (0, 1, 1)
    assert_close(model, plain)
    assert_close(function, plain)


@pytest.mark.long
def test_a_resumed_run_compiles_again(pool: Any, tmp_path: Any) -> None:
    whole = start(pool, tmp_path / "whole", steps=6)[0]
    settings = {"checkpoint.every": 3}
    start(pool, tmp_path / "parts", ranks=1, steps=3, **settings)
    rest = start(pool, tmp_path / "parts", ranks=1, steps=6, resume="auto", **settings)[0]
    assert rest["events"][0].startswith("compiled the loss with the model")
    assert_close(rest, whole)


def squares(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(x).square().sum(), len(x)


def distances(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (model(x) - 1).abs().sum(), len(x)


def several_functions(
    world: World, store: Any, folder: str, compiled: bool, at_step: int = 0, **settings: Any
) -> dict[str, Any]:
    """Train on two functions in turn, of which `run.compile` gets the second one in the step with this index."""
    values = {**QUIET, "compile": compiled, "steps": 4, "global_batch": 16, "micro_batch": 4, "run_dir": folder}
    resolved = resolve([("test", values | settings)])
    torch._dynamo.reset()
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))

    with (
        patch.object(targets, "BACKEND", "aot_eager"),
        context.start(world, resolved.config, store) as runtime,
    ):
        run = OwnRun(open_run(resolved, runtime, "test"))
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        wrapped, _ = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        calls = [run.compile(squares), squares if at_step else run.compile(distances)]
        losses = []
        for step in run.steps(TensorDataset(x)):
            if step.index == at_step > 0:
                calls[1] = run.compile(distances)

            for (batch,) in step:
                total, weight = calls[(step.index + 1) % 2](wrapped, batch)
                losses.append(total.item())
                step.backward(total, weight)
            step.apply()

        compiler = compiler_of(run)
        target = compiler.code.target.name if compiler and compiler.code else None
        run.close()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        return {"weights": weights, "target": target, "losses": losses}


def test_each_of_several_functions_is_called(pool: Any, tmp_path: Any) -> None:
    plain = pool.run(several_functions, str(tmp_path / "plain"), False, world=1)[0]
    found = pool.run(several_functions, str(tmp_path / "compiled"), True, world=1)[0]
    assert (plain["target"], found["target"]) == (None, targets.MODEL)
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert_close(found, plain)


def test_a_function_is_refused_after_the_first_step_with_another(pool: Any, tmp_path: Any) -> None:
    with pytest.raises(Exception, match=r"run.compile\(distances\) got another function than before, in step 3"):
        pool.run(several_functions, str(tmp_path / "whole"), True, 2, world=1)

    # A resumed run counts the steps before it.
    pool.run(resumed_with_another_function, str(tmp_path / "parts"), world=1)


def resumed_with_another_function(world: World, store: Any, folder: str) -> None:
    several_functions(world, store, folder, True, steps=2, **{"checkpoint.every": 2})
    with pytest.raises(lockstep.UserError, match="another function than before, in step 4"):
        several_functions(world, store, folder, True, 3, resume="auto", **{"checkpoint.every": 2})


def evaluated_first(world: World, store: Any, folder: str) -> tuple[list[Any], str]:
    """Evaluate with batches of another size than those of training, and return the sizes that were noted."""
    values = {**QUIET, "compile": "auto", "steps": 8, "global_batch": 16, "micro_batch": 4, "run_dir": folder}
    resolved = resolve([("test", {**values, "evaluate.batch": 7})])
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    with (
        patch.object(apply, "wants_compile", lambda *_: True),
        patch.object(facts, "history_path", lambda: Path(folder) / "compile.json"),
        patch.object(payoff, "MOST_LOST", 0.0),
        context.start(world, resolved.config, store) as runtime,
    ):
        run = OwnRun(open_run(resolved, runtime, "test"))
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        wrapped, _ = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
        call = run.compile(squares)
        run.evaluate(TensorDataset(x), lambda model, batch: Loss(*call(model, *batch)))
        for step in run.steps(TensorDataset(x)):
            for (batch,) in step:
                step.backward(*call(wrapped, batch))
            step.apply()

        compiler = compiler_of(run)
        run.close()
        return compiler.shapes.sizes(), compiler.state


def test_the_sizes_of_evaluations_do_not_count(pool: Any, tmp_path: Any) -> None:
    assert pool.run(evaluated_first, str(tmp_path), world=1)[0] == ([[[4], [3]]], "eager")


def test_a_function_before_the_model(tmp_path: Any) -> None:
    with (
        lockstep.start(run_dir=tmp_path, global_batch=4, steps=1, log={"progress": "off"}) as run,
        pytest.raises(lockstep.UserError, match="needs the one model that the function calls"),
    ):
        run.compile(lambda model, x: model(x))


def limits(world: World, store: Any, folder: str) -> list[float]:
    """Return how many seconds a rank was given for each compilation, all of which take too long.

    Compiling moves the clock of both ranks, and begins when the second rank waits: whatever else the machine does, the
    one compiles for 90 s of a limit of 80, and the other has waited for as long.
    """
    given: list[float] = []
    wait = compilation.Compilation._wait

    def noted(limit_s: float) -> Any:
        given.append(limit_s)
        return Deadline(limit_s)

    def noted_wait(self: Any, name: str, timeout: Any) -> bool:
        store.set("waits", "")
        return wait(self, name, timeout)

    def compiler(graph: Any, inputs: Any) -> Any:
        store.wait(["waits"])
        store.add("seconds", 90)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + store.add("seconds", 0))
    with (
        patch.object(compilation, "Deadline", noted),
        patch.object(compilation.Compilation, "_wait", noted_wait),
        patch.object(compilation, "time", clock),
        patch.object(deadline, "time", clock),
    ):
        trained(world, store, folder, backend=compiler, **{"hang.first": 100})
    return given


def test_ranks_that_wait_for_the_first_one_do_not_take_as_long_again(pool: Any, tmp_path: Any) -> None:
    first, second = pool.run(limits, str(tmp_path / "run"), world=2)
    assert first == [pytest.approx(80, abs=2.5)]
    assert second == []


class Failing(Words):
    """Fails in a step whose kernels are measured."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        assert profiler._is_profiler_enabled
        raise ValueError("a mistake of the user")


def test_a_step_that_fails_while_its_kernels_are_measured_leaves_no_profiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook the process goes on, and a profiler that is left on would slow it down and fill its memory."""
    begin_step = Compiler.begin_step

    def measured(compiler: Compiler, steps_left: int) -> None:
        compiler._kernel_timer = KernelTimer(torch.device("cpu"))
        begin_step(compiler, steps_left)

    monkeypatch.setattr(Compiler, "begin_step", measured)
    monkeypatch.setattr(apply, "wants_compile", lambda *_: True)
    monkeypatch.setattr(kernel_times, "profile", lambda **_: torch.profiler.profile(activities=[ProfilerActivity.CPU]))

    values = {"compile": "auto", "steps": 4, "global_batch": 4, "device": "cpu", "checks.loss": "off"}
    with pytest.raises(ValueError, match="a mistake of the user"):
        lockstep.fit(Failing(), {**QUIET, **values, "run_dir": str(tmp_path / "run")})

    assert not profiler._is_profiler_enabled


class Noticing(Words):
    """Notes in every loss whether cuDNN attention is on."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return super().loss(model, batch)


def test_runs_that_take_turns_leave_the_choice_of_kernels_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each watches its own first steps without cuDNN, whatever the other one has found out."""
    monkeypatch.setattr(apply, "wants_compile", lambda *_: True)
    monkeypatch.setattr(facts, "history_path", lambda: tmp_path / "compile.json")
    assert torch.backends.cuda.cudnn_sdp_enabled()
    tag = torch.compiler.config.cache_key_tag
    values = {**QUIET, "compile": "auto", "steps": 20, "global_batch": 4, "device": "cpu", "threads": 1}
    values["checks.loss"] = "off"
    settings = [resolve([("test", {**values, "run_dir": str(tmp_path / name)})]) for name in ("a", "b")]
    tasks = [Noticing(), Noticing()]
    with context.start(World(), settings[0].config) as runtime:
        loops = [by_lockstep(task, given, runtime, 1) for task, given in zip(tasks, settings, strict=True)]
        for _ in range(8):
            for steps in loops:
                next(steps)
                assert torch.backends.cuda.cudnn_sdp_enabled()
                assert torch.compiler.config.cache_key_tag == tag
        for steps in loops:
            steps.close()

    # Two steps are not timed, three are. Then it is known that all batches have one size.
    assert tasks[0].seen == tasks[1].seen == [False] * 5 + [True] * 3


class NoticingRagged(Noticing):
    lengths = (5, 5, 9, 9, 3, 5)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if len(self.seen) == 5:
            self.seen.append(torch.backends.cuda.cudnn_sdp_enabled())
            raise ValueError("a mistake of the user")
        return super().loss(model, batch)


def test_without_compiled_code_cudnn_is_off_from_the_third_size_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "may_change_kernels", lambda *_: True)  # as on a GPU
    task = NoticingRagged()
    values = {
        "compile": False,
        "steps": 9,
        "global_batch": 4,
        "device": "cpu",
        "checks.loss": "off",
        "data.shuffle": False,
    }
    with pytest.raises(ValueError, match="a mistake of the user"):
        lockstep.fit(task, {**QUIET, **values, "run_dir": str(tmp_path / "run")})

    # The data of each step have one length. The last step fails, and leaves the choice of kernels alone as well.
    assert task.seen == [True] * 4 + [False] * 2
    assert torch.backends.cuda.cudnn_sdp_enabled()
