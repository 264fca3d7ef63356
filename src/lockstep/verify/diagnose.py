"""From a divergence to its cause: look at what was noted, and run a cheap layout more where that tells two apart."""

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

SAME = 1e-5  # relative: two sums of the same terms, computed in another order


@dataclass
class Case:
    """All layouts that ran, and the way to run one more."""

    matrix: Matrix
    records: dict[Layout, Record]
    run: Callable[[list[Layout]], dict[Layout, Record]]
    comparisons: dict[Layout, Comparison] = field(default_factory=dict)

    def record(self, layout: Layout) -> Record:
        self.need([layout])
        return self.records[layout]

    def need(self, layouts: list[Layout]) -> None:
        """Run what has not run yet, together."""
        missing = [layout for layout in dict.fromkeys(layouts) if layout not in self.records]
        if missing:
            self.records |= self.run(missing)

    def probe(self, layout: Layout) -> Record | None:
        """The same, or None if it did not get through: a probe that fails tells nothing."""
        record = self.record(layout)
        return None if record.failure or not record.steps else record

    @property
    def reference(self) -> Record:
        return self.records[self.matrix.reference]

    def compare(self, layout: Layout) -> Comparison:
        """With the reference of the same mode."""
        if layout not in self.comparisons:
            base = replace(self.matrix.reference, quiet=layout.quiet)
            nudged = [replace(each, quiet=layout.quiet) for each in self.matrix.nudged]
            self.need([layout, base, *nudged])
            kinds = [kind for kind in KINDS if not layout.quiet or kind not in ("buffer", "state")]
            nudges = [self.records[each] for each in nudged]
            self.comparisons[layout] = compare(self.records[layout], self.records[base], nudges, kinds)
        return self.comparisons[layout]

    def itself(self) -> Comparison:
        """The reference against its own repetition. Kernels of a GPU may add in any order, and so get some room."""
        nudged = [] if self.reference.facts["device"] == "cpu" else [self.records[each] for each in self.matrix.nudged]
        return compare(self.record(self.matrix.again), self.reference, nudged)

    def repeatable(self) -> bool:
        """Whether the same layout gives the same once more; if not, no other can be held to it."""
        return self.record(self.matrix.again).failure is not None or self.itself().first is None


def explain(case: Case, rows: list[Layout]) -> list[Cause]:
    """The causes of what is wrong in `rows`, the first first. Empty: nothing is."""
    if cause := _differs_from_itself(case):
        return [cause]
    found: list[Cause] = []
    for layout in (case.matrix.again, *case.matrix.nudged, *sorted(rows, key=lambda layout: layout.world == 1)):
        record = case.record(layout)
        if record.failure:
            found.append(refusal(record.failure.message, record.failure.for_user))
        elif layout in rows and case.compare(layout).first is not None:
            if layout.world == 1 and any(cause.key not in ("buffer", "batchnorm") for cause in found):
                continue  # most likely a consequence
            found.append(_of_world(case, layout) if layout.world > 1 else _of_split(case, layout))
    found += _untied(case, rows)
    return list({cause.key: cause for cause in reversed(found)}.values())[::-1]


# ---- the same layout, once more -------------------------------------------------------------------------


def _differs_from_itself(case: Case) -> Cause | None:
    one, two = case.reference, case.record(case.matrix.again)
    first = None if two.failure else case.itself().first
    if first is None:
        return None
    apart = _first_other_rows(one, two)
    if apart is not None and apart.ids:
        return named("augmentation", f"sample {apart.ids[0]} was read twice, and differed (1 process, nothing changed)")
    return named("nondeterminism", f"1 process, run twice: {first.text}")


def _first_other_rows(one: Record, two: Record) -> Micro | None:
    """The first micro-batch with the same ids and other contents."""
    for here, there in zip(one.micros, two.micros, strict=False):
        theirs = {micro.index: micro for micro in there}
        for micro in here:
            other = theirs.get(micro.index)
            if other is not None and other.ids == micro.ids and other.rows != micro.rows:
                return micro
    return None


# ---- several ranks, the same cut ------------------------------------------------------------------------


def _of_world(case: Case, layout: Layout) -> Cause:
    record, reference = case.record(layout), case.record(replace(case.matrix.reference, quiet=layout.quiet))
    first = case.compare(layout).first
    assert first is not None
    step = first.step
    for check in (_settings_apart, _ranks_apart, _other_data):
        if cause := check(record, reference, step):
            return cause
    if first.kind in ("loss weight", "loss"):
        return _of_loss(case, record, reference, step)
    if first.kind == "metric":
        return named("metric", first.text)
    if first.kind == "gradient":
        return _of_gradient(case.compare(layout), reference)
    if first.kind == "buffer":
        ours = [name for name in reference.facts["batchnorm"] if first.name.startswith(f"{name}.")]
        return _of_batchnorm(case.compare(layout), step) if ours else named("buffer", first.text)
    if first.kind == "state":
        return named("average", first.text)
    if first.kind == "parameter":
        return named("update", first.text)
    if first.kind == "number of steps":
        return named("rank-in-loss", first.text)
    return named("unknown", first.text)


def _of_batchnorm(found: Comparison, step: int) -> Cause:
    names = [d.name for d in found.found if d.kind == "buffer" and d.step == step]
    statistics = [name for name in names if name.endswith(("running_mean", "running_var"))] or names
    told = f"losses, gradients and parameters of step {step} agree"
    return named("batchnorm", f"{told}, {' and '.join(statistics[:2])} do not ({len(names)} buffers in all)")


def _settings_apart(record: Record, reference: Record, step: int) -> Cause | None:
    """Learning rates, momenta, decays: of this rank, of another, and of the reference."""
    for number in range(min(step + 1, record.steps)):
        expected = reference.settings(number, 0)
        for rank in range(record.layout.world):
            for mine, theirs in zip(record.settings(number, rank), expected, strict=False):
                if other := [key for key in theirs if mine.get(key) != theirs[key]]:
                    key = other[0]
                    return named(
                        "schedule",
                        f"{key} in step {number}: {mine.get(key)} on rank {rank} of {record.layout.world}, "
                        f"{theirs[key]} on one process",
                    )
    return None


def _ranks_apart(record: Record, reference: Record, step: int) -> Cause | None:
    """Replicas that no longer hold the same weights."""
    if not record.facts["replicated"]:
        return None
    for number in range(min(step + 2, record.steps + 1)):
        everybody = [record.digests(number, rank) for rank in range(record.layout.world)]
        for rank, theirs in enumerate(everybody):
            if other := [name for name in theirs if theirs[name] != everybody[0][name]]:
                return named(
                    "not-synchronised",
                    f"{other[0]} differs between rank 0 and rank {rank} after step {number - 1}"
                    if number
                    else f"{other[0]} differs between rank 0 and rank {rank} before the first step",
                )
    return None


def _other_data(record: Record, reference: Record, step: int) -> Cause | None:
    if record.facts["samples"] != reference.facts["samples"]:
        return named(
            "data",
            f"data() has {reference.facts['samples']} samples on one process, and {record.facts['samples']} on each of "
            f"{record.layout.world}",
        )
    for number in range(min(step + 1, record.steps, reference.steps)):
        here = Counter(row for micro in record.micros[number] for row in micro.rows)
        there = Counter(row for micro in reference.micros[number] for row in micro.rows)
        if here == there:
            continue
        more = sum((here - there).values())
        if any(count > there[row] for row, count in here.items() if row in there):
            return named("data", f"{more} of {here.total()} samples of step {number} came more than once")
        if apart := _first_other_rows(reference, record):
            return named("augmentation", f"sample {apart.ids[0]} looks different on {record.layout.world} ranks")
        return named("data", f"{more} of {here.total()} samples of step {number} are not those of one process")
    return None


def _of_loss(case: Case, record: Record, reference: Record, step: int) -> Cause:
    """The same samples, the same weights, another loss."""
    layout, apart = record.layout, _apart(record, reference, step)
    told = f"micro-batch {apart[0].index} of step {step}, on rank {apart[0].rank}" if apart else f"step {step}"
    if ratio := _common_ratio(record, reference, step):
        return named("rank-in-loss", f"every loss of step {step} is {ratio:.3g} times that of one process")
    if own := reference.drawn & {"numpy", "random"}:
        return named("randomness", f"loss() draws from the global generator of {' and '.join(sorted(own))}: {told}")
    rank = apart[0].rank if apart else 0
    if reference.drawn and _equal_in_eval_mode(case, layout, step):
        return named("randomness", f"{told}: equal with the model in eval mode, different in training")
    if step == 0 and rank and not reference.facts["stream"]:
        alone = case.probe(replace(case.matrix.reference, part=(rank, layout.world)))
        theirs = {micro.index: micro.total for micro in record.micros[0]}
        if alone and not all(_close(micro.total, theirs[micro.index]) for micro in alone.micros[0]):
            return named("rank-in-loss", f"{told}: other than in a process that has no rank and the same samples")
        if _equal_in_eval_mode(case, layout, 0):
            return named("randomness", f"{told}: equal with the model in eval mode, different in training")
    return _carried(case, told)


def _equal_in_eval_mode(case: Case, layout: Layout, step: int) -> bool:
    """Whether only what training adds (dropout, masks, noise) makes the losses of a step differ."""
    here, there = case.probe(replace(layout, quiet=True)), case.probe(replace(case.matrix.reference, quiet=True))
    if here is None or there is None or step >= min(here.steps, there.steps):
        return False
    return not _apart(here, there, step)


def _carried(case: Case, told: str) -> Cause:
    """Something that the process keeps from one micro-batch to the next. What?"""
    reference = case.reference
    shapes = {t.shape for t in reference.parameters(0).values() if t.ndim > 1}
    before, after = reference.kept(0), reference.kept(reference.steps)
    moving = [name for name, t in after.items() if name in before and not np.array_equal(before[name], t)]
    averages = [name for name in moving if after[name].shape in shapes]
    if averages:
        return named("average", f"{averages[0]} changes between micro-batches; {told}")
    return named("carried-state", f"{told}: it depends on what the process did before" + _listed(moving))


def _listed(names: list[str]) -> str:
    return f" ({', '.join(names[:3])} changes)" if names else ""


def _apart(record: Record, reference: Record, step: int) -> list[Micro]:
    """Micro-batches of the same samples with another loss or weight."""
    theirs = {micro.index: micro for micro in reference.micros[step]}
    return [
        micro
        for micro in record.micros[step]
        if micro.index in theirs
        and not (_close(micro.total, theirs[micro.index].total) and _close(micro.weight, theirs[micro.index].weight))
    ]


def _common_ratio(record: Record, reference: Record, step: int) -> float | None:
    """The one factor, other than 1, by which all losses differ."""
    theirs = {micro.index: micro.total for micro in reference.micros[step]}
    ratios = [micro.total / theirs[micro.index] for micro in record.micros[step] if theirs.get(micro.index)]
    if not ratios or _close(ratios[0], 1.0) or not all(_close(ratio, ratios[0]) for ratio in ratios):
        return None
    return ratios[0]


def _close(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= SAME * max(abs(a), abs(b))


def _of_gradient(found: Comparison, reference: Record) -> Cause:
    first = found.first
    assert first is not None
    wrong = [d for d in found.found if d.kind == "gradient" and d.step == first.step]
    number = len(reference.gradients(first.step))
    if len(wrong) < number:
        return named(
            "not-synchronised", f"{first.text}; {len(wrong)} of {number} gradients are wrong, the losses are not"
        )
    return named("gradient", first.text)


# ---- one process, another cut ---------------------------------------------------------------------------


def _of_split(case: Case, layout: Layout) -> Cause:
    record, first = case.record(layout), case.compare(layout).first
    assert first is not None
    reference = case.record(replace(case.matrix.reference, quiet=layout.quiet))
    if record.facts["batchnorm"] and not layout.quiet:
        quiet = case.compare(replace(layout, quiet=True)).first
        if quiet is None or quiet.step > 0 or quiet.kind == "metric":
            return named("batchnorm", f"{layout.text}: equal in eval mode, where no statistics are taken")
    if first.kind == "metric":
        return named("metric", first.text)
    step, told = first.step, f"{first.text} ({layout.text})"
    if cause := _settings_apart(record, reference, step):
        return cause
    if not _close(record.weight(step), reference.weight(step)):
        each = {micro.weight for micro in (*record.micros[step], *reference.micros[step])}
        counts = f"the weights of a step add up to {record.weight(step):g} and {reference.weight(step):g}"
        return named("mean-of-means" if len(each) == 1 else "loss-weight", f"{counts} in two cuts of the same samples")
    if first.kind == "loss" and not record.facts["stream"]:
        return _of_sum(case, layout, told)
    if first.kind == "loss":
        return named("mean-for-sum" if _as_many(record, reference, step) else "loss-weight", told)
    if first.kind in ("gradient", "initial weights"):
        return named("batch-coupled", told)
    kinds = {"parameter": "update", "buffer": "buffer", "state": "average"}
    return named(kinds.get(first.kind, "unknown"), told)


def _of_sum(case: Case, layout: Layout, told: str) -> Cause:
    """Every sample twice in each micro-batch: a sum doubles, a mean stays."""
    single = case.probe(replace(case.matrix.reference, quiet=True))
    doubled = case.probe(replace(case.matrix.reference, quiet=True, twice=True))
    if single is None or doubled is None or not single.total(0):
        return named("unknown", told)
    theirs = {micro.index: micro.total for micro in single.micros[0]}
    ratios = [micro.total / theirs[micro.index] for micro in doubled.micros[0] if theirs.get(micro.index)]
    if ratios and all(math.isclose(ratio, 1.0, rel_tol=1e-3) for ratio in ratios):
        return named("mean-for-sum", f"{told}; with every sample twice, the loss stays the same")
    if ratios and all(math.isclose(ratio, 2.0, rel_tol=1e-3) for ratio in ratios):
        part = case.probe(replace(case.matrix.reference, part=(1, 2)))
        full = {micro.index: micro.total for micro in case.reference.micros[0]}
        if part and not all(_close(micro.total, full[micro.index]) for micro in part.micros[0]):
            return _carried(case, told)
        return named("loss-weight", f"{told}; the sums of the same samples differ from cut to cut, the weights do not")
    return named("batch-coupled", f"{told}; with every sample twice, the loss is {ratios[0]:.3g} times as large")


def _as_many(record: Record, reference: Record, step: int) -> bool:
    """Whether the sums are in proportion to the number of micro-batches."""
    expected = len(record.micros[step]) / len(reference.micros[step])
    return math.isclose(record.total(step) / (reference.total(step) or 1.0), expected, rel_tol=0.25)


# ---- tied weights ---------------------------------------------------------------------------------------


def _untied(case: Case, rows: list[Layout]) -> list[Cause]:
    reference = case.reference
    tied = reference.facts["tied"]
    for layout in [case.matrix.reference, *rows]:
        record = case.record(layout)
        if record.ranks and record.facts["tied_after"] != tied:
            names = next(iter(tied), ["?"])
            return [named("untied", f"{' and '.join(names)}: one tensor before wrapping, not after ({layout.text})")]
    return _parted(reference)


def _parted(reference: Record) -> list[Cause]:
    """Two matrices of different kinds of modules (an embedding, a linear layer) that start as the same random numbers.
    Layers and towers of one kind may well start equal, and so may whatever a formula fills."""
    start, end = reference.parameters(0), reference.parameters(reference.steps)
    owners, same = reference.facts["owners"], dict[str, str]()
    for name in reference.facts["trainable"]:
        values = start[name]
        if values.ndim < 2 or np.ptp(values) == 0:
            continue
        other = same.setdefault(reference.digests(0, 0)[name], name)
        if owners[other] != owners[name] and not np.array_equal(end[other], end[name]):
            return [named("untied", f"{other} and {name} start as the same numbers, and are not equal after training")]
    return []
