"""What checkpoints rely on, wherever their tensors are. A store is tested by a class of three lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import TOKEN, commit, load, same, savers, shard, state

from lockstep.checkpoint.state.reshard import Rank0Contents, RankContents
from lockstep.checkpoint.storage.folder import Checkpoint, CheckpointStorage, list_checkpoints
from lockstep.checkpoint.storage.stores import allow_store_of, open_store
from lockstep.checkpoint.storage.transitions import (
    claim,
    delete_leftovers,
    owner_of,
    set_aside,
    set_aside_later,
    update_latest,
)
from lockstep.config.sections import CheckpointConfig
from lockstep.run_folder.checkpoint_names import file_name, folder_name


def latest(storage: CheckpointStorage) -> str:
    return storage.open("latest").read().decode().strip()


def put(storage: CheckpointStorage, key: str, data: bytes = b"x") -> None:
    storage.write(key, [memoryview(data)])


# The key of a file with tensors, whose contents go to the store.
TENSORS = f"{folder_name(1)}/{file_name(0)}"


class StorageContract:
    """What every run relies on. A subclass says where the tensors are."""

    def url(self, tmp_path: Path) -> str | None:
        """Return the URL of the store, as in `checkpoint.store`. `tmp_path` is a folder for this test."""
        raise NotImplementedError

    def make(self, tmp_path: Path) -> CheckpointStorage:
        # A run allows the store of its setting in the same way.
        url = self.url(tmp_path)
        if url:
            allow_store_of(url)
        return CheckpointStorage(tmp_path / "run" / "checkpoints", url)

    @pytest.fixture
    def storage(self, tmp_path: Path) -> CheckpointStorage:
        return self.make(tmp_path)

    def test_what_is_written_can_be_read_from_any_position(self, storage: CheckpointStorage) -> None:
        storage.write(TENSORS, iter([memoryview(b"abc"), memoryview(b""), memoryview(b"defg")]))
        with storage.open(TENSORS) as file:
            assert file.readable()
            assert file.read() == b"abcdefg"
            assert file.seek(0, 2) == 7
            file.seek(3)
            buffer = bytearray(2)
            assert file.readinto(buffer) == 2
            assert buffer == b"de"

    def test_the_memory_of_a_chunk_may_change_after_the_write(self, storage: CheckpointStorage) -> None:
        data = bytearray(b"abc")
        storage.write(TENSORS, [memoryview(data)])
        data[:] = b"xyz"
        assert storage.open(TENSORS).read() == b"abc"

    def test_an_exception_instead_of_a_chunk_reaches_the_caller(self, storage: CheckpointStorage) -> None:
        def chunks() -> Iterator[memoryview]:
            yield memoryview(b"abc")
            raise RuntimeError("aborted")

        with pytest.raises(RuntimeError, match="aborted"):
            storage.write(TENSORS, chunks())
        storage.delete(folder_name(1))
        assert storage.folders() == []

    def test_missing_files_are_file_not_found(self, storage: CheckpointStorage) -> None:
        for key in ("file", "folder/file", TENSORS):
            with pytest.raises(FileNotFoundError):
                storage.open(key)
        with pytest.raises(FileNotFoundError):
            storage.rename("folder", "other")
        storage.delete("file")
        storage.delete("folder/file")
        storage.delete("folder")
        storage.delete(TENSORS)

    def test_what_is_gone_from_the_store_is_file_not_found(self, storage: CheckpointStorage) -> None:
        put(storage, TENSORS)
        self.lose(storage)
        with pytest.raises(FileNotFoundError):
            storage.open(TENSORS)
        storage.delete(folder_name(1))
        assert storage.folders() == []

    def lose(self, storage: CheckpointStorage) -> None:
        """Delete the contents of the only file, but not the URL."""
        url_file = storage.root / f"{TENSORS}.object"
        if url_file.exists():
            open_store(url_file.read_text()).delete(url_file.read_text())
        else:
            (storage.root / TENSORS).unlink()

    def test_a_folder_exists_as_long_as_it_has_files(self, storage: CheckpointStorage) -> None:
        assert storage.folders() == []
        put(storage, "one/a")
        put(storage, "one/b")
        put(storage, "two/a")
        storage.replace("latest", b"text")
        assert set(storage.folders()) == {"one", "two"}
        storage.delete("one/a")
        storage.delete("two")
        assert storage.folders() == ["one"]
        storage.delete("one/b")
        assert storage.folders() == []
        assert latest(storage) == "text"

    def test_a_rename_moves_all_files_of_one_folder(self, storage: CheckpointStorage) -> None:
        put(storage, "one/a", b"1")
        put(storage, "one/b", b"2")
        put(storage, "one.tmp/a", b"3")
        storage.rename("one", "two")
        assert set(storage.folders()) == {"two", "one.tmp"}
        assert storage.open("two/b").read() == b"2"
        with pytest.raises(FileNotFoundError):
            storage.open("one/a")

    def test_a_rename_never_replaces_a_folder(self, storage: CheckpointStorage) -> None:
        put(storage, "one/a", b"1")
        put(storage, "two/b", b"2")
        with pytest.raises(OSError, match="two"):
            storage.rename("one", "two")
        assert storage.open("one/a").read() == b"1"
        with pytest.raises(FileNotFoundError):
            storage.open("two/a")

    def test_two_objects_for_the_same_files_are_equal(self, storage: CheckpointStorage, tmp_path: Path) -> None:
        assert self.make(tmp_path) == storage
        assert self.make(tmp_path / "another") != storage

    def test_a_replacement_gives_a_file_new_contents(self, storage: CheckpointStorage) -> None:
        storage.replace("folder/file", b"long contents")
        storage.replace("folder/file", b"short")
        assert storage.open("folder/file").read() == b"short"

    def test_the_last_claim_counts(self, storage: CheckpointStorage) -> None:
        assert owner_of(storage) is None
        claim(storage, "first")
        claim(storage, "second")
        assert owner_of(storage) == "second"
        assert storage.folders() == []

    def test_nothing_stays_outside_of_the_runs_folder(self, storage: CheckpointStorage, tmp_path: Path) -> None:
        """`lockstep rm` calls this, and then deletes the folder."""
        storage.delete_objects()
        commit(storage, 1)
        [url] = [path.read_text() for path in storage.root.rglob("*.object")] or [None]
        storage.delete_objects()
        if url:
            with pytest.raises(FileNotFoundError):
                open_store(url).open(url)
        outside = [path for path in tmp_path.rglob("*.safetensors") if "checkpoints" not in path.parts]
        assert outside == []

    def test_there_is_room(self, storage: CheckpointStorage) -> None:
        assert storage.free_bytes() is None or storage.free_bytes() > 0

    def test_committed_ones_are_listed_newest_first_and_nothing_else_is(self, storage: CheckpointStorage) -> None:
        for name in ["step-00000002", "step-00000010", "step-123456789", "step-1", "step-00000003.tmp-ab-1", "other"]:
            put(storage, f"{name}/file")
        put(storage, "step-00000005")  # not a folder
        assert [checkpoint.step for checkpoint in list_checkpoints(storage)] == [123456789, 10, 2]

    def test_what_other_attempts_left_is_cleaned_and_ours_is_not(self, storage: CheckpointStorage) -> None:
        names = ["step-00000001", f"step-00000002.tmp-{TOKEN}-1"]
        for name in [*names, "step-00000002.tmp-ff-1", "step-00000001.tmp-ff-gone12"]:
            put(storage, f"{name}/file")
        delete_leftovers(storage, TOKEN)
        assert set(storage.folders()) == set(names)

    def test_what_is_set_aside_keeps_its_files_and_latest_follows(self, storage: CheckpointStorage) -> None:
        for step in (1, 2, 3, 4):
            commit(storage, step)
        assert latest(storage) == "step-00000004"
        assert set_aside(storage, "step-00000004", "damaged") == "step-00000004.damaged"
        update_latest(storage)
        assert latest(storage) == "step-00000003"
        commit(storage, 4)
        assert set_aside(storage, "step-00000004", "damaged") == "step-00000004.damaged1"
        set_aside_later(storage, 1)
        assert {"step-00000003.rewound", "step-00000002.rewound"} <= set(storage.folders())
        assert latest(storage) == "step-00000001"
        assert Checkpoint(storage, "step-00000003.rewound").open(file_name(0)).read()
        set_aside(storage, "step-00000001", "damaged")
        set_aside_later(storage, 1)
        with pytest.raises(FileNotFoundError):
            latest(storage)

    def test_what_several_ranks_save_comes_back_and_old_ones_are_deleted(self, storage: CheckpointStorage) -> None:
        team = savers(storage, 3, settings=CheckpointConfig(keep=2))
        for step in (1, 2, 3):
            for rank, saver in enumerate(team):
                saver.copy_and_write(
                    step, RankContents(shard(state(step), rank, 3), Rank0Contents(values={"step": step}))
                )
        assert [report.outcome.checkpoint.step for report in team[0].take_ended()] == [1, 2, 3]
        assert set(storage.folders()) == {"step-00000002", "step-00000003"}
        found, loaded = load(storage)
        assert found.reader.manifest.values == {"step": 3}
        assert same(loaded, state(3))
