"""Which dimensions vary, the same on all ranks, and which batches compiled code takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lockstep.parallel.compiled.batch_sizes import BatchWatch, SizesSeen, fits


def test_dimensions_that_vary_on_any_rank():
    mine = SizesSeen()
    mine.add([(4, 7), (4,)])
    mine.add([(4, 9), (4,)])
    assert mine.varying() == {(0, 1)}

    other = SizesSeen()
    other.add([(3, 7), (3,)])
    mine.merge(other.sizes)
    mine.merge(None)
    assert mine.varying() == {(0, 0), (0, 1), (1, 0)}
    assert not mine.irregular


def test_calls_with_other_tensors_are_irregular():
    seen = SizesSeen()
    seen.add([(4, 7)])
    seen.add([(4, 7), (4,)])
    assert seen.irregular


def test_what_compiled_code_takes():
    compiled, dynamic = [(4, 7), (4,)], frozenset({(0, 1)})
    assert fits([(4, 7), (4,)], compiled, frozenset())
    assert fits([(4, 30), (4,)], compiled, dynamic)
    assert not fits([(4, 30), (4,)], compiled, frozenset())
    assert not fits([(3, 7), (3,)], compiled, dynamic)
    assert not fits([(4, 1), (4,)], compiled, dynamic)  # torch compiles for 0 and 1 separately
    assert not fits([(4, 7)], compiled, dynamic)
    assert not fits([(4, 7, 1), (4,)], compiled, dynamic)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ranks_with_irregular_batches_agree(order: tuple[int, int]) -> None:
    """What a rank decides by does not depend on what it has seen first."""
    seen = [SizesSeen(), SizesSeen()]
    seen[order[0]].add([(4, 6)])
    seen[order[0]].add([(4, 8)])
    seen[order[1]].add([(4, 6), (4,)])
    gathered = [[each.sizes, each.irregular] for each in seen]

    agreed = []
    for sizes in seen:
        watch = BatchWatch()
        watch.sizes = sizes
        watch.agree(SimpleNamespace(gather_json=lambda mine: gathered))  # type: ignore[arg-type]
        agreed.append((watch.sizes.sizes, watch.sizes.irregular, watch.varying))

    assert agreed[0] == agreed[1]
    assert agreed[0][1:] == (True, frozenset())
