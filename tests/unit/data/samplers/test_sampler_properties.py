"""What holds for every sampler: any part of an epoch can be asked for alone, and nothing depends on the past."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.samplers import BucketedSampler, CurriculumSampler, Mixture, Sampled, Sampler, WeightedSampler
from lockstep.errors import UserError

SIZE = 300
NUMBERS = np.random.default_rng(0).integers(3, 65, SIZE)


def mixture(seed):
    parts = [(range(120), 3), (Sampled(range(100), WeightedSampler(NUMBERS[:100], length=40)), 1), (range(80), 0.7)]
    return Mixture(parts, length=SIZE, seed=seed).sampler


SAMPLERS = {
    "with replacement": lambda seed: WeightedSampler(NUMBERS, seed=seed),
    "without replacement": lambda seed: WeightedSampler(NUMBERS, replacement=False, seed=seed),
    "bucketed": lambda seed: BucketedSampler(NUMBERS, batch=8, pool=5, seed=seed),
    "curriculum": lambda seed: CurriculumSampler(NUMBERS, ramp=1.5, seed=seed),
    "mixture": mixture,
}
ONCE = ("without replacement", "bucketed")


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_one_and_can_be_pickled(name):
    sampler = SAMPLERS[name](seed=1)
    assert isinstance(sampler, Sampler)
    assert len(sampler) == SIZE
    copied = pickle.loads(pickle.dumps(sampler))
    assert np.array_equal(copied.ids(3, 10, 50), sampler.ids(3, 10, 50))


@pytest.mark.parametrize("name", SAMPLERS)
@given(epoch=st.integers(0, 50), ends=st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), seed=st.integers(0, 2**62))
@settings(max_examples=12, deadline=None)
def test_any_part_can_be_asked_for_alone(name, epoch, ends, seed):
    start, stop = sorted(ends)
    whole = SAMPLERS[name](seed).ids(epoch, 0, SIZE)
    assert whole.dtype == np.int64
    assert whole.min() >= 0
    assert whole.max() < SIZE
    fresh = SAMPLERS[name](seed)
    assert np.array_equal(fresh.ids(epoch, start, stop), whole[start:stop])

    # What it is asked before, and what is done with the answer, changes nothing.
    fresh.ids(epoch + 1, 0, SIZE)[:] = 0
    fresh.ids(epoch, 0, SIZE)[:] = 0
    assert np.array_equal(fresh.ids(epoch, start, stop), whole[start:stop])


@pytest.mark.parametrize("name", ONCE)
@pytest.mark.parametrize("epoch", [0, 7])
def test_every_sample_once_per_epoch(name, epoch):
    sampler = SAMPLERS[name](seed=2)
    assert sorted(sampler.ids(epoch, 0, SIZE)) == list(range(SIZE))
    assert (sampler.ids(epoch, 0, SIZE) == sampler.ids(epoch + 1, 0, SIZE)).sum() < 30


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_runs_seed_is_used_unless_there_is_an_own_one(name):
    unseeded = SAMPLERS[name](None)
    with pytest.raises(UserError, match="has no seed"):
        unseeded.ids(0, 0, 1)

    run_seeded = unseeded.with_seed(5)
    assert np.array_equal(run_seeded.ids(0, 0, SIZE), SAMPLERS[name](5).ids(0, 0, SIZE))
    assert np.array_equal(SAMPLERS[name](6).with_seed(5).ids(0, 0, 50), SAMPLERS[name](6).ids(0, 0, 50))
    assert not np.array_equal(SAMPLERS[name](6).ids(0, 0, 50), SAMPLERS[name](5).ids(0, 0, 50))


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_order_never_changes_between_versions(name):
    """A saved position means nothing if this changes."""
    assert SAMPLERS[name](0).ids(1, 100, 106).tolist() == FROZEN[name]


FROZEN = {
    "with replacement": [297, 184, 66, 189, 240, 174],
    "without replacement": [157, 9, 258, 299, 53, 277],
    "bucketed": [211, 18, 47, 182, 74, 171],
    "curriculum": [287, 235, 229, 127, 79, 165],
    "mixture": [90, 9, 197, 104, 92, 255],
}
