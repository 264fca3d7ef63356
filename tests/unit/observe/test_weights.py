"""The file with the final weights: the same weights make the same bytes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
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


def test_two_threads_may_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have one process number, as have two processes on two machines now and then."""
    path = tmp_path / "model.safetensors"
    save_file = safetensors.torch.save_file

    def overtaken(*arguments: Any, **options: Any) -> None:
        save_file(*arguments, **options)
        monkeypatch.undo()
        save_weights(path, {"a": torch.zeros(3)}, {})

    monkeypatch.setattr(safetensors.torch, "save_file", overtaken)
    save_weights(path, {"a": torch.ones(3)}, {})
    assert torch.equal(load_file(path)["a"], torch.ones(3))
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_has_left_is_deleted(tmp_path: Path) -> None:
    """It is as large as the weights, and no later writer would use its name again."""
    path = tmp_path / "model.safetensors"
    left = tmp_path / ".model.safetensors.0a1b2c3d.tmp"
    left.touch()
    os.utime(left, (time.time() - 3600,) * 2)
    save_weights(path, {"a": torch.ones(3)}, {})
    assert list(tmp_path.iterdir()) == [path]
