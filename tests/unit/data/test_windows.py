import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.windows import micro_slice, next_window, rank_counts, rank_range


@given(st.integers(1, 500), st.integers(1, 64), st.sampled_from(["short", "drop"]))
def test_windows_tile_an_epoch(length, batch, tail):
    if tail == "drop" and batch > length:
        return
    position, seen = 0, []
    while (window := next_window(position, length, batch, tail)).epoch == 0:
        seen += range(window.start, window.stop)
        position = window.stop
    kept = length - length % batch if tail == "drop" else length
    assert seen == list(range(kept))
    assert (window.epoch, window.start) == (1, 0)


@given(st.integers(0, 200), st.integers(1, 16))
def test_every_item_is_assigned_once(count, size):
    parts = [rank_range(count, rank, size) for rank in range(size)]
    assert [i for part in parts for i in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(1, 100), st.integers(1, 30))
def test_micro_batches_tile_a_window(size, micro):
    window = next_window(0, size, size, "short")
    slices = [micro_slice(window, micro, i) for i in range(-(-size // micro))]
    assert [p for start, stop in slices for p in range(start, stop)] == list(range(size))


SPEEDS = st.lists(st.floats(0.01, 100), min_size=1, max_size=8)


@given(st.integers(0, 100), SPEEDS)
def test_every_item_is_assigned_once_by_speed(count, speeds):
    parts = [rank_range(count, rank, len(speeds), speeds) for rank in range(len(speeds))]
    assert [i for part in parts for i in part] == list(range(count))
    assert tuple(map(len, parts)) == rank_counts(count, tuple(speeds))
    if count >= len(speeds):
        assert all(parts), "a rank was left without work"


@given(st.integers(1, 60), SPEEDS)
def test_no_single_item_in_other_hands_would_end_the_step_earlier(count, speeds):
    counts = rank_counts(count, tuple(speeds))
    last = max(n / speed for n, speed in zip(counts, speeds, strict=True))
    for giver, taker in itertools.permutations(range(len(speeds)), 2):
        if counts[giver] > 1 and counts[giver] / speeds[giver] == last:
            assert (counts[taker] + 1) / speeds[taker] >= last


@pytest.mark.parametrize(
    ("count", "speeds", "counts"),
    [
        (9, (2.0, 1.0), (6, 3)),
        (8, (1.0, 1.0), (4, 4)),
        (8, (4.0, 1.0), (7, 1)),  # 6 and 2 would take the second rank 2, this takes the first one 1.75
        (4, (1.0, 100.0), (1, 3)),  # who has nothing to do runs padding, which takes as long
        (2, (1.0, 3.0, 2.0), (0, 1, 1)),
    ],
)
def test_micro_batches_by_speed(count, speeds, counts):
    assert rank_counts(count, speeds) == counts
