import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.samplers import BLOCK, make_sampler


@given(length=st.integers(1, 3 * BLOCK), seed=st.integers(0, 2**62), epoch=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_every_epoch_visits_every_sample_once(length, seed, epoch):
    ids = make_sampler(length, seed).ids(epoch, 0, length)
    assert np.array_equal(np.sort(ids), np.arange(length))


def test_epochs_and_seeds_give_different_orders():
    order = make_sampler(1000, seed=1)
    first, second = order.ids(0, 0, 1000), order.ids(1, 0, 1000)
    other = make_sampler(1000, seed=2).ids(0, 0, 1000)
    # Two random permutations of 1000 agree in about one place.
    assert (first == second).sum() < 10
    assert (first == other).sum() < 10
    assert (first == np.arange(1000)).sum() < 10


@given(start=st.integers(0, 2 * BLOCK), size=st.integers(0, BLOCK + 7))
@settings(max_examples=40, deadline=None)
def test_any_part_can_be_asked_for_alone(start, size):
    length = 4 * BLOCK - 5
    stop = min(start + size, length)
    whole = make_sampler(length, 3).ids(7, 0, length)
    assert np.array_equal(make_sampler(length, 3).ids(7, start, stop), whole[start:stop])


def test_a_trillion_samples_cost_no_memory():
    order = make_sampler(10**12, seed=0)
    ids = order.ids(5, 10**12 - 100, 10**12)
    assert len(set(ids.tolist())) == 100
    assert all(0 <= i < 10**12 for i in ids)


def test_the_order_is_spread_evenly():
    """The first tenth of an epoch holds about a tenth of every part of the dataset."""
    length = 100_000
    ids = make_sampler(length, 11).ids(0, 0, length // 10)
    counts, _ = np.histogram(ids, bins=10, range=(0, length))
    assert counts.min() > 880
    assert counts.max() < 1120  # 1000 +- 4 standard deviations


def test_neighbours_do_not_stay_neighbours():
    ids = make_sampler(10_000, 5).ids(0, 0, 10_000)
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.05


@pytest.mark.parametrize("epoch", [0, 3])
def test_without_shuffling_the_order_is_the_datasets_own(epoch):
    assert make_sampler(10, 0, shuffle=False).ids(epoch, 2, 6).tolist() == [2, 3, 4, 5]


def test_the_order_never_changes_between_versions():
    """A saved position means nothing if this changes: bump the checkpoint format when it must."""
    assert make_sampler(10, 0).ids(0, 0, 10).tolist() == FROZEN


FROZEN = [6, 3, 0, 1, 8, 7, 2, 4, 5, 9]
