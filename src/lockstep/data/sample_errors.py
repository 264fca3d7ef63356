"""Errors of a dataset or of its collate, with the sample that they come from and the way out."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.errors import UserError, some_names

# What torch says in a worker process, which is forked from a rank that has opened the GPU: if it opens it again, and if
# it computes with a tensor that is there.
_IN_A_FORK = re.compile("re-initialize CUDA in forked subprocess|CUDA error: initialization error")


@dataclass(frozen=True)
class Refusal:
    """A UserError that travels from a worker process to its rank: torch would turn it into a RuntimeError."""

    texts: tuple[str, str, str]

    @staticmethod
    def of(error: UserError) -> Refusal:
        return Refusal((error.problem, error.found, error.fix))


def unless_refused(batch: Any) -> Any:
    """Return the batch, or raise the error that a worker process sent in its place."""
    if isinstance(batch, Refusal):
        raise UserError(*batch.texts)
    return batch


def is_empty(batch: Any) -> bool:
    """Whether a collate has left nothing: None, or tensors that all have length 0."""
    lengths = list(_lengths(batch))
    return batch is None or (bool(lengths) and not any(lengths))


def _lengths(batch: Any) -> Any:
    if isinstance(batch, Tensor) and batch.dim():
        yield len(batch)
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from _lengths(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _lengths(value)


def name_samples(error: Exception, ids: Sequence[int], where: str) -> None:
    """Add to an error of the user's code which samples it comes from. Its type and its traceback stay."""
    which = f"sample {ids[0]}" if len(ids) == 1 else f"samples {some_names([str(i) for i in ids])}"
    fix = "fix it in the dataset, or leave it out: torch.utils.data.Subset(dataset, ids)"
    error.add_note(f"lockstep: this is {which} {where}; {fix}")


def explain_collate(error: Exception, samples: Sequence[Any], ids: Sequence[int], where: str, plain: bool) -> Exception:
    """Return what to raise for an error of collate. `plain`: it is torch's own, which needs samples of one form."""
    said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    missing = [index for index, sample in zip(ids, samples, strict=True) if sample is None]
    if missing:
        return UserError(
            f"the dataset returned None for sample {missing[0]} {where}, and collate cannot make a batch with it",
            said,
            "leave such samples out of the dataset; or drop them in Task.collate, and return None there if none is "
            "left: that micro-batch then has weight 0",
        )

    outlines = [_outline(sample) for sample in samples]
    odd = next((place for place, outline in enumerate(outlines) if outline != outlines[0]), None)
    if plain and odd is not None:
        return UserError(
            f"sample {ids[odd]} has a different structure from sample {ids[0]} {where}, so they do not fit into one "
            "batch",
            f"{outlines[odd]} and {outlines[0]}; {said}",
            "give all samples one form in the dataset, by padding for instance; or write Task.collate(samples)",
        )

    name_samples(error, list(ids), where)
    return error


def _outline(sample: Any) -> str:
    """Return the form of a sample: its containers, the shapes of its tensors, and the types of the rest."""
    if isinstance(sample, Tensor | np.ndarray):
        return f"{sample.dtype} {tuple(sample.shape)}"
    if isinstance(sample, dict):
        return "{" + ", ".join(f"{key}: {_outline(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, list | tuple):
        return f"{type(sample).__name__} of {len(sample)} ({', '.join(map(_outline, sample))})"
    return type(sample).__name__


class _WithoutTensors(pickle.Pickler):
    """Finds what cannot be pickled. Tensors travel in shared memory, so they are only looked at."""

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        if obj.requires_grad and not obj.is_leaf:
            raise TypeError("a tensor that was computed with gradients")
        if obj.device.type != "cpu":
            raise _on_device(f"the dataset or collate returned a tensor on {obj.device}")
        return "tensor"


class _Nowhere:
    def write(self, data: bytes) -> int:
        return len(data)


def batch_to_send(read: Callable[[], Any], ids: Sequence[int], where: str, check: bool) -> Any:
    """Return what a worker process sends: the batch that `read` returns, or a Refusal. `check`: `check_sendable`."""
    try:
        batch = read()
        if check:
            check_sendable(batch, ids, where)
    except UserError as error:
        return Refusal.of(error)
    except RuntimeError as error:
        if not _IN_A_FORK.search(str(error)):
            raise
        which = f"samples {some_names([str(i) for i in ids])} {where}: " if ids else ""
        return Refusal.of(_on_device(which + str(error).splitlines()[0]))
    return batch


def _on_device(found: str) -> UserError:
    return UserError(
        "a worker process cannot compute on a GPU, nor send what is on one",
        found,
        "leave tensors on the CPU in the dataset and in collate: Lockstep copies every micro-batch to the GPU, one "
        "ahead; or type data.workers=0",
    )


def check_sendable(batch: Any, ids: Sequence[int], where: str) -> None:
    """Check that a worker process can send the batch: otherwise it would be lost, and its rank would wait for it."""
    try:
        _WithoutTensors(_Nowhere()).dump(batch)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"a worker process cannot send its batch to the rank: {type(error).__name__}: {error}",
            f"samples {some_names([str(i) for i in ids])} {where}, a {type(batch).__name__}",
            "return tensors (detached), numbers, text, or lists and dicts of them from the dataset and from collate; "
            "or type data.workers=0",
        ) from error
