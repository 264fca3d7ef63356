"""Who is to blame: the micro-batches behind a skipped step, and the ranks behind a step in which ranks do not agree."""

from __future__ import annotations

import math

from lockstep.errors import OutOfStep, listed_ranks
from lockstep.parallel.progress import PassProgress
from lockstep.runtime.context import Runtime
from lockstep.runtime.control_word import step_mark
from lockstep.task import MicroBatch

REPORT_S = 2.0  # seconds to wait for other ranks to report that they are out of step
MAX_NAMED_IDS = 8  # a message names at most this many samples of a micro-batch


def blamed_micro_batches(progress: PassProgress, rank: int, is_spike: bool) -> list[str]:
    """Return one line for each micro-batch of this rank that may have caused the skip of a pass."""
    # The host waits for the losses here. Skipped steps are rare, so this is acceptable.
    pairs = [(micro, float(total)) for micro, (total, _) in zip(progress.micro_batches, progress.losses, strict=True)]

    # Every micro-batch contributes to a spike of the global mean: name the one with the largest loss.
    if is_spike:
        worst = sorted(pairs, key=lambda pair: pair[1], reverse=True)[:1]
    else:
        worst = [(micro, loss) for micro, loss in pairs if not math.isfinite(loss)]

    return [f"rank {rank}, micro-batch {micro.index}: loss {loss:.4g}{_name_samples(micro)}" for micro, loss in worst]


def _name_samples(micro: MicroBatch) -> str:
    """Return the ids of the first samples of a micro-batch as text, "" if it has none."""
    if len(micro.ids) == 0:
        return ""

    names = ", ".join(str(int(i)) for i in micro.ids[:MAX_NAMED_IDS])
    more = len(micro.ids) - MAX_NAMED_IDS
    rest = f" and {more} more" if more > 0 else ""
    return f", samples {names}{rest}"


def out_of_step(runtime: Runtime, step: int, marks: int) -> OutOfStep:
    """Return the error for ranks in different collectives, with the ranks that called the wrong one."""
    # Ranks that received another collective's tensor in place of gradients report in the store. The ranks that sent
    # it do not: they still wait in their own collective.
    reported = runtime.ranks_that_report(f"out-of-step/{step}", seconds=REPORT_S)
    odd = [rank for rank in range(runtime.world.size) if rank not in reported]
    if odd:
        who, whom = listed_ranks(odd), listed_ranks(reported)
    else:
        who, whom = "another rank", "this one"

    return OutOfStep(
        f"the ranks are out of step: {who} {'were' if len(odd) > 1 else 'was'} in a collective that {whom} never "
        f"called, and the tensor was taken for gradients of step {step + 1} (the marks of the step add up to "
        f"{marks}, not to {runtime.world.size * step_mark(step)}). Look in after_step, hooks, loss and data for a "
        "collective (all_reduce, barrier) that not every rank calls",
        odd,
    )
