"""Public models end where plain PyTorch ends. A sample: `make zoo` compares all of them under every strategy."""

from __future__ import annotations

import pytest
import torch

from pool import Pool
from zoo import SLOW_TO_IMPORT
from zoo.compare import by_hand, error, trained, values_of
from zoo.public import TASKS, TRANSFORMERS
from zoo.torchvision_ops import declare_missing

SAMPLE = [
    ("GPT2", "tp"),  # its linear layers are transposed
    ("GPT2", "pp"),  # returns a ModelOutput, and would return a cache
    ("Llama", "tp"),  # rotary positions
    ("Falcon", "tp"),  # writes into the output of a layer
    ("BERT", "pp"),
    ("ViT", "fsdp"),
    ("BART", "zero1"),
    ("BART", "remat"),  # would fill a cache of keys and values twice
    ("timm BEiT", "tp"),  # uses the weight of a layer without calling it
    ("timm Swin", "pp"),
    ("timm EfficientNet", "fsdp"),  # BatchNorm
]
TOLERANCE = {"Llama": 1e-6}  # its norms compute in float32


@pytest.fixture(scope="module", autouse=True)
def public_models(pool: Pool) -> None:
    pool.preload(*SLOW_TO_IMPORT)


@pytest.mark.parametrize(("name", "way"), SAMPLE)
def test_it_ends_where_plain_pytorch_ends(pool: Pool, name: str, way: str) -> None:
    initial, found = pool.run(trained, name, values_of(name, way), world=2)[0]
    assert error(found, by_hand(name, initial)) <= TOLERANCE.get(name, 1e-12)
    assert error(found, initial) > 1e-3, "it was not trained"


def test_nothing_is_declared_where_torchvision_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.ops.torchvision.nms, "by the compiled part, or in its place"
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    assert declare_missing() is None


def test_the_zoo_is_large_enough() -> None:
    assert len(TASKS) >= 20
    assert len(TRANSFORMERS) >= 16
