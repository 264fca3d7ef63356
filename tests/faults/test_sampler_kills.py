"""Ranks killed while they train in the order of a sampler, on 1, then 3, then 2 ranks: every offset is trained once."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

import preloaded
import sampling
from faults import torture
from lockstep.data.samplers.torch_samplers import bind_sampler
from lockstep.faults import Fault
from lockstep.testing import faults_environment

PARTS = ((1, 6), (3, 12), (2, 18))  # (ranks, steps): three epochs of six steps


def train(folder: Path, kind: str, ranks: int, steps: int) -> None:
    """Train up to `steps` in `folder`. Each rank is killed once, in different phases."""
    phases = ("compute", "all-reduce", "data")
    faults = [Fault("kill", rank, steps - 4 + rank, phases[rank]) for rank in range(ranks)]
    (folder / f"marks-{steps}").mkdir(parents=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | faults_environment(folder / f"marks-{steps}", *faults)
    settings = {
        "task.kind": kind,
        "steps": steps,
        "log.samples": "true",
        "checkpoint.every": 2,
        "run_dir": folder / "run",
    }
    words = [f"{key}={value}" for key, value in (settings | sampling.SETTINGS[kind]).items()]
    command = ("train", f"{sampling.__file__}:Sampling", "--nproc", str(ranks), "--resume", "auto", *words)
    done = preloaded.run(*command, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def expected(kind: str) -> dict[tuple[int, int], int]:
    """How often each (epoch, id) is due in three epochs, by the sampler itself."""
    if kind in sampling.ONCE:
        samples = len(sampling.KINDS[kind]())
        return Counter((epoch, i) for epoch in range(3) for i in range(samples))
    data = sampling.KINDS[kind]()
    data = sampling.Sampled(data.dataset, data.sampler) if kind == "loader" else data
    sampler = bind_sampler(data, seed=0).sampler
    return Counter((epoch, int(i)) for epoch in range(3) for i in sampler.ids(epoch, 0, len(sampler)))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", sampling.KINDS)
def test_every_offset_is_trained_once_whatever_is_killed(tmp_path: Path, kind: str) -> None:
    for ranks, steps in PARTS:
        train(tmp_path, kind, ranks, steps)
    restarts = (tmp_path / "run" / "events.jsonl").read_text().count('"event": "restart"')
    assert restarts == sum(ranks for ranks, _ in PARTS), "not every kill happened"
    trained = torture.history(tmp_path / "run")
    assert sorted(trained) == list(range(1, 19))
    counted = Counter(pair for pairs in trained.values() for pair in pairs)
    due = expected(kind)
    if kind == "packed":  # an epoch of rows has fewer steps, so there are more epochs: all but the last are whole
        assert all(counted[pair] == 1 for pair in due)
    else:
        assert counted == due
