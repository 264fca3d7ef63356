"""Whether a message of another node can be right. No later code checks it again."""

from __future__ import annotations

from collections.abc import Collection

from lockstep.launch.decisions.attempt import Attempt
from lockstep.launch.decisions.settings import Settings
from lockstep.launch.wire.messages import Message, NodeBeat, RankExited, RanksGone, SignalReceived, Stacks, ZygoteLost
from lockstep.runtime.preemption import PREEMPT_SIGNALS


def problem_with(message: Message, node: int, attempt: Attempt) -> str | None:
    """Return why this message of a node cannot be right, or None. `attempt` is the current one."""
    ranks: Collection[int] = ()
    match message:
        case RanksGone() | ZygoteLost():
            pass
        case SignalReceived():
            if message.signal not in [number.name for number in PREEMPT_SIGNALS]:
                return f"{message.signal} is no signal that preempts a job"
        case RankExited():
            ranks = [message.rank]
            if message.exit.failure is None and not message.exit.clean:
                return f"rank {message.rank} failed without a failure"
        case Stacks():
            ranks = message.stacks.keys() | message.collectives.keys()
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
    return f"ranks {sorted(strange)} are not its ranks" if strange and of_this_attempt else None
