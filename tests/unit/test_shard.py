from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.shard import deal, micro_slice, next_window


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
def test_every_item_is_dealt_once(count, size):
    parts = [deal(count, rank, size) for rank in range(size)]
    assert [i for part in parts for i in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(1, 100), st.integers(1, 30))
def test_micro_batches_tile_a_window(size, micro):
    window = next_window(0, size, size, "short")
    slices = [micro_slice(window, micro, i) for i in range(-(-size // micro))]
    assert [p for start, stop in slices for p in range(start, stop)] == list(range(size))
