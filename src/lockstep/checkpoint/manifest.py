"""The manifest of a checkpoint: the position of each tensor, all other values, and the size and digest of each file.

`Manifest` has the fields of the file. If a run has written it, its `values` have these keys:

    config, plan, world, versions     settings as text, the plan, the number of ranks (`CheckpointManager._about_run`)
    loop.NAME                         the state of an object of the loop (`LoopState.state_dict`)
    state.model.extra                 the extra state of modules (`ModelState.capture`)
    state.model.frozen_digests        of frozen parameters that are not saved (`RunState.capture`)
    state.optimizers.NUMBER           kind, state, params, initial, settings (`OptimizerStates._capture`)
    state.stateful.NAME               the state of a `Stateful`; "data" is the data source (`RunState.capture`)
    state.required                    the NAMEs without whose state a resume is refused (`RegisteredState.required`)
    state.upcoming, stepper           a digest of the samples that come next, and the counters (`RunState.capture`)
    has_metrics                       true if the step was evaluated before the save (`commit`), or left out

A run that resumes reads them in `Resumer.load` and `RunState.restore`; the properties of `Manifest` give single values
to other callers. `manifest_reader` reads and checks a manifest. This module does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import xxhash

from lockstep.checkpoint.storage.folder import Checkpoint

# The version of the format of a checkpoint. Other versions are not read. CONTRIBUTING says when it changes.
FORMAT = 5


# How the names of the model's tensors begin, and the names of the averages of its parameters: model.NAME, ema.NAME.
MODEL = "model"
EMA = "ema"


def weight_name(name: str) -> str:
    """Return the name that a tensor of the model has in a checkpoint."""
    return f"{MODEL}.{name}"


def average_name(name: str) -> str:
    """Return the name that the average of a parameter has in a checkpoint."""
    return f"{EMA}.{name}"


class Dtype(NamedTuple):
    """A dtype, as torch and files know it."""

    in_torch: str  # its name in torch
    bytes: int  # of one element


# The dtypes that a checkpoint can hold, by their names in safetensors.
DTYPES = {
    "BOOL": Dtype("bool", 1),
    "U8": Dtype("uint8", 1),
    "I8": Dtype("int8", 1),
    "F8_E4M3": Dtype("float8_e4m3fn", 1),
    "F8_E5M2": Dtype("float8_e5m2", 1),
    "I16": Dtype("int16", 2),
    "U16": Dtype("uint16", 2),
    "F16": Dtype("float16", 2),
    "BF16": Dtype("bfloat16", 2),
    "I32": Dtype("int32", 4),
    "U32": Dtype("uint32", 4),
    "F32": Dtype("float32", 4),
    "I64": Dtype("int64", 8),
    "U64": Dtype("uint64", 8),
    "F64": Dtype("float64", 8),
}

# The numbers that strict JSON lacks, by their text in {"$float": TEXT} (`float_to_json`).
FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(eq=False)
class InvalidCheckpoint(Exception):
    """A checkpoint must not be loaded. `why` describes the problem with its file `file`."""

    checkpoint: Checkpoint
    file: str
    why: str

    label: ClassVar[str]  # names the problem in a table
    predicate: ClassVar[str]  # states the problem in a sentence, after the name of the checkpoint

    def __str__(self) -> str:
        return f"{self.checkpoint.name}/{self.file}: {self.why}"

    @property
    def sentence(self) -> str:
        return f"checkpoint {self.checkpoint.name} {self.predicate}: {self.file}: {self.why}"


class Damaged(InvalidCheckpoint):
    """The bytes have changed since they were written."""

    label = "damaged"
    predicate = "is damaged"


class Missing(Damaged):
    """A file is not there. If any rank sees it, it is only late: on NFS a folder may look as it did a minute ago."""


class Unreadable(InvalidCheckpoint):
    """A file cannot be read now, but it may be intact: permission is denied, for example, or a file server is down."""

    label = "unreadable"
    predicate = "cannot be read"


class Forbidden(Unreadable):
    """This user has no permission to read a file. Waiting does not help."""

    label = "forbidden"


class WrongFormat(InvalidCheckpoint):
    """The checkpoint may be intact, but this version cannot read it."""

    label = "wrong format"
    predicate = "was written by another version of Lockstep"


@dataclass(frozen=True)
class File:
    """One rank's file, as it was written."""

    name: str
    size: int
    digest: str


class Piece(NamedTuple):
    """A shard of a tensor, under its name in one file. It begins at `offset` in the full tensor."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint, and where its pieces are."""

    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]  # of all ranks; in one rank's `FileLayout` only the piece of this rank

    @property
    def bytes(self) -> int:
        """The size of the full tensor."""
        return byte_count(self.shape, self.dtype)


def byte_count(shape: Iterable[int], dtype: str) -> int:
    return math.prod(shape) * DTYPES[dtype].bytes


@dataclass(frozen=True)
class Manifest:
    """The contents of `manifest.json`. The fields have the same names in the file, which has no `digest` among them."""

    step: int
    time: float  # seconds since 1970
    lockstep: str  # the version that wrote it
    files: tuple[File, ...]
    tensors: dict[str, TensorEntry]

    # Other names of tied tensors: {name: name of the tensor that is stored}.
    aliases: dict[str, str] = field(default_factory=dict)

    # Everything else that was saved, as `encoding.pack` encodes it.
    values: dict[str, Any] = field(default_factory=dict)

    # The digest of all fields above, by which ranks compare their manifests. It is set when a manifest is read.
    digest: str = field(default="", compare=False)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    # ---- what a run has saved in `values`; empty if something else wrote the checkpoint ----

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the run by key, as a user would type them."""
        return {key: text for key, text in self._value("config").items() if isinstance(text, str)}

    @property
    def frozen_digests(self) -> dict[str, str]:
        """The digests of frozen parameters whose values are not saved (checkpoint.frozen=false)."""
        return self._value("state", "model", "frozen_digests")

    @property
    def has_metrics(self) -> bool:
        """Whether the checkpoint was saved with metrics. A later evaluation does not change the manifest."""
        return self.values.get("has_metrics") is True

    def state_of(self, name: str) -> dict[str, Any]:
        """Return the state of the stateful object `name`, as `encoding.pack` encodes it."""
        return self._value("state", "stateful", name)

    def _value(self, *keys: str) -> dict[str, Any]:
        """Return the dict at this place of the nested values, or {}."""
        value: Any = self.values
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None

        return value if isinstance(value, dict) else {}


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the contents of `manifest.json`, which include a digest of the rest."""
    content = {
        **vars(manifest),
        "files": [vars(file) for file in manifest.files],
        "tensors": tensors_to_json(manifest.tensors),
    }

    del content["digest"]

    # The manifest is written as {"content": ..., "digest": ..., "format": ...}, in the order of `canonical`.
    text = canonical(content)
    digest = xxhash.xxh3_128(text).hexdigest()
    return b'{"content":%b,"digest":"%b","format":%d}' % (text, digest.encode(), FORMAT)


def tensors_to_json(tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return the entries of tensors as JSON can hold them."""
    # Not `dataclasses.asdict`, which copies every number and takes longer than the rest of `encode_manifest`.
    return {
        name: {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "pieces": [piece._asdict() for piece in entry.pieces],
        }
        for name, entry in tensors.items()
    }


def tensors_from_json(encoded: Mapping[str, Any]) -> dict[str, TensorEntry]:
    """Undo `tensors_to_json`, without a check: `manifest_reader` decodes what is not trusted."""
    tensors = {}
    for name, entry in encoded.items():
        pieces = tuple(Piece(p["file"], tuple(p["offset"]), tuple(p["shape"])) for p in entry["pieces"])
        tensors[name] = TensorEntry(entry["dtype"], tuple(entry["shape"]), pieces)

    return tensors


def float_to_json(value: float) -> Any:
    """Return a number as strict JSON, which has no NaN and no infinity."""
    return value if math.isfinite(value) else {"$float": repr(float(value))}


def float_from_json(value: Any) -> Any:
    """Undo `float_to_json`. Return a value that is no number as it is."""
    if isinstance(value, dict) and "$float" in value:
        return FLOATS[value["$float"]]

    return value


def canonical(value: Any) -> bytes:
    """Encode `value` in one fixed way, so that equal values have equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
