"""Cores for ranks, and the projection to more ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.bench import hardware
from lockstep.bench.kinds.checkpoint import file_system
from lockstep.bench.kinds.comm import bus_factor, human, sizes_up_to
from lockstep.bench.projection import NetworkLink, all_reduce_seconds, fit, link_of_all_reduce, project, section_of
from lockstep.bench.results import Result, Section


def siblings(root: Path, groups: list[list[int]]) -> None:
    for group in groups:
        for cpu in group:
            folder = root / f"cpu{cpu}" / "topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(",".join(map(str, group)))


def test_hardware_threads_of_one_core_are_one_group(tmp_path: Path) -> None:
    siblings(tmp_path, [[0, 2], [1, 3]])
    assert hardware.physical_cores([0, 1, 2, 3], tmp_path) == [[0, 2], [1, 3]]
    assert hardware.physical_cores([7, 8], tmp_path) == [[7], [8]]


@pytest.fixture
def four_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two cores with two hardware threads each, and no GPU."""
    siblings(tmp_path, [[0, 2], [1, 3]])
    groups = hardware.physical_cores([0, 1, 2, 3], tmp_path)
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(hardware, "available_cores", lambda: 4)
    monkeypatch.setattr(hardware, "physical_cores", lambda allowed: groups)


@pytest.mark.usefixtures("four_threads")
def test_ranks_get_cores_of_their_own_as_long_as_there_are_enough() -> None:
    two = hardware.place(2, 2, gpus=0)
    assert two.cpus == [[0, 2], [1, 3]]
    assert two.own
    assert hardware.describe(two, 2) == "each rank has 2 hardware threads of 1 core of its own"

    # Whatever the number of ranks, a rank has the same: here a core whose other thread is idle.
    assert hardware.place(1, 1, gpus=0).cpus == [[0]]
    assert hardware.place(2, 1, gpus=0).cpus == [[0], [1]]
    assert hardware.describe(hardware.place(2, 1, gpus=0), 1) == "each rank has 1 core of its own"

    assert hardware.place(4, 1, gpus=0).shared == "ranks share physical cores, as hardware threads"
    assert hardware.place(3, 2, gpus=0).shared == "3 ranks of 2 cores share 4 cores"


@pytest.mark.usefixtures("four_threads")
def test_with_gpus_it_is_the_gpus_that_count() -> None:
    assert hardware.place(2, 1, gpus=2).own
    assert hardware.place(3, 1, gpus=2).shared == "3 ranks share 2 GPUs"


def test_a_fit_finds_latency_and_bandwidth() -> None:
    sizes = [1024 * 4**power for power in range(8)]
    latency, bandwidth = fit(sizes, [50e-6 + size / 2e9 for size in sizes])
    assert latency == pytest.approx(50e-6)
    assert bandwidth == pytest.approx(2e9)

    # A ring of four: what is projected for four ranks is what was measured.
    link = link_of_all_reduce(4, sizes, [50e-6 + size / 2e9 for size in sizes])
    assert all_reduce_seconds(link, 4, 1e6) == pytest.approx(50e-6 + 1e6 / 2e9)
    assert all_reduce_seconds(link, 1, 1e6) == 0.0


def test_a_projection_knows_what_communication_costs() -> None:
    link = NetworkLink(latency=1e-6, bandwidth=1e10)
    free = project("weak", 0.1, 0, NetworkLink(0.0, 1e10))
    assert [point.efficiency for point in free] == [1.0, 1.0, 1.0]

    weak, strong = project("weak", 0.1, 4e8, link), project("strong", 0.1, 4e8, link)
    assert [point.ranks for point in weak] == [8, 64, 1024]
    for points in (weak, strong):
        assert [p.efficiency for p in points] == sorted((p.efficiency for p in points), reverse=True)
    # Less work per rank hides less, and communicates as much.
    assert all(one.efficiency > other.efficiency for one, other in zip(weak, strong, strict=True))
    # Communication is hidden only as long as the backward lasts.
    hidden = project("strong", 0.1, 4e8, link, hidden=1.0)
    assert hidden[-1].step >= all_reduce_seconds(link, 1024, 4e8) - 0.1 / 1024


def test_sizes_and_bus_bandwidth() -> None:
    assert [human(size) for size in sizes_up_to(256)][::3] == ["1 KB", "64 KB", "4 MB", "256 MB"]
    assert sizes_up_to(2)[-1] == 2 * 2**20
    assert (bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("send_recv", 4)) == (1.5, 0.75, 1.0)


def scaling(mode: str, efficiencies: dict[int, float], **facts: Any) -> Section:
    rows = [
        {
            "world": world,
            "global_batch": 16,
            "step_ms": {"median": 10.0, "low": 10.0, "high": 10.0},
            "scaling_efficiency": {"median": value, "low": value, "high": value},
            "overlap_fraction": 0.0,
        }
        for world, value in efficiencies.items()
    ]
    known = {"backend": "gloo", "strategy": "ddp", "gradient_bytes": 0, **facts}
    return Section(mode, mode, [], rows, extra={"facts": known})


def test_a_projection_is_compared_with_what_was_measured_and_refused_where_it_does_not_hold() -> None:
    comm = Section("comm", "comm", [], [], extra={"links": {"gloo": {"latency": 0.0, "bandwidth": 1e9}}})

    def projected(section: Section) -> Section:
        found = section_of(Result("", {}, sections=[comm, section]))
        assert found is not None
        return found

    # Nothing is communicated, so the projected efficiency is 1; 0.8 was measured. 16 samples are for 16 ranks at most.
    strong = projected(scaling("strong", {1: 1.0, 2: 0.8}))
    assert [row["ranks"] for row in strong.rows] == [2, 8]
    assert strong.rows[0]["error"] == pytest.approx(0.25)
    assert strong.rows[1]["measured"] is None
    assert [row["ranks"] for row in projected(scaling("weak", {1: 1.0, 2: 0.8})).rows] == [2, 8, 64, 1024]

    for section, why in (
        (scaling("weak", {1: 1.0, 2: 0.8}, backend="nccl"), "the all-reduce of nccl was not measured"),
        (scaling("weak", {2: 1.0, 4: 0.8}), "one rank was not measured"),
        (scaling("weak", {1: 1.0, 2: 0.8}, strategy="fsdp"), "strategy fsdp communicates more"),
    ):
        refused = projected(section)
        assert refused.rows == []
        assert why in refused.notes[-1]


def test_what_is_not_known_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "available_cores", lambda: 4)
    assert "not known" in hardware.disturbance(None)
    assert hardware.disturbance(0.5) == "other processes used 0.50 cores meanwhile"
    assert hardware.disturbance(0.3) == ""
    monkeypatch.delattr(hardware.os, "sched_setaffinity", raising=False)
    assert hardware.place(1, 1, gpus=0).shared == "this system cannot give ranks cores of their own"


def test_the_file_system_of_a_folder_is_named(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("disk / ext4 rw 0 0\nmemory /a/fast tmpfs rw 0 0\nshare /a nfs4 rw 0 0\n")
    assert file_system(Path("/a/fast/x"), mounts) == "tmpfs"
    assert file_system(Path("/a/fastest"), mounts) == "nfs4"
    assert file_system(Path("/b"), mounts) == "ext4"
