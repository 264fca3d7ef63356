"""The checkpoint manager in whole runs: any store will do, such as one in memory; other runs are left alone."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from checkpoints import at, together
from memory_store import MemoryStore
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint import reader as reader_module
from lockstep.checkpoint.init_from import sources as sources_module
from lockstep.checkpoint.loading import resume as resume_module
from lockstep.checkpoint.loading import search as search_module
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.checkpoint.manifest import encode_manifest
from lockstep.checkpoint.manifest_reader import read_manifest
from lockstep.checkpoint.metrics import read_metrics
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.saving import pending as pending_module
from lockstep.checkpoint.saving.outcome import SaveFailed
from lockstep.checkpoint.saving.pending import PendingSave
from lockstep.checkpoint.saving.snapshot import Snapshot, SnapshotBuffer
from lockstep.checkpoint.state.encoding import CapturedTensor
from lockstep.checkpoint.state.model_state import ModelState
from lockstep.checkpoint.state.stateful import RegisteredState
from lockstep.checkpoint.storage import retry as retry_module
from lockstep.checkpoint.storage.folder import CheckpointStorage, list_checkpoints
from lockstep.checkpoint.storage.stores import allow_store
from lockstep.checkpoint.storage.transitions import delete_checkpoint
from lockstep.config import flatten, resolve
from lockstep.config.changes import config_changes
from lockstep.config.settings import typed
from lockstep.engine.setup import model as model_module
from lockstep.engine.setup import run as run_setup
from lockstep.errors import Preempted, UserError
from lockstep.launch.hangs.watchdog import STALL_S
from lockstep.observe.sinks import read_jsonl
from lockstep.run_folder.checkpoint_names import MANIFEST, draft_name
from lockstep.runtime.heartbeat import Heartbeat
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


def test_a_run_is_preempted_and_resumes_from_a_store_of_the_users(tmp_path: Path) -> None:
    """A setting is all that it needs: `memory_store.py` is any module of the user's."""
    undisturbed = lockstep.fit(Dropped(), run_dir=tmp_path / "undisturbed")

    run_dir = tmp_path / "parts"
    checkpoint = {"store": "memory_store:MemoryStore://bucket"}
    with fail_at(how="term", step=4), pytest.raises(Preempted) as preempted:
        lockstep.fit(Dropped(), run_dir=run_dir, checkpoint=checkpoint)
    assert preempted.value.checkpoint == str(run_dir / "checkpoints" / "step-00000005")
    resumed = lockstep.fit(Dropped(), run_dir=run_dir, resume="auto", checkpoint=checkpoint)

    storage = CheckpointStorage(run_dir / "checkpoints")
    assert [found.step for found in list_checkpoints(storage)] == [12, 5]
    assert list(storage.root.rglob("*.safetensors")) == []
    for name, weight in undisturbed.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


def test_a_preempted_run_names_its_checkpoint_without_listing_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: Any) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    settle = PendingSave.settle

    def settle_and_unmount(self: PendingSave) -> bool:
        was_aborted = settle(self)
        if list_checkpoints(self._context.storage):
            monkeypatch.setattr(CheckpointStorage, "folders", stale)
        return was_aborted

    monkeypatch.setattr(PendingSave, "settle", settle_and_unmount)
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

    with pytest.raises(UserError, match=r"spike.policy=rewind cannot be used with this data(.|\n)*StridedStreamSource"):
        lockstep.fit(Streamed(), run_dir=tmp_path, spike={"policy": "rewind"})


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when the run waits for a copy in the background, which does not begin before that, or for 2 s."""
    waits = threading.Event()
    complete, wait = Snapshot.complete, Snapshot.wait
    monkeypatch.setattr(Snapshot, "complete", lambda snapshot: (waits.wait(2), complete(snapshot)))
    monkeypatch.setattr(Snapshot, "wait", lambda snapshot: (waits.set(), wait(snapshot)))
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


def test_a_rewind_forgets_evaluations_of_the_steps_that_it_undoes(tmp_path: Path) -> None:
    """Step 6 is evaluated, step 7 goes back to 4, and step 6 is saved again without an evaluation."""
    task = Dropped()
    data = task.data()
    found: list[int] = []
    settings = {"steps": 7, "checkpoint": {"every": 4}, "nonfinite": {"policy": "rewind"}, "run_dir": tmp_path}
    with fail_at(how="nan", step=6), lockstep.start(global_batch=16, log={"progress": "off"}, **settings) as run:
        plain = task.model()
        model, _ = run.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        for step in run.steps(data):
            for batch in step:
                loss = task.loss(model, batch)
                step.backward(loss.total, weight=loss.weight)
            step.apply()
            found.append(run.steps_done)
            if found == [1, 2, 3, 4, 5, 6]:
                run.evaluate(data, task.loss)
            if found.count(5) == 2:
                run.save()

    assert found == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7]
    saved = at(tmp_path / "checkpoints" / "step-00000006")
    assert read_metrics(saved) == {}


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


@pytest.mark.parametrize(
    "loop",
    [{"clock": {"seconds": 1000.0, "future": 1}, "future": {"x": 1}}, None],
    ids=["some values", "no state of the loop"],
)
def test_the_state_of_the_loop_in_a_checkpoint_of_another_version(tmp_path: Path, loop: Any) -> None:
    """A value that it lacks gets its default, and one that this version does not have is ignored."""
    lockstep.fit(Dropped(), run_dir=tmp_path)
    checkpoint = at(tmp_path / "checkpoints" / "step-00000012")
    manifest = read_manifest(checkpoint)
    del manifest.values["loop"]
    manifest.values.update({"loop": loop} if loop else {})
    checkpoint.storage.replace(f"{checkpoint.name}/{MANIFEST}", encode_manifest(manifest))

    summary = lockstep.fit(Dropped(), run_dir=tmp_path, resume="auto", steps=13).summary
    assert summary["step"] == 13
    assert (summary["seconds"] > 1000) == (loop is not None)


class SmallStore(MemoryStore):
    capacity = 30_000


def test_what_a_killed_attempt_has_written_does_not_count_as_used(tmp_path: Path) -> None:
    """The store has room for all checkpoints of the run once the uncommitted folder is deleted."""
    url = "test_run_in_memory:SmallStore://bucket"
    allow_store("test_run_in_memory:SmallStore")
    storage = CheckpointStorage(tmp_path / "run" / "checkpoints", url)
    storage.write("step-00000004.tmp-dead-1/rank-00000.safetensors", [memoryview(bytes(29_900))])
    lockstep.fit(Dropped(), run_dir=tmp_path / "run", resume="auto", checkpoint={"store": url})
    assert storage.folders() == ["step-00000012"]


def test_the_folder_of_its_checkpoints_means_a_run(tmp_path: Path) -> None:
    """`lockstep ckpt ls` took it, and --resume refused it."""
    first = lockstep.fit(Dropped(), run_dir=tmp_path / "first")
    checkpoints = str(tmp_path / "first" / "checkpoints")
    for resume, run_dir in ((checkpoints, tmp_path / "first"), (checkpoints, tmp_path / "second")):
        assert lockstep.fit(Dropped(), run_dir=run_dir, resume=resume, steps=13).summary["step"] == 13

    started = lockstep.fit(Dropped(), run_dir=tmp_path / "third", steps=1, lr={"peak": 0.0}, init_from=checkpoints)
    run = lockstep.fit(
        Dropped(), run_dir=tmp_path / "fourth", steps=1, lr={"peak": 0.0}, init_from=str(tmp_path / "first")
    )
    assert all(torch.equal(started.weights[name], run.weights[name]) for name in first.weights)


class ChangesFolder(Dropped):
    def model(self) -> nn.Module:
        os.chdir("/")
        return super().model()


@pytest.mark.parametrize("own", [True, False], ids=["a run goes back", "another run"])
def test_a_relative_path_is_that_of_the_folder_in_which_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """It was read in the folder to which the user's code had changed, so there was no such checkpoint."""
    monkeypatch.chdir(tmp_path)
    lockstep.fit(Dropped(), run_dir="a", checkpoint={"every": 6})
    named = "a/checkpoints/step-00000006"
    lockstep.fit(ChangesFolder(), run_dir="a" if own else "b", resume=named)
    assert (tmp_path / "a" / "checkpoints" / "step-00000012.rewound").is_dir() == own

    monkeypatch.chdir(tmp_path)
    result = lockstep.fit(ChangesFolder(), run_dir="c", steps=1, init_from=named)
    assert result.summary["init_from"]["path"] == named


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


def test_a_damaged_checkpoint_that_init_from_passes_over_is_named(tmp_path: Path) -> None:
    """The run began with older weights than the newest ones, and nothing said so."""
    lockstep.fit(Dropped(), run_dir=tmp_path / "other", checkpoint={"every": 6})
    (tmp_path / "other" / "summary.json").unlink()  # it has not ended: its newest checkpoint is meant
    (tmp_path / "other" / "checkpoints" / "step-00000012" / "rank-00000.safetensors").write_bytes(b"")

    lockstep.fit(Dropped(), run_dir=tmp_path / "new", init_from=str(tmp_path / "other"), steps=1)
    [warning] = [e["reason"] for e in read_jsonl(tmp_path / "new" / "events.jsonl") if e["event"] == "warning"]
    assert warning.startswith("checkpoint step-00000012 is damaged: rank-00000.safetensors: has 0 bytes")
    assert warning.endswith("; init_from reads step-00000006")


def test_a_checkpoint_of_another_version_is_passed_over_only_on_demand_and_kept(tmp_path: Path) -> None:
    lockstep.fit(Dropped(), run_dir=tmp_path, checkpoint={"every": 6})
    folder = tmp_path / "checkpoints"
    (folder / "step-00000012" / "manifest.json").write_text('{"format": 6}')
    older = str(folder / "step-00000006")
    with pytest.raises(UserError, match=rf"step-00000012 was written by another version.*\n.*\n.*--resume {older}"):
        lockstep.fit(Dropped(), run_dir=tmp_path, resume="auto")
    assert {path.name for path in folder.glob("step-*")} == {"step-00000006", "step-00000012"}

    lockstep.fit(Dropped(), run_dir=tmp_path, resume=older)
    assert {path.name for path in folder.glob("step-00000012*")} == {"step-00000012", "step-00000012.rewound"}


def test_a_pause_between_two_tries_to_read_is_no_stall() -> None:
    """The launcher said that no rank advances, in the middle of a pause of a minute."""
    assert retry_module.MAX_PAUSE_S < STALL_S


@pytest.mark.parametrize("module", ["integrity", "reader"])
def test_a_long_verification_and_a_long_restore_are_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    """The phase has one limit, however large the checkpoint is: so each chunk that is read is a heartbeat."""
    lockstep.fit(Dropped(), run_dir=tmp_path, steps=6)
    beats: list[str] = []
    keep_alive = Heartbeat.keep_alive

    def count(self: Heartbeat) -> None:
        beats.append(self.phase)
        keep_alive(self)

    monkeypatch.setattr(Heartbeat, "keep_alive", count)
    monkeypatch.setattr(f"lockstep.checkpoint.{module}.CHUNK", 16)
    lockstep.fit(Dropped(), run_dir=tmp_path, resume="auto", steps=7)

    manifest = read_manifest(at(tmp_path / "checkpoints" / "step-00000006"))
    sizes = {
        "integrity": [file.size for file in manifest.files],
        "reader": [entry.bytes for entry in manifest.tensors.values()],
    }
    assert beats.count("load") >= sum(size // 16 for size in sizes[module])


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_checkpoint_that_cannot_be_read_is_neither_called_damaged_nor_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """It is waited for, except without permission, which does not change by itself."""
    lockstep.fit(Dropped(), run_dir=tmp_path, checkpoint={"every": 6})
    open_file = CheckpointStorage.open
    tried = 0

    def refuse(self: CheckpointStorage, key: str) -> Any:
        nonlocal tried
        if key == "step-00000012/rank-00000.safetensors":
            tried += 1
            raise OSError(number, os.strerror(number), key)
        return open_file(self, key)

    monkeypatch.setattr(retry_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(CheckpointStorage, "open", refuse)
    briefly = {"timeout": 0.5, "every": 6}
    named = str(tmp_path / "checkpoints" / "step-00000012")
    with pytest.raises(
        UserError, match=rf"step-00000012 cannot be read\n.*{os.strerror(number)}\n.*let this user read"
    ):
        lockstep.fit(Dropped(), run_dir=tmp_path / "new", resume=named, checkpoint=briefly)

    # To resume from the one before would lose progress, so only the user decides it: nothing was renamed.
    capsys.readouterr()
    tried = 0
    with pytest.raises(UserError, match=r"step-00000012 cannot be read\n.*\n.*--resume .*checkpoints/step-00000006"):
        lockstep.fit(Dropped(), run_dir=tmp_path, resume="auto", checkpoint=briefly)
    lines = [line for line in capsys.readouterr().err.splitlines() if "trying again" in line]
    if number == errno.EACCES:
        assert lines == []
        assert tried == 1
    else:
        [line] = lines
        assert f"step-00000012/rank-00000.safetensors: cannot be read: {os.strerror(number)}" in line
        assert line.endswith("; trying again for 0.5 s (checkpoint.timeout)")
        assert tried >= 2
    names = {path.name for path in (tmp_path / "checkpoints").glob("step-*")}
    assert names == {"step-00000006", "step-00000012"}

    lockstep.fit(Dropped(), run_dir=tmp_path, resume=str(tmp_path / "checkpoints" / "step-00000006"))
    names = {path.name for path in (tmp_path / "checkpoints").glob("step-00000012*")}
    assert names == {"step-00000012", "step-00000012.rewound"}


class Moment:
    """Lets errors occur after a checkpoint was found valid, while it is restored."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, times: int):
        self.left = 0
        open_file = CheckpointStorage.open

        def refuse(storage: CheckpointStorage, key: str) -> Any:
            if key.endswith(".safetensors") and self.left:
                self.left -= 1
                raise OSError(number, os.strerror(number), key)
            return open_file(storage, key)

        def wait(*arguments: Any) -> Any:
            self.left = 0
            reader = found(*arguments)
            self.left = times
            return reader

        found = search_module.wait_for_newest_valid
        for module in (resume_module, sources_module):
            monkeypatch.setattr(module, "wait_for_newest_valid", wait)
        monkeypatch.setattr(retry_module, "FIRST_PAUSE_S", 0.01)
        monkeypatch.setattr(CheckpointStorage, "open", refuse)


@pytest.mark.parametrize("start", ["resume", "init_from"])
@pytest.mark.parametrize("number", [errno.ECONNRESET, errno.ENOENT])
def test_a_restore_waits_for_storage_that_is_away_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], start: str, number: int
) -> None:
    """It was an error that is no UserError, and blamed `load_state_dict` or another version."""
    lockstep.fit(Dropped(), run_dir=tmp_path / "a")
    moment = Moment(monkeypatch, number, times=3)
    lockstep.fit(
        Dropped(), run_dir=tmp_path / "b", steps=13, **{start: str(tmp_path / "a" / "checkpoints" / "step-00000012")}
    )
    assert moment.left == 0
    assert re.search("rank-00000.safetensors: .*; trying again", capsys.readouterr().err)


@pytest.mark.parametrize(("number", "times"), [(errno.EIO, 10**9), (errno.EACCES, 1)])
def test_a_restore_gives_up_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> None:
    lockstep.fit(Dropped(), run_dir=tmp_path / "a")
    moment = Moment(monkeypatch, number, times)
    words = rf"step-00000012 cannot be read\n.*{os.strerror(number)}\n.*let this user"
    with pytest.raises(UserError, match=words) as error:
        lockstep.fit(Dropped(), run_dir=tmp_path / "b", resume=str(tmp_path / "a"), checkpoint={"timeout": 0.1})
    assert not getattr(error.value, "__notes__", [])
    assert times == 1 or moment.left < times - 2


def test_a_checkpoint_that_is_deleted_while_it_is_restored_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lockstep.fit(Dropped(), run_dir=tmp_path / "a")
    find = resume_module.wait_for_newest_valid

    def find_and_delete(storage: CheckpointStorage, *arguments: Any) -> Any:
        reader = find(storage, *arguments)
        delete_checkpoint(storage, "step-00000012", "other")
        return reader

    monkeypatch.setattr(resume_module, "wait_for_newest_valid", find_and_delete)
    with pytest.raises(UserError, match=r"step-00000012 has changed while it was restored\n.*missing"):
        lockstep.fit(Dropped(), run_dir=tmp_path / "b", resume=str(tmp_path / "a"))


def test_a_restore_gives_up_a_file_that_was_verified_and_does_not_appear_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lockstep.fit(Dropped(), run_dir=tmp_path / "a")
    moment = Moment(monkeypatch, errno.ENOENT, times=10**9)
    with pytest.raises(UserError, match=r"step-00000012 has changed while it was restored\n.*missing"):
        lockstep.fit(Dropped(), run_dir=tmp_path / "b", resume=str(tmp_path / "a"), checkpoint={"timeout": 0.1})
    assert moment.left < 10**9 - 2


def test_a_restore_reads_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is broken is opened again."""
    lockstep.fit(Dropped(), run_dir=tmp_path)
    checkpoint = at(tmp_path / "checkpoints" / "step-00000012")
    reader = CheckpointReader(checkpoint, read_manifest(checkpoint))
    expected = {name: reader.read(name) for name in reader.names()}
    reader = CheckpointReader(checkpoint, read_manifest(checkpoint), timeout_s=1.0)
    opened: list[Any] = []
    open_file = CheckpointStorage.open

    class Interrupted:
        """Reads twice, then never again."""

        def __init__(self, stream: Any):
            self.stream = stream
            self.left = 2

        def seek(self, *arguments: int) -> int:
            return self.stream.seek(*arguments)

        def readinto(self, memory: Any) -> int:
            if not self.left:
                raise ConnectionResetError(errno.ECONNRESET, "reset")
            self.left -= 1
            return self.stream.readinto(memory)

        def close(self) -> None:
            self.stream.close()

    def interrupted(self: CheckpointStorage, key: str) -> Any:
        opened.append(Interrupted(open_file(self, key)))
        return opened[-1]

    for name in reader.names():
        reader._locate(reader.stored_name(name), reader._entry(name).pieces[0])
    monkeypatch.setattr(reader_module, "CHUNK", 16)
    monkeypatch.setattr(retry_module, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(CheckpointStorage, "open", interrupted)
    with reader.keeping_open():
        found = {name: reader.read(name) for name in reader.names()}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(opened) > 2
    assert all(stream.stream.closed for stream in opened)


class Seen:
    """A callback without state until the first step is done."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def after_step(self, run: Any, result: Any) -> None:
        self.steps.append(run.steps_done)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps} if self.steps else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state.get("steps", ()))


def test_a_rewind_restores_state_that_was_empty_at_the_save(tmp_path: Path) -> None:
    """The steps that it undid were recorded twice."""
    seen = Seen()
    with fail_at(how="nan", step=4):
        lockstep.fit(Dropped(), run_dir=tmp_path, steps=6, nonfinite={"policy": "rewind"}, callbacks=[seen])
    assert seen.steps == [1, 2, 3, 4, 5, 6]
    assert [e["event"] for e in read_jsonl(tmp_path / "events.jsonl") if e["event"] in ("rewind", "warning")] == [
        "rewind"
    ]


class GainedState(Dropped):
    def state_dict(self) -> dict[str, Any]:
        return {"beta": 1.0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["beta"] == 1.0


def test_an_object_that_had_no_state_before_starts_from_the_beginning(tmp_path: Path) -> None:
    """Its `load_state_dict` gets no empty state, unlike in a rewind."""
    lockstep.fit(Dropped(), run_dir=tmp_path)
    lockstep.fit(GainedState(), run_dir=tmp_path, steps=13, resume="auto")


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_checkpoints_that_cannot_be_listed_for_init_from_are_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str
) -> None:
    """The first error of rank 0 ended the run, and the other ranks waited for it."""
    lockstep.fit(Dropped(), run_dir=tmp_path / "a")
    errors = [OSError(errno.ESTALE, "Stale file handle")] * 2
    listed = model_module.list_checkpoints

    def fail_twice(storage: CheckpointStorage) -> Any:
        if errors:
            raise errors.pop()
        return listed(storage)

    monkeypatch.setattr(retry_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(model_module, "list_checkpoints", fail_twice)
    lockstep.fit(Dropped(), run_dir=tmp_path / "b", steps=1, init_from=str(tmp_path / "a"), resume=resume)
    assert not errors


def test_nothing_is_added_to_checkpoints_that_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be saved, and never restored."""
    add = RegisteredState.add
    kept: list[RegisteredState] = []

    def keep(self: RegisteredState, name: str, *arguments: Any) -> None:
        kept.append(self)
        add(self, name, *arguments)

    class Late(Dropped):
        def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
            kept[0].add("late", self)
            return super().loss(model, batch)

    monkeypatch.setattr(RegisteredState, "add", keep)
    with pytest.raises(UserError, match="'late' cannot be saved with the run: its checkpoints are already open"):
        lockstep.fit(Late(), run_dir=tmp_path / "run", checks={"loss": "off"})


def test_a_save_is_aborted_for_the_reason_of_the_rank_where_it_arose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reason may begin with "rank", and one that only repeats another rank's is left out."""
    none = ["", False, False]
    failures = [["rank 2 wrote 8 bytes, but its file has 4", False, False], ["no space left", False, False], none]
    repeated = ["rank 1: no space left", True, False]
    managers: list[CheckpointManager] = []

    def keep(*args: Any, **options: Any) -> CheckpointManager:
        managers.append(CheckpointManager(*args, **options))
        return managers[0]

    monkeypatch.setattr(run_setup, "CheckpointManager", keep)
    lockstep.fit(Dropped(), run_dir=tmp_path / "run")
    [only] = managers
    reasons: list[str] = []
    only.pending._log_event = lambda event, reason: reasons.append(reason)
    for answers in (failures, [repeated, failures[1]], [repeated, none]):
        monkeypatch.setattr(only.pending, "save", SimpleNamespace(step=12, outcome=None, abort=str))
        monkeypatch.setattr(only._runtime.collectives, "all_gather_json", lambda _, answers=answers: answers)
        assert only.pending.abort_if_failed()
    assert [reason.partition("WRITTEN: ")[2].partition(". The run saves")[0] for reason in reasons] == [
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
                monkeypatch.setattr(CheckpointStorage, "folders", stale)
                monkeypatch.setattr(CheckpointStorage, "write", stale)

    lockstep.fit(Unmounted(), run_dir=tmp_path, checkpoint={"every": 6})
    reasons = [e["reason"] for e in read_jsonl(tmp_path / "events.jsonl") if e["event"] == "warning"]
    follows = ["Training continues", "The run saves once more before it ends", "The run ends without it"]
    for words, reason in zip(follows, reasons, strict=True):
        assert f"{words}; the checkpoints cannot be listed: " in reason


def test_a_save_that_failed_is_tried_again_after_a_pause_that_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run lost all steps up to the next save that was due: here it never is."""
    write = CheckpointStorage.write
    clock = SimpleNamespace(now=0.0)
    failing = range(30)

    class Away(Dropped):
        def after_step(self, run: Any, result: Any) -> None:
            clock.now += pending_module.RETRY_S
            monkeypatch.setattr(CheckpointStorage, "write", stale if run.steps_done in failing else write)
            if run.steps_done == 1:
                run.save()

    monkeypatch.setattr(pending_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    rules = {"minutes": None, "at_end": False, "asynchronous": False, "keep": 9}
    lockstep.fit(Away(), run_dir=tmp_path, steps=60, checkpoint=rules)

    # A step of this clock takes as long as the first pause. Three more pass from a try until its failure is known to
    # all ranks, and from the request for the next one until it is made.
    events = read_jsonl(tmp_path / "events.jsonl")
    reasons = [event["reason"] for event in events if event["event"] == "warning"]
    failed = [int(reason.split("STEP ")[1].split()[0]) for reason in reasons]
    pauses = [later - earlier for earlier, later in pairwise(failed)]
    assert [pause - 3 for pause in pauses] == [1, 2, 4, 8]

    # One of them succeeds, and is the last: nothing else was asked for.
    [step] = [found.step for found in list_checkpoints(CheckpointStorage(tmp_path / "checkpoints"))]
    assert failed[-1] < 30 <= step < 60


def test_a_run_that_does_not_save_by_its_settings_allocates_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It held pinned memory for the whole state of the run."""
    reserve = SnapshotBuffer.reserve
    reserved: list[int] = []

    def watched(self: SnapshotBuffer, shards: Any) -> Any:
        reserved.append(len(shards))
        return reserve(self, shards)

    monkeypatch.setattr(SnapshotBuffer, "reserve", watched)
    lockstep.fit(Dropped(), run_dir=tmp_path / "none", checkpoint={"minutes": None, "at_end": False})
    assert reserved == []
    lockstep.fit(Dropped(), run_dir=tmp_path / "at_end", checkpoint={"minutes": None})
    assert len(reserved) == 2


def pending_alone(tmp_path: Path, heartbeat: Heartbeat) -> PendingSave:
    """Return what follows the saves of a run of one rank, which logs nothing."""
    collectives = SimpleNamespace(all_gather_json=lambda value: [value])
    runtime: Any = SimpleNamespace(collectives=collectives, heartbeat=heartbeat)
    context: Any = SimpleNamespace(storage=CheckpointStorage(tmp_path))
    return PendingSave(context, runtime, lambda *_, **__: None, str)


def failed_save(abort: Callable[[str], Any] = str) -> Any:
    return SimpleNamespace(step=12, outcome=SaveFailed("the disk is full"), abort=abort)


def test_the_pause_after_a_thousand_saves_that_failed_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that stays full it was 8 hours after 10 failures, and an OverflowError ended the run at 1,024."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(pending_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    pending = pending_alone(tmp_path, Heartbeat(None))
    for _ in range(1100):
        pending.save = failed_save()
        assert pending.abort_if_failed()

    assert not pending.retry_due()
    clock.now = 1800.0
    assert pending.retry_due()


def test_a_rank_that_waits_for_a_slow_write_of_an_aborted_save_does_not_look_like_a_hang_of_the_step(
    tmp_path: Path,
) -> None:
    heartbeat = Heartbeat(None)
    heartbeat.beat("all-reduce", 3)
    phases = []
    pending = pending_alone(tmp_path, heartbeat)
    pending.save = failed_save(abort=lambda _: phases.append(heartbeat.phase))
    assert pending.abort_if_failed()
    assert [*phases, heartbeat.phase] == ["commit", "all-reduce"]


def test_a_registered_object_never_replaces_one_of_the_run(tmp_path: Path) -> None:
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
    tensors: dict[str, CapturedTensor] = {}
    saved.capture(tensors)
    assert sum(captured.tensor.nbytes for captured in tensors.values()) == 10 * 4 * 4


def test_a_run_that_goes_back_to_a_checkpoint_that_was_set_aside_keeps_the_one_in_its_place(tmp_path: Path) -> None:
    """The next save of this step deletes the one that has its name, which must not be of another history."""
    lockstep.fit(Dropped(), run_dir=tmp_path, checkpoint={"every": 4})
    folder = tmp_path / "checkpoints"
    again = {"run_dir": tmp_path, "checkpoint": {"every": 4}}
    lockstep.fit(Dropped(), resume=str(folder / "step-00000004"), steps=8, **again)
    replaced = (folder / "step-00000008" / MANIFEST).read_bytes()

    lockstep.fit(Dropped(), resume=str(folder / "step-00000008.rewound"), nonfinite={"policy": "rewind"}, **again)
    assert (folder / "step-00000008.rewound1" / MANIFEST).read_bytes() == replaced
    assert (folder / "step-00000008").exists()


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


def test_a_preemption_says_whether_its_save_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fail_at(how="term", step=4), pytest.raises(Preempted) as saved:
        lockstep.fit(Dropped(), run_dir=tmp_path / "saved")
    assert not saved.value.save_failed

    def refuse(*_: object) -> None:
        raise OSError("the disk coughed")

    monkeypatch.setattr(CheckpointStorage, "write", refuse)
    with fail_at(how="term", step=4), pytest.raises(Preempted) as failed:
        lockstep.fit(Dropped(), run_dir=tmp_path / "failed")
    assert failed.value.save_failed
    assert failed.value.checkpoint is None


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


class WithTensorOption(Dropped):
    """An option is a tensor, and the optimizer changes another one in place."""

    def __init__(self, decay: float):
        self.decay = decay

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        class Decayed(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                self.param_groups[0]["n"] += 1
                return super().step(closure)

        options = {"decay": torch.tensor(self.decay), "n": torch.tensor(0)}
        self.made = Decayed([{"params": list(model.parameters()), **options}], lr=0.05)
        return self.made


def test_an_option_that_is_a_tensor_is_compared_in_all_its_digits(tmp_path: Path) -> None:
    lockstep.fit(WithTensorOption(0.1), run_dir=tmp_path, steps=4)
    changed = WithTensorOption(0.10000001)
    lockstep.fit(changed, run_dir=tmp_path, steps=5, resume="auto")
    group = changed.made.param_groups[0]
    assert group["decay"] == torch.tensor(0.10000001)
    assert group["n"] == 5
    assert "group 0: decay 0.10000000149011612 -> 0.10000000894069672" in (tmp_path / "events.jsonl").read_text()


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
                monkeypatch.setattr(CheckpointStorage, "folders", stale)
                monkeypatch.setattr(CheckpointStorage, "write", stale)

    checkpoint = {"best": "eval_loss", "final": "best", "every": 4}
    result = lockstep.fit(Unmounted(), run_dir=tmp_path, evaluate={"every": 2}, checkpoint=checkpoint)
    reasons = [e["reason"] for e in read_jsonl(tmp_path / "events.jsonl") if e["event"] == "warning"]
    assert sum("the checkpoints cannot be listed (" in reason for reason in reasons) == 2
    assert result.best is None
    assert (tmp_path / "model.safetensors").exists()


def test_the_best_checkpoint_is_looked_up_again_when_the_storage_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = CheckpointStorage.folders

    class Unmounted(Evaluated):
        def after_step(self, run: Any, result: Any) -> None:
            # The evaluation of step 2 cannot look at the checkpoints; that of step 4 can.
            monkeypatch.setattr(CheckpointStorage, "folders", stale if run.steps_done < 3 else folders)

    checkpoint = {"best": "eval_loss", "at_end": False, "minutes": None}
    lockstep.fit(Unmounted(), run_dir=tmp_path, steps=4, evaluate={"every": 2}, checkpoint=checkpoint)
    assert [found.step for found in list_checkpoints(CheckpointStorage(tmp_path / "checkpoints"))] == [4]


def test_a_best_checkpoint_that_cannot_be_looked_up_is_said_once_for_each_time_it_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of the best evaluation is not saved then, and nothing said so."""
    folders = CheckpointStorage.folders

    class Unmounted(Evaluated):
        def after_step(self, run: Any, result: Any) -> None:
            # The checkpoints can be listed after step 3 alone.
            monkeypatch.setattr(CheckpointStorage, "folders", folders if run.steps_done == 3 else stale)

    checkpoint = {"best": "eval_loss", "at_end": False, "minutes": None, "asynchronous": False}
    lockstep.fit(Unmounted(), run_dir=tmp_path, steps=5, evaluate={"every": 1}, checkpoint=checkpoint)
    reasons = [event["reason"] for event in read_jsonl(tmp_path / "events.jsonl") if event["event"] == "warning"]
    assert len([reason for reason in reasons if "may be the best so far, but is not saved" in reason]) == 2


def test_the_time_that_training_waited_includes_the_wait_for_the_save_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = CheckpointStorage.write

    def write_slowly(self: CheckpointStorage, key: str, chunks: Any) -> None:
        time.sleep(0.5)
        write(self, key, chunks)

    monkeypatch.setattr(CheckpointStorage, "write", write_slowly)
    lockstep.fit(Dropped(), run_dir=tmp_path, steps=3, checkpoint={"every": 1})
    saved = [event for event in read_jsonl(tmp_path / "events.jsonl") if event["event"] == "checkpoint"]
    assert [event["stall_s"] > 0.3 for event in saved] == [False, True, True]


def test_metrics_of_a_save_that_was_aborted_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later evaluation is the best of all checkpoints, even if it is worse than the one whose save failed."""
    write = CheckpointStorage.write

    class Full(Evaluated):
        def after_step(self, run: Any, result: Any) -> None:
            monkeypatch.setattr(CheckpointStorage, "write", stale if run.steps_done < 3 else write)

    best = {"best": "eval_loss", "best_mode": "max", "at_end": False, "minutes": None, "asynchronous": False}
    result = lockstep.fit(Full(), run_dir=tmp_path, steps=4, evaluate={"every": 2}, checkpoint=best)
    events = read_jsonl(tmp_path / "events.jsonl")
    losses = [event["loss"] for event in events if event["event"] == "eval"]
    assert losses[0] > losses[1]
    assert [event["reason"].partition(" WAS NOT")[0] for event in events if event["event"] == "warning"] == [
        "THE CHECKPOINT OF STEP 2"
    ]
    assert result.best is not None
    assert result.best.step == 4


def test_a_read_error_that_passes_does_not_cost_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lockstep.fit(Dropped(), run_dir=tmp_path, checkpoint={"every": 6})
    open_file = CheckpointStorage.open
    errors = [OSError(errno.EIO, "Input/output error")] * 2

    def fail_twice(self: CheckpointStorage, key: str) -> Any:
        if key == "step-00000012/rank-00000.safetensors" and errors:
            raise errors.pop()
        return open_file(self, key)

    monkeypatch.setattr(retry_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(CheckpointStorage, "open", fail_twice)
    lockstep.fit(Dropped(), run_dir=tmp_path, resume="auto", steps=13)
    events = read_jsonl(tmp_path / "events.jsonl")
    assert not errors
    assert [event for event in events if event["event"] == "warning"] == []
    assert {path.name for path in (tmp_path / "checkpoints").glob("*.rewound")} == set()


def test_a_folder_that_cannot_be_listed_for_a_moment_is_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lockstep.fit(Dropped(), run_dir=tmp_path, steps=6)
    claimed = threading.Event()
    claim, folders = CheckpointManager._claim, CheckpointStorage.folders
    errors = [OSError(errno.EIO, "Input/output error")] * 2

    def claim_first(self: CheckpointManager) -> None:
        claim(self)
        claimed.set()

    def fail_twice(self: CheckpointStorage) -> list[str]:
        if claimed.is_set() and errors:
            raise errors.pop()
        return folders(self)

    monkeypatch.setattr(retry_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(CheckpointManager, "_claim", claim_first)
    monkeypatch.setattr(CheckpointStorage, "folders", fail_twice)
    lockstep.fit(Dropped(), run_dir=tmp_path, resume="auto", steps=7)
    assert not errors
    assert {path.name for path in (tmp_path / "checkpoints").glob("step-*")} == {"step-00000006", "step-00000007"}
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")].count(5) <= 1  # no step was repeated


def test_a_run_that_was_killed_between_two_renames_does_not_start_from_the_beginning(tmp_path: Path) -> None:
    """Its only checkpoint was being saved again: the old one has made way, and the new one has no name yet."""
    lockstep.fit(Dropped(), run_dir=tmp_path, steps=6, checkpoint={"keep": 1})
    folder = tmp_path / "checkpoints"
    draft = draft_name(6, (folder / "owner").read_text(), 9)
    shutil.copytree(folder / "step-00000006", folder / draft)
    (folder / "step-00000006").rename(folder / "step-00000006.replaced")

    trained: list[int] = []

    class Watched(Dropped):
        def after_step(self, run: Any, result: Any) -> None:
            trained.append(run.steps_done)

    lockstep.fit(Watched(), run_dir=tmp_path, steps=7, resume="auto", checkpoint={"keep": 1})
    assert trained == [7]
    assert not (folder / draft).exists()


@pytest.mark.parametrize("method", ["replace", "folders", "open"])
def test_a_storage_that_cannot_be_claimed_for_a_moment_is_claimed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The first error of rank 0 ended the run, and the other ranks waited for it."""
    lockstep.fit(Dropped(), run_dir=tmp_path, steps=6)
    call = getattr(CheckpointStorage, method)
    errors = [OSError(errno.ESTALE, "Stale file handle")] * 2

    def fail_twice(self: CheckpointStorage, *arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return call(self, *arguments)

    monkeypatch.setattr(retry_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(CheckpointStorage, method, fail_twice)
    lockstep.fit(Dropped(), run_dir=tmp_path, resume="auto", steps=7)
    assert not errors
    assert {path.name for path in (tmp_path / "checkpoints").glob("step-*")} == {"step-00000006", "step-00000007"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS])
def test_a_storage_that_stays_closed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Somebody must make room, or give the right: the run waited for ten minutes first."""
    tried = 0

    def refuse(*_: Any, **__: Any) -> None:
        nonlocal tried
        tried += 1
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(retry_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(CheckpointStorage, "replace", refuse)
    fix = "make room there" if number in (errno.ENOSPC, errno.EDQUOT) else "let this user write to the folder"
    problem = f"the checkpoints in {tmp_path}/checkpoints cannot be claimed"
    with pytest.raises(UserError, match=rf"{problem}\n.*{os.strerror(number)}\n.*{fix}, and try again"):
        lockstep.fit(Dropped(), run_dir=tmp_path, checkpoint={"timeout": 0.5})
    assert tried == 1


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("method", ["rename", "replace", "folders", "free_bytes"])
def test_checkpoints_that_cannot_be_set_aside_for_a_moment_are_set_aside_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, damaged: bool
) -> None:
    """The first error of rank 0 ended the run, and the other ranks waited for it."""
    lockstep.fit(Dropped(), run_dir=tmp_path, checkpoint={"every": 6})
    folder = tmp_path / "checkpoints"
    if damaged:
        (folder / "step-00000012" / "rank-00000.safetensors").write_bytes(b"")

    call = getattr(CheckpointStorage, method)
    claim = CheckpointManager._claim
    errors: list[OSError] = []

    def claim_first(self: CheckpointManager) -> None:
        claim(self)
        errors.extend([OSError(errno.ESTALE, "Stale file handle")] * 2)

    def fail_twice(self: CheckpointStorage, *arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return call(self, *arguments)

    monkeypatch.setattr(retry_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(CheckpointManager, "_claim", claim_first)
    monkeypatch.setattr(CheckpointStorage, method, fail_twice)
    resume = "auto" if damaged else str(folder / "step-00000006")
    lockstep.fit(Dropped(), run_dir=tmp_path, resume=resume, steps=7)
    assert not errors
    aside = "step-00000012.damaged" if damaged else "step-00000012.rewound"
    assert {path.name for path in folder.glob("step-*")} == {"step-00000006", "step-00000007", aside}
    assert (folder / "latest").read_text() == "step-00000007\n"


def test_a_storage_that_cannot_be_claimed_is_an_error_on_all_ranks() -> None:
    problem = "the checkpoints in FOLDER cannot be claimed"

    def on_rank(rank: int, gather: Any) -> Any:
        collectives = SimpleNamespace(all_gather_json=gather, run_on_rank0=lambda act: 0.0)
        runtime: Any = SimpleNamespace(is_main=rank == 0, collectives=collectives)
        retry_module.retry_on_rank0(runtime, 0.0, stale, problem)

    for answer in together(2, on_rank):
        assert isinstance(answer, retry_module.StorageUnavailable)
        assert answer.problem == problem
        assert answer.found == f"rank 0: [Errno {errno.ESTALE}] Stale file handle"
        assert answer.fix.startswith("let this user write to the folder, or wait")


@pytest.mark.parametrize("missing", ["state", "config", "world", "plan"])
def test_a_checkpoint_that_lacks_a_value_is_refused_in_words(tmp_path: Path, missing: str) -> None:
    lockstep.fit(Dropped(), run_dir=tmp_path)
    checkpoint = at(tmp_path / "checkpoints" / "step-00000012")
    manifest = read_manifest(checkpoint)
    del manifest.values[missing]
    checkpoint.storage.replace(f"{checkpoint.name}/{MANIFEST}", encode_manifest(manifest))

    with pytest.raises(UserError, match=f"cannot be resumed: it does not contain {missing}"):
        lockstep.fit(Dropped(), run_dir=tmp_path, resume="auto", steps=13)


def test_an_error_in_a_restore_keeps_its_type_and_names_the_checkpoint(tmp_path: Path) -> None:
    """It may be an error of the user's `load_state_dict`, or of this version, which needs its traceback."""
    lockstep.fit(Dropped(), run_dir=tmp_path)
    checkpoint = at(tmp_path / "checkpoints" / "step-00000012")
    manifest = read_manifest(checkpoint)
    del manifest.values["state"]["stepper"]
    checkpoint.storage.replace(f"{checkpoint.name}/{MANIFEST}", encode_manifest(manifest))

    with pytest.raises(KeyError, match="stepper") as error:
        lockstep.fit(Dropped(), run_dir=tmp_path, resume="auto", steps=13)
    wrote = f"version {manifest.lockstep} of Lockstep has written"
    assert f"raised while {checkpoint.path} was restored, which {wrote}" in error.value.__notes__


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


class Tested(WithTeacher):
    def eval_data(self) -> Any:
        return self.data()


@pytest.mark.parametrize("frozen", [True, False])
def test_the_best_weights_are_those_of_a_checkpoint_that_was_saved_with_or_without_frozen_ones(
    tmp_path: Path, frozen: bool
) -> None:
    """It was a KeyError at the end of a run that no longer keeps them, and they were missing if it keeps them now."""
    best = {"best": "eval_loss", "best_mode": "max", "final": "best"}
    values: Any = {"run_dir": tmp_path, "evaluate": {"every": 2}}
    lockstep.fit(Tested(), steps=4, checkpoint={**best, "frozen": frozen}, **values)
    first = load_file(tmp_path / "model.safetensors")

    result = lockstep.fit(Tested(), steps=8, resume="auto", checkpoint={**best, "frozen": not frozen}, **values)
    assert result.best is not None
    assert result.best.step == 2

    trained = {"0.weight", "0.bias", "2.weight", "2.bias"}
    now = load_file(tmp_path / "model.safetensors")
    assert first.keys() == (trained | {"teacher.weight", "critic.weight"} if frozen else trained)
    assert now.keys() == (trained if frozen else trained | {"teacher.weight", "critic.weight"})
    assert all(torch.equal(now[name], first[name]) for name in trained)
    assert all(torch.equal(now[name], torch.ones(2)) for name in now.keys() - trained)
    assert not [e for e in read_jsonl(tmp_path / "events.jsonl") if e["event"] == "warning"]


def test_a_frozen_parameter_that_the_best_checkpoint_lacks_must_not_have_changed(tmp_path: Path) -> None:
    """The weights of one file are of one step."""

    class Moving(Tested):
        def after_step(self, run: Any, result: Any) -> None:
            if run.steps_done == 7:
                run.model.get_parameter("teacher.weight").data.add_(1)

    best = {"best": "eval_loss", "best_mode": "max", "final": "best"}
    values: Any = {"run_dir": tmp_path, "evaluate": {"every": 2}}
    lockstep.fit(Tested(), steps=4, checkpoint={**best, "frozen": False}, **values)
    result = lockstep.fit(Moving(), steps=8, resume="auto", checkpoint={**best, "frozen": True}, **values)
    [warning] = [e["reason"] for e in read_jsonl(tmp_path / "events.jsonl") if e["event"] == "warning"]
    assert "step-00000002 does not hold the present value of 'teacher.weight'" in warning
    weights = load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights["teacher.weight"], torch.full((2,), 2.0))
    assert torch.equal(weights["0.weight"], result.weights["0.weight"])


class Noted(nn.Identity):
    def get_extra_state(self) -> Any:
        return {"a note": 1}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"a note": 1}


class WithNote(Dropped):
    def model(self) -> nn.Module:
        return nn.Sequential(*super().model(), Noted())


def test_a_module_with_extra_state_that_the_model_no_longer_has_is_named(tmp_path: Path) -> None:
    """It was an AttributeError, when the rest of the model was restored."""
    lockstep.fit(WithNote(), run_dir=tmp_path)
    lockstep.fit(WithNote(), run_dir=tmp_path, resume="auto", steps=13)
    with pytest.raises(UserError, match="the model differs") as error:
        lockstep.fit(Dropped(), run_dir=tmp_path, resume="auto", steps=14)
    assert error.value.found == "the module '3', which had extra state, is missing in this model"
