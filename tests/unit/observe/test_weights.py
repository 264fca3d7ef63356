"""The file with the final weights: the same weights make the same bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lockstep.observe.weights import save_weights

WEIGHTS = {"größe": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.float64)}
ALIASES = {f"head.{number}": "größe" for number in range(9)} | {'a "quoted" name': "b"}


def test_tied_weights_have_one_order_of_bytes(tmp_path: Path) -> None:
    """The order that safetensors chooses differs from call to call."""
    files = set()
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_weights(folder / "model.safetensors", WEIGHTS, ALIASES)
        files.add((folder / "model.safetensors").read_bytes())
    assert len(files) == 1

    loaded = load_file(tmp_path / "0" / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in WEIGHTS.items())
    with safe_open(tmp_path / "0" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", **ALIASES}
