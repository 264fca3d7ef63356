import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from data_sources import source_options
from lockstep.config import DataConfig
from lockstep.data.samplers import BLOCK, Sampled, Sampler, SequentialSampler, ShuffledSampler, make_sampler
from lockstep.data.sources import open_source
from lockstep.errors import UserError
from lockstep.runtime.world import World


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


class Weighted:
    """A sampler with replacement: each offset draws an id by itself, from a stream of its own."""

    def __init__(self, weights, length, seed):
        self.bounds = np.cumsum(weights) / np.sum(weights)
        self.length = length
        self.seed = seed

    def __len__(self):
        return self.length

    def ids(self, epoch, start, stop):
        draws = [np.random.default_rng((self.seed, epoch, offset)).random() for offset in range(start, stop)]
        return np.searchsorted(self.bounds, draws).astype(np.int64)


def source(sampler, rank, ranks, dataset, micro_batch=2):
    options = source_options(6, micro_batch, world=World(rank, ranks))
    return open_source(Sampled(dataset, sampler), default_collate, options)


def test_a_source_keeps_no_batch_that_it_has_yielded():
    """With many micro-batches in a step, all of them together may not fit into device memory."""
    one = source(SequentialSampler(20), 0, 1, list(range(20)))
    alive = []
    for micro in one.take():
        alive = [batch for batch in alive if batch() is not None]
        alive.append(weakref.ref(micro.data))
        del micro
    assert len(alive) == 1


def test_samplers_are_samplers():
    assert isinstance(make_sampler(10, 0), ShuffledSampler)
    assert isinstance(make_sampler(10, 0, shuffle=False), SequentialSampler)
    for sampler in (make_sampler(10, 0), SequentialSampler(10), Weighted([1], 4, 0)):
        assert isinstance(sampler, Sampler)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_offset_of_a_weighted_sampler_is_trained_once_on_any_number_of_ranks(ranks):
    """20 offsets of a dataset of 5, over two epochs; sample 0 is never drawn."""
    sampler = Weighted([0, 1, 1, 1, 5], 20, seed=3)
    expected = [*sampler.ids(0, 0, 20), *sampler.ids(1, 0, 20)]
    sources = [source(sampler, rank, ranks, list(range(5))) for rank in range(ranks)]
    seen = []
    while sources[0].step_order.position < 40:
        for one in sources:
            batches = one.take()
            seen += [int(i) for micro in batches if not micro.padding for i in micro.data]
            one.commit(batches, None)
    assert seen == expected
    assert 0 not in seen


def test_the_state_of_a_sampled_dataset_is_its_position():
    first = source(Weighted([1, 2, 3], 20, seed=1), 0, 1, [10, 11, 12])
    first.commit(first.take(), None)
    assert first.state_dict() == {"position": 6, "length": 20, "skipped_spans": []}
    second = source(Weighted([1, 2, 3], 20, seed=1), 1, 2, [10, 11, 12])
    second.load_state_dict(first.state_dict())
    assert second.upcoming() == first.upcoming()


def test_reading_ahead_asks_for_the_ids_of_a_micro_batch_once():
    asked = []

    class Counted(Sampler):
        def __len__(self):
            return 8

        def ids(self, epoch, start, stop):
            asked.append((epoch, start))
            return np.arange(start, stop)

    options = source_options(4, 2, config=DataConfig(workers=1))
    one = open_source(Sampled(torch.utils.data.TensorDataset(torch.arange(8)), Counted()), default_collate, options)
    asked.clear()
    for _ in range(2):
        batches = one.take()
        assert [micro.data[0].shape for micro in batches] == [(2,), (2,)]
        one.commit(batches, None)
    one.close()
    assert asked[:4] == [(0, 0), (0, 2), (0, 4), (0, 6)]
    assert len(set(asked)) == len(asked)


def test_a_sampler_needs_a_dataset_with_an_index():
    with pytest.raises(UserError, match="a sampler needs a dataset with __getitem__"):
        source(SequentialSampler(4), 0, 1, iter(range(4)))


def test_a_skipped_span_at_the_start_of_an_epoch_stays_out_with_a_dropped_tail():
    options = source_options(4, 4, "drop")
    one = open_source(list(range(10)), default_collate, options)
    one.load_state_dict({"position": 8, "length": 10, "skipped_spans": []})
    assert one.take().span == (10, 14)
    one.skip((10, 14))
    assert one.take().span == (14, 18)
    one.skip((14, 18))
    assert one.take().span == (20, 24)


def test_changing_ids_changes_no_order():
    order = make_sampler(10, 0)
    order.ids(0, 0, 10)[:] = 0
    assert order.ids(0, 0, 10).tolist() == FROZEN


class Own:
    """A sampler of a user, whose ids are those of `make`."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 6

    def ids(self, epoch, start, stop):
        return self.make(start, stop)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda start, stop: np.arange(start, stop)[1:], r"must give 3 whole numbers.*shape \(2,\)"),
        (lambda start, stop: np.arange(start, stop)[:, None], r"must give 3 whole numbers.*shape \(3, 1\)"),
        (lambda start, stop: np.arange(start, stop) / 1.0, "must give 3 whole numbers.*type float64"),
        (lambda start, stop: np.arange(start, stop) - 1, "gave sample -1 of a dataset of 6 samples"),
        (lambda start, stop: np.arange(start, stop) + 4, "gave sample 6 of a dataset of 6 samples"),
    ],
)
def test_ids_that_are_not_samples_are_refused(make, says):
    """A list would take -1 for its last sample, and fewer ids would be trained with the weight of all."""
    with pytest.raises(UserError, match=f"(?s){says}"):
        list(source(Own(make), 0, 1, list("abcdef"), micro_batch=3).take())


class Shifted(ShuffledSampler):
    """A user's class that derives from ours."""

    def ids(self, epoch, start, stop):
        return super().ids(epoch, start, stop) - 1


def test_ids_of_a_sampler_that_derives_from_ours_are_checked_too():
    with pytest.raises(UserError, match="gave sample -1 of a dataset of 6 samples"):
        list(source(Shifted(6, 0), 0, 1, list("abcdef"), micro_batch=3).take())


def test_ids_may_be_a_list():
    listed = Own(lambda start, stop: [*range(start, stop)])
    assert [micro.data for micro in source(listed, 0, 1, list("abcdef"), micro_batch=3).take()] == [[*"abc"], [*"def"]]


def test_a_sampler_and_data_shuffle_are_refused_together():
    options = source_options(2, 2, config=DataConfig(shuffle=False))
    with pytest.raises(UserError, match=r"data\.shuffle=false has no effect: the training data has a sampler"):
        open_source(Sampled([1, 2], SequentialSampler(2)), default_collate, options)


def test_another_epoch_of_the_sampler_is_not_called_another_dataset():
    state = source(SequentialSampler(4), 0, 1, list(range(8))).state_dict()
    with pytest.raises(
        UserError, match=r"an epoch has 6 samples, but had 4 (.|\n)*the dataset has 8 samples(.|\n)*sampler"
    ):
        source(SequentialSampler(6), 0, 1, list(range(8))).load_state_dict(state)
