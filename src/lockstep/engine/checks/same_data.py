"""Whether a resumed run reads the data that the saved run has read.

Other data of the same length, such as a random split that is drawn again at every start, trains some samples twice and
others never, and evaluates on samples that were trained on. A resume is not refused: the data may have been changed on
purpose, and no run may be lost.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from lockstep.data.map_source import MapSource
from lockstep.data.worker_copies import attributes_of
from lockstep.engine.checks.sample_reading import Reading, reading_of
from lockstep.engine.checks.sketches import is_same
from lockstep.errors import shell_word
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.runtime.seeds import preserve_rng
from lockstep.task import BatchSource

# Names of datasets, which are part of the file format. A set with a name of its own is evaluation/NAME.
TRAINING, EVALUATION = "training", "evaluation"

# Seconds for reading the samples of all datasets. Samples that take longer are left out.
READ_S = 1.0

# A sample that differs is read again: its transforms may draw random numbers from a generator without a seed. This
# takes long only if all reads agree.
REREADS, REREAD_S = 16, 5.0

# What to write where the data is made.
SAME_SPLIT = "random_split(data, lengths, generator=torch.Generator().manual_seed(0))"


class DataRecord:
    """Sketches of the first, the middle and the last sample of each dataset. Checkpoints hold those of rank 0.

    The samples are read as the dataset returns them. Streams are left out: reading them would move them. A dataset with
    state of its own that checkpoints hold is left out, too: its samples may depend on that state.
    """

    def __init__(
        self,
        source: BatchSource,
        runtime: Runtime,
        log_event: EventLogger,
        registered: Collection[Any],
        checkpoint: str | None,
        *,
        workers: int,
        reads: bool,
    ):
        """`registered`: the objects whose state checkpoints hold, which have been restored.

        `checkpoint`: the path of the one that is resumed, as the user would type it. `workers`: how many worker
        processes read the data. `reads`: False if there is nothing to compare, and no checkpoint is to come.
        """
        self._source = source
        self._runtime = runtime
        self._log_event = log_event
        self._registered = registered
        self._checkpoint = checkpoint
        self._workers = workers
        self._reads = reads
        self._sets: dict[str, Any] = {}  # the evaluation sets
        self._current: dict[str, Any] = {}
        self._saved: dict[str, Any] = {}  # those of the checkpoint; {}: the run is new, or the checkpoint is older

    def add_evaluation(self, name: str | None, dataset: Any) -> None:
        """Record an evaluation set, too."""
        self._sets[f"{EVALUATION}/{name}" if name else EVALUATION] = dataset

    def state_dict(self) -> dict[str, Any]:
        # A save before the first step keeps what the checkpoint had.
        return {"sketches": self._current or self._saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state.get("sketches", {})

    def compare(self) -> None:
        """Read the samples on rank 0, and warn of those that differ from the checkpoint's. Called before step 1."""
        if not (self._runtime.is_main and self._reads):
            return

        datasets = dict(self._sets)
        if isinstance(self._source, MapSource):
            # They read the first batches while this check runs.
            self._source.start_workers()
            datasets = {TRAINING: self._source.reader.dataset, **datasets}

        lengths = {name: _length(dataset) for name, dataset in datasets.items()}
        datasets = {
            name: dataset
            for name, dataset in datasets.items()
            if lengths[name] is not None and not _holds_one_of(dataset, self._registered)
        }
        self._current = {name: {"length": lengths[name], "samples": {}} for name in datasets}
        if not datasets:
            return

        # Reading them is the user's code, which may take long.
        with (
            self._runtime.heartbeat.visit("user code"),
            preserve_rng(self._runtime.device),
            self._source.reading_here(),
            reading_of(datasets, apart=self._workers > 0) as reading,
        ):
            in_time = reading and self._read(reading)
            rereads = _Rereads(reading) if reading and in_time else None
            changed = {name: self._changed(name, rereads) for name in datasets}

        for name, difference in changed.items():
            if difference:
                self._log_event("warning", reason=_warning(name, difference, self._checkpoint))

    def _read(self, reading: Reading) -> bool:
        """Read the samples, as far as the time goes. Return whether it was enough."""
        ends = time.monotonic() + READ_S
        for name, found in self._current.items():
            length = found["length"]
            for index in sorted({0, length // 2, length - 1}) if length else []:
                left = ends - time.monotonic()
                value = reading(name, index, left) if left > 0 else None
                if value is not None:
                    found["samples"][str(index)] = value

        return time.monotonic() < ends

    def _changed(self, name: str, rereads: _Rereads | None) -> str:
        """Return what differs from the checkpoint, as text, or "". Only the length counts without `rereads`."""
        saved, found = self._saved.get(name), self._current[name]
        if not saved:
            return ""

        if saved["length"] != found["length"]:
            return f"it has {found['length']} samples, and had {saved['length']}"

        if not rereads:
            return ""

        before, now = saved["samples"], found["samples"]
        compared = [index for index in now if index in before]
        changed = [index for index in compared if rereads.find_change(name, index, before[index], now[index])]
        if not changed:
            return ""

        which = f"sample {changed[0]} differs" if len(changed) == 1 else f"samples {', '.join(changed)} differ"
        return which if len(changed) == len(compared) else f"{which}, of {', '.join(compared)} that were compared"


class _Rereads:
    """Reads samples that differ again, as far as the time goes, since a sample may differ each time it is read."""

    def __init__(self, reading: Reading):
        self._reading = reading
        self._ends = time.monotonic() + REREAD_S

    def find_change(self, name: str, index: str, before: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
        """Return whether a sample has certainly changed: all new reads agree with each other, and none with the old."""
        if is_same(value, before):
            return False

        for _ in range(REREADS):
            left = self._ends - time.monotonic()
            again = self._reading(name, int(index), left) if left > 0 else None
            if again is None or is_same(again, before) or not is_same(again, value):
                return False

        return True


def _length(dataset: Any) -> int | None:
    """Return how many samples can be read by their index; None for a stream."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return None

    try:
        return len(dataset)
    except TypeError:
        return None


def _holds_one_of(dataset: Any, objects: Collection[Any]) -> bool:
    """Return whether a dataset is one of `objects`, or has one inside it, as a Subset has a dataset."""
    inside = [dataset, *(value for _, value in attributes_of(dataset))]
    return any(value is one for value in inside for one in objects)


def _warning(name: str, difference: str, checkpoint: str | None) -> str:
    kind, _, own_name = name.partition("/")
    follows = "samples may be trained on twice or never, and be among those of the evaluation"
    if kind == EVALUATION:
        follows = "results may not be comparable with earlier ones, and samples may be among those that were trained on"

    which = f" ({own_name})" if own_name else ""
    again = f", and resume again with --resume {shell_word(checkpoint)}" if checkpoint else ""
    return (
        f"THE {kind.upper()} DATA{which} HAS CHANGED since the checkpoint was written: {difference}. The run continues "
        f"with the data as it is now: {follows}. If that was not meant, make the same data at every start, such as "
        f"{SAME_SPLIT}{again}"
    )
