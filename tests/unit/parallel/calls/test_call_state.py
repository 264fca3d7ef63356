"""A call that leaves no trace."""

import torch
from torch import nn

from lockstep.parallel.blocks import blocks_without_shared_parameters, find_blocks
from lockstep.parallel.calls.state import StateSnapshot


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("cache", None)

    def forward(self) -> None:
        self.mean += 1
        self.cache = torch.ones(3)
        self.register_buffer("new", torch.ones(1), persistent=False)


def test_buffers_come_back_and_those_that_are_new_go() -> None:
    model = Caching()
    mean = model.mean
    with StateSnapshot(model) as around:
        model()
        assert sorted(around.replaced_buffers()) == ["cache", "new"]
    assert around.replaced_buffers() == []
    assert model.mean is mean
    assert torch.equal(mean, torch.zeros(2))
    assert model.cache is None
    assert not hasattr(model, "new")
    assert list(model.state_dict()) == ["mean"]


class Sharing(nn.Module):
    """The same module in a block and outside; the same tensor in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(4))
        self.head = self.blocks[0][0]
        self.blocks[1][0].weight = self.blocks[2][0].weight


def test_blocks_that_share_a_module_or_a_tensor() -> None:
    model = Sharing()
    assert blocks_without_shared_parameters(find_blocks(model), model) == [model.blocks[3]]


class Averaging(nn.Module):
    """Updates tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.others = torch.zeros(2), [torch.zeros(2)]

    def forward(self) -> None:
        self.mean += 1
        self.others[0] += 1


def test_tensors_that_are_no_buffers_come_back() -> None:
    model = Averaging()
    with StateSnapshot(model):
        model()
    assert model.mean.eq(0).all()
    assert model.others[0].eq(0).all()
