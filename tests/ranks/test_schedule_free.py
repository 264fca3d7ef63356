"""Schedule-free AdamW: the paper's recursion, other weights in training than in evaluation, exact after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.checkpoint import command
from lockstep.checkpoint.choose import choose
from lockstep.optim.schedule_free import AdamWScheduleFree
from lockstep.task import Loss
from pool import Pool
from ranks.support import Regression, fit
from ranks.test_keeping import leaving

VALUES = {"global_batch": 8, "micro_batch": 2, "steps": 6, "optimizer": "schedule_free", "lr.peak": 0.05}
EVERY = {"evaluate.every": 1, "evaluate.batch": 4, "checkpoint.every": 1}


def test_the_recursion_of_the_paper() -> None:
    """In float64, with a warm-up, against the three sequences written down one by one."""
    g = torch.Generator().manual_seed(0)
    start = torch.randn(5, 3, generator=g, dtype=torch.float64)
    p = nn.Parameter(start.clone())
    optimizer = AdamWScheduleFree([p], betas=(0.8, 0.9), weight_decay=0.1)
    z, x, v, total, beta1, beta2 = start.clone(), start.clone(), torch.zeros_like(start), 0.0, 0.8, 0.9
    for t, rate in enumerate([0.01, 0.02, 0.03, 0.03, 0.03], start=1):
        y = (1 - beta1) * z + beta1 * x
        assert torch.allclose(p.detach(), y, rtol=1e-12)
        grad = torch.randn(5, 3, generator=g, dtype=torch.float64)
        v = beta2 * v + (1 - beta2) * grad**2
        z = z - rate * (grad / ((v / (1 - beta2**t)).sqrt() + 1e-8) + 0.1 * y)
        total += rate**2
        x = (1 - rate**2 / total) * x + rate**2 / total * z

        p.grad = grad
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        trained = p.detach().clone()
        optimizer.eval()
        assert torch.allclose(p.detach(), x, rtol=1e-12)
        optimizer.train()
        assert torch.equal(p.detach(), trained)


def test_a_parameter_that_is_unfrozen_later_starts_anew() -> None:
    """Its bias correction and its average count its own steps, as torch's AdamW does."""
    g = torch.Generator().manual_seed(0)
    late, other, alone = (nn.Parameter(torch.ones(3)) for _ in range(3))
    both, single = AdamWScheduleFree([late, other]), AdamWScheduleFree([alone])
    for step in range(6):
        other.grad = torch.randn(3, generator=g)
        if step >= 4:
            late.grad = alone.grad = torch.randn(3, generator=g)
            single.step()
        both.step()
    assert torch.equal(late, alone)


class Evaluated(Regression):
    """The metric is the sum of the weights that are evaluated."""

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.05)

    def eval_data(self) -> Any:
        return TensorDataset(*self.data()[:4])

    def eval_loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(sum_of(dict(model.named_parameters())), 1)


def sum_of(weights: dict[str, Tensor]) -> Tensor:
    full = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in weights.values()]
    return torch.stack([w.detach().double().sum() for w in full]).sum()


@pytest.mark.parametrize("strategy", ["zero1", pytest.param("fsdp", marks=pytest.mark.long)])
def test_what_is_evaluated_is_saved_and_exported(pool: Pool, tmp_path: Path, strategy: str) -> None:
    values = VALUES | {"run_dir": str(tmp_path / "run"), "strategy": strategy}
    (plain,) = pool.run(fit, Evaluated(), VALUES | {"run_dir": str(tmp_path / "plain")}, world=1)
    traces = pool.run(fit, Evaluated(), values | EVERY, world=2)

    # Evaluating and saving in every step changes nothing, up to the rounding of two ranks.
    weights = load_file(tmp_path / "run" / "model.safetensors")
    for name, weight in load_file(tmp_path / "plain" / "model.safetensors").items():
        assert torch.allclose(weights[name], weight, rtol=1e-4, atol=1e-6)

    # The file, the export of the checkpoint, and the evaluation have the average, which is not what is trained.
    exported = load_file(command.export(tmp_path / "run", choose(tmp_path / "run"), tmp_path / "export")[0])
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    assert float(sum_of(weights)) == pytest.approx(traces[0].summary["eval_loss"], rel=1e-6)
    assert not torch.allclose(weights["out.weight"], plain.steps[-1].weights["out.weight"], rtol=1e-4)


def test_a_resumed_run_has_the_same_bits(pool: Pool, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pool.run(fit, Evaluated(), VALUES | EVERY | {"run_dir": str(whole)}, world=1)
    for leave_at in (2, 5, None):
        settings = VALUES | {"run_dir": str(parts), "resume": "auto"}
        pool.run(leaving, Evaluated(), settings, leave_at, world=1)
    expected, found = load_file(whole / "model.safetensors"), load_file(parts / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
