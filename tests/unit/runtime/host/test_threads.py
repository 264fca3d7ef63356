"""How many CPU threads a rank gets: by the size of the work, unless somebody has decided."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.launch import agent
from lockstep.observe.sinks import read_jsonl
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import Runtime
from lockstep.runtime.heartbeat import Heartbeat
from lockstep.runtime.host import resources, threads
from lockstep.runtime.host.threads import LEAST_WORK, Threads
from lockstep.runtime.preemption import PreemptionNotice
from lockstep.runtime.world import World


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "available_cores", lambda: 8)
    # What torch has here is what it would choose by itself.
    monkeypatch.setattr(threads, "hardware_counts", lambda: {5, torch.get_num_threads()})
    for name in (threads.OMP_THREADS_VAR, threads.CORES_VAR, *threads.WAIT_VARS):
        monkeypatch.delenv(name, raising=False)


def choose(asked: int | None = None, exact: bool = False, ranks: int = 2, on_cpu: bool = True, **env: str) -> Threads:
    usual = int(env.get(threads.CORES_VAR, 5)) if env.get(threads.OMP_THREADS_VAR) == env.get(threads.CORES_VAR) else 5
    return Threads.choose(asked, exact, ranks, on_cpu, usual, env)


def test_threads_are_chosen_by_the_size_of_the_work() -> None:
    cases = {
        # a model of 31k parameters; one just below the limit, and one at it; deep and narrow, wide and shallow
        "tiny": ([32 * 32] * 8 + [32 * 256] * 2, 8 * 32, 1),
        "below": ([1024 * 1024 - 1], 16, 1),
        "at": ([1024 * 1024], 16, 4),
        "more positions": ([1024 * 128], 128, 4),
        "deep": ([64 * 64] * 10_000, 8, 1),
        "no matrix": ([], 1_000_000_000, 1),
        "positions are not known": ([1], None, 4),
    }
    for name, (matrices, positions, count) in cases.items():
        chosen = choose()
        assert chosen.count == 1, "one before the model is known"
        chosen.suit(matrices, positions)
        assert (name, chosen.count) == (name, count)
        assert ("small layers; threads=4" in str(chosen)) == (count == 1)
        assert ("4 cores" in str(chosen)) == (count == 4)


@pytest.mark.parametrize(
    ("given", "count", "reason"),
    [
        ({"asked": 3}, 3, "as asked"),
        ({"asked": 3, "exact": True, "OMP_NUM_THREADS": "7"}, 3, "as asked"),
        # The bits of an exact run must not depend on a variable of one resources.
        ({"exact": True, "OMP_NUM_THREADS": "7"}, 1, "exact=true"),
        ({"OMP_NUM_THREADS": "5"}, 5, "OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "5", "LOCKSTEP_CORES": "4"}, 5, "OMP_NUM_THREADS"),
        ({"on_cpu": False}, 5, ""),
    ],
)
def test_what_somebody_has_decided_stays(given: dict[str, Any], count: int, reason: str) -> None:
    chosen = choose(**given)
    for size in (1, LEAST_WORK):
        chosen.suit([size], 8)
        assert (chosen.count, chosen.reason) == (count, reason)


def test_the_launchers_own_number_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    env = agent._environment_for(2)
    assert (env["OMP_NUM_THREADS"], env["OMP_WAIT_POLICY"]) == ("4", "passive")
    chosen = choose(**{name: env[name] for name in (threads.OMP_THREADS_VAR, threads.CORES_VAR)})
    chosen.suit([1], 1)
    assert chosen.count == 1

    # A launcher inside a rank shares again; what the user has set stays.
    threads.share_cores(env, 8)
    assert env["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("GOMP_SPINCOUNT", "infinity")
    env = agent._environment_for(2)
    assert (env["OMP_NUM_THREADS"], "OMP_WAIT_POLICY" in env) == ("3", False)


class Wide(lockstep.Task):
    def __init__(self, width: int):
        self.width = width
        self.counts: list[int] = []

    def model(self) -> nn.Module:
        return nn.Linear(self.width, self.width)

    def data(self) -> Any:
        return torch.utils.data.TensorDataset(torch.ones(8, self.width))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        self.counts.append(torch.get_num_threads())
        return lockstep.Loss(model(batch[0]).sum(), weight=len(batch[0]))


def encoder() -> nn.Module:
    with torch.device("meta"):
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024), 6, enable_nested_tensor=False)


def resnet_20() -> nn.Module:
    widths = [16] * 7 + [32] * 6 + [64] * 6
    with torch.device("meta"):
        convolutions = [nn.Conv2d(a, b, 3) for a, b in itertools.pairwise([3, *widths])]
        return nn.Sequential(*convolutions, nn.Linear(64, 10))


@pytest.mark.parametrize(
    ("make", "samples", "sample", "count"),
    [
        (resnet_20, 32, torch.zeros(3, 32, 32), 4),
        (resnet_20, 1, torch.zeros(3, 8, 8), 1),
        (encoder, 4, torch.zeros(128, 256), 4),
        (encoder, 4, torch.zeros(128, dtype=torch.int64), 4),
        (encoder, 4, torch.zeros(256), 1),
        (lambda: nn.Linear(784, 100), 32, torch.zeros(28, 28), 1),
        (lambda: nn.Linear(784, 100), 32, None, 4),
    ],
)
def test_the_work_grows_with_tokens_and_pixels(
    make: Callable[[], nn.Module], samples: int, sample: torch.Tensor | None, count: int
) -> None:
    before = torch.get_num_threads()
    world, device = World(0, 1), torch.device("cpu")
    runtime = Runtime(world, device, "none", Collectives(world, device), choose(), Heartbeat(), PreemptionNotice())
    try:
        runtime.suit_threads(make(), samples, lambda: sample)
        assert torch.get_num_threads() == runtime.threads.count == count
    finally:
        torch.set_num_threads(before)


def test_what_the_program_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "hardware_counts", lambda: {before})
    torch.set_num_threads(before + 2)
    try:
        task = Wide(16)
        lockstep.fit(task, steps=1, global_batch=4, device="cpu", run_dir=str(tmp_path), log={"progress": "off"})
        assert set(task.counts) == {before + 2}
    finally:
        torch.set_num_threads(before)
    assert "set by the program" in (tmp_path / "events.jsonl").read_text()


def test_all_counts_of_the_hardware_may_be_torchs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda _: {0, 1, 2, 4}, raising=False)
    assert resources.hardware_counts(tmp_path) == {8, 4}
    for number in range(8):
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{number // 2 * 2}-{number // 2 * 2 + 1}")
    assert resources.hardware_counts(tmp_path) == {8, 4, 3}


@pytest.mark.parametrize(("width", "expected"), [(16, 1), (2048, 8)])
def test_a_run_computes_with_them_and_says_why(
    width: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    task = Wide(width)
    lockstep.fit(task, steps=1, global_batch=4, device="cpu", run_dir=str(tmp_path), log={"progress": "off"})
    assert set(task.counts) == {expected}
    assert torch.get_num_threads() == before

    start = next(event for event in read_jsonl(tmp_path / "events.jsonl") if event["event"] == "start")
    assert f"{expected} CPU thread" in str(start)
    assert ("threads=8" if expected == 1 else "8 cores") in str(start)


def test_the_quota_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/pod/job\n")
    assert resources.cpu_quota(tmp_path, own) is None

    (tmp_path / "pod" / "job").mkdir(parents=True)
    (tmp_path / "pod" / "job" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "pod" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert resources.cpu_quota(tmp_path, own) == 1.5

    # In a container the path is that of the host: only the top is there.
    own.write_text("0::/../elsewhere\n")
    assert resources.cpu_quota(tmp_path, own) == 4.0
    monkeypatch.setattr(resources, "cpu_quota", lambda: 0.5)
    assert resources.available_cores() == 1
