"""Other processes, the projection to more ranks, and what the kinds compute with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.bench import hardware
from lockstep.bench.kinds.checkpoint import file_system
from lockstep.bench.kinds.comm import bus_factor, human, sizes_up_to
from lockstep.bench.projection import NetworkLink, all_reduce_seconds, fit, link_of_all_reduce, project, section_of
from lockstep.bench.results import Result, Section


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


def test_the_file_system_of_a_folder_is_named(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("disk / ext4 rw 0 0\nmemory /a/fast tmpfs rw 0 0\nshare /a nfs4 rw 0 0\n")
    assert file_system(Path("/a/fast/x"), mounts) == "tmpfs"
    assert file_system(Path("/a/fastest"), mounts) == "nfs4"
    assert file_system(Path("/b"), mounts) == "ext4"
