"""Which dimensions vary, the same on all ranks, and which batches compiled code takes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from lockstep.parallel.compiled.batch_sizes import SeenShapes, Shape, fits


def agreed(*ranks: list[list[Shape]]) -> list[SeenShapes]:
    """Return what each rank knows, once all have agreed. `ranks`: the calls that each of them has seen."""
    ranks_shapes = [SeenShapes() for _ in ranks]
    gathered: list[list[list[Shape]]] = []
    for seen, calls in zip(ranks_shapes, ranks, strict=True):
        for shapes in calls:
            seen.note(shapes)
        seen.agree(SimpleNamespace(all_gather_json=lambda mine: gathered.append(mine) or [mine]))  # type: ignore[arg-type]

    for seen in ranks_shapes:
        seen.agree(SimpleNamespace(all_gather_json=lambda mine: json.loads(json.dumps(gathered))))  # type: ignore[arg-type]

    return ranks_shapes


def test_dimensions_that_vary_on_any_rank():
    mine, other, idle = agreed([[(4, 7), (4,)], [(4, 9), (4,)]], [[(3, 7), (3,)]], [])
    assert mine.varying == other.varying == idle.varying == {(0, 0), (0, 1), (1, 0)}
    assert mine.describe() == [[-1, -1], [-1]]
    assert mine.smallest() == [(3, 7), (3,)]
    assert not mine.irregular


def test_a_dimension_of_one_size_is_not_dynamic():
    (seen,) = agreed([[(4, 7), (4,)], [(4, 9), (4,)]])
    assert seen.varying == {(0, 1)}
    assert seen.describe() == [[4, -1], [4]]


def test_what_compiled_code_takes():
    compiled, dynamic = [(4, 7), (4,)], frozenset({(0, 1)})
    assert fits([(4, 7), (4,)], compiled, frozenset())
    assert fits([(4, 30), (4,)], compiled, dynamic)
    assert not fits([(4, 30), (4,)], compiled, frozenset())
    assert not fits([(3, 7), (3,)], compiled, dynamic)
    assert not fits([(4, 1), (4,)], compiled, dynamic)  # torch compiles for 0 and 1 separately
    assert not fits([(4, 7)], compiled, dynamic)
    assert not fits([(4, 7, 1), (4,)], compiled, dynamic)


@pytest.mark.parametrize("order", [1, -1])
def test_ranks_with_irregular_batches_agree(order: int) -> None:
    """What a rank decides by does not depend on what it has seen first."""
    first, second = agreed(*[[[(4, 6)], [(4, 8)]], [[(4, 6), (4,)]]][::order])
    assert first.irregular
    assert second.irregular
    assert first.varying == second.varying == frozenset()
    assert first.sizes() == second.sizes()
