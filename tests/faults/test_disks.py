"""Disks that are full, read-only, or give back other bytes than were written: with real runs, on real file systems."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.runs import TINY, train
from faults.torture import digests
from lockstep.faults import Fault


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for one checkpoint (370 kB) and a half, beside logs and metrics."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a file system here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(small_disk: Path) -> None:
    ended = train(small_disk, *TINY, "checkpoint.keep=1", "checkpoint.at_end=false")
    assert ended.code == 0, ended.output
    warnings = [event["reason"] for event in ended.events("warning")]
    lost = [text for text in warnings if "WAS NOT WRITTEN" in text]
    assert lost, ended.output
    assert "no space left on the disk" in lost[0]
    assert re.search("while writing|too little", lost[0])  # and how much
    assert "the last good one is step-00000005" in lost[0]
    assert digests(ended.run)  # whole, to the last byte
    assert "step    40/40" in ended.output


def test_too_small_a_disk_is_refused_before_the_first_step(tmp_path: Path, small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(700_000))
    ended = train(small_disk, *TINY)
    assert ended.code == 2, ended.output
    assert "room for a checkpoint" in ended.output
    assert "step" not in ended.output.split("lockstep:")[0].replace("steps", "")


def test_a_read_only_folder_is_refused_at_the_start(small_disk: Path) -> None:
    (small_disk / "marks").mkdir()
    (small_disk / "run").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=100k", "tmpfs", str(small_disk / "run")], check=True)
    try:
        ended = train(small_disk, *TINY)
    finally:
        subprocess.run(["umount", "-l", str(small_disk / "run")], check=True)
    assert ended.code == 2, ended.output
    assert "Read-only file system" in ended.output
    assert "set run_dir=FOLDER" in ended.output


@pytest.mark.parametrize("how", ["corrupt", "truncate"])
def test_a_damaged_checkpoint_is_passed_over_and_the_model_is_the_same(
    tmp_path: Path, undisturbed: dict[str, str], how: str
) -> None:
    """The newest checkpoint is spoiled on disk, and then a rank is killed."""
    faults = (Fault(how, step=20), Fault("kill", rank=1, step=22, phase="compute"))
    ended = train(tmp_path / "torn", *TINY, "checkpoint.asynchronous=false", faults=faults)
    assert ended.code == 0, ended.output
    assert "checkpoint step-00000020 is damaged: rank-00000.safetensors" in ended.output
    assert "resuming from step-00000015" in ended.output
    assert (ended.run / "checkpoints" / "step-00000020.damaged").is_dir()
    assert digests(ended.run) == undisturbed


@pytest.mark.long
def test_a_checkpoint_that_all_ranks_have_written_survives_the_error_of_another_rank(tmp_path: Path) -> None:
    """Rank 0 takes 2 s for the commit, and rank 1 raises meanwhile: without that checkpoint there is no restart."""
    words = ("preset=tiny", "steps=8", "checkpoint.every=5", "checks.loss=off")
    slow = Fault("slow", rank=0, step=5, phase="rename", times=1, seconds=2.0)
    ended = train(tmp_path / "run", *words, nproc=2, faults=(slow, Fault("raise", rank=1, step=6, phase="compute")))
    assert ended.code == 0, ended.output
    assert "restarting 2 ranks from the checkpoint of step 5" in ended.output
