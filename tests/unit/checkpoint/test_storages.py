"""The storage of checkpoints, with their tensors as files of the run, or in a store of the user's."""

from __future__ import annotations

import errno
import math
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import TOKEN, commit, is_committed, load, same, savers, shard, state
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryStore
from pydantic import ValidationError
from storage_contract import StorageContract, put

from lockstep.checkpoint import metrics as metrics_module
from lockstep.checkpoint.metrics import CheckpointMetrics
from lockstep.checkpoint.preflight import check_store
from lockstep.checkpoint.retention import best_checkpoint, steps_to_delete
from lockstep.checkpoint.saving.save import Saver
from lockstep.checkpoint.state.reshard import RankContents
from lockstep.checkpoint.storage import durable, folder
from lockstep.checkpoint.storage.durable import CHUNK, PAGE, split
from lockstep.checkpoint.storage.folder import Checkpoint, CheckpointStorage, list_checkpoints
from lockstep.checkpoint.storage.retry import StorageUnavailable
from lockstep.checkpoint.storage.stores import allow_store
from lockstep.checkpoint.storage.transitions import delete_leftovers, set_aside_later
from lockstep.config.sections import CheckpointConfig
from lockstep.errors import UserError
from saved import newest_step


class TestWithoutAStore(StorageContract):
    def url(self, tmp_path: Path) -> None:
        return None


class TestMemoryStore(StorageContract):
    def url(self, tmp_path: Path) -> str:
        return "memory_store:MemoryStore://bucket"


class FullStore(MemoryStore):
    capacity = 30_000


def test_a_full_store_costs_a_checkpoint_and_nothing_else(tmp_path):
    allow_store("test_storages:FullStore")
    storage = CheckpointStorage(tmp_path, "test_storages:FullStore://bucket")
    commit(storage, 1)
    [saver] = savers(storage)
    saver.copy_and_write(2, RankContents(shard({"x": torch.ones(10_000)}, 0, 1)))
    [report] = saver.take_ended()
    assert "no space left on the disk of test_storages:FullStore://bucket" in report.outcome.reason
    assert same(load(storage)[1], state(1))


# ---- the file system ----


class SlowStore(MemoryStore):
    """A store that does not answer. The error of fsspec for this has no message."""

    def write(self, url: str, chunks: Iterable[memoryview]) -> None:
        raise TimeoutError


def one_rank() -> Any:
    """Return the runtime of a run on one rank, whose time to wait is over."""
    collectives = SimpleNamespace(all_gather_json=lambda value: [value], run_on_rank0=lambda act: 0.0)
    return SimpleNamespace(is_main=True, collectives=collectives)


def test_a_store_whose_error_has_no_message_keeps_nothing(tmp_path):
    allow_store("test_storages:SlowStore")
    storage = CheckpointStorage(tmp_path, "test_storages:SlowStore://bucket")
    with pytest.raises(StorageUnavailable, match="cannot be kept in test_storages:SlowStore://bucket") as caught:
        check_store(storage, one_rank(), 0.0)
    assert caught.value.found == "rank 0: TimeoutError"


def test_a_store_that_does_not_exist_is_named_even_if_its_error_has_no_message(tmp_path, monkeypatch):
    def missing(*_):
        raise FileNotFoundError

    monkeypatch.setattr(MemoryStore, "write", missing)
    storage = CheckpointStorage(tmp_path, "memory_store:MemoryStore://bucket")
    allow_store("memory_store:MemoryStore")
    with pytest.raises(UserError, match=r"set checkpoint\.store to a store that exists") as caught:
        check_store(storage, one_rank(), 0.0)
    assert caught.value.found == "FileNotFoundError"


def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path, monkeypatch):
    """Even if the error has no message."""

    def slow(_):
        raise TimeoutError

    commit(CheckpointStorage(tmp_path), 1)
    monkeypatch.setattr(CheckpointStorage, "folders", slow)
    with pytest.raises(StorageUnavailable):
        load(tmp_path)


def test_latest_is_for_people(tmp_path):
    assert newest_step(tmp_path) is None
    commit(tmp_path, 7)
    commit(tmp_path, 9)
    assert newest_step(tmp_path) == 9
    (tmp_path / "latest").write_text("step-garbage")
    assert newest_step(tmp_path) == 9


def test_a_start_deletes_temporary_files_of_writers_that_were_killed_and_no_others(tmp_path):
    storage = CheckpointStorage(tmp_path)
    for name in (".latest.00112233.tmp", ".owner.0a1b2c3d.tmp", ".latest.live.tmp", "unrelated"):
        (tmp_path / name).touch()

    hour_ago = time.time() - 3600
    for name in (".latest.00112233.tmp", ".owner.0a1b2c3d.tmp", "unrelated"):
        os.utime(tmp_path / name, (hour_ago, hour_ago))

    commit(storage, 1)
    delete_leftovers(storage, TOKEN)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"latest", "owner", "step-00000001", "unrelated", ".latest.live.tmp"}


@pytest.mark.parametrize("key", ["owner", "step-00000001/metrics.json"])
@pytest.mark.parametrize("same_pid", [False, True])
def test_two_processes_may_replace_the_same_file_at_once(tmp_path, monkeypatch, key, same_pid):
    """The second deleted the temporary file of the first, or wrote to the same one: in containers, with equal pids."""
    real = folder.write_all

    def write_all(handle: int, data: memoryview, position: int = 0) -> None:
        """Write a half, let another process replace the file, and write the rest."""
        monkeypatch.setattr(folder, "write_all", real)
        half = len(data) // 2
        real(handle, data[:half], position)
        with monkeypatch.context() as other:
            if not same_pid:
                other.setattr(os, "getpid", lambda: 4)

            CheckpointStorage(tmp_path).replace(key, b"second, and longer")
            assert (tmp_path / key).read_bytes() == b"second, and longer"

        real(handle, data[half:], half)

    monkeypatch.setattr(folder, "write_all", write_all)
    CheckpointStorage(tmp_path).replace(key, b"the first")
    assert (tmp_path / key).read_bytes() == b"the first"
    assert [path.name for path in (tmp_path / key).parent.iterdir()] == [Path(key).name]


@pytest.mark.parametrize("key", ["folder/file", "file"])
def test_a_replacement_that_fails_leaves_the_old_file_and_no_temporary_file(tmp_path, monkeypatch, key):
    storage = CheckpointStorage(tmp_path)
    storage.replace(key, b"old")

    def broken(*paths: object) -> None:
        raise OSError(errno.EIO, "the disk coughed")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="coughed"):
        storage.replace(key, b"new")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [(path.name, path.read_bytes()) for path in files] == [("file", b"old")]


def test_a_folder_that_another_rank_removes_while_it_is_empty_is_made_again(tmp_path, monkeypatch):
    """A rank whose part has failed deletes its files, and with the last one the folder that rank 0 has just made."""
    real, removed = Path.mkdir, []

    def mkdir(path: Path, *arguments: object, **options: object) -> None:
        real(path, *arguments, **options)
        if path.name == "folder" and len(removed) < 3:
            path.rmdir()
            removed.append(path)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    storage = CheckpointStorage(tmp_path)
    put(storage, "folder/file", b"1")
    assert len(removed) == 3
    assert storage.open("folder/file").read() == b"1"


def test_a_pipe_in_place_of_a_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "file")
    with pytest.raises(OSError, match="not a regular file"):
        CheckpointStorage(tmp_path).open("file")


def test_a_store_in_a_folder_says_how_much_is_free_and_any_other_does_not(tmp_path, monkeypatch):
    """Any URL had room for everything, so that a full disk was noticed only by the first save."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free={tmp_path: 7}[folder]))
    assert CheckpointStorage(Path("/elsewhere"), f"file://{tmp_path}/bucket").free_bytes() == 7
    assert CheckpointStorage(tmp_path, "memory://bucket").free_bytes() is None


class SmallStore(MemoryStore):
    """A store that knows how much room it has."""

    def free_bytes(self, url: str) -> int:
        if "broken" in url:
            raise ValueError("the room is not known")

        return "much" if "text" in url else 11  # pyrefly: ignore[bad-return]


def test_a_store_of_the_users_may_say_how_much_is_free(tmp_path):
    allow_store(f"{__name__}:SmallStore")
    url = f"{__name__}:SmallStore://bucket"
    assert CheckpointStorage(tmp_path, url).free_bytes() == 11


@pytest.mark.parametrize("folder", ["broken", "text"])
def test_a_store_that_does_not_say_how_much_is_free_costs_no_checkpoint(tmp_path, folder):
    """The attribute of a user's class may mean something else."""
    allow_store(f"{__name__}:SmallStore")
    storage = CheckpointStorage(tmp_path, f"{__name__}:SmallStore://{folder}")
    assert storage.free_bytes() is None
    commit(storage, 1)
    assert same(load(storage)[1], state(1))


def test_free_bytes_of_a_folder_that_is_not_there_yet(tmp_path):
    missing = CheckpointStorage(tmp_path / "a" / "b")
    assert missing.free_bytes() == pytest.approx(CheckpointStorage(tmp_path).free_bytes(), rel=0.5)
    assert missing.folders() == []


# ---- bytes on their way to the disk ----


@given(st.integers(0, 5 * PAGE) | st.integers(2 * CHUNK - PAGE, 2 * CHUNK + PAGE) | st.integers(0, 3 * CHUNK))
def test_chunks_make_up_the_whole_and_end_at_pages(size):
    data = memoryview(bytes(size))
    lengths = [len(chunk) for chunk in split(data)]
    assert sum(lengths) == size
    assert all(0 < length <= CHUNK for length in lengths)
    assert all(length % PAGE == 0 for length in lengths[:-1])
    assert size < PAGE or lengths[-1] % PAGE == 0 or lengths[-1] < PAGE


LARGE = {
    "a": torch.randn(900_001),
    "b": torch.arange(700_003, dtype=torch.int16),
    "c": torch.ones(11, dtype=torch.bool),
}


def test_large_files_are_written_directly_and_are_the_same(tmp_path, monkeypatch):
    direct, written = [], durable._write_directly
    monkeypatch.setattr(durable, "_write_directly", lambda *call: direct.append(written(*call)) or direct[-1])
    commit(tmp_path, 1, tensors=LARGE)
    assert direct  # it was tried; whether it can be done depends on the disk
    assert same(load(tmp_path)[1], LARGE)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EFAULT])
def test_a_disk_that_cannot_write_directly_gets_the_same_file(tmp_path, monkeypatch, number):
    real = os.pwrite

    def pwrite(handle: int, data: memoryview, position: int) -> int:
        if len(data) >= 1 << 20 and position > 0 and not refused:
            refused.append(real(handle, data[:PAGE], position))  # some of it may even have been written
            raise OSError(number, os.strerror(number))
        return real(handle, data, position)

    refused: list[int] = []
    monkeypatch.setattr(os, "pwrite", pwrite)
    commit(tmp_path, 1, tensors=LARGE)
    assert refused
    assert same(load(tmp_path)[1], LARGE)


# ---- retention ----


def test_what_stays():
    losses = [(10, 3.0), (20, 1.0), (30, math.nan), (40, 2.0), (50, 1.0), (60, None), (70, 5.0)]
    known = {step: {"loss": loss} for step, loss in losses}
    assert steps_to_delete(known, CheckpointConfig(keep=3)) == [10, 20, 30, 40]
    assert steps_to_delete(known, CheckpointConfig(keep=1, keep_every=20)) == [10, 30, 50]
    # Of equals, the newest.
    assert steps_to_delete(known, CheckpointConfig(keep=1, best="loss")) == [
        10,
        20,
        30,
        40,
        60,
    ]  # of equals, the newest
    assert steps_to_delete(known, CheckpointConfig(keep=1, best="loss", best_mode="max")) == [10, 20, 30, 40, 50, 60]
    assert steps_to_delete(known, CheckpointConfig(keep=1, best="accuracy")) == [10, 20, 30, 40, 50, 60]
    assert steps_to_delete({5: {}}, CheckpointConfig(keep=1)) == []
    for mode in ("min", "max"):
        unclear = {10: {"loss": 1.0}, 20: {"loss": math.nan}, 30: {"loss": math.nan}}
        assert steps_to_delete(unclear, CheckpointConfig(keep=1, best="loss", best_mode=mode)) == [20]


@pytest.mark.slow
@given(
    steps=st.sets(st.integers(0, 100)),
    keep=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 10),
    best=st.none() | st.just("loss"),
    best_mode=st.sampled_from(["min", "max"]),
    data=st.data(),
)
def test_the_newest_always_stays(steps, keep, keep_every, best, best_mode, data):
    numbers = st.floats() | st.none() | st.text(max_size=1)
    known = {step: data.draw(st.dictionaries(st.just("loss"), numbers)) for step in steps}
    doomed = steps_to_delete(known, CheckpointConfig(keep=keep, keep_every=keep_every, best=best, best_mode=best_mode))
    assert len(set(doomed)) == len(doomed)
    assert set(doomed) <= steps - set(sorted(steps)[-keep:])
    if keep_every:
        assert not [step for step in doomed if step % keep_every == 0]


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"keep_every": 0}])
def test_rules_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValidationError):
        CheckpointConfig(**wrong)


def test_retention_is_applied_after_each_commit(tmp_path):
    [saver] = savers(tmp_path, settings=CheckpointConfig(keep=1, best="loss"))
    for step, loss in [(1, 5.0), (2, 1.0), (3, math.nan), (4, 2.0)]:
        saver.copy_and_write(step, RankContents(shard(state(step), 0, 1)), {"loss": loss})
    assert not any(report.outcome.warnings for report in saver.take_ended())
    assert [checkpoint.name for checkpoint in list_checkpoints(CheckpointStorage(tmp_path))] == [
        "step-00000004",
        "step-00000002",
    ]
    assert not [path for path in tmp_path.iterdir() if ".tmp-" in path.name]


def test_the_best_is_neither_deleted_nor_replaced_while_its_metrics_cannot_be_read(tmp_path, monkeypatch):
    retention = CheckpointConfig(keep=1, best="loss")
    storage = CheckpointStorage(tmp_path)
    [saver] = savers(tmp_path, settings=retention)
    for step, loss in [(1, 1.0), (2, 2.0)]:
        saver.copy_and_write(step, RankContents(shard(state(step), 0, 1)), {"loss": loss})
    saver.take_ended()
    open_file = CheckpointStorage.open

    def fail(self: CheckpointStorage, key: str) -> object:
        if key == "step-00000001/metrics.json":
            raise OSError(errno.EIO, "Input/output error")
        return open_file(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStorage, "open", fail)
        [resumed] = savers(tmp_path, settings=retention)
        resumed.copy_and_write(3, RankContents(shard(state(3), 0, 1)), {"loss": 3.0})
        [report] = resumed.take_ended()
        assert "Input/output error" in " ".join(report.outcome.warnings)
        oldest = tmp_path / "step-00000001"
        assert (
            report.outcome.warnings[0]
            .partition(" is ")[2]
            .startswith(f"safe, but older ones are not deleted: {oldest}/metrics.json cannot")
        )
        assert report.outcome.warnings[0].endswith(f"or set it aside: mv {oldest} {oldest}.damaged")
        with pytest.raises(OSError, match="Input/output error"):
            best_checkpoint(CheckpointMetrics(storage), retention)

    best = best_checkpoint(CheckpointMetrics(storage), retention)
    assert best is not None
    assert best.checkpoint.step == 1
    # What the warning says to type works: the older ones are deleted again, and the one that was set aside is not.
    oldest.rename(f"{oldest}.damaged")
    resumed.copy_and_write(4, RankContents(shard(state(4), 0, 1)), {"loss": 4.0})
    assert resumed.take_ended()[0].outcome.warnings == ()
    assert set(storage.folders()) == {"step-00000001.damaged", "step-00000002", "step-00000004"}


def save_with_losses(saver: Saver, losses: dict[int, float]) -> None:
    for step, loss in losses.items():
        saver.copy_and_write(step, RankContents(shard(state(step), 0, 1)), {"loss": loss})
    assert all(is_committed(save) and not save.outcome.warnings for save in saver.take_ended())


def test_a_save_reads_no_metrics_that_are_known(tmp_path, monkeypatch):
    """A run reads the metrics of its checkpoints once, after a resume; those it writes itself, never."""
    read: list[str] = []
    read_metrics = metrics_module.read_metrics

    def count(checkpoint: Checkpoint) -> object:
        read.append(checkpoint.name)
        return read_metrics(checkpoint)

    monkeypatch.setattr(metrics_module, "read_metrics", count)
    keep = CheckpointConfig(keep=2, best="loss")
    [saver] = savers(tmp_path, settings=keep)
    save_with_losses(saver, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})
    assert read == []

    [resumed] = savers(tmp_path, settings=keep)
    save_with_losses(resumed, {5: 5.0, 6: 6.0, 7: 7.0})
    assert sorted(read) == ["step-00000001", "step-00000003", "step-00000004"]
    assert [checkpoint.step for checkpoint in list_checkpoints(CheckpointStorage(tmp_path))] == [7, 6, 1]


def test_the_best_is_chosen_among_those_that_other_processes_have_left(tmp_path):
    [saver] = savers(tmp_path, settings=CheckpointConfig(keep=1, best="loss"))
    save_with_losses(saver, {1: 1.0, 2: 2.0})
    shutil.rmtree(tmp_path / "step-00000001")
    save_with_losses(saver, {3: 3.0})
    assert [checkpoint.step for checkpoint in list_checkpoints(CheckpointStorage(tmp_path))] == [3, 2]


def test_a_step_that_is_saved_again_is_compared_by_its_new_metrics(tmp_path):
    """The run went back, for example: the checkpoint that was the best is set aside."""
    [saver] = savers(tmp_path, settings=CheckpointConfig(keep=2, best="loss"))
    save_with_losses(saver, {1: 2.0, 2: 1.0})
    set_aside_later(CheckpointStorage(tmp_path), 1)
    save_with_losses(saver, {2: 3.0, 3: 4.0, 4: 5.0})
    assert [checkpoint.step for checkpoint in list_checkpoints(CheckpointStorage(tmp_path))] == [4, 3, 1]
