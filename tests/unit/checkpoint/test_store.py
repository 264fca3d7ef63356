"""The folder of checkpoints, what is deleted from it, and what is exported."""

from __future__ import annotations

import math

import pytest
import torch
from checkpoints import TOKEN, commit, cut, savers, state
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, load_model

from lockstep.checkpoint.export import export
from lockstep.checkpoint.format import part_name
from lockstep.checkpoint.retention import Retention, to_delete
from lockstep.checkpoint.storage import Store
from lockstep.errors import UserError
from lockstep.launch.run_dir import latest_step


def test_committed_ones_are_listed_newest_first_and_nothing_else_is(tmp_path):
    for name in ["step-00000002", "step-00000010", "step-123456789", "step-1", "step-00000003.tmp-ab-1", "other"]:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000005").write_text("not a folder")
    assert [path.name for path in Store(tmp_path).committed()] == ["step-123456789", "step-00000010", "step-00000002"]
    assert Store(tmp_path / "nowhere").committed() == []


def test_latest_is_for_people(tmp_path):
    store = Store(tmp_path)
    assert latest_step(store.root) is None
    commit(tmp_path, 7)
    commit(tmp_path, 9)
    assert latest_step(store.root) == 9
    (tmp_path / "latest").write_text("step-garbage")
    assert latest_step(store.root) is None


def test_what_other_attempts_left_is_cleaned_and_ours_is_not(tmp_path):
    names = ["step-00000001", f"step-00000002.tmp-{TOKEN}-1", "step-00000002.tmp-ff-1", "step-00000001.tmp-ff-gone12"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / ".latest.123").touch()
    Store(tmp_path).clean(TOKEN)
    assert {path.name for path in tmp_path.iterdir()} == set(names[:2])


def test_what_is_set_aside_keeps_its_files_and_latest_follows(tmp_path):
    store = Store(tmp_path)
    for step in (1, 2, 3, 4):
        commit(tmp_path, step)
    assert store.set_aside(tmp_path / "step-00000004", "damaged").name == "step-00000004.damaged"
    assert latest_step(store.root) == 3
    commit(tmp_path, 4)
    assert store.set_aside(tmp_path / "step-00000004", "damaged").name == "step-00000004.damaged1"
    assert [path.name for path in store.set_aside_after(1)] == ["step-00000003.undone", "step-00000002.undone"]
    assert latest_step(store.root) == 1
    assert (tmp_path / "step-00000003.undone" / part_name(0)).exists()
    store.set_aside(tmp_path / "step-00000001", "damaged")
    assert latest_step(store.root) is None


# ---- retention ----


def test_what_stays():
    losses = [(10, 3.0), (20, 1.0), (30, math.nan), (40, 2.0), (50, 1.0), (60, None), (70, 5.0)]
    known = [(step, {"loss": loss}) for step, loss in losses]
    assert to_delete(known, Retention(last=3)) == [10, 20, 30, 40]
    assert to_delete(known, Retention(last=1, every=20)) == [10, 30, 50]
    assert to_delete(known, Retention(last=1, best="loss")) == [10, 20, 30, 40, 60]  # of equals, the newest
    assert to_delete(known, Retention(last=1, best="loss", mode="max")) == [10, 20, 30, 40, 50, 60]
    assert to_delete(known, Retention(last=1, best="accuracy")) == [10, 20, 30, 40, 50, 60]
    assert to_delete([(5, {})], Retention(last=1)) == []
    for mode in ("min", "max"):
        unclear = [(10, {"loss": 1.0}), (20, {"loss": math.nan}), (30, {"loss": math.nan})]
        assert to_delete(unclear, Retention(last=1, best="loss", mode=mode)) == [20]


@given(
    steps=st.sets(st.integers(0, 100)),
    last=st.integers(1, 5),
    every=st.none() | st.integers(1, 10),
    best=st.none() | st.just("loss"),
    mode=st.sampled_from(["min", "max"]),
    data=st.data(),
)
def test_the_newest_always_stays(steps, last, every, best, mode, data):
    numbers = st.floats() | st.none() | st.text(max_size=1)
    known = [(step, data.draw(st.dictionaries(st.just("loss"), numbers))) for step in steps]
    doomed = to_delete(known, Retention(last, every, best, mode))
    assert len(set(doomed)) == len(doomed)
    assert set(doomed) <= steps - set(sorted(steps)[-last:])
    if every:
        assert not [step for step in doomed if step % every == 0]


@pytest.mark.parametrize("wrong", [{"last": 0}, {"every": 0}, {"mode": "least"}])
def test_rules_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UserError, match="checkpoint"):
        Retention(**wrong)


def test_retention_is_applied_after_each_commit(tmp_path):
    [saver] = savers(tmp_path, keep=Retention(last=1, best="loss"))
    for step, loss in [(1, 5.0), (2, 1.0), (3, math.nan), (4, 2.0)]:
        saver.save(step, cut(state(step), 0, 1), {}, {"metrics": {"loss": loss}})
    assert all(report.committed and report.error is None for report in saver.wait())
    assert [path.name for path in Store(tmp_path).committed()] == ["step-00000004", "step-00000002"]
    assert not [path for path in tmp_path.iterdir() if ".tmp-" in path.name]


# ---- export ----


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(3)


def test_an_export_is_the_model_tied_weights_once(tmp_path):
    model = Tied()
    tensors = {f"model.{name}": value for name, value in model.state_dict().items() if name != "head.weight"}
    tensors["optimizer.moment"] = torch.ones(3)
    path = commit(tmp_path / "checkpoints", 3, 2, tensors, aliases={"model.head.weight": "model.embed.weight"})
    target = export(path, tmp_path / "out")
    assert target == tmp_path / "out" / "model.safetensors"
    with safe_open(target, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    written = load_file(target)
    assert written.keys() == {name for name in model.state_dict() if name != "head.weight"}
    fresh = Tied()
    load_model(fresh, target)  # what users of safetensors call
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)
    assert export(path, tmp_path / "mine.safetensors") == tmp_path / "mine.safetensors"


def test_nothing_damaged_is_exported(tmp_path):
    path = commit(tmp_path, 3)
    data = bytearray((path / part_name(0)).read_bytes())
    data[-1] ^= 1
    (path / part_name(0)).write_bytes(data)
    with pytest.raises(UserError, match="the bytes changed"):
        export(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_a_model_cannot_be_exported(tmp_path):
    path = commit(tmp_path, 3, tensors={"other": torch.ones(1)})
    with pytest.raises(UserError, match="no tensor whose name begins with"):
        export(path, tmp_path / "out")
