"""`lockstep ckpt`: what it says, what it deletes, its exit codes, and that looking needs no torch."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import at, commit, state
from safetensors import safe_open
from safetensors.torch import load_file, load_model

from lockstep.checkpoint import command
from lockstep.checkpoint.export import export_weights
from lockstep.checkpoint.storage.folder import CheckpointStorage, list_checkpoints
from lockstep.checkpoint.storage.transitions import set_aside
from lockstep.cli import main
from lockstep.errors import UserError
from lockstep.run_folder.checkpoint_names import file_name


@pytest.fixture
def run(tmp_path) -> Path:
    for step in (5, 10, 15):
        digests = {"trunk.weight": "its digest"} if step == 15 else {}
        values = {"state": {"model": {"frozen_digests": digests}}}
        commit(tmp_path / "checkpoints", step, 2, values=values, metrics={"loss": 1 / step})
    return tmp_path


def lockstep(capsys, *arguments: object) -> tuple[int, str]:
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out + said.err


def damage(run: Path, step: int) -> None:
    path = run / "checkpoints" / f"step-{step:08d}" / file_name(1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_gives_a_line_for_each_newest_first(run, capsys):
    code, text = lockstep(capsys, "ckpt", "ls", run)
    head, *rows = [line.split() for line in text.splitlines()]
    assert code == 0
    assert head == ["step", "when", "size", "tensors", "metrics", "state"]
    assert [row[0] for row in rows] == ["15", "10", "5"]
    assert rows[1][5:] == ["4", "loss=0.1", "not", "verified"]
    os.truncate(run / "checkpoints" / "step-00000010" / file_name(0), 5)
    assert f"damaged: {file_name(0)}: has 5 bytes" in lockstep(capsys, "ckpt", "ls", run)[1]


@pytest.mark.parametrize("file", ["manifest.json", "metrics.json"])
def test_ls_lists_all_checkpoints_if_the_best_one_cannot_be_read(tmp_path, capsys, monkeypatch, file):
    for step in (5, 10):
        values = {"config": {"checkpoint.best": "loss"}}
        commit(tmp_path / "checkpoints", step, values=values, metrics={"loss": float(step)})
    assert "best loss" in lockstep(capsys, "ckpt", "ls", tmp_path)[1]
    open_file = CheckpointStorage.open

    def fail(self: CheckpointStorage, key: str) -> object:
        if key == f"step-00000005/{file}":
            raise OSError(errno.EIO, "Input/output error")
        return open_file(self, key)

    monkeypatch.setattr(CheckpointStorage, "open", fail)
    code, text = lockstep(capsys, "ckpt", "ls", tmp_path)
    assert code == 0
    assert f"unreadable: {file}" in text
    assert "best loss" not in text

    code, text = lockstep(capsys, "ckpt", "export", tmp_path, "--best")
    assert code != 0
    assert "cannot be compared now" in text


def test_show_describes_the_newest_or_the_one_given(run, capsys):
    code, text = lockstep(capsys, "ckpt", "show", run)
    assert code == 0
    rows = [line.split() for line in text.splitlines()]
    assert ["step", "15"] in rows
    assert ["model.weight", "F32", "[7,", "6]", "168", "bytes", "2"] in rows
    assert ["step", "5"] in [
        line.split() for line in lockstep(capsys, "ckpt", "show", run / "checkpoints/step-00000005")[1].splitlines()
    ]


def test_show_takes_a_step_of_the_run(run, capsys):
    code, text = lockstep(capsys, "ckpt", "show", run, "--step", "10")
    assert code == 0
    assert ["step", "10"] in [line.split() for line in text.splitlines()]

    code, text = lockstep(capsys, "ckpt", "show", run, "--step", "99")
    assert code == 2
    assert f"{run} has no checkpoint of step 99\n  found: it has steps 5, 10, 15\n" in text


def test_an_exported_file_is_replaced_only_if_asked(run, capsys, tmp_path):
    command = ["ckpt", "export", run, "--out", tmp_path / "ex"]
    file = tmp_path / "ex" / "model.safetensors"
    assert lockstep(capsys, *command)[0] == 0
    first = file.stat()

    code, text = lockstep(capsys, *command, "--step", "5")
    assert code == 2
    assert text == f"lockstep: {file} already exists\n  do:    name another folder with --out, or add --overwrite\n"
    assert file.stat() == first

    assert lockstep(capsys, *command, "--step", "5", "--overwrite")[0] == 0
    assert file.stat() != first


def test_advice_with_a_path_can_be_copied(run, capsys):
    moved = run.rename(run.with_name("a run"))
    damage(moved, 15)
    assert f"and stays: lockstep ckpt verify '{moved}'\n" in lockstep(capsys, "ckpt", "prune", moved, "--keep", "1")[1]


def test_a_checkpoint_of_another_version_is_named_and_stays(run, capsys, tmp_path):
    checkpoint = run / "checkpoints" / "step-00000015"
    (checkpoint / "manifest.json").write_text('{"format": 1}')
    why = "format 1, of an older version of Lockstep; this version reads format 5"
    assert f"wrong format: manifest.json: {why}" in lockstep(capsys, "ckpt", "ls", run)[1]
    assert lockstep(capsys, "ckpt", "show", run) == (1, f"wrong format: step-00000015/manifest.json: {why}\n")
    code, text = lockstep(capsys, "ckpt", "verify", run)
    assert code == 1
    assert text.splitlines()[0].split() == ["step-00000015", "wrong", "format"]
    text = lockstep(capsys, "ckpt", "prune", run, "--keep", "1")[1]
    assert "step-00000015 was written by another version of Lockstep and stays" in text
    assert "deleted step-00000005" in text
    with pytest.raises(UserError, match="was written by another version of Lockstep and cannot be exported"):
        export_weights(at(checkpoint), tmp_path)


def test_a_step_of_one_checkpoint_is_refused(run, capsys):
    one = run / "checkpoints" / "step-00000010"
    for options in (["--step", "5"], ["--best"]):
        code, text = lockstep(capsys, "ckpt", "export", one, *options)
        assert code == 2
        assert f"{one} is not a run, so it has no steps to choose from" in text

    assert f"{one} is one checkpoint, and not a run" in lockstep(capsys, "ckpt", "ls", one)[1]


def test_verify_names_every_bad_file_and_fails(run, capsys):
    assert lockstep(capsys, "ckpt", "verify", run) == (0, "step-00000015  ok\nstep-00000010  ok\nstep-00000005  ok\n")
    damage(run, 10)
    (run / "checkpoints" / "step-00000010" / file_name(0)).unlink()
    code, text = lockstep(capsys, "ckpt", "verify", run)
    assert code == 1
    assert "step-00000010  damaged" in text
    assert f"{file_name(0)}: missing" in text
    assert f"{file_name(1)}: the bytes changed" in text
    assert lockstep(capsys, "ckpt", "verify", run / "checkpoints" / "step-00000010")[0] == 1
    assert lockstep(capsys, "ckpt", "verify", run / "checkpoints" / "step-00000015")[0] == 0


def test_names_in_a_manifest_cannot_steer_the_terminal(run, capsys):
    commit(run / "checkpoints", 20, 1, metrics={"\x1b[2J\nstep": 1.0})
    for action in ("ls", "show"):
        code, text = lockstep(capsys, "ckpt", action, run)
        assert code == 0
        assert r"\x1b[2J\nstep=1" in text


def test_weights_have_the_mode_that_the_umask_gives(run, tmp_path, capsys):
    before = os.umask(0o027)
    try:
        lockstep(capsys, "ckpt", "export", run, "--out", tmp_path)
        (tmp_path / "neighbour").touch()
    finally:
        os.umask(before)
    modes = [stat.filemode((tmp_path / name).stat().st_mode) for name in ("model.safetensors", "neighbour")]
    assert modes == ["-rw-r-----", "-rw-r-----"]


def test_export_writes_the_newest_or_the_step_asked_for(run, tmp_path, capsys):
    code, text = lockstep(capsys, "ckpt", "export", run, "--out", tmp_path / "a")
    assert code == 0
    assert text.splitlines()[0] == str(tmp_path / "a" / "model.safetensors")
    assert "trunk.weight" in text  # what is missing is said
    assert torch.equal(load_file(tmp_path / "a" / "model.safetensors")["weight"], state(15)["model.weight"])
    code, text = lockstep(capsys, "ckpt", "export", run, "--step", "5")
    assert code == 0
    assert "frozen" not in text
    assert torch.equal(load_file(text.strip())["weight"], state(5)["model.weight"])
    code, text = lockstep(capsys, "ckpt", "export", run, "--step", "6")
    assert code == 2
    assert "5, 10, 15" in text


def test_prune_deletes_the_old_and_counts_only_whole_ones(run, capsys):
    storage = CheckpointStorage(run / "checkpoints")
    assert lockstep(capsys, "ckpt", "prune", run) == (0, "nothing to delete\n")
    code, text = lockstep(capsys, "ckpt", "prune", run, "--keep", "1", "--dry-run")
    assert (code, text) == (0, "would delete step-00000005\nwould delete step-00000010\n")
    assert len(list_checkpoints(storage)) == 3
    damage(run, 15)
    code, text = lockstep(capsys, "ckpt", "prune", run, "--keep", "1")
    assert "step-00000015 is damaged and stays" in text
    assert "deleted step-00000005" in text
    assert [checkpoint.name for checkpoint in list_checkpoints(storage)] == ["step-00000015", "step-00000010"]
    code, text = lockstep(capsys, "ckpt", "prune", run, "--keep", "0")
    assert code == 2
    assert "--keep 0 would keep no checkpoint" in text
    assert "use --keep 1 or more" in text


@pytest.mark.parametrize(
    ("settings", "deleted"),
    [
        ({"checkpoint.keep_every": "10"}, [5, 15]),
        ({"checkpoint.best": "loss"}, [10, 15]),
        ({"checkpoint.best": "loss", "checkpoint.best_mode": "max"}, [5, 10]),
        ({"checkpoint.keep_every": "ten", "checkpoint.best": None}, [5, 10, 15]),
    ],
)
def test_prune_keeps_what_the_run_keeps_by_its_other_rules(tmp_path, capsys, settings, deleted):
    for step, loss in {5: 1, 10: 2, 15: 4, 20: 3}.items():
        commit(tmp_path / "checkpoints", step, values={"config": settings}, metrics={"loss": loss})
    text = lockstep(capsys, "ckpt", "prune", tmp_path, "--keep", "1")[1]
    assert text.splitlines() == [f"deleted step-{step:08d}" for step in deleted]


def test_prune_deletes_what_was_set_aside_only_if_it_is_told_to(run, capsys):
    storage = CheckpointStorage(run / "checkpoints")
    set_aside(storage, "step-00000005", "rewound")
    set_aside(storage, "step-00000010", "damaged")
    commit(storage, 5)
    set_aside(storage, "step-00000005", "rewound")
    (run / "checkpoints" / "step-00000007.mine").mkdir()
    names = ["step-00000005.rewound", "step-00000005.rewound1", "step-00000010.damaged"]

    assert lockstep(capsys, "ckpt", "prune", run) == (0, "nothing to delete\n")
    code, text = lockstep(capsys, "ckpt", "prune", run, "--set-aside", "--dry-run")
    assert (code, text.splitlines()) == (0, [f"would delete {name}" for name in names])
    assert set(names) < set(storage.folders())

    code, text = lockstep(capsys, "ckpt", "prune", run, "--set-aside")
    assert (code, text.splitlines()) == (0, [f"deleted {name}" for name in names])
    assert sorted(storage.folders()) == ["step-00000007.mine", "step-00000015"]


def test_what_prune_could_not_delete_is_said_and_the_next_call_deletes_it(run, capsys, monkeypatch):
    storage = CheckpointStorage(run / "checkpoints")
    delete = CheckpointStorage.delete

    def fail_once(self: CheckpointStorage, key: str) -> None:
        monkeypatch.setattr(CheckpointStorage, "delete", delete)
        raise OSError(errno.EIO, "the store is down", key)

    monkeypatch.setattr(CheckpointStorage, "delete", fail_once)
    code, text = lockstep(capsys, "ckpt", "prune", run, "--keep", "1")
    assert code == 1
    failed, other = text.splitlines()
    assert failed.startswith("step-00000005 could not be deleted: [Errno 5] the store is down")
    assert other == "deleted step-00000010"

    # A save that another process is writing is not touched.
    (storage.root / "step-00000020.tmp-abc-1").mkdir()
    code, text = lockstep(capsys, "ckpt", "prune", run, "--keep", "1")
    assert code == 0
    assert text.startswith("deleted step-00000005.tmp-")
    assert sorted(storage.folders()) == ["step-00000015", "step-00000020.tmp-abc-1"]


def test_a_checkpoint_that_a_run_deletes_meanwhile_is_neither_damaged_nor_an_error(run, capsys, monkeypatch):
    storage = CheckpointStorage(run / "checkpoints")
    delete = CheckpointStorage.delete

    def delete_the_next_as_well(self: CheckpointStorage, key: str) -> None:
        monkeypatch.setattr(CheckpointStorage, "delete", delete)
        self.delete("step-00000010")
        self.delete(key)

    monkeypatch.setattr(CheckpointStorage, "delete", delete_the_next_as_well)
    assert lockstep(capsys, "ckpt", "prune", run, "--keep", "1") == (
        0,
        "deleted step-00000005\ndeleted step-00000010\n",
    )
    assert storage.folders() == ["step-00000015"]

    # One that is deleted while it is verified.
    for step in (20, 25):
        commit(storage, step)
    verify = command.verify_checkpoint

    def delete_first(checkpoint, *arguments):
        if checkpoint.step == 15:
            storage.delete(checkpoint.name)
        return verify(checkpoint, *arguments)

    for action, lines in (("verify", ["step-00000025  ok", "step-00000020  ok"]), ("prune", ["nothing to delete"])):
        if "step-00000015" not in storage.folders():
            commit(storage, 15)
        monkeypatch.setattr(command, "verify_checkpoint", delete_first)
        code, text = lockstep(capsys, "ckpt", action, run)
        assert (code, text.splitlines()) == (0, lines)


@pytest.mark.parametrize("action", ["ls", "show", "verify", "prune", "export"])
def test_a_folder_that_cannot_be_listed_is_an_error_in_words(run, capsys, monkeypatch, action):
    def denied(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", denied)
    code, text = lockstep(capsys, "ckpt", action, run)
    assert code == 1
    assert text.startswith("lockstep: lockstep ckpt could not read or write a file\n")
    assert f"Permission denied: {run}/checkpoints" in text


def test_a_run_in_a_folder_named_checkpoints_is_a_run(tmp_path, capsys):
    run = tmp_path / "checkpoints" / "run1"
    commit(run / "checkpoints", 5)
    assert "step-00000005" in lockstep(capsys, "ckpt", "show", run)[1]
    assert "step-00000005  ok" in lockstep(capsys, "ckpt", "verify", run)[1]
    code, text = lockstep(capsys, "ckpt", "export", run)
    assert (code, text.strip()) == (0, str(run / "export" / "step-00000005" / "model.safetensors"))


@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/step-00000015"])
def test_any_folder_of_a_run_may_be_the_working_folder(run, capsys, monkeypatch, where):
    monkeypatch.chdir(run / where)
    if "step" not in where:
        code, text = lockstep(capsys, "ckpt", "ls", ".")
        assert code == 0
        assert "15" in text
    assert "15" in lockstep(capsys, "ckpt", "show", ".")[1]
    code, text = lockstep(capsys, "ckpt", "export", ".")
    assert code == 0
    assert (run / "export" / "step-00000015" / "model.safetensors").exists()


def test_an_export_is_next_to_the_folder_that_was_given(run, capsys):
    assert str(run / "checkpoints" / "step-00000015") in lockstep(capsys, "ckpt", "show", run)[1]
    for given in (run, run / "checkpoints", run / "checkpoints" / "step-00000015"):
        code, text = lockstep(capsys, "ckpt", "export", given, "--overwrite")
        assert code == 0
        assert text.splitlines()[0] == str(run / "export" / "step-00000015" / "model.safetensors")


@pytest.mark.parametrize("place", ["nowhere", "."])
def test_a_folder_without_checkpoints_is_an_error_that_says_what_to_give(tmp_path, capsys, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    code, text = lockstep(capsys, "ckpt", "ls", place)
    assert code == 2
    assert "give the folder of a run" in text


def test_looking_needs_no_torch(run):
    script = (
        "import sys\n"
        "from lockstep.cli import main\n"
        "for action in ['ls', 'show', 'verify', 'prune']:\n"
        "    assert main(['ckpt', action, sys.argv[1]]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(run)], check=True, capture_output=True)


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
    checkpoint = commit(tmp_path / "checkpoints", 3, 2, tensors, aliases={"model.head.weight": "model.embed.weight"})
    target, _ = export_weights(checkpoint, tmp_path / "out")
    assert target == tmp_path / "out" / "model.safetensors"
    with safe_open(target, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    written = load_file(target)
    assert written.keys() == {name for name in model.state_dict() if name != "head.weight"}
    fresh = Tied()
    load_model(fresh, target)  # what users of safetensors call
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)
    assert export_weights(checkpoint, tmp_path / "mine.safetensors") == (tmp_path / "mine.safetensors", [])


def test_nothing_damaged_is_exported(tmp_path):
    checkpoint = commit(tmp_path, 3)
    file = checkpoint.path / file_name(0)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="the bytes changed"):
        export_weights(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_a_model_cannot_be_exported(tmp_path):
    checkpoint = commit(tmp_path, 3, tensors={"other": torch.ones(1)})
    with pytest.raises(UserError, match="no tensor whose name begins with"):
        export_weights(checkpoint, tmp_path / "out")
