"""What the first steps show is the same on all ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lockstep.parallel.compiled.shapes import SizesSeen
from lockstep.parallel.compiled.watch import BatchWatch, StepTimer


class OneRank:
    """Stands in for a runtime."""

    device = SimpleNamespace(type="cpu")
    collectives = SimpleNamespace(gather_json=lambda mine: [mine])


def test_the_step_in_which_a_timer_is_made_does_not_count() -> None:
    timer = StepTimer(warm_up=1, timed=2)
    assert timer.end_step(OneRank()) is None  # type: ignore[arg-type]
    found = []
    for _ in range(3):
        timer.begin_step()
        found.append(timer.end_step(OneRank()))  # type: ignore[arg-type]
    assert found[:2] == [None, None]
    assert found[2] > 0


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
