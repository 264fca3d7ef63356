"""The snapshot that the checks at the start restore."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.start_check.snapshot import CheckSnapshot


class Holding(nn.Module):
    """A module that holds parameters in a list of its own, as `nn.LSTM` does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.held = [nn.Parameter(torch.ones(2)), 1]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_parameters_that_an_attribute_holds_are_left_to_the_model() -> None:
    """FSDP puts other parameters there, and frees the storage of these: reading them was a segmentation fault."""
    model = Holding()
    snapshot = CheckSnapshot(model, None, (), copies_parameters=False)
    replaced = nn.Parameter(torch.full((2,), 3.0))
    model.held[0] = replaced
    model.held[1] = 2

    assert snapshot.changes().others == ["model.held"]
    snapshot.restore()
    assert model.held[0] is replaced
    assert model.held[1] == 1
    assert replaced.tolist() == [3.0, 3.0]
