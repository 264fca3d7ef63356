"""The checkpoint manager in whole runs: any storage will do, such as one in memory; other runs are left alone."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from memory_storage import MemoryStorage
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint import load
from lockstep.checkpoint.loop_state import LoopState
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.checkpoint.manifest import encode
from lockstep.checkpoint.manifest_reader import read_manifest
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.saving.snapshot import BackgroundCopy
from lockstep.checkpoint.schedule import SaveSchedule
from lockstep.checkpoint.state.model_state import ModelState
from lockstep.checkpoint.storage import Checkpoint, FileSystemStorage, committed
from lockstep.config import flatten, resolve
from lockstep.config.changes import config_changes
from lockstep.config.settings import typed
from lockstep.engine.setup import run as run_setup
from lockstep.engine.setup.parts import Parts
from lockstep.errors import Preempted, UserError
from lockstep.launch.folder.checkpoint_names import MANIFEST
from lockstep.observe.sinks import read_jsonl
from lockstep.testing import fail_at


class Dropped(lockstep.Task):
    defaults = {"global_batch": 16, "steps": 12, "log": {"progress": "off"}}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def data(self) -> Any:
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(dim=1, keepdim=True))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(((model(x) - y) ** 2).sum(), weight=len(x))


def test_a_run_is_preempted_and_resumes_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = lockstep.fit(Dropped(), run_dir=tmp_path / "undisturbed")

    storage = MemoryStorage()
    monkeypatch.setattr(run_setup, "open_storage", lambda *_: storage)
    run_dir = tmp_path / "parts"
    with fail_at(how="term", step=4), pytest.raises(Preempted) as preempted:
        lockstep.fit(Dropped(), run_dir=run_dir)
    assert preempted.value.checkpoint is not None
    assert preempted.value.checkpoint.endswith("memory:checkpoints/step-00000005")
    resumed = lockstep.fit(Dropped(), run_dir=run_dir, resume="auto")

    assert [checkpoint.step for checkpoint in committed(storage)] == [12, 5]
    assert list((run_dir / "checkpoints").iterdir()) == []
    for name, weight in undisturbed.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


def test_a_preempted_run_names_its_checkpoint_without_listing_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: Any) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    settle = CheckpointManager.settle

    def settle_and_unmount(self: CheckpointManager) -> bool:
        settled = settle(self)
        if committed(self.storage):
            monkeypatch.setattr(FileSystemStorage, "folders", stale)
        return settled

    monkeypatch.setattr(CheckpointManager, "settle", settle_and_unmount)
    with fail_at(how="term", step=4), pytest.raises(Preempted) as preempted:
        lockstep.fit(Dropped(), run_dir=tmp_path)
    assert preempted.value.checkpoint == str(tmp_path / "checkpoints" / "step-00000005")


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        while True:
            yield torch.ones(4), torch.ones(1)


def test_data_that_cannot_skip_samples_is_named_if_the_policy_is_rewind(tmp_path: Path) -> None:
    class Streamed(Dropped):
        def data(self) -> Any:
            return Endless()

    with pytest.raises(UserError, match=r"spike.policy=rewind cannot be used with this data(.|\n)*StreamSource"):
        lockstep.fit(Streamed(), run_dir=tmp_path, spike={"policy": "rewind"})


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when the run waits for a copy in the background, which does not begin before that, or for 2 s."""
    waits = threading.Event()
    run, wait = BackgroundCopy.run, BackgroundCopy.wait
    monkeypatch.setattr(BackgroundCopy, "run", lambda copy: (waits.wait(2), run(copy)))
    monkeypatch.setattr(BackgroundCopy, "wait", lambda copy: (waits.set(), wait(copy)))
    return waits


def test_an_update_waits_until_the_state_of_the_optimizer_is_copied(tmp_path: Path, waits: threading.Event) -> None:
    """Otherwise the update would change what is copied."""
    lockstep.fit(Dropped(), run_dir=tmp_path, steps=6, checkpoint={"every": 5, "at_end": False})
    events = [event["event"] for event in read_jsonl(tmp_path / "events.jsonl")]
    assert waits.is_set()
    assert "checkpoint" in events
    assert "warning" not in events


def test_averages_do_not_change_while_they_are_copied(tmp_path: Path, waits: threading.Event) -> None:
    """They change after a skipped step too, in which no update waits for the copy."""
    with fail_at(how="nan", step=5):
        lockstep.fit(Dropped(), run_dir=tmp_path, steps=6, ema={"decay": 0.9}, checkpoint={"every": 5, "at_end": False})
    events = read_jsonl(tmp_path / "events.jsonl")
    assert waits.is_set()
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [5]


def test_a_save_that_is_committed_after_the_run_has_failed_is_recorded(tmp_path: Path) -> None:
    with fail_at(how="raise", step=5, phase="loss"), pytest.raises(RuntimeError):
        lockstep.fit(Dropped(), run_dir=tmp_path, checkpoint={"every": 5})
    events = [event for event in read_jsonl(tmp_path / "events.jsonl") if event["event"] in ("checkpoint", "error")]
    assert [event["event"] for event in events] == ["checkpoint", "error"]
    assert events[0]["step"] == 5
    assert (tmp_path / "checkpoints" / "step-00000005").is_dir()


def test_settings_saved_under_a_former_name_are_compared_under_the_present_one():
    config = resolve([("argument", {"load_balance": "auto"})]).config
    saved = {key: typed(value) for key, value in flatten(config).items()}
    value = saved.pop("load_balance")
    assert config_changes({**saved, "speed_weights": value}, config) == []
    (change,) = config_changes({**saved, "speed_weights": "none"}, config)
    assert str(change) == f"load_balance: none -> {value}"


def test_a_setting_that_the_checkpoint_lacks_is_shown_as_its_default():
    config = resolve([("argument", {"load_balance": "auto"})]).config
    saved = {key: typed(value) for key, value in flatten(config).items()}
    default = typed(flatten(resolve([]).config)["load_balance"])
    del saved["load_balance"]
    assert [str(change) for change in config_changes(saved, config)] == [f"load_balance: {default} -> auto"]


def test_the_state_of_the_loop_in_a_checkpoint_of_another_version():
    """A field that it lacks gets its default, and one that this version does not have is ignored."""
    assert LoopState.from_saved({"seconds": 3.0, "future": 1}) == LoopState(seconds=3.0)


def test_what_a_killed_attempt_has_written_does_not_count_as_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room for all checkpoints of the run once the uncommitted folder is deleted."""
    storage = MemoryStorage(capacity=200_000)
    storage.write("step-00000004.tmp-dead-1/rank-00000.safetensors", [memoryview(bytes(199_900))])
    monkeypatch.setattr(run_setup, "open_storage", lambda *_: storage)
    lockstep.fit(Dropped(), run_dir=tmp_path / "run")
    assert storage.folders() == ["step-00000012"]


def test_resuming_from_another_run_leaves_its_damaged_checkpoint_where_it_is(tmp_path: Path) -> None:
    lockstep.fit(Dropped(), run_dir=tmp_path / "other", checkpoint={"every": 6})
    folder = tmp_path / "other" / "checkpoints"
    file = folder / "step-00000012" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    lockstep.fit(Dropped(), run_dir=tmp_path / "new", resume=str(tmp_path / "other"))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    [warning] = [e["reason"] for e in read_jsonl(tmp_path / "new" / "events.jsonl") if e["event"] == "warning"]
    assert warning.startswith("checkpoint step-00000012 is damaged: ")
    assert warning.endswith("resuming from step-00000006")


def test_a_checkpoint_of_another_version_is_passed_over_and_kept(tmp_path: Path) -> None:
    lockstep.fit(Dropped(), run_dir=tmp_path, checkpoint={"every": 6})
    folder = tmp_path / "checkpoints"
    (folder / "step-00000012" / "manifest.json").write_text('{"format": 3}')
    lockstep.fit(Dropped(), run_dir=tmp_path, resume="auto")
    warning, kept = [e["reason"] for e in read_jsonl(tmp_path / "events.jsonl") if e["event"] == "warning"]
    assert warning.startswith("checkpoint step-00000012 was written by another version of Lockstep: manifest.json: ")
    assert warning.endswith("resuming from step-00000006")
    assert kept.startswith("checkpoint step-00000012, which was written by another version of Lockstep, is kept as ")
    assert kept.endswith("step-00000012.undone")
    assert {path.name for path in folder.glob("step-00000012*")} == {"step-00000012", "step-00000012.undone"}


def test_a_checkpoint_that_must_not_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lockstep.fit(Dropped(), run_dir=tmp_path, checkpoint={"every": 6})
    open_file = FileSystemStorage.open

    def refuse(self: FileSystemStorage, key: str) -> Any:
        if key == "step-00000012/rank-00000.safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", key)
        return open_file(self, key)

    monkeypatch.setattr(load, "LOOK_PAUSE_S", 0.0)
    monkeypatch.setattr(FileSystemStorage, "open", refuse)
    with pytest.raises(UserError, match=r"step-00000012 cannot be read\n.*Permission denied\n.*let this user read"):
        lockstep.fit(Dropped(), run_dir=tmp_path / "new", resume=str(tmp_path / "checkpoints" / "step-00000012"))

    lockstep.fit(Dropped(), run_dir=tmp_path, resume="auto")
    warning, kept = [e["reason"] for e in read_jsonl(tmp_path / "events.jsonl") if e["event"] == "warning"]
    assert warning.startswith("checkpoint step-00000012 cannot be read: rank-00000.safetensors: ")
    assert warning.endswith("Permission denied; resuming from step-00000006")
    assert kept == "checkpoint step-00000012, which cannot be read, is kept as step-00000012.undone"
    names = {path.name for path in (tmp_path / "checkpoints").glob("step-00000012*")}
    assert names == {"step-00000012", "step-00000012.undone"}


def test_nothing_is_added_to_checkpoints_that_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be saved, and never restored."""
    add = Parts.add
    parts: list[Parts] = []

    def keep(self: Parts, name: str, part: Any) -> None:
        parts.append(self)
        add(self, name, part)

    class Late(Dropped):
        def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
            parts[0].add("late", self)
            return super().loss(model, batch)

    monkeypatch.setattr(Parts, "add", keep)
    with pytest.raises(UserError, match="'late' cannot be saved with the run: its checkpoints are already open"):
        lockstep.fit(Late(), run_dir=tmp_path / "run", checks={"loss": "off"})


def test_a_save_is_aborted_for_the_reason_of_the_rank_where_it_arose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reason may begin with "rank", and one that only repeats another rank's is left out."""
    none = [None, False]
    failures = [["rank 2 wrote 8 bytes, but its file has 4", False], ["no space left", False], none]
    repeated = ["rank 1: no space left", True]
    managers: list[CheckpointManager] = []

    def keep(*args: Any, **options: Any) -> CheckpointManager:
        managers.append(CheckpointManager(*args, **options))
        return managers[0]

    monkeypatch.setattr(run_setup, "CheckpointManager", keep)
    lockstep.fit(Dropped(), run_dir=tmp_path / "run")
    [only] = managers
    reasons: list[str] = []
    only._pending._log_event = lambda event, reason: reasons.append(reason)
    for answers in (failures, [repeated, failures[1]], [repeated, none]):
        monkeypatch.setattr(only.runtime.collectives, "gather_json", lambda _, answers=answers: answers)
        assert only.abort_if_failed()
    assert [reason.partition("WRITTEN: ")[2].partition(". Training")[0] for reason in reasons] == [
        "rank 0: rank 2 wrote 8 bytes, but its file has 4; rank 1: no space left",
        "rank 1: no space left",
        "rank 1: no space left",
    ]


def test_training_continues_if_not_even_the_checkpoints_can_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: Any) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    class Unmounted(Dropped):
        def after_step(self, run: Any, result: Any) -> None:
            if run.steps_done == 3:
                monkeypatch.setattr(FileSystemStorage, "folders", stale)
                monkeypatch.setattr(FileSystemStorage, "write", stale)

    lockstep.fit(Unmounted(), run_dir=tmp_path, checkpoint={"every": 6})
    reasons = [e["reason"] for e in read_jsonl(tmp_path / "events.jsonl") if e["event"] == "warning"]
    assert len(reasons) == 2
    assert all("Training continues; the checkpoints cannot be listed: " in reason for reason in reasons)


def test_a_registered_part_never_replaces_one_of_the_run(tmp_path: Path) -> None:
    task = Dropped()
    model = task.model()
    with lockstep.start(global_batch=4, steps=1, exact=True, run_dir=tmp_path / "run") as run:
        run.register("exact", model)
        with pytest.raises(lockstep.UserError, match="'exact'"):
            run.setup(model, task.optimizer(model))


def test_a_task_may_have_a_method_that_is_called_read(tmp_path: Path) -> None:
    class Reads(Dropped):
        seen = torch.zeros(3)

        def read(self, path: Path) -> str:
            return path.read_text()

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    task = Reads()
    task.seen = torch.ones(3)
    lockstep.fit(task, run_dir=tmp_path, checkpoint={"every": 6})
    resumed = Reads()
    lockstep.fit(resumed, run_dir=tmp_path, resume="auto", steps=13)
    assert torch.equal(resumed.seen, torch.ones(3))


def test_the_space_for_tied_weights_is_counted_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    optimizers: Any = SimpleNamespace(masters=None)
    saved = ModelState(model, optimizers, (), True, bool)
    assert sum(tensor.nbytes for tensor in saved.tensors().values()) == 10 * 4 * 4


# ---- options that an optimizer adds in its step ----


class Counted(torch.optim.SGD):
    """Its rate falls with a counter that its first step() adds to the parameter groups."""

    def step(self, closure: Any = None) -> Any:
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["n"] = group.get("n", 0) + 1
            group["lr"] /= group["n"]

        result = super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate

        return result


class WithCounter(Dropped):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Counted(model.parameters(), lr=0.05)


def test_an_option_that_the_optimizer_has_added_continues_after_a_resume(tmp_path: Path) -> None:
    undisturbed = lockstep.fit(WithCounter(), run_dir=tmp_path / "undisturbed")
    with fail_at(how="term", step=4), pytest.raises(Preempted):
        lockstep.fit(WithCounter(), run_dir=tmp_path / "parts")

    resumed = lockstep.fit(WithCounter(), run_dir=tmp_path / "parts", resume="auto")
    for name, weight in undisturbed.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


def test_an_option_that_the_optimizer_has_added_goes_back_in_a_rewind(tmp_path: Path) -> None:
    counts: list[int | None] = []

    class Watched(WithCounter):
        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            self.made = super().optimizer(model)
            return self.made

        def after_step(self, run: Any, result: Any) -> None:
            counts.append(self.made.param_groups[0].get("n"))

    # It goes back to step 4, and in the other run to the beginning, where nothing had been added yet.
    for every, repeated in ((4, [5, 6]), (100, [1, 2, 3, 4, 5, 6])):
        counts.clear()
        with fail_at(how="nan", step=6):
            lockstep.fit(
                Watched(),
                run_dir=tmp_path / str(every),
                steps=8,
                nonfinite={"policy": "rewind"},
                checkpoint={"every": every},
            )
        applied = [1, 2, 3, 4, 5, 6]
        assert counts[:6] == applied
        assert counts[-len(repeated) - 2 :] == [*repeated, 7, 8]


# ---- a storage that fails ----


def stale(*_: Any) -> Any:
    raise OSError(errno.ESTALE, "Stale file handle")


class Evaluated(Dropped):
    def eval_data(self) -> Any:
        return self.data()


def test_an_evaluation_continues_if_the_best_checkpoint_cannot_be_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a save that failed, and at the end, when the best checkpoint is to be described and exported."""

    class Unmounted(Evaluated):
        def after_step(self, run: Any, result: Any) -> None:
            if run.steps_done == 3:
                monkeypatch.setattr(FileSystemStorage, "folders", stale)
                monkeypatch.setattr(FileSystemStorage, "write", stale)

    checkpoint = {"best": "eval_loss", "final": "best", "every": 4}
    result = lockstep.fit(Unmounted(), run_dir=tmp_path, evaluate={"every": 2}, checkpoint=checkpoint)
    reasons = [e["reason"] for e in read_jsonl(tmp_path / "events.jsonl") if e["event"] == "warning"]
    assert sum("the checkpoints cannot be listed (" in reason for reason in reasons) == 2
    assert result.best is None
    assert (tmp_path / "model.safetensors").exists()


def test_the_best_checkpoint_is_looked_up_again_when_the_storage_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    settings = resolve([("argument", {"checkpoint.best": "eval_loss"})]).config.checkpoint
    runtime: Any = SimpleNamespace(collectives=SimpleNamespace(run_on_rank0=lambda look: look()))
    schedule = SaveSchedule(settings, Retention(best="eval_loss"), storage, runtime)

    with monkeypatch.context() as unmounted:
        unmounted.setattr(storage, "folders", stale)
        assert not schedule.is_new_best({"eval_loss": 2.0})
    assert schedule.is_new_best({"eval_loss": 2.0})


def test_a_read_error_that_passes_does_not_cost_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lockstep.fit(Dropped(), run_dir=tmp_path, checkpoint={"every": 6})
    open_file = FileSystemStorage.open
    errors = [OSError(errno.EIO, "Input/output error")] * 2

    def fail_twice(self: FileSystemStorage, key: str) -> Any:
        if key == "step-00000012/rank-00000.safetensors" and errors:
            raise errors.pop()
        return open_file(self, key)

    monkeypatch.setattr(load, "LOOK_PAUSE_S", 0.0)
    monkeypatch.setattr(FileSystemStorage, "open", fail_twice)
    lockstep.fit(Dropped(), run_dir=tmp_path, resume="auto", steps=13)
    events = read_jsonl(tmp_path / "events.jsonl")
    assert not errors
    assert [event for event in events if event["event"] == "warning"] == []
    assert {path.name for path in (tmp_path / "checkpoints").glob("*.undone")} == set()


@pytest.mark.parametrize("missing", ["state", "config", "world", "plan"])
def test_a_checkpoint_that_lacks_a_value_is_refused_in_words(tmp_path: Path, missing: str) -> None:
    lockstep.fit(Dropped(), run_dir=tmp_path)
    checkpoint = Checkpoint.at(tmp_path / "checkpoints" / "step-00000012")
    manifest = read_manifest(checkpoint)
    del manifest.values[missing]
    checkpoint.storage.replace(f"{checkpoint.name}/{MANIFEST}", encode(manifest))

    with pytest.raises(UserError, match=f"cannot be resumed: it does not contain {missing}"):
        lockstep.fit(Dropped(), run_dir=tmp_path, resume="auto", steps=13)


class WithTeacher(Dropped):
    frozen: ClassVar[list[str]] = ["teacher", "critic"]

    def model(self) -> nn.Module:
        model = super().model()
        for name in self.frozen:
            model.register_module(name, nn.Identity())
            model.get_submodule(name).register_parameter("weight", nn.Parameter(torch.ones(2), requires_grad=False))
        return model


class WithoutCritic(WithTeacher):
    frozen: ClassVar[list[str]] = ["teacher"]


def test_a_frozen_parameter_that_the_model_no_longer_has_is_noticed(tmp_path: Path) -> None:
    values: Any = {"run_dir": tmp_path, "checkpoint": {"frozen": False}}
    lockstep.fit(WithTeacher(), **values)
    with pytest.raises(UserError, match=r"1 tensor missing in this model, first 'critic\.weight'"):
        lockstep.fit(WithoutCritic(), resume="auto", steps=13, **values)
