"""Tensors as bytes, for messages and digests."""

from __future__ import annotations

import torch

from lockstep.checkpoint.state.digests import digest
from lockstep.runtime.shards import as_bytes


def test_one_element_of_any_stride() -> None:
    """torch calls it contiguous, and does not view it as bytes."""
    one = torch.tensor([7]).as_strided((1,), (0,))
    assert as_bytes(one).tolist() == [7, 0, 0, 0, 0, 0, 0, 0]
    assert digest(one) == digest(torch.tensor([7]))


def test_memory_is_shared_if_it_can_be() -> None:
    rows = torch.arange(6, dtype=torch.int32).view(2, 3)
    assert as_bytes(rows).data_ptr() == rows.data_ptr()
    assert as_bytes(rows.T).view(torch.int32).tolist() == [0, 3, 1, 4, 2, 5]
    assert as_bytes(torch.tensor(3, dtype=torch.uint8)).tolist() == [3]
    assert len(as_bytes(torch.empty(0, 4))) == 0
