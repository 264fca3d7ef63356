"""A loss that torch's GradScaler has scaled is refused in the first `step.backward` of a loop, and no other loss is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import preloaded
from lockstep.engine.checks.scaled_loss import check_not_scaled
from lockstep.engine.log.banner import describe_own_loop
from lockstep.errors import UserError
from lockstep.observe.notebook import kernel
from lockstep.run_folder.opened import RunFolder
from pages import ROOT

Scale = Callable[[Tensor], Any]

LOOP = """
import os
import torch, lockstep
from torch.utils.data import TensorDataset

scaler = torch.amp.GradScaler("cpu", enabled="SCALES" in os.environ)
with lockstep.start(global_batch=8, steps=2) as run:
    model = torch.nn.Linear(2, 1)
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step in run.steps(TensorDataset(torch.ones(16, 2))):
        for (x,) in step:
            step.backward(scaler.scale(model(x).square().sum()), weight=len(x))
        step.apply()
"""


def loss() -> Tensor:
    return (torch.ones(3, requires_grad=True) * torch.tensor([1.0, 2.0, 3.0])).sum()


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda scale: scale(loss()),
        lambda scale: scale(loss()) / 4,
        lambda scale: scale(loss()) * 8,
        lambda scale: scale(loss() * torch.tensor(2.0)),
        lambda scale: scale(loss()) + scale(loss()),
    ],
)
def test_a_scaled_loss_is_refused(wrapped: Callable[[Scale], Tensor]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pytest.raises(UserError, match="multiplied by 1024") as error:
        check_not_scaled(wrapped(scaler.scale))

    assert "precision=fp16" in error.value.fix


def test_other_losses_pass() -> None:
    off = torch.amp.GradScaler("cpu", enabled=False)  # it has no scale at all
    check_not_scaled(off.scale(loss() * torch.tensor(2.0)))

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled = scaler.scale(loss())  # of something that Lockstep does not train
    for other in (loss(), loss() * torch.tensor(1024.0), loss() * 1024, scaled.detach() + loss(), 1.0):
        check_not_scaled(other)

    # Scripts that run in several precisions have a scaler that is off in most of them.
    off = torch.amp.GradScaler("cpu", enabled=False)
    check_not_scaled(off.scale(loss()))


def test_a_loop_is_refused_and_told_about_verify_once(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)

    def train(**more: str) -> Any:
        env = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PATH": "", **more}
        return preloaded.run("train", "loop.py", env=env, cwd=tmp_path)

    refused = train(SCALES="1")
    assert refused.returncode
    assert "a loss that torch's GradScaler has scaled" in refused.stdout + refused.stderr
    first_line = "the loss of this loop is not checked at its start: lockstep verify loop.py"
    assert first_line in refused.stdout

    # The second run of a script has no such line.
    done = train()
    assert done.returncode == 0, done.stdout + done.stderr
    assert first_line not in done.stdout


@pytest.mark.parametrize("name", ["", "-c", "ipykernel_launcher.py"])
def test_a_loop_that_is_no_file_is_told_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In a prompt `sys.argv[0]` is empty, which has no path; in a notebook it is the file of the kernel."""
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(kernel, "shell", lambda: object() if name.endswith(".py") else None)
    folder = SimpleNamespace(path=tmp_path / "loop-1")
    assert describe_own_loop("loop", cast(RunFolder, folder)) is None
