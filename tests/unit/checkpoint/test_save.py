"""What is saved comes back, from any number of ranks; what cannot be saved is said, and harms nothing."""

from __future__ import annotations

import errno
import math
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from checkpoints import TOKEN, commit, cut, end, load, same, savers, state
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from lockstep import faults
from lockstep.checkpoint import writer
from lockstep.checkpoint.format import part_name
from lockstep.checkpoint.load import CheckpointReader
from lockstep.checkpoint.manifest import read_manifest
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.saver import Slice
from lockstep.checkpoint.storage import Store
from lockstep.errors import UserError

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int16, torch.uint16, torch.float16, torch.bfloat16),
    *(torch.int32, torch.uint32, torch.float32, torch.int64, torch.uint64, torch.float64),
]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def folders(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir()}


def fault(monkeypatch, phase: str, how: str) -> None:
    monkeypatch.setattr(faults, "fire", lambda at, step: how if at == phase else None)


@pytest.mark.parametrize("size", [1, 3])
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, size):
    shapes = [(), (1,), (0,), (5,), (0, 4), (7, 3), (2, 3, 5)]
    raw = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    tensors = {}
    for dtype in DTYPES:
        for shape in shapes:
            source = raw % 2 if dtype is torch.bool else raw
            count = math.prod(shape)
            tensors[f"{dtype}{shape}"] = source[: count * dtype.itemsize].view(dtype).reshape(shape)
    commit(tmp_path, 1, size, tensors)
    _, found = load(tmp_path)
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
    path = commit(tmp_path, 1, 1, tensors)
    assert same(load(tmp_path)[1], tensors)
    with safe_open(path / part_name(0), "pt") as file:  # the stock reader agrees
        assert same({name: file.get_tensor(name) for name in file.keys()}, tensors)  # noqa: SIM118


def test_names_are_free(tmp_path):
    tensors = {name: torch.tensor(number) for number, name in enumerate(["__metadata__", "a/../b", "é\n", "", "x#0"])}
    commit(tmp_path, 1, 1, tensors)
    assert same(load(tmp_path)[1], tensors)


@pytest.mark.parametrize("bad", [torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()])
def test_a_tensor_that_cannot_be_saved_is_named(tmp_path, bad):
    [saver] = savers(tmp_path)
    with pytest.raises(UserError, match=r"'model\.spectrum'"):
        saver.save(1, [Slice.whole("model.spectrum", bad)], {}, {})


def test_values_come_back_with_what_json_cannot_say(tmp_path):
    values = {
        "metrics": {"loss": math.inf, "other": -math.inf},
        "list": [1, 2.5, None, True, "text", [], {}],
        "looks like ours": [{"$float": "nan"}, {"$float": 1.0}, {"$$x": 1}, {"$": {"$float": math.inf}}],
        "large": 2**100,
        "tiny": 5e-324,
    }
    commit(tmp_path, 1, values={**values, "nan": math.nan})
    found = dict(load(tmp_path)[0].manifest.values)
    assert math.isnan(found.pop("nan"))
    assert found == values
    assert b"NaN" not in (tmp_path / "step-00000001" / "manifest.json").read_bytes()


@pytest.mark.parametrize(("value", "place"), [({"a": [{1}]}, r"values\.a\[0\]"), ({"a": {3: 1}}, "key 3 of values.a")])
def test_a_value_that_json_cannot_say_is_named(tmp_path, value, place):
    [saver] = savers(tmp_path)
    with pytest.raises(UserError, match=place):
        saver.save(1, [], {}, value)


def test_the_state_is_that_of_the_moment_of_the_save(tmp_path, monkeypatch):
    """Training goes on while the thread writes: the fault holds it until everything has changed."""
    [saver] = savers(tmp_path)
    changed = []
    monkeypatch.setattr(faults, "fire", lambda phase, step: [time.sleep(0.005) for _ in range(400) if not changed][:0])
    tensors, values = state(1), {"list": [1]}
    saver.save(1, cut(tensors, 0, 1), {}, values)
    for tensor in tensors.values():
        tensor.zero_()
    values["list"].append(2)
    changed.append(True)
    assert saver.wait()[0].committed
    found, loaded = load(tmp_path)
    assert same(loaded, state(1))
    assert found.manifest.values == {"list": [1]}


def test_a_second_save_waits_for_the_first_and_reuses_its_buffer(tmp_path):
    [saver] = savers(tmp_path)
    size = saver.prepare(cut(state(0), 0, 1))
    buffer = saver._snapshot._buffer.data_ptr()
    for step in (1, 2, 3):
        saver.save(step, cut(state(step), 0, 1), {}, {})
    reports = saver.wait()
    assert [(report.step, report.committed, report.bytes) for report in reports] == [(n, True, size) for n in (1, 2, 3)]
    assert saver._snapshot._buffer.data_ptr() == buffer
    more = {**state(4), "model.new": torch.ones(1000)}
    saver.save(4, cut(more, 0, 1), {}, {})  # the layout may change
    assert saver.wait()[0].committed
    assert same(load(tmp_path)[1], more)


def test_saving_at_once_needs_no_thread(tmp_path):
    [saver] = savers(tmp_path, asynchronous=False)
    saver.save(1, cut(state(1), 0, 1), {}, {})
    [report] = saver.poll()
    assert report.committed
    assert report.stall_s >= report.write_s > 0
    assert saver.poll() == []


def test_aliases_share_bytes(tmp_path):
    path = commit(tmp_path, 1, aliases={"model.head": "model.weight"})
    _, found = load(tmp_path)
    assert torch.equal(found["model.head"], found["model.weight"])
    assert "model.head" not in read_manifest(path).tensors


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_block_can_be_read_whatever_the_pieces(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    size = data.draw(st.integers(1, 4))
    axis = data.draw(st.integers(0, len(shape) - 1))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    root = tmp_path_factory.mktemp("blocks")
    team = savers(root, size)
    for rank, saver in enumerate(team):
        low, high = shape[axis] * rank // size, shape[axis] * (rank + 1) // size
        offset = tuple(low if a == axis else 0 for a in range(len(shape)))
        saver.save(1, [Slice("x", whole.narrow(axis, low, high - low), shape, offset)], {}, {})
    assert team[0].wait()[0].committed
    manifest = read_manifest(root / "step-00000001")
    corners = [sorted(data.draw(st.tuples(*[st.integers(0, length)] * 2))) for length in shape]
    block = CheckpointReader(root / "step-00000001", manifest).read_block(
        "x", [low for low, _ in corners], [high - low for low, high in corners]
    )
    assert torch.equal(block, whole[tuple(slice(low, high) for low, high in corners)])
    shutil.rmtree(root)


def test_a_block_outside_and_an_unknown_name_are_refused(tmp_path):
    path = commit(tmp_path, 1)
    reader = CheckpointReader(path, read_manifest(path))
    with pytest.raises(ValueError, match="no block"):
        reader.read_block("model.weight", (0, 0), (8, 1))
    with pytest.raises(KeyError, match=r"model\.wait"):
        reader.read("model.wait")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_are_those_of_the_moment_too(tmp_path):
    [saver] = savers(tmp_path)
    tensors = {"on gpu": torch.randn(3_000_001, device="cuda"), "on cpu": torch.randn(5)}
    expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    saver.save(1, [Slice.whole(name, tensor) for name, tensor in tensors.items()], {}, {})
    for tensor in tensors.values():
        tensor.zero_()
    assert saver._snapshot._buffer.is_pinned()
    assert saver.wait()[0].committed
    assert same(load(tmp_path)[1], expected)


# ---- what goes wrong ----


def test_ranks_that_write_the_same_rows_do_not_commit(tmp_path):
    team = savers(tmp_path, 2)
    for saver in team:
        saver.save(1, [Slice.whole("x", torch.ones(3))], {}, {})
    reports = end(team)
    assert not reports[0].committed
    assert "do not make up the whole" in reports[0].error
    assert folders(tmp_path) == set()


def test_too_little_space_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    commit(tmp_path, 1)
    [saver] = savers(tmp_path)
    size = saver.prepare(cut(state(2), 0, 1))
    monkeypatch.setattr("lockstep.checkpoint.saver.free_bytes", lambda folder: size - 10)
    saver.save(2, cut(state(2), 0, 1), {}, {})
    assert saver.failed
    [report] = saver.poll()
    assert (report.committed, report.missing_bytes) == (False, 10 + size // 100)
    assert "no space left" in report.error
    assert same(load(tmp_path)[1], state(1))
    monkeypatch.undo()
    saver.save(3, cut(state(3), 0, 1), {}, {})
    assert not saver.failed
    assert saver.wait()[0].committed


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_fills_up_costs_one_checkpoint_and_nothing_else(tmp_path, monkeypatch, rank):
    commit(tmp_path, 1, 2)
    team = savers(tmp_path, 2)
    fault(monkeypatch, "write", "disk full")
    team[rank].save(2, cut(state(2), rank, 2), {}, {})
    [report] = team[rank].wait()
    assert team[rank].failed
    assert "no space left" in report.error
    assert report.missing_bytes >= 1
    monkeypatch.undo()
    team[1 - rank].save(2, cut(state(2), 1 - rank, 2), {}, {})
    for saver in team:
        saver.abandon("a disk is full")
        assert not saver.failed
    assert not end([team[1 - rank]])[0].committed
    assert folders(tmp_path) == {"step-00000001"}
    for number, saver in enumerate(team):  # once there is room again, the same step can be saved
        saver.save(2, cut(state(2), number, 2), {}, {})
    assert end(team)[0].committed
    assert same(load(tmp_path)[1], state(2))


def test_rank_0_hears_of_another_ranks_trouble_through_the_folder(tmp_path, monkeypatch):
    team = savers(tmp_path, 2)
    fault(monkeypatch, "write", "disk full")
    team[1].save(1, cut(state(1), 1, 2), {}, {})
    team[1].wait()
    monkeypatch.undo()
    team[0].save(1, cut(state(1), 0, 2), {}, {})
    [report] = team[0].wait(30)
    assert report.error.startswith("rank 1: no space left")
    assert report.missing_bytes >= 1


def test_a_rank_in_trouble_leaves_the_folder_that_rank_0_is_about_to_write_into(tmp_path, monkeypatch):
    team = savers(tmp_path, 2)
    fault(monkeypatch, "write", "disk full")
    monkeypatch.setattr(writer.Writing, "_send", lambda *_: None)  # else its word to rank 0 makes the folder anew
    team[1].save(1, cut(state(1), 1, 2), {}, {})
    team[1].wait()
    assert len(folders(tmp_path)) == 1


def test_a_real_disk_that_is_full(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        [saver] = savers(disk / "checkpoints")
        saver.save(1, [Slice.whole("x", torch.ones(300_000))], {}, {})
        assert saver.wait()[0].committed
        (disk / "ballast").write_bytes(bytes(1 << 20))
        saver.save(2, [Slice.whole("x", torch.ones(300_000))], {}, {})
        [early] = saver.wait()
        with pytest.MonkeyPatch.context() as patch:  # the disk fills up after the check
            patch.setattr("lockstep.checkpoint.saver.free_bytes", lambda folder: 1 << 40)
            saver.save(3, [Slice.whole("x", torch.ones(300_000))], {}, {})
            [late] = saver.wait()
        for report in (early, late):
            assert not report.committed
            assert "no space left" in report.error
            assert 1 <= report.missing_bytes < 1_300_000
        assert folders(disk / "checkpoints") == {"step-00000001"}
        os.unlink(disk / "ballast")
        saver.save(4, [Slice.whole("x", torch.full((300_000,), 4.0))], {}, {})
        assert saver.wait()[0].committed
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_an_error_in_the_thread_is_reported_and_the_saver_goes_on(tmp_path, monkeypatch):
    [saver] = savers(tmp_path)

    def broken(phase: str, step: int) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(faults, "fire", broken)
    saver.save(1, cut(state(1), 0, 1), {}, {})
    [report] = saver.wait()
    assert (saver.failed, report.error) == (True, "RuntimeError: injected")
    monkeypatch.undo()
    saver.save(2, cut(state(2), 0, 1), {}, {})
    assert saver.wait()[0].committed


def test_an_error_after_the_rename_is_told_of_a_committed_checkpoint(tmp_path, monkeypatch):
    [saver] = savers(tmp_path)

    def broken(*arguments: object) -> None:
        raise OSError(errno.EIO, "the disk coughed")

    monkeypatch.setattr(writer.retention, "apply", broken)
    saver.save(1, cut(state(1), 0, 1), {}, {})
    [report] = saver.wait()
    assert report.committed
    assert "coughed" in report.error
    assert not saver.failed
    assert same(load(tmp_path)[1], state(1))


def test_a_part_that_is_shorter_than_its_rank_says_is_not_committed(tmp_path):
    team = savers(tmp_path, 2)
    team[1].save(1, cut(state(1), 1, 2), {}, {})
    assert team[1].wait()[0].error is None
    [part] = tmp_path.glob(f"*/{part_name(1)}")
    os.truncate(part, 100)
    team[0].save(1, cut(state(1), 0, 2), {}, {})
    assert "rank 1 wrote" in team[0].wait()[0].error
    assert folders(tmp_path) == set()


def test_a_rank_that_never_writes_is_named(tmp_path):
    team = savers(tmp_path, 3, patience_s=0.1)
    team[0].save(1, cut(state(1), 0, 3), {}, {})
    team[2].save(1, cut(state(1), 2, 3), {}, {})
    assert "no word from rank 1 " in team[0].wait()[0].error
    assert folders(tmp_path) == set()


def test_an_abandoned_save_ends_at_once_and_leaves_nothing(tmp_path):
    team = savers(tmp_path, 2)
    team[0].save(1, cut(state(1), 0, 2), {}, {})  # waits for rank 1, which never saves
    team[0].abandon("rank 1: no space left")
    [report] = team[0].wait(30)
    assert (report.committed, report.error) == (False, "rank 1: no space left")
    assert not team[0].failed
    assert folders(tmp_path) == set()


def test_closing_gives_up_what_is_in_flight(tmp_path):
    team = savers(tmp_path, 2)
    team[0].save(1, cut(state(1), 0, 2), {}, {})
    team[0].close()
    assert "the run ended" in team[0].poll()[0].error
    assert folders(tmp_path) == set()


def test_another_one_of_the_same_step_makes_way(tmp_path):
    """It belongs to another history, or is damaged: what is saved now counts, and nothing is lost."""
    path = commit(tmp_path, 5)
    os.truncate(path / part_name(0), 10)
    commit(tmp_path, 5)
    assert folders(tmp_path) == {path.name, path.name + ".undone"}
    assert same(load(tmp_path)[1], state(5))


def test_an_attempt_that_was_replaced_commits_nothing(tmp_path):
    [old] = savers(tmp_path, token="00")
    [new] = savers(tmp_path, token="11")
    old.save(1, cut(state(7), 0, 1), {}, {})
    assert "another attempt has taken over" in old.wait()[0].error
    new.save(1, cut(state(1), 0, 1), {}, {})
    assert new.wait()[0].committed
    assert same(load(tmp_path)[1], state(1))


def test_a_late_writer_of_an_earlier_attempt_cannot_mix(tmp_path):
    """Rank 1 of a dead attempt writes the same step as the new attempt, whose own rank 1 is late."""
    late = savers(tmp_path, 2, token="00")[1]
    team = savers(tmp_path, 2, token="11")
    late.save(1, cut(state(7), 1, 2), {}, {})
    late.wait()
    team[0].save(1, cut(state(1), 0, 2), {}, {})
    time.sleep(0.05)
    assert team[0].poll() == []  # it does not take the other attempt's part for its own
    team[1].save(1, cut(state(1), 1, 2), {}, {})
    assert end(team)[0].committed
    assert same(load(tmp_path)[1], state(1))
    Store(tmp_path).clean("11")
    assert folders(tmp_path) == {"step-00000001"}


@pytest.mark.parametrize("how", ["corrupt", "truncate"])
def test_what_a_bad_disk_does_can_be_injected(tmp_path, monkeypatch, how):
    commit(tmp_path, 1)
    fault(monkeypatch, "committed", how)
    commit(tmp_path, 2)
    monkeypatch.undo()
    found, loaded = load(tmp_path)
    assert same(loaded, state(1))
    assert [damaged.file for damaged in found.passed_over] == [part_name(0)]


def test_old_ones_are_deleted_only_after_the_new_one_is_committed(tmp_path, monkeypatch):
    [saver] = savers(tmp_path, keep=Retention(last=1))
    seen = []
    monkeypatch.setattr(faults, "fire", lambda phase, step: seen.append((phase, folders(tmp_path))))
    for step in (1, 2):
        saver.save(step, cut(state(step), 0, 1), {}, {})
        assert saver.wait()[0].error is None
    staged = f"step-00000002.tmp-{TOKEN}-2"
    assert seen[-3:] == [
        ("rename", {"step-00000001", staged}),
        ("latest", {"step-00000001", "step-00000002"}),
        ("committed", {"step-00000002"}),
    ]


def test_a_saver_of_a_rank_with_nothing_to_write(tmp_path):
    team = savers(tmp_path, 2)
    team[0].save(1, [Slice.whole("x", torch.ones(2))], {}, {})
    team[1].save(1, [], {}, {})
    assert end(team)[0].committed
    with safe_open(tmp_path / "step-00000001" / part_name(1), "pt") as file:
        assert list(file.keys()) == []
