"""Checkpoints whose tensors are in an object store: committed, killed, deleted and damaged like those in a folder."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from checkpoints import commit, end, load, same, savers, shard, state
from storage_contract import StorageContract
from test_run_in_memory import Dropped

import lockstep
from lockstep.checkpoint import inspect
from lockstep.checkpoint.format import file_name
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.saving.outcome import SaveFailed
from lockstep.checkpoint.storage import FileSystemStorage, ObjectStorage, open_storage
from lockstep.errors import Preempted, UserError
from lockstep.testing import fail_at


def store_at(tmp_path: Path) -> ObjectStorage:
    return ObjectStorage(tmp_path / "run" / "checkpoints", f"file://{tmp_path}/bucket/")


def objects(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "bucket").rglob("*") if path.is_file()]


class TestFiles(StorageContract):
    def make(self, tmp_path: Path) -> ObjectStorage:
        return store_at(tmp_path)


class TestMemory(StorageContract):
    def make(self, tmp_path: Path) -> ObjectStorage:
        return ObjectStorage(tmp_path, "memory://bucket/folder")


def test_the_tensors_are_objects_and_everything_else_is_in_the_folder(tmp_path: Path) -> None:
    storage = store_at(tmp_path)
    team = savers(storage, 2, keep=Retention(last=2))
    for step in (1, 2, 3):
        for rank, saver in enumerate(team):
            saver.start(step, shard(state(step), rank, 2), {}, {})
        assert not any(isinstance(save.outcome, SaveFailed) for save in end(team))

    # What retention deletes is deleted in the store, too.
    assert sorted(path.parent.name for path in objects(tmp_path)) == [f"step-0000000{step}" for step in (2, 2, 3, 3)]
    folder = storage.root / "step-00000003"
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json",
        *(f"{file_name(rank)}.object" for rank in range(2)),
    }
    assert same(load(storage)[1], state(3))


def test_the_folder_alone_says_where_the_objects_are(tmp_path: Path) -> None:
    commit(store_at(tmp_path), 1, size=2)
    found = open_storage(tmp_path / "run" / "checkpoints")
    assert isinstance(found, ObjectStorage)
    assert same(load(found)[1], state(1))
    assert found == FileSystemStorage(tmp_path / "run" / "checkpoints")

    # Without the setting, new checkpoints are files again.
    commit(found, 2)
    assert (found.root / "step-00000002" / file_name(0)).is_file()
    inspect.delete_objects(tmp_path / "run")
    assert objects(tmp_path) == []
    assert found.folders() == []


def test_an_object_that_is_damaged_or_gone_is_a_damaged_checkpoint(tmp_path: Path) -> None:
    storage = store_at(tmp_path)
    commit(storage, 1)
    for step in (2, 3):
        commit(storage, step)
        [path] = [path for path in objects(tmp_path) if path.parent.name == f"step-0000000{step}"]
        if step == 3:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    reader, loaded = load(storage)
    assert [str(problem).partition(": ")[2] for problem in reader.skipped] == [
        "missing",
        "the bytes changed since they were written (digest differs)",
    ]
    assert same(loaded, state(1))


@pytest.mark.parametrize("address", ["{}/precious", "file://{}/precious", "simplecache::file://{}/precious", ""])
def test_an_address_that_somebody_else_wrote_is_neither_read_nor_deleted(tmp_path: Path, address: str) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    storage = store_at(tmp_path)
    commit(storage, 1)
    (storage.root / "step-00000001" / f"{file_name(0)}.object").write_text(address.format(tmp_path))
    with pytest.raises(UserError, match="not the address of an object"):
        load(storage)
    with pytest.raises(OSError, match="not the address of an object"):
        storage.delete("step-00000001")
    assert precious.read_bytes() == b"mine"


def test_a_store_that_fails_costs_a_checkpoint_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoCredentials(Exception):
        pass

    def refuse(*_: Any, **__: Any) -> Any:
        raise NoCredentials("no key")

    storage = store_at(tmp_path)
    [saver] = savers(storage)
    with monkeypatch.context() as patch:
        patch.setattr(fsspec.get_filesystem_class("file"), "open", refuse)
        saver.start(1, shard(state(1), 0, 1), {}, {})
        [save] = saver.take_ended()
    assert isinstance(save.outcome, SaveFailed)
    assert "NoCredentials: no key" in save.outcome.reason
    assert storage.folders() == objects(tmp_path) == []

    # An exception of the save itself is not turned into one of the store.
    def chunks() -> Iterator[memoryview]:
        yield memoryview(b"abc")
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full") as raised:
        storage.write(f"step-00000009.tmp-a-1/{file_name(0)}", chunks())
    assert raised.value.errno == errno.ENOSPC
    assert len(objects(tmp_path)) == 1
    storage.delete("step-00000009.tmp-a-1")
    assert objects(tmp_path) == []


def test_a_run_is_preempted_and_resumes_from_objects(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"storage": f"file://{tmp_path}/bucket", "every": 2, "keep": 1}
    undisturbed = lockstep.fit(Dropped(), run_dir=tmp_path / "undisturbed")
    with fail_at(how="term", step=4), pytest.raises(Preempted) as preempted:
        lockstep.fit(Dropped(), run_dir=tmp_path / "run", checkpoint=settings)
    assert preempted.value.checkpoint == str(tmp_path / "run" / "checkpoints" / "step-00000005")

    resumed = lockstep.fit(Dropped(), run_dir=tmp_path / "run", checkpoint=settings, resume="auto")
    assert [path.parent.name for path in objects(tmp_path)] == ["step-00000012"]
    for name, weight in undisturbed.weights.items():
        assert torch.equal(resumed.weights[name], weight), name
    assert inspect.verify(tmp_path / "run") == ("step-00000012  ok", 0)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("bucket/folder", "is not the address of an object store"),
        ("s3://", "is not the address of an object store"),
        ("simplecache::s3://bucket", "is not the address of an object store"),
        ("nowhere://bucket", "there is no kind of store nowhere://"),
        ("s3://bucket", "needs a package that is not installed(.|\n)*s3fs(.|\n)*lockstep-train\\[s3]"),
    ],
)
def test_an_address_that_cannot_work_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, problem: str
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=problem):
        lockstep.fit(Dropped(), run_dir=tmp_path / "run", checkpoint={"storage": url})
    assert not (tmp_path / "run").exists()
