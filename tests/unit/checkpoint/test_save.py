"""What is saved comes back, from any number of ranks and either storage; a save that fails harms nothing."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import stat
import subprocess
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import TOKEN, at, commit, end, is_committed, load, same, savers, shard, state, values_of
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.filesize import decimal
from safetensors import safe_open

from lockstep import faults
from lockstep.checkpoint import reader as reader_module
from lockstep.checkpoint.command import prune
from lockstep.checkpoint.manifest import File, Manifest, Piece, TensorEntry, encode_manifest
from lockstep.checkpoint.manifest_reader import decode_manifest, read_manifest
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.saving import commit as committing
from lockstep.checkpoint.saving import snapshot as snapshot_module
from lockstep.checkpoint.saving.draft import Draft, SaveContext
from lockstep.checkpoint.saving.outcome import Committed, SaveFailed, Written
from lockstep.checkpoint.saving.save import Save
from lockstep.checkpoint.state.encoding import pack, unpack
from lockstep.checkpoint.state.reshard import Rank0Contents, RankContents
from lockstep.checkpoint.storage import folder as folder_module
from lockstep.checkpoint.storage.folder import Checkpoint, CheckpointStorage, NotDurable, list_checkpoints
from lockstep.checkpoint.storage.stores import allow_store
from lockstep.checkpoint.storage.transitions import (
    claim,
    delete_checkpoint,
    delete_leftovers,
    put_back_replaced,
    set_aside,
    set_aside_later,
)
from lockstep.config.sections import CheckpointConfig
from lockstep.errors import UserError
from lockstep.run_folder.checkpoint_names import MANIFEST, file_name
from lockstep.runtime.shards import LocalShard, shard_of

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int16, torch.uint16, torch.float16, torch.bfloat16),
    *(torch.int32, torch.uint32, torch.float32, torch.int64, torch.uint64, torch.float64),
]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(params=["file", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStorage:
    allow_store("memory_store:MemoryStore")
    return CheckpointStorage(tmp_path, None if request.param == "file" else "memory_store:MemoryStore://bucket")


def folders(storage: CheckpointStorage) -> set[str]:
    return set(storage.folders())


def fill_disk(monkeypatch) -> None:
    """Have the next saves find a full disk when their files are half written."""
    plan = faults.Fault("disk full", times=None)
    monkeypatch.setattr(faults, "planned", lambda: [plan])


@pytest.mark.parametrize("size", [1, 3])
def test_every_dtype_and_shape_comes_back_bit_for_bit(storage, size):
    shapes = [(), (1,), (0,), (5,), (0, 4), (7, 3), (2, 3, 5)]
    raw = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    tensors = {}
    for dtype in DTYPES:
        for shape in shapes:
            source = raw % 2 if dtype is torch.bool else raw
            count = math.prod(shape)
            tensors[f"{dtype}{shape}"] = source[: count * dtype.itemsize].view(dtype).reshape(shape)
    commit(storage, 1, size, tensors)
    _, found = load(storage)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[name]) == bits(tensor), name


def test_tensors_that_are_not_contiguous_or_have_gradients_come_back(tmp_path):
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    tensors = {
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "expanded": torch.ones(1).expand(4, 3),
        "parameter": torch.nn.Parameter(base.clone()),
        "reversed": base.flip(0),
    }
    path = commit(tmp_path, 1, 1, tensors).path
    assert same(load(tmp_path)[1], tensors)
    with safe_open(path / file_name(0), "pt") as file:  # the stock reader agrees
        assert same({name: file.get_tensor(name) for name in file.keys()}, tensors)  # noqa: SIM118


def test_names_are_free(storage):
    tensors = {name: torch.tensor(number) for number, name in enumerate(["a/../b", "é\n", "", "x#0"])}
    commit(storage, 1, 1, tensors)
    assert same(load(storage)[1], tensors)


@pytest.mark.parametrize("bad", [torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()])
def test_a_tensor_that_cannot_be_saved_is_named(storage, bad):
    [saver] = savers(storage)
    with pytest.raises(UserError, match=r"'model\.spectrum'"):
        saver.copy_and_write(1, RankContents({"model.spectrum": shard_of(bad)}))


def test_values_come_back_with_what_json_cannot_hold(storage):
    values = {
        "numbers": {"loss": math.inf, "other": -math.inf},
        "list": [1, 2.5, None, True, "text", [], {}],
        "looks like ours": [{"$float": "nan", "x": 1}, {"$x": 1}, {"$": {"x": math.inf}}],
        "large": 2**100,
        "tiny": 5e-324,
        "tuple": (1, (math.inf,)),
    }
    commit(storage, 1, values={**values, "nan": math.nan})
    found = values_of(load(storage)[0].reader)
    assert math.isnan(found.pop("nan"))
    assert found == values
    assert b"NaN" not in Checkpoint(storage, "step-00000001").open(MANIFEST).read()


def test_state_that_looks_like_an_encoding_comes_back():
    state = [
        {"$float": "nan"},
        {"$float": 1.0},
        {"$tensor": "x"},
        {"$items": [math.inf]},
        {"$$float": 1},
        (1, {"$": 2}),
    ]
    saved = json.dumps(pack(state, "state", {}), allow_nan=False)
    assert unpack(json.loads(saved), pytest.fail, torch.device("cpu")) == state


NOT_IN_TORCH = [np.array(["cat"]), np.array(["2026-01-01"], dtype="datetime64[D]"), np.array([object()])]


@pytest.mark.parametrize("bad", [{1}, 1j, np.complex64(1j), np.longdouble(1), object(), *NOT_IN_TORCH])
def test_a_value_that_json_cannot_hold_is_named(bad):
    with pytest.raises(UserError, match=r"^values\.a\.0 cannot be saved: a \w+ is neither"):
        pack({"a": [bad]}, "values", {})


@pytest.mark.parametrize("order", ["<", ">"])
def test_an_array_may_have_any_byte_order(order: str):
    """numpy reads files of the other order without a copy, and torch raised a ValueError."""
    tensors: dict[str, torch.Tensor] = {}
    packed = pack(np.arange(4, dtype=f"{order}i4"), "array", tensors)
    assert unpack(packed, tensors.__getitem__, torch.device("cpu")).tolist() == [0, 1, 2, 3]


def test_the_encoding_of_values_is_part_of_the_file_format():
    """What is written here was written by the first version with format 2. If it changes, so must `FORMAT`."""
    state = {
        "tuple": (1, 2.5, math.nan),
        "keys": {1: "x", 2: -math.inf},
        "looks like ours": {"$float": "nan"},
        "numpy": [np.float64(math.inf), np.int64(3), np.bool_(True)],
        "array": np.arange(3),
        "tensor": torch.ones(2),
        "plain": [None, True, "text", {}],
    }
    tensors: dict[str, torch.Tensor] = {}
    assert json.dumps(pack(state, "state", tensors)) == (
        '{"tuple": {"$tuple": [1, 2.5, {"$float": "nan"}]}, "keys": {"$items": [[1, "x"], [2, {"$float": "-inf"}]]}, '
        '"looks like ours": {"$items": [["$float", "nan"]]}, "numpy": [{"$float": "inf"}, 3, true], '
        '"array": {"$array": "state.array"}, "tensor": {"$tensor": "state.tensor"}, "plain": [null, true, "text", {}]}'
    )
    assert list(tensors) == ["state.array", "state.tensor"]


def test_a_manifest_has_the_bytes_of_format_5():
    piece = Piece("rank-00000.safetensors", (0, 0), (2, 3))
    manifest = Manifest(
        step=7,
        time=1.5,
        lockstep="0.1.0",
        files=(File("rank-00000.safetensors", 4120, "ab"),),
        tensors={"model.w": TensorEntry("F32", (2, 3), (piece,))},
        aliases={"model.v": "model.w"},
        values=pack({"loop": {"loss": math.nan, "accuracy": 0.5}}, "values", {}),
    )
    data = encode_manifest(manifest)
    assert data == FORMAT_5
    decoded = decode_manifest(FORMAT_5, Checkpoint(CheckpointStorage(Path()), "step-00000007"))
    assert decoded == manifest


FORMAT_5 = (
    b'{"content":{"aliases":{"model.v":"model.w"},"files":[{"digest":"ab","name":"rank-00000.safetensors","size":4120}],'
    b'"lockstep":"0.1.0","step":7,"tensors":{"model.w":{"dtype":"F32","pieces":[{"file":"rank-00000.safetensors",'
    b'"offset":[0,0],"shape":[2,3]}],"shape":[2,3]}},"time":1.5,"values":{"loop":{"accuracy":0.5,'
    b'"loss":{"$float":"nan"}}}},"digest":"9b1d8417ebae8cb3afcad162b138959a","format":5}'
)


def test_the_state_is_that_of_the_moment_of_the_save(storage, monkeypatch):
    """Training continues while the thread writes: the fault delays it until everything has changed."""
    [saver] = savers(storage)
    changed = threading.Event()
    monkeypatch.setattr(faults, "fire", lambda phase, step: changed.wait(60) and None)
    tensors, values = state(1), {"list": [1]}
    saver.copy_and_write(1, RankContents(shard(tensors, 0, 1), Rank0Contents(values=pack(values, "values", {}))))
    for tensor in tensors.values():
        tensor.zero_()
    values["list"].append(2)
    changed.set()
    assert is_committed(saver.take_ended()[0])
    found, loaded = load(storage)
    assert same(loaded, state(1))
    assert found.reader.manifest.values == {"list": [1]}


def test_a_second_save_waits_for_the_first_and_reuses_its_buffer(storage):
    [saver] = savers(storage)
    saver.reserve(shard(state(0), 0, 1))
    size = saver._buffer.layout.file_size
    buffer = saver._buffer._memory.data_ptr()
    for step in (1, 2, 3):
        saver.copy_and_write(step, RankContents(shard(state(step), 0, 1)))
    reports = saver.take_ended()
    assert [report.outcome.checkpoint.step for report in reports] == [1, 2, 3]
    assert saver._last.file_size == size
    assert saver._buffer._memory.data_ptr() == buffer
    more = {**state(4), "model.new": torch.ones(1000)}
    saver.copy_and_write(4, RankContents(shard(more, 0, 1)))  # the layout may change
    assert is_committed(saver.take_ended()[0])
    assert same(load(storage)[1], more)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("copy_later", [(), ("f4",)])
def test_a_save_that_has_ended_does_not_keep_the_buffer(tmp_path, monkeypatch, asynchronous, copy_later):
    """A run that has ended may stay in the user's hands, and the buffer is as large as all that this rank writes."""
    memory = []

    def allocate(size: int, pinned: bool) -> torch.Tensor:
        array = np.zeros(size, dtype=np.uint8)
        memory.append(weakref.ref(array))
        return torch.from_numpy(array)

    monkeypatch.setattr(snapshot_module, "_allocate", allocate)
    saver = savers(tmp_path, asynchronous=asynchronous)[0]
    contents = RankContents({"f4": shard_of(torch.ones(3)), "f8": shard_of(torch.ones(3))}, copy_later=copy_later)
    save = saver.copy_and_write(1, contents)
    assert save.wait()
    saver.close()
    assert isinstance(save.outcome, Committed)
    assert memory[0]() is None


def test_saving_at_once_needs_no_thread(storage):
    [saver] = savers(storage, asynchronous=False)
    saver.copy_and_write(1, RankContents(shard(state(1), 0, 1)))
    [report] = saver.take_ended(0)
    assert is_committed(report)
    assert report.stall_s >= report.write_s > 0
    assert saver.take_ended(0) == []


def test_aliases_share_bytes(storage):
    checkpoint = commit(storage, 1, aliases={"model.head": "model.weight"})
    _, found = load(storage)
    assert torch.equal(found["model.head"], found["model.weight"])
    assert "model.head" not in read_manifest(checkpoint).tensors


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_slice_can_be_read_whatever_the_pieces(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    size = data.draw(st.integers(1, 4))
    axis = data.draw(st.integers(0, len(shape) - 1))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    root = tmp_path_factory.mktemp("slices")
    team = savers(root, size)
    for rank, saver in enumerate(team):
        low, high = shape[axis] * rank // size, shape[axis] * (rank + 1) // size
        offset = tuple(low if a == axis else 0 for a in range(len(shape)))
        saver.copy_and_write(1, RankContents({"x": LocalShard(whole.narrow(axis, low, high - low), shape, offset)}))
    assert is_committed(team[0].take_ended()[0])
    checkpoint = at(root / "step-00000001")
    corners = [sorted(data.draw(st.tuples(*[st.integers(0, length)] * 2))) for length in shape]
    reader = CheckpointReader(checkpoint, read_manifest(checkpoint))
    part = reader.read_slice("x", [low for low, _ in corners], [high - low for low, high in corners])
    assert torch.equal(part, whole[tuple(slice(low, high) for low, high in corners)])
    shutil.rmtree(root)


@pytest.mark.parametrize("most", [1, 64])
def test_a_restore_opens_each_file_once(tmp_path, monkeypatch, most):
    """Besides the header, as long as not too many files are open at a time."""
    checkpoint = commit(tmp_path, 1, 3)
    opened = []
    open_file = CheckpointStorage.open

    def note(self, key):
        opened.append(open_file(self, key))
        return opened[-1]

    reader = CheckpointReader(checkpoint, read_manifest(checkpoint))
    monkeypatch.setattr(reader_module, "MAX_OPEN_FILES", most)
    monkeypatch.setattr(CheckpointStorage, "open", note)
    with reader.keeping_open():
        assert same({name: reader.read(name) for name in reader.names()}, state(1))
        assert sum(not stream.closed for stream in opened) == min(most, 3)
    assert all(stream.closed for stream in opened)
    assert most == 1 or len(opened) == 2 * 3

    # Outside of the block, nothing stays open.
    reader.read("model.weight")
    assert all(stream.closed for stream in opened)


def test_a_slice_outside_and_an_unknown_name_are_refused(storage):
    checkpoint = commit(storage, 1)
    reader = CheckpointReader(checkpoint, read_manifest(checkpoint))
    with pytest.raises(ValueError, match="does not fit"):
        reader.read_slice("model.weight", (0, 0), (8, 1))
    with pytest.raises(KeyError, match=r"model\.wait"):
        reader.read("model.wait")


def test_a_slice_is_read_from_the_files_that_hold_some_of_it(tmp_path, monkeypatch):
    """Opening the files of thousands of ranks, each for its header, would take minutes in an object store."""
    commit(tmp_path, 1, size=7)
    reader = load(tmp_path)[0].reader
    reader = CheckpointReader(reader.checkpoint, reader.manifest)
    opened = []
    open_file = CheckpointStorage.open
    monkeypatch.setattr(CheckpointStorage, "open", lambda self, key: opened.append(key) or open_file(self, key))
    part = reader.read_slice("model.weight", (2, 1), (2, 3))
    assert torch.equal(part, state(1)["model.weight"][2:4, 1:4])
    assert set(opened) == {f"step-00000001/{file_name(rank)}" for rank in (2, 3)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_are_those_of_the_moment_too(storage):
    [saver] = savers(storage)
    tensors = {"on gpu": torch.randn(3_000_001, device="cuda"), "on cpu": torch.randn(5)}
    expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    saver.copy_and_write(1, RankContents({name: shard_of(tensor) for name, tensor in tensors.items()}))
    for tensor in tensors.values():
        tensor.zero_()
    assert saver._buffer._memory.is_pinned()
    assert is_committed(saver.take_ended()[0])
    assert same(load(storage)[1], expected)


# ---- what goes wrong ----


def test_ranks_that_write_the_same_rows_do_not_commit(storage):
    team = savers(storage, 2)
    for saver in team:
        saver.copy_and_write(1, RankContents({"x": shard_of(torch.ones(3))}))
    reports = end(team)
    assert not is_committed(reports[0])
    assert "do not add up to the full tensor" in reports[0].outcome.reason
    assert folders(storage) == set()


def test_too_little_space_is_noticed_before_anything_is_written(storage, monkeypatch):
    commit(storage, 1)
    [saver] = savers(storage)
    saver.reserve(shard(state(2), 0, 1))
    size = saver._buffer.layout.file_size
    monkeypatch.setattr(type(storage), "free_bytes", lambda self: size - 10)
    saver.copy_and_write(2, RankContents(shard(state(2), 0, 1)))
    [report] = saver.take_ended(0)
    assert not is_committed(report)
    assert "no space left" in report.outcome.reason
    assert report.outcome.reason.endswith(f"{decimal(10)} too little")
    assert same(load(storage)[1], state(1))
    monkeypatch.undo()
    saver.copy_and_write(3, RankContents(shard(state(3), 0, 1)))
    assert is_committed(saver.take_ended()[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_fills_up_costs_one_checkpoint_and_nothing_else(storage, monkeypatch, rank):
    commit(storage, 1, 2)
    team = savers(storage, 2)
    fill_disk(monkeypatch)
    failing = team[rank].copy_and_write(2, RankContents(shard(state(2), rank, 2)))
    [report] = team[rank].take_ended()
    assert "no space left" in report.outcome.reason
    monkeypatch.undo()
    other = team[1 - rank].copy_and_write(2, RankContents(shard(state(2), 1 - rank, 2)))
    for save in (failing, other):
        save.abort("a disk is full")
    assert not is_committed(end([team[1 - rank]])[0])
    assert folders(storage) == {"step-00000001"}
    for number, saver in enumerate(team):  # once there is room again, the same step can be saved
        saver.copy_and_write(2, RankContents(shard(state(2), number, 2)))
    assert is_committed(end(team)[0])
    assert same(load(storage)[1], state(2))


def test_rank_0_learns_of_another_ranks_failure_through_the_storage(storage, monkeypatch):
    team = savers(storage, 2)
    fill_disk(monkeypatch)
    team[1].copy_and_write(1, RankContents(shard(state(1), 1, 2)))
    team[1].take_ended()
    monkeypatch.undo()
    team[0].copy_and_write(1, RankContents(shard(state(1), 0, 2)))
    [report] = team[0].take_ended(30)
    assert report.outcome.reason.startswith("rank 1: no space left")
    assert report.outcome.caused_elsewhere


def test_a_folder_that_vanishes_while_it_is_made_is_another_ranks_failure(tmp_path, monkeypatch):
    """`mkdir` finds the folder, looks again, and another rank has deleted it: it says that the folder exists."""
    [saver] = savers(tmp_path / "checkpoints")

    def write(*_):
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(CheckpointStorage, "write", write)
    saver.copy_and_write(1, RankContents({"x": shard_of(torch.ones(3))}))
    [report] = saver.take_ended()
    assert report.outcome.caused_elsewhere
    assert "the uncommitted folder is gone" in report.outcome.reason


def test_a_file_that_rank_0_does_not_find_is_no_folder_that_is_gone(storage):
    """On a shared file system, a file that another rank has confirmed may be lost."""
    team = savers(storage, 2)
    team[1].copy_and_write(1, RankContents(shard(state(1), 1, 2)))
    team[1].take_ended()
    [uncommitted] = storage.folders()
    storage.delete(f"{uncommitted}/{file_name(1)}")
    team[0].copy_and_write(1, RankContents(shard(state(1), 0, 2)))
    [report] = team[0].take_ended()
    assert report.outcome.reason == f"{uncommitted}/{file_name(1)}: missing"
    assert not report.outcome.caused_elsewhere


def test_an_abort_deletes_no_file_that_rank_0_may_commit(storage, monkeypatch):
    """Rank 0 has read the confirmation of rank 1, which then ends its run: the checkpoint had no file of rank 1."""
    team = savers(storage, 2)
    read, aborted = threading.Event(), threading.Event()

    def before_rename(phase, step):
        if phase == "rename":
            read.set()
            assert aborted.wait(30)

    confirm = Draft.confirm

    def then_abort(self, confirmation):
        confirm(self, confirmation)
        if self.context.rank == 1:
            assert read.wait(30)
            saves[1]._abort.request("the run ended")

    monkeypatch.setattr(faults, "fire", before_rename)
    monkeypatch.setattr(Draft, "confirm", then_abort)
    saves = [saver.copy_and_write(1, RankContents(shard(state(1), rank, 2))) for rank, saver in enumerate(team)]
    saves[1].wait()
    saves[1].abort("the run ended")
    aborted.set()
    assert is_committed(team[0].take_ended()[0])
    assert saves[1].outcome == SaveFailed("the run ended")
    assert same(load(storage)[1], state(1))


def test_an_abort_before_the_confirmation_leaves_nothing(storage, monkeypatch):
    """The last chunk is written when the save is aborted."""
    saver = savers(storage, 2)[1]
    write = CheckpointStorage.write

    def then_abort(self, key, chunks):
        write(self, key, chunks)
        saver._last._abort.request("the run ended")

    monkeypatch.setattr(CheckpointStorage, "write", then_abort)
    saver.copy_and_write(1, RankContents(shard(state(1), 1, 2)))
    assert saver.take_ended()[0].outcome == SaveFailed("the run ended")
    assert folders(storage) == set()


def test_a_file_that_vanishes_before_the_commit_costs_this_checkpoint(storage, monkeypatch):
    commit(storage, 1, 2)
    team = savers(storage, 2)

    def lose(phase, step):
        if phase == "rename":
            storage.delete(f"step-00000002.tmp-{TOKEN}-1/{file_name(1)}")

    monkeypatch.setattr(faults, "fire", lose)
    for rank, saver in enumerate(team):
        saver.copy_and_write(2, RankContents(shard(state(2), rank, 2)))
    assert end(team)[0].outcome.reason == f"step-00000002.tmp-{TOKEN}-1/{file_name(1)}: missing"
    assert folders(storage) == {"step-00000001"}


def test_a_rank_that_has_written_its_file_fails_with_the_others(storage):
    team = savers(storage, 2)
    team[1].copy_and_write(1, RankContents(shard(state(1), 1, 2)))
    [report] = team[1].take_ended()
    assert report.outcome == Written()
    report.abort("rank 0: no space left")
    assert report.outcome == SaveFailed("rank 0: no space left")


def test_one_rank_may_write_almost_everything(storage, monkeypatch):
    """As with replicated tensors, of which the largest may be most of the model: the others' files are small."""
    team = savers(storage, 3)
    shards = [{"large": shard_of(torch.ones(50_000))}, {"a": shard_of(torch.ones(3))}, {"b": shard_of(torch.ones(3))}]
    monkeypatch.setattr(type(storage), "free_bytes", lambda self: 300_000)  # for the 200,000 bytes, but not thrice
    for saver, mine in zip(team, shards, strict=True):
        saver.copy_and_write(1, RankContents(mine))
    assert is_committed(end(team)[0])


def test_a_disk_that_does_not_say_how_much_is_free_costs_a_checkpoint(storage, monkeypatch):
    [saver] = savers(storage)

    def stale(self):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(type(storage), "free_bytes", stale)
    saver.copy_and_write(1, RankContents(shard(state(1), 0, 1)))
    [report] = saver.take_ended(0)
    assert "Stale file handle" in report.outcome.reason


def test_a_real_disk_that_is_full(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        [saver] = savers(disk / "checkpoints")
        saver.copy_and_write(1, RankContents({"x": shard_of(torch.ones(300_000))}))
        assert is_committed(saver.take_ended()[0])
        (disk / "ballast").write_bytes(bytes(1 << 20))
        saver.copy_and_write(2, RankContents({"x": shard_of(torch.ones(300_000))}))
        [early] = saver.take_ended()
        with pytest.MonkeyPatch.context() as patch:  # the disk fills up after the check
            patch.setattr(CheckpointStorage, "free_bytes", lambda self: 1 << 40)
            saver.copy_and_write(3, RankContents({"x": shard_of(torch.ones(300_000))}))
            [late] = saver.take_ended()
        for report in (early, late):
            assert not is_committed(report)
            assert "no space left" in report.outcome.reason
        assert folders(CheckpointStorage(disk / "checkpoints")) == {"step-00000001"}
        os.unlink(disk / "ballast")
        saver.copy_and_write(4, RankContents({"x": shard_of(torch.full((300_000,), 4.0))}))
        assert is_committed(saver.take_ended()[0])
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_an_error_in_the_thread_is_reported_and_the_saver_can_save_again(storage, monkeypatch):
    [saver] = savers(storage)

    def broken(phase: str, step: int) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(faults, "fire", broken)
    saver.copy_and_write(1, RankContents(shard(state(1), 0, 1)))
    [report] = saver.take_ended()
    assert report.outcome == SaveFailed("RuntimeError: injected")
    monkeypatch.undo()
    saver.copy_and_write(2, RankContents(shard(state(2), 0, 1)))
    assert is_committed(saver.take_ended()[0])


def test_an_error_after_the_rename_is_reported_with_the_committed_checkpoint(storage, monkeypatch):
    [saver] = savers(storage)

    def broken(*arguments: object) -> None:
        raise OSError(errno.EIO, "the disk coughed")

    monkeypatch.setattr(committing, "apply_retention", broken)
    saver.copy_and_write(1, RankContents(shard(state(1), 0, 1)))
    [report] = saver.take_ended()
    assert "coughed" in " ".join(report.outcome.warnings)
    assert same(load(storage)[1], state(1))


def test_a_rename_that_may_not_survive_a_power_cut_is_reported_and_older_checkpoints_are_kept(tmp_path, monkeypatch):
    """The checkpoint is there under its name, so it must not be reported as lost."""
    [saver] = savers(tmp_path, settings=CheckpointConfig(keep=1))
    saver.copy_and_write(1, RankContents(shard(state(1), 0, 1)))
    saver.take_ended()
    sync = folder_module.sync_folder

    def broken(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EIO, "the disk coughed")
        sync(folder)

    monkeypatch.setattr(folder_module, "sync_folder", broken)
    saver.copy_and_write(2, RankContents(shard(state(2), 0, 1)))
    [report] = saver.take_ended()
    assert (
        report.outcome.warnings[0]
        .partition(" is ")[2]
        .startswith("complete, but may not survive a power cut, so older ones are kept: ")
    )
    assert "coughed" in " ".join(report.outcome.warnings)
    assert {checkpoint.step for checkpoint in list_checkpoints(CheckpointStorage(tmp_path))} == {1, 2}
    assert same(load(tmp_path)[1], state(2))


def test_only_a_commit_minds_that_a_rename_may_not_survive_a_power_cut(tmp_path, monkeypatch):
    """Setting aside and deleting go on: an old checkpoint that is back after a power cut does no harm."""
    storage = CheckpointStorage(tmp_path)
    for step in (1, 2, 3, 4):
        commit(storage, step)

    def broken(folder: Path) -> None:
        raise OSError(errno.EIO, "the disk coughed")

    monkeypatch.setattr(folder_module, "sync_folder", broken)
    with pytest.raises(NotDurable):
        storage.rename("step-00000004", "step-00000005")
    assert set_aside(storage, "step-00000005", "damaged") == "step-00000005.damaged"
    set_aside_later(storage, 2)
    delete_checkpoint(storage, "step-00000001", TOKEN)
    assert folders(storage) == {"step-00000002", "step-00000003.rewound", "step-00000005.damaged"}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF])
def test_a_file_system_without_an_fsync_of_folders_can_hold_checkpoints(tmp_path, monkeypatch, number):
    sync = os.fsync

    def refuse(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        sync(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    [saver] = savers(tmp_path)
    saver.copy_and_write(1, RankContents(shard(state(1), 0, 1)))
    [report] = saver.take_ended()
    assert isinstance(report.outcome, Committed)
    assert not report.outcome.warnings
    assert same(load(tmp_path)[1], state(1))


def test_a_file_that_is_shorter_than_its_rank_says_is_not_committed(storage):
    team = savers(storage, 2)
    team[1].copy_and_write(1, RankContents(shard(state(1), 1, 2)))
    assert team[1].take_ended()[0].outcome == Written()
    [uncommitted] = storage.folders()
    storage.write(f"{uncommitted}/{file_name(1)}", [memoryview(bytes(100))])
    team[0].copy_and_write(1, RankContents(shard(state(1), 0, 2)))
    reason = team[0].take_ended()[0].outcome.reason
    assert reason.startswith(f"{uncommitted}/{file_name(1)}: has 100 bytes, but 4,")
    assert folders(storage) == set()


def test_a_rank_that_never_writes_is_named(storage):
    team = savers(storage, 3, settings=CheckpointConfig(timeout=0.1))
    team[2].copy_and_write(1, RankContents(shard(state(1), 2, 3))).wait()  # before the time of rank 0 begins
    team[0].copy_and_write(1, RankContents(shard(state(1), 0, 3)))
    [report] = team[0].take_ended()
    assert "rank 1 did not write its file" in report.outcome.reason
    assert not report.outcome.caused_elsewhere
    assert folders(storage) == set()


def test_an_aborted_save_ends_at_once_and_leaves_nothing(storage):
    team = savers(storage, 2)
    save = team[0].copy_and_write(1, RankContents(shard(state(1), 0, 2)))  # waits for rank 1, which never saves
    save.abort("rank 1: no space left")
    assert save.wait(30)
    assert save.outcome == SaveFailed("rank 1: no space left")
    assert folders(storage) == set()


def test_closing_gives_up_what_is_in_flight(storage):
    team = savers(storage, 2)
    team[0].copy_and_write(1, RankContents(shard(state(1), 0, 2)))
    team[0].close()
    assert "the run ended" in team[0].take_ended(0)[0].outcome.reason
    assert folders(storage) == set()


def test_closing_does_not_wait_for_a_disk_that_does_not_answer(tmp_path, monkeypatch):
    """An error of the user's code was shown only when the disk had answered, after 40 seconds for example."""
    answers = threading.Event()
    timer = threading.Timer(120, answers.set)
    timer.start()
    write = CheckpointStorage.write

    def hang(self, key, chunks):
        answers.wait()
        write(self, key, chunks)

    monkeypatch.setattr(CheckpointStorage, "write", hang)
    [saver] = savers(tmp_path)
    save = saver.copy_and_write(1, RankContents(shard(state(1), 0, 1)))
    saver.close()
    assert not answers.is_set()
    assert save.outcome is None

    # The thread gives up when the disk answers.
    timer.cancel()
    answers.set()
    assert save.wait(60)
    assert "the run ended" in save.outcome.reason
    assert folders(CheckpointStorage(tmp_path)) == set()


def test_another_one_of_the_same_step_makes_way(storage):
    """It is the same state, or damaged: what is saved now counts, and the disk does not fill up with copies."""
    name = commit(storage, 5).name
    storage.write(f"{name}/{file_name(0)}", [memoryview(bytes(10))])
    for _ in range(2):
        commit(storage, 5)
        assert folders(storage) == {name}
        assert same(load(storage)[1], state(5))


def test_an_attempt_that_was_replaced_deletes_nothing(storage, monkeypatch):
    """The other attempt may have gone back to a checkpoint that this one would delete."""
    [saver] = savers(storage, settings=CheckpointConfig(keep=1))
    saver.copy_and_write(1, RankContents(shard(state(1), 0, 1)))
    assert is_committed(saver.take_ended()[0])

    monkeypatch.setattr(faults, "fire", lambda phase, step: claim(storage, "other") if phase == "latest" else None)
    saver.copy_and_write(2, RankContents(shard(state(2), 0, 1)))
    [save] = saver.take_ended()
    assert (
        save.outcome.warnings[0]
        .partition(" is ")[2]
        .startswith("safe, but older ones are not deleted: another attempt has taken over")
    )
    assert folders(storage) == {"step-00000001", "step-00000002"}


def test_a_warning_about_old_checkpoints_outlives_what_fails_after_it(storage, monkeypatch):
    [saver] = savers(storage, settings=CheckpointConfig(keep=1))

    def fail(phase, step):
        if phase == "latest":
            claim(storage, "other")
        elif phase == "committed":
            raise RuntimeError("later")

    monkeypatch.setattr(faults, "fire", fail)
    saver.copy_and_write(1, RankContents(shard(state(1), 0, 1)))
    [save] = saver.take_ended()
    assert (
        save.outcome.warnings[0]
        .partition(" is ")[2]
        .startswith("safe, but older ones are not deleted: another attempt has taken over")
    )


def test_a_disk_without_room_for_latest_gets_room_all_the_same(storage, monkeypatch):
    """The deletion of old checkpoints was left out, so the disk stayed full, and no save could succeed any more."""
    [saver] = savers(storage, settings=CheckpointConfig(keep=1))
    saver.copy_and_write(1, RankContents(shard(state(1), 0, 1)))
    assert is_committed(saver.take_ended()[0])
    replace = CheckpointStorage.replace

    def full(self, key, data, durable=False):
        if key == "latest":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(self, key, data, durable)

    monkeypatch.setattr(CheckpointStorage, "replace", full)
    saver.copy_and_write(2, RankContents(shard(state(2), 0, 1)))
    [save] = saver.take_ended()
    assert save.outcome.warnings[0].partition(" is ")[2].startswith("safe, but the file latest does not name it: ")
    assert folders(storage) == {"step-00000002"}


@pytest.mark.parametrize(("phase", "left"), [("write", set()), ("latest", {"step-00000001"})])
def test_ctrl_c_in_a_save_without_a_thread_ends_the_run(storage, monkeypatch, phase, left):
    def interrupt(now, step):
        if now == phase:
            raise KeyboardInterrupt

    monkeypatch.setattr(faults, "fire", interrupt)
    [saver] = savers(storage, asynchronous=False)
    with pytest.raises(KeyboardInterrupt):
        saver.copy_and_write(1, RankContents(shard(state(1), 0, 1)))
    assert folders(storage) == left


# What a file system is asked to do in a save. `os.open` is not patched: a test cannot tell its calls from Python's own.
OPERATIONS = ["rename", "replace", "fsync", "pwrite", "mkdir", "unlink", "scandir"]


def fail_from(monkeypatch: pytest.MonkeyPatch, operation: str, first: int, times: int) -> list[str]:
    """Let `os.OPERATION` raise EIO `times` times, from its call number `first` (from 0). Return the failed calls."""
    call = getattr(os, operation)
    calls = 0
    failed: list[str] = []

    def maybe(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if first < calls <= first + times:
            failed.append(f"{operation} {args}")
            raise OSError(errno.EIO, "the disk coughed")
        return call(*args, **options)

    monkeypatch.setattr(os, operation, maybe)
    return failed


@pytest.mark.parametrize("times", [1, 1000], ids=["once", "from then on"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failure_of_any_operation_loses_no_checkpoint_and_leaves_none_over(tmp_path, monkeypatch, operation, times):
    """The same step is saved again, so the old checkpoint must make way; after a failure it has its name back."""
    name = "step-00000005"
    failures = 0
    for first in range(100):
        root = tmp_path / str(first)
        storage = CheckpointStorage(root)
        commit(storage, 5)
        [saver] = savers(storage, asynchronous=False)

        with monkeypatch.context() as patch:
            failed = fail_from(patch, operation, first, times)
            saver.copy_and_write(5, RankContents(shard(state(6), 0, 1)))
        [save] = saver.take_ended()
        if not failed:
            break
        failures += 1

        # Without a warning nothing is left over.
        if is_committed(save) and not save.outcome.warnings:
            assert folders(storage) == {name}, failed

        # The next start deletes what is left of the draft, and of a checkpoint that was replaced.
        delete_leftovers(storage, "next")
        assert same(load(storage)[1], state(6 if is_committed(save) else 5)), failed
        assert folders(storage) == {name}, failed

    assert failures, "nothing was tested"


class Killed(BaseException):
    """The process ends here."""


def killed_between_two_renames(storage: CheckpointStorage, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Save a step again. The old checkpoint is set aside, and the process dies before the new one gets its name."""
    [saver] = savers(storage, asynchronous=False)
    rename = type(storage).rename

    def die(self, folder, to):
        if to == f"step-{step:08d}":
            raise Killed
        rename(self, folder, to)

    with monkeypatch.context() as patch:
        patch.setattr(type(storage), "rename", die)
        # A process that is killed does not tidy up.
        patch.setattr(type(storage), "delete", lambda self, key: None)
        with pytest.raises(Killed):
            saver.copy_and_write(step, RankContents(shard(state(step + 1), 0, 1)))


def start_again(storage: CheckpointStorage, token: str) -> None:
    """Do what rank 0 of the next attempt does."""
    claim(storage, token)
    delete_leftovers(storage, token)


def test_a_kill_between_the_renames_of_a_step_that_is_saved_again_loses_nothing(storage, monkeypatch):
    """Neither copy had the name of a checkpoint. The save was not committed, so the earlier one counts."""
    commit(storage, 5)
    killed_between_two_renames(storage, monkeypatch, 5)
    assert list_checkpoints(storage) == []
    start_again(storage, "next")
    assert same(load(storage)[1], state(5))
    assert folders(storage) == {"step-00000005"}


def test_pruning_between_the_renames_of_a_step_that_is_saved_again_loses_nothing(tmp_path, monkeypatch):
    """`--set-aside` deleted the old checkpoint, and the next start deleted the new one."""
    storage = CheckpointStorage(tmp_path / "checkpoints")
    commit(storage, 5)
    killed_between_two_renames(storage, monkeypatch, 5)
    prune(tmp_path, keep=1, dry_run=False, set_aside=True)
    start_again(storage, "next")
    assert same(load(storage)[1], state(5))


def test_what_a_commit_replaced_that_may_not_survive_a_power_cut_is_deleted_later(tmp_path, monkeypatch):
    """Nothing ever deleted it."""
    storage = CheckpointStorage(tmp_path)
    commit(storage, 5)
    [saver] = savers(storage)
    sync = folder_module.sync_folder

    def broken(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EIO, "the disk coughed")
        sync(folder)

    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "sync_folder", broken)
        saver.copy_and_write(5, RankContents(shard(state(6), 0, 1))).wait()
    assert folders(storage) == {"step-00000005", "step-00000005.replaced"}

    # The next commit deletes it, or the next start.
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    saver.copy_and_write(6, RankContents(shard(state(6), 0, 1))).wait()
    assert folders(storage) == {"step-00000005", "step-00000006"}
    copy = CheckpointStorage(tmp_path.with_name("copy"))
    start_again(copy, "next")
    assert folders(copy) == {"step-00000005"}
    assert same(load(copy)[1], state(6))


def test_a_folder_that_a_living_writer_commits_meanwhile_is_not_put_back(storage, monkeypatch):
    """A trainer that only loads looks at the folder between the two renames of another one."""
    commit(storage, 5)
    storage.rename("step-00000005", "step-00000005.replaced")
    rename = type(storage).rename

    def commit_first(self, folder, to):
        monkeypatch.undo()
        commit(storage, 5, tensors=state(6))
        rename(self, folder, to)

    monkeypatch.setattr(type(storage), "rename", commit_first)
    put_back_replaced(storage)
    assert same(load(storage)[1], state(6))


def test_nothing_is_committed_while_the_owner_cannot_be_read(tmp_path):
    [saver] = savers(tmp_path)
    (tmp_path / "owner").unlink()
    os.mkfifo(tmp_path / "owner")
    saver.copy_and_write(1, RankContents(shard(state(1), 0, 1)))
    assert "not a regular file" in saver.take_ended()[0].outcome.reason
    assert folders(CheckpointStorage(tmp_path)) == set()


def test_nothing_is_committed_without_a_claim(tmp_path):
    [saver] = savers(tmp_path)
    (tmp_path / "owner").unlink()
    saver.copy_and_write(1, RankContents(shard(state(1), 0, 1)))
    assert "no attempt owns" in saver.take_ended()[0].outcome.reason


def test_an_attempt_that_was_replaced_commits_nothing(storage):
    [old] = savers(storage, token="00")
    [new] = savers(storage, token="11")
    old.copy_and_write(1, RankContents(shard(state(7), 0, 1)))
    assert "another attempt has taken over" in old.take_ended()[0].outcome.reason
    new.copy_and_write(1, RankContents(shard(state(1), 0, 1)))
    assert is_committed(new.take_ended()[0])
    assert same(load(storage)[1], state(1))


def test_a_late_writer_of_an_earlier_attempt_cannot_mix(storage):
    """Rank 1 of a dead attempt writes the same step as the new attempt, whose own rank 1 is late."""
    late = savers(storage, 2, token="00")[1]
    team = savers(storage, 2, token="11")
    late.copy_and_write(1, RankContents(shard(state(7), 1, 2)))
    late.take_ended()
    team[0].copy_and_write(1, RankContents(shard(state(1), 0, 2)))
    time.sleep(0.05)
    assert team[0].take_ended(0) == []  # it does not take the other attempt's part for its own
    team[1].copy_and_write(1, RankContents(shard(state(1), 1, 2)))
    assert is_committed(end(team)[0])
    assert same(load(storage)[1], state(1))
    delete_leftovers(storage, "11")
    assert folders(storage) == {"step-00000001"}


@pytest.mark.parametrize("how", ["corrupt", "truncate"])
def test_what_a_bad_disk_does_can_be_injected(storage, monkeypatch, how):
    commit(storage, 1)
    planned = [faults.Fault(how)]
    monkeypatch.setattr(faults, "planned", lambda: planned)
    commit(storage, 2)
    monkeypatch.undo()
    found, loaded = load(storage)
    assert same(loaded, state(1))
    assert [problem.file for problem in found.skipped] == [file_name(0)]


def test_old_ones_are_deleted_only_after_the_new_one_is_committed(storage, monkeypatch):
    [saver] = savers(storage, settings=CheckpointConfig(keep=1))
    seen = []
    monkeypatch.setattr(faults, "fire", lambda phase, step: seen.append((phase, folders(storage))))
    for step in (1, 2):
        saver.copy_and_write(step, RankContents(shard(state(step), 0, 1)))
        assert is_committed(saver.take_ended()[0])
    uncommitted = f"step-00000002.tmp-{TOKEN}-2"
    assert seen[-3:] == [
        ("rename", {"step-00000001", uncommitted}),
        ("latest", {"step-00000001", "step-00000002"}),
        ("committed", {"step-00000002"}),
    ]


@pytest.mark.parametrize("away_for", [1, 3])
def test_what_could_be_deleted_only_in_part_is_deleted_after_the_next_commit(storage, monkeypatch, away_for):
    """While the attempt lived, nothing tried again. What still cannot be deleted must not keep the others."""
    [saver] = savers(storage, settings=CheckpointConfig(keep=1))
    delete = CheckpointStorage.delete
    refused = []

    def away(self, key):
        if "-gone" in key and "step-00000001" in key and len(refused) < away_for:
            refused.append(key)
            raise OSError(errno.EIO, "the store is away")
        delete(self, key)

    monkeypatch.setattr(CheckpointStorage, "delete", away)
    left = []
    for step in range(1, 6):
        saver.copy_and_write(step, RankContents(shard(state(step), 0, 1)))
        [save] = saver.take_ended()
        assert is_committed(save)
        assert ("the store is away" in " ".join(save.outcome.warnings)) == (2 <= step < 2 + away_for)
        left.append(len(folders(storage)))

    assert left == {1: [1, 2, 1, 1, 1], 3: [1, 2, 2, 2, 1]}[away_for]
    assert folders(storage) == {"step-00000005"}


def test_a_checkpoint_that_cannot_be_deleted_does_not_keep_the_others(storage, monkeypatch):
    """Retention begins with the oldest one, and ended there: each save left another checkpoint."""
    [saver] = savers(storage, settings=CheckpointConfig(keep=1))
    rename = CheckpointStorage.rename

    def refuse(self, folder, to):
        if folder == "step-00000001":
            raise OSError(errno.EACCES, "the folder cannot be renamed")
        rename(self, folder, to)

    monkeypatch.setattr(CheckpointStorage, "rename", refuse)
    for step in range(1, 5):
        saver.copy_and_write(step, RankContents(shard(state(step), 0, 1)))
        [save] = saver.take_ended()
        assert is_committed(save)
        assert ("the folder cannot be renamed" in " ".join(save.outcome.warnings)) == (step > 1)

    assert folders(storage) == {"step-00000001", "step-00000004"}


def test_a_saver_of_a_rank_with_nothing_to_write(tmp_path):
    team = savers(tmp_path, 2)
    team[0].copy_and_write(1, RankContents({"x": shard_of(torch.ones(2))}))
    team[1].copy_and_write(1, RankContents({}))
    assert is_committed(end(team)[0])
    with safe_open(tmp_path / "step-00000001" / file_name(1), "pt") as file:
        assert list(file.keys()) == []


def test_a_file_system_that_fails_altogether_costs_a_checkpoint_and_not_the_run(tmp_path, monkeypatch):
    """Even listing the folder fails, as on a stale NFS mount: the save ends with an error, and nothing waits for it."""

    def stale(*_args, **_kwargs):
        raise OSError(errno.ESTALE, "Stale file handle")

    storage = CheckpointStorage(tmp_path)
    pending = Save(Draft(SaveContext(storage, 0, 1, TOKEN, CheckpointConfig(timeout=1.0)), 1, 1), 100, {})
    monkeypatch.setattr(CheckpointStorage, "folders", stale)
    monkeypatch.setattr(CheckpointStorage, "delete", stale)
    pending._fail(OSError(errno.ESTALE, "Stale file handle"))
    pending.wait_for_file()
    assert "Stale file handle" in pending.outcome.reason
