"""Ranks whose compilers take different times meet before their first exchange; captured calls exchange as others do.
Nothing shows in the result."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from again import Again
from lockstep.config import resolve
from lockstep.engine import loop
from lockstep.engine.setup import open_run
from lockstep.parallel.compiled import targets
from lockstep.parallel.cudagraph import graphs
from lockstep.runtime import context
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import COMPILER, Pool
from ranks.support import DEVICE, QUIET, Regression, fit


@pytest.fixture(scope="module", autouse=True)
def compiler(pool: Pool) -> None:
    pool.preload(*COMPILER)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Plain(Task):
    def model(self) -> nn.Module:
        return Net()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def data(self) -> Any:
        return TensorDataset(torch.randn(32, 3, generator=torch.Generator().manual_seed(0)))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch[0]).square().sum(), len(batch[0]))


class Curious(Plain):
    """Rank 0 tries the model before the first step."""

    def model(self) -> nn.Module:
        self.net = super().model()
        return self.net

    def data(self) -> Any:
        if dist.get_rank() == 0:
            self.net(torch.ones(4, 3)).sum().backward()
            for buffer, other in zip(self.net.buffers(), Net().buffers(), strict=True):
                buffer.copy_(other)
        return super().data()


class Breaking(Plain):
    """Its loss cannot be compiled, so the model alone is."""

    def model(self) -> nn.Module:
        self.net = super().model()
        return self.net

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        torch._dynamo.graph_break()
        return super().loss(model, batch)


class Between(Breaking):
    """It calls the model between two steps, as in training: with gradients, and a batch of the same shape."""

    def after_step(self, run: Any, result: Any) -> None:
        self.net(torch.ones(4, 3))


def trained(
    world: World, store: Any, folder: str, compiled: bool, task: type[Task] = Plain
) -> tuple[dict[str, torch.Tensor], list[str]]:
    values = {**QUIET, "compile": compiled, "steps": 6, "global_batch": 16, "micro_batch": 4, "run_dir": folder}
    values["hang.first"] = 200
    phases: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        """Stands in for a compiler; rank 1's has more to do."""
        time.sleep(0.5 * world.rank)
        phases.append("compiled")

        def run(*inputs: Any) -> Any:
            phases.append("ran")
            return graph(*inputs)

        return run

    with patch.object(targets, "BACKEND", backend):
        resolved = resolve([("test", values)])
        with context.start(world, resolved.config, store) as runtime:
            runtime.heartbeat.hook = lambda step, phase: phases.append(phase)
            builder = open_run(resolved, runtime, "test")
            loop.fit(task(), builder)
            return {name: value.clone() for name, value in builder.driver.model.state_dict().items()}, phases


def captured(world: World, store: Any, folder: str) -> tuple[dict[str, torch.Tensor], int]:
    device = Again()
    with (  # a rank runs other tests after this one
        patch.object(graphs, "wants_graph", lambda config, runtime: True),
        patch.object(graphs, "CudaDevice", lambda _: device),
    ):
        return trained(world, store, folder, False)[0], device.replayed


def test_ranks_meet_when_they_have_compiled(pool: Any, tmp_path: Any) -> None:
    plain = pool.run(trained, str(tmp_path / "plain"), False, world=2)
    found = pool.run(trained, str(tmp_path / "compiled"), True, world=2)
    for (expected, _), (weights, phases) in zip(plain, found, strict=True):
        assert all(torch.equal(expected[name], weights[name]) for name in expected)
        # The ranks meet once when the first rank of the machine has compiled, and once when all have.
        order = [phase for phase in phases if phase in ("compile", "compiled", "all-reduce")]
        assert order[:3] == ["compile", "compiled", "all-reduce"]
        assert phases.count("compile") == phases.count("compiled") == 1


class Tower(nn.Module):
    """A part of its forward is compiled even if torch breaks the graph at every layer that waits for other ranks."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), norm(4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(2 * x).tanh()


class Towers(Plain):
    def __init__(self, norm: type[nn.Module] = nn.Identity) -> None:
        self.norm = norm

    def model(self) -> nn.Module:
        return Tower(self.norm)

    def tensor_plan(self, model: nn.Module) -> dict[str, str]:
        return {"net.0": "colwise", "net.2": "rowwise"}


def trained_together(
    world: World, store: Any, folder: str, compiled: bool, task: Task, settings: dict[str, Any]
) -> tuple[list[float], int]:
    """Train with forwards that are collective. Return the norms of the gradients, and how many graphs were compiled."""
    values = {**QUIET, "compile": compiled, "steps": 4, "global_batch": 16, "micro_batch": 4, "run_dir": folder}
    traced: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        traced.append(graph)
        return graph

    torch._dynamo.reset()
    compile_module = nn.Module.compile
    with patch.object(nn.Module, "compile", lambda module: compile_module(module, backend=backend)):
        resolved = resolve([("test", values | settings)])
        with context.start(world, resolved.config, store) as runtime:
            builder = open_run(resolved, runtime, "test")
            norms: list[float] = []
            task.after_step = lambda run, result: norms.append(result.grad_norm)
            loop.fit(task, builder)
            return norms, len(traced)


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        (Towers(), {"strategy": "fsdp", "blocks": ["Linear"]}),
        (Towers(), {"mesh.tp": 2}),
        (Towers(nn.SyncBatchNorm), {}),
    ],
)
def test_a_model_with_collective_forwards_is_compiled_under_its_driver(
    pool: Any, tmp_path: Any, task: Task, settings: dict[str, Any]
) -> None:
    if DEVICE != "cpu":
        pytest.skip("ranks that share a GPU use gloo")
    plain = pool.run(trained_together, str(tmp_path / "plain"), False, task, settings, world=2)
    found = pool.run(trained_together, str(tmp_path / "compiled"), True, task, settings, world=2)
    for (expected, none), (norms, compiled) in zip(plain, found, strict=True):
        assert norms == pytest.approx(expected, rel=1e-5)
        assert len(norms) == 4
        assert none == 0 < compiled


def test_a_call_on_one_rank_before_the_first_step(pool: Any, tmp_path: Any) -> None:
    """It must not wait for the others there: they are on their way to a collective."""
    plain = pool.run(trained, str(tmp_path / "plain"), False, world=2)
    found = pool.run(trained, str(tmp_path / "curious"), True, Curious, world=2)
    for (expected, _), (weights, phases) in zip(plain, found, strict=True):
        assert all(torch.equal(expected[name], weights[name]) for name in expected)
        assert phases.count("compile") == 1


def test_a_call_between_two_steps_runs_eagerly(pool: Any, tmp_path: Any) -> None:
    _, expected = pool.run(trained, str(tmp_path / "breaking"), True, Breaking, world=1)[0]
    _, phases = pool.run(trained, str(tmp_path / "between"), True, Between, world=1)[0]
    assert phases.count("compiled") == 1
    assert phases.count("ran") == expected.count("ran") > 6 * 4


@pytest.mark.skipif(DEVICE != "cpu", reason="a device made up for CPUs; tests/gpu/test_gpu_graphs.py has the real one")
def test_captured_calls_on_two_ranks(pool: Any, tmp_path: Any) -> None:
    plain = pool.run(trained, str(tmp_path / "plain"), False, world=2)
    found = pool.run(captured, str(tmp_path / "graph"), world=2)
    for (expected, _), (weights, replayed) in zip(plain, found, strict=True):
        assert replayed > 6
        assert all(torch.equal(expected[name], weights[name]) for name in expected)


def meet_again(world: World, store: Any, folder: str) -> tuple[bool, bool]:
    with context.start(world, resolve([("test", {**QUIET, "run_dir": folder})]).config, store) as runtime:
        first = runtime.store_barrier("here", timedelta(seconds=60))
        return first, world.rank == 0 and runtime.store_barrier("here", timedelta(seconds=0.2))


def test_a_second_meeting_is_not_the_first(pool: Any, tmp_path: Any) -> None:
    assert pool.run(meet_again, str(tmp_path), world=2) == [(True, False), (True, False)]


class Wide(nn.Module):
    """Five layers of 1.4 MB each, so that their gradients fill several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(5, 600), nn.Linear(600, 1)
        self.layers = nn.ModuleList([nn.Linear(600, 600) for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x).squeeze(-1)


def count_graphs(world: World, store: Any, values: dict[str, Any]) -> int:
    """A job: the graphs of a model that the user has compiled."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def network() -> nn.Module:
        model = Wide()
        model.compile(backend=backend)
        return model

    fit(world, store, Regression(network=network), {"global_batch": 8, "micro_batch": 2, "steps": 2} | values)
    return len(graphs)


def test_compiled_code_is_split_at_the_buckets(pool: Any) -> None:
    """Otherwise no gradient would be reduced before the whole backward has ended."""
    assert pool.run(count_graphs, {"ddp.find_unused_parameters": True}, world=2) == [1, 1]
    assert min(pool.run(count_graphs, {"ddp.bucket_mb": 1.0}, world=2)) >= 5
