"""From a divergence to its cause: by what the ranks recorded, and by one more cheap layout where two causes look alike.

The order of the questions is the order in which a mistake shows: data before losses, losses before gradients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from lockstep.verify.causes import Cause, named, refusal
from lockstep.verify.compare import KINDS, Comparison, compare
from lockstep.verify.layouts import Layout, Matrix
from lockstep.verify.record import Micro, Record

# Relative error below which two sums of the same terms, in another order, are equal. Losses of micro-batches are sums
# of thousands of float32 terms; a mistake is seldom smaller than a part in a thousand.
SAME = 1e-5


@dataclass
class Case:
    """All layouts that ran, and a way to run more.

    Records and comparisons are kept: a question may need a layout that another one has run already.
    """

    matrix: Matrix
    records: dict[Layout, Record]
    run: Callable[[list[Layout]], dict[Layout, Record]]
    comparisons: dict[Layout, Comparison] = field(default_factory=dict)

    def record(self, layout: Layout) -> Record:
        """Return the record of a layout, which is run if it has not been."""
        self.need([layout])
        return self.records[layout]

    def need(self, layouts: list[Layout]) -> None:
        """Run those that have not been run yet, side by side."""
        missing = [layout for layout in dict.fromkeys(layouts) if layout not in self.records]
        if missing:
            self.records |= self.run(missing)

    def probe(self, layout: Layout) -> Record | None:
        """Return the record of a layout, or None if it failed: a probe that fails shows nothing."""
        record = self.record(layout)
        return None if record.failure or not record.steps else record

    @property
    def reference(self) -> Record:
        """The record that all others are compared with."""
        return self.records[self.matrix.reference]

    def compare(self, layout: Layout) -> Comparison:
        """Compare a layout with the reference of the same mode."""
        if layout in self.comparisons:
            return self.comparisons[layout]

        base = replace(self.matrix.reference, eval_mode=layout.eval_mode)
        nudged = [replace(each, eval_mode=layout.eval_mode) for each in self.matrix.nudged]
        self.need([layout, base, *nudged])

        # Buffers and extra state of a model in eval mode are not those of training.
        kinds = [kind for kind in KINDS if not layout.eval_mode or kind not in ("buffer", "state")]
        nudges = [self.records[each] for each in nudged]
        self.comparisons[layout] = compare(self.records[layout], self.records[base], nudges, kinds)
        return self.comparisons[layout]

    def itself(self) -> Comparison:
        """Compare the reference with its own repetition."""
        # Kernels of a GPU may add in any order, and so get some room. On a CPU there is no excuse.
        on_cpu = self.reference.facts["device"] == "cpu"
        nudged = [] if on_cpu else [self.records[each] for each in self.matrix.nudged]
        return compare(self.record(self.matrix.again), self.reference, nudged)

    @property
    def repeatable(self) -> bool:
        """Whether the reference is the same when it is repeated; otherwise no other layout can be judged by it."""
        return self.record(self.matrix.again).failure is not None or self.itself().first is None


def explain(case: Case, rows: list[Layout]) -> list[Cause]:
    """Return the causes of what is wrong in `rows`, in the order in which they were found. Empty: nothing is."""
    if cause := _differs_from_itself(case):
        return [cause]

    # Several ranks first: a mistake in the ranks often shows in another split, too, but not the other way round.
    found: list[Cause] = []
    ordered = sorted(rows, key=lambda layout: layout.world == 1)
    for layout in (case.matrix.again, *case.matrix.nudged, *ordered):
        record = case.record(layout)
        if record.failure:
            found.append(refusal(record.failure.message, record.failure.for_user))
        elif layout in rows and case.compare(layout).first:
            if layout.world == 1 and any(cause.key not in ("buffer", "batchnorm") for cause in found):
                continue  # most likely a consequence
            found.append(_of_world(case, layout) if layout.world > 1 else _of_split(case, layout))
    found += _untied(case, rows)

    # Each cause once, with its first evidence.
    unique: dict[str, Cause] = {}
    for cause in found:
        unique.setdefault(cause.key, cause)
    return list(unique.values())


# ---- the same layout, repeated --------------------------------------------------------------------------


def _differs_from_itself(case: Case) -> Cause | None:
    """Look for training that is not repeatable: then nothing that differs says anything about ranks or splits."""
    one = case.reference
    two = case.record(case.matrix.again)
    first = None if two.failure else case.itself().first
    if first is None:
        return None

    # Samples that look different when they are read again come before any arithmetic.
    changed = _first_changed_sample(one, two)
    if changed is not None and changed.ids:
        evidence = f"sample {changed.ids[0]} was read twice, and differed (1 process, nothing changed)"
        return named("augmentation", evidence)
    return named("nondeterminism", f"1 process, run twice: {first.text}")


def _first_changed_sample(one: Record, two: Record) -> Micro | None:
    """Return the first micro-batch with the same ids and other contents.

    Records of layouts that ended early may have fewer steps: the common ones are compared.
    """
    for here, there in zip(one.micros, two.micros, strict=False):
        theirs = {micro.index: micro for micro in there}
        for micro in here:
            other = theirs.get(micro.index)
            if other is not None and other.ids == micro.ids and other.rows != micro.rows:
                return micro
    return None


# ---- several ranks, the same split ----------------------------------------------------------------------


def _of_world(case: Case, layout: Layout) -> Cause:
    """Name the cause of a divergence that several ranks have from one process."""
    record = case.record(layout)
    reference = case.record(replace(case.matrix.reference, eval_mode=layout.eval_mode))
    comparison = case.compare(layout)
    first = comparison.first
    assert first is not None

    # Settings, weights or samples that differ explain everything that follows from them.
    for check in (_settings_differ, _ranks_differ, _data_differs):
        if cause := check(record, reference, first.step):
            return cause

    # Otherwise the first kind of thing that differs tells.
    if first.kind in ("loss weight", "loss"):
        return _of_loss(case, record, reference, first.step)
    if first.kind == "gradient":
        return _of_gradient(comparison, reference)
    if first.kind == "buffer":
        # BatchNorm is so common that it gets a cause, and a fix, of its own.
        in_batchnorm = any(first.name.startswith(f"{name}.") for name in reference.facts["batchnorm"])
        return _of_batchnorm(comparison, first.step) if in_batchnorm else named("buffer", first.text)
    keys = {"metric": "metric", "state": "average", "parameter": "update", "number of steps": "rank-in-loss"}
    return named(keys.get(first.kind, "unknown"), first.text)


def _of_batchnorm(comparison: Comparison, step: int) -> Cause:
    """Name the running statistics that differ, rather than the counter that comes first in the alphabet."""
    names = [d.name for d in comparison.found if d.kind == "buffer" and d.step == step]
    statistics = [name for name in names if name.endswith(("running_mean", "running_var"))] or names
    agreeing = f"losses, gradients and parameters of step {step} agree"
    return named("batchnorm", f"{agreeing}, {' and '.join(statistics[:2])} do not ({len(names)} buffers in all)")


def _settings_differ(record: Record, reference: Record, step: int) -> Cause | None:
    """Look for a rank whose learning rate, momentum or decay is not that of the reference.

    A difference in a later step than `step` would be a consequence, not the cause.
    """
    for number in range(min(step + 1, record.steps)):
        expected = reference.settings(number, 0)
        for rank in range(record.layout.world):
            for mine, theirs in zip(record.settings(number, rank), expected, strict=False):
                for key in theirs:
                    if mine.get(key) != theirs[key]:
                        here = f"{mine.get(key)} on rank {rank} of {record.layout.world}"
                        return named("schedule", f"{key} in step {number}: {here}, {theirs[key]} on one process")
    return None


def _ranks_differ(record: Record, reference: Record, step: int) -> Cause | None:
    """Look for replicas that no longer hold the same weights."""
    # Ranks that hold shards hold different things by design.
    if not record.facts["replicated"]:
        return None

    # Snapshot `step + 1` is the state after the step that diverged.
    for number in range(min(step + 2, record.steps + 1)):
        when = f"after step {number - 1}" if number else "before the first step"
        first = record.digests(number, 0)
        for rank in range(record.layout.world):
            theirs = record.digests(number, rank)
            for name in theirs:
                if theirs[name] != first[name]:
                    return named("not-synchronised", f"{name} differs between rank 0 and rank {rank} {when}")
    return None


def _data_differs(record: Record, reference: Record, step: int) -> Cause | None:
    """Look for samples that are repeated, skipped or changed."""
    world = record.layout.world
    if record.facts["samples"] != reference.facts["samples"]:
        one = reference.facts["samples"]
        many = record.facts["samples"]
        return named("data", f"data() has {one} samples on one process, and {many} on each of {world}")

    # The samples of a step are compared by their contents, as a set with counts: which rank has one does not matter.
    for number in range(min(step + 1, record.steps, reference.steps)):
        here = Counter(row for micro in record.micros[number] for row in micro.rows)
        there = Counter(row for micro in reference.micros[number] for row in micro.rows)
        if here == there:
            continue
        more = sum((here - there).values())
        of_step = f"{more} of {here.total()} samples of step {number}"

        # Repeated samples; or the right ones, which look different; or others altogether.
        if any(count > there[row] for row, count in here.items() if row in there):
            return named("data", f"{of_step} came more than once")
        if changed := _first_changed_sample(reference, record):
            return named("augmentation", f"sample {changed.ids[0]} looks different on {world} ranks")
        return named("data", f"{of_step} are not those of one process")
    return None


def _of_loss(case: Case, record: Record, reference: Record, step: int) -> Cause:
    """Find out why the same samples and the same weights give another loss."""
    layout = record.layout
    differing = _differing_losses(record, reference, step)
    rank = differing[0].rank if differing else 0
    where = f"micro-batch {differing[0].index} of step {step}, on rank {rank}" if differing else f"step {step}"
    only_training = f"{where}: equal with the model in eval mode, different in training"

    # What the records show by themselves comes before what needs another run.
    if ratio := _common_ratio(record, reference, step):
        return named("rank-in-loss", f"every loss of step {step} is {ratio:.3g} times that of one process")
    if own := reference.drawn & {"numpy", "random"}:
        return named("randomness", f"loss() draws from the global generator of {' and '.join(sorted(own))}: {where}")

    # Torch's own generator is seeded per micro-batch, so drawing from it is no mistake by itself.
    if reference.drawn and _equal_in_eval_mode(case, layout, step):
        return named("randomness", only_training)

    # A process that has no rank runs that rank's samples: does it get that rank's losses?
    if step == 0 and rank and not reference.facts["stream"]:
        alone = case.probe(replace(case.matrix.reference, part=(rank, layout.world)))
        theirs = {micro.index: micro.total for micro in record.micros[0]}
        if alone and not all(_close(micro.total, theirs[micro.index]) for micro in alone.micros[0]):
            return named("rank-in-loss", f"{where}: other than in a process that has no rank and the same samples")
        if _equal_in_eval_mode(case, layout, 0):
            return named("randomness", only_training)
    return _carried(case, where)


def _equal_in_eval_mode(case: Case, layout: Layout, step: int) -> bool:
    """Whether only what training adds (dropout, masks, noise) makes the losses of a step differ."""
    here = case.probe(replace(layout, eval_mode=True))
    there = case.probe(replace(case.matrix.reference, eval_mode=True))
    if here is None or there is None or step >= min(here.steps, there.steps):
        return False
    return not _differing_losses(here, there, step)


def _carried(case: Case, where: str) -> Cause:
    """Name what the process carries from one micro-batch to the next.

    It was found by elimination: the loss follows neither the samples, nor the rank, nor a random generator.
    """
    reference = case.reference
    before = reference.extra(0)
    after = reference.extra(reference.steps)
    moving = [name for name, t in after.items() if name in before and not np.array_equal(before[name], t)]

    # A tensor of the shape of a weight is most likely an average of it.
    shapes = {t.shape for t in reference.parameters(0).values() if t.ndim > 1}
    averages = [name for name in moving if after[name].shape in shapes]
    if averages:
        return named("average", f"{averages[0]} changes between micro-batches; {where}")
    names = f" ({', '.join(moving[:3])} changes)" if moving else ""
    return named("carried-state", f"{where}: it depends on what the process did before{names}")


def _differing_losses(record: Record, reference: Record, step: int) -> list[Micro]:
    """Return the micro-batches of the same samples with another loss or weight."""
    theirs = {micro.index: micro for micro in reference.micros[step]}
    differing = []
    for micro in record.micros[step]:
        other = theirs.get(micro.index)
        if other and not (_close(micro.total, other.total) and _close(micro.weight, other.weight)):
            differing.append(micro)
    return differing


def _ratios(record: Record, reference: Record, step: int) -> list[float]:
    """Return each loss of a step divided by that of the reference; losses of 0 say nothing and are left out."""
    theirs = {micro.index: micro.total for micro in reference.micros[step]}
    return [micro.total / theirs[micro.index] for micro in record.micros[step] if theirs.get(micro.index)]


def _common_ratio(record: Record, reference: Record, step: int) -> float | None:
    """Return the one factor, other than 1, by which all losses differ."""
    ratios = _ratios(record, reference, step)
    if not ratios or _close(ratios[0], 1.0) or not all(_close(ratio, ratios[0]) for ratio in ratios):
        return None
    return ratios[0]


def _close(a: float, b: float) -> bool:
    """Whether two sums of the same terms are equal up to rounding."""
    return a == b or abs(a - b) <= SAME * max(abs(a), abs(b))


def _of_gradient(comparison: Comparison, reference: Record) -> Cause:
    """Tell a parameter that was left out of the all-reduce from a mistake that all gradients share."""
    first = comparison.first
    assert first is not None

    wrong = [d for d in comparison.found if d.kind == "gradient" and d.step == first.step]
    number = len(reference.gradients(first.step))
    if len(wrong) < number:
        evidence = f"{first.text}; {len(wrong)} of {number} gradients are wrong, the losses are not"
        return named("not-synchronised", evidence)
    return named("gradient", first.text)


# ---- one process, another split -------------------------------------------------------------------------


def _of_split(case: Case, layout: Layout) -> Cause:
    """Name the cause of a divergence that another split of the same batch has on one process."""
    record = case.record(layout)
    reference = case.record(replace(case.matrix.reference, eval_mode=layout.eval_mode))
    first = case.compare(layout).first
    assert first is not None
    step = first.step
    evidence = f"{first.text} ({layout.text})"

    # BatchNorm explains any difference that is gone without its statistics.
    if record.facts["batchnorm"] and not layout.eval_mode:
        without = case.compare(replace(layout, eval_mode=True)).first
        if without is None or without.step > 0 or without.kind == "metric":
            return named("batchnorm", f"{layout.text}: equal in eval mode, where no statistics are taken")
    if first.kind == "metric":
        return named("metric", first.text)
    if cause := _settings_differ(record, reference, step):
        return cause

    # The same samples must weigh the same, however they are split.
    if not _close(record.weight(step), reference.weight(step)):
        each = {micro.weight for micro in (*record.micros[step], *reference.micros[step])}
        counts = f"the weights of a step add up to {record.weight(step):g} and {reference.weight(step):g}"
        key = "mean-of-means" if len(each) == 1 else "loss-weight"
        return named(key, f"{counts} in two splits of the same samples")

    # The weights agree and the sums do not: a probe tells why, but a stream cannot be read twice for it.
    if first.kind == "loss" and not record.facts["stream"]:
        return _of_sum(case, evidence)
    if first.kind == "loss":
        return named("mean-for-sum" if _in_proportion(record, reference, step) else "loss-weight", evidence)
    keys = {"gradient": "batch-coupled", "initial weights": "batch-coupled"}
    keys |= {"parameter": "update", "buffer": "buffer", "state": "average"}
    return named(keys.get(first.kind, "unknown"), evidence)


def _of_sum(case: Case, evidence: str) -> Cause:
    """Run every sample twice in each micro-batch: a sum doubles, a mean stays."""
    single = case.probe(replace(case.matrix.reference, eval_mode=True))
    doubled = case.probe(replace(case.matrix.reference, eval_mode=True, twice=True))
    if single is None or doubled is None or not single.total(0):
        return named("unknown", evidence)
    ratios = _ratios(doubled, single, 0)

    if ratios and all(math.isclose(ratio, 1.0, rel_tol=1e-3) for ratio in ratios):
        return named("mean-for-sum", f"{evidence}; with every sample twice, the loss stays the same")
    if not ratios or not all(math.isclose(ratio, 2.0, rel_tol=1e-3) for ratio in ratios):
        return named(
            "batch-coupled", f"{evidence}; with every sample twice, the loss is {ratios[0]:.3g} times as large"
        )

    # It is a sum. Does a micro-batch depend on the ones before it? Half of them, run alone, show it.
    half = case.probe(replace(case.matrix.reference, part=(1, 2)))
    full = {micro.index: micro.total for micro in case.reference.micros[0]}
    if half and not all(_close(micro.total, full[micro.index]) for micro in half.micros[0]):
        return _carried(case, evidence)
    return named(
        "loss-weight", f"{evidence}; the sums of the same samples differ from split to split, the weights do not"
    )


def _in_proportion(record: Record, reference: Record, step: int) -> bool:
    """Whether the sums are in proportion to the number of micro-batches, as sums of means are."""
    expected = len(record.micros[step]) / len(reference.micros[step])
    return math.isclose(record.total(step) / (reference.total(step) or 1.0), expected, rel_tol=0.25)


# ---- tied weights ---------------------------------------------------------------------------------------


def _untied(case: Case, rows: list[Layout]) -> list[Cause]:
    """Look for tied weights that wrapping the model has untied, or that were never tied."""
    reference = case.reference
    tied = reference.facts["tied"]

    # Wrapping, sharding or moving a model may copy a parameter that two modules share.
    for layout in [case.matrix.reference, *rows]:
        record = case.record(layout)
        if record.ranks and record.facts["tied_after"] != tied:
            names = next(iter(tied), ["?"])
            return [named("untied", f"{' and '.join(names)}: one tensor before wrapping, not after ({layout.text})")]
    return _copied(reference)


def _copied(reference: Record) -> list[Cause]:
    """Look for two matrices of different kinds of modules that start as the same random numbers, and part.

    An embedding and a linear layer were meant to be tied then. Layers of one kind may well start equal, and so may
    whatever a formula fills.
    """
    start = reference.parameters(0)
    end = reference.parameters(reference.steps)
    owners = reference.facts["owners"]
    first_with: dict[str, str] = {}  # digest -> the first parameter that has it
    for name in reference.facts["trainable"]:
        values = start[name]
        if values.ndim < 2 or np.ptp(values) == 0:
            continue  # biases and norms start as constants, which are equal everywhere
        other = first_with.setdefault(reference.digests(0, 0)[name], name)
        if owners[other] != owners[name] and not np.array_equal(end[other], end[name]):
            return [named("untied", f"{other} and {name} start as the same numbers, and are not equal after training")]
    return []
