"""Ids beyond the rows of an embedding, and labels beyond the classes: torch's own errors do not name the sample.

On a CPU torch raises an IndexError, and the frames of its traceback hold the ids. On a GPU a kernel fails later, with
an error that holds nothing, and no tensor on the GPU can be read any more: the samples of the step are then read again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.errors import DeviceLostError, UserError, some_names

if TYPE_CHECKING:
    from lockstep.engine.run import Run
    from lockstep.engine.setup import RunBuilder

ON_CPU = re.compile(r"index out of range in self|Target -?\d+ is out of bounds")
ON_GPU = "device-side assert triggered"
LATE_STEPS = 2  # an error of a kernel shows when the host next waits for the GPU
IGNORED = -100  # the label that torch's losses ignore by default

BY_TOKENIZER = (
    "use the tokenizer that belongs to the model; or give the embedding more rows (with Hugging Face: "
    "model.resize_token_embeddings(len(tokenizer)))"
)
BY_CLASSES = "give the model's last layer an output for each label, or count the labels from 0"
NOT_FOR_MODEL = f"ids below 0 are for labels only ({IGNORED} is ignored there): pass the model ids of tokens"


@dataclass(frozen=True)
class Lookup:
    """A lookup that went wrong: `value` is not one of `count` rows or classes."""

    value: int
    count: int
    what: str  # "token id", "label"
    where: str  # what has the rows

    @property
    def fix(self) -> str:
        if self.what == "label":
            return BY_CLASSES

        return NOT_FOR_MODEL if self.value < 0 else BY_TOKENIZER


def explain_index(error: Exception, builder: RunBuilder) -> UserError | None:
    """Return an error that names the sample and its id, or None if this is about something else."""
    on_cpu = isinstance(error, IndexError) and ON_CPU.search(str(error))
    if not on_cpu and ON_GPU not in str(error):
        return None

    run = builder.run
    if run is None:
        return None

    if not on_cpu:
        return _on_gpu(error, run)

    lookup = next(_lookups(error, run.driver.model), None)
    return _named(UserError, lookup, _sample_with(run, lookup.value), error) if lookup else None


def _named(kind: type[UserError], lookup: Lookup, sample: str, error: Exception) -> UserError:
    """Return the error for a lookup, of the class `kind`. `sample` says which sample has the value."""
    last = lookup.count - 1
    return kind(
        f"{lookup.what} {lookup.value} is out of range: {lookup.where}, from 0 to {last}",
        f"{sample}; {type(error).__name__}: {str(error).splitlines()[0]}",
        lookup.fix,
    )


# ---- on a CPU ----


def _lookups(error: Exception, model: nn.Module) -> Iterator[Lookup]:
    """Yield what torch's functions in the traceback looked up, and did not find."""
    names = {id(p): name for name, p in model.named_parameters()}
    trace = error.__traceback__

    # From the outermost frame inwards. The arguments of torch's functions are the locals of their frames.
    while trace is not None:
        code, values = trace.tb_frame.f_code, trace.tb_frame.f_locals
        trace = trace.tb_next
        if not code.co_filename.endswith("functional.py"):
            continue

        if code.co_name == "embedding":
            weight = values["weight"]
            rows = f"{names.get(id(weight), 'the embedding')} has {len(weight)} rows"
            yield from _outside(values["input"], len(weight), "token id", rows)
        elif code.co_name == "cross_entropy":
            # The input is (C,), (N, C) or (N, C, ...).
            classes = values["input"].shape[min(1, values["input"].dim() - 1)]
            labels = values["target"][values["target"] != values["ignore_index"]]
            yield from _outside(labels, classes, "label", f"the loss has {classes} classes")


def _outside(values: Tensor, count: int, what: str, where: str) -> Iterator[Lookup]:
    """Yield the first of `values`, a tensor of any shape, that is below 0 or not below `count`."""
    outside = values[(values < 0) | (values >= count)]
    if outside.numel():
        yield Lookup(int(outside.flatten()[0]), count, what, where)


def _sample_with(run: Run, value: int) -> str:
    """Return text about the sample of the current micro-batch that has this id."""
    micro = run.progress.micro
    if micro is None or not len(micro.ids):
        return "the number of its sample is not known here"

    # Ids that collate or the model made are in no sample.
    ids = [int(i) for i in micro.ids]
    for index, numbers in _numbers(run, micro.epoch, ids):
        if (numbers == value).any():
            return f"sample {index} in epoch {micro.epoch} has it"

    return f"one of the samples {some_names([str(i) for i in ids])} in epoch {micro.epoch} has it"


# ---- on a GPU ----


def _on_gpu(error: Exception, run: Run) -> UserError:
    """Look for ids beyond the largest embedding in the last samples, which are read again on the CPU."""
    # Kernels of different embeddings fail alike. Ids beyond the largest one are wrong for each of them.
    modules = run.driver.model.named_modules()
    tables = [(module.num_embeddings, name) for name, module in modules if isinstance(module, nn.Embedding)]
    rows, name = max(tables, default=(0, ""))

    # Without an embedding there is nothing to look for, and only a source with an order can read samples again.
    order = run.source.step_order if rows else None
    recent = order.recent_ids(LATE_STEPS * run.plan.global_batch) if order else ()
    for epoch, ids in recent:
        for index, numbers in _numbers(run, epoch, ids):
            outside = numbers[(numbers >= rows) | ((numbers < 0) & (numbers != IGNORED))]

            if len(outside):
                lookup = Lookup(int(outside[0]), rows, "token id", f"{name}.weight has {rows} rows")
                return _named(DeviceLostError, lookup, f"sample {index} in epoch {epoch} has it", error)

    return DeviceLostError(
        "a kernel on the GPU stopped at an index that is out of range: a token id, a position or a label",
        str(error).splitlines()[0],
        "train a few steps with device=cpu steps=5: the error then names the line, and the id if it is one",
    )


def _numbers(run: Run, epoch: int, ids: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the id of each sample and all integers in it. Samples that cannot be read again have none."""
    try:
        samples: Sequence[Any] | None = run.source.read_samples(epoch, ids)
    except Exception:  # the dataset is the user's code
        return

    if samples is None:
        return

    # An empty array first, because np.concatenate refuses an empty list.
    for index, sample in zip(ids, samples, strict=True):
        arrays = [np.asarray(leaf).ravel() for leaf in tree_leaves(sample) if _is_whole(leaf)]
        yield int(index), np.concatenate([np.empty(0, dtype=np.int64), *arrays])


def _is_whole(leaf: Any) -> bool:
    """Return whether a part of a sample may hold ids: whole numbers on the CPU, and no booleans."""
    if isinstance(leaf, Tensor):
        return leaf.dtype in (torch.int64, torch.int32, torch.int16) and leaf.device.type == "cpu"

    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind == "i"

    return isinstance(leaf, int) and not isinstance(leaf, bool)
