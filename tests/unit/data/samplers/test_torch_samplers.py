import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import Sampler as TorchSampler
from torch.utils.data import SequentialSampler as TorchSequentialSampler

from lockstep.data.samplers import (
    BucketedSampler,
    CurriculumSampler,
    SequentialSampler,
    ShuffledSampler,
    WeightedSampler,
    torch_samplers,
)
from lockstep.data.samplers.torch_samplers import ListedSampler, as_sampler
from lockstep.errors import UserError

DATA = range(20)


@pytest.mark.parametrize(
    ("sampler", "kind", "length"),
    [
        (None, ShuffledSampler, 20),
        (RandomSampler(DATA), ShuffledSampler, 20),
        (TorchSequentialSampler(DATA), SequentialSampler, 20),
        (DistributedSampler(DATA, num_replicas=4, rank=1), ShuffledSampler, 20),
        (DistributedSampler(DATA, num_replicas=4, rank=1, shuffle=False), SequentialSampler, 20),
        (RandomSampler(DATA, replacement=True, num_samples=7), WeightedSampler, 7),
        (WeightedRandomSampler([1.0] * 20, 30), WeightedSampler, 30),
        (WeightedRandomSampler([1.0] * 20, 5, replacement=False), WeightedSampler, 5),
        (RandomSampler(DATA, num_samples=7), ListedSampler, 7),
        (SubsetRandomSampler([1, 4, 9]), ListedSampler, 3),
        (SubsetRandomSampler(torch.tensor([1, 4, 9])), ListedSampler, 3),
        # Made for the first samples alone.
        (RandomSampler(range(5)), ListedSampler, 5),
        (RandomSampler(range(5), replacement=True), ListedSampler, 5),
        (TorchSequentialSampler(range(5)), ListedSampler, 5),
    ],
)
def test_what_becomes_of_a_sampler_of_torch(sampler, kind, length):
    taken = as_sampler(sampler, 20, seed=3)
    assert type(taken) is kind
    assert len(taken) == length
    assert np.array_equal(taken.ids(4, 1, 3), as_sampler(sampler, 20, seed=3).ids(4, 0, length)[1:3])


def test_a_sampler_of_some_samples_never_gives_others():
    for sampler in (
        RandomSampler(range(5)),
        RandomSampler(range(5), replacement=True),
        TorchSequentialSampler(range(5)),
    ):
        assert max(as_sampler(sampler, 20, seed=3).ids(1, 0, 5)) < 5


def test_weights_and_replacement_are_taken():
    taken = as_sampler(WeightedRandomSampler([0.0, 1.0, 3.0], 3000), 3, seed=0)
    counts = np.bincount(taken.ids(0, 0, 3000), minlength=3)
    assert counts[0] == 0
    assert abs(counts[2] - 2250) < 5 * 24
    once = as_sampler(WeightedRandomSampler([0.0, 1.0, 3.0], 2, replacement=False), 3, seed=0)
    assert sorted(once.ids(0, 0, 2)) == [1, 2]


class Halves(TorchSampler):
    """Even samples, then odd ones, both in an order drawn from the global generators."""

    def __init__(self, epochs_of_other_length=False):
        self.epoch = 0
        self.other_length = epochs_of_other_length

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        even, odd = list(range(0, 20, 2)), list(range(1, 20, 2))
        random.shuffle(even)
        yield from even
        yield from [odd[i] for i in torch.randperm(10 - self.other_length * self.epoch)]

    def __len__(self):
        return 20


def test_a_custom_sampler_is_listed_by_seed_and_epoch():
    before = torch.get_rng_state(), random.getstate()
    taken = as_sampler(Halves(), 20, seed=3)
    first, second = taken.ids(0, 0, 20), taken.ids(1, 0, 20)
    assert all(i % 2 == 0 for i in first[:10])
    assert sorted(first) == sorted(second) == list(range(20))
    assert not np.array_equal(first, second)
    assert np.array_equal(as_sampler(Halves(), 20, seed=3).ids(1, 5, 15), second[5:15])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_a_generator_of_its_own_is_seeded():
    sampler = SubsetRandomSampler(range(20), generator=torch.Generator())
    assert np.array_equal(as_sampler(sampler, 20, 3).ids(2, 0, 20), as_sampler(sampler, 20, 3).ids(2, 0, 20))
    assert not np.array_equal(as_sampler(sampler, 20, 3).ids(2, 0, 20), as_sampler(sampler, 20, 4).ids(2, 0, 20))


class Stateful(TorchSampler):
    def __init__(self):
        self.generator_of_its_own = np.random.default_rng(0)

    def __iter__(self):
        return iter(self.generator_of_its_own.permutation(20).tolist())

    def __len__(self):
        return 20


class PartOfRank(DistributedSampler):
    """A subclass may do anything, so it is listed; but the list of a rank is a part of the dataset."""


class Unseeded:
    def __len__(self):
        return 20

    def ids(self, epoch, start, stop):
        return np.random.permutation(20)[start:stop]


class Endless(TorchSampler):
    def __iter__(self):
        return itertools.cycle(range(20))


def test_a_sampler_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr(torch_samplers, "LONGEST", 1000)
    with pytest.raises(UserError, match="Endless does not end: it gave more than 2,000 samples"):
        as_sampler(Endless(), 20, seed=0)


@pytest.mark.parametrize(
    ("sampler", "says"),
    [
        (Stateful(), r"(?s)Stateful gives another order each time.*do: +make the generator in __iter__"),
        (BatchSampler(RandomSampler(DATA), 4, drop_last=False), "BatchSampler must give whole numbers"),
        (SubsetRandomSampler([1, 20]), "gave sample 20 of a dataset of 20 samples"),
        (SubsetRandomSampler([]), "it gave nothing"),
        ([1, 2, 3], "a sampler must have ids"),
        (DistributedSampler(range(5), num_replicas=2, rank=0), "is made for 5 samples, and the dataset has 20"),
        (PartOfRank(DATA, num_replicas=2, rank=0), "gives the samples of one rank"),
        (WeightedSampler([1] * 19), "is made for 19 samples, and the dataset has 20"),
        (BucketedSampler([1] * 21, batch=4), "is made for 21 samples, and the dataset has 20"),
        (CurriculumSampler([1] * 19), "is made for 19 samples, and the dataset has 20"),
        (Unseeded(), "Unseeded.ids gives other ids each time"),
    ],
)
def test_what_is_refused(sampler, says):
    with pytest.raises(UserError, match=says):
        as_sampler(sampler, 20, seed=0)


def test_epochs_must_have_equal_lengths():
    taken = as_sampler(Halves(epochs_of_other_length=True), 20, seed=0)
    with pytest.raises(UserError, match="gives 18 samples in epoch 2, and 20 in epoch 0"):
        taken.ids(2, 0, 5)
