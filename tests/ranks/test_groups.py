"""`optim.groups`: rates and options by the names of parameters, the same as groups made in code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lockstep.config import resolve
from lockstep.errors import ConfigError, UserError
from lockstep.observe.sinks import read_jsonl
from lockstep.optim.groups import apply_groups
from pool import Pool
from ranks.support import Perceptron, Regression, fit

VALUES = {"global_batch": 8, "micro_batch": 2, "steps": 5, "lr.peak": 0.02, "lr.schedule": "linear"}
RULES = [{"match": "out.*", "lr_scale": 0.1}, {"match": "*.bias", "weight_decay": 0.0, "lr_scale": 3.0}]


class ByRule(Regression):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)


class InCode(ByRule):
    """The same groups, in code. The first pattern that matches decides, so out.bias is not a bias here."""

    def optimizer(self, model: Any) -> Any:
        groups = [
            {"params": [model.hidden.weight]},
            {"params": model.out.parameters(), "lr": 0.001},
            {"params": [model.hidden.bias], "lr": 0.03, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.5)


@pytest.mark.parametrize("more", [{}, pytest.param({"strategy": "fsdp"}, marks=pytest.mark.long)])
def test_rules_do_what_groups_in_code_do(pool: Pool, tmp_path: Path, more: dict[str, Any]) -> None:
    values = VALUES | more | {"optim.groups": RULES, "run_dir": str(tmp_path), "checkpoint.every": 2}
    pool.run(fit, InCode(), VALUES | more | {"run_dir": str(tmp_path / "code")}, world=2)
    expected = load_file(tmp_path / "code" / "model.safetensors")
    pool.run(fit, ByRule(), values, world=2)
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    start = next(event for event in read_jsonl(tmp_path / "events.jsonl") if event["event"] == "start")
    assert start["facts"]["groups"] == (
        "out.* (2 parameters): lr x 0.1; *.bias (1 parameter): weight_decay 0.0, lr x 3.0"
    )

    # A resumed run has the same groups, and goes on with their moments.
    pool.run(fit, ByRule(), values | {"resume": str(tmp_path / "checkpoints" / "step-00000002")}, world=2)
    again = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(again[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([{"match": "haed.*", "lr_scale": 2.0}], "no parameter is called 'haed.*'"),
        ([{"match": "*", "lr_scale": 2.0}, {"match": "out.*", "lr": 1.0}], "'out.*' gets no parameters"),
        ([{"match": "out.*", "momentum": 0.9}], "sets momentum, which AdamW does not have"),
    ],
)
def test_rules_that_cannot_be_meant(rules: list[dict[str, Any]], words: str) -> None:
    model = Perceptron()
    with pytest.raises(UserError) as refused:
        apply_groups(rules, [torch.optim.AdamW(model.parameters())], model)
    assert words in str(refused.value)


def test_groups_that_know_the_names_of_their_parameters() -> None:
    model = Perceptron()
    groups = [{"params": list(part.named_parameters(prefix=name))} for name, part in model.named_children()]
    optimizer = torch.optim.AdamW(groups)
    apply_groups(RULES, [optimizer], model)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0, 1, 2]


def test_a_scheduler_that_was_made_before() -> None:
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(UserError, match="after a scheduler was made for it"):
        apply_groups(RULES, [optimizer], model)


@pytest.mark.parametrize(
    "values",
    [
        {"optim.groups": [{"match": "a", "lr": 0.1}], "lr.peak": 0.1},
        {"optim.groups": [{"match": "a"}]},
        {"optim.groups": [{"match": "a", "lr": 0.1, "lr_scale": 2}]},
        {"optim.groups": [{"match": "a", "lr": "fast"}]},
    ],
)
def test_settings_that_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"optim\.groups"):
        resolve([("test", values)])
