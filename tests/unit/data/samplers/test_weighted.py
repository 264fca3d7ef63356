import numpy as np
import pytest

from lockstep.data.samplers import WeightedSampler
from lockstep.data.samplers.weighted import _order
from lockstep.errors import UserError

WEIGHTS = [5, 0, 1, 0.5, 3.5]


def assert_expected(counts, expected):
    """Five standard deviations: by chance, one of two million counts is further away."""
    expected = np.asarray(expected)
    assert np.all(np.abs(counts - expected) <= 5 * np.sqrt(expected)), (counts, expected)


def test_counts_with_replacement():
    length, epochs = 5000, 8
    sampler = WeightedSampler(WEIGHTS, length=length, seed=3)
    counts = sum(np.bincount(sampler.ids(epoch, 0, length), minlength=5) for epoch in range(epochs))
    assert_expected(counts, length * epochs * np.array(WEIGHTS) / 10)
    assert counts[1] == 0


def test_neighbouring_draws_are_independent():
    sampler = WeightedSampler([1, 1], length=40_000, seed=3)
    ids = sampler.ids(0, 0, 40_000)
    pairs = np.bincount(2 * ids[:-1] + ids[1:], minlength=4)
    assert_expected(pairs, [9999.75] * 4)


def test_the_first_draws_without_replacement():
    """The first is by weight; the second by weight among the rest: P(0, 4) = 5/10 * 3.5/5."""
    epochs = 4000
    sampler = WeightedSampler(WEIGHTS, length=2, replacement=False, seed=3)
    pairs = np.array([sampler.ids(epoch, 0, 2) for epoch in range(epochs)])
    assert_expected(np.bincount(pairs[:, 0], minlength=5), epochs * np.array(WEIGHTS) / 10)
    assert_expected(np.sum((pairs == [0, 4]).all(1)), epochs * 0.35)
    assert_expected(np.sum((pairs == [3, 2]).all(1)), epochs * 0.05 * 1 / 9.5)
    assert np.all(pairs[:, 0] != pairs[:, 1])


def test_without_replacement_all_samples_with_a_weight_come_once():
    sampler = WeightedSampler(WEIGHTS, length=4, replacement=False, seed=3)
    assert sorted(sampler.ids(9, 0, 4)) == [0, 2, 3, 4]


@pytest.mark.parametrize("weights", [[1, 2, 3] * 50, [1e-150, 1, 1e150] * 50, np.geomspace(1e-12, 1, 5000)])
def test_the_order_is_that_of_the_clocks_wherever_one_begins(weights):
    count = len(weights)
    sampler = WeightedSampler(weights, replacement=False, seed=3)
    expected = np.argsort(sampler._clocks(2), kind="stable")
    for start, stop in [(count // 2, count // 2 + 7), (3, 3), (count - 1, count), (0, 40), (0, count)]:
        assert np.array_equal(sampler.ids(2, start, stop), expected[start:stop])


def test_equal_clocks_are_in_the_order_of_their_samples():
    clocks = np.array([2.0, 0.0, 2.0, np.inf, 0.0, 1.0, np.inf])
    assert _order(clocks).tolist() == [1, 4, 5, 0, 2, 3, 6]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"weights": [0, 0]}, "all weights are 0"),
        ({"weights": [1, -1]}, "weights of sample 1 must be a finite number of at least 0; it is -1.0"),
        ({"weights": [1, float("nan")]}, "it is nan"),
        ({"weights": [[1, 2]]}, "must be a list with one number for each sample"),
        ({"weights": [1, 1], "length": 0}, "length=0 must be a whole number of at least 1"),
        ({"weights": ["a", "b"]}, "weights must be numbers"),
        ({"weights": [1, 0, 1], "replacement": False}, "3 draws without replacement need as many"),
    ],
)
def test_what_is_refused(arguments, says):
    with pytest.raises(UserError, match=says):
        WeightedSampler(**arguments)


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e300])
@pytest.mark.parametrize("replacement", [True, False])
def test_the_size_of_the_weights_does_not_matter(scale, replacement):
    """Sums of huge weights, and quotients of tiny ones, are not finite."""
    weights = np.ones(50)
    plain = WeightedSampler(weights, replacement=replacement, seed=0).ids(0, 0, 50)
    assert np.array_equal(WeightedSampler(weights * scale * 2, replacement=replacement, seed=0).ids(0, 0, 50), plain)
