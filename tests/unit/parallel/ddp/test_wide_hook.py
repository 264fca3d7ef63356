"""The hook that sums gradients stored in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.parallel.ddp.comm_hooks import Bucket, WideHook


class Noted(WideHook):
    """All ranks have the same bucket."""

    def reduce(self, tensor: Tensor, op: Any = None) -> Iterator[None]:
        self.sent = tensor.dtype
        tensor *= self.ranks
        yield


@pytest.mark.parametrize(
    ("stored", "sent"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_no_bucket_loses_precision(stored: torch.dtype, sent: torch.dtype) -> None:
    """On many ranks the control word is float64, and so may be some of the model's parameters."""
    group: Any = SimpleNamespace(size=lambda: 2)
    hook = Noted(nn.Parameter(torch.zeros(1)), group)
    buffer = torch.tensor([1.0 + 2.0**-40, 3.0, 2.0**-70], dtype=stored)
    expected = buffer.clone()

    assert len(list(hook.reduce_bucket(Bucket(buffer, [])))) == 1
    assert hook.sent == sent
    assert torch.equal(buffer, expected)
