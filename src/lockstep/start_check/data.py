"""Checks of what ranks and worker processes read: the same dataset on every rank, and different samples of it.

A dataset that shuffles itself, or that reads another folder on each machine, would train some samples twice and others
never, without any error. A few samples are read on all ranks and compared by their digests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from lockstep.causes import Cause, named
from lockstep.checkpoint.state.digests import digest
from lockstep.data.dataset_source import DatasetSource
from lockstep.data.loader import BatchRequest
from lockstep.data.map_source import MapSource
from lockstep.errors import UserError, some_names
from lockstep.runtime.context import Runtime
from lockstep.start_check.checked_run import CheckedRun
from lockstep.start_check.samples import Samples, read_samples
from lockstep.task import BatchSource, MicroBatch, StepBatches

SOME = 8  # how many samples are read to see whether a dataset has different ones

# ---- the same dataset ----


def find_difference(run: CheckedRun, source: MapSource, request: BatchRequest, samples: Samples | None) -> Cause | None:
    """Return a cause if the dataset's length or first samples differ between ranks. Collective."""
    local_digests = samples.digests() if samples else []
    first, *others = run.runtime.collectives.all_gather_json([source.step_order.epoch_length, local_digests])

    # The length of an epoch decides about all positions.
    for rank, (length, _) in enumerate(others, start=1):
        if length != first[0]:
            return named("data", f"an epoch of data() has {first[0]} samples on rank 0 and {length} on rank {rank}")

    # Without seeds per sample, random samples differ between ranks by design.
    if not run.config.data.seed_samples:
        return None

    for rank, (_, digests) in enumerate(others, start=1):
        for index, a, b in zip(request.ids, first[1], digests, strict=False):
            if a != b:
                return _sample_differs(run, source, request, local_digests, int(index), rank)

    return None


def _sample_differs(
    run: CheckedRun, source: MapSource, request: BatchRequest, digests: list[str], index: int, rank: int
) -> Cause:
    """Return the cause: read the samples once more, to distinguish random samples from different datasets."""
    repeated = read_samples(source, request)
    again = repeated.digests() if repeated else []

    if not all(run.runtime.collectives.all_gather_json(again == digests)):
        return named("augmentation", f"sample {index} was read twice by one rank, and differed")

    return named("data", f"sample {index} of data() is not the same on rank 0 and on rank {rank}")


# ---- different samples ----


def take_and_compare(source: BatchSource, runtime: Runtime, data_rank: int) -> StepBatches:
    """Take the batches of the first step, and check that the ranks have read different samples. Collective.

    If two ranks read the same samples, these count twice, and nothing else would reveal it. Ranks with the same
    `data_rank` (one tp or pp group) must read the same samples.
    """
    batches, local_digest, same = None, None, None
    problem: UserError | None = None

    # The others must learn of an error here, so it is kept until all ranks have gathered.
    try:
        batches, local_digest, same = _take_and_digest(source)
    except UserError as error:
        problem = error

    gathered = runtime.collectives.all_gather_json([data_rank, local_digest, same, problem and list(problem.args)])

    # A rank that failed raises its own error. The other ranks raise a copy of the first error.
    for rank, (*_, error_args) in enumerate(gathered):
        if error_args:
            raise problem or UserError(error_args[0], f"rank {rank}: {error_args[1]}", error_args[2])

    assert batches is not None
    _check_one_stream([same for _, _, same, _ in gathered])

    # Ranks of one group read the same samples, and so have one digest.
    digests: dict[int, str | None] = {}  # by data rank
    for rank, (group, value, *_) in enumerate(gathered):
        if digests.setdefault(group, value) != value:
            raise UserError(
                f"rank {rank} read a different first batch than the first rank of its group",
                "ranks that share a layer, or are stages of one pipeline, must read the same samples",
                "let Lockstep shard the data: no split by RANK, data.sharding=stride, and data.seed_samples=true for "
                "samples that draw random numbers",
            )

    # A source over a dataset gives every rank different ids, so equal first batches are suspicious only if the whole
    # dataset looks the same, as with a dataset that ignores the index.
    samples = _spread_samples(source) if source.step_order is not None else []
    if len(digests) > 1 and len({digest(sample) for sample in samples}) <= 1:
        check_different(
            list(digests.values()),
            "let Lockstep shard the data: return the plain dataset from data(); with data.sharding=own, split by "
            "RANK and by worker. If equal batches are right here, set checks.first_batch=false",
        )

    return batches


def _spread_samples(source: BatchSource) -> list[Any]:
    """Return a few samples, evenly spread over the dataset."""
    # A set, because a small dataset has some of these indices twice.
    ids = {index * source.step_order.dataset_length // SOME for index in range(SOME)}
    return [source.read_samples(0, [index]) for index in sorted(ids)]


def _take_and_digest(source: BatchSource) -> tuple[StepBatches, str | None, str | None]:
    """Return the batches of a step, and digests of the first one and of `same_on_all_ranks`.

    A digest is None for padding, or if the source knows nothing that must be the same.
    """
    batches = source.take()
    later = iter(batches)
    first = next(later, None)
    if first is None:
        return batches, None, None  # the step will report that

    # Only the first one is read here, and `chain` drops it when the step asks for the next.
    batches = replace(batches, micro_batches=chain(iter([first]), later))
    read = None if first.padding else digest(first.data)
    if not isinstance(source, DatasetSource):
        return batches, read, None

    if read is not None:
        _check_workers(source, first, read)

    same = source.same_on_all_ranks
    return batches, read, None if same is None else digest(same)


def _check_one_stream(digests: Sequence[str | None]) -> None:
    """Check that all ranks read the same stream. `digests` has the digest of its `same_on_all_ranks` by rank."""
    for rank, value in enumerate(digests):
        if value != digests[0]:
            raise UserError(
                f"the stream begins with a different sample on rank {rank} than on rank 0",
                "with data.sharding=stride every rank reads the whole stream and keeps every k-th sample: if the "
                "stream splits itself by rank, or has a different order on every rank, samples are lost",
                "set data.sharding=own if it splits itself by rank and by worker; or return the same stream on every "
                "rank, and shuffle with torch, numpy or random, which are seeded. If it does not matter, set "
                "checks.first_batch=false",
            )


def _check_workers(source: DatasetSource, micro: MicroBatch, read_by_worker: str) -> None:
    """Check that a worker process read what this process reads: data.workers must not change the training."""
    try:
        again = source.read_again(micro)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            "this rank cannot read the samples that a worker process has read",
            f"{type(error).__name__}: {error}",
            "make the dataset readable outside a worker process too (get_worker_info() is None there); or set "
            "checks.first_batch=false",
        ) from error

    if again is None or digest(again) == read_by_worker:
        return

    # The samples of a stream have no ids.
    if len(micro.ids) == 0:
        raise UserError(
            "the worker processes do not read the same stream",
            "a stream that splits itself by get_worker_info(), or draws from a generator of its own",
            "set data.sharding=own if it splits itself by rank and by worker; or data.workers=1, or data.workers=0",
        )

    raise UserError(
        "a worker process reads different samples than this rank does",
        f"samples {some_names([str(i) for i in micro.ids.tolist()])} in epoch {micro.epoch}, read again",
        "keep nothing in the dataset that reading changes (a generator, a counter, a file position): draw from "
        "torch, numpy or random, which are seeded for each sample, and seek before reading; or set data.workers=0. "
        "If they may differ, set checks.first_batch=false",
    )


def check_different(digests: Sequence[str | None], fix: str) -> None:
    """Check that no two ranks have the same first batch. A digest of None means that the rank has no batch."""
    first_rank: dict[str, int] = {}
    for rank, value in enumerate(digests):
        if value is not None and first_rank.setdefault(value, rank) != rank:
            raise UserError(f"ranks {first_rank[value]} and {rank} read the same first batch", "", fix, cause="data")
