"""The check before the first step, in the order in which a mistake explains those after it:

    data       the dataset has the same length and the same samples on every rank
    one call   the loss changes nothing and leaves no gradient; it draws from torch's generator only
    twice      the same samples, seeds and weights give the same loss
    halves     totals, weights and gradients of two halves add up to those of the whole
    ranks      every rank gets the same loss for the same samples

Where several ranks train, the check is collective and raises the same error on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lockstep.causes import Cause, in_own_loop, named
from lockstep.config import RunConfig
from lockstep.data.sources import MapSource
from lockstep.data.streams import StreamSource
from lockstep.engine.start_check import data
from lockstep.engine.start_check.alone import told_alone
from lockstep.engine.start_check.judge import (
    Measured,
    Tolerance,
    add_up,
    of_changes,
    of_halves,
    of_ranks,
    of_repetition,
    same,
)
from lockstep.engine.start_check.kept_state import KeptState
from lockstep.engine.start_check.probe import CannotSay, Probe, has_statistics, without_batch_statistics
from lockstep.engine.start_check.random_numbers import drawn, generator_states, generators_kept
from lockstep.engine.start_check.samples import Samples, first_of_stream, read
from lockstep.errors import UserError
from lockstep.parallel.call_chain import run_eagerly
from lockstep.parallel.driver import RanksDiffer
from lockstep.precision import Precision
from lockstep.task import Task

if TYPE_CHECKING:
    from lockstep.engine.run import Run  # which calls this check

# Samples that the loss is called with: a quarter of a micro-batch, since one half is called twice, then the whole, and
# two pairs of halves. With fewer than FEWEST, halves would have one sample, and many losses mean something else there.
FEWEST, MOST = 4, 32

# Once one of these is found, a batch and its halves cannot be compared.
NOT_REPEATABLE = ("randomness", "nondeterminism", "carried-state")

# These cannot be meant: other data on every rank, and gradients besides those of the step, which drivers refuse.
NEVER_MEANT = ("data", "augmentation", "left-gradient")


def find(run: Run, task: Any) -> Cause | None:
    """Return what is wrong with the loss or its data, or None. Collective.

    `task` is None for a custom loop, whose loss cannot be called: then only the data is compared.
    """
    source = run.source
    alone = run.runtime.world.alone
    if run.config.checks.loss == "off" or (task is None and alone):
        return None
    if not isinstance(source, MapSource | StreamSource):
        _note(run, f"only a {type(source).__name__} knows how its batches are made")
        return None

    run.runtime.heartbeat.beat("build")
    with generators_kept(run.runtime.device):
        # Never more than a micro-batch: with micro_batch=1 a loss need not be able to take two samples.
        most = run.plan.micro_batch
        most = min(most, max(FEWEST, most // 4), MOST)
        samples = None
        if isinstance(source, MapSource):
            source.start_workers()
            request = source.next_request(most)
            samples = read(source, request)
            if not alone and (cause := data.differs(run, source, request, samples)):
                return cause
        if task is None or not _can_call(run, task):
            return None
        if isinstance(source, StreamSource):
            samples = first_of_stream(source, most)

            # Every rank has samples of its own, and forwards may be collective: all ranks try, or none does.
            reasons = run.runtime.collectives.gather_json(_why_not(samples))
            if any(reasons):
                _note(run, next(filter(None, reasons)))
                return None

        cause, measured, reason = _of_loss(run, task, samples)
        # Every rank has samples of its own from a stream.
        if isinstance(source, StreamSource):
            measured = None
    return _agreed(run, cause, measured, reason)


def keep_for_own_loop(run: Run) -> KeptState | None:
    """Note the state before the first forward of a custom loop; None if there is nothing to check."""
    if run.config.checks.loss == "off" or run.stepper.counters.step > 0:
        return None
    return KeptState(run.driver.model, None, (), copies_parameters=False)


def check_own_loop(run: Run, kept: KeptState) -> None:
    """Refuse a forward of a custom loop that changed more than it may. It is called before its backward."""
    changes = kept.changes()
    statistics = [name for name, module in run.driver.model.named_modules() if has_statistics(module)]
    changes.model = [name for name in changes.model if name.rpartition(".")[0] not in statistics]
    changes.averages = []

    cause = of_changes(changes, set())
    if cause and cause.key not in accepted_causes(run.config):
        raise refuse(in_own_loop(cause), run.config)


def refuse(cause: Cause, config: RunConfig) -> UserError:
    """Return the error that stops the run."""
    if cause.key in NEVER_MEANT:
        return UserError(cause.title, cause.evidence, cause.fix)
    accepted = [*accepted_causes(config), cause.key]
    typed = accepted[0] if len(accepted) == 1 else f"[{','.join(accepted)}]"
    return UserError(cause.title, cause.evidence, f"{cause.fix}. If you mean it, type checks.loss={typed}")


def accepted_causes(config: RunConfig) -> list[str]:
    """Return the causes that the user means: those that checks.loss names."""
    value = config.checks.loss
    named_ones = value if isinstance(value, list) else [value]
    return [one for one in named_ones if one not in ("all", "off")]


def _note(run: Run, reason: str) -> None:
    run.recorder.event("note", reason=f"the loss is not checked before the first step: {reason}")


def _can_call(run: Run, task: Any) -> bool:
    """Return whether the loss may be called here; if not, say why not."""
    if not run.driver.role.runs_whole_model:
        _note(run, "no rank holds the full model (mesh.pp); `lockstep verify` on one process does")
        return False
    prepares = getattr(task, "before_batch", None)
    if prepares is not None and getattr(prepares, "__func__", prepares) is not Task.before_batch:
        _note(run, "it needs what before_batch() prepares for a micro-batch")
        return False
    return True


# ---- the loss ----


def _why_not(samples: Samples | None) -> str:
    """Return why these samples say nothing about the loss; "" if they do."""
    if samples is None:
        return "a sample cannot be read"
    if samples.finished and not samples.can_be_split:
        return "the batches of the stream cannot be taken apart into samples"
    return ""


def _of_loss(run: Run, task: Any, samples: Samples | None) -> tuple[Cause | None, Measured | None, str]:
    """Return the cause that this rank found, what it measured, and why it could not judge, if so."""
    if reason := _why_not(samples):
        return None, None, reason
    assert samples is not None
    probe = Probe(run, task.loss)
    model = run.driver.model
    optimizers = run.model_setup.optimizers.all
    accepted = accepted_causes(run.config)
    kept = KeptState(model, task, optimizers, copies_parameters="changed-in-forward" in accepted)
    cause, measured, reason = None, None, ""
    try:
        # An error on one rank ends the forwards of all: see `many_forwards`.
        with run_eagerly(model), without_batch_statistics(model), run.driver.many_forwards():
            cause, measured = _judge(run, probe, kept, samples, tuple(getattr(task, "changing_buffers", ())))
    except (CannotSay, RanksDiffer) as error:
        reason = str(error)  # with a cause that this rank found, if the others went on
    finally:
        kept.restore()
    return cause, measured, reason


def _judge(
    run: Run, probe: Probe, kept: KeptState, samples: Samples, changing: tuple[str, ...]
) -> tuple[Cause | None, Measured]:
    accepted = accepted_causes(run.config)
    device = run.runtime.device
    tolerance = Tolerance.of(_eps(run.stepper.context.precision, probe.parameters[0].dtype))

    # One call, and what it leaves behind; then the same call, which must give the same.
    positions = samples.half if samples.can_be_split else None
    probe.seed()
    states, seed = generator_states(device), torch.initial_seed()
    first = probe.measure(lambda: samples.batch(positions), gradients=False)
    draws = drawn(states, generator_states(device))
    seeded = torch.initial_seed() != seed
    changes = kept.changes()
    again, follows_ranks = _again(run, probe, lambda: samples.batch(positions), first, tolerance)

    # Where the forward changes the model, and the task says so, a repetition is another forward, and what follows from
    # the model changes as well.
    moves = bool(changes.model)
    changes.model = [name for name in changes.model if name not in changing]
    changes.averages = [
        name for name in changes.averages if not kept.settled(name) and not (moves and name.startswith("model."))
    ]
    found = of_changes(changes, set() if run.config.exact else draws & {"numpy", "random"}, probe.inner)
    if not found and not moves:
        found = of_repetition(first, again, changes, tolerance) or follows_ranks
    if not found and seeded:
        found = named("randomness", "the loss seeds torch's generator itself, so that every micro-batch draws the same")
    if found and found.key not in accepted:
        return found, first
    kept.restore()
    if samples.count < 2 or (found and found.key in NOT_REPEATABLE) or draws & {"numpy", "random"}:
        return None, first

    cause = _of_halves(run, probe, kept, samples, tolerance)
    return (None if cause and cause.key in accepted else cause), first


def _again(
    run: Run, probe: Probe, make_batch: Callable[[], Any], first: Measured, tolerance: Tolerance
) -> tuple[Measured, Cause | None]:
    """Repeat a call, telling the loss that it is alone: name one that follows the number of ranks."""
    if run.runtime.world.alone or not run.driver.role.replicated:
        return probe.measure(make_batch, gradients=False), None

    # A loss that gathers from the other ranks may fail when it is told that there are none. All are told so together.
    with told_alone():
        try:
            alone: Measured | None = probe.measure(make_batch, gradients=False)
        except CannotSay:
            alone = None
    if alone is not None and same(first, alone, tolerance):
        return alone, None
    again = probe.measure(make_batch, gradients=False)
    return again, of_ranks(first, alone, again, run.runtime.world.size, tolerance) if alone else None


def _of_halves(run: Run, probe: Probe, kept: KeptState, samples: Samples, tolerance: Tolerance) -> Cause | None:
    if not samples.can_be_split:
        raise CannotSay("the dataset makes batches that cannot be taken apart into samples")

    def measured(positions: list[int], gradients: bool) -> Measured:
        try:
            return probe.still(lambda: samples.batch(positions), gradients)
        finally:
            kept.restore()

    # Short samples in one half, long ones in the other: halves that are alike would hide a wrong weight. Then every
    # other sample: what is chosen from a batch (its hardest half) may by chance be the same in one pair of halves.
    ordered = samples.by_size()
    middle = len(ordered) // 2
    whole = measured(ordered, gradients=True)
    pairs = [(ordered[:middle], ordered[middle:]), (ordered[::2], ordered[1::2])]
    for number, (one, other) in enumerate(pairs if len(ordered) > 2 else pairs[:1]):
        with_gradients = number == 0
        halves = [measured(one, with_gradients), measured(other, with_gradients)]
        wrong = add_up(whole, halves, probe.names, tolerance, run.driver.norms)

        def doubled(with_rest: bool, one: list[int] = one, other: list[int] = other) -> Measured:
            return measured(one * 2 + (other if with_rest else []), gradients=False)

        if cause := of_halves(whole, halves, doubled, wrong, tolerance):
            return cause
    return None


def _eps(precision: Precision, stored: torch.dtype) -> float:
    """Return the relative rounding error of one operation in the format that the model is computed in."""
    if precision.name == "tf32":
        return 2.0**-10
    computed = precision.compute if precision.casts else stored
    return torch.finfo(computed).eps


# ---- all ranks together ----


def _agreed(run: Run, cause: Cause | None, measured: Measured | None, reason: str) -> Cause | None:
    """Return the cause that the ranks found; that they got different losses for the same samples, if not all did."""
    own = [cause and [cause.key, cause.evidence], measured and [measured.total, measured.weight], reason]
    gathered = run.runtime.collectives.gather_json(own)
    causes = [(rank, *found) for rank, (found, _, _) in enumerate(gathered) if found]
    keys = {key for _, key, _ in causes}

    # What not all ranks found may well be what tells them apart.
    if not (len(causes) == len(gathered) and len(keys) == 1):
        pairs = [pair for _, pair, _ in gathered]
        if (found := _ranks_differ(run, pairs)) and found.key not in accepted_causes(run.config):
            return found
    if causes:
        rank, key, evidence = causes[0]
        return named(key, evidence if run.runtime.world.alone else f"rank {rank}: {evidence}")

    reasons = [why for _, _, why in gathered if why]
    if reasons:
        _note(run, reasons[0])
    return None


def _ranks_differ(run: Run, pairs: list[list[float] | None]) -> Cause | None:
    """Compare (total, weight) of all ranks, for the same samples."""
    tolerance = Tolerance.of(_eps(run.stepper.context.precision, next(run.driver.model.parameters()).dtype))
    first = pairs[0]
    for rank, pair in enumerate(pairs):
        if first is None or pair is None or not all(map(math.isfinite, (*first, *pair))):
            return None
        if pair[1] != first[1] or not tolerance.same(pair[0], first[0], 1e-2 * first[1]):
            return named(
                "rank-in-loss",
                f"the same samples: total {first[0]:.5g}, weight {first[1]:.5g} on rank 0, and total {pair[0]:.5g}, "
                f"weight {pair[1]:.5g} on rank {rank}",
            )
    return None
