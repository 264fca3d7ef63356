"""The tree of exact mode: one order of additions, on any number of ranks."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.checkpoint.state.tensor_names import storage_key
from lockstep.config import resolve
from lockstep.data.windows import rank_range
from lockstep.errors import UserError
from lockstep.observe import metrics
from lockstep.parallel.exact.grid import WEIGHT_GRID, check_representable, on_grid
from lockstep.parallel.exact.norms import _sum_by_halves, norm_of_rows, row_norms
from lockstep.parallel.exact.tree import Subtree, TreeSum, subtrees_of
from lockstep.plan.plan import make_plan


def written_out(total: int) -> str:
    """The tree as a text, by pushing every leaf."""
    tree: TreeSum[str] = TreeSum(lambda left, right: f"({left}+{right})")
    for index in range(total):
        tree.push(Subtree(index, 0), str(index))
    return tree.finish()


def test_weights_that_their_grid_would_change_are_refused() -> None:
    for weight in (0.0, 1.0, 1 / 3, 1e-3, 12345.678, 7e9):
        check_representable(weight)
    for weight in (1e-12, 1e-10, 2.5e-5 / 3):
        with pytest.raises(UserError, match="the same large number"):
            check_representable(weight)


def test_the_figure_of_the_module() -> None:
    assert written_out(6) == "(((0+1)+(2+3))+(4+5))"
    assert written_out(7) == "(((0+1)+(2+3))+((4+5)+6))"
    assert written_out(1) == "0"


@given(total=st.integers(1, 70), data=st.data())
def test_any_cut_gives_the_same_tree(total: int, data: st.DataObject) -> None:
    """Ranges of any size, also empty ones: each adds what it can, and the roots of all are pushed in order."""
    ranks = data.draw(st.integers(1, total + 2))
    cuts = sorted(data.draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
    everybody: TreeSum[str] = TreeSum(lambda left, right: f"({left}+{right})")
    for first, stop in zip([0, *cuts], [*cuts, total], strict=True):
        rank: TreeSum[str] = TreeSum(lambda left, right: f"({left}+{right})")
        for index in range(first, stop):
            rank.push(Subtree(index, 0), str(index))
        assert [span for span, _ in rank.partial_sums] == subtrees_of(first, stop)
        for span, value in rank.partial_sums:
            everybody.push(span, value)
    assert everybody.finish() == written_out(total)


@given(ranks=st.integers(0, 4), each=st.integers(0, 5))
def test_one_root_on_every_rank_and_log2_copies(ranks: int, each: int) -> None:
    """Powers of two: nothing more travels than without the tree, and log2(V/N) sums wait at most."""
    total, world = 2 ** (ranks + each), 2**ranks
    for rank in range(world):
        part = rank_range(total, rank, world)
        assert len(subtrees_of(part.start, part.stop)) == 1
        tree: TreeSum[int] = TreeSum(lambda left, right: 0)
        most = 0
        for index in part[:-1]:  # the last one is still in its bucket when it is added
            tree.push(Subtree(index, 0), 0)
            most = max(most, len(tree.partial_sums))
        assert most == each


def test_a_part_alone_has_no_sum() -> None:
    tree: TreeSum[int] = TreeSum(lambda left, right: left + right)
    tree.push(Subtree(1, 0), 1)
    with pytest.raises(AssertionError, match="begins with micro-batch 0"):
        tree.finish()


@given(st.lists(st.floats(width=64, allow_subnormal=True), max_size=30), st.randoms(use_true_random=False))
def test_sums_without_rounding(values: list[float], shuffler: random.Random) -> None:
    def total(numbers: list[float]) -> str:
        found: metrics.Exact = 0
        for number in numbers:
            found = metrics.add_exact(found, metrics.exact_from_text(metrics.exact_to_text(metrics.to_exact(number))))
        return metrics.exact_to_text(found)

    mixed = list(values)
    shuffler.shuffle(mixed)
    assert total(mixed) == total(values)
    if all(math.isfinite(value) for value in values):
        try:
            expected = math.fsum(values)
        except OverflowError:  # a sum on the way; ours has none
            return
        assert metrics.from_exact(metrics.exact_from_text(total(values))) == expected


@given(st.lists(st.floats(0, 1000), max_size=20), st.randoms(use_true_random=False))
def test_weights_on_a_grid_add_up_in_any_order(weights: list[float], shuffler: random.Random) -> None:
    snapped = [on_grid(weight, WEIGHT_GRID) for weight in weights]
    mixed = list(snapped)
    shuffler.shuffle(mixed)
    assert sum(mixed) == sum(snapped)
    assert all(abs(a - b) <= 2**-33 for a, b in zip(weights, snapped, strict=True))


@given(rows=st.integers(1, 40), columns=st.integers(1, 300), data=st.data())
def test_lengths_of_rows_do_not_know_their_neighbours(rows: int, columns: int, data: st.DataObject) -> None:
    tensor = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 1000 + columns))
    cut = data.draw(st.integers(0, rows))
    parts = torch.cat([row_norms(tensor[:cut].clone()), row_norms(tensor[cut:].clone())])
    assert torch.equal(parts, row_norms(tensor))
    assert float(norm_of_rows(parts)) == pytest.approx(float(tensor.norm()), rel=1e-5)
    squares = tensor.double().square()
    torch.testing.assert_close(_sum_by_halves(squares), squares.sum(1))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("fused", [False, True])
def test_which_optimizers_treat_every_element_alike(kind: str, fused: bool) -> None:
    """Whole or in parts: the loops of torch give the same bits, its fused kernels for CPUs do not, so `exact` leaves
    those out. Should the latter change, they may be used again."""

    def stepped(cuts: list[int]) -> torch.Tensor:
        parts = [torch.nn.Parameter(part.clone()) for part in weights.tensor_split(cuts)]
        if kind == "adamw":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(parts, lr=0.01, fused=fused)
        else:
            optimizer = torch.optim.SGD(parts, lr=0.01, momentum=0.9, weight_decay=0.01, fused=fused)
        for step in range(3):
            for part, grad in zip(parts, grads[step].tensor_split(cuts), strict=True):
                part.grad = grad.clone()
            optimizer.step()
        kept = [value for p in parts for value in optimizer.state[p].values() if value.numel() == p.numel() > 1]
        return torch.cat([*(p.detach() for p in parts), *kept])

    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1021, generator=generator)
    grads = torch.randn(3, 1021, generator=generator)
    same = all(
        torch.equal(stepped([]).sort().values, stepped(cuts).sort().values)
        for cuts in ([3], [333, 667], [17, 200, 901])
    )
    assert same is not fused


def test_the_micro_batch_does_not_look_at_the_ranks() -> None:
    plans = [make_plan(_config(global_batch=20), world, samples=100) for world in (1, 2, 5, 7)]
    assert {plan.micro_batch for plan in plans} == {3}
    assert "whatever the number of ranks" in plans[0].reasons["micro_batch"]
    with pytest.raises(UserError, match="7 micro-batches of 3") as caught:
        make_plan(_config(global_batch=20), 8, samples=100)
    assert "micro_batch=2" in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"strategy": "hsdp"},
        {"strategy": "tp"},
        {"strategy": "pp"},
        {"mesh.tp": 2},
        {"micro_batch": "auto"},
        {"ddp.hook": "bf16"},
        {"ddp.broadcast_buffers": True},
        {"data.seed_samples": False},
        {"data.sharding": "own"},
        {"compile": True},
        {"load_balance": "auto"},
        {"precision": "bf16-master"},
        {"precision": "fp8"},
    ],
    ids=str,
)
def test_what_exact_refuses(values: dict[str, object]) -> None:
    with pytest.raises(UserError, match="exact = true"):
        _config(**values)


def test_a_local_batch_is_refused() -> None:
    with pytest.raises(UserError, match="local_batch = 4"):
        resolve([("test", {"steps": 1, "local_batch": 4, "exact": True})])


def test_parts_without_rows_are_told_apart() -> None:
    """Ranks with nothing of two parameters must not take them for one: they would gather fewer than the others."""
    one, other = torch.empty(0, 3), torch.empty(0, 3)
    assert len({storage_key(tensor.detach()) for tensor in (one, other) for _ in range(10)}) == 2
    assert storage_key(one.detach()) == storage_key(one.view(0, 3))


def _config(**values: object):
    return resolve([("test", {"steps": 1, "global_batch": 8, "exact": True} | values)]).config
