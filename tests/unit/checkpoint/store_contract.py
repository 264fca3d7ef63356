"""What every store of checkpoints must do. A store is tested by a class of three lines, as in test_stores.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import TOKEN, commit, load, same, savers, shard, state

from lockstep.checkpoint.format import file_name
from lockstep.checkpoint.storage import Checkpoint, Retention, Store, clean, committed, set_aside, set_aside_after


def latest(store: Store) -> str:
    return store.open("latest").read().decode().strip()


def put(store: Store, key: str, data: bytes = b"x") -> None:
    store.write(key, [memoryview(data)])


class StoreContract:
    """What every store must do. A subclass says how to make one."""

    def make(self, tmp_path: Path) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return self.make(tmp_path)

    def test_what_is_written_can_be_read_from_any_position(self, store: Store) -> None:
        store.write("folder/file", iter([memoryview(b"abc"), memoryview(b""), memoryview(b"defg")]))
        with store.open("folder/file") as file:
            assert file.readable()
            assert file.read() == b"abcdefg"
            assert file.seek(0, 2) == 7
            file.seek(3)
            buffer = bytearray(2)
            assert file.readinto(buffer) == 2
            assert buffer == b"de"

    def test_the_memory_of_a_chunk_may_change_after_the_write(self, store: Store) -> None:
        data = bytearray(b"abc")
        store.write("folder/file", [memoryview(data)])
        data[:] = b"xyz"
        assert store.open("folder/file").read() == b"abc"

    def test_an_exception_instead_of_a_chunk_reaches_the_caller(self, store: Store) -> None:
        def chunks() -> Iterator[memoryview]:
            yield memoryview(b"abc")
            raise RuntimeError("abandoned")

        with pytest.raises(RuntimeError, match="abandoned"):
            store.write("folder/file", chunks())

    def test_missing_files_are_file_not_found(self, store: Store) -> None:
        for key in ("file", "folder/file"):
            with pytest.raises(FileNotFoundError):
                store.open(key)
        with pytest.raises(FileNotFoundError):
            store.rename("folder", "other")
        store.delete("file")
        store.delete("folder/file")
        store.delete("folder")

    def test_a_folder_exists_as_long_as_it_has_files(self, store: Store) -> None:
        assert store.folders() == []
        put(store, "one/a")
        put(store, "one/b")
        put(store, "two/a")
        store.replace("latest", b"text")
        assert set(store.folders()) == {"one", "two"}
        store.delete("one/a")
        store.delete("two")
        assert store.folders() == ["one"]
        store.delete("one/b")
        assert store.folders() == []
        assert latest(store) == "text"

    def test_a_rename_moves_all_files_of_one_folder(self, store: Store) -> None:
        put(store, "one/a", b"1")
        put(store, "one/b", b"2")
        put(store, "one.tmp/a", b"3")
        store.rename("one", "two")
        assert set(store.folders()) == {"two", "one.tmp"}
        assert store.open("two/b").read() == b"2"
        with pytest.raises(FileNotFoundError):
            store.open("one/a")

    def test_a_replacement_gives_a_file_new_contents(self, store: Store) -> None:
        store.replace("folder/file", b"long contents")
        store.replace("folder/file", b"short")
        assert store.open("folder/file").read() == b"short"

    def test_the_last_claim_counts(self, store: Store) -> None:
        assert store.owner() is None
        store.claim("first")
        store.claim("second")
        assert store.owner() == "second"
        assert store.folders() == []

    def test_there_is_room(self, store: Store) -> None:
        assert store.free_bytes() > 0

    def test_committed_ones_are_listed_newest_first_and_nothing_else_is(self, store: Store) -> None:
        for name in ["step-00000002", "step-00000010", "step-123456789", "step-1", "step-00000003.tmp-ab-1", "other"]:
            put(store, f"{name}/file")
        put(store, "step-00000005")  # not a folder
        assert [checkpoint.step for checkpoint in committed(store)] == [123456789, 10, 2]

    def test_what_other_attempts_left_is_cleaned_and_ours_is_not(self, store: Store) -> None:
        names = ["step-00000001", f"step-00000002.tmp-{TOKEN}-1"]
        for name in [*names, "step-00000002.tmp-ff-1", "step-00000001.tmp-ff-gone12"]:
            put(store, f"{name}/file")
        clean(store, TOKEN)
        assert set(store.folders()) == set(names)

    def test_what_is_set_aside_keeps_its_files_and_latest_follows(self, store: Store) -> None:
        for step in (1, 2, 3, 4):
            commit(store, step)
        assert latest(store) == "step-00000004"
        assert set_aside(store, "step-00000004", "damaged") == "step-00000004.damaged"
        assert latest(store) == "step-00000003"
        commit(store, 4)
        assert set_aside(store, "step-00000004", "damaged") == "step-00000004.damaged1"
        set_aside_after(store, 1)
        assert {"step-00000003.undone", "step-00000002.undone"} <= set(store.folders())
        assert latest(store) == "step-00000001"
        assert Checkpoint(store, "step-00000003.undone").open(file_name(0)).read()
        set_aside(store, "step-00000001", "damaged")
        with pytest.raises(FileNotFoundError):
            latest(store)

    def test_what_several_ranks_save_comes_back_and_old_ones_are_deleted(self, store: Store) -> None:
        team = savers(store, 3, keep=Retention(last=2))
        for step in (1, 2, 3):
            for rank, saver in enumerate(team):
                saver.save(step, shard(state(step), rank, 3), {}, {"step": step})
        assert [report.checkpoint is not None for report in team[0].take_ended()] == [True] * 3
        assert set(store.folders()) == {"step-00000002", "step-00000003"}
        found, loaded = load(store)
        assert found.manifest.values == {"step": 3}
        assert same(loaded, state(3))
