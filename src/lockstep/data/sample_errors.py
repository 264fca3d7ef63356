"""Errors of a dataset or of collate: they name the samples and say what to do.

A traceback from a worker process names a line of the user's dataset, but not the sample. These errors do, and they say
which batch it was in, so that the sample can be read again by hand.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.errors import UserError, some_names

# torch's errors if a forked worker process uses the GPU that its rank has initialised: for a new tensor there, and for
# a computation with an existing one.
_IN_A_FORK = re.compile("re-initialize CUDA in forked subprocess|CUDA error: initialization error")


LEAVE_OUT = "fix it in the dataset, or leave it out: torch.utils.data.Subset(dataset, ids)"


def name_samples(error: Exception, ids: Sequence[int], where: str, fix: str = LEAVE_OUT) -> None:
    """Add a note to an error of the user's code that names the samples. Its type and traceback stay the same."""
    which = f"sample {ids[0]}" if len(ids) == 1 else f"samples {some_names([str(i) for i in ids])}"
    error.add_note(f"lockstep: this is {which} {where}; {fix}")


def explain_collate_error(
    error: Exception, samples: Sequence[Any], ids: Sequence[int], where: str, is_default: bool
) -> Exception:
    """Return the error to raise for an error in collate: a UserError if the cause is known, else `error` itself.

    `is_default`: it is torch's default_collate, which needs samples of the same structure.
    """
    message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"

    # A sample may be missing altogether.
    missing = [index for index, sample in zip(ids, samples, strict=True) if sample is None]
    if missing:
        return UserError(
            f"the dataset returned None for sample {missing[0]} {where}, and collate cannot make a batch with it",
            message,
            "leave such samples out of the dataset; or drop them in Task.collate, and return None there if none is "
            "left: that micro-batch then has weight 0",
        )

    # The default collate needs samples of one structure.
    structures = [_structure(sample) for sample in samples]
    odd = next((position for position, structure in enumerate(structures) if structure != structures[0]), None)
    if is_default and odd is not None:
        return UserError(
            f"sample {ids[odd]} has a different structure from sample {ids[0]} {where}, so they do not fit into one "
            "batch",
            f"{structures[odd]} and {structures[0]}; {message}",
            "give all samples the same structure in the dataset, for example by padding; or write "
            "Task.collate(samples), or in your own loop run.steps(dataset, collate)",
        )

    # Otherwise the error stays as it is, with the samples of the batch in a note.
    name_samples(error, list(ids), where)
    return error


def _structure(sample: Any) -> str:
    """Return text about a sample: its containers, the shapes of its tensors, and the types of everything else."""
    if isinstance(sample, Tensor | np.ndarray):
        return f"{sample.dtype} {tuple(sample.shape)}"
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {_structure(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, list | tuple):
        return f"{type(sample).__name__} of {len(sample)} ({', '.join(map(_structure, sample))})"
    return type(sample).__name__


class _SendCheck(pickle.Pickler):
    """Raises for objects that cannot be pickled. Tensors are sent in shared memory, so they are only checked."""

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        if obj.requires_grad and not obj.is_leaf:
            raise TypeError("a tensor that was computed with gradients")
        if obj.device.type != "cpu":
            raise _on_device(f"the dataset or collate returned a tensor on {obj.device}")
        return "tensor"


def batch_to_send(read: Callable[[], Any], ids: Sequence[int], where: str, check: bool) -> Any:
    """Return the batch from `read`, or a UserError to send in its place. `check`: also check that it can be sent.

    An error that is raised instead would reach the rank as a RuntimeError of torch.
    """
    try:
        batch = read()
        if check:
            check_sendable(batch, ids, where)
    except UserError as error:
        # Only its texts: a subclass of the user's, or other attributes of the error, may not survive pickling.
        return UserError(error.problem, error.found, error.fix)
    except RuntimeError as error:
        if not _IN_A_FORK.search(str(error)):
            raise

        which = f"samples {some_names([str(i) for i in ids])} {where}: " if ids else ""
        return _on_device(which + str(error).splitlines()[0])

    return batch


def _on_device(found: str) -> UserError:
    """Return the error for tensors on a GPU in a worker process."""
    return UserError(
        "a worker process can neither compute on a GPU nor send tensors that are on one",
        found,
        "leave tensors on the CPU in the dataset and in collate: Lockstep copies every micro-batch to the GPU, one "
        "ahead; or set data.workers=0",
    )


def check_sendable(batch: Any, ids: Sequence[int], where: str) -> None:
    """Check that a worker process can send the batch. Otherwise it would be lost, and the rank would wait forever."""
    try:
        # Only whether it can be pickled matters, not the bytes.
        with open(os.devnull, "wb") as nowhere:
            _SendCheck(nowhere).dump(batch)
    except UserError:
        raise
    except Exception as error:  # pickling calls the user's code
        raise UserError(
            f"a worker process cannot send its batch to the rank: {type(error).__name__}: {error}",
            f"samples {some_names([str(i) for i in ids])} {where}, a {type(batch).__name__}",
            "return tensors (detached), numbers, text, or lists and dicts of them from the dataset and from collate; "
            "or set data.workers=0",
        ) from error
