"""The breakdown of a trace, from events with known times."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from lockstep.observe.profile.merge import mean_kinds, merge, warnings
from lockstep.observe.profile.timeline import KINDS, HostPhase, breakdown, intersect, length, subtract, union


def op(name: str, start: float, end: float, **fields: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start, "dur": end - start, **fields}


STEP = [
    HostPhase(0, 10, "data wait"),
    HostPhase(10, 30, "forward"),
    HostPhase(30, 80, "backward"),
    HostPhase(80, 95, "optimizer"),
    HostPhase(95, 100, "framework"),
]


def test_intervals_are_those_of_a_count_moment_by_moment() -> None:
    draw = random.Random(0)
    for _ in range(200):
        sets = []
        for _ in range(2):
            starts = [draw.randrange(40) for _ in range(draw.randrange(6))]
            sets.append([(start, start + draw.randrange(8)) for start in starts])
        moments = [{m for start, end in each for m in range(start, end)} for each in sets]
        a, b = union(sets[0]), union(sets[1])
        assert length(a) == len(moments[0])
        assert length(subtract(a, b)) == len(moments[0] - moments[1])
        assert length(intersect(a, b)) == len(moments[0] & moments[1])


def test_communication_during_the_backward_is_hidden_and_the_rest_is_exposed() -> None:
    events = [
        op("aten::mm", 30, 60),
        op("gloo:all_reduce", 50, 70),
        op("aten::as_strided", 66, 68),  # a view computes nothing
        op("c10d::allreduce_", 49, 50, args={"Input Dims": [[[250]]], "Input type": ["TensorList"]}),
    ]
    found = breakdown(events, STEP, steps=1, on_gpu=False)
    assert found.communication == pytest.approx(20e-6)
    assert found.overlap_fraction == pytest.approx(0.5)
    assert found.kinds["exposed communication"] == pytest.approx(10e-6)
    assert found.kinds["backward"] == pytest.approx(40e-6)
    assert sum(found.kinds.values()) == pytest.approx(found.seconds) == pytest.approx(100e-6)
    assert found.compute_fraction == pytest.approx(75 / 85)
    assert found.collectives == [("allreduce", 1000)]
    assert breakdown(events, STEP, 1, on_gpu=False, element_bytes=2).bytes_per_step == 500


def test_a_collective_that_notes_its_end_late_does_not_overlap_with_the_optimizer() -> None:
    events = [op("aten::mm", 30, 60), op("gloo:all_reduce", 60, 90), op("aten::add", 81, 94)]
    assert breakdown(events, STEP, steps=1, on_gpu=False).overlap_fraction == 0.0


def test_a_kernel_belongs_to_the_phase_that_launched_it() -> None:
    """The host runs ahead: all kernels run after it has left the phases that launched them."""
    launches = [("forward", 12, 40, 60), ("backward", 32, 60, 100), ("optimizer", 82, 115, 120)]
    events = []
    for number, (name, launched, start, end) in enumerate(launches):
        events.append(op("cudaLaunchKernel", launched, launched + 1, cat="cuda_runtime", args={"correlation": number}))
        events.append(op(name, start, end, cat="kernel", args={"correlation": number}))
    events.append(op("ncclDevKernel_AllReduce", 90, 110, cat="kernel", args={"correlation": 99}))
    events.append(op("Memcpy HtoD", 20, 25, cat="gpu_memcpy", args={}))
    found = breakdown(events, STEP, steps=1, on_gpu=True)
    expected = {"forward": 20, "backward": 40, "optimizer": 5, "exposed communication": 10, "copy": 5, "data wait": 10}
    expected["framework"] = 120 - sum(expected.values())
    assert {kind: round(1e6 * value) for kind, value in found.kinds.items() if value} == expected
    assert found.overlap_fraction == pytest.approx(0.5)
    assert found.busy == pytest.approx(75 / 120)


def rank(**kinds: float) -> dict[str, Any]:
    named = {kind.replace("_", " "): value for kind, value in kinds.items()}
    share = named.get("exposed communication", 0.0) / sum(named.values())
    return {"steps": 2, "kinds": named, "communication_share": share, "overlap_fraction": 0.1}


def test_much_communication_is_a_warning_with_advice() -> None:
    assert warnings([rank(forward=0.81, exposed_communication=0.19)]) == []
    (warning,) = warnings([rank(forward=0.79, exposed_communication=0.21)] * 2)
    assert warning.startswith("21% of a step is communication")
    assert "ddp.bucket_mb" in warning
    assert mean_kinds([rank(forward=1.0), rank(forward=3.0)])["forward"] == 1.0
    assert list(mean_kinds([rank(forward=1.0)])) == list(KINDS)


def test_traces_of_ranks_become_processes_of_one_timeline(tmp_path: Path) -> None:
    files = []
    for number in range(2):
        trace = {
            "baseTimeNanoseconds": 1_000_000 * number,
            "traceEvents": [op("aten::mm", 5, 6, pid=4711, tid=1), {"ph": "M", "name": "process_name", "pid": 4711}],
            "lockstep_phases": [(0, 10, "forward")],
        }
        files.append(tmp_path / f"rank-{number}.json")
        files[-1].write_text(json.dumps(trace))
    merge(files, tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    # The second trace counts from a base that is 1000 us later.
    assert [(e["pid"], e["ts"]) for e in events if e["name"] == "aten::mm"] == [(0, 5), (1, 1005)]
    assert [(e["pid"], e["ts"], e["name"]) for e in events if e.get("cat") == "phase"] == [
        (0, 0, "forward"),
        (1, 1000, "forward"),
    ]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1"]
