"""Checks of what other nodes send: whether a node may join, and whether its messages can be right."""

from __future__ import annotations

from typing import Any

from lockstep.launch.decisions.attempt import Attempt
from lockstep.launch.job import PROGRAM, Job
from lockstep.launch.wire.messages import Hello, Message, Refused, SettingsRead, SignalReceived, ToCoordinator

# How many ranks a node may announce at most.
MAX_RANKS = 4096


def refusal_of(hello: Hello, job: Job, full: bool, dismissed: bool = False) -> Refused | None:
    """Return why a node may not join the job, or None if it may.

    `full`: the job has all its nodes. `dismissed`: nodes of this host were dismissed, and no more are admitted.
    """
    join = f"--join {job.join}"
    same = "run the same command on every node"
    nproc = hello.nproc

    different = difference(hello, job.identity)
    if different:
        return Refused(f"{join}: the commands of two nodes differ", different, same)

    different = different_program(hello, job.identity)
    if different:
        fix = "install the same versions and copy the same files to every node, then run the same command there"
        return Refused(f"{join}: two nodes would run different programs", different, fix)

    if full:
        found = f"the job has its {job.nnodes.most} nodes already"
        return Refused(f"{join}: no more nodes can join", found, "start the job with a larger --nnodes")

    if dismissed:
        found = "it could not import the program or set up its ranks; events.jsonl of the run says why"
        return Refused(
            f"{join}: nodes on {hello.host} were dismissed, and no other may join from there within an hour",
            found,
            "mend that before you start it again",
        )

    if not 1 <= nproc.least <= nproc.initial <= nproc.most <= MAX_RANKS:
        return Refused(f"{join}: a node cannot run {nproc} ranks, beginning with {nproc.initial}", "", same)

    return None


def difference(theirs: Hello, ours: dict[str, Any]) -> str | None:
    """Return which parts of two nodes' commands differ, or None if they agree."""
    return _different_values({**theirs.identity, PROGRAM: None}, {**ours, PROGRAM: None})


def different_program(theirs: Hello, ours: dict[str, Any]) -> str | None:
    """Return which versions and which files of two nodes differ, or None if they agree."""
    programs = theirs.identity.get(PROGRAM), ours.get(PROGRAM)
    valid = [program if isinstance(program, dict) else {} for program in programs]
    return _different_values(*valid)


def _different_values(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """Return all keys whose values differ, with both values, as text; None if there are none."""
    parts = []

    # A key that only one of them has differs from None.
    for key in sorted(theirs.keys() | ours.keys()):
        they, we = theirs.get(key), ours.get(key)
        if they != we:
            parts.append(f"{key}: {they!r} here, {we!r} on the coordinating node")

    return "; ".join(parts) or None


def problem_with(message: Message, node: int, attempt: Attempt | None) -> str | None:
    """Return why this message of a node cannot be right, or None. `attempt` is the current one, if there is one."""
    if not isinstance(message, ToCoordinator):
        return f"{type(message).__name__} is not for the coordinator"

    problem = message.why_invalid()
    if problem:
        return problem

    # A signal and the settings are about no attempt, and a message about an earlier one is ignored anyway.
    if attempt is None or isinstance(message, SignalReceived | SettingsRead) or message.attempt != attempt.number:
        return None

    strange = set(message.ranks) - set(attempt.ranks_on(node))
    return f"ranks {sorted(strange)} are not its ranks" if strange else None
