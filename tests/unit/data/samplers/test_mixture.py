from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.samplers import BucketedSampler, Mixture, Sampled, SequentialSampler
from lockstep.data.worker_copies import WorkerCopies
from lockstep.errors import UserError


def parts_of(mixture, epoch, start, stop):
    """Which dataset each offset draws from; items are (dataset, index)."""
    return [mixture[int(i)][0] for i in mixture.sampler.ids(epoch, start, stop)]


def datasets(*sizes):
    return [[(name, index) for index in range(size)] for name, size in zip("abcdefg", sizes, strict=False)]


@given(
    weights=st.lists(st.integers(1, 50) | st.sampled_from([0.1, 0.25, 0.7, 1 / 3]), min_size=1, max_size=6),
    ends=st.tuples(st.integers(0, 3000), st.integers(0, 3000)),
)
@settings(max_examples=25, deadline=None)
def test_proportions_hold_over_any_run_of_offsets(weights, ends):
    start, stop = sorted(ends)
    mixture = Mixture(list(zip(datasets(*[40] * len(weights)), weights, strict=True)), length=3000, seed=0)
    counts = Counter(parts_of(mixture, 2, start, stop))
    for name, weight in zip("abcdefg", weights, strict=False):
        share = (stop - start) * weight / sum(weights)
        assert abs(counts[name] - share) < max(len(weights), 2)


def test_weights_that_have_no_small_common_denominator():
    mixture = Mixture([(range(90_000), np.pi), (range(90_000), 1)], length=100_000, seed=0)
    of_first = np.sum(mixture.sampler.ids(0, 0, 100_000) < 90_000)
    assert abs(of_first - 100_000 * np.pi / (np.pi + 1)) < 2


def test_a_part_uses_all_its_samples_before_any_again():
    """Over epochs of the mixture: 8 offsets, 6 of `a` (5 samples) and 2 of `b` (7 samples)."""
    mixture = Mixture(list(zip(datasets(5, 7), [3, 1], strict=True)), length=8, seed=0)
    drawn = [mixture[int(i)] for epoch in range(35) for i in mixture.sampler.ids(epoch, 0, 8)]
    for name, size in (("a", 5), ("b", 7)):
        of_part = [index for part, index in drawn if part == name]
        assert len(of_part) == 280 * (3 if name == "a" else 1) // 4
        for start in range(0, len(of_part), size):
            assert sorted(of_part[start : start + size]) == list(range(size))
        assert of_part[:size] != of_part[size : 2 * size], "its second epoch has the same order"


def test_parts_with_samplers_of_their_own():
    first, second = datasets(4, 6)
    mixture = Mixture([(Sampled(first, SequentialSampler(4)), 1), (second, 1)], seed=0)
    assert len(mixture) == 10
    drawn = [mixture[int(i)] for i in mixture.sampler.ids(0, 0, 10)]
    assert [index for part, index in drawn if part == "a"] == [0, 1, 2, 3, 0]


def test_a_mixture_of_mixtures():
    first, second, third = datasets(4, 6, 8)
    mixture = Mixture([(Mixture([(first, 1), (second, 1)]), 1), (third, 2)], length=400, seed=0)
    assert Counter(parts_of(mixture, 0, 0, 300)) == {"a": 50, "b": 50, "c": 200}


def test_equal_datasets_are_shuffled_differently():
    mixture = Mixture([(datasets(50)[0], 1), (datasets(50)[0], 1)], seed=0)
    ids = mixture.sampler.ids(0, 0, 100)
    assert not np.array_equal(ids[ids < 50], ids[ids >= 50] - 50)


def test_lengths_of_the_parts():
    first, second = datasets(2, 3)
    mixture = Mixture([(Sampled(first, lengths=[5, 6]), 1), (Sampled(second, BucketedSampler([7, 8, 9], 2)), 1)])
    assert mixture.known_lengths.tolist() == [5, 6, 7, 8, 9]
    assert Mixture([(Sampled(first, lengths=[5, 6]), 1), (second, 1)]).known_lengths is None


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([], "it has no datasets"),
        ([([1], 1), ([2], 0)], "dataset 1 of a mixture has the weight 0"),
        ([([1], 1), ([], 1)], "dataset 1 of a mixture is empty"),
        ([(iter([1]), 1)], "dataset 0 of a mixture must have __getitem__ and __len__"),
        ([([1], float("inf"))], "weights of dataset 0 must be a finite number"),
    ],
)
def test_what_is_refused(parts, says):
    with pytest.raises(UserError, match=says):
        Mixture(parts)


def test_an_epoch_has_samples():
    with pytest.raises(UserError, match="length=0 leaves a mixture without samples"):
        Mixture([([1], 1)], length=0)


class Counting:
    def __init__(self):
        self.level = 1

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.level


def test_a_change_of_a_part_that_workers_would_not_see_is_refused():
    part = Counting()
    copies = WorkerCopies(Mixture([(range(4), 1), (part, 1)]).dataset)
    copies.record()
    copies.check()
    part.level = 2
    with pytest.raises(UserError, match=r"the dataset's datasets\[1\].level was changed after its worker processes"):
        copies.check()
