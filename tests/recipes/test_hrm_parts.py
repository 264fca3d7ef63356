"""The parts of the hrm recipe against plain formulas: the model, its losses, the carry, and the puzzles."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.recipes.hrm import puzzles, sudoku
from lockstep.recipes.hrm.build import Build, build, read_csv
from lockstep.recipes.hrm.build import main as build_main
from lockstep.recipes.hrm.carry import Carry, refill
from lockstep.recipes.hrm.data import PuzzleGroups, read_puzzles
from lockstep.recipes.hrm.losses import cell_loss
from lockstep.recipes.hrm.model import HierarchicalReasoningModel, ModelConfig, _truncated_normal
from lockstep.recipes.hrm.puzzles import IdGrids, PuzzleOptions, make_splits
from pretrain import PretrainConfig

# ---- the model ------------------------------------------------------------------------------------------


def test_a_compiled_segment_converts_its_weights_once() -> None:
    config = ModelConfig(symbols=5, cells=4, width=16, heads=2, layers=1, h_cycles=2, l_cycles=1, positions="learned")
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


def test_a_truncated_normal_has_the_standard_deviation_it_states() -> None:
    torch.manual_seed(0)
    drawn = _truncated_normal(torch.empty(100_000), 0.3)
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
    now = refill(old, batch, lambda: start)
    assert now["inputs"].flatten().tolist() == [7, 6]
    assert now["steps"].tolist() == [0, 3]
    assert now["begin"].tolist() == [True, False]
    assert now["least"].tolist() == [1, 2]


def test_slots_that_were_not_held_before_are_refused() -> None:
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
    places, digits = sudoku.random_symmetry(n)
    moved, answer = (tuple(digits[np.array(cells)[places]].tolist()) for cells in (grid, solution))
    assert sudoku.Solver(n).solutions(moved) == [answer]
    if n == 4:
        assert sudoku.canonical(moved, n) == sudoku.canonical(grid, n)


def test_symmetries_draw_what_python_would() -> None:
    """Old runs can be repeated: `random_symmetry` draws orders in its own way, with the same result."""
    for seed in range(50):
        random.seed(seed)
        order = [start + line for start in random.sample(range(0, 9, 3), 3) for line in random.sample(range(3), 3)]
        digits, state = random.sample(range(1, 10), 9), random.getstate()
        random.seed(seed)
        assert sudoku._random_lines(9, 3) == order
        assert sudoku._random_order(list(range(1, 10))) == digits
        assert random.getstate() == state


def test_a_puzzle_with_two_solutions_is_noticed() -> None:
    grid = sudoku.full_grid(4, random.Random(0))
    assert len(sudoku.Solver(4).solutions((0,) * 12 + grid[12:])) == 2


def test_no_test_puzzle_is_a_symmetric_training_puzzle() -> None:
    (train, _), (test, _) = sudoku.split_by_class(4, 9, 60, 30, random.Random(0))
    classes = [{sudoku.canonical(tuple(grid.tolist()), 4) for grid in side} for side in (train, test)]
    assert len(train) == 60
    assert len(test) == 30
    assert not classes[0] & classes[1]
    with pytest.raises(
        UserError, match=r"task.least_guesses=9\n.*the hardest took 0 guesses\n.*leave task.least_guesses"
    ):
        sudoku.split_by_class(4, 6, 1, 1, random.Random(0), least_guesses=9.0)


def test_the_shipped_sudokus() -> None:
    train, test = make_splits(PuzzleOptions(puzzle="sudoku9", train_size=1000, test_size=2000))
    assert (len(train.inputs), len(test.inputs)) == (1000, 2000)
    for inputs, labels in ((train.inputs[0], train.labels[0]), (test.inputs[-1], test.labels[-1])):
        solutions = sudoku.Solver(9).solutions(tuple((inputs - 1).tolist()))
        assert solutions == [tuple((labels - 1).tolist())]
    everything = {tuple(grid.tolist()) for grid in (*train.inputs, *test.inputs)}
    assert len(everything) == 3000
    first, _ = sudoku.puzzle(9, None, random.Random("sudoku9/0"))  # as the recipe itself would make it
    assert first in {tuple((split.inputs[0] - 1).tolist()) for split in (train, test)}


def test_hard_sudokus_take_guesses() -> None:
    train, test = make_splits(PuzzleOptions(puzzle="sudoku9", train_size=1, test_size=1, least_guesses=1.0))
    for split in (train, test):
        assert sudoku.difficulty(tuple((split.inputs[0] - 1).tolist()), 9, random.Random(0)) > 0


def test_a_maze_has_one_shortest_way() -> None:
    cells, labels = puzzles.make_maze(12, 8, random.Random(1))
    way = np.argwhere(labels.reshape(12, 12) == puzzles.WAY)
    start, goal = (tuple(np.argwhere(cells.reshape(12, 12) == mark)[0]) for mark in (puzzles.START, puzzles.GOAL))
    found = puzzles.shortest_way(cells.reshape(12, 12), start, goal)
    assert found is not None
    assert len(found) > 8
    assert {tuple(cell) for cell in way.tolist()} == {(int(r), int(c)) for r, c in found[1:-1]}
    open_field = np.full((3, 3), puzzles.FREE)
    assert puzzles.shortest_way(open_field, (0, 0), (2, 2)) is None  # many ways
    assert puzzles.shortest_way(np.array([[2, 1, 2]] * 3), (0, 0), (2, 2)) is None  # none


def test_what_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search ends after a number of tries."""
    monkeypatch.setattr(sudoku, "TRIES", 5)
    monkeypatch.setattr(puzzles, "MAZE_TRIES", 5)
    with pytest.raises(UserError, match="13 empty cells"):  # 4 clues are the fewest
        sudoku.puzzle(4, 13, random.Random(0))
    with pytest.raises(UserError, match="more than 64 cells"):
        puzzles.make_maze(8, 64, random.Random(0))


def test_only_the_id_says_which_rule_an_id_grid_has() -> None:
    training, test = make_splits(PuzzleOptions(puzzle="idgrid", train_size=50, test_size=40, data_seed=3, rules=4))
    random.seed(0)
    cells, labels, puzzle_id = training.draw(0)
    rules = IdGrids(4, False, 3)
    assert (rules.apply(puzzle_id - 1, cells - 1) + 1 == labels).all()
    assert {int(i) for i in test.puzzle_identifiers} == {1, 2, 3, 4}
    assert training.ids == 5
    rules = IdGrids(16, False, 0)
    best_guess = np.mean([np.bincount(rules.recolour[:, colour]).max() / 16 for colour in range(6)])
    assert best_guess == 3 / 16  # what a model can reach that does not know the id


def test_the_published_layout(tmp_path: Path) -> None:
    build(Build(out=str(tmp_path), puzzle="sudoku4", holes=6, train_size=5, test_size=3, augmentations=2))
    training, test = read_puzzles(tmp_path / "train"), read_puzzles(tmp_path / "test")
    assert (training.symbols, training.cells, training.ids) == (6, 16, 1)
    assert training.group_indices.tolist() == [0, 3, 6, 9, 12, 15]
    assert len(test.inputs) == 3
    data = PuzzleGroups(training, most_steps=4, explore=1.0)
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
    read = read_csv(tmp_path / "some.csv", most=5, seed=0)
    assert (read.inputs[0] - 1).tolist() == list(grid)
    assert (read.labels[0] - 1).tolist() == list(solution)
