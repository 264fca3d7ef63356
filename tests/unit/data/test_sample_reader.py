"""The rows of a TensorDataset are gathered without reading sample by sample; errors of user code name samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from lockstep.data.loader import BatchRequest, SampleReader


def test_rows_of_tensors_keep_their_memory_format():
    images = torch.arange(96.0).reshape(4, 2, 3, 4)
    dataset = TensorDataset(images, images.to(memory_format=torch.channels_last), torch.arange(4))
    plain, channels_last, labels = SampleReader(dataset, default_collate, seed=0)(BatchRequest(0, np.array([3, 0])))

    assert plain.equal(images[[3, 0]])
    assert plain.is_contiguous()
    assert channels_last.equal(plain)
    assert channels_last.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == [3, 0]


class Ends(Dataset):
    """Reads from an iterator that ends, as wrappers of a stream do."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return next(iter([index][: index < 5]))


def collate_that_ends(samples: list[int]) -> int:
    return next(sample for sample in samples if sample > 5)


@pytest.mark.parametrize(("collate", "ids"), [(default_collate, [3, 6]), (collate_that_ends, [3, 4])])
def test_a_stop_iteration_of_user_code_is_an_error(collate, ids):
    # In a generator, or in `map`, it would end the batches of the step without a word.
    reader = SampleReader(Ends(), collate, seed=0)
    with pytest.raises(RuntimeError, match="raised StopIteration") as raised:
        reader(BatchRequest(0, np.array(ids)))

    assert isinstance(raised.value.__cause__, StopIteration)
    assert f"{ids[-1]} in epoch 0" in raised.value.__cause__.__notes__[0]
