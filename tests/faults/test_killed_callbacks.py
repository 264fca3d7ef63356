"""Averages of weights, unfreezing, early stopping, the best checkpoint, sizes and the state of a callback, in a run
that is killed and changes its number of ranks: it ends at the same step, with the same bits, as one left alone."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from faults.runs import train
from faults.torture import EVERY, IN_A_STEP, digests
from lockstep.faults import Fault

TASK = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Loss, Task
from lockstep.callbacks import ProgressiveSizes, Unfreeze, crop_sequences


class Count:
    def __init__(self):
        self.losses = torch.zeros((), dtype=torch.float64)

    def after_step(self, run, result):
        self.losses = self.losses + result.loss
        run.log("steps", run.steps_done)

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]


class Kept(Task):
    def __init__(self, *, unfreeze: int = 5):
        self.unfreeze = unfreeze

    def model(self):
        head = [nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(8, 2)]
        return nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.Tanh(), *head)

    def data(self):
        x = torch.randn(96, 12, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, (x[:, :6].sum(1) > 0).long())

    def eval_data(self):
        return self.data()

    def loss(self, model, batch):
        x, y = batch
        return Loss(F.cross_entropy(model(x[:, None]), y, reduction="sum"), len(y))

    def eval_loss(self, model, batch):
        # One result never improves. The other is a number without a trend, so that the best one is somewhere inside.
        loss = self.loss(model, batch)
        jumps = (200 * model[4].weight[0].double().sum()).sin()
        return Loss(loss.total, loss.weight, {"best is first": (1, 1), "jumps": (jumps, 1)})

    def callbacks(self):
        return [Unfreeze({"0.*": self.unfreeze}), ProgressiveSizes({0: 6, 7: 12}, crop_sequences), Count()]
"""

WORDS = ("global_batch=12", "micro_batch=2", "exact=true", f"checkpoint.every={EVERY}", "log.every=2", "ema.decay=0.9")
WORDS += (
    "stop.metric=best is first",
    "evaluate.batch=32",
    "restart.per_hour=1000",
    "restart.max_in_a_row=1000",
    "lr.peak=0.01",
)

# An evaluation falls between two saves, and only the newest stays: the best is there because it is the best.
EVALUATE = 4
WORDS += (f"evaluate.every={EVALUATE}", "checkpoint.best=jumps", "checkpoint.keep=1", "checkpoint.final=best")


def planned(kills: int, first: int, last: int, ranks: int, best_saves: list[int]) -> list[Fault]:
    """Return kills of random ranks in random phases, spread over the steps from `first` to before `last`.

    Up to half of them hit rank 0 while it writes the best checkpoint so far.
    """
    draw = random.Random(ranks)
    steps = [step for step in best_saves if first < step < last][: (kills + 1) // 2]
    faults = [Fault("kill", 0, step, draw.choice(("write", "rename"))) for step in steps]

    others = kills - len(faults)
    steps = [first + 1 + number * (last - first - 2) // max(1, others) for number in range(others)]
    return faults + [Fault("kill", draw.randrange(ranks), step, draw.choice(IN_A_STEP)) for step in steps]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kills", "patience"), [(2, 3), pytest.param(20, 13, marks=pytest.mark.long)], ids=["a few kills", "twenty kills"]
)
def test_nothing_of_it_is_lost(tmp_path: Path, kills: int, patience: int) -> None:
    # By its metric the first evaluation is the best, and the run ends after `patience` more.
    end = (1 + patience) * EVALUATE
    words = (*WORDS, f"stop.patience={patience}", f"steps={2 * end}", f"task.unfreeze={end // 2}")
    for folder in (tmp_path / "alone", tmp_path / "torn"):
        folder.mkdir()
        (folder / "kept.py").write_text(TASK)

    alone = train(tmp_path / "alone", *words, target="kept.py:Kept", nproc=1)
    assert alone.code == 0, alone.output

    # Two ranks until they are preempted in the middle, then three; both are killed again and again.
    middle = end // 2 + 1
    half = kills // 2
    best_saves = [event["step"] for event in alone.events("checkpoint") if event["step"] % EVERY]
    faults = [*planned(half, 0, middle, 2, best_saves), Fault("term", rank=0, step=middle, phase="compute")]
    torn = train(tmp_path / "torn", *words, target="kept.py:Kept", nproc=2, faults=tuple(faults))
    assert torn.code == 75, torn.output
    faults = planned(kills - half, middle, end, 3, best_saves)
    torn = train(tmp_path / "torn", *words, "--resume", "auto", target="kept.py:Kept", nproc=3, faults=tuple(faults))
    assert torn.code == 0, torn.output

    # Every fault left its mark. A save goes on beside the steps, so two kills may have led to one restart.
    assert len(list((tmp_path / "torn").glob("marks-*/*/fired-*"))) == kills + 1
    assert len(torn.events("restart")) > kills // 2

    summaries = [json.loads((ended.run / "summary.json").read_text()) for ended in (alone, torn)]
    for key in ("step", "stopped", "eval_loss", "eval_metrics"):
        assert summaries[0][key] == summaries[1][key]
    best, also_best = (summary["best"] for summary in summaries)
    assert {**best, "checkpoint": ""} == {**also_best, "checkpoint": ""}
    assert EVALUATE < best["step"] < end
    assert (summaries[0]["step"], summaries[0]["stopped"][:13]) == (end, "best is first")
    for step in (None, best["step"]):
        assert digests(torn.run, step) == digests(alone.run, step)
    for file in ("model.safetensors", "ema.safetensors"):
        assert (torn.run / file).read_bytes() == (alone.run / file).read_bytes()
