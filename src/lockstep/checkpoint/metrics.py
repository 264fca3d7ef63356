"""The metrics of checkpoints, by which `checkpoint.best` compares them.

They are in a small file beside the manifest, `metrics.json`, because an evaluation may come after the save: its results
are then added without saving the step again. The file is replaced in one piece, and holds its own digest. A step
without the file was not evaluated, unless the manifest says that it was saved with metrics. This module does not import
torch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import xxhash

from lockstep.checkpoint.manifest import (
    Damaged,
    InvalidCheckpoint,
    Manifest,
    Unreadable,
    canonical,
    float_from_json,
    float_to_json,
)
from lockstep.checkpoint.manifest_reader import (
    as_invalid,
    check_fields,
    check_floats,
    parse_json,
    read_manifest,
    require,
)
from lockstep.checkpoint.storage.folder import Checkpoint, CheckpointStorage, list_checkpoints
from lockstep.run_folder.checkpoint_names import STEP_METRICS

# Upper limit on the size of the file, which is read into memory, in bytes.
_MAX_BYTES = 2**24


# ---- the file ----


def write_metrics(checkpoint: Checkpoint, metrics: Mapping[str, float]) -> None:
    """Write the metrics of an evaluation into the folder of a checkpoint. Raise OSError."""
    encoded = {name: float_to_json(value) for name, value in metrics.items()}
    content = canonical({"metrics": encoded, "digest": _digest(encoded)})
    checkpoint.storage.replace(f"{checkpoint.name}/{STEP_METRICS}", content, durable=True)


def metrics_of(checkpoint: Checkpoint, manifest: Manifest) -> dict[str, float]:
    """Return the metrics of a checkpoint with this manifest, which may show that they are lost.

    Raise InvalidCheckpoint.
    """
    metrics = read_metrics(checkpoint)
    if manifest.has_metrics and not metrics:
        raise Damaged(checkpoint, STEP_METRICS, "missing")

    return metrics


def read_metrics(checkpoint: Checkpoint) -> dict[str, float]:
    """Return the metrics in the file; {} if there is no file. Raise InvalidCheckpoint."""
    with as_invalid(checkpoint, STEP_METRICS):
        try:
            with checkpoint.open(STEP_METRICS) as stream:
                data = stream.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return {}

    try:
        require(len(data) <= _MAX_BYTES, f"more than {_MAX_BYTES:,} bytes")
        return _decode(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(checkpoint, STEP_METRICS, str(error)[:300] or "nested too deep") from None


def _decode(data: bytes) -> dict[str, float]:
    """Parse the contents of the file. Raise ValueError if they are invalid in any way."""
    fields = check_fields(parse_json(data), STEP_METRICS, metrics=dict, digest=str)
    encoded = fields["metrics"]
    require(fields["digest"] == _digest(encoded), "the digest does not match the contents")

    check_floats(encoded)
    metrics = {name: float_from_json(value) for name, value in encoded.items()}
    require(all(type(value) in (int, float) for value in metrics.values()), "a metric is not a number")
    return metrics


def _digest(encoded: dict[str, Any]) -> str:
    return xxhash.xxh3_128(canonical(encoded)).hexdigest()


# ---- all checkpoints of a storage ----


class CheckpointMetrics:
    """The metrics of the committed checkpoints in a storage. Each file is read once.

    The training thread and the writing thread of rank 0 share one of these.
    """

    def __init__(self, storage: CheckpointStorage):
        self.storage = storage
        self._by_step: dict[int, Mapping[str, float]] = {}
        self._lock = threading.Lock()

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a checkpoint that was just committed, in place of an earlier one of its step."""
        with self._lock:
            self._by_step[step] = metrics

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a later evaluation into a committed checkpoint. Raise OSError."""
        # The checkpoint may have been deleted.
        checkpoint = Checkpoint.of(self.storage, step)
        if checkpoint.exists():
            write_metrics(checkpoint, metrics)
            self.add(step, metrics)

    def by_step(self) -> dict[int, Mapping[str, float]]:
        """Return the metrics of all checkpoints that are committed now.

        Raise OSError if the checkpoints cannot be listed, or if the metrics of one are not known yet and cannot be
        read: that checkpoint may be the best, and the message says so.
        """
        with self._lock:
            # Other processes delete checkpoints too, such as `lockstep ckpt prune`.
            checkpoints = {checkpoint.step: checkpoint for checkpoint in list_checkpoints(self.storage)}
            self._by_step = {step: known for step, known in self._by_step.items() if step in checkpoints}

            for step in checkpoints.keys() - self._by_step.keys():
                self._by_step[step] = _read_or_empty(checkpoints[step])

            return dict(self._by_step)


def _read_or_empty(checkpoint: Checkpoint) -> Mapping[str, float]:
    """Return the metrics of a checkpoint; {} if they or the manifest are damaged, or the manifest has another format.

    Then only its age decides whether it is kept, because the best checkpoint must be one that can be loaded.
    """
    try:
        metrics = read_metrics(checkpoint)
        if metrics:
            read_manifest(checkpoint)

        return metrics
    except Unreadable as problem:
        path = checkpoint.path
        raise OSError(
            f"{path}/{problem.file} {problem.why}, and that checkpoint may be the best. Make it readable, or set "
            f"it aside: mv {path} {path}.damaged"
        ) from problem
    except InvalidCheckpoint:
        return {}
