import pytest
import torch
from torch.utils.data import IterableDataset, default_collate

from lockstep.config import DataConfig
from lockstep.data.dataset_source import SourceOptions
from lockstep.data.sources import open_source
from lockstep.runtime.world import World
from lockstep.task import StepResult


class Five(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def source(rank, ranks):
    options = SourceOptions(4, 2, "short", DataConfig(), 0, World(rank, ranks), torch.device("cpu"))
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
