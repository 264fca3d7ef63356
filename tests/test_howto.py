"""What the pages of docs/howto claim and do not run themselves, because it takes too long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import preloaded
from pages import ROOT, blocks_of

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "target"),
    [
        ("distillation", "distil.py:Distilled"),
        ("gradient_penalty", "penalty.py:Critic"),
        ("from_torchrun", "after.py"),
        ("from_accelerate", "after.py:Points"),
    ],
)
def test_the_number_of_processes_does_not_matter(tmp_path: Path, page: str, target: str) -> None:
    for block in blocks_of((ROOT / "docs" / "howto" / f"{page}.md").read_text()):
        if block.file:
            (tmp_path / block.file).write_text(block.code)
    words = ("verify", target, "--worlds", "1,2,3", "--steps", "3")
    done = preloaded.run(*words, env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout


@pytest.mark.parametrize(("page", "target"), [("gan", "gan.py"), ("gradient_penalty", "penalty.py:Critic")])
def test_noise_is_the_same_on_one_process_and_on_two(tmp_path: Path, page: str, target: str) -> None:
    """Both pages say so of their example, which draws noise in its loop or its loss."""
    for block in blocks_of((ROOT / "docs" / "howto" / f"{page}.md").read_text()):
        if block.file:
            (tmp_path / block.file).write_text(block.code)

    for count in ("1", "2"):
        words = ("train", target, "steps=12", "--nproc", count, f"run_dir=runs/on-{count}")
        done = preloaded.run(*words, env=ENVIRONMENT, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "follow its micro-batches" not in done.stdout

    one, two = (load_file(tmp_path / "runs" / f"on-{count}" / "model.safetensors") for count in "12")
    for name, weight in one.items():
        torch.testing.assert_close(weight, two[name], rtol=1e-4, atol=1e-5, msg=name)
