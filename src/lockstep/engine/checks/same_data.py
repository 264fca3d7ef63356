"""Whether a resumed run reads the data that the saved run has read.

Other data of the same length, such as a random split that is drawn again at every start, trains some samples twice and
others never, and evaluates on samples that were trained on. A resume is not refused: the data may have been changed on
purpose, and no run may be lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from lockstep.checkpoint.state.digests import digest
from lockstep.data.loader import Request, SampleReader
from lockstep.data.map_source import MapSource
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.runtime.seeds import preserve_rng
from lockstep.task import BatchSource

# Names of datasets, which are part of the file format. A set with a name of its own is evaluation/NAME.
TRAINING, EVALUATION = "training", "evaluation"

# What to write where the data is made.
SAME_SPLIT = "random_split(data, lengths, generator=torch.Generator().manual_seed(0))"


class DataRecord:
    """Digests of the first, the middle and the last sample of each dataset. Checkpoints hold those of rank 0.

    The samples are read as the dataset returns them, with seeds that depend on nothing else, so that random transforms
    draw the same numbers in every run. Streams are left out: reading them would move them.
    """

    def __init__(self, source: BatchSource, runtime: Runtime, log_event: EventLogger, checkpoint: str | None):
        """`checkpoint`: the path of the one that is resumed, as the user would type it."""
        self._source = source
        self._runtime = runtime
        self._log_event = log_event
        self._checkpoint = checkpoint
        self._sets: dict[str, Any] = {}  # the evaluation sets
        self._current: dict[str, Any] = {}
        self._saved: dict[str, Any] = {}  # those of the checkpoint; {}: the run is new, or the checkpoint is older

    def add_evaluation(self, name: str | None, dataset: Any) -> None:
        """Record an evaluation set, too."""
        self._sets[f"{EVALUATION}/{name}" if name else EVALUATION] = dataset

    def state_dict(self) -> dict[str, Any]:
        # A save before the first step keeps what the checkpoint had.
        return {"digests": self._current or self._saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state.get("digests", {})

    def compare(self) -> None:
        """Read the samples on rank 0, and warn of those that differ from the checkpoint's. Called before step 1."""
        if not self._runtime.is_main:
            return

        datasets = dict(self._sets)
        if isinstance(self._source, MapSource):
            # A dataset may open files for its first sample, which worker processes that start later would share.
            self._source.start_workers()
            datasets = {TRAINING: self._source.reader.dataset, **datasets}

        # Reading them is the user's code, which may take long.
        reading = self._runtime.heartbeat.visit("user code")
        with reading, preserve_rng(self._runtime.device), self._source.reading_here():
            for name, dataset in datasets.items():
                self._compare_one(name, dataset)

    def _compare_one(self, name: str, dataset: Any) -> None:
        found = _digests(dataset)
        if found is None:
            return

        self._current[name] = found
        difference = _difference(dataset, self._saved.get(name), found)
        if difference:
            self._log_event("warning", reason=_warning(name, difference, self._checkpoint))


def _digests(dataset: Any) -> dict[str, Any] | None:
    """Return the length of a dataset, and the digests of a few samples by index; None for a stream."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return None

    try:
        length = len(dataset)
    except TypeError:
        return None

    indices = sorted({0, length // 2, length - 1}) if length else []
    return {"length": length, "samples": {str(index): _digest_of(dataset, index) for index in indices}}


def _digest_of(dataset: Any, index: int) -> str | None:
    """Return the digest of a sample, or None if it cannot be read. The step that needs it will report the error."""
    reader = SampleReader(dataset, default_collate, seed=0)
    try:
        return digest(reader.read_samples(Request(0, [index])))
    except Exception:  # the dataset, and the objects in its samples, are the user's code
        return None


def _difference(dataset: Any, saved: Mapping[str, Any] | None, found: Mapping[str, Any]) -> str:
    """Return what differs from the checkpoint, as text, or ""."""
    if not saved:
        return ""

    length = found["length"]
    if saved["length"] != length:
        return f"it has {length} samples, and had {saved['length']}"

    changed = []
    for index, value in found["samples"].items():
        before = saved["samples"].get(index)
        if None in (value, before) or value == before:
            continue

        # A sample that differs each time it is read says nothing.
        if value == _digest_of(dataset, int(index)):
            changed.append(index)

    if not changed:
        return ""

    which = f"sample {changed[0]} differs" if len(changed) == 1 else f"samples {', '.join(changed)} differ"
    compared = ", ".join(found["samples"])
    return which if len(changed) == len(found["samples"]) else f"{which}, of {compared} that were compared"


def _warning(name: str, difference: str, checkpoint: str | None) -> str:
    kind, _, own_name = name.partition("/")
    follows = "samples may be trained on twice or never, and be among those of the evaluation"
    if kind == EVALUATION:
        follows = "results may not be comparable with earlier ones, and samples may be among those that were trained on"

    which = f" ({own_name})" if own_name else ""
    again = f", and resume again with --resume {checkpoint}" if checkpoint else ""
    return (
        f"THE {kind.upper()} DATA{which} HAS CHANGED since the checkpoint was written: {difference}. The run continues "
        f"with the data as it is now: {follows}. If that was not meant, make the same data at every start, such as "
        f"{SAME_SPLIT}{again}"
    )
