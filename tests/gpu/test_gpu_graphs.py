"""Recorded and replayed (CUDA graphs), a model trains as it does without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import UserError
from lockstep.observe.sinks import read_jsonl
from lockstep.recipes.hrm import TASK as HRM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: run it on one, see CONTRIBUTING.md")


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # No bias before BatchNorm, which cancels it: its gradient would be rounding, and Adam makes that large.
        first = nn.Linear(12, 32, bias=False)
        self.net = nn.Sequential(
            first, nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 12), nn.Linear(12, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(4, 32, num_layers=2, batch_first=True), nn.Linear(32, 1)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(self.frozen(x.view(len(x), 3, 4)))[0][:, -1])


class Looking(Dropping):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) if x.sum() > 0 else -self.net(-x)


class Fitting(lockstep.Task):
    defaults = {
        "global_batch": 16, "micro_batch": 8, "steps": 20, "precision": "fp32", "compile": False, "device": "cuda",
        "evaluate": {"every": 4, "batch": 8}, "log": {"progress": "off"}, "clip": {"norm": 1.0},
    }  # fmt: skip

    def __init__(self, kind: type[nn.Module]):
        self.kind, self.kept = kind, []

    def model(self) -> nn.Module:
        return self.kind()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, fused=True)

    def data(self) -> Any:
        numbers = torch.randn(64, 13, generator=torch.Generator().manual_seed(1))
        return TensorDataset(numbers[:, :12], numbers[:, 12:])

    def eval_data(self) -> Any:
        return TensorDataset(*(t[:32] for t in self.data().tensors))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        y = model(batch[0])
        if torch.is_grad_enabled():
            self.kept.append((y.detach(), y.detach().clone()))  # a replay must not write into what it has given away
        return lockstep.Loss((y - batch[1]).square().sum(), weight=len(y))

    eval_loss = loss


def told(folder: Path) -> list[str]:
    return [event["reason"] for event in read_jsonl(folder / "events.jsonl") if event["event"] == "graph"]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("kind", [Dropping, Recurrent])
@pytest.mark.parametrize("compiled", [False, True])
def test_training_does_not_notice(kind: type[nn.Module], compiled: bool, tmp_path: Path) -> None:
    if compiled and kind is Recurrent:
        pytest.skip("torch.compile leaves an LSTM as it is")
    plain = lockstep.fit(Fitting(kind), graph=False, compile=compiled, run_dir=tmp_path / "plain")
    task = Fitting(kind)
    found = lockstep.fit(task, graph=True, compile=compiled, run_dir=tmp_path / "graph")
    equal(plain.weights, found.weights)
    assert found.summary["eval_loss"] == pytest.approx(plain.summary["eval_loss"], rel=1e-5)
    assert [reason for reason in told(tmp_path / "graph") if reason.startswith("captured")]
    assert all(torch.equal(given, copy) for given, copy in task.kept)
    assert plain.summary["loss"] == pytest.approx(found.summary["loss"], rel=1e-5)


class Rooted(nn.Module):
    """A second result that no loss uses; where x is 0 its slope is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 8, bias=False), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self.first(x)
        return self.last(seen), seen.abs().sqrt()


class Unused(Fitting):
    def data(self) -> Any:
        x, y = super().data().tensors
        return TensorDataset(x * (torch.arange(len(x)) % 3 > 0)[:, None], y)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        y, _ = model(batch[0])
        return lockstep.Loss((y - batch[1]).square().sum(), weight=len(y))

    eval_loss = loss


def test_a_result_without_a_gradient_spoils_nothing(tmp_path: Path) -> None:
    plain = lockstep.fit(Unused(Rooted), graph=False, run_dir=tmp_path / "plain")
    found = lockstep.fit(Unused(Rooted), graph=True, run_dir=tmp_path / "graph")
    assert (found.summary["applied"], found.summary["skipped"]) == (20, 0)
    equal(plain.weights, found.weights)


def test_small_models_are_launch_bound_and_large_ones_are_not(tmp_path: Path) -> None:
    lockstep.fit(Fitting(Recurrent), run_dir=tmp_path / "small")
    assert any(reason.startswith("captured") for reason in told(tmp_path / "small")), told(tmp_path / "small")

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(12, 8192), nn.Linear(8192, 1)
            self.inner = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(2)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.inner(self.first(x.repeat(512, 1))))[: len(x)]

    lockstep.fit(Fitting(Wide), run_dir=tmp_path / "large", steps=10)
    assert "not launch-bound" in " ".join(told(tmp_path / "large")), told(tmp_path / "large")


def test_python_that_looks_at_the_data(tmp_path: Path) -> None:
    plain = lockstep.fit(Fitting(Looking), graph=False, run_dir=tmp_path / "plain")
    found = lockstep.fit(Fitting(Looking), run_dir=tmp_path / "auto")
    equal(plain.weights, found.weights, 0.0)
    assert "not captured" in told(tmp_path / "auto")[0]
    with pytest.raises(UserError, match="graph=auto"):
        lockstep.fit(Fitting(Looking), graph=True, run_dir=tmp_path / "must")


# A constant rate: a run that ends half-way must not have slowed down before it is resumed.
TINY = {
    "preset": "tiny", "device": "cuda", "steps": 12, "log": {"progress": "off", "every": 1}, "evaluate": {"every": 3},
    "lr": {"schedule": "constant", "warmup": 2},
}  # fmt: skip


def curve(folder: Path) -> tuple[dict[int, float], list[float]]:
    """Losses by step, and lengths of gradients, where known: an outcome comes a step later, the last two at once."""
    lines = list(read_jsonl(folder / "metrics.jsonl"))
    losses = {line["step"]: line["loss"] for line in lines if line["loss"] is not None}
    return losses, [line["grad_norm"] for line in lines if "grad_norm" in line]


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return sum(float((one[name].double() - other[name].double()).square().sum()) for name in one) ** 0.5


def test_puzzles_that_are_thought_about_for_several_steps(tmp_path: Path) -> None:
    """The recipe hrm, whose states go from step to step, with six micro-batches in each; and resumed half-way. Some
    kernels add in no fixed order, and the optimizer moves a weight as far by a small gradient as by a large one: so
    losses and lengths of gradients are compared closely, weights by how far they have come. A state that is not carried
    on changes losses by 2 %, a gradient that is 5 % too long lengths by 0.2 %."""
    exact = {**TINY, "precision": "fp32", "compile": False}
    plain = lockstep.fit(HRM, **exact, graph=False, run_dir=tmp_path / "plain")
    found = lockstep.fit(HRM, **exact, graph=True, run_dir=tmp_path / "graph")
    early = lockstep.fit(HRM, **{**exact, "steps": 6}, graph=True, run_dir=tmp_path / "half").weights
    again = lockstep.fit(HRM, **exact, graph=True, resume=str(tmp_path / "half"))
    assert any(reason.startswith("captured") for reason in told(tmp_path / "graph"))
    losses, lengths = curve(tmp_path / "plain")
    # The host waits for the outcome before an evaluation, every third step; one step later nothing new is known.
    assert list(losses) == [2, 3, 5, 6, 8, 9, 11, 12]
    assert curve(tmp_path / "graph")[1] == pytest.approx(lengths, rel=5e-4)
    for name, weights in {"graph": found.weights, "half": again.weights}.items():
        same = [step for step in losses if name == "graph" or step not in (6, 7)]  # where the first half ends
        assert {step: curve(tmp_path / name)[0][step] for step in same} == pytest.approx(
            {step: losses[step] for step in same}, rel=5e-5
        ), name
        assert curve(tmp_path / name)[1][-1] == pytest.approx(lengths[-1], rel=5e-4), name
        assert distance(plain.weights, weights) < 0.01 * distance(plain.weights, early), name


def test_compiled_in_16_bits(tmp_path: Path) -> None:
    low = {**TINY, "precision": "bf16", "compile": True}
    lockstep.fit(HRM, **low, graph=False, run_dir=tmp_path / "plain")
    lockstep.fit(HRM, **low, graph=True, run_dir=tmp_path / "graph")
    assert any(reason.startswith("captured") for reason in told(tmp_path / "graph"))
    assert curve(tmp_path / "graph")[0] == pytest.approx(curve(tmp_path / "plain")[0], rel=5e-3)
    assert curve(tmp_path / "graph")[1] == pytest.approx(curve(tmp_path / "plain")[1], rel=3e-2)
