"""Bad bytes: whatever happens to the files, a checkpoint is loaded as it was or skipped, and no code runs."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import re
import shutil
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from checkpoints import at, commit, load, same, state, together
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoint.export import read_weights
from lockstep.checkpoint.integrity import verify_files
from lockstep.checkpoint.loading import search
from lockstep.checkpoint.loading.search import ReportedProblem, VerifyingRanks, newest_valid
from lockstep.checkpoint.manifest import FORMAT, Damaged, File, Manifest, Piece, TensorEntry, encode_manifest
from lockstep.checkpoint.manifest_reader import check_written, decode_manifest, read_manifest
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.storage.folder import Checkpoint, CheckpointStorage
from lockstep.checkpoint.storage.retry import StorageUnavailable
from lockstep.checkpoint.storage.transitions import claim, delete_checkpoint
from lockstep.errors import UserError
from lockstep.run_folder.checkpoint_names import file_name

FILES = ["manifest.json", file_name(0), file_name(1)]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    commit(root, 10, 2)
    commit(root, 20, 2, values={"loss": math.nan, "list": [1, {"a": None}]}, aliases={"t": "model.bias"})
    return root


@pytest.fixture
def root(pristine, tmp_path) -> Path:
    return shutil.copytree(pristine, tmp_path / "checkpoints")


class Bomb:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x04
    path.write_bytes(data)


DAMAGES = {
    "deleted": lambda path, marker: path.unlink(),
    "empty": lambda path, marker: path.write_bytes(b""),
    "cut in half": lambda path, marker: os.truncate(path, path.stat().st_size // 2),
    "one byte short": lambda path, marker: os.truncate(path, path.stat().st_size - 1),
    "one byte long": lambda path, marker: path.write_bytes(path.read_bytes() + b"\0"),
    "first byte": lambda path, marker: flip(path, 0),
    "header": lambda path, marker: flip(path, 20),
    "middle": lambda path, marker: flip(path, path.stat().st_size // 2),
    "last byte": lambda path, marker: flip(path, path.stat().st_size - 2),
    "pickle": lambda path, marker: path.write_bytes(pickle.dumps(Bomb(marker))),
    "torch file": lambda path, marker: torch.save({"a": torch.ones(1)}, path),
    "a folder": lambda path, marker: (path.unlink(), path.mkdir()),
    "of another step": lambda path, marker: shutil.copy(path.parent.parent / "step-00000010" / path.name, path),
}


# A manifest of another step, or with another number of its format, has tests of its own.
OTHERS = [("manifest.json", "of another step"), ("manifest.json", "last byte")]


@pytest.mark.parametrize(
    ("file", "damage"), [(file, damage) for file in FILES for damage in DAMAGES if (file, damage) not in OTHERS]
)
def test_a_damaged_file_means_the_checkpoint_before(root, tmp_path, file, damage):
    marker = tmp_path / "exploded"
    DAMAGES[damage](root / "step-00000020" / file, marker)
    found, loaded = load(root)
    assert found.reader.manifest.step == 10
    assert same(loaded, state(10))
    assert [(damaged.checkpoint.name, damaged.file) for damaged in found.skipped] == [("step-00000020", file)]
    assert found.skipped[0].why
    assert not marker.exists()


def test_a_damaged_number_of_the_format_is_another_format(root):
    """Nothing tells the two apart, so the run stops: the checkpoint may be whole."""
    DAMAGES["last byte"](root / "step-00000020" / "manifest.json", root)
    with pytest.raises(UserError, match=r"another version of Lockstep\n.*format 1, of an older version"):
        load(root)


def test_the_pickle_of_these_tests_does_explode(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert (tmp_path / "exploded").exists()


def test_a_manifest_of_another_step_is_damaged(root):
    shutil.copy(root / "step-00000010" / "manifest.json", root / "step-00000020" / "manifest.json")
    found, loaded = load(root)
    assert same(loaded, state(10))
    assert (found.skipped[0].file, found.skipped[0].why[:21]) == ("manifest.json", "belongs to step 10: t")


def test_every_bad_file_is_named(root):
    for file in (file_name(0), file_name(1)):
        (root / "step-00000020" / file).write_bytes(b"")
    found, _ = load(root)
    assert found.skipped[0].file == file_name(0)
    assert file_name(1) in found.skipped[0].why


def test_a_copy_under_the_name_of_a_later_step_is_not_the_newest(root):
    shutil.copytree(root / "step-00000010", root / "step-99999999")
    found, _ = load(root)
    assert found.reader.checkpoint.name == "step-00000020"
    assert [str(damaged) for damaged in found.skipped] == [
        "step-99999999/manifest.json: belongs to step 10: the folder was renamed, or is a copy"
    ]

    # A name that is no step's claims nothing.
    shutil.copytree(root / "step-00000010", root / "the one I like")
    assert read_manifest(at(root / "the one I like")).step == 10


@pytest.mark.parametrize("how", ["a pipe", "endless", "huge"])
def test_a_manifest_that_cannot_be_read_to_its_end_is_damaged(root, how):
    path = root / "step-00000020" / "manifest.json"
    path.unlink()
    match how:
        case "a pipe":
            os.mkfifo(path)
        case "endless":
            path.symlink_to("/dev/zero")
        case _:
            path.touch()
            os.truncate(path, 2**40)  # it has no blocks on the disk
    found, loaded = load(root)
    assert same(loaded, state(10))
    assert re.match("cannot be read: not a regular file|more than", found.skipped[0].why)


def test_nobody_looks_at_thousands_of_damaged_checkpoints(root):
    for step in range(1000, 1100):
        (root / f"step-{step:08}").mkdir()
    with pytest.raises(UserError, match=r"the newest 50 of 102 checkpoints .*\n.*\n.*--resume RUN"):
        load(root)


def test_nothing_whole_is_an_error_that_names_each_file_and_reason(root):
    (root / "step-00000020" / file_name(1)).unlink()
    flip(root / "step-00000010" / file_name(0), 200)
    with pytest.raises(UserError) as caught:
        load(root)
    assert f"step-00000020/{file_name(1)}: missing" in caught.value.found
    assert f"step-00000010/{file_name(0)}: the bytes changed" in caught.value.found


def test_exactly_one_checkpoint_can_be_asked_for(root):
    only = "step-00000010"
    found = newest_valid(CheckpointStorage(root), VerifyingRanks.alone(), only)
    assert found is not None
    assert found.reader.manifest.step == 10
    flip(root / only / file_name(1), 100)
    with pytest.raises(UserError, match=f"{file_name(1)}: the bytes changed"):
        newest_valid(CheckpointStorage(root), VerifyingRanks.alone(), only)
    with pytest.raises(UserError, match="missing"):
        newest_valid(CheckpointStorage(root), VerifyingRanks.alone(), "step-00000011")


def other_format(root: Path, step: int, version: int) -> None:
    """Replace a manifest by one of another version of Lockstep, whose other fields may have any names."""
    (root / f"step-{step:08}" / "manifest.json").write_text(json.dumps({"format": version, "contents": {}}))


@pytest.mark.parametrize(("version", "age"), [(4, "an older"), (6, "a newer")])
def test_a_checkpoint_of_another_version_is_not_called_damaged(root, version, age):
    """Nor is it passed over, since it may be whole: only the user decides to lose the steps after the one before."""
    other_format(root, 20, version)
    for only in (None, "step-00000020"):
        with pytest.raises(UserError) as caught:
            newest_valid(CheckpointStorage(root), VerifyingRanks.alone(), only)
        assert not isinstance(caught.value, StorageUnavailable)  # there is nothing to wait for
        assert caught.value.problem == f"the checkpoint {root}/step-00000020 was written by another version of Lockstep"
        why = f"format {version}, of {age} version of Lockstep; this version reads format 5"
        assert caught.value.found == f"step-00000020/manifest.json: {why}"
        assert caught.value.fix.startswith("use the version of Lockstep that wrote it")
        assert (f"--resume {root}/step-00000010" in caught.value.fix) == (only is None)

    # A newer one that is damaged does not hide it.
    commit(root, 30)
    (root / "step-00000030" / "manifest.json").unlink()
    with pytest.raises(UserError, match="step-00000020 was written by another version of Lockstep"):
        load(root)


def test_damage_on_one_rank_is_damage_whatever_the_format(root):
    def seen_by(rank, gather):
        if rank == 1:  # its disk fails
            gather_all = gather

            def gather(value):
                if value and isinstance(value[0], list) and value[0] and isinstance(value[0][0], ReportedProblem):
                    value = [[["damaged", "manifest.json", "cannot be read"]], value[1]]
                return gather_all(value)

        return newest_valid(CheckpointStorage(root), VerifyingRanks(rank, 2, gather))

    other_format(root, 20, 1)
    for found in together(2, seen_by):
        [skipped] = found.skipped
        assert isinstance(skipped, Damaged)
        assert "cannot be read" in skipped.why
        assert "an older version" in skipped.why


def test_all_ranks_stop_if_one_of_them_cannot_read_its_share(root):
    """A file server may be down for some machines: nobody may resume from an older checkpoint then."""
    open_file = CheckpointStorage.open

    class Unmounted(CheckpointStorage):
        def open(self, key: str) -> Any:
            if key == "step-00000020/rank-00001.safetensors":
                raise OSError(errno.EIO, "Input/output error")
            return open_file(self, key)

    def search(rank: int, gather: Any) -> Any:
        return newest_valid(Unmounted(root) if rank == 1 else CheckpointStorage(root), VerifyingRanks(rank, 2, gather))

    for answer in together(2, search):
        assert isinstance(answer, StorageUnavailable)
        assert answer.problem == f"the checkpoint {root}/step-00000020 cannot be read"
        assert answer.found == "step-00000020/rank-00001.safetensors: cannot be read: Input/output error"
        assert f"--resume {root}/step-00000010" in answer.fix


@pytest.mark.parametrize("method", ["folders", "open"])
def test_all_ranks_stop_if_one_of_them_cannot_list_the_checkpoints(root, method):
    """The others would wait for it until their collective times out."""

    def fail(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    class Unmounted(CheckpointStorage):
        pass

    setattr(Unmounted, method, fail)

    def search(rank: int, gather: Any) -> Any:
        return newest_valid(Unmounted(root) if rank == 1 else CheckpointStorage(root), VerifyingRanks(rank, 2, gather))

    for answer in together(2, search):
        assert isinstance(answer, StorageUnavailable)
        assert answer.problem == f"the checkpoints in {root} cannot be listed"
        assert answer.found == "rank 1: [Errno 5] Input/output error"


def test_no_checkpoint_at_all_is_none(tmp_path):
    assert newest_valid(CheckpointStorage(tmp_path / "checkpoints"), VerifyingRanks.alone()) is None


# ---- a run that is alive ----


def test_a_checkpoint_that_its_run_deletes_is_not_damaged(tmp_path):
    """The run commits the next one, and deletes this one, while it is verified."""
    root = tmp_path / "checkpoints"
    commit(root, 1, 2)

    def commit_next() -> None:
        if not (root / "step-00000002").exists():
            commit(root, 2, 2)
            delete_checkpoint(CheckpointStorage(root), "step-00000001", "token")

    found = newest_valid(CheckpointStorage(root), VerifyingRanks.alone(commit_next))
    assert found is not None
    assert (found.reader.checkpoint.name, found.skipped) == ("step-00000002", [])


def test_a_damaged_checkpoint_is_still_skipped_if_the_one_before_it_is_deleted(root):
    flip(root / "step-00000020" / file_name(1), 150)
    commit(root, 15)

    def delete() -> None:
        delete_checkpoint(CheckpointStorage(root), "step-00000015", "token")

    found = newest_valid(CheckpointStorage(root), VerifyingRanks.alone(delete))
    assert found is not None
    assert found.reader.checkpoint.name == "step-00000010"
    assert [damaged.checkpoint.name for damaged in found.skipped] == ["step-00000020"]


def test_a_run_that_deletes_all_checkpoints_in_time_is_named(tmp_path):
    """The search ends."""
    root = tmp_path / "checkpoints"
    commit(root, 1)
    steps = iter(range(2, 1000))

    def commit_next() -> None:
        step = next(steps)
        commit(root, step)
        delete_checkpoint(CheckpointStorage(root), f"step-{step - 1:08}", "token")

    with pytest.raises(UserError, match=r"is missing: it was deleted.*\n.*checkpoint.keep=10"):
        newest_valid(CheckpointStorage(root), VerifyingRanks.alone(commit_next))


def test_only_deletions_in_a_row_count(tmp_path, monkeypatch):
    """Between two checkpoints that are deleted is a damaged one: the run is slower than the search."""
    monkeypatch.setattr(search, "MAX_DELETED", 2)
    storage = CheckpointStorage(tmp_path)
    for step in (10, 20, 30):
        commit(storage, step)
    (tmp_path / "step-00000020" / "manifest.json").unlink()

    def delete() -> None:
        names = storage.folders()
        if "step-00000030" in names:
            delete_checkpoint(storage, "step-00000030", "token")
        elif "step-00000010" in names:
            commit(storage, 40)
            delete_checkpoint(storage, "step-00000010", "token")

    found = newest_valid(storage, VerifyingRanks.alone(delete))
    assert found is not None
    assert found.reader.checkpoint.name == "step-00000040"


def test_one_checkpoint_that_was_chosen_and_deleted_is_missing(root):
    def delete() -> None:
        delete_checkpoint(CheckpointStorage(root), "step-00000010", "token")

    with pytest.raises(UserError, match=r"step-00000010 is missing: it was deleted"):
        newest_valid(CheckpointStorage(root), VerifyingRanks.alone(delete), "step-00000010")

    # As for an export.
    with pytest.raises(UserError, match=r"step-00000010 is missing: it was deleted"):
        read_weights(Checkpoint(CheckpointStorage(root), "step-00000010"))


# ---- several ranks ----


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_come_to_the_same_answer(root, size):
    """Each rank reads only its files: only one of them can have seen the damage."""
    flip(root / "step-00000020" / file_name(1), 150)
    answers = together(
        size, lambda rank, gather: newest_valid(CheckpointStorage(root), VerifyingRanks(rank, size, gather))
    )
    for found in answers:
        assert found.reader.manifest.step == 10
        assert [(damaged.checkpoint.name, damaged.file) for damaged in found.skipped] == [
            ("step-00000020", file_name(1))
        ]


def test_every_file_is_read_by_one_rank(pristine, monkeypatch):
    seen = []
    monkeypatch.setattr("lockstep.checkpoint.integrity.verify_file", lambda folder, file, beat: seen.append(file.name))
    together(2, lambda rank, gather: newest_valid(CheckpointStorage(pristine), VerifyingRanks(rank, 2, gather)))
    assert sorted(seen) == [file_name(0), file_name(1)]


@pytest.mark.parametrize(("first", "second"), [("full", "empty"), ("empty", "full"), ("full", "claimed by another")])
def test_ranks_with_disks_of_their_own_are_told(root, tmp_path, monkeypatch, first, second):
    monkeypatch.setattr(search, "LOOK_PAUSE_S", 0.0)
    (tmp_path / "empty").mkdir()
    shutil.copytree(root, tmp_path / "claimed by another")
    shutil.copy(root / "owner", tmp_path / "empty" / "owner")  # so that it must be noticed otherwise
    claim(CheckpointStorage(tmp_path / "claimed by another"), "other")
    places = [tmp_path / {"full": "checkpoints"}.get(name, name) for name in (first, second)]
    for answer in together(
        2, lambda rank, gather: newest_valid(CheckpointStorage(places[rank]), VerifyingRanks(rank, 2, gather))
    ):
        assert isinstance(answer, UserError)
        assert "share" in answer.fix


class StaleListing(CheckpointStorage):
    """A folder on NFS whose listing is old for the first few looks: it lacks the newest checkpoints, or all of them."""

    old_looks = 3

    def __init__(self, root, old):
        super().__init__(root)
        self.old = old

    def folders(self) -> list[str]:
        self.old_looks -= 1
        return super().folders() if self.old_looks < 0 else self.old


@pytest.mark.parametrize("old", [[], ["step-00000010"]])
@pytest.mark.parametrize("stale_rank", [0, 1])
def test_an_old_listing_of_the_folder_is_looked_at_again(root, monkeypatch, stale_rank, old):
    monkeypatch.setattr(search, "LOOK_PAUSE_S", 0.0)

    def work(rank, gather):
        return newest_valid(
            StaleListing(root, old) if rank == stale_rank else CheckpointStorage(root), VerifyingRanks(rank, 2, gather)
        )

    assert [found.reader.checkpoint.name for found in together(2, work)] == ["step-00000020"] * 2


class LateFile(CheckpointStorage):
    """A folder on NFS in which this machine does not see one file yet."""

    def __init__(self, root, file):
        super().__init__(root)
        self.file = file

    def open(self, key):
        if key == f"step-00000020/{self.file}":
            raise FileNotFoundError(key)
        return super().open(key)


@pytest.mark.parametrize("file", [file_name(0), file_name(1), "manifest.json"])
@pytest.mark.parametrize("late", [(0,), (1,), (0, 1)])
def test_a_file_that_only_some_ranks_see_is_not_called_damaged(root, file, late):
    """The checkpoint was set aside, and the run lost its progress. A file that no rank sees is lost."""

    def work(rank, gather):
        storage = LateFile(root, file) if rank in late else CheckpointStorage(root)
        return newest_valid(storage, VerifyingRanks(rank, 2, gather))

    verifying = {file_name(0): (0,), file_name(1): (1,), "manifest.json": (0, 1)}[file]
    for answer in together(2, work):
        if len(late) == 2:
            assert answer.reader.checkpoint.name == "step-00000010"
        elif set(late) & set(verifying):
            assert isinstance(answer, StorageUnavailable)
            assert file in answer.found
        else:
            assert answer.reader.checkpoint.name == "step-00000020"


def test_ranks_that_read_different_manifests_are_told(root, tmp_path):
    other = shutil.copytree(root, tmp_path / "other")
    manifest = read_manifest(at(other / "step-00000020"))
    manifest.values["list"].append(1)
    (other / "step-00000020" / "manifest.json").write_bytes(encode_manifest(manifest))
    answers = together(
        2, lambda rank, gather: newest_valid(CheckpointStorage([root, other][rank]), VerifyingRanks(rank, 2, gather))
    )
    assert all(isinstance(answer, UserError) and "different manifests" in answer.found for answer in answers)


# ---- any bytes at all ----

edits = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255), st.sampled_from(["set", "insert", "delete"])))


def edited(data: bytes, changes: list[tuple[int, int, str]]) -> bytes:
    out = bytearray(data)
    for position, byte, how in changes:
        at = position % (len(out) + 1)
        if how == "insert" or at == len(out):
            out.insert(at, byte)
        elif how == "delete":
            del out[at]
        else:
            out[at] = byte
    return bytes(out)


@settings(max_examples=80, deadline=None)
@given(file=st.sampled_from(FILES), changes=edits)
def test_any_edit_is_noticed_or_changes_nothing(pristine, tmp_path_factory, file, changes):
    root = shutil.copytree(pristine, tmp_path_factory.mktemp("edit") / "checkpoints")
    path = root / "step-00000020" / file
    path.write_bytes(edited(path.read_bytes(), changes))
    found = None
    with suppress(UserError):
        found, loaded = load(root)

    if found is None:
        assert json.loads(path.read_bytes())["format"] != FORMAT
    elif found.reader.manifest.step == 20:
        assert same({k: v for k, v in loaded.items() if k != "t"}, state(20))
        assert repr(found.reader.manifest) == repr(read_manifest(at(pristine / "step-00000020")))
    else:
        assert found.skipped[0].file == file
        assert same(loaded, state(10))
    shutil.rmtree(root)


ODD = [
    *(None, True, -1, 0, 1, 7, 2**62, 2**63, 10**40, 1.5, -0.0, 1e308, "", "F32", "I64", "../x", "/etc/passwd"),
    *("manifest.json", file_name(0), file_name(1), ".", "a\0b", "\ud800"),
    *([], {}, [0], [[]], {"$float": "nan"}, {"$float": 3}),
]


def places(value: object, path: tuple = ()) -> list[tuple]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, item in items for place in places(item, (*path, key))]


def surgery(data: st.DataObject, document: dict) -> None:
    """Replace, delete_checkpoint, repeat or swap something somewhere."""
    for _ in range(data.draw(st.integers(1, 3))):
        found = places(document)
        if not found:
            return
        *way, last = data.draw(st.sampled_from(found))
        owner = document
        for key in way:
            owner = owner[key]
        how = data.draw(st.sampled_from(["replace", "remove", "repeat", "swap"]))
        if how == "remove":
            del owner[last]
        elif how == "repeat" and isinstance(owner, list):
            owner.append(deepcopy(owner[last]))
        elif how == "swap" and len(owner) > 1:
            other = data.draw(st.sampled_from(list(owner) if isinstance(owner, dict) else range(len(owner))))
            owner[last], owner[other] = owner[other], owner[last]
        else:
            owner[last] = deepcopy(data.draw(st.sampled_from(ODD)))


def read_everything(folder: Path) -> dict[str, torch.Tensor] | Damaged:
    checkpoint = at(folder)
    try:
        manifest = read_manifest(checkpoint)
        if found := verify_files(checkpoint, manifest, manifest.files):
            return found[0]
        reader = CheckpointReader(checkpoint, manifest)
        return {name: reader.read(name) for name in reader.names()}
    except Damaged as damaged:
        return damaged


def kinds(tensors: dict[str, torch.Tensor]) -> dict[str, tuple]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def seal(folder: Path, document: dict) -> None:
    """Write a manifest whose digest is right, whatever it says."""
    text = json.dumps(document["content"], sort_keys=True, separators=(",", ":"))
    document["digest"] = xxhash.xxh3_128(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(document))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_forged_manifest_with_a_right_digest_raises_nothing_but_damaged(pristine, tmp_path_factory, data):
    folder = shutil.copytree(pristine / "step-00000020", tmp_path_factory.mktemp("forged") / "step-00000020")
    document = json.loads((folder / "manifest.json").read_bytes())
    surgery(data, document["content"])
    seal(folder, document)
    loaded = read_everything(folder)
    if not isinstance(loaded, Damaged):  # what cannot be told from the truth: names, values, and tensors swapped
        assert set(kinds(loaded).values()) <= set(kinds(state(20)).values())
    shutil.rmtree(folder)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_forged_safetensors_header_raises_nothing_but_damaged(pristine, tmp_path_factory, data):
    folder = shutil.copytree(pristine / "step-00000020", tmp_path_factory.mktemp("forged") / "step-00000020")
    path = folder / file_name(0)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    surgery(data, header)
    text = json.dumps(header).encode()
    claimed = data.draw(st.sampled_from([len(text)] * 6 + [0, len(text) - 1, 2**40, 2**64 - 1]))
    path.write_bytes(claimed.to_bytes(8, "little") + text + raw[8 + length :])
    document = json.loads((folder / "manifest.json").read_bytes())
    digest = xxhash.xxh3_128(path.read_bytes()).hexdigest()
    document["content"]["files"][0].update(size=path.stat().st_size, digest=digest)
    seal(folder, document)
    loaded = read_everything(folder)
    if isinstance(loaded, Damaged):
        assert loaded.file == path.name
    else:
        assert kinds(loaded) == kinds({**state(20), "t": state(20)["model.bias"]})
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda c: c["files"][0].update(name="../part"), "not a plain file name"),
        (lambda c: c["files"][0].update(name="/etc/passwd"), "not a plain file name"),
        (lambda c: c["files"].append(c["files"][0]), "listed twice"),
        (lambda c: c["tensors"]["model.weight"].update(dtype="F128"), "unknown dtype"),
        (lambda c: c["tensors"]["model.weight"]["pieces"].pop(), "do not add up to the full tensor"),
        (lambda c: c["tensors"]["model.weight"]["pieces"][0].update(offset=[4, 0]), "not a grid"),
        (lambda c: c["tensors"]["model.weight"]["pieces"][1].update(offset=[5, 0]), "exceeds the tensor's shape"),
        (lambda c: c["tensors"]["model.weight"]["pieces"][1].update(file="other"), "not listed"),
        (lambda c: c["tensors"]["model.weight"].update(shape=[2**40, 0, 2**40]), "too large"),
        (lambda c: c["tensors"]["model.weight"].update(shape=[0] * 65), "too many dimensions"),
        (lambda c: c["aliases"].update(t="nobody"), "has no valid target"),
        (lambda c: c.pop("time"), "missing or unknown keys: time"),
        (lambda c: c.update(step=-1), "step is not a count"),
        (lambda c: c.update(step=True), "step is not a count"),
        (lambda c: c.update(values={"a": {"$float": "2"}}), "is not a number"),
    ],
)
def test_each_lie_of_a_manifest_is_named(pristine, change, why):
    document = json.loads((pristine / "step-00000020" / "manifest.json").read_bytes())
    change(document["content"])
    text = json.dumps(document["content"], sort_keys=True, separators=(",", ":"))
    document["digest"] = xxhash.xxh3_128(text.encode()).hexdigest()
    with pytest.raises(Damaged, match=why):
        decode_manifest(json.dumps(document).encode(), at(pristine))


def moved(manifest: Manifest, **fields: Any) -> Manifest:
    """Change the second piece of a tensor."""
    entry = manifest.tensors["model.weight"]
    first, second = entry.pieces
    changed = replace(entry, pieces=(first, second._replace(**fields)))
    return replace(manifest, tensors=manifest.tensors | {"model.weight": changed})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: replace(m, files=(*m.files, m.files[0])), "listed twice"),
        (lambda m: replace(m, files=(replace(m.files[0], name="../part"), m.files[1])), "not a plain file name"),
        (lambda m: moved(m, offset=(0, 0)), "not a grid"),
        (lambda m: moved(m, offset=(5, 0)), "exceeds the tensor's shape"),
        (lambda m: moved(m, shape=(1, 3)), "do not add up to the full tensor"),
        (lambda m: moved(m, file="other"), "not listed"),
        (lambda m: moved(m, file=m.files[0].name), "two pieces in the same file"),
        (lambda m: replace(m, aliases={"t": "nobody"}), "has no valid target"),
        (lambda m: replace(m, values={"a": {"$float": "2"}}), "is not a number"),
    ],
)
def test_what_could_not_be_read_is_not_written(pristine, change, why):
    manifest = read_manifest(at(pristine / "step-00000020"))
    check_written(manifest, 1000, at(pristine))
    with pytest.raises(Damaged, match=why):
        check_written(change(manifest), 1000, at(pristine))
    with pytest.raises(Damaged, match=why):
        decode_manifest(encode_manifest(change(manifest)), at(pristine))
    with pytest.raises(Damaged, match="more than"):
        check_written(manifest, 2**30, at(pristine))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"format": NaN, "digest": "", "content": {}}', "NaN is not JSON"),
        (b'{"format": 1, "format": 1, "digest": "", "content": {}}', "a key occurs twice"),
        (b'{"format": true, "digest": "", "content": {}}', "format is not a count"),
        (b"[" * 100_000, "recursion|nested"),
        (b'{"format": ' + b"9" * 5000 + b"}", "digits"),
        (b"\xff", "decode"),
    ],
)
def test_what_is_no_manifest_is_damaged(tmp_path, text, why):
    with pytest.raises(Damaged, match=why):
        decode_manifest(text, at(tmp_path))


def test_a_file_with_another_dtype_than_the_manifest_says_is_a_problem_before_anything_is_read(root):
    checkpoint = at(root / "step-00000020")
    manifest = read_manifest(checkpoint)
    entry = manifest.tensors["model.weight"]
    manifest.tensors["model.weight"] = replace(entry, dtype="I32")
    assert {damaged.file for damaged in verify_files(checkpoint, manifest, manifest.files)} == {
        piece.file for piece in entry.pieces
    }


def of_pieces(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Manifest:
    """Return the manifest of one tensor, in pieces (offset, shape) of one file each."""
    pieces = tuple(Piece(f"part{number}", offset, size) for number, (offset, size) in enumerate(boxes))
    files = tuple(File(piece.file, 1, "") for piece in pieces)
    return Manifest(1, 0.0, "", files, {"x": TensorEntry("U8", shape, pieces)})


def test_the_pieces_of_a_tensor_are_a_grid(tmp_path):
    side = 40
    whole = of_pieces((2 * side, side), [((2 * row, column), (2, 1)) for row in range(side) for column in range(side)])
    assert decode_manifest(encode_manifest(whole), at(tmp_path)) == whole

    # Every row is cut in another place, which no way of sharding does.
    rows = [((row, start), (1, size)) for row in range(30) for start, size in ((0, row + 1), (row + 1, 39 - row))]
    with pytest.raises(Damaged, match="the pieces of tensor 'x' are not a grid"):
        decode_manifest(encode_manifest(of_pieces((30, 40), rows)), at(tmp_path))


def test_a_manifest_is_written_in_one_fixed_way(pristine):
    """Its digest is that of its contents, with sorted keys and without spaces; so is the whole file."""
    data = (pristine / "step-00000020" / "manifest.json").read_bytes()
    assert json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode() == data


def test_a_file_that_changes_after_it_was_verified_is_noticed_by_the_reader(root):
    path = root / "step-00000020"
    reader = CheckpointReader(at(path), read_manifest(at(path)))
    os.truncate(path / file_name(0), (path / file_name(0)).stat().st_size - 8)
    with pytest.raises(Damaged, match=file_name(0)):
        [reader.read(name) for name in reader.names()]
