"""Stop, change the number of ranks, resume: the same weights, moments and samples as if nothing had happened."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint.loading.resume import Resumed
from lockstep.engine import loop
from lockstep.engine.own_loop import OwnRun
from lockstep.engine.setup import open_run
from lockstep.errors import Preempted
from lockstep.observe.sinks import read_jsonl
from lockstep.runtime import context
from lockstep.runtime.world import World
from lockstep.task import Loss, StepBatches, Task
from pool import Pool
from ranks.support import Trace, WatchedRun, assert_user_errors, configured, windows

WORLDS = (1, 2, 3, 4)
LENGTH, BATCH = 44, 8  # the last step of an epoch is short


class Net(nn.Module):
    """Tied weights, a frozen part, a buffer that moves, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.out = nn.Linear(6, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        x = torch.tanh(self.second(torch.tanh(self.first(x)))) + self.frozen(x)
        return self.out(nn.functional.dropout(x, 0.2, self.training)).squeeze(-1)


class Averaged(Task):
    """Has tensors of its own, which a checkpoint must hold too."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def model(self) -> nn.Module:
        return Net()

    def optimizer(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
        matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
        return [torch.optim.AdamW(matrices, lr=0.01), torch.optim.SGD(vectors, lr=0.01, momentum=0.9)]

    def data(self) -> Any:
        g = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(LENGTH, 6, generator=g), torch.randn(LENGTH, generator=g))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        with torch.no_grad():
            self.average = {name: p.detach() / 2 for name, p in model.named_parameters()}
        return Loss(((model(x) - y) ** 2).sum(), len(x))

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "note": ("kept", 1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["note"] == ("kept", 1)
        self.average = state["average"]


BASE = {
    "global_batch": BATCH,
    "micro_batch": 2,
    "steps": 14,
    "lr.schedule": "cosine",
    "lr.warmup": 3,
    "clip.norm": 0.5,
    "checkpoint.at_end": False,
    "log.every": 1,
}


@dataclass
class Part:
    """What one rank knows after its part of a run."""

    trace: Trace
    began_with: dict[str, Tensor]  # the whole state: weights, moments, the task's own
    ended_with: dict[str, Tensor]
    resumed: Resumed | None
    left_at: int | None


class PreemptedRun(WatchedRun):
    """The last rank alone is preempted, in the middle of step `preempt_at - 1`; all ranks must end after it."""

    preempt_at: int | None = None

    def step_batches(self) -> Iterator[StepBatches]:
        self.began_with = self.state()
        world = self.runtime.world
        for batches in super().step_batches():
            if self.steps_done + 1 == self.preempt_at and world.rank == world.size - 1:
                self.runtime.notice.signal = "SIGUSR1"
            yield batches

    def state(self) -> dict[str, Tensor]:
        return {name: found.tensor.clone() for name, found in self.checkpoints.state.capture().tensors.items()}


def train_part(world: World, store: Any, task: Task, values: dict[str, Any], preempt_at: int | None = None) -> Part:
    """A job: train in `run_dir`, from its newest checkpoint if it has one, and end preempted at `preempt_at`."""
    resolved = configured(BASE | {"resume": "auto"} | values)
    with context.start(world, resolved.config, store=store) as runtime:
        run_class = type("PreemptedRun", (PreemptedRun,), {"preempt_at": preempt_at})
        builder = open_run(resolved, runtime, "test", run_class=run_class)
        summary: dict[str, Any] = {}
        left_at = None
        try:
            summary = loop.fit(task, builder)
            assert preempt_at is None, "the run continued to its end"
        except Preempted as left:
            left_at = left.step
        run = builder.run
        assert isinstance(run, PreemptedRun)
        run.trace.summary = summary
        return Part(run.trace, run.began_with, run.state(), run.resumed, left_at)


def ids_by_step(parts: list[Part]) -> list[list[int]]:
    """The samples of every step, all ranks together, in the order of the micro-batches."""
    pieces = [[p for part in parts for p in part.trace.steps[n].pieces] for n in range(len(parts[0].trace.steps))]
    real = [sorted((p for p in step if not p.padding), key=lambda p: p.index) for step in pieces]
    return [[i for piece in step for i in piece.ids] for step in real]


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[Part]]]:
    """For every world a run that has left after 8 of 14 steps, in the middle of its second epoch."""
    folder = tmp_path_factory.mktemp("saved")
    found = {}
    for world in WORLDS:
        path = folder / f"from-{world}"
        found[world] = path, pool.run(train_part, Averaged(), {"run_dir": str(path)}, 8, world=world)
    return found


@pytest.mark.parametrize("after", WORLDS)
@pytest.mark.parametrize("before", WORLDS)
def test_any_world_goes_on_from_any_other(pool: Pool, saved: Any, tmp_path: Path, before: int, after: int) -> None:
    path, left = saved[before]
    shutil.copytree(path, tmp_path / "run")
    parts = pool.run(train_part, Averaged(), {"run_dir": str(tmp_path / "run")}, world=after)
    assert [part.left_at for part in left] == [8] * before
    for part in parts:
        assert part.resumed is not None
        assert (part.resumed.step, part.resumed.world_size) == (8, before)
        assert_same_bits(part.began_with, left[0].ended_with)
    assert ids_by_step(left) + ids_by_step(parts) == windows(LENGTH, BATCH, "short", 14)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_run_that_left_and_came_back_has_the_same_bits(pool: Pool, tmp_path: Path, world: int) -> None:
    whole = pool.run(train_part, Averaged(), {"run_dir": str(tmp_path / "whole")}, world=world)
    values = {"run_dir": str(tmp_path / "parts")}
    for preempt_at in (3, 9, None):
        parts = pool.run(train_part, Averaged(), values, preempt_at, world=world)
    assert_same_bits(parts[0].ended_with, whole[0].ended_with)


def test_a_changing_world_has_the_same_loss_curve(pool: Pool, tmp_path: Path) -> None:
    pool.run(train_part, Averaged(), {"run_dir": str(tmp_path / "constant")}, world=2)
    values = {"run_dir": str(tmp_path / "changing")}
    ids = []
    for world, preempt_at in ((4, 3), (3, 6), (1, 9), (2, None)):
        ids += ids_by_step(pool.run(train_part, Averaged(), values, preempt_at, world=world))
    constant, changing = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("constant", "changing"))
    assert [line["step"] for line in changing] == list(range(1, 15))
    for a, b in zip(constant, changing, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
        assert b["lr"] == a["lr"]
    assert ids == windows(LENGTH, BATCH, "short", 14)


def test_what_has_changed_since_is_said(pool: Pool, saved: Any, tmp_path: Path) -> None:
    shutil.copytree(saved[1][0], tmp_path / "run")
    values = {"run_dir": str(tmp_path / "run"), "steps": 20, "clip.norm": None, "clip.value": 0.5}
    (part,) = pool.run(train_part, Averaged(), values, world=1)
    assert {"steps: 14 -> 20", "clip.norm: 0.5 -> null", "clip.value: null -> 0.5"} == set(part.resumed.changes)


class OtherNet(Averaged):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))


class OtherOptimizer(Averaged):
    def optimizer(self, model: nn.Module) -> Any:
        return super().optimizer(model)[0].__class__([p for p in model.parameters() if p.requires_grad])


class Untied(Averaged):
    def model(self) -> nn.Module:
        net = Net()
        net.second.weight = nn.Parameter(net.first.weight.detach().clone())
        return net


class MoreData(Averaged):
    def data(self) -> Any:
        return TensorDataset(torch.randn(LENGTH + 1, 6), torch.randn(LENGTH + 1))


class Slots(Averaged):
    fixed_settings = ("global_batch",)


@pytest.mark.parametrize(
    ("task", "values", "words"),
    [
        (Slots(), {"global_batch": 4}, ("global_batch=4 does not fit", "saved its state with", "set global_batch=")),
        (OtherNet(), {}, ("differs from the model in the checkpoint", "missing in the checkpoint, first '0.bias'")),
        (OtherOptimizer(), {}, ("2 optimizers, the task 1",)),
        (Untied(), {}, ("tied",)),
        (MoreData(), {}, ("has 45 samples, but had 44 when",)),
        (Averaged(), {"seed": 7}, ("the order of the samples has changed", "undo the changes (seed: 0 -> 7)")),
        (Averaged(), {"data.shuffle": False}, ("data.shuffle",)),
    ],
)
def test_a_run_that_is_not_the_same_is_refused(
    pool: Pool, saved: Any, tmp_path: Path, task: Task, values: dict[str, Any], words: tuple[str, ...]
) -> None:
    shutil.copytree(saved[2][0], tmp_path / "run")
    errors = pool.errors(train_part, task, {"run_dir": str(tmp_path / "run"), **values}, world=2)
    assert_user_errors(errors, *words)


def test_a_folder_with_a_run_is_refused_unless_it_is_resumed(pool: Pool, saved: Any) -> None:
    errors = pool.errors(train_part, Averaged(), {"run_dir": str(saved[2][0]), "resume": "never"}, world=2)
    assert_user_errors(errors, "already holds a run", "--resume auto")


def test_a_run_that_had_only_to_end_knows_its_loss(pool: Pool, tmp_path: Path) -> None:
    """Killed after its last step, in show() say."""
    values = {"run_dir": str(tmp_path), "steps": 4, "log.every": 2, "checkpoint.at_end": True}
    first, again = (pool.run(train_part, Averaged(), values, world=2) for _ in range(2))
    assert [part.resumed.step for part in again] == [4, 4]
    assert first[0].trace.summary["loss"] is not None
    assert [part.trace.summary["loss"] for part in again] == [first[0].trace.summary["loss"]] * 2


def test_going_back_to_an_older_checkpoint_undoes_what_came_after(pool: Pool, tmp_path: Path) -> None:
    values = {"run_dir": str(tmp_path), "checkpoint.every": 4, "checkpoint.keep": 9}
    pool.run(train_part, Averaged(), values, world=1)
    older = {**values, "resume": str(tmp_path / "checkpoints" / "step-00000004"), "steps": 6}
    (part,) = pool.run(train_part, Averaged(), older, world=1)
    assert part.resumed.step == 4
    names = {path.name for path in (tmp_path / "checkpoints").glob("step-*")}
    assert names == {"step-00000004", "step-00000008.rewound", "step-00000012.rewound"}


def test_a_run_may_begin_from_another_runs_checkpoint(pool: Pool, saved: Any, tmp_path: Path) -> None:
    values = {"run_dir": str(tmp_path / "new"), "resume": str(saved[3][0]), "steps": 10}
    parts = pool.run(train_part, Averaged(), values, world=2)
    assert parts[0].resumed.step == 8
    assert_same_bits(parts[1].began_with, saved[3][1][0].ended_with)
    assert not list(saved[3][0].glob("checkpoints/*.rewound"))


def test_a_loop_of_ones_own_saves_what_is_registered(pool: Pool, tmp_path: Path) -> None:
    def job(world: World, store: Any, preempt: bool) -> tuple[list[int], list[int]]:
        resolved = configured({**BASE, "steps": 6, "run_dir": str(tmp_path), "resume": "auto"})
        with context.start(world, resolved.config, store=store) as runtime:
            own, task, steps = OwnRun(open_run(resolved, runtime, "own")), Averaged(), []
            counts = CountsUp()
            plain = task.model()
            model, *optimizers = own.setup(plain, *task.optimizer(plain))
            own.register("counts", counts)
            try:
                for step in own.steps(task.data()):
                    steps.append(step.index)
                    counts.seen.append(step.index)
                    if preempt and step.index == 2:
                        runtime.notice.signal = "SIGTERM"
                    for batch in step:
                        loss = task.loss(model, batch)
                        step.backward(loss.total, loss.weight)
                    step.apply(*optimizers)
                own.close()
            except Preempted:
                pass
            return steps, counts.seen

    assert pool.run(job, True, world=2)[0] == ([0, 1, 2], [0, 1, 2])
    assert pool.run(job, False, world=3)[0] == ([3, 4, 5], [0, 1, 2, 3, 4, 5])


class CountsUp:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_a_run_is_not_begun_from_elsewhere_in_the_folder_of_another(pool: Pool, saved: Any) -> None:
    values = {"run_dir": str(saved[1][0]), "resume": str(saved[2][0])}
    assert_user_errors(pool.errors(train_part, Averaged(), values, world=2), "already holds another run")


class Remembers(nn.Linear):
    """Has state of its own kind, with a tensor in it."""

    def __init__(self) -> None:
        super().__init__(6, 1)
        self.seen = {"calls": 0, "last": torch.zeros(2)}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = {"calls": self.seen["calls"] + 1, "last": x.detach().flatten()[:2].clone()}
        return super().forward(x).squeeze(-1)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class WithExtraState(Averaged):
    def model(self) -> nn.Module:
        self.net = nn.Sequential(Remembers())
        return self.net

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def state_dict(self) -> dict[str, Any]:
        inner, outer = torch.tensor(1.0), torch.tensor(2.0)
        return {"ema": {"w": inner}, "ema.w": outer, "array": np.array(3.0), "calls": self.net[0].seen["calls"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert (state["ema"]["w"].item(), state["ema.w"].item()) == (1.0, 2.0)
        assert state["array"].shape == ()
        assert self.net[0].seen["calls"] == state["calls"] == 12


def test_modules_and_tasks_with_state_of_any_kind(pool: Pool, tmp_path: Path) -> None:
    pool.run(train_part, WithExtraState(), {"run_dir": str(tmp_path)}, 3, world=1)
    (part,) = pool.run(train_part, WithExtraState(), {"run_dir": str(tmp_path)}, world=1)
    assert part.resumed.step == 3


class MoreOnRank1(Averaged):
    """Rank 1 alone has a tensor more in its state, and a large one."""

    def state_dict(self) -> dict[str, Any]:
        more = {"replay": torch.ones(1000)} if dist.get_rank() == 1 else {}
        return super().state_dict() | more


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_task_with_more_state_on_another_rank_is_saved_as_rank_0_has_it(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    values = {"run_dir": str(tmp_path), "strategy": strategy}
    pool.run(train_part, MoreOnRank1(), values, 3, world=2)
    parts = pool.run(train_part, MoreOnRank1(), values, 6, world=2)
    assert [part.resumed.step for part in parts] == [3, 3]
    reasons = [event["reason"] for event in read_jsonl(tmp_path / "events.jsonl") if event["event"] == "warning"]
    assert "the state of 'task' differs between the ranks: rank 0's is saved" in reasons


def test_frozen_parts_may_be_left_out(pool: Pool, tmp_path: Path) -> None:
    values = {"run_dir": str(tmp_path), "checkpoint.frozen": False}
    (part,) = pool.run(train_part, Averaged(), values, 3, world=1)
    assert not any(name.startswith("model.frozen") for name in part.ended_with)
    parts = pool.run(train_part, Averaged(), values, 6, world=2)
    assert parts[0].resumed.step == 3
    assert_user_errors(pool.errors(train_part, OtherFrozen(), values, world=1), "frozen", "digest")


class OtherFrozen(Averaged):
    def model(self) -> nn.Module:
        net = Net()
        net.frozen.weight.data += 1
        return net


class Counting(torch.optim.AdamW):
    """Derives a number of its own from the state that it is given."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.counted = max(int(state["step"]) for state in self.state.values())


def test_an_optimizer_with_a_load_state_dict_of_its_own_gets_its_state(tmp_path):
    class Counted(Averaged):
        def optimizer(self, model):
            self.made = Counting(model.parameters(), lr=1e-2)
            return self.made

    values = {"run_dir": tmp_path / "run", "log": {"progress": "off"}, "device": "cpu", "checks": {"loss": "off"}}
    lockstep.fit(Counted(), global_batch=4, steps=5, **values)
    task = Counted()
    lockstep.fit(task, global_batch=4, steps=6, resume="auto", **values)
    assert task.made.counted == 5
