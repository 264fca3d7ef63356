"""Computes the breakdown of a trace: pure arithmetic on intervals, without torch.

A trace has the events of torch's profiler and the phases of the host, all in microseconds of one clock. On a
CPU the work of a phase is the time that the host spends in it. On a GPU the host only enqueues work, so kernels count,
and each belongs to the phase that launched it. Communication is exposed where nothing is computed at the same time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Interval = tuple[float, float]
Event = Mapping[str, Any]

# The parts of a step, in the order in which they are shown.
KINDS = (
    "data wait",
    "copy",
    "forward",
    "backward",
    "exposed communication",
    "optimizer",
    "save",
    "evaluate",
    "user code",
    "framework",
)

# Communication above this share of a step is worth a warning.
COMMUNICATION_LIMIT = 0.20

# Operations that compute nothing. DDP makes views of its buckets after it has waited for them.
VIEWS = {"as_strided", "view", "detach", "alias", "t", "transpose", "expand", "reshape", "slice", "select", "empty"}

# Collectives of torch's profiler, as the host calls them.
COLLECTIVE_OP = "c10d::"
ELEMENT_BYTES = {
    "float": 4,
    "double": 8,
    "long int": 8,
    "int": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "unsigned char": 1,
}


@dataclass(frozen=True)
class HostPhase:
    """A phase of the host."""

    start: float
    end: float
    kind: str  # one of KINDS


@dataclass(frozen=True)
class TracedCollective:
    """One call of a collective, with the bytes of its tensors on this rank."""

    name: str
    bytes: int
    start: float


@dataclass
class Breakdown:
    """The time of a traced window on one rank, in seconds, and its collectives."""

    steps: int
    seconds: float
    kinds: dict[str, float]  # adds up to `seconds`
    communication: float  # seconds in which a collective was under way
    overlapped: float  # part of it during which this rank computed
    collectives: list[tuple[str, int]] = field(default_factory=list)  # (name, bytes) of one step
    busy: float | None = None  # fraction of the time in which the GPU had a kernel; None on a CPU

    @property
    def overlap_fraction(self) -> float:
        return self.overlapped / self.communication if self.communication else 0.0

    @property
    def compute_fraction(self) -> float:
        """Computation / (computation + exposed communication)."""
        computed = sum(self.kinds.get(kind, 0.0) for kind in ("forward", "backward", "optimizer"))
        exposed = self.kinds.get("exposed communication", 0.0)
        return computed / (computed + exposed) if computed + exposed else 1.0

    @property
    def communication_share(self) -> float:
        return self.kinds.get("exposed communication", 0.0) / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_step(self) -> int:
        return sum(size for _, size in self.collectives)

    def as_dict(self) -> dict[str, Any]:
        derived = {
            "overlap_fraction": self.overlap_fraction,
            "compute_fraction": self.compute_fraction,
            "communication_share": self.communication_share,
            "bytes_per_step": self.bytes_per_step,
        }
        return {**asdict(self), **derived}


def breakdown(
    events: Sequence[Event], phases: Sequence[HostPhase], steps: int, on_gpu: bool, element_bytes: int = 4
) -> Breakdown:
    """Return where the time between the first and the last phase went.

    The profiler does not say which dtype the lists of tensors have that DDP reduces: `element_bytes` does.
    """
    # From the beginning of the first phase to the end of the last one.
    phases = sorted(phases, key=lambda phase: phase.start)
    window = (phases[0].start, phases[-1].end)

    # Events of type "X" have a duration.
    complete = [event for event in events if event.get("ph") == "X"]
    analyse = _on_gpu if on_gpu else _on_cpu
    return analyse(complete, phases, window, steps, element_bytes)


def _on_cpu(
    events: Sequence[Event], phases: Sequence[HostPhase], window: Interval, steps: int, element_bytes: int
) -> Breakdown:
    # The thread that communicates may note the end late; the host had waited for it by the end of its phase.
    ends = [(phase.start, phase.end) for phase in phases]
    talking = [_ending_with(_interval(event), ends) for event in events if _is_gloo(event)]
    communication = clip(union(talking), window)

    computing = union(_interval(event) for event in events if _computes(event))
    # The part of that time in which nothing was computed.
    exposed = subtract(communication, computing)

    # A phase is charged for its own time, without the communication that it waits for.
    kinds = dict.fromkeys(KINDS, 0.0)
    for phase in phases:
        inside = (phase.start, phase.end)
        kinds[phase.kind] += length([inside]) - length(clip(exposed, inside))

    kinds["exposed communication"] += length(exposed)

    # What lies between two phases is ours as well.
    kinds["framework"] += max(0.0, length([window]) - sum(kinds.values()))
    return _make(kinds, window, steps, communication, exposed, collectives_of(events, window, element_bytes))


def _on_gpu(
    events: Sequence[Event], phases: Sequence[HostPhase], window: Interval, steps: int, element_bytes: int
) -> Breakdown:
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memset")]
    copies = union(_interval(event) for event in events if event.get("cat") == "gpu_memcpy")
    ends = [_interval(event)[1] for event in kernels]
    window = (window[0], max([window[1], *ends]))

    # NCCL's kernels communicate; gloo takes the tensors through host memory.
    own = [event for event in kernels if "nccl" not in str(event["name"]).lower()]
    talking = [_interval(event) for event in kernels if "nccl" in str(event["name"]).lower()]
    communication = clip(union([*talking, *(_interval(event) for event in events if _is_gloo(event))]), window)

    computing = union(_interval(event) for event in own)
    exposed = subtract(communication, computing)

    # A kernel belongs to the phase in which the host launched it.
    launched = {_correlation(event): float(event["ts"]) for event in events if _is_launch(event)}

    starts = [phase.start for phase in phases]
    by_kind: dict[str, list[Interval]] = {}

    for event in own:
        moment = launched.get(_correlation(event), float(event["ts"]))
        kind = phases[max(0, bisect_right(starts, moment) - 1)].kind
        by_kind.setdefault(kind, []).append(_interval(event))

    # Kernels of several streams may overlap. Each moment counts once, for the kind that comes first.
    kinds = dict.fromkeys(KINDS, 0.0)
    taken: list[Interval] = []
    for kind, intervals in by_kind.items():
        # Time that an earlier kind has taken is not counted again.
        mine = subtract(union(intervals), taken)
        kinds[kind] += length(mine)
        taken = union([*taken, *mine])

    exposed_copies = subtract(copies, taken)
    kinds["copy"] += length(clip(exposed_copies, window))
    exposed = subtract(exposed, exposed_copies)
    kinds["exposed communication"] += length(exposed)

    # The device is idle where the host waits for data, or where it launches too slowly.
    active = union([*taken, *copies, *communication])
    idle = subtract([window], active)
    waiting = union((phase.start, phase.end) for phase in phases if phase.kind == "data wait")

    kinds["data wait"] += length(intersect(idle, waiting))
    kinds["framework"] += length(subtract(idle, waiting))

    made = _make(kinds, window, steps, communication, exposed, collectives_of(events, window, element_bytes))
    made.busy = length(clip(union([*computing, *communication]), window)) / max(1e-9, length([window]))
    return made


def _make(
    kinds: dict[str, float],
    window: Interval,
    steps: int,
    communication: list[Interval],
    exposed: list[Interval],
    collectives: list[TracedCollective],
) -> Breakdown:
    total = length(communication)
    return Breakdown(
        steps=steps,
        seconds=length([window]) / 1e6,
        kinds={kind: value / 1e6 for kind, value in kinds.items()},
        communication=total / 1e6,
        overlapped=max(0.0, total - length(exposed)) / 1e6,
        # Every step makes the same calls, so the first part of them is one step's.
        collectives=[(call.name, call.bytes) for call in collectives[: len(collectives) // max(1, steps)]],
    )


def collectives_of(events: Iterable[Event], window: Interval, element_bytes: int) -> list[TracedCollective]:
    """Return the collectives that the host called in the window, in their order."""
    found = []
    for event in events:
        name = str(event["name"])
        # The host may call a collective before the window, or after it.
        if name.startswith(COLLECTIVE_OP) and window[0] <= event["ts"] <= window[1]:
            found.append(
                TracedCollective(
                    name.removeprefix(COLLECTIVE_OP).rstrip("_"), _bytes(event, element_bytes), event["ts"]
                )
            )

    return sorted(found, key=lambda call: call.start)


def _bytes(event: Event, element_bytes: int) -> int:
    """Return the bytes of the first tensor, or list of tensors, that a call was given."""
    # As torch's profiler records the shapes of inputs.
    arguments = event.get("args", {})
    dims = arguments.get("Input Dims") or [[]]
    kind = (arguments.get("Input type") or [""])[0]

    if not dims[0]:
        return 0

    shapes = dims[0] if isinstance(dims[0][0], list) else [dims[0]]
    return sum(math.prod(shape) for shape in shapes) * ELEMENT_BYTES.get(kind, element_bytes)


def _computes(event: Event) -> bool:
    name = str(event["name"])
    return name.startswith("aten::") and name.removeprefix("aten::") not in VIEWS


def _is_gloo(event: Event) -> bool:
    return str(event["name"]).startswith("gloo:")


def _is_launch(event: Event) -> bool:
    return event.get("cat") in ("cuda_runtime", "cuda_driver")


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


def _ending_with(interval: Interval, phases: Sequence[Interval]) -> Interval:
    """Return the interval, cut at the end of the phase in which it began."""
    index = bisect_right(phases, (interval[0], math.inf)) - 1
    return (interval[0], min(interval[1], phases[index][1])) if index >= 0 else interval


def _interval(event: Event) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))


# ---- intervals ----


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals in order that cover the same time."""
    merged: list[Interval] = []

    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))

    return merged


def subtract(these: Sequence[Interval], those: Sequence[Interval]) -> list[Interval]:
    """Return the parts of `these` that no interval of `those` covers. Both are disjoint and in order."""
    left: list[Interval] = []
    first = 0
    for start, end in these:
        # Intervals that end before this one begins are over for all that follow.
        while first < len(those) and those[first][1] <= start:
            first += 1

        index = first
        while index < len(those) and those[index][0] < end:
            if those[index][0] > start:
                left.append((start, those[index][0]))

            start = max(start, those[index][1])
            index += 1

        if start < end:
            left.append((start, end))

    return left


def intersect(these: Sequence[Interval], those: Sequence[Interval]) -> list[Interval]:
    return subtract(these, subtract(these, those))


def clip(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    clipped = [(max(start, window[0]), min(end, window[1])) for start, end in intervals]
    return [(start, end) for start, end in clipped if end > start]


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
