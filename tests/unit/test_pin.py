"""Only host memory is page-locked: what a dataset keeps on a device is handed on as it is. The device `meta` stands for
a GPU here, and a stub for the locking, which takes one."""

from collections import namedtuple

import pytest
import torch

from lockstep.config import DataConfig
from lockstep.data.loader import pin
from lockstep.data.sources import BatchShape, open_source
from lockstep.runtime.world import World

Pair = namedtuple("Pair", "x y")


@pytest.fixture
def locked(monkeypatch):
    """The tensors that were locked."""
    found = []

    def lock(tensor):
        assert tensor.device.type == "cpu", "cannot pin"
        found.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    return found


def test_what_lies_on_a_device_is_left_there(locked):
    here, there = torch.ones(2), torch.ones(2, device="meta")
    batch = {"pair": Pair(here, there), "list": [there, here], "name": "a"}
    done = pin(batch)
    assert len(locked) == 2
    assert done["pair"].y is done["list"][0] is there
    assert done["pair"].x is not here
    assert torch.equal(done["pair"].x, here)
    assert (type(done["pair"]), done["name"]) == (Pair, "a")


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, device):
        self.device = device

    def __iter__(self):
        return iter([torch.ones(3, device=self.device)] * 4)


@pytest.mark.parametrize(("device", "count"), [("cpu", 2), ("meta", 0)])
def test_a_stream_is_locked_alike(device, count, locked):
    shape, config = BatchShape(4, 2, "keep"), DataConfig(pin_memory=True)
    source = open_source(Stream(device), torch.stack, shape, config, 0, World(), torch.device("meta"))
    source.take()
    assert len(locked) == count
