"""The hrm recipe on a GPU: nothing in a step makes the host wait, and the fused update is the plain one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fused_update import assert_same_steps
from lockstep.recipes.hrm import HRM
from lockstep.recipes.hrm.optimizers import AdamATan2
from lockstep.task import MicroBatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def train_step(task: HRM, model: Any, optimizers: list[Any], batch: Any) -> torch.Tensor:
    for p in model.parameters():
        p.grad = None
    task.before_batch(None, MicroBatch(None, 0, len(batch["inputs"]), offset=0))
    with torch.autocast("cuda", torch.bfloat16):
        loss = task.loss(model, batch)
    loss.total.backward()
    for optimizer in optimizers:
        optimizer.grad_scale, optimizer.found_inf = torch.full((), 8.0, device="cuda"), torch.zeros((), device="cuda")
        optimizer.step()
    task.after_step(SimpleNamespace(model=model, steps_done=1), None)
    return loss.total.detach()


@pytest.mark.parametrize("loss", ["softmax", "stablemax"])
def test_a_step_makes_the_host_wait_for_nothing(loss: str) -> None:
    torch.manual_seed(0)
    # More than 3,072 cells: from there on torch sorts them to find the gradients of an embedding.
    task = HRM(puzzle="sudoku9", train_size=48, test_size=8, width=64, heads=2, layers=1, ema=0.9, loss=loss)
    model = task.model().cuda()
    optimizers, data = task.optimizer(model), task.data()
    batch = {key: value.cuda() for key, value in task.collate([data[i] for i in range(48)]).items()}
    losses = [train_step(task, model, optimizers, batch) for _ in range(3)]
    assert all(optimizer.divides_and_skips for optimizer in optimizers)
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses += [train_step(task, model, optimizers, batch) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(losses).isfinite().all()
    piece = task.carry.take(0, 48)
    assert piece is not None
    assert piece["z_h"].dtype == torch.bfloat16


def test_the_fused_update_is_the_plain_one() -> None:
    torch.manual_seed(0)
    start = [torch.randn(shape, device="cuda") for shape in ((300, 700), (5,), (64, 64), ())]
    plain, fused = ([t.clone().requires_grad_() for t in start] for _ in range(2))
    one, other = AdamATan2(plain, lr=0.1, fused=False), AdamATan2(fused, lr=0.1)
    assert_same_steps(one, other, spoiled=float("inf"), atol=1e-5)
