"""Projects a measured step to more ranks: a model with three numbers, which can be wrong and is labelled as such.

A step of N ranks takes its computation plus the communication that computation does not hide. The all-reduce of B bytes
in k buckets over a ring takes 2 (N - 1) (k latency + B / N / bandwidth). Latency and bandwidth are those of one hop,
from a fit to measured all-reduces (`link_of_all_reduce`). The model assumes that every rank computes as fast as the
measured one, that links of more machines are as fast as the measured ones, and that the same share of the communication
is hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.bench.results import Column, Result, Section
from lockstep.config.strategies import STRATEGIES

RANKS = (8, 64, 1024)


@dataclass(frozen=True)
class NetworkLink:
    """The time of a message: latency + bytes / bandwidth."""

    latency: float  # seconds of one hop
    bandwidth: float  # bytes per second of one hop


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (latency, bandwidth) of `seconds = latency + size / bandwidth`, in seconds and bytes per second.

    This is weighted least squares. Errors count relative to the time, so that small messages set the latency and large
    ones the bandwidth.
    """
    # The weighted means of both.
    weights = [1 / (second * second) for second in seconds]
    total = sum(weights)
    mean_size = sum(w * x for w, x in zip(weights, sizes, strict=True)) / total
    mean_time = sum(w * y for w, y in zip(weights, seconds, strict=True)) / total

    # The line through the means with the least weighted squares: its slope is covariance / variance.
    variance = sum(w * (x - mean_size) ** 2 for w, x in zip(weights, sizes, strict=True))
    covariance = sum(w * (x - mean_size) * (y - mean_time) for w, x, y in zip(weights, sizes, seconds, strict=True))

    # Noise can make a slope or a latency negative, which no link has.
    slope = max(1e-15, covariance / variance if variance else 0.0)
    latency = max(0.0, mean_time - slope * mean_size)
    return latency, 1 / slope


def link_of_all_reduce(world: int, sizes: Sequence[float], seconds: Sequence[float]) -> NetworkLink:
    """Return the link of a ring from all-reduces of `world` ranks: 2 (N - 1) hops of 1/N of the bytes."""
    # The fit is of the whole all-reduce. One hop takes 1 / hops of its latency, and carries 1/N of its bytes.
    latency, bandwidth = fit(sizes, seconds)
    hops = 2 * (world - 1)
    return NetworkLink(latency / hops, bandwidth * hops / world)


def all_reduce_seconds(link: NetworkLink, ranks: int, size: float, buckets: int = 1) -> float:
    """Return how long a ring all-reduce of `size` bytes takes on so many ranks."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) * (buckets * link.latency + size / ranks / link.bandwidth)


@dataclass(frozen=True)
class Point:
    """A projected step."""

    ranks: int
    step: float  # seconds
    efficiency: float  # the efficiency of scaling. It is the compute fraction if computation takes no longer


def project(
    mode: str,
    compute: float,
    size: float,
    link: NetworkLink,
    hidden: float = 0.0,
    buckets: int = 1,
    ranks: Sequence[int] = RANKS,
) -> list[Point]:
    """Return the projected steps of a run whose step computes for `compute` seconds on one rank.

    mode     "weak": each rank computes as long as the one; "strong": the ranks divide its work
    size     bytes of gradients
    hidden   share of the communication that computation hides, as measured; it hides no more than the backward lasts
    """
    found = []
    for count in ranks:
        work = compute / count if mode == "strong" else compute
        communication = all_reduce_seconds(link, count, size, buckets)

        # About two thirds of the computation is the backward, in which buckets can be reduced.
        exposed = max(communication * (1 - hidden), communication - work * 2 / 3)
        step = work + exposed
        found.append(Point(count, step, work / step))

    return found


COLUMNS = [
    Column("what", "scaling"),
    Column("ranks", "ranks"),
    Column("step_ms", "projected step", "ms"),
    Column("efficiency", "projected efficiency"),
    Column("measured", "measured efficiency"),
    Column("error", "projected / measured - 1"),
]

NOTE = (
    "A projection, not a measurement: computation as measured on one rank, a ring all-reduce with the latency and the "
    "bandwidth of the fit to the measured all-reduces, and the measured share of communication hidden. It knows no "
    "slower links between machines, no stragglers, no cores that slow each other down, and no loading of data. Rows "
    "with a measured efficiency show how far the projection is off where it can be checked."
)


def section_of(result: Result) -> Section | None:
    """Return the projection of a result that has weak or strong scaling and the fits of `comm`; None without them."""
    by_name = {section.name: section for section in result.sections}
    modes = [mode for mode in ("weak", "strong") if mode in by_name]
    if "comm" not in by_name or not modes:
        return None

    # Each kind of scaling by itself: one may be projected where the other cannot.
    links = by_name["comm"].extra.get("links", {})
    rows: list[dict[str, Any]] = []
    notes = [NOTE]
    for mode in modes:
        if refusal := _refusal(by_name[mode], links):
            notes.append(f"There is no projection of {mode} scaling: {refusal}.")
        else:
            rows += _project_section(mode, by_name[mode], links)

    # The plot shows the measurement beside it.
    projected = dict.fromkeys(row["what"] for row in rows)
    measured = {mode: by_name[mode].rows for mode in projected}

    # A measurement that was no fair test makes no fair projection.
    refusals = [by_name[name].extra.get("refusal", "") for name in (*modes, "comm")]
    extra = {"measured": measured, "refusal": next(filter(None, refusals), "")}
    return Section("projection", "Projection to more ranks", COLUMNS, rows, notes, extra=extra)


def _refusal(section: Section, links: dict[str, Any]) -> str:
    """Return why the model does not hold for a section, or nothing."""
    facts = section.extra["facts"]
    if section.rows[-1]["world"] == 1:
        return "only one rank was measured, which exchanges nothing"
    if facts["backend"] not in links:
        return f"the all-reduce of {facts['backend']} was not measured"
    if section.rows[0]["world"] != 1:
        return "one rank was not measured"
    if not STRATEGIES[facts["strategy"]].only_reduces_gradients:
        return f"strategy {facts['strategy']} communicates more than one all-reduce of the gradients"
    return ""


def _project_section(mode: str, section: Section, links: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of one kind of scaling: the ranks of RANKS, and the measured ones for comparison."""
    facts = section.extra["facts"]
    first, last = section.rows[0], section.rows[-1]
    measured = {row["world"]: row["scaling_efficiency"]["median"] for row in section.rows}

    # A rank of strong scaling has at least one sample.
    most = first["global_batch"] if mode == "strong" else max(RANKS)
    ranks = {count for count in RANKS if count <= most}
    ranks |= {world for world in measured if world > 1}

    # Computation as one rank had it, and the overlap and the buckets of the most ranks that were measured.
    points = project(
        mode,
        compute=first["step_ms"]["median"] / 1e3,
        size=facts["gradient_bytes"],
        link=NetworkLink(**links[facts["backend"]]),
        hidden=last["overlap_fraction"],
        buckets=max(1, round(last.get("collectives", 1))),
        ranks=sorted(ranks),
    )
    return [
        {
            "what": mode,
            "ranks": point.ranks,
            "step_ms": 1e3 * point.step,
            "efficiency": point.efficiency,
            "measured": measured.get(point.ranks),
            "error": point.efficiency / measured[point.ranks] - 1 if point.ranks in measured else None,
        }
        for point in points
    ]
