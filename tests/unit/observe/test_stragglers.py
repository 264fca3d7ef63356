"""A slow rank is named when the others wait for it, and only then."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.observe.stragglers import LASTING, LateDataWatch, SlowRankWatch, pack, slowest, unpack
from lockstep.runtime.heartbeat import Heartbeat


def row(data, compute, all_reduce, micro_batches=1):
    return {"data": data, "compute": compute, "all-reduce": all_reduce, "micro_batches": micro_batches}


def job(works, all_reduce=0.05, micro_batches=None):
    """Rows of ranks that leave every step together: who works longer, waits less."""
    longest = max(data + compute for data, compute in works)
    assigned = micro_batches or [1] * len(works)
    return [row(d, c, longest - d - c + all_reduce, many) for (d, c), many in zip(works, assigned, strict=True)]


def test_a_rank_that_waits_for_its_data():
    slow = slowest(job([(0.01, 0.2), (0.01, 0.2), (0.31, 0.2), (0.01, 0.2)]))
    assert (slow.rank, slow.work) == (2, "data")
    assert (slow.seconds, slow.others) == (0.31, 0.01)
    assert slow.share == pytest.approx(0.3 / 0.56)
    assert "rank 2 is slow: it waits for data 0.31 s a step, the others 0.01 s" in str(slow)
    assert "54%" in str(slow)


def test_a_rank_that_computes_slowly():
    slow = slowest(job([(0.01, 0.4), (0.02, 0.2)]))
    assert (slow.rank, slow.work) == (0, "compute")


def test_equal_ranks_and_slow_communication_name_no_rank():
    assert slowest(job([(0.01, 0.2)] * 4)) is None
    assert slowest(job([(0.01, 0.2)] * 4, all_reduce=5.0)) is None


def test_less_than_the_threshold_is_no_news():
    works = [(0.0, 0.1), (0.0, 0.125)]
    assert slowest(job(works, all_reduce=0.0)) is None
    assert slowest(job(works, all_reduce=0.0), threshold=1.2).rank == 1


def test_a_slow_part_of_a_long_step_is_no_news():
    assert slowest(job([(0.0, 0.001), (0.0, 0.01)], all_reduce=1.0)) is None


def test_no_rank_is_slow_if_none_waits():
    """More work on one rank that costs the others nothing: a loader that works ahead, say."""
    for waited in (0.0, 0.08):
        assert slowest([row(0.0, 0.1, 0.3), row(0.2, 0.1, 0.3 - waited)]) is None


def test_more_micro_batches_do_not_make_a_rank_slow():
    works = [(0.01, 0.4), (0.005, 0.2), (0.005, 0.2)]
    assert slowest(job(works)).rank == 0
    assert slowest(job(works, micro_batches=[2, 1, 1])) is None


def test_a_slow_rank_with_fewer_micro_batches_is_found():
    slow = slowest(job([(0.0, 0.4), (0.0, 0.2), (0.0, 0.2)], micro_batches=[1, 2, 2]))
    assert (slow.rank, slow.seconds, slow.others) == (0, 0.4, 0.1)
    assert slowest(job([(0.0, 0.2)] * 3, micro_batches=[1, 2, 2])) is None  # assigned by speed: no rank waits


def test_one_rank_alone_is_never_slow():
    assert slowest(job([(9.0, 9.0)])) is None
    assert slowest([]) is None


@given(
    st.integers(2, 9).flatmap(
        lambda size: st.tuples(
            st.integers(0, size - 1),
            st.lists(st.floats(0.1, 0.12), min_size=size, max_size=size),
            st.floats(0.1, 2.0),
        )
    )
)
def test_the_slow_rank_is_found(case):
    rank, works, extra = case
    rows = job([(0.0, work + (extra if other == rank else 0.0)) for other, work in enumerate(works)])
    assert slowest(rows).rank == rank


def test_figures_travel_as_plain_numbers():
    heartbeat = Heartbeat()
    before = dict(heartbeat.spent)
    heartbeat.spent |= {"data": 1.0, "compute": 2.0, "update": 0.5, "all-reduce": 3.0, "collective": 0.5}
    heartbeat.spent["evaluate"] = 99.0
    packed = pack(before, heartbeat.spent, 10, 40)
    assert packed == pytest.approx([0.1, 0.25, 0.35, 4.0])
    assert unpack([*packed, 1.0, 2.0, 3.0, 4.0])[1] == row(1.0, 2.0, 3.0, 4.0)
    assert pack(before, heartbeat.spent, 0, 0) == pytest.approx([1.0, 2.5, 3.5, 0.0])


WELL = job([(0.01, 0.2)] * 3)
FIRST = job([(0.01, 0.4), (0.01, 0.2), (0.01, 0.2)])
SECOND = job([(0.01, 0.2), (0.01, 0.4), (0.01, 0.2)])
LATE = job([(0.21, 0.2), (0.01, 0.2), (0.01, 0.2)])  # the first rank, for another reason


def said(intervals, seconds):
    """The ranks that a watch names, with the number of the interval. `seconds`: from one to the next."""
    now = iter(range(0, 10**6, seconds))
    watch = SlowRankWatch(clock=lambda: next(now))
    found = [watch.look(rows) for rows in intervals]
    return [(place, slow.rank) for place, slow in enumerate(found) if slow]


def test_a_rank_is_named_when_it_has_been_slow_for_a_while():
    assert said([FIRST] * LASTING, seconds=10) == [(LASTING - 1, 0)]
    assert said([FIRST] * (LASTING - 1), seconds=10) == []
    assert said([WELL, *[FIRST] * LASTING], seconds=10) == [(LASTING, 0)]
    assert said([FIRST, LATE] * LASTING, seconds=10) == [(LASTING - 1, 0)]


def test_many_short_intervals_are_not_a_while():
    assert said([FIRST] * 11, seconds=1) == [(10, 0)]
    assert said([FIRST] * 10, seconds=1) == []


def test_ranks_that_are_slow_in_turns_are_no_news():
    busy = [*[FIRST] * (LASTING - 1), WELL, *[SECOND] * (LASTING - 1)]
    assert said(busy * 5, seconds=10) == []


def test_nothing_is_said_twice_within_minutes():
    """Nor of another rank: where several are slow by turns for long, one line tells enough."""
    assert said([*[FIRST] * 8, *[SECOND] * 8], seconds=10) == [(4, 0)]
    assert said([*[FIRST] * 8, *[SECOND] * 40], seconds=10) == [(4, 0), (34, 1)]
    assert said([FIRST] * 70, seconds=10) == [(4, 0)]  # who stays slow has been named


def test_gpus_that_wait_for_data_are_reported_once():
    def said(*intervals):
        watch = LateDataWatch()
        return [bool(watch.look(rows)) for rows in intervals]

    late, fine = [row(0.005, 0.003, 0.001)] * 2, [row(0.001, 0.008, 0.001)] * 2
    assert said(late, late, late, fine, late, late) == [False, True, False, False, False, False]
    assert said(late, fine, late, fine) == [False] * 4
    assert said(*[[late[0], fine[0]]] * 3) == [False] * 3  # one of them: a slow rank
    watch = LateDataWatch()
    watch.look(late)
    assert "5 ms of every step, 56% of it" in watch.look(late)
