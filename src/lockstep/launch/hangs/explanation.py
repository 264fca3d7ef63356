"""The explanation of a hang: which rank the others wait for, where, and in which collective."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from lockstep.errors import listed_ranks, plural
from lockstep.launch.failure import Failure, LauncherFailure
from lockstep.launch.frames import Frame, describe, line_of
from lockstep.launch.hangs import flight_recorder
from lockstep.launch.hangs.flight_recorder import MAX_RANKS_NAMED
from lockstep.launch.hangs.stacks import group, main_thread, workers
from lockstep.launch.hangs.suspicion import RankView, Suspicion

# The letters of /proc/PID/stat.
STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "suspended", "Z": "dead", "": "gone"}

# What to do where the collectives differ: more time would not help.
ON_ALL_RANKS = (
    "do: make the same calls on all ranks, in the same order: run.evaluate, run.all_gather, and those of "
    "torch.distributed do not belong inside `if rank == 0`"
)


@dataclass(frozen=True)
class Evidence:
    """The stacks and collectives that were collected after a suspicion, and what follows from them."""

    stacks: dict[int, str] = field(default_factory=dict)  # by rank; "" for a rank that did not answer
    findings: flight_recorder.Findings = field(default_factory=flight_recorder.Findings)
    holders: list[int] = field(default_factory=list)  # ranks that most likely hold the GIL: see `gil_holders`
    ahead: list[int] = field(default_factory=list)  # ranks that entered too many collectives: see `ranks_ahead`

    @property
    def is_deadlock(self) -> bool:
        """Whether the collectives prove that no rank can advance: more time would not help."""
        return self.findings.deadlock or bool(self.ahead)


def gil_holders(stacks: dict[int, str], collectives: Collection[int]) -> list[int]:
    """Return the ranks that wrote a stack but not their collectives, if other ranks wrote both.

    Stacks are written by a signal handler in C, collectives by a Python thread. A rank that writes only its stack most
    likely holds the GIL in native code: whatever its phase is, it then does not wait for another rank.
    """
    answered = [rank for rank, text in stacks.items() if text]
    holders = [rank for rank in answered if rank not in collectives]

    return holders if len(holders) < len(answered) else []


def ranks_ahead(suspicion: Suspicion, findings: flight_recorder.Findings) -> list[int]:
    """Return the ranks that entered more collectives than the others in fewer steps.

    If one rank calls a collective that the others do not call, and its size fits, the others match it with their own
    next collective. Nothing fails, and the rank with the additional collective falls behind in steps.
    """
    entered = findings.entered
    steps = {rank: view.step for rank, view in suspicion.views.items()}
    if not entered or entered.keys() != steps.keys():
        return []

    # Compare with the ranks of the newest step: a rank of an older step has normally entered fewer collectives. In a
    # deadlock an equal number is suspicious already, because the ranks wait in different ones.
    newest = max(steps.values())
    fewest = min(entered[rank] for rank in steps if steps[rank] == newest)
    least = fewest if findings.deadlock else fewest + 1
    return [rank for rank in steps if steps[rank] < newest and entered[rank] >= least]


def explain(suspicion: Suspicion, evidence: Evidence) -> Failure:
    """Return a failure that names the rank that the others wait for, where they wait, and in which collective."""
    groups = group(evidence.stacks)
    awaited = evidence.ahead or _awaited(suspicion, evidence, groups)

    # If nothing tells the ranks apart, name the one that has stalled for longest.
    if awaited:
        named = suspicion.views[awaited[0]]
    else:
        named = max(suspicion.views.values(), key=lambda view: view.age)

    # The most telling lines come first.
    detail = _stacks_of(awaited, suspicion, evidence.stacks)
    for rank in evidence.holders[:MAX_RANKS_NAMED]:
        shown = f"rank {rank} shows its stack but not its collectives"
        detail.append(f"{shown}: most likely it holds Python's lock (the GIL) in native code")

    detail += _groups_of(groups, awaited, suspicion)
    detail += evidence.findings.lines
    if evidence.is_deadlock:
        detail.append(ON_ALL_RANKS)
    elif suspicion.remedy:
        detail.append(suspicion.remedy)

    # Ranks that took too long to save are a case of their own, whatever their collectives show.
    kind = LauncherFailure.DEADLOCK if evidence.is_deadlock else LauncherFailure.HANG
    if suspicion.kind == "grace exceeded":
        kind = LauncherFailure.GRACE_EXCEEDED

    who = _who_is_ahead(suspicion, evidence) or _who(suspicion, awaited)
    return Failure.by_launcher(
        kind,
        f"{suspicion.reason}; {who}",
        named.rank,
        named.host,
        traceback="\n".join(detail),
        step=named.step,
        phase=named.phase,
    )


def _awaited(suspicion: Suspicion, evidence: Evidence, groups: list[tuple[tuple[Frame, ...], list[int]]]) -> list[int]:
    """Return the ranks that the others wait for, by the best evidence available."""
    # If several ranks do not seem to wait, one that holds the GIL is the most certain.
    awaited = suspicion.awaited
    if awaited:
        holders = set(evidence.holders)
        return [rank for rank in awaited if rank in holders] or awaited

    # If the phases do not show it, the collectives may.
    if evidence.holders or evidence.findings.late:
        return evidence.holders or evidence.findings.late

    # If they do not either, the ranks with the rarest stack are named, if one stack is rarer than all others.
    ranks_of = [ranks for _, ranks in groups]
    if len(ranks_of) > 1 and len(ranks_of[0]) < len(ranks_of[1]):
        return ranks_of[0]

    return []


def _who_is_ahead(suspicion: Suspicion, evidence: Evidence) -> str:
    """Return text about the ranks that are ahead in collectives, with an example; "" if there are none."""
    ahead = evidence.ahead
    if not ahead:
        return ""

    entered = evidence.findings.entered
    behind = suspicion.views.keys() - ahead

    # The example is a rank in the newest step.
    others = max((suspicion.views[rank] for rank in sorted(behind)), key=lambda view: view.step)
    first = suspicion.views[ahead[0]]

    verb = "is" if len(ahead) == 1 else "are"
    counts = (
        f"{entered[first.rank]} collectives by step {first.step}, "
        f"rank {others.rank} {entered[others.rank]} by step {others.step}"
    )
    return f"{listed_ranks(ahead)} {verb} ahead: {counts}. Look for a collective that not every rank calls"


def _who(suspicion: Suspicion, awaited: list[int]) -> str:
    """Return text about the ranks that the others wait for."""
    if len(awaited) == 1:
        view = suspicion.views[awaited[0]]
        return f"the others are waiting for rank {view.rank} on {view.host} ({_describe(view)})"

    if not awaited:
        return f"cannot tell which rank is at fault, all are waiting: {_describe(next(iter(suspicion.views.values())))}"

    # Several ranks: those that the others wait for, or all, if each is busy with something of its own.
    head = "the others wait for these" if len(awaited) < len(suspicion.views) else "no rank is waiting for another"
    named = [suspicion.views[rank] for rank in awaited[:MAX_RANKS_NAMED]]
    parts = [f"rank {view.rank} on {view.host}, {_describe(view)}" for view in named]
    if len(awaited) > MAX_RANKS_NAMED:
        parts.append(f"{len(awaited) - MAX_RANKS_NAMED} more")

    return f"{head}: {'; '.join(parts)}"


def _describe(view: RankView) -> str:
    """`step 12, phase data, process sleeping`"""
    detail = f" ({view.detail})" if view.detail else ""
    return f"step {view.step}, phase {view.phase}{detail}, process {STATES.get(view.state, view.state)}"


def _stacks_of(awaited: list[int], suspicion: Suspicion, stacks: dict[int, str]) -> list[str]:
    """Return the stacks of the first ranks that the others wait for."""
    lines = []
    for rank in awaited[:MAX_RANKS_NAMED]:
        frames = main_thread(stacks.get(rank, ""))
        if frames:
            lines += describe(frames, f"rank {rank} is ")
            lines += _workers_of(rank, suspicion, stacks)
        elif suspicion.views[rank].state == "T":
            lines.append(f"rank {rank} is suspended and cannot show its stack; SIGCONT would let it continue")
        else:
            lines.append(f"rank {rank} did not show its stack")

    return lines


def _workers_of(rank: int, suspicion: Suspicion, stacks: dict[int, str]) -> list[str]:
    """Return where the worker processes of a rank are, if it waits for its data."""
    # The first batches are read in the phase "build".
    reads = any("/lockstep/data/" in frame.file for frame in main_thread(stacks[rank]))
    if suspicion.views[rank].phase != "data" and not reads:
        return []

    lines = []
    for pid, frames in workers(stacks[rank]).items():
        lines += describe(frames, f"worker {pid} is ")

    return lines


def _groups_of(
    groups: list[tuple[tuple[Frame, ...], list[int]]], awaited: list[int], suspicion: Suspicion
) -> list[str]:
    """Return a line for each place at which other ranks wait, the rarest place first."""
    lines = []
    named = set(awaited)

    for frames, at_frames in groups:
        ranks = [rank for rank in at_frames if rank not in named]
        if not ranks:
            continue

        phases = sorted({suspicion.views[rank].phase for rank in ranks})
        where = f"{line_of(frames)} ({listed_ranks(ranks)}), phase {', '.join(phases)}"
        lines.append(f"{plural(len(ranks), 'rank waits', 'ranks wait')} at: {where}")

    return lines
