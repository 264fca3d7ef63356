"""Finds the cause of a divergence in what the ranks recorded, and by one more cheap trial where two causes look alike.

The questions follow the order in which a mistake shows: data before losses, losses before gradients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lockstep.causes import Cause, named, of_failure
from lockstep.verify.compare import KINDS, Comparison, Divergence, compare
from lockstep.verify.record import Micro, TrialRecord
from lockstep.verify.trials import Trial, TrialMatrix

# Two sums of the same terms, added in another order, are equal if their relative error is no larger than this. The loss
# of a micro-batch is a sum of thousands of float32 terms; a mistake seldom changes it by less than a thousandth.
SAME = 1e-5


@dataclass
class TrialCache:
    """All trials that ran, and a way to run more. Records and comparisons are cached: several questions need them.

    A diagnosis asks one question after another, and some answers need further trials, in eval mode for example. A trial
    runs at most once.
    """

    matrix: TrialMatrix
    run: Callable[[list[Trial]], dict[Trial, TrialRecord]]
    records: dict[Trial, TrialRecord] = field(default_factory=dict)
    comparisons: dict[Trial, Comparison] = field(default_factory=dict)

    def need(self, trials: Sequence[Trial]) -> list[TrialRecord]:
        """Return the records of the trials. Trials that have not run yet run now, in parallel."""
        missing = [trial for trial in dict.fromkeys(trials) if trial not in self.records]
        if missing:
            self.records |= self.run(missing)

        return [self.records[trial] for trial in trials]

    def record(self, trial: Trial) -> TrialRecord:
        return self.need([trial])[0]

    def probe(self, trial: Trial) -> TrialRecord | None:
        """Return the record of a trial, or None if it failed: a probe that fails shows nothing."""
        record = self.record(trial)
        return None if record.failure or not record.steps else record

    @property
    def reference(self) -> TrialRecord:
        return self.records[self.matrix.reference]

    def compare(self, trial: Trial) -> Comparison:
        """Compare a trial with the reference, in training or in eval mode as the trial is."""
        if trial not in self.comparisons:
            measures = [
                replace(measure, eval_mode=trial.eval_mode) for measure in (self.matrix.reference, *self.matrix.nudged)
            ]
            record, reference, *nudged = self.need([trial, *measures])

            # In eval mode, buffers and extra state are not updated as in training.
            kinds = [kind for kind in KINDS if not trial.eval_mode or kind not in ("buffer", "state")]
            self.comparisons[trial] = compare(record, reference, nudged, kinds)

        return self.comparisons[trial]

    def itself(self) -> Comparison:
        """Compare the reference with its own repetition."""
        # On a CPU nothing may differ. Kernels of a GPU may add in any order, so they are allowed rounding errors.
        nudged = [] if self.reference.facts["device"] == "cpu" else self.need(self.matrix.nudged)
        return compare(self.record(self.matrix.again), self.reference, nudged)

    @property
    def repeatable(self) -> bool:
        """Whether repeating the reference gives the same; if not, no other trial can be judged by it."""
        return self.record(self.matrix.again).failure is not None or self.itself().first is None


def explain(trials: TrialCache, rows: list[Trial]) -> list[Cause]:
    """Return the causes of what is wrong in `rows`, in the order in which they were found. There may be none."""
    if cause := _differs_from_itself(trials):
        return [cause]

    # Several ranks first: a mistake in the ranks often shows in another split as well, but not the other way round.
    causes: dict[str, Cause] = {}
    ordered = sorted(rows, key=lambda trial: trial.world == 1)

    for trial in (trials.matrix.again, *trials.matrix.nudged, *ordered):
        failure = trials.record(trial).failure
        first = trials.compare(trial).first if trial in rows and not failure else None

        # A failure explains itself. A difference between splits counts only if no worse cause was found.
        if failure:
            cause = of_failure(failure.cause, failure.message, failure.for_user)
        elif first and trial.world > 1:
            cause = _of_world(trials, trial, first)
        elif first and causes.keys() <= {"buffer", "batchnorm"}:
            cause = _of_split(trials, trial, first)
        else:
            continue  # no divergence, or most likely a consequence of another cause

        causes.setdefault(cause.key, cause)  # each cause once, with its first evidence

    if cause := _untied(trials, rows):
        causes.setdefault(cause.key, cause)

    return list(causes.values())


# ---- the same trial, repeated ----


def _differs_from_itself(trials: TrialCache) -> Cause | None:
    """Look for training that is not repeatable, in which case no difference says anything about ranks or splits."""
    again = trials.record(trials.matrix.again)
    first = None if again.failure else trials.itself().first
    if first is None:
        return None

    # Samples that differ when they are read again come before any arithmetic.
    changed = _first_changed_sample(trials.reference, again)
    if changed is not None and changed.ids:
        return named(
            "augmentation", f"sample {changed.ids[0]} was read twice, and differed (1 process, nothing changed)"
        )

    return named("nondeterminism", f"1 process, run twice: {first.text}")


def _first_changed_sample(record: TrialRecord, reference: TrialRecord) -> Micro | None:
    """Return the first micro-batch that has the same ids as in the reference, but different contents."""
    # One of the two may have ended early.
    for step in range(min(record.steps, reference.steps)):
        for micro, other in _matched(record, reference, step):
            if micro.ids == other.ids and micro.rows != other.rows:
                return micro

    return None


def _matched(record: TrialRecord, reference: TrialRecord, step: int) -> list[tuple[Micro, Micro]]:
    """Pair the micro-batches of a step with the same micro-batches of the reference, where both have them."""
    expected = {micro.index: micro for micro in reference.micros[step]}
    return [(micro, expected[micro.index]) for micro in record.micros[step] if micro.index in expected]


# ---- several ranks, the same split ----


def _of_world(trials: TrialCache, trial: Trial, first: Divergence) -> Cause:
    """Return the cause of a difference between one rank and several."""
    comparison = trials.compare(trial)

    # Settings, weights or samples that differ explain everything that follows.
    for check in (_settings_differ, _ranks_differ, _data_differs):
        if cause := check(comparison.record, comparison.reference, first.step):
            return cause

    if trials.matrix.one_each and first.kind in ("loss weight", "loss", "gradient"):
        return _of_coupling(trials, trial, first)

    # Otherwise the kind of the first divergence decides.
    match first.kind:
        case "loss weight" | "loss":
            return _of_loss(trials, comparison, first.step)
        case "gradient":
            return _of_gradient(comparison, first)
        # BatchNorm is so common that it has its own cause and fix.
        case "buffer" if any(first.name.startswith(f"{n}.") for n in comparison.reference.facts["batchnorm"]):
            return _of_batchnorm(comparison, first.step)

    # Each of the other kinds has one usual cause.
    keys = {
        "metric": "metric",
        "state": "average",
        "buffer": "buffer",
        "parameter": "update",
        "number of steps": "rank-in-loss",
    }
    return named(keys.get(first.kind, "unknown"), first.text)


def _of_coupling(trials: TrialCache, trial: Trial, first: Divergence) -> Cause:
    """Return the cause of a difference where every rank has one micro-batch, which is smaller on more ranks."""
    if cause := _batchnorm_alone(trials, trial):
        return cause

    # If the losses agree, the rows were gathered in some way, but not their gradients.
    gathers = trials.reference.facts["gathers"] or first.kind == "gradient"
    if gathers:
        return named("gathered", f"{first.text} ({trial.text})")

    return named("batch-coupled", f"{first.text} ({trial.text}); micro_batch is not set, so it follows the ranks")


def _of_batchnorm(comparison: Comparison, step: int) -> Cause:
    """Return BatchNorm as the cause, with the buffers that differ."""
    names = [d.name for d in comparison.divergences if d.kind == "buffer" and d.step == step]
    statistics = [name for name in names if name.endswith(("running_mean", "running_var"))] or names
    return named(
        "batchnorm",
        f"losses, gradients and parameters of step {step + 1} agree, "
        f"{' and '.join(statistics[:2])} do not ({len(names)} buffers in all)",
    )


def _settings_differ(record: TrialRecord, reference: TrialRecord, step: int) -> Cause | None:
    """Look for a rank whose learning rate, momentum or decay differs from the reference.

    A difference after `step`, which diverged, would be a consequence and not the cause.
    """
    for number in range(min(step + 1, record.steps)):
        reference_groups = reference.ranks[0]["steps"][number]["settings"]

        # Every rank must have the same parameter groups, with the same settings, as one process has.
        for rank, rank_record in enumerate(record.ranks):
            for group, expected in zip(rank_record["steps"][number]["settings"], reference_groups, strict=False):
                for key in expected:
                    if group.get(key) != expected[key]:
                        return named(
                            "schedule",
                            f"{key} in step {number + 1}: {group.get(key)} on rank {rank} of {record.trial.world}, "
                            f"{expected[key]} on one process",
                        )

    return None


def _ranks_differ(record: TrialRecord, reference: TrialRecord, step: int) -> Cause | None:
    """Return the cause if replicas differ from each other, which they must not do at any time."""
    # Ranks that hold shards differ by design.
    if not record.facts["replicated"]:
        return None

    # Snapshot `step + 1` was taken after the step that diverged.
    # The first difference in time is the cause: later ones follow from it.
    for number in range(min(step + 2, record.steps + 1)):
        when = f"after step {number}" if number else "before the first step"
        for rank in range(record.trial.world):
            for name, digest in record.digests(number, rank).items():
                if digest != record.digests(number, 0)[name]:
                    return named("not-synchronised", f"{name} differs between rank 0 and rank {rank} {when}")

    return None


def _data_differs(record: TrialRecord, reference: TrialRecord, step: int) -> Cause | None:
    """Return the cause if ranks have other samples than one process."""
    world = record.trial.world

    expected_samples = reference.facts["samples"]
    for rank, rank_record in enumerate(record.ranks):
        samples = rank_record["facts"]["samples"]
        if samples != expected_samples:
            return named(
                "data", f"data() has {expected_samples} samples on one process, and {samples} on rank {rank} of {world}"
            )

    # The samples of a step are counted by their contents: it does not matter which rank has which.
    for number in range(min(step + 1, record.steps, reference.steps)):
        rows = _count_rows(record, number)
        expected = _count_rows(reference, number)
        if rows != expected:
            return _explain_rows(record, reference, number, rows, expected)

    return None


def _count_rows(record: TrialRecord, step: int) -> Counter[str]:
    return Counter(row for micro in record.micros[step] for row in micro.rows)


def _explain_rows(
    record: TrialRecord, reference: TrialRecord, step: int, rows: Counter[str], expected: Counter[str]
) -> Cause:
    """Return why a step has other samples than on one process; both are counted by their contents."""
    unexpected = rows - expected
    of_step = f"{unexpected.total()} of {rows.total()} samples of step {step + 1}"
    if any(row in expected for row in unexpected):
        return named("data", f"{of_step} came more than once")

    changed = _first_changed_sample(record, reference)
    if changed is None:
        return named("data", f"{of_step} differ from the samples of one process")

    # A sample that another id has elsewhere was not changed: this rank holds the samples in another order.
    world = record.trial.world
    # All contents of the reference, in any step.
    known = {row for number in range(len(reference.micros)) for row in _count_rows(reference, number)}
    if known & set(changed.rows):
        rank = f"rank {changed.rank} of {world}"
        return named("data", f"sample {changed.ids[0]} of data() is another one on {rank} than on one process")

    return named("augmentation", f"sample {changed.ids[0]} looks different on {world} ranks")


def _of_loss(trials: TrialCache, comparison: Comparison, step: int) -> Cause:
    """Find out why the same samples and the same weights give another loss."""
    record = comparison.record
    reference = comparison.reference

    differing = _differing_losses(record, reference, step)

    # Name the first micro-batch that differs, if micro-batches can be compared.
    rank = differing[0].rank if differing else 0
    where = f"micro-batch {differing[0].index} of step {step + 1}, on rank {rank}" if differing else f"step {step + 1}"
    only_training = f"{where}: equal with the model in eval mode, different in training"

    # First what the records themselves show, then what needs another run.
    ratios = _ratios(record, reference, step)
    factor = next(iter(ratios), 0.0)
    if factor and not _close(factor, 1.0) and all(_close(ratio, factor) for ratio in ratios):
        return named("rank-in-loss", f"every loss of step {step + 1} is {factor:.3g} times that of one process")

    if own := reference.drawn & {"numpy", "random"}:
        return named("randomness", f"loss() draws from the global generator of {' and '.join(sorted(own))}: {where}")

    # Torch's own generator is seeded per micro-batch, so drawing from it is not a mistake in itself.
    if reference.drawn and _equal_in_eval_mode(trials, record.trial, step):
        return named("randomness", only_training)

    # Does a process without other ranks get the same losses for that rank's samples?
    if step == 0 and differing and not reference.facts["stream"]:
        alone = trials.probe(replace(trials.matrix.reference, part=(rank, record.trial.world)))
        if alone and not _same_totals(alone, record):
            return named("rank-in-loss", f"{where}: other than in a single process that has the same samples")

        if rank and _equal_in_eval_mode(trials, record.trial, 0):
            return named("randomness", only_training)

    return _carried(trials, where)


def _equal_in_eval_mode(trials: TrialCache, trial: Trial, step: int) -> bool:
    """Return whether the losses of a step differ only because of what training adds: dropout, masks, noise."""
    record = trials.probe(replace(trial, eval_mode=True))
    reference = trials.probe(replace(trials.matrix.reference, eval_mode=True))

    # Either run may have ended before this step.
    if record is None or reference is None or step >= min(record.steps, reference.steps):
        return False

    return not _differing_losses(record, reference, step)


def _carried(trials: TrialCache, where: str) -> Cause:
    """Name what the process carries from one micro-batch to the next.

    This is the cause by elimination: the loss depends on neither the samples, nor the rank, nor a random generator.
    """
    reference = trials.reference
    before = reference.tensors("extra", 0)
    after = reference.tensors("extra", reference.steps)
    moving = [name for name, t in after.items() if name in before and not np.array_equal(before[name], t)]

    # A tensor of the shape of a weight is most likely an average of it.
    shapes = {t.shape for t in reference.tensors("parameters", 0).values() if t.ndim > 1}
    averages = [name for name in moving if after[name].shape in shapes]
    if averages:
        return named("average", f"{averages[0]} changes between micro-batches; {where}")

    names = f" ({', '.join(moving[:3])} changes)" if moving else ""
    return named("carried-state", f"{where}: it depends on what the process did before{names}")


def _differing_losses(record: TrialRecord, reference: TrialRecord, step: int) -> list[Micro]:
    return [
        a for a, b in _matched(record, reference, step) if not (_close(a.total, b.total) and _close(a.weight, b.weight))
    ]


def _same_totals(record: TrialRecord, reference: TrialRecord) -> bool:
    """Return whether every micro-batch of the first step has the same loss as in the reference."""
    return all(_close(a.total, b.total) for a, b in _matched(record, reference, 0))


def _ratios(record: TrialRecord, reference: TrialRecord, step: int) -> list[float]:
    """Return each loss of a step divided by the loss of the reference, where the latter is not 0."""
    return [a.total / b.total for a, b in _matched(record, reference, step) if b.total]


def _close(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= SAME * max(abs(a), abs(b))


def _of_gradient(comparison: Comparison, first: Divergence) -> Cause:
    """Tell hooks, and parameters that were left out of the all-reduce, from a mistake that all gradients share."""
    wrong = {d.name for d in comparison.divergences if d.kind == "gradient" and d.step == first.step}
    number = len(comparison.reference.tensors("gradients", first.step))

    # A hook changes the gradient of its own parameter, and nothing else in that step.
    if wrong <= set(comparison.reference.facts["hooked"]):
        return named("hook", f"{first.text}; only gradients with a hook of the model's are wrong, the losses are not")

    if len(wrong) < number:
        many = f"{len(wrong)} of {number}"
        return named("not-synchronised", f"{first.text}; {many} gradients are wrong, the losses are not")

    return named("gradient", first.text)


# ---- one process, another split ----


def _of_split(trials: TrialCache, trial: Trial, first: Divergence) -> Cause:
    """Return the cause of a difference between two splits of one rank's batch into micro-batches."""
    record = trials.compare(trial).record
    reference = trials.compare(trial).reference
    step = first.step
    evidence = f"{first.text} ({trial.text})"

    if first.kind == "metric":
        return named("metric", first.text)

    if cause := _settings_differ(record, reference, step):
        return cause

    # The same samples must have the same weight, however they are split.
    if not _close(record.weight(step), reference.weight(step)):
        return _of_weight(record, reference, step)

    # The weights agree and the sums do not. A probe shows why, except for a stream, which cannot be read twice.
    if first.kind == "loss" and not record.facts["stream"]:
        return _of_sum(trials, evidence)

    if first.kind == "loss":
        return _of_sum_of_stream(record, reference, step, evidence)

    # The losses agree, so the first thing after them that differs names the cause.
    keys = {
        "initial weights": "batch-coupled",
        "gradient": "batch-coupled",
        "parameter": "update",
        "buffer": "buffer",
        "state": "average",
    }
    return named(keys.get(first.kind, "unknown"), evidence)


def _of_weight(record: TrialRecord, reference: TrialRecord, step: int) -> Cause:
    """Tell a weight that is the same for every micro-batch from one that is wrong otherwise."""
    weights = {micro.weight for micro in (*record.micros[step], *reference.micros[step])}
    return named(
        "mean-of-means" if len(weights) == 1 else "loss-weight",
        f"the weights of a step add up to {record.weight(step):g} and {reference.weight(step):g} "
        "in two splits of the same samples",
    )


def _of_sum_of_stream(record: TrialRecord, reference: TrialRecord, step: int, evidence: str) -> Cause:
    """Name the mistake in a sum without a probe: a sum of means is proportional to the number of micro-batches."""
    expected = len(record.micros[step]) / len(reference.micros[step])
    ratio = record.total(step) / (reference.total(step) or 1.0)
    return named("mean-for-sum" if math.isclose(ratio, expected, rel_tol=0.25) else "loss-weight", evidence)


def _batchnorm_alone(trials: TrialCache, trial: Trial) -> Cause | None:
    """Return BatchNorm as the cause if it explains all: the difference disappears without its statistics."""
    if not trials.reference.facts["batchnorm"] or trial.eval_mode:
        return None

    without = trials.compare(replace(trial, eval_mode=True)).first
    if without is None or without.step > 0 or without.kind == "metric":
        return named("batchnorm", f"{trial.text}: equal in eval mode, where no statistics are taken")

    return None


def _of_sum(trials: TrialCache, evidence: str) -> Cause:
    """Run every sample twice in each micro-batch: a sum doubles, a mean stays the same."""
    single = trials.probe(replace(trials.matrix.reference, eval_mode=True))
    doubled = trials.probe(replace(trials.matrix.reference, eval_mode=True, twice=True))
    if single is None or doubled is None or not single.total(0):
        return named("unknown", evidence)

    ratios = _ratios(doubled, single, 0)
    if ratios and all(math.isclose(ratio, 1.0, rel_tol=1e-3) for ratio in ratios):
        return named("mean-for-sum", f"{evidence}; with every sample twice, the loss stays the same")

    if not ratios or not all(math.isclose(ratio, 2.0, rel_tol=1e-3) for ratio in ratios):
        return named(
            "batch-coupled", f"{evidence}; with every sample twice, the loss is {ratios[0]:.3g} times as large"
        )

    # It is a sum. Half of the micro-batches, run alone, show whether one depends on those before it.
    half = trials.probe(replace(trials.matrix.reference, part=(1, 2)))
    if half and not _same_totals(half, trials.reference):
        return _carried(trials, evidence)

    return named(
        "loss-weight", f"{evidence}; the sums of the same samples differ from split to split, the weights do not"
    )


# ---- tied weights ----


def _untied(trials: TrialCache, rows: list[Trial]) -> Cause | None:
    """Look for tied weights that wrapping untied, and for weights that should have been tied."""
    tied = trials.reference.facts["tied"]

    # Wrapping, sharding or moving a model may copy a parameter that two modules share.
    for trial in [trials.matrix.reference, *rows]:
        record = trials.record(trial)
        if record.ranks and record.facts["tied_after"] != tied:
            names = next(iter(tied), ["?"])
            return named("untied", f"{' and '.join(names)}: one tensor before wrapping, not after ({trial.text})")

    return _copied(trials.reference)


def _copied(reference: TrialRecord) -> Cause | None:
    """Look for two matrices, of modules of different kinds, that start as the same random numbers and then diverge.

    An embedding and a linear layer that start equal were probably meant to be tied. Layers of the same kind may start
    equal on purpose.
    """
    start = reference.tensors("parameters", 0)
    end = reference.tensors("parameters", reference.steps)
    owners = reference.facts["owners"]
    first_with: dict[str, str] = {}  # digest -> the first parameter that has it

    for name in reference.facts["trainable"]:
        if start[name].ndim < 2 or np.ptp(start[name]) == 0:
            continue  # biases and norms start as constants

        twin = first_with.setdefault(reference.digests(0, 0)[name], name)
        if owners[twin] != owners[name] and not np.array_equal(end[twin], end[name]):
            return named("untied", f"{twin} and {name} start as the same numbers, and are not equal after training")

    return None
