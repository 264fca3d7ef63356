"""Checks messages of other nodes; no later code checks them again."""

from __future__ import annotations

from collections.abc import Collection

from lockstep.launch.decisions.attempt import Attempt
from lockstep.launch.decisions.settings import Settings
from lockstep.launch.job import Job
from lockstep.launch.wire.messages import (
    Hello,
    Message,
    NodeBeat,
    RankExited,
    RanksGone,
    Refused,
    SignalReceived,
    Stacks,
    ZygoteLost,
    difference,
    different_program,
)
from lockstep.runtime.preemption import PREEMPT_SIGNALS

# How many ranks a node may announce at most.
MAX_RANKS = 4096


def refusal_of(hello: Hello, job: Job, full: bool) -> Refused | None:
    """Return why a node may not join the job, or None if it may. `full`: the job has all its nodes."""
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

    if not 1 <= nproc.least <= nproc.initial <= nproc.most <= MAX_RANKS:
        return Refused(f"{join}: a node cannot run {nproc} ranks, beginning with {nproc.initial}", "", same)

    return None


def problem_with(message: Message, node: int, attempt: Attempt) -> str | None:
    """Return why this message of a node cannot be right, or None. `attempt` is the current one."""
    ranks: Collection[int] = ()
    match message:
        case RanksGone() | ZygoteLost():
            pass

        case SignalReceived():
            if message.signal not in [number.name for number in PREEMPT_SIGNALS]:
                return f"{message.signal} is not a signal that preempts a job"

        case RankExited():
            ranks = [message.rank]
            if message.exit.failure is None and not message.exit.clean:
                return f"rank {message.rank} failed without a failure"

        case Stacks():
            ranks = message.stack_of.keys() | message.collectives_of.keys()

        case NodeBeat():
            ranks = [view.rank for view in message.views]
            try:
                Settings(**message.settings)
            except (TypeError, ValueError) as error:
                return f"its settings are not valid: {error}"

        case _:
            return f"{type(message).__name__} is not for the coordinator"

    # A message about an earlier attempt is ignored anyway.
    strange = set(ranks) - set(attempt.ranks_on(node))
    of_this_attempt = getattr(message, "attempt", None) == attempt.number
    if strange and of_this_attempt:
        return f"ranks {sorted(strange)} are not its ranks"

    return None
