"""What tensor parallelism refuses before any rank waits for another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lockstep.errors import UserError
from lockstep.parallel.tensor.driver import shard_layers


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)


def test_gathered_layers_of_ranks_that_share_a_gpu() -> None:
    axes: Any = SimpleNamespace(mesh=SimpleNamespace(sizes={"tp": 2}))
    runtime: Any = SimpleNamespace(on_gpu=True, backend="gloo", world=SimpleNamespace(size=2))
    with pytest.raises(UserError, match="cannot run over gloo") as caught:
        shard_layers(nn.Sequential(Attention()), None, axes, runtime)
    assert "0.qkv is sharded as 'gathered'" in str(caught.value)
