"""What a run says about dropout, noise and BatchNorm where the micro-batches follow the number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.config import resolve
from lockstep.engine.log.rank_dependence import FirstDraws, advise, has_dropout, takes_batch_statistics
from lockstep.errors import UserError
from lockstep.plan.plan import Plan, make_plan
from lockstep.task import Loss, Task

QUIET = {"log": {"progress": "off"}, "checkpoint": {"at_end": False}}
VALUES = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))


class Chosen(Task):
    """A model with the layers that a test chooses, and a loss that draws noise if it says so."""

    def __init__(self, *layers: nn.Module, noise: bool = False):
        self.layers = layers
        self.noise = noise

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), *self.layers, nn.Linear(8, 1))

    def data(self) -> Any:
        return TensorDataset(VALUES)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        (x,) = batch
        return Loss((model(x + torch.randn_like(x) if self.noise else x) ** 2).sum(), len(x))


def said(task: Task, tmp_path: Path, **settings: Any) -> list[str]:
    """Return the lines of a run about micro-batches: that of the banner, and the notes after the first step."""
    values = {"global_batch": 16, "steps": 3, "run_dir": str(tmp_path / "run")} | settings
    run_dir = lockstep.fit(task, QUIET, **values).run_dir
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    banner = [event["facts"].get("micro-batches") for event in events if event["event"] == "start"]
    notes = [event["reason"] for event in events if event["event"] == "note"]
    return [line for line in (*banner, *notes) if line and "not checked" not in line]


ADVICE = "set micro_batch=4 for the same model on any number of ranks, up to 4"


@pytest.mark.parametrize(
    ("layers", "noise", "line"),
    [
        ([nn.Dropout(0.5)], False, f"dropout follows them: {ADVICE}"),
        ([nn.BatchNorm1d(8)], False, f"BatchNorm follows them: {ADVICE}"),
        ([nn.BatchNorm1d(8), nn.Dropout(0.5)], True, f"BatchNorm follow them: {ADVICE}"),
        ([], True, f"random numbers that are drawn in a step follow its micro-batches: {ADVICE}"),
        ([nn.RReLU()], False, f"random numbers that are drawn in a step follow its micro-batches: {ADVICE}"),
    ],
)
def test_one_line_whatever_follows_the_micro_batches(tmp_path: Path, layers: Any, noise: bool, line: str) -> None:
    (only,) = said(Chosen(*layers, noise=noise), tmp_path)
    assert only.endswith(line)


def test_what_overflows_in_fp16_follows_the_micro_batches(tmp_path: Path) -> None:
    (only,) = said(Chosen(), tmp_path, precision="fp16")
    assert only == f"what overflows in fp16 follows them: {ADVICE}"


@pytest.mark.parametrize("settings", [{"micro_batch": 4}, {"exact": True}, {"global_batch": None, "local_batch": 8}])
def test_no_line_where_the_micro_batches_do_not_follow_the_ranks(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert said(Chosen(nn.Dropout(0.5), noise=True), tmp_path, **settings) == []


@pytest.mark.parametrize("layers", [[], [nn.Dropout(0.0)], [nn.BatchNorm1d(8).eval()], [nn.LayerNorm(8)]])
def test_no_line_without_random_numbers_and_statistics(tmp_path: Path, layers: list[nn.Module]) -> None:
    assert said(Chosen(*layers), tmp_path) == []


def test_a_synchronised_batchnorm_follows_nothing() -> None:
    plain, synchronised = nn.BatchNorm1d(2), nn.SyncBatchNorm(2)
    config = resolve([("test", {"global_batch": 8, "steps": 1})]).config
    assert takes_batch_statistics(plain, config)
    assert takes_batch_statistics(nn.BatchNorm1d(2, track_running_stats=False).eval(), config)
    assert not takes_batch_statistics(synchronised, config)
    config = resolve([("test", {"global_batch": 8, "steps": 1, "ddp.sync_batchnorm": True})]).config
    assert not takes_batch_statistics(plain, config)


@pytest.mark.parametrize(
    ("global_batch", "ranks", "samples", "words"),
    [
        (64, 1, 1000, "set micro_batch=16 for the same model on any number of ranks, up to 4"),
        (64, 2, 1000, "set micro_batch=16 for the same model on any number of ranks, up to 4"),
        (64, 8, 1000, "set micro_batch=8 for the same model on any number of ranks, up to 8"),
        (10, 1, 1000, "set micro_batch=2 for the same model on any number of ranks, up to 5"),
        (10, 3, 1000, "set micro_batch=2 for the same model on any number of ranks, up to 5"),
        (3, 1, 1000, "set micro_batch=1 for the same model on any number of ranks, up to 3"),
        (64, 2, None, "in a stream they follow the number of ranks"),
    ],
)
def test_what_to_type_can_be_typed(global_batch: int, ranks: int, samples: int | None, words: str) -> None:
    settings = {"global_batch": global_batch, "steps": 1}
    plan = make_plan(resolve([("test", settings)]).config, ranks, samples)
    assert advise(plan) == words
    if samples:
        size, most = (int("".join(filter(str.isdigit, word))) for word in (words.split()[1], words.split()[-1]))
        config = resolve([("test", settings | {"micro_batch": size})]).config
        assert make_plan(config, most, samples).global_num_micro_batches >= most
        with pytest.raises(UserError):
            make_plan(config, most + 1, samples)


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(4, 4, num_layers=2, dropout=0.1),
        nn.GRU(4, 4, num_layers=2, dropout=0.1),
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1), 1, enable_nested_tensor=False),
        nn.Dropout1d(0.1),
    ],
)
def test_dropout_inside_a_module_is_found(module: nn.Module) -> None:
    assert has_dropout(nn.Sequential(nn.Linear(4, 4), module))


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(4, 4, num_layers=2),
        # It has dropout between layers only, and warns.
        pytest.param(lambda: nn.GRU(4, 4, dropout=0.1), marks=pytest.mark.filterwarnings("ignore:dropout option")),
        nn.MultiheadAttention(4, 2),
        nn.ModuleDict({"dropout": nn.Linear(1, 1)}),
    ],
)
def test_a_module_without_dropout_has_none(module: Any) -> None:
    assert not has_dropout(nn.Sequential(module if isinstance(module, nn.Module) else module()))


def test_only_the_first_step_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(FirstDraws, "before_forward", lambda self, micro, progress: looked.append(progress.step))
    monkeypatch.setattr(FirstDraws, "before_backward", lambda self, loss, progress: None)
    said(Chosen(), tmp_path)
    assert looked == [0]


def test_a_single_sample_cannot_be_divided() -> None:
    config = resolve([("test", {"global_batch": 1, "steps": 1})]).config
    plan: Plan = make_plan(config, 1, 10)
    assert not plan.follows_ranks(config)
