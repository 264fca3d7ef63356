"""One rank of `bench data`: how fast a loader gives samples, and how fast the model takes them.

Training is measured with a batch that is already there, and loading without training, because together each of them
would hide the other.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from lockstep.bench.ranks.turns import opened, take
from lockstep.bench.ranks.workload import batch_of
from lockstep.task import BatchSource, StepBatches

LEAST_S = 0.1  # that loading is timed in a turn
TIMES = 5  # batches that are timed, for each one that the queues of the workers hold


def measure(arguments: dict[str, Any]) -> Generator[Any, str, None]:
    """Yield the facts, then for each "turn" the seconds per step of training, Lockstep's loader, and torch's."""
    block = arguments["block"]  # steps
    workers = arguments["workers"]
    batch = batch_of(arguments)  # samples per step, on this rank

    values = {
        "local_batch": batch,
        "run_dir": str(Path(arguments["folder"]) / "run"),
        "data.workers": workers,
    }
    with opened(arguments, values) as rank:
        # The first block is the warm-up.
        loop = rank.loop(block)
        run = next(loop)

        # Workers prefetch while others take turns. Batches that are read by then are taken first and not timed, and
        # many more batches are timed than the queues hold.
        queued = workers * run.config.data.prefetch
        count = max(block, TIMES * queued)

        yield {"torch": torch.__version__, "unit": rank.task.unit, "batch": run.plan.global_batch}

        # The run's own source is put back for its end, which closes it.
        source = run.source
        cached = CachedSource(source)
        plain = _plain_loader(rank.task, batch, workers, run.config.data.prefetch)
        try:
            while True:
                # Training and loading are timed apart.
                run.source = cached
                trained = take(loop)
                run.source = source

                # Both loaders read as many batches, with as many workers that prefetch as many.
                ours = _seconds(lambda: _read(source), queued, count)
                theirs = _seconds(lambda: next(plain), queued, count) if plain is not None else None
                yield {"train": trained.seconds / block, "ours": ours, "torch": theirs}
        finally:
            run.source = source


class CachedSource(BatchSource):
    """The batches of one step, again and again: training on them shows how long the model takes without any loading."""

    def __init__(self, source: Any):
        """`source`: the run's own, which gives one step and goes on after it."""
        self._batches: StepBatches = source.take()

        # `micro_batches` may be endless; a step has `count` of them.
        taken = zip(range(self._batches.num_micro_batches), self._batches.micro_batches, strict=False)
        self._micro_batches = [micro for _, micro in taken]
        source.commit(self._batches, None)

    def take(self) -> StepBatches:
        # Copies, because `before_batch` may replace the data of a micro-batch.
        return replace(self._batches, micro_batches=[copy.copy(micro) for micro in self._micro_batches])

    def commit(self, batches: StepBatches, result: Any) -> None:
        """Do nothing: the same batches come next."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _seconds(read: Callable[[], Any], queued: int, count: int) -> float:
    """Return the seconds of a call of `read`: the mean of at least `count` calls and LEAST_S, after `queued` others."""
    for _ in range(queued):
        read()

    began = time.perf_counter()
    done = 0
    while done < count or time.perf_counter() - began < LEAST_S:
        read()
        done += 1

    return (time.perf_counter() - began) / done


def _read(source: Any) -> None:
    """Read the batches of one step from the run's own source."""
    # A step of training also takes its batches, iterates over them, and commits them.
    batches = source.take()
    for _ in zip(range(batches.num_micro_batches), batches.micro_batches, strict=False):
        pass

    source.commit(batches, None)


def _plain_loader(task: Any, batch: int, workers: int, prefetch: int) -> Iterator[Any] | None:
    """Return the batches of torch's DataLoader without an end, or None for a dataset that has no length to shuffle."""
    data: Any = task.data()
    if not hasattr(data, "__len__"):
        return None

    # torch refuses these options without workers.
    options: dict[str, Any] = {"prefetch_factor": prefetch, "persistent_workers": True} if workers else {}
    loader = DataLoader(
        data,
        batch,
        shuffle=True,
        num_workers=workers,
        collate_fn=task.collate,
        drop_last=len(data) >= batch,
        **options,
    )

    # Every iteration of the loader is an epoch.
    return itertools.chain.from_iterable(itertools.repeat(loader))
