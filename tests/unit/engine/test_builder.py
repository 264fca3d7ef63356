"""What a run does and says before its first step."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.config import RunConfig
from lockstep.engine.setup.builder import tell_launcher
from lockstep.observe.sinks import read_jsonl
from lockstep.run_folder.names import EVENTS
from lockstep.runtime import attempt_folder
from lockstep.runtime.environments.launcher import ATTEMPT_FOLDER


def test_only_rank_0_tells_our_launcher_the_settings(tmp_path, monkeypatch):
    """Another rank may train a model alone: it is the main process of its own world then."""
    config = RunConfig(steps=1, global_batch=1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv(ATTEMPT_FOLDER, raising=False)
    tell_launcher(config)
    monkeypatch.setenv(ATTEMPT_FOLDER, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    tell_launcher(config)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RANK", "0")
    tell_launcher(config)
    assert attempt_folder.settings(tmp_path).exists()


class Ones(lockstep.Task):
    defaults = {"global_batch": 4, "steps": 2, "log.progress": "off"}

    def model(self):
        return nn.Linear(1, 1)

    def data(self):
        return TensorDataset(torch.ones(8, 1))

    def loss(self, model, batch):
        return lockstep.Loss(model(batch[0]).sum(), weight=len(batch[0]))


def test_a_run_without_a_checkpoint_to_resume_says_that_it_starts_from_its_beginning(tmp_path):
    lockstep.fit(Ones(), run_dir=str(tmp_path / "new"))
    for steps in (2, 4):
        lockstep.fit(Ones(), run_dir=str(tmp_path / "auto"), resume="auto", steps=steps)

    said = []
    for run in ("new", "auto"):
        starts = [record for record in read_jsonl(tmp_path / run / EVENTS) if record["event"] == "start"]
        said += [(start["facts"].get("resume"), "resumed" in start["facts"]) for start in starts]

    beginning = f"no checkpoint in {tmp_path / 'auto'}, so the run starts from its beginning"
    assert said == [(None, False), (beginning, False), (None, True)]
