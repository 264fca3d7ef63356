"""The hrm recipe: small runs on 1, 2 and 3 ranks, its optimizers and its settings."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from restless import Restless
from torch import Tensor

import preloaded
from fused_update import assert_same_steps
from lockstep.config import resolve_for
from lockstep.engine import loop
from lockstep.engine.setup import open_run
from lockstep.errors import ConfigError
from lockstep.recipes.hrm import HRM
from lockstep.recipes.hrm.arguments import overrides
from lockstep.recipes.hrm.model import HierarchicalReasoningModel, SparseEmbedding
from lockstep.recipes.hrm.optimizers import AdamATan2, CastedSparseEmbeddingSignSGD_Distributed, MovingAverage
from lockstep.runtime import context
from lockstep.runtime.world import World
from lockstep.targets import make_task
from pool import Pool
from pretrain import load_synced_config
from ranks.support import assert_user_errors

ROOT = Path(__file__).parent.parent.parent
TARGET = f"{Path(__file__).parent / 'restless.py'}:Restless"
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
# IdGrid, since there many rows of the table are in use; a constant rate, so that a run can be cut into parts.
TINY = {
    "preset": "tiny", "lr.schedule": "constant", "lr.warmup": 0, "log.progress": "off", "resume": "auto",
    "evaluate.at_end": False, "device": "cpu", "precision": "fp32",
    "task": {"puzzle": "idgrid", "ema": 0.9, "train_size": 96, "halt_max_steps": 4, "halt_exploration": 0.5},
}  # fmt: skip


# ---- whole runs -----------------------------------------------------------------------------------------


@dataclass
class Ended:
    state: dict[str, Tensor]  # all that a checkpoint holds
    resumed: int | None


def train(world: World, store: Any, run_dir: str, steps: int, more: dict[str, Any] | None = None) -> Ended:
    """A job: `lockstep train` with the tiny preset, going on in `run_dir` where it can."""
    values = TINY | {"run_dir": run_dir, "steps": steps} | (more or {})
    resolved = resolve_for(HRM.defaults, HRM.presets, [("test", values)])
    task = make_task(Restless, resolved.config.task)
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test")
        loop.fit(task, builder)
        run = builder.run
        assert run is not None
        state = {name: found.tensor.clone() for name, found in run.checkpoints.state.capture().tensors.items()}
        return Ended(state, run.resumed.step if run.resumed else None)


@pytest.fixture(scope="module")
def full_runs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ended]:
    """Nine steps without a break, by 1, 2 and 3 ranks."""
    folder = tmp_path_factory.mktemp("hrm")
    return {size: pool.run(train, str(folder / f"world-{size}"), 9, world=size)[0] for size in (1, 2, 3)}


def assert_alike(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Floating point up to the order of additions; the puzzle of each slot, and its number of segments, exactly."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        if value.is_floating_point():
            assert torch.allclose(value, b[name], atol=1e-4, rtol=1e-4), name
        else:
            assert torch.equal(value, b[name]), name


def test_the_number_of_ranks_changes_nothing(full_runs: dict[int, Ended]) -> None:
    for size in (2, 3):
        assert_alike(full_runs[1].state, full_runs[size].state)
    steps = full_runs[1].state["stateful.task.carry.steps"]
    assert len(steps) == 24
    assert len(steps.unique()) > 1  # some puzzles are older than others, or the carry would not show


def test_the_table_has_the_same_bits_in_every_world(full_runs: dict[int, Ended]) -> None:
    table = full_runs[1].state["model.puzzle_emb.table"]
    assert table.abs().sum() > 0
    for size in (2, 3):
        assert torch.equal(table, full_runs[size].state["model.puzzle_emb.table"])


def test_the_carry_survives_two_three_one(pool: Pool, full_runs: dict[int, Ended], tmp_path: Path) -> None:
    parts = [pool.run(train, str(tmp_path), steps, world=size)[0] for size, steps in ((2, 3), (3, 6), (1, 9))]
    assert [part.resumed for part in parts] == [None, 3, 6]
    assert_alike(parts[-1].state, full_runs[1].state)


def test_a_killed_run_ends_with_the_same_bits(full_runs: dict[int, Ended], tmp_path: Path) -> None:
    (tmp_path / "once").mkdir()
    fault = [{"how": "kill", "rank": 1, "step": 5, "marks": str(tmp_path / "once")}]
    words = [f"{key}={json.dumps(value)}" for key, value in TINY["task"].items()]
    words = [f"task.{word}".replace('"', "") for word in words]
    words += [f"{key}={value}" for key, value in TINY.items() if key not in ("task", "resume")]
    command = ["train", TARGET, "--nproc", "2", *words, "steps=9"]
    command += ["checkpoint.every=3", f"run_dir={tmp_path / 'run'}"]
    done = preloaded.run(*command, cwd=tmp_path, env=ENV | {"LOCKSTEP_FAULTS": json.dumps(fault)})
    assert done.returncode == 0, done.stderr
    assert "SIGKILL" in done.stderr + done.stdout
    found = read_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000009")
    for name, value in full_runs[2].state.items():
        assert torch.equal(found[name], value), name


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: t for part in folder.glob("*.safetensors") for name, t in load_file(part).items()}


def test_a_frozen_table_stays_zero(pool: Pool, tmp_path: Path) -> None:
    """The control, whose goals are not to be exceeded."""
    more = {"task": TINY["task"] | {"puzzle_emb_frozen": True}, "evaluate.at_end": True}
    more["goals"] = HRM.presets["cpu-control"]["goals"]
    (ended,) = pool.run(train, str(tmp_path), 2, more, world=1)
    assert not ended.state["model.puzzle_emb.table"].any()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [goal["target"] for goal in summary["goals"]] == ["exact <= 0.01", "cell <= 0.25"]
    assert summary["goals"][0]["value"] == summary["eval_metrics"]["exact"] == 0


def train_compiled(world: World, store: Any, run_dir: str) -> Ended:
    """A job: the model's own `compile`, without the C++ compiler."""
    compile_parts = HierarchicalReasoningModel.compile
    with patch.object(HierarchicalReasoningModel, "compile", lambda model: compile_parts(model, backend="aot_eager")):
        return train(world, store, run_dir, 3, {"compile": True})


def test_compiled_parts_change_nothing(pool: Pool, tmp_path: Path) -> None:
    """The loss keeps the carry, so that it is called once for each micro-batch, and only the model is compiled."""
    (plain,) = pool.run(train, str(tmp_path / "plain"), 3, world=1)
    (found,) = pool.run(train_compiled, str(tmp_path / "compiled"), world=1)
    assert_alike(plain.state, found.state)
    events = [json.loads(line) for line in (tmp_path / "compiled" / "events.jsonl").read_text().splitlines()]
    reasons = [event["reason"] for event in events if event["event"] == "compile"]
    assert reasons[-1].startswith("compiled the model in")
    assert reasons[-1].endswith("equal to eager")


@pytest.mark.parametrize("preset", HRM.presets)
def test_every_preset_is_a_valid_configuration(preset: str) -> None:
    resolved = resolve_for(HRM.defaults, HRM.presets, [("test", {"preset": preset})])
    assert isinstance(make_task(HRM, resolved.config.task), HRM)


# ---- optimizers -----------------------------------------------------------------------------------------


def sparse_step(world: World, store: Any, ids: list[int], gradients: Tensor, cuts: list[int]) -> Tensor:
    """A job: one step of a table; this rank has the slots of its cut."""
    resolved = resolve_for({}, {}, [("test", {"device": "cpu", "global_batch": 1, "steps": 1})])
    with context.start(world, resolved.config, store=store):
        embedding = SparseEmbedding(6, 3)
        embedding.table += 1.0
        optimizer = CastedSparseEmbeddingSignSGD_Distributed(
            embedding.buffers(), lr=0.5, weight_decay=0.1, world_size=world.size
        )
        edges = [0, *cuts, len(ids)]
        mine = slice(edges[world.rank], edges[world.rank + 1])
        rows = embedding(torch.tensor(ids[mine]))
        rows.grad = gradients[mine].clone()
        optimizer.note(edges[world.rank], torch.tensor(ids[mine]), rows)
        optimizer.step()
        return embedding.table


def test_signs_are_taken_after_the_sum_over_ranks(pool: Pool) -> None:
    ids = [4, 1, 4, 1, 2, 4]
    gradients = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    gradients[0], gradients[2], gradients[5] = 5.0, -1.0, -1.0  # signs alone would be outvoted
    tables = [
        table
        for size, cuts in ((1, []), (2, [2]), (3, [1, 4]))
        for table in pool.run(sparse_step, ids, gradients, cuts, world=size)
    ]
    expected = torch.ones(6, 3)
    for i in set(ids):
        total = gradients[[slot for slot, other in enumerate(ids) if other == i]].sum(dim=0)
        expected[i] = 1.0 * (1 - 0.5 * 0.1) - 0.5 * total.sign()
    for table in tables:
        assert torch.equal(table, tables[0])
        assert torch.allclose(table, expected)


def test_adam_atan2_follows_its_formula_and_no_scale_of_the_gradient() -> None:
    weights = {scale: torch.tensor([1.0, -2.0], requires_grad=True) for scale in (1.0, 1e-12)}
    expected, mean, square = torch.tensor([1.0, -2.0]), torch.zeros(2), torch.zeros(2)
    optimizers = {scale: AdamATan2([w], lr=0.1, weight_decay=0.5) for scale, w in weights.items()}
    for step in range(1, 4):
        gradient = torch.tensor([0.3, -0.1]) * step
        for scale, optimizer in optimizers.items():
            weights[scale].grad = gradient * scale
            optimizer.step()
        mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * gradient**2
        angle = torch.atan2(mean / (1 - 0.9**step), (square / (1 - 0.95**step)).sqrt())
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * angle
    assert torch.allclose(weights[1.0], expected, atol=1e-6)
    assert torch.allclose(weights[1e-12], expected, atol=1e-5)


def test_a_fused_step_is_the_same_step() -> None:
    """As on a GPU: divided, skipped and counted there, without the host."""
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in ((3, 4), (5,), ())]
    plain, fused = ([t.clone().requires_grad_() for t in start] for _ in range(2))
    one, other = (AdamATan2(p, lr=0.1, weight_decay=0.5, fused=flag) for p, flag in ((plain, False), (fused, True)))
    assert_same_steps(one, other, spoiled=float("nan"), atol=1e-6)
    assert [int(other.state[p]["step"]) for p in fused] == [3, 3, 3]
    other.param_groups[0]["fused"] = False  # a run may resume on another device
    other.step()
    assert [other.state[p]["step"] for p in fused] == [4, 4, 4]


def test_exact_bits_are_refused_before_the_first_step_unless_the_table_is_frozen(pool: Pool, tmp_path: Path) -> None:
    errors = pool.errors(train, str(tmp_path / "moving"), 1, {"exact": True}, world=1)
    assert_user_errors(errors, "'puzzle_emb.table' changes in training")
    more = {"exact": True, "task": TINY["task"] | {"puzzle_emb_frozen": True}}
    pool.run(train, str(tmp_path / "frozen"), 1, more, world=1)


def test_a_skipped_step_leaves_the_table() -> None:
    embedding = SparseEmbedding(3, 2)
    optimizer = CastedSparseEmbeddingSignSGD_Distributed(embedding.buffers(), lr=0.5, weight_decay=0.1, world_size=1)
    for skip in (1.0, 0.0):
        rows = embedding(torch.tensor([1, 1]))
        rows.grad = torch.full((2, 2), float("nan") if skip else 2.0)
        optimizer.note(0, torch.tensor([1, 1]), rows)
        optimizer.found_inf = torch.tensor(skip)
        optimizer.step()
        optimizer.forget()
        assert embedding.table[1].tolist() == ([0.0, 0.0] if skip else [-0.5, -0.5])


def test_an_average_stands_in_for_the_weights_and_leaves_them() -> None:
    model, average = torch.nn.Linear(2, 1, bias=False), MovingAverage(0.9)
    history = [torch.tensor([[float(step), 1.0]]) for step in range(3)]
    for step, weights in enumerate(history, 1000):
        model.weight.data.copy_(weights)
        average.follow(model, step)
    with torch.no_grad(), average.instead(model):
        inside = model.weight.clone()
    assert torch.allclose(inside, torch.tensor([[0.9 * 0.1 + 0.1 * 2, 1.0]]))
    assert torch.equal(model.weight, history[-1])


def test_a_young_average_forgets_faster() -> None:
    model, average = torch.nn.Linear(1, 1, bias=False), MovingAverage(0.999)
    for step in range(1, 101):
        model.weight.data.fill_(float(step))
        average.follow(model, step)
    (young,) = average.weights.values()
    assert 85 < young.item() < 95  # about 11 steps behind; with 0.999 from the first step on it would be at 5


# ---- settings -------------------------------------------------------------------------------------------


def synced(world: World, store: Any) -> Any:
    """A job: every rank was given other words."""
    resolved = resolve_for({}, {}, [("test", {"device": "cpu", "global_batch": 1, "steps": 1})])
    with context.start(world, resolved.config, store=store):
        words = overrides([f"data_path=from-rank-{world.rank}", "lr=1e-4", "task.width=64", "log.every=5"])
        return load_synced_config(words, world.rank, world.size)


def test_all_ranks_get_the_configuration_of_rank_0(pool: Pool) -> None:
    first, second = pool.run(synced, world=2)
    assert first == second
    assert (first.data_path, first.lr, first.rest) == ("from-rank-0", 1e-4, {"task.width": 64, "log.every": 5})
    assert len(first.run_name.split("-")) == 3


def test_wrong_options_are_named_together() -> None:
    with pytest.raises(ConfigError) as error:
        HRM(width=30, heads=4, variant="tmr", test_size=0, layers=0)
    assert {p.problem for p in error.value.problems} == {
        "task.width=30 cannot be divided among task.heads=4",
        "task.variant=tmr is not known",
        "task.test_size=0 is less than 1",
        "task.layers=0 is less than 1",
    }
    assert "task.variant takes hrm, trm" in {p.found for p in error.value.problems}
    assert "set task.variant=trm" in {p.fix for p in error.value.problems}
