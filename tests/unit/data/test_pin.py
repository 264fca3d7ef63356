"""Only host memory is page-locked: what a dataset keeps on a device is handed on as it is. The device `meta` stands for
a GPU here, and a stub for the locking, which takes one."""

from collections import UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from data_sources import source_options
from lockstep.config import DataConfig
from lockstep.data.sources import open_source
from lockstep.data.transfer import Transfer, pin, to_device

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


class Sealed(Mapping):
    """Cannot be made from a dict."""

    def __init__(self, first, second):
        self.values_by_key = {"first": first, "second": second}

    def __getitem__(self, key):
        return self.values_by_key[key]

    def __iter__(self):
        return iter(self.values_by_key)

    def __len__(self):
        return len(self.values_by_key)


class Encoding(UserDict):
    """As tokenizers return them: a mapping with something beside."""

    def __init__(self, data, source):
        super().__init__(data)
        self.source = source


class Careful(UserDict):
    """Knows itself how to be locked."""

    def pin_memory(self):
        return "locked"


def test_mappings_of_every_kind_are_looked_into(locked):
    here, there = torch.ones(2), torch.ones(2, device="meta")
    encoding, sealed = Encoding({"ids": here, "kept": there}, "a text"), Sealed(here, there)
    counted = defaultdict(list, ids=[here, there])
    done = pin([encoding, sealed, counted, MappingProxyType({"ids": here}), Careful(ids=here)])
    assert len(locked) == 4
    assert (type(done[0]), done[0].source) == (Encoding, "a text")
    assert done[0]["kept"] is done[1]["second"] is done[2]["ids"][1] is there
    assert encoding["ids"] is here  # the dataset's own is as it was
    assert [type(each) for each in done[1:4]] == [dict, defaultdict, MappingProxyType]
    assert done[4] == "locked"
    assert to_device(UserDict(ids=here), torch.device("meta"))["ids"].device.type == "meta"


class Edge(NamedTuple):
    """Has a field with the name of a method."""

    source: torch.Tensor
    to: torch.Tensor


def test_a_packed_sequence_moves_itself_and_a_field_is_no_method() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device(packed, torch.device("meta"))
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")
    edge = to_device(Edge(torch.ones(1), torch.ones(2)), torch.device("meta"))
    assert (edge.source.device.type, edge.to.device.type, type(edge)) == ("meta", "meta", Edge)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, device):
        self.device = device

    def __iter__(self):
        return iter([torch.ones(3, device=self.device)] * 4)


@pytest.mark.parametrize("data", [list(torch.ones(4, 3)), Stream("cpu")], ids=["dataset", "stream"])
def test_on_a_cpu_no_batch_passes_the_transfer(data, monkeypatch):
    for name in ("__call__", "prefetch"):
        monkeypatch.setattr(Transfer, name, None)
    source = open_source(data, torch.stack, source_options(4, 2))
    assert [micro.data.shape for micro in source.take()] == [(2, 3), (2, 3)]


@pytest.mark.parametrize("accelerator", [False, True])
def test_nothing_is_locked_without_an_accelerator(monkeypatch, accelerator):
    """A DataLoader of torch warns if it is asked for that, and the loader of a user may have asked."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    options = source_options(4, 2, config=DataConfig(pin_memory=True, workers=1))
    assert options.pins_memory == accelerator
    assert source_options(4, 2, config=DataConfig(pin_memory=True), device="meta").pins_memory


@pytest.mark.parametrize(("device", "count"), [("cpu", 2), ("meta", 0)])
def test_a_stream_is_locked_alike(device, count, locked):
    options = source_options(4, 2, config=DataConfig(pin_memory=True), device="meta")
    source = open_source(Stream(device), torch.stack, options)
    list(source.take())
    assert len(locked) == count
