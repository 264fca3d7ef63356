"""The rows of a TensorDataset are gathered without reading sample by sample."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import TensorDataset, default_collate

from lockstep.data.loader import Request, SampleReader


def test_rows_of_tensors_keep_their_memory_format():
    images = torch.arange(96.0).reshape(4, 2, 3, 4)
    dataset = TensorDataset(images, images.to(memory_format=torch.channels_last), torch.arange(4))
    plain, channels_last, labels = SampleReader(dataset, default_collate, seed=0)(Request(0, np.array([3, 0])))

    assert plain.equal(images[[3, 0]])
    assert plain.is_contiguous()
    assert channels_last.equal(plain)
    assert channels_last.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == [3, 0]
