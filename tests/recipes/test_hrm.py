"""The hrm recipe: its parts against plain formulas, and its smallest runs on 1, 2 and 3 ranks."""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from restless import Restless
from torch import Tensor

from lockstep.config import resolve_for
from lockstep.engine import loop
from lockstep.engine.run import Run
from lockstep.errors import ConfigError, UserError
from lockstep.recipes.hrm import HRM, maze, sudoku
from lockstep.recipes.hrm.adam_atan2 import AdamATan2
from lockstep.recipes.hrm.average import MovingAverage
from lockstep.recipes.hrm.build import Build, build, read_csv
from lockstep.recipes.hrm.build import main as build_main
from lockstep.recipes.hrm.carry import Carry, filled
from lockstep.recipes.hrm.data import PuzzleDataset, read_puzzles
from lockstep.recipes.hrm.losses import cell_loss
from lockstep.recipes.hrm.model import HierarchicalReasoningModel, ModelConfig, _cut_normal
from lockstep.recipes.hrm.pretrain import PretrainConfig, load_synced_config, overrides
from lockstep.recipes.hrm.puzzles import Asked, IdRules, family, split_by_class
from lockstep.recipes.hrm.sparse import CastedSparseEmbeddingSignSGD_Distributed, SparseEmbedding
from lockstep.runtime import context
from lockstep.runtime.world import World
from lockstep.targets import make_task, settled
from pool import Pool

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
    resolved = settled(HRM, resolve_for(HRM.defaults, HRM.presets, [("test", values)]))
    task = make_task(Restless, resolved.config.task)
    with context.start(world, resolved.config, store=store) as runtime:
        run = Run(resolved, runtime, "test")
        loop.fit(task, run)
        state = {name: tensor.clone() for name, tensor in run.keeper.state.capture()[0].items()}
        return Ended(state, run.resumed.step if run.resumed else None)


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ended]:
    """Nine steps without a break, by 1, 2 and 3 ranks."""
    folder = tmp_path_factory.mktemp("hrm")
    return {size: pool.run(train, str(folder / f"world-{size}"), 9, world=size)[0] for size in (1, 2, 3)}


def assert_alike(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Floating point up to the order of additions; who thinks about what, and for how long, exactly."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        if value.is_floating_point():
            assert torch.allclose(value, b[name], atol=1e-4, rtol=1e-4), name
        else:
            assert torch.equal(value, b[name]), name


def test_the_number_of_ranks_changes_nothing(whole: dict[int, Ended]) -> None:
    for size in (2, 3):
        assert_alike(whole[1].state, whole[size].state)
    steps = whole[1].state["part.task.carry.steps"]
    assert len(steps) == 24
    assert len(steps.unique()) > 1  # some puzzles are older than others, or the carry would not show


def test_the_table_has_the_same_bits_in_every_world(whole: dict[int, Ended]) -> None:
    table = whole[1].state["model.puzzle_emb.table"]
    assert table.abs().sum() > 0
    for size in (2, 3):
        assert torch.equal(table, whole[size].state["model.puzzle_emb.table"])


def test_the_carry_survives_two_three_one(pool: Pool, whole: dict[int, Ended], tmp_path: Path) -> None:
    parts = [pool.run(train, str(tmp_path), steps, world=size)[0] for size, steps in ((2, 3), (3, 6), (1, 9))]
    assert [part.resumed for part in parts] == [None, 3, 6]
    assert_alike(parts[-1].state, whole[1].state)


def test_a_killed_run_ends_with_the_same_bits(whole: dict[int, Ended], tmp_path: Path) -> None:
    (tmp_path / "once").mkdir()
    fault = [{"how": "kill", "rank": 1, "step": 5, "marks": str(tmp_path / "once")}]
    words = [f"{key}={json.dumps(value)}" for key, value in TINY["task"].items()]
    words = [f"task.{word}".replace('"', "") for word in words]
    words += [f"{key}={value}" for key, value in TINY.items() if key not in ("task", "resume")]
    command = [sys.executable, "-m", "lockstep.cli", "train", TARGET, "--nproc", "2", *words, "steps=9"]
    command += ["checkpoint.every=3", f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENV | {"LOCKSTEP_FAULTS": json.dumps(fault)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "SIGKILL" in done.stderr + done.stdout
    found = read_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000009")
    for name, value in whole[2].state.items():
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
    assert (one.divides_and_skips, other.divides_and_skips) == (False, True)
    for skip in (1.0, 0.0, 1.0, 0.0, 0.0):
        gradients = [torch.randn_like(t) for t in start]
        for p, gradient in zip(fused, gradients, strict=True):
            p.grad = gradient * (float("nan") if skip else 8.0)
        other.grad_scale, other.found_inf = torch.tensor(8.0), torch.tensor(skip)
        other.step()
        if not skip:
            for p, gradient in zip(plain, gradients, strict=True):
                p.grad = gradient
            one.step()
        for a, b in zip(plain, fused, strict=True):
            assert torch.allclose(a, b, atol=1e-6)
    assert [int(other.state[p]["step"]) for p in fused] == [3, 3, 3]
    other.param_groups[0]["fused"] = False  # a run may go on elsewhere
    other.step()
    assert [other.state[p]["step"] for p in fused] == [4, 4, 4]


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


# ---- the model ------------------------------------------------------------------------------------------


def test_a_compiled_segment_converts_its_weights_once() -> None:
    config = ModelConfig(5, 4, width=16, heads=2, layers=1, h_cycles=2, l_cycles=1, positions="learned")
    inputs, seen = torch.tensor([[1, 2, 3, 4], [4, 1, 1, 2]]), []

    def backend(graph: torch.fx.GraphModule, given: list[Tensor]) -> Any:
        seen.extend(given)
        return graph.forward

    def gradients(compiled: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = HierarchicalReasoningModel(config)
        if compiled:
            model.compile(backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            thought = model(*model.start(2), inputs, model.puzzle_emb(torch.tensor([0, 0])), look_ahead=True)
            (thought.logits.float().square().sum() + thought.q.float().sum()).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, compiled = gradients(False), gradients(True)
    assert seen
    assert all(tensor.dtype == torch.bfloat16 for tensor in seen)
    assert plain.keys() == compiled.keys()
    for name, gradient in plain.items():
        assert torch.allclose(gradient, compiled[name], rtol=2e-2, atol=1e-3), name


@pytest.mark.parametrize(
    ("options", "millions"),
    [
        ({}, 27.28),
        ({"variant": "trm", "layers": 2, "h_cycles": 3, "l_cycles": 6, "puzzle_positions": 16}, 6.83),
    ],
)
def test_the_published_sizes(options: dict[str, Any], millions: float) -> None:
    with torch.device("meta"):
        model = HierarchicalReasoningModel(ModelConfig(symbols=11, cells=81, **options))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


def test_a_segment_by_hand() -> None:
    """Two cycles of two fast updates and a slow one; gradients through the last two updates only."""
    torch.manual_seed(0)
    model = HierarchicalReasoningModel(ModelConfig(symbols=5, cells=4, width=8, heads=2, layers=1))
    inputs, puzzle = torch.tensor([[1, 2, 3, 4]]), torch.randn(1, 8)
    z_h, z_l = model.start(1)
    thought = model(z_h, z_l, inputs, puzzle, look_ahead=True)
    x = 8**0.5 * torch.cat((puzzle[:, None], model.embed(inputs)), dim=1)
    turn = (model.cos, model.sin)
    with torch.no_grad():
        for _ in range(2):
            z_l = model.low(z_l, z_h + x, turn)
        z_h = model.high(z_h, z_l, turn)
        z_l = model.low(z_l, z_h + x, turn)
    z_l = model.low(z_l, z_h + x, turn)
    z_h = model.high(z_h, z_l, turn)
    assert torch.allclose(thought.logits, model.head(z_h)[:, 1:], atol=1e-6)
    got = torch.autograd.grad(thought.logits.sum(), model.low.parameters())
    expected = torch.autograd.grad(model.head(z_h)[:, 1:].sum(), model.low.parameters())
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True))
    assert torch.equal(thought.q, torch.full((1, 2), -5.0))
    assert thought.next_q is not None
    assert not thought.z_h.requires_grad


@pytest.mark.parametrize("mixer", ["attention", "mlp"])
def test_trm_learns_from_the_whole_last_cycle(mixer: str) -> None:
    torch.manual_seed(0)
    options = {"variant": "trm", "width": 8, "heads": 2, "layers": 1, "puzzle_positions": 3, "mixer": mixer}
    puzzle = torch.zeros(1, 8, requires_grad=True)
    grads = []
    for cycle in ("one_step", "full"):
        torch.manual_seed(0)
        model = HierarchicalReasoningModel(ModelConfig(symbols=5, cells=4, grad_cycle=cycle, **options))
        thought = model(*model.start(1), torch.tensor([[1, 2, 3, 4]]), puzzle)
        assert thought.q.shape == (1, 1)
        assert thought.logits.shape == (1, 4, 5)
        grads.append(torch.autograd.grad(thought.logits.square().sum(), puzzle)[0])
    assert not torch.allclose(grads[0], grads[1])


def test_a_cut_normal_has_the_deviation_it_says() -> None:
    torch.manual_seed(0)
    drawn = _cut_normal(torch.empty(100_000), 0.3)
    assert drawn.std().item() == pytest.approx(0.3, rel=0.02)


def test_stablemax_is_a_mean_over_the_cells_that_ask() -> None:
    logits = torch.tensor([[[1.0, -3.0], [0.0, 7.0], [2.0, 2.0]]])
    labels = torch.tensor([[1, 1, 0]])  # the last asks for nothing
    shares = [(1 / 4) / (2 + 1 / 4), 8 / (1 + 8)]
    expected = -sum(np.log(shares)) / 2
    assert cell_loss("stablemax", logits, labels).item() == pytest.approx(expected)


def test_stablemax_has_a_gradient_everywhere() -> None:
    """At 1 too, where the branch for negative numbers is infinite: in bf16 some logit is exactly 1 in every batch."""
    logits = torch.tensor([[[1.0, -1.0, 0.0]]], dtype=torch.bfloat16, requires_grad=True)
    cell_loss("stablemax", logits, torch.tensor([[1]])).sum().backward()
    total = 2 + 1 / 2 + 1  # s of the three; their slopes are 1, 1/4 and 1
    expected = [1 / total, 0.25 / total - 0.25 / 0.5, 1 / total]
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == pytest.approx(expected, rel=0.01)


# ---- the carry ------------------------------------------------------------------------------------------


def test_halted_slots_take_the_next_puzzle() -> None:
    batch = {"inputs": torch.tensor([[7], [8]]), "ids": torch.tensor([1, 2]), "least": torch.tensor([1, 1])}
    start = torch.zeros(2, 1, 1), torch.zeros(2, 1, 1)
    old = {
        "inputs": torch.tensor([[5], [6]]), "ids": torch.tensor([3, 4]), "least": torch.tensor([2, 2]),
        "z_h": torch.ones(2, 1, 1), "z_l": torch.ones(2, 1, 1), "steps": torch.tensor([3, 3]),
        "halted": torch.tensor([True, False]),
    }  # fmt: skip
    now = filled(old, batch, lambda: start)
    assert now["inputs"].flatten().tolist() == [7, 6]
    assert now["steps"].tolist() == [0, 3]
    assert now["begin"].tolist() == [True, False]
    assert now["least"].tolist() == [1, 2]


def test_a_slot_that_nobody_held_is_refused() -> None:
    carry = Carry()
    assert carry.take(0, 4) is None
    carry.put(0, {"steps": torch.zeros(4)})
    carry.end_step()
    assert carry.take(0, 4) is not None
    with pytest.raises(UserError, match="tail=drop"):
        carry.take(0, 3)


# ---- data -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "holes"), [(4, 9), (6, 18), (9, 40)])
def test_a_puzzle_has_one_solution_and_symmetries_keep_it(n: int, holes: int) -> None:
    rng = random.Random(n)
    grid, solution = sudoku.puzzle(n, holes, rng)
    assert grid.count(0) == holes
    assert sudoku.Solver(n).solutions(grid) == [solution]
    random.seed(0)
    places, digits = sudoku.shuffled(n)
    moved, answer = (tuple(digits[np.array(cells)[places]].tolist()) for cells in (grid, solution))
    assert sudoku.Solver(n).solutions(moved) == [answer]
    if n == 4:
        assert sudoku.canonical(moved, n) == sudoku.canonical(grid, n)


def test_symmetries_draw_what_python_would() -> None:
    """Old runs can be repeated: `shuffled` has its own way to an order, not its own numbers."""
    for seed in range(50):
        random.seed(seed)
        order = [start + line for start in random.sample(range(0, 9, 3), 3) for line in random.sample(range(3), 3)]
        digits, state = random.sample(range(1, 10), 9), random.getstate()
        random.seed(seed)
        assert sudoku._random_order(9, 3) == order
        assert sudoku._in_random_order(list(range(1, 10))) == digits
        assert random.getstate() == state


def test_a_puzzle_with_two_solutions_is_noticed() -> None:
    grid = sudoku.full_grid(4, random.Random(0))
    assert len(sudoku.Solver(4).solutions((0,) * 12 + grid[12:])) == 2


def test_no_test_puzzle_is_a_training_puzzle_in_disguise() -> None:
    (train, _), (test, _) = split_by_class(4, 9, 60, 30, random.Random(0))
    classes = [{sudoku.canonical(tuple(grid.tolist()), 4) for grid in side} for side in (train, test)]
    assert len(train) == 60
    assert len(test) == 30
    assert not classes[0] & classes[1]


def test_the_shipped_sudokus() -> None:
    train, test = family(Asked("sudoku9", 1000, 2000, seed=0))
    assert (len(train.inputs), len(test.inputs)) == (1000, 2000)
    for inputs, labels in ((train.inputs[0], train.labels[0]), (test.inputs[-1], test.labels[-1])):
        solutions = sudoku.Solver(9).solutions(tuple((inputs - 1).tolist()))
        assert solutions == [tuple((labels - 1).tolist())]
    everything = {tuple(grid.tolist()) for grid in (*train.inputs, *test.inputs)}
    assert len(everything) == 3000
    first, _ = sudoku.puzzle(9, None, random.Random("sudoku9/0"))  # as the recipe itself would make it
    assert first in {tuple((split.inputs[0] - 1).tolist()) for split in (train, test)}


def test_hard_sudokus_take_guesses() -> None:
    train, test = family(Asked("sudoku9", 1, 1, seed=0, least_guesses=1.0))
    for puzzles in (train, test):
        assert sudoku.difficulty(tuple((puzzles.inputs[0] - 1).tolist()), 9, random.Random(0)) > 0


def test_a_maze_has_one_shortest_way() -> None:
    cells, labels = maze.maze(12, 8, random.Random(1))
    way = np.argwhere(labels.reshape(12, 12) == maze.WAY)
    start, goal = (tuple(np.argwhere(cells.reshape(12, 12) == mark)[0]) for mark in (maze.START, maze.GOAL))
    found = maze.shortest_way(cells.reshape(12, 12), start, goal)
    assert found is not None
    assert len(found) > 8
    assert {tuple(cell) for cell in way.tolist()} == {(int(r), int(c)) for r, c in found[1:-1]}
    open_field = np.full((3, 3), maze.FREE)
    assert maze.shortest_way(open_field, (0, 0), (2, 2)) is None  # many ways
    assert maze.shortest_way(np.array([[2, 1, 2]] * 3), (0, 0), (2, 2)) is None  # none


def test_what_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not looked for until the end of time."""
    monkeypatch.setattr(sudoku, "TRIES", 5)
    monkeypatch.setattr(maze, "TRIES", 5)
    with pytest.raises(UserError, match="13 empty cells"):  # 4 clues are the fewest
        sudoku.puzzle(4, 13, random.Random(0))
    with pytest.raises(UserError, match="more than 64 cells"):
        maze.maze(8, 64, random.Random(0))


def test_id_grids_are_told_apart_by_the_id_alone() -> None:
    training, test = family(Asked("idgrid", 50, 40, seed=3, rules=4))
    random.seed(0)
    first = training[0]
    rules = IdRules(4, False, 3)
    assert (rules.apply(first["ids"] - 1, first["inputs"] - 1) + 1 == first["labels"]).all()
    assert {int(i) for i in test.puzzle_identifiers} == {1, 2, 3, 4}
    assert training.ids == 5
    rules = IdRules(16, False, 0)
    best_guess = np.mean([np.bincount(rules.recolour[:, colour]).max() / 16 for colour in range(6)])
    assert best_guess == 3 / 16  # what a model can reach that does not know the id


def test_the_published_layout(tmp_path: Path) -> None:
    build(Build(out=str(tmp_path), puzzle="sudoku4", holes=6, train_size=5, test_size=3, augmentations=2))
    training, test = read_puzzles(tmp_path / "train"), read_puzzles(tmp_path / "test")
    assert (training.symbols, training.cells, training.ids) == (6, 16, 1)
    assert training.group_indices.tolist() == [0, 3, 6, 9, 12, 15]
    assert len(test.inputs) == 3
    data = PuzzleDataset(training, most_steps=4, explore=1.0)
    assert len(data) == 5

    def drawn(seed: int) -> list[int]:
        random.seed(seed)
        sample = data[2]
        assert 2 <= sample["least"] <= 4
        return sample["inputs"].tolist()

    group = [row.tolist() for row in training.inputs[6:9]]
    assert drawn(0) == drawn(0)
    assert all(drawn(seed) in group for seed in range(9))
    assert len({tuple(drawn(seed)) for seed in range(9)}) > 1
    with pytest.raises(UserError, match="FileNotFoundError"):
        read_puzzles(tmp_path / "nothing")
    with pytest.raises(UserError, match="FileNotFoundError"):
        PretrainConfig(data_path=str(tmp_path / "nothing")).settings()


@pytest.mark.parametrize("words", [["puzzle=maze"], ["out=x", "holez=3"], ["out=x", "train_csv=some.csv"]])
def test_a_build_that_cannot_be_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_main(words)
    assert capsys.readouterr().err.startswith("build: ")


def test_sudokus_from_a_csv_file(tmp_path: Path) -> None:
    grid, solution = sudoku.puzzle(9, 40, random.Random(0))
    with (tmp_path / "some.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("source", "question", "answer", "rating"))
        writer.writerow(("me", "".join(map(str, grid)).replace("0", "."), "".join(map(str, solution)), 0))
    puzzles = read_csv(tmp_path / "some.csv", most=5, seed=0)
    assert (puzzles.inputs[0] - 1).tolist() == list(grid)
    assert (puzzles.labels[0] - 1).tolist() == list(solution)


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
        HRM(width=30, heads=4, variant="hmr", test_size=0, layers=0)
    asked = {"task.width=30 with task.heads=4", "task.variant=hmr", "task.test_size=0", "task.layers=0"}
    assert asked == {p.asked for p in error.value.problems}
