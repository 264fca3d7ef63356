"""`lockstep ckpt`: what it says, what it deletes, its exit codes, and that looking needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import commit, state
from safetensors.torch import load_file

from lockstep.checkpoint.format import part_name
from lockstep.checkpoint.storage import Store
from lockstep.cli import main


@pytest.fixture
def run(tmp_path) -> Path:
    for step in (5, 10, 15):
        left_out = {"trunk.weight": "its digest"} if step == 15 else {}
        values = {"metrics": {"loss": 1 / step}, "state": {"model": {"left_out": left_out}}}
        commit(tmp_path / "checkpoints", step, 2, values=values)
    return tmp_path


def lockstep(capsys, *arguments: object) -> tuple[int, str]:
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out + said.err


def damage(run: Path, step: int) -> None:
    path = run / "checkpoints" / f"step-{step:08d}" / part_name(1)
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
    os.truncate(run / "checkpoints" / "step-00000010" / part_name(0), 5)
    assert f"damaged: {part_name(0)}: 5 bytes" in lockstep(capsys, "ckpt", "ls", run)[1]


def test_show_describes_the_newest_or_the_one_given(run, capsys):
    code, text = lockstep(capsys, "ckpt", "show", run)
    assert code == 0
    rows = [line.split() for line in text.splitlines()]
    assert ["step", "15"] in rows
    assert ["model.weight", "F32", "[7,", "6]", "168", "bytes", "2"] in rows
    assert ["step", "5"] in [
        line.split() for line in lockstep(capsys, "ckpt", "show", run / "checkpoints/step-00000005")[1].splitlines()
    ]


def test_verify_names_every_bad_file_and_fails(run, capsys):
    assert lockstep(capsys, "ckpt", "verify", run) == (0, "step-00000015  ok\nstep-00000010  ok\nstep-00000005  ok\n")
    damage(run, 10)
    (run / "checkpoints" / "step-00000010" / part_name(0)).unlink()
    code, text = lockstep(capsys, "ckpt", "verify", run)
    assert code == 1
    assert "step-00000010  damaged" in text
    assert f"{part_name(0)}: missing" in text
    assert f"{part_name(1)}: the bytes changed" in text
    assert lockstep(capsys, "ckpt", "verify", run / "checkpoints" / "step-00000010")[0] == 1
    assert lockstep(capsys, "ckpt", "verify", run / "checkpoints" / "step-00000015")[0] == 0


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
    store = Store(run / "checkpoints")
    assert lockstep(capsys, "ckpt", "prune", run) == (0, "nothing to delete\n")
    code, text = lockstep(capsys, "ckpt", "prune", run, "--keep", "1", "--dry-run")
    assert (code, text) == (0, "would delete step-00000005\nwould delete step-00000010\n")
    assert len(store.committed()) == 3
    damage(run, 15)
    code, text = lockstep(capsys, "ckpt", "prune", run, "--keep", "1")
    assert "step-00000015 is damaged and stays" in text
    assert "deleted step-00000005" in text
    assert [path.name for path in store.committed()] == ["step-00000015", "step-00000010"]
    code, text = lockstep(capsys, "ckpt", "prune", run, "--keep", "0")
    assert code == 2


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
