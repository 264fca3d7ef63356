import weakref

import pytest
import torch
from torch.utils.data import IterableDataset, default_collate

from data_sources import source_options
from lockstep.data import transfer
from lockstep.data.sources import open_source
from lockstep.data.streams.shards import Shards
from lockstep.runtime.world import World
from lockstep.task import StepResult


class Six(IterableDataset):
    def __iter__(self):
        return iter(range(6))


class Five(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def source(rank, ranks):
    options = source_options(4, 2, world=World(rank, ranks))
    return open_source(Five(), default_collate, options)


@pytest.mark.parametrize("late", [0, 1])
def test_all_ranks_are_in_the_same_epoch_even_if_results_come_late(late):
    """Rank 0 has three samples, rank 1 two: their shards of an epoch end in different steps."""
    sources = [source(rank, 2) for rank in range(2)]
    results: list[StepResult | None] = [None] * late
    epochs = []
    for step in range(12):
        batches = [one.take() for one in sources]
        exhausted = all(one.exhausted for one in batches)
        results.append(StepResult(step, applied=True, weight=1.0, grad_norm=1.0, exhausted=exhausted))
        for one, taken in zip(sources, batches, strict=True):
            taken.step = step
            one.commit(taken, results[step])
        epochs.append([one.epoch for one in sources])
    assert all(first == second for first, second in epochs), epochs

    # An epoch takes two steps; with late results one more, in which all ranks run padding.
    assert [epoch for epoch, _ in epochs] == [(step + 1) // (2 + late) for step in range(12)]


@pytest.mark.parametrize("data", [Six(), Shards([Six()])], ids=["strided", "resumable"])
def test_a_stream_moves_a_micro_batch_to_the_device_when_it_is_needed(data, monkeypatch):
    moved: list[weakref.ref[torch.Tensor]] = []

    def move(batch, device):
        found = batch.to(device)
        moved.append(weakref.ref(found))
        return found

    monkeypatch.setattr(transfer, "to_device", move)
    options = source_options(6, 2, device="meta")
    one = open_source(data, default_collate, options)

    # Before the first step, a check looks at the first micro-batch. It stays in host memory.
    assert one.first_micro_batch().data.device.type == "cpu"
    batches = one.take()
    assert (batches.num_micro_batches, moved) == (3, [])

    # The one before is not kept on the device.
    micros = iter(batches)
    for count in (1, 2, 3):
        micro = next(micros)
        assert (micro.data.device.type, len(moved)) == ("meta", count)
        del micro
        assert moved[-1]() is None

    assert next(micros, None) is None
