"""The check before the first step. An early mistake would also cause later ones, so this order matters:

    data       the dataset has the same length and the same samples on every rank
    one call   the loss changes no state, leaves no gradient, and draws from torch's generator only
    twice      the same samples, seeds and weights give the same loss
    halves     totals, weights and gradients of two half-batches add up to those of the whole batch; a metric that does
               not is only warned of
    ranks      every rank gets the same loss for the same samples

With several ranks the check is collective and raises the same error on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from lockstep.causes import Cause, named
from lockstep.config import RunConfig
from lockstep.data.loader import BatchRequest
from lockstep.data.map_source import MapSource
from lockstep.data.streams.epochs import EpochSource
from lockstep.errors import UserError
from lockstep.parallel.calls.chain import run_eagerly
from lockstep.parallel.micro_batches import MicroBatchDriver
from lockstep.parallel.sharded import RanksDiffer
from lockstep.runtime.seeds import preserve_rng, rng_states, used_generators
from lockstep.start_check import data
from lockstep.start_check.alone import as_one_rank
from lockstep.start_check.checked_run import CheckedRun
from lockstep.start_check.mistakes import (
    Measurement,
    Tolerance,
    judge_changes,
    judge_halves,
    judge_ranks,
    judge_repetition,
    metrics_like_means,
    mismatched_gradients,
    same_loss,
    same_metrics,
)
from lockstep.start_check.probe import Inconclusive, Probe, without_batch_statistics
from lockstep.start_check.samples import Samples, read_samples, read_stream_samples
from lockstep.start_check.snapshot import CheckSnapshot

# The check uses a quarter of a micro-batch, because it makes several calls: one half twice, the whole batch, and two
# pairs of halves. Below MIN_SAMPLES a half would be a single sample, for which many losses behave differently.
MIN_SAMPLES, MAX_SAMPLES = 4, 32

# With one of these causes, a batch and its halves cannot be compared.
NOT_REPEATABLE = ("randomness", "nondeterminism", "carried-state")

# checks.loss cannot accept these: they are never intended.
NEVER_ACCEPTED = ("data", "augmentation", "left-gradient")


def find_cause(run: CheckedRun, task: Any) -> Cause | None:
    """Return the mistake that was found in the loss or its data, or None. Collective.

    `task` is None in a custom loop. Its loss cannot be called from here, so only the data is compared.
    """
    source = run.source
    alone = run.runtime.world.alone
    if run.config.checks.loss == "off" or (task is None and alone):
        return None

    if not isinstance(source, MapSource | EpochSource):
        run.note(f"a {type(source).__name__} makes its own batches")
        return None

    run.runtime.heartbeat.beat("build")
    with preserve_rng(run.runtime.device):
        # Never more than a micro-batch: with micro_batch=1 the loss may not support two samples.
        micro_batch = run.micro_batch_size
        count = min(micro_batch, max(MIN_SAMPLES, micro_batch // 4), MAX_SAMPLES)

        samples = None

        # All ranks must see the same dataset.
        if isinstance(source, MapSource):
            # Workers start before the first sample is read here: a dataset may open files for it, which a fork would
            # share.
            source.start_workers()
            request = BatchRequest(*source.step_order.next_ids(count))
            samples = read_samples(source, request)

            cause = None if alone else data.find_difference(run, source, request, samples)
            if cause:
                return cause

        # The rest calls the loss.
        if task is None or not _can_call(run):
            return None

        if isinstance(source, EpochSource):
            samples = read_stream_samples(source, count)

        # One rank alone may fail to read its samples, and forwards may be collective: either all ranks go on or none.
        reasons = run.runtime.collectives.all_gather_json(_reason_to_skip(samples))
        if any(reasons):
            run.note(next(filter(None, reasons)))
            return None

        cause, measured, reason = _measure_and_judge(run, task, samples)

        # Ranks read different samples of a stream, so their losses cannot be compared.
        if isinstance(source, EpochSource):
            measured = None

    return _combine_ranks(run, cause, measured, reason)


def error_for(cause: Cause, config: RunConfig) -> UserError:
    """Return the error that stops the run, with the setting that accepts this cause."""
    if cause.key in NEVER_ACCEPTED:
        return UserError(cause.title, cause.evidence, cause.fix, cause.key)

    accepted = [*accepted_causes(config), cause.key]

    value = accepted[0] if len(accepted) == 1 else f"[{','.join(accepted)}]"
    fix = f"{cause.fix}. If you mean it, set checks.loss={value}"
    return UserError(cause.title, cause.evidence, fix, cause.key)


def accepted_causes(config: RunConfig) -> list[str]:
    """Return the causes that checks.loss accepts."""
    value = config.checks.loss

    keys = value if isinstance(value, list) else [value]
    return [key for key in keys if key not in ("all", "off")]


def _can_call(run: CheckedRun) -> bool:
    """Return whether the check can call the loss. If it cannot, log the reason."""
    if not run.driver.role.runs_whole_model:
        run.note("no rank holds the full model (mesh.pp); `lockstep verify` on one process does")
        return False

    if run.prepares_batches:
        run.note("it depends on before_batch(), which prepares for a whole micro-batch")
        return False

    return True


# ---- the loss ----


def _reason_to_skip(samples: Samples | None) -> str:
    """Return why the loss cannot be checked on these samples, or "" if it can."""
    if samples is None:
        return "a sample cannot be read"

    if samples.is_collated and not samples.can_be_split:
        return "the batches of the stream cannot be split into samples"

    return ""


def _measure_and_judge(
    run: CheckedRun, task: Any, samples: Samples | None
) -> tuple[Cause | None, Measurement | None, str]:
    """Return the cause that this rank found, its first measurement, and why the check was inconclusive.

    The reason is "" if it was conclusive, or if the first step will raise an error with it.
    """
    reason = _reason_to_skip(samples)
    if reason:
        return None, None, reason

    assert samples is not None
    probe = Probe(run, run.around_loss(task.loss))
    driver, model = run.driver, run.driver.model
    assert isinstance(driver, MicroBatchDriver), "_can_call has refused a pipeline"

    accepted = accepted_causes(run.config)
    snapshot = CheckSnapshot(model, task, run.optimizers, copies_parameters="changed-in-forward" in accepted)
    cause, measured, reason = None, None, ""

    try:
        # `many_forwards` ends the forwards of all ranks if one of them fails.
        with (
            run_eagerly(model),
            without_batch_statistics(model),
            driver.many_forwards(),
            run.whole_batches(),
        ):
            cause, measured = _judge(run, probe, snapshot, samples, tuple(getattr(task, "changing_buffers", ())))
    except Inconclusive as error:
        reason = "" if error.recurs else str(error)
    except RanksDiffer as error:
        reason = str(error)
    finally:
        snapshot.restore()

    return cause, measured, reason


def _judge(
    run: CheckedRun, probe: Probe, snapshot: CheckSnapshot, samples: Samples, changing_buffers: tuple[str, ...]
) -> tuple[Cause | None, Measurement]:
    """Return the first cause that checks.loss does not accept, if any, and the first measurement."""
    accepted = accepted_causes(run.config)
    device = run.runtime.device
    tolerance = Tolerance.of(run.precision.eps(probe.parameters[0].dtype))

    # Call the loss and see what it changed. Then repeat the call, which must give the same loss.
    positions = samples.half if samples.can_be_split else None
    probe.seed()
    states, seed = rng_states(device), torch.initial_seed()

    first = _measure_first(run, probe, lambda: samples.batch(positions))

    # What did the call draw, seed and change?
    draws = used_generators(states, rng_states(device))
    seeded_by_loss = torch.initial_seed() != seed
    changes = snapshot.changes()

    again, rank_cause = _measure_again(run, probe, lambda: samples.batch(positions), first, tolerance)

    # If the forward changes buffers that the task declares in `changing_buffers`, a repetition may give another loss,
    # and attributes that are derived from the model may change too.
    changes_model = bool(changes.model)
    changes.model = [name for name in changes.model if name not in changing_buffers]

    # A buffer that has settled is no moving average, and attributes derived from the model may change with it.
    averages = []

    for name in changes.averages:
        follows_model = changes_model and name.startswith("model.")
        if not snapshot.settled(name) and not follows_model:
            averages.append(name)

    changes.averages = averages

    # `exact` seeds Python's and NumPy's generators as well.
    host_draws = draws & {"numpy", "random"}
    cause = judge_changes(changes, set() if run.config.exact else host_draws, probe.inner)

    if not cause and not changes_model:
        cause = judge_repetition(first, again, changes, tolerance) or rank_cause

    if not cause and seeded_by_loss:
        cause = named("randomness", "the loss seeds torch's generator itself, so that every micro-batch draws the same")

    if cause and cause.key not in accepted:
        return cause, first

    snapshot.restore()

    # Without a repeatable loss, or a second sample, there is nothing to compare.
    if samples.count < 2 or (cause and cause.key in NOT_REPEATABLE) or host_draws:
        return None, first

    cause, like_means = _check_halves(run, probe, snapshot, samples, tolerance)

    # A loss that does not add up explains metrics that do not. One that changes from call to call cannot be judged.
    for name in sorted(same_metrics(first, again, tolerance) & like_means.keys()) if cause is None else ():
        run.warn(
            f"the metric {name!r} looks like a mean ({like_means[name]}), and would be divided by the weight again: "
            "give the sum, values.sum(), or a pair (sum, weight)"
        )

    if cause and cause.key in accepted:
        cause = None

    return cause, first


def _measure_first(run: CheckedRun, probe: Probe, make_batch: Callable[[], Any]) -> Measurement:
    """Call the loss. If it fails on one rank, raise on all: the others would wait for it in `_measure_again`."""
    if run.runtime.world.alone or not run.driver.role.replicated:
        return probe.measure(make_batch, gradients=False)

    measured, own = None, None
    try:
        measured = probe.measure(make_batch, gradients=False)
    except Inconclusive as error:
        own = error

    # If one rank cannot measure, no rank does.
    reasons = run.runtime.collectives.all_gather_json(str(own) if own else "")
    if own or any(reasons):
        raise own or Inconclusive(next(filter(None, reasons)))

    assert measured is not None
    return measured


def _measure_again(
    run: CheckedRun, probe: Probe, make_batch: Callable[[], Any], first: Measurement, tolerance: Tolerance
) -> tuple[Measurement, Cause | None]:
    """Repeat a call. Return the measurement, and a cause if the loss depends on the number of ranks.

    The call is repeated as if there were a single rank, and once more as it was if the loss then differs.
    """
    if run.runtime.world.alone or not run.driver.role.replicated:
        return probe.measure(make_batch, gradients=False), None

    # A loss that gathers from other ranks may fail on a single rank. All ranks do this together, so none of them waits.
    with as_one_rank():
        try:
            alone: Measurement | None = probe.measure(make_batch, gradients=False)
        except Inconclusive:
            alone = None

    differs = alone is None or not same_loss(first, alone, tolerance)

    # The next call reaches other ranks if the loss does: either all ranks make it or none does.
    if not run.runtime.collectives.any(differs) and alone is not None:
        return alone, None

    again = probe.measure(make_batch, gradients=False)
    if alone is None or not differs:
        return again, None

    return again, judge_ranks(first, alone, again, run.runtime.world.size, tolerance)


def _check_halves(
    run: CheckedRun, probe: Probe, snapshot: CheckSnapshot, samples: Samples, tolerance: Tolerance
) -> tuple[Cause | None, dict[str, str]]:
    """Compare the loss of the samples with the sum of the losses of their halves.

    Return the cause if they differ, else None, and the metrics that look like means.
    """
    if not samples.can_be_split:
        raise Inconclusive("the dataset makes batches that cannot be split into samples")

    # Every measurement starts from the same state.
    def measure(positions: list[int], gradients: bool) -> Measurement:
        try:
            return probe.measure_with_constant_draws(lambda: samples.batch(positions), gradients)
        finally:
            snapshot.restore()

    # First split by length, short samples against long ones, because equal halves would hide a wrong weight. Then take
    # every other sample: a loss that selects samples (the hardest half) may by chance agree with the first split.
    ordered = samples.by_size()

    middle = len(ordered) // 2
    whole = measure(ordered, gradients=True)
    splits = [(ordered[:middle], ordered[middle:]), (ordered[::2], ordered[1::2])]
    like_means: list[dict[str, str]] = []  # of each split

    for number, (one, other) in enumerate(splits if len(ordered) > 2 else splits[:1]):
        # Gradients are compared for the first split only.
        with_gradients = number == 0
        halves = [measure(one, with_gradients), measure(other, with_gradients)]
        mismatched = mismatched_gradients(whole, halves, probe.names, tolerance, run.driver.norms)

        def measure_doubled(with_rest: bool, one: list[int] = one, other: list[int] = other) -> Measurement:
            return measure(one * 2 + (other if with_rest else []), gradients=False)

        cause = judge_halves(whole, halves, measure_doubled, mismatched, tolerance)
        if cause:
            return cause, {}

        like_means.append(metrics_like_means(whole, halves, tolerance))

    # A metric that looks like a mean in one split only may do so by chance.
    return None, {name: text for name, text in like_means[0].items() if all(name in names for names in like_means)}


# ---- all ranks together ----


def _combine_ranks(run: CheckedRun, cause: Cause | None, measured: Measurement | None, reason: str) -> Cause | None:
    """Return one cause for all ranks. Collective: every rank must call it."""
    local = [cause and [cause.key, cause.evidence], measured and [measured.total, measured.weight], reason]

    gathered = run.runtime.collectives.all_gather_json(local)

    # Causes with the ranks that found them, and their keys.
    causes = [(rank, *found) for rank, (found, _, _) in enumerate(gathered) if found]
    keys = {key for _, key, _ in causes}

    # If the ranks disagree about the cause, different losses for the same samples may explain it.
    if not (len(causes) == len(gathered) and len(keys) == 1):
        # None for a rank that could not measure.
        pairs = [pair for _, pair, _ in gathered]
        difference = _ranks_differ(run, pairs)
        if difference and difference.key not in accepted_causes(run.config):
            return difference

    if causes:
        rank, key, evidence = causes[0]
        return named(key, evidence if run.runtime.world.alone else f"rank {rank}: {evidence}")

    reasons = [why for _, _, why in gathered if why]
    if reasons:
        run.note(reasons[0])

    return None


def _ranks_differ(run: CheckedRun, pairs: list[list[float] | None]) -> Cause | None:
    """Return a cause if ranks got a different (total, weight) for the same samples."""
    tolerance = Tolerance.of(run.precision.eps(next(run.driver.model.parameters()).dtype))
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
