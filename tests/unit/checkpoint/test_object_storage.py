"""Checkpoints whose tensors are in a store: committed, killed, deleted and damaged like those in a folder."""

from __future__ import annotations

import errno
import gc
import io
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from checkpoints import commit, end, load, same, savers, shard, state
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile
from storage_contract import StorageContract
from test_run_in_memory import Dropped

import lockstep
from lockstep.checkpoint import command
from lockstep.checkpoint.loading import search
from lockstep.checkpoint.loading.search import VerifyingRanks, newest_valid
from lockstep.checkpoint.saving.outcome import SaveFailed
from lockstep.checkpoint.state.reshard import RankContents
from lockstep.checkpoint.storage import stores
from lockstep.checkpoint.storage.durable import sync_names
from lockstep.checkpoint.storage.folder import CheckpointStorage
from lockstep.checkpoint.storage.retry import StorageUnavailable
from lockstep.checkpoint.storage.transitions import claim
from lockstep.cli import main
from lockstep.config.sections import CheckpointConfig
from lockstep.errors import Preempted, UserError
from lockstep.run_folder.checkpoint_names import file_name, folder_name, is_object_url, object_url
from lockstep.testing import fail_at


def store_at(tmp_path: Path) -> CheckpointStorage:
    return CheckpointStorage(tmp_path / "run" / "checkpoints", f"file://{tmp_path}/bucket/")


def objects(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "bucket").rglob("*") if path.is_file()]


class TestLocalFiles(StorageContract):
    def url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/bucket/"


class TestFsspec(StorageContract):
    def url(self, tmp_path: Path) -> str:
        return "memory://bucket/folder"


def test_the_tensors_are_objects_and_everything_else_is_in_the_folder(tmp_path: Path) -> None:
    storage = store_at(tmp_path)
    team = savers(storage, 2, settings=CheckpointConfig(keep=2))
    for step in (1, 2, 3):
        for rank, saver in enumerate(team):
            saver.copy_and_write(step, RankContents(shard(state(step), rank, 2)))
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
    found = CheckpointStorage(tmp_path / "run" / "checkpoints")
    assert same(load(found)[1], state(1))

    # Without the setting, new checkpoints are files again.
    commit(found, 2)
    assert (found.root / "step-00000002" / file_name(0)).is_file()
    command.delete_objects(tmp_path / "run")
    assert objects(tmp_path) == []
    assert found.folders() == ["step-00000002"]


def test_a_checkpoint_that_was_copied_elsewhere_is_whole(tmp_path: Path) -> None:
    """The copy has the URLs of its objects: nothing in the folder above it is needed."""
    checkpoint = commit(store_at(tmp_path), 1, size=2)
    copy = shutil.copytree(checkpoint.path, tmp_path / "elsewhere" / checkpoint.name)
    assert command.verify(copy) == ("step-00000001  ok", 0)
    assert {path.name for path in checkpoint.storage.root.iterdir()} == {"latest", "owner", checkpoint.name}


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
    found, loaded = load(storage)
    assert [str(problem).partition(": ")[2] for problem in found.skipped] == [
        "missing",
        "the bytes changed since they were written (digest differs)",
    ]
    assert same(loaded, state(1))


@pytest.mark.parametrize("url", ["{}/precious", "file://{}/precious", "simplecache::file://{}/precious", ""])
def test_a_url_that_somebody_else_wrote_is_neither_read_nor_deleted(tmp_path: Path, url: str) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    storage = store_at(tmp_path)
    commit(storage, 1)
    (storage.root / "step-00000001" / f"{file_name(0)}.object").write_text(url.format(tmp_path))
    with pytest.raises(UserError, match="not the URL of an object"):
        load(storage)
    with pytest.raises(OSError, match="not the URL of an object"):
        storage.delete("step-00000001")
    assert precious.read_bytes() == b"mine"


@pytest.mark.parametrize("read", [lambda storage: load(storage), lambda storage: storage.delete("step-00000001")])
def test_a_class_that_only_a_checkpoint_names_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[CheckpointStorage], None]
) -> None:
    """An import runs code, and the folder may come from elsewhere."""
    (tmp_path / "evil_store.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    storage = store_at(tmp_path)
    commit(storage, 1)
    url_file = storage.root / "step-00000001" / f"{file_name(0)}.object"
    url_file.write_text(url_file.read_text().replace("file://", "evil_store:Store://"))
    with pytest.raises((UserError, OSError), match=r"not allowed.*--store evil_store:Store") as raised:
        read(storage)
    assert not isinstance(raised.value, StorageUnavailable), "a run would wait for it"
    assert "evil_store" not in sys.modules


def test_commands_use_a_store_of_the_users_if_they_are_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_store.py").write_text("from lockstep.checkpoint.storage.stores import LocalFiles as Own")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    run = tmp_path / "run"
    lockstep.fit(Dropped(), run_dir=run, checkpoint={"store": f"own_store:Own://{tmp_path}/bucket"})
    assert len(objects(tmp_path)) == 1

    # Another process has not seen the setting.
    monkeypatch.delitem(stores.STORES, "own_store:Own")
    assert main(["ckpt", "verify", str(run)]) == 1
    assert "--store own_store:Own" in capsys.readouterr().out
    assert main(["ckpt", "verify", str(run), "--store", "own_store:Own"]) == 0
    assert main(["rm", "--yes", str(run), "--store", "own_store:Own"]) == 0
    assert objects(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("memory_store", "is not the name of a store's class"),
        ("no_such_module:Store", "there is no module no_such_module"),
        ("memory_store:Missing", "has no class Missing"),
        ("storage_contract:StorageContract", "the class StorageContract lacks write, open, delete"),
    ],
)
def test_a_class_that_is_no_store_is_refused(name: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        stores.allow_store(name)


def test_a_store_that_fails_costs_a_checkpoint_and_leaves_nothing(
    real_store: CheckpointStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoCredentials(Exception):
        pass

    def refuse(*_: Any, **__: Any) -> Any:
        raise NoCredentials("no key")

    storage = real_store
    [saver] = savers(storage)
    with monkeypatch.context() as patch:
        patch.setattr(RealStore, "open", refuse)
        saver.copy_and_write(1, RankContents(shard(state(1), 0, 1)))
        [save] = saver.take_ended()
    assert isinstance(save.outcome, SaveFailed)
    assert "NoCredentials: no key" in save.outcome.reason
    assert storage.folders() == []
    assert RealStore.objects == {}

    # An exception of the save itself is not turned into one of the store.
    def chunks() -> Iterator[memoryview]:
        yield memoryview(b"abc")
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full") as raised:
        storage.write(f"step-00000009.tmp-a-1/{file_name(0)}", chunks())
    assert raised.value.errno == errno.ENOSPC
    assert len(RealStore.objects) == 1
    storage.delete("step-00000009.tmp-a-1")
    assert RealStore.objects == {}


class Upload(io.BytesIO):
    """An object that exists once it is closed, as in a real store."""

    def __init__(self, objects: dict[str, bytes], path: str):
        super().__init__()
        self.objects = objects
        self.path = path

    def close(self) -> None:
        if not self.closed:
            self.objects[self.path] = self.getvalue()
        super().close()


class RealStore(MemoryFileSystem):
    """A store in which an object exists once it is closed, and in which one that does not exist can be deleted."""

    protocol = "real"
    cachable = False
    objects: dict[str, bytes] = {}

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return Upload(self.objects, path) if mode == "wb" else io.BytesIO(self.objects[path])

    def rm_file(self, path: str) -> None:
        self.objects.pop(path, None)


@pytest.mark.parametrize(
    ("store", "problem"),
    [("file:///proc/nope", "No such file or directory"), ("memory_store:ForgetfulStore://bucket", "other bytes")],
)
@pytest.mark.parametrize("settings", [{}, {"minutes": None, "at_end": False}], ids=["by itself", "on request"])
def test_a_store_that_cannot_keep_anything_is_refused_before_the_first_step(
    tmp_path: Path, store: str, problem: str, settings: dict[str, Any]
) -> None:
    """The run trained to its end, with a warning for each save and without a checkpoint."""
    with pytest.raises(UserError, match="cannot be kept in") as error:
        lockstep.fit(Dropped(), run_dir=tmp_path, checkpoint={"store": store, "timeout": 0.1, **settings})
    assert store in error.value.problem
    assert problem in error.value.found
    assert not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").read_text()


NEVER = {"minutes": None, "at_end": False}


@pytest.mark.parametrize(
    "settings",
    [{}, {"checkpoint": NEVER | {"best": "eval_loss"}}, {"checkpoint": NEVER, "spike": {"policy": "rewind"}}],
    ids=["by time", "the best", "to rewind to"],
)
def test_a_store_without_room_for_the_weights_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    settings = {**settings, "checkpoint": {**settings.get("checkpoint", {}), "store": f"file://{tmp_path}/bucket"}}
    with pytest.raises(UserError, match="there is no room for a checkpoint in file://"):
        lockstep.fit(Dropped(), run_dir=tmp_path / "run", **settings)


def test_a_run_that_saves_nothing_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    assert lockstep.fit(Dropped(), run_dir=tmp_path, checkpoint=NEVER).summary["step"] == 12


class Uploaded(AbstractBufferedFile):
    """An object that is written as a package such as s3fs writes one: it exists when it is completed."""

    discarded: list[str] = []

    def _initiate_upload(self) -> None:
        pass

    def _upload_chunk(self, final: bool = False) -> bool:
        if final:
            self.fs.objects[self.path] = self.buffer.getvalue()
        return not final

    def discard(self) -> None:
        self.discarded.append(self.path)
        self.buffer = None


class UploadStore(RealStore):
    protocol = "upload"

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return Uploaded(self, path, mode) if mode == "wb" else io.BytesIO(self.objects[path])


def test_an_object_is_discarded_if_its_write_fails_and_the_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing completed it: half a file was uploaded to the end, while training waited for the aborted save."""
    fsspec.register_implementation("upload", UploadStore, clobber=True)
    monkeypatch.setattr(RealStore, "objects", {})
    monkeypatch.setattr(Uploaded, "discarded", [])
    storage = CheckpointStorage(tmp_path / "run" / "checkpoints", "upload://bucket")

    def chunks() -> Iterator[memoryview]:
        yield memoryview(b"abc")
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        storage.write(f"step-00000009.tmp-a-1/{file_name(0)}", chunks())
    gc.collect()
    assert len(Uploaded.discarded) == 1
    assert RealStore.objects == {}
    storage.delete("step-00000009.tmp-a-1")

    storage.write(f"step-00000009.tmp-a-2/{file_name(0)}", [memoryview(b"abc")])
    assert list(RealStore.objects.values()) == [b"abc"]


@pytest.fixture
def real_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStorage:
    fsspec.register_implementation("real", RealStore, clobber=True)
    monkeypatch.setattr(RealStore, "objects", {})
    return CheckpointStorage(tmp_path / "run" / "checkpoints", "real://bucket")


class Fetched(AbstractBufferedFile):
    """An object that is read as a package such as s3fs reads one: by requests for ranges of bytes."""

    requests: list[int] = []

    def _fetch_range(self, start: int, end: int) -> bytes:
        data = self.fs.objects[self.path][start:end]
        self.requests.append(len(data))
        return data


class RangeStore(RealStore):
    protocol = "range"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb":
            return Upload(self.objects, path)
        return Fetched(self, path, mode, size=len(self.objects[path]), **options)


def test_a_load_fetches_each_byte_twice_to_verify_it_and_to_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-ahead fetches five megabytes for each tensor."""
    fsspec.register_implementation("range", RangeStore, clobber=True)
    monkeypatch.setattr(RangeStore, "objects", {})
    storage = CheckpointStorage(tmp_path / "run" / "checkpoints", "range://bucket")
    tensors = {f"model.{number}": torch.full((1 << 16,), float(number)) for number in range(64)}
    commit(storage, 1, tensors=tensors)
    [written] = RangeStore.objects.values()

    monkeypatch.setattr(Fetched, "requests", [])
    found = newest_valid(storage, VerifyingRanks.alone())
    assert found is not None
    reader = found.reader
    assert max(Fetched.requests) > len(written) - (1 << 20)  # digests are computed from large chunks

    # Backwards, as no read-ahead expects it.
    with reader.keeping_open():
        assert same({name: reader.read(name) for name in reversed(list(tensors))}, tensors)
    assert sum(Fetched.requests) < 2.3 * len(written)


def test_an_object_whose_folder_was_deleted_while_it_was_written_is_deleted(real_store: CheckpointStorage) -> None:
    """Rank 0 has failed, say, and has deleted the folder with the URL of rank 1's object."""
    draft = "step-00000001.tmp-a-1"

    def chunks() -> Iterator[memoryview]:
        yield memoryview(b"abc")
        real_store.delete(draft)
        yield memoryview(b"def")

    with pytest.raises(FileNotFoundError):
        real_store.write(f"{draft}/{file_name(1)}", chunks())
    assert RealStore.objects == {}
    assert real_store.folders() == []


def test_a_url_has_another_name_in_the_folder_while_its_object_is_deleted(
    real_store: CheckpointStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a rank whose object is complete only after that sees that it must delete it."""
    commit(real_store, 1)
    folder = real_store.root / "step-00000001"
    seen: list[dict[str, str]] = []

    def look(self: RealStore, path: str) -> None:
        seen.append({file.name: file.read_text() for file in folder.glob("*.object")})

    urls = {file.name: file.read_text() for file in folder.glob("*.object")}
    monkeypatch.setattr(RealStore, "rm_file", look)
    real_store.delete("step-00000001")
    assert [list(names.values()) for names in seen] == [list(urls.values())]
    assert not seen[0].keys() & urls.keys()


def test_a_url_is_kept_until_its_object_is_deleted(
    real_store: CheckpointStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(real_store, 1, size=2)

    def refuse(self: RealStore, path: str) -> None:
        raise OSError(errno.EACCES, "not yours")

    with monkeypatch.context() as patch:
        patch.setattr(RealStore, "rm_file", refuse)
        for _ in range(2):
            with pytest.raises(OSError, match="not yours"):
                real_store.delete("step-00000001")
    assert len(RealStore.objects) == 2
    real_store.delete(f"step-00000001/{file_name(0)}")
    assert len(RealStore.objects) == 1
    real_store.delete("step-00000001")
    assert RealStore.objects == {}
    assert real_store.folders() == []


def test_a_url_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its contents are on the disk before its name is, and both are before the object exists."""
    storage = store_at(tmp_path)
    sync, synced = os.fsync, []

    def note(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced.append((path.name, path.is_file() and path.read_text(), objects(tmp_path)))
        sync(handle)

    monkeypatch.setattr(os, "fsync", note)
    draft = "step-00000001.tmp-a-1"
    storage.write(f"{draft}/{file_name(0)}", [memoryview(b"abc")])
    (file, url, _), (folder, _, _) = synced[:2]
    assert file.startswith(f".{file_name(0)}.object.")
    assert url == (storage.root / draft / f"{file_name(0)}.object").read_text()
    assert folder == draft
    assert synced[1][2] == []

    # So are the contents of an object on this machine.
    assert (objects(tmp_path)[0].name, "abc") in [(name, text) for name, text, _ in synced]


def test_all_new_folders_survive_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the run's folder, of the checkpoints' and of the store's are on the disk, too."""
    sync, synced = os.fsync, set()

    def note(handle: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{handle}")))
        sync(handle)

    monkeypatch.setattr(os, "fsync", note)
    storage = CheckpointStorage(tmp_path / "runs" / "first" / "checkpoints", f"file://{tmp_path}/stores/bucket")
    claim(storage, "a")
    assert synced >= {tmp_path / "runs" / "first", tmp_path / "runs", tmp_path}

    synced.clear()
    storage.write(f"step-00000001.tmp-a-1/{file_name(0)}", [memoryview(b"abc")])
    assert synced >= {tmp_path / "stores" / "bucket", tmp_path / "stores", tmp_path}

    # On overlayfs a file may seem to be on another disk than its folder.
    real_stat = Path.stat

    def overlay_stat(path: Path, **options: Any) -> Any:
        found = real_stat(path, **options)
        if stat.S_ISDIR(found.st_mode):
            return found
        return SimpleNamespace(st_mode=found.st_mode, st_dev=found.st_dev + 1, st_ino=found.st_ino)

    synced.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", overlay_stat)
        sync_names(tmp_path / "runs" / "first" / "checkpoints" / "owner")
    assert synced >= {tmp_path / "runs" / "first" / "checkpoints", tmp_path / "runs", tmp_path}


def test_only_the_folder_with_the_name_itself_must_reach_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of a folder far above, such as that of a file server, stopped every run below it."""
    storage = CheckpointStorage(tmp_path / "runs" / "first" / "checkpoints")
    sync, synced = os.fsync, set()
    broken = tmp_path / "runs"

    def fail(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path == broken:
            raise OSError(errno.EIO, "the disk coughed")
        synced.add(path)
        sync(handle)

    monkeypatch.setattr(os, "fsync", fail)
    claim(storage, "a")
    assert synced >= {tmp_path / "runs" / "first", tmp_path}

    broken = tmp_path / "runs" / "first"
    with pytest.raises(OSError, match="the disk coughed"):
        claim(storage, "b")


CLAIM_AS_NOBODY = """
import os
from pathlib import Path
from lockstep.checkpoint.storage.folder import CheckpointStorage
from lockstep.checkpoint.storage.transitions import claim

os.chdir("closed/work")
os.chmod("..", 0)
if os.geteuid() == 0:
    os.chown(".", 65534, 65534)
    os.setuid(65534)

sync, synced = os.fsync, set()

def note(handle):
    synced.add(os.fstat(handle).st_ino)
    sync(handle)

os.fsync = note
claim(CheckpointStorage(Path("runs/first/checkpoints")), "a")
assert synced >= {os.stat(folder).st_ino for folder in ("runs/first", "runs", ".")}, synced
"""


def test_a_run_may_be_below_a_folder_that_this_user_may_not_enter(tmp_path: Path) -> None:
    """The working folder is there, and the path of the run is relative: the absolute one leads nowhere."""
    (tmp_path / "closed" / "work").mkdir(parents=True)
    child = subprocess.run([sys.executable, "-c", CLAIM_AS_NOBODY], cwd=tmp_path, capture_output=True, text=True)
    (tmp_path / "closed").chmod(0o755)
    assert child.returncode == 0, child.stderr


def test_an_object_that_cannot_be_read_is_not_called_damaged(
    real_store: CheckpointStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a store's package raises while an object is read."""

    class Reset(Exception):
        pass

    class Broken(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            raise Reset("the store hung up")

    commit(real_store, 1)
    opened = RealStore._open
    monkeypatch.setattr(search, "LOOK_PAUSE_S", 0.0)
    monkeypatch.setattr(RealStore, "_open", lambda self, path, **_: Broken(opened(self, path).read()))
    with pytest.raises(UserError, match="cannot be read: Reset: the store hung up"):
        load(real_store)


def test_a_run_is_preempted_and_resumes_from_objects(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"store": f"file://{tmp_path}/bucket", "every": 2, "keep": 1}
    undisturbed = lockstep.fit(Dropped(), run_dir=tmp_path / "undisturbed")
    with fail_at(how="term", step=4), pytest.raises(Preempted) as preempted:
        lockstep.fit(Dropped(), run_dir=tmp_path / "run", checkpoint=settings)
    assert preempted.value.checkpoint == str(tmp_path / "run" / "checkpoints" / "step-00000005")

    resumed = lockstep.fit(Dropped(), run_dir=tmp_path / "run", checkpoint=settings, resume="auto")
    assert [path.parent.name for path in objects(tmp_path)] == ["step-00000012"]
    for name, weight in undisturbed.weights.items():
        assert torch.equal(resumed.weights[name], weight), name
    assert command.verify(tmp_path / "run") == ("step-00000012  ok", 0)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("bucket/folder", "is not the URL of a store"),
        ("s3://", "is not the URL of a store"),
        ("simplecache::s3://bucket", "is not the URL of a store"),
        ("file://bucket", "is not the full path of a folder"),
        ("nowhere://bucket", "there is no kind of store nowhere://"),
        ("s3://bucket", "needs a package that is not installed(.|\n)*s3fs(.|\n)*pip install .*\\[s3]"),
    ],
)
def test_a_url_that_cannot_work_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, problem: str
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=problem):
        lockstep.fit(Dropped(), run_dir=tmp_path / "run", checkpoint={"store": url})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("url", ["hdfs://namenode:8020/ckpt", "webhdfs://nn:9870/x", "sftp://host:22/ckpt", "s3://b"])
def test_the_authority_of_a_url_may_have_a_port(url: str) -> None:
    assert is_object_url(object_url(url, "run", folder_name(0), file_name(0)))
    for bad in (f"{url}:1", url.replace("://", "://a:b:"), url.replace("://", "://x:y/")):
        assert url == "s3://b" or not is_object_url(object_url(bad, "run", folder_name(0), file_name(0)))
