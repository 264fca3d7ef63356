"""One rank runs out of memory: no rank hangs, and the error says what to type; or the run continues with less."""

import json
from pathlib import Path
from textwrap import dedent

from faults.runs import train

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from lockstep import Loss, Task

class Tight(nn.Linear):
    "Memory for this many samples at once; from the step on in which rank 1 has seen `after` of them."
    seen = 0

    def forward(self, x):
        self.seen += len(x)
        if self.fits is not None and len(x) > self.fits and self.seen > self.after and self.training:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
                                         "of 8.00 GiB of which 1.00 GiB is free.")
        return super().forward(x)

class Hungry(Task):
    defaults = {"global_batch": 16, "steps": 6, "device": "cpu", "checkpoint.every": 1, "log.progress": "off"}

    def __init__(self, fits=None, after=0):
        self.fits, self.after = fits, after

    def model(self):
        import os
        model = Tight(4, 1)
        model.fits, model.after = self.fits if os.environ.get("RANK") == "1" else None, self.after
        return model

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def data(self):
        return TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))

    def loss(self, model, batch):
        return Loss(model(batch[0]).square().sum(), len(batch[0]))
"""


def hungry(folder: Path, *words: str):
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(dedent(TASK))
    return train(folder, *words, target="task.py:Hungry")


def test_one_rank_out_of_memory_ends_the_run_with_advice(tmp_path):
    ended = hungry(tmp_path, "task.fits=4", "task.after=16")
    assert ended.code == 2
    assert "lockstep: step 3 with micro-batches of 8 does not fit into memory\n" in ended.output
    assert "out of memory: 2.0 GiB wanted, 1.0 GiB free; it holds parameters 20 B, gradients " in ended.output
    assert "in order: micro_batch=4; strategy=fsdp (about " in ended.output
    assert "Traceback" not in ended.output
    assert not ended.events("restart")


def test_auto_goes_on_one_size_down_with_the_same_global_batch(tmp_path):
    usual = hungry(tmp_path / "usual", "micro_batch=2")
    assert usual.code == 0, usual.output
    ended = hungry(tmp_path / "auto", "micro_batch=auto", "task.fits=2", "task.after=16")
    assert ended.code == 0, ended.output
    assert len(ended.events("restart")) == 2  # 8 -> 4 -> 2
    assert ended.events("restart")[0]["step"] is not None  # from a checkpoint, not from the beginning
    assert json.loads((ended.run / "micro_batch.json").read_text()) == {"micro_batch": 2}
    plan = json.loads((ended.run / "plan.json").read_text())
    assert (plan["micro_batch"], plan["global_batch"], plan["accumulation"]) == (2, 16, 4)
    losses = [json.loads((run / "summary.json").read_text())["loss"] for run in (usual.run, ended.run)]
    assert abs(losses[0] - losses[1]) < 1e-5 * losses[0]
    assert "continuing with micro-batches of 4" in ended.output
    assert "(not counted as a restart)" in ended.output
    assert "Traceback" not in ended.output
