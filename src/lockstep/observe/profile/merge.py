"""One timeline of all ranks, for Perfetto or Chrome, and the sentences about it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.observe.profile.timeline import COMMUNICATION_LIMIT, KINDS

PHASES_TRACK = 1_000_000  # the thread number of the track with the phases


def merge(files: Sequence[Path], target: Path) -> None:
    """Merge the traces of ranks, in the order of `files`, into one file: each rank is a process of the timeline."""
    events: list[dict[str, Any]] = []
    traces = [json.loads(file.read_text()) for file in files]

    # The clocks of one machine are the same; a trace counts from its own base.
    base = min(trace.get("baseTimeNanoseconds", 0) for trace in traces)
    for rank, trace in enumerate(traces):
        shift = (trace.get("baseTimeNanoseconds", 0) - base) / 1e3
        for event in trace["traceEvents"]:
            # The profiler's own names for processes would contradict ours.
            if event.get("ph") == "M" and event["name"].startswith("process_"):
                continue

            moved = {"ts": event["ts"] + shift} if "ts" in event else {}
            events.append({**event, **moved, "pid": rank})

        events += _names(rank)
        events += [
            {
                "ph": "X",
                "cat": "phase",
                "name": kind,
                "pid": rank,
                "tid": PHASES_TRACK,
                "ts": start + shift,
                "dur": end - start,
            }
            for start, end, kind in trace.get("lockstep_phases", [])
        ]

    with gzip.open(target, "wt", compresslevel=6) as file:
        json.dump({"displayTimeUnit": "ms", "baseTimeNanoseconds": base, "traceEvents": events}, file)


def _names(rank: int) -> list[dict[str, Any]]:
    named = {"ph": "M", "pid": rank, "tid": 0}
    return [
        {**named, "name": "process_name", "args": {"name": f"rank {rank}"}},
        {**named, "name": "process_sort_index", "args": {"sort_index": rank}},
        {**named, "name": "thread_name", "tid": PHASES_TRACK, "args": {"name": "phases of the step"}},
    ]


def mean_over_ranks(ranks: Sequence[dict[str, Any]], key: str) -> float:
    """Return the mean of a number of the breakdowns of all ranks."""
    return sum(rank[key] for rank in ranks) / len(ranks)


def mean_kinds(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of each kind per step, averaged over the ranks."""
    per_step = [{kind: rank["kinds"].get(kind, 0.0) / max(1, rank["steps"]) for kind in KINDS} for rank in ranks]
    return {kind: mean_over_ranks(per_step, kind) for kind in KINDS}


def warnings(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Return what a user should know about the breakdowns of all ranks, with advice."""
    share = mean_over_ranks(ranks, "communication_share")
    if share <= COMMUNICATION_LIMIT:
        return []

    overlap = mean_over_ranks(ranks, "overlap_fraction")
    advice = "more samples per rank (global_batch), or more micro-batches per step (micro_batch), make it rarer"
    if overlap < 0.5:
        advice += "; smaller buckets begin earlier (ddp.bucket_mb=5)"

    advice += "; ddp.hook=bf16 halves the bytes, and changes the result"
    return [
        f"{share:.0%} of a step is communication that no computation hides (the limit is {COMMUNICATION_LIMIT:.0%}; "
        f"{overlap:.0%} of all communication is hidden): {advice}"
    ]
