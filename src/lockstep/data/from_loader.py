"""A torch DataLoader as training or evaluation data: a run takes its parts, and makes the order and batches itself.

The loader itself is never iterated over: its order would depend on the number of ranks, and its position could not be
saved. An option that Lockstep cannot honour is refused, not dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from lockstep.config.settings import typed
from lockstep.data.loader import is_default_collate
from lockstep.data.samplers import Sampled
from lockstep.data.samplers.torch_samplers import covers
from lockstep.data.streams.cursor import has_state
from lockstep.errors import UserError

Collate = Callable[[list[Any]], Any]

# The settings that say how large a batch is. A run has set one of them.
BATCHES = ("global_batch", "local_batch")

# The options of a DataLoader that become settings.
OPTIONS = {
    **dict.fromkeys(BATCHES, "batch_size"),
    "data.shuffle": "shuffle",
    "tail": "drop_last",
    "data.workers": "num_workers",
    "data.prefetch": "prefetch_factor",
    "data.pin_memory": "pin_memory",
}


@dataclass(frozen=True)
class TakenLoader:
    """The parts that a run takes from a DataLoader."""

    data: Any  # the dataset, or Sampled(dataset, sampler)
    collate: Collate
    settings: dict[str, Any]  # dotted keys, for settings that were left at their defaults
    parts: list[str]  # the other parts of the loader that the run uses, in words

    def banner(self, used: set[str], config: Mapping[str, Any]) -> str:
        """Return a line for the banner: what is taken from the loader, and what the run has set otherwise.

        `used` are the keys of `settings` that the run has taken over, and `config` all settings of the run.
        """
        settings = [f"{key}={typed(value)}" for key, value in self.settings.items() if key in used]
        line = f"taken: {', '.join([*self.parts, *settings])}"

        # The user's own settings override those of the loader, and the line says so.
        dropped = []
        for key, value in self.settings.items():
            # The run may give the size of its batches in either way.
            ways = [name for name in (key, *BATCHES) if config.get(name) is not None] if key in BATCHES else []
            own = ways[0] if ways else key
            if key not in used and (own, config.get(own)) != (key, value):
                option = True if key == "tail" else value  # drop_last=True
                dropped.append(f"{OPTIONS[key]}={option} (the run has set {own}={typed(config.get(own))})")

        return f"{line}; not taken: {', '.join(dropped)}" if dropped else line


def take_loader(loader: DataLoader, collate: Collate) -> TakenLoader:
    """Return the parts of a DataLoader, or raise if it does something that a run cannot repeat.

    `collate` is the run's own; the loader's is used if that is the default.
    """
    _refuse_unknown(loader)

    sampler, shuffle = _take_sampler(loader)
    data = loader.dataset if sampler is None else Sampled(loader.dataset, sampler)

    # The banner says which parts of the loader the run uses.
    parts = [f"the dataset ({type(loader.dataset).__name__})"]
    if sampler is not None:
        parts.append(f"the sampler ({type(sampler).__name__})")

    if loader.collate_fn is not default_collate:
        collate = _take_collate(loader, collate)
        parts.append("collate_fn")

    return TakenLoader(data, collate, _settings(loader, shuffle), parts)


def take_evaluation_loader(loader: DataLoader, collate: Collate) -> tuple[Any, Collate, int | None]:
    """Return the dataset of a DataLoader to evaluate on, its collate and its batch size.

    Raise if the loader leaves samples out or repeats them: in an evaluation each counts once. Its order does not
    matter. `collate` is the one for other datasets; the loader's is used if that is the default.
    """
    _refuse_unknown(loader)

    # A stream has no sampler here. `check_data` refuses it, as it does without a loader.
    sampler, _ = _take_sampler(loader)
    if sampler is not None:
        raise UserError(
            f"the DataLoader to evaluate on has a {type(sampler).__name__}",
            "in an evaluation every sample counts once",
            "leave the sampler out; for some of the samples use torch.utils.data.Subset(dataset, ids)",
        )

    if loader.drop_last:
        raise UserError(
            "the DataLoader to evaluate on has drop_last=True",
            "in an evaluation every sample counts once",
            "leave drop_last out",
        )

    if loader.collate_fn is not default_collate:
        collate = _take_collate(loader, collate)

    return loader.dataset, collate, loader.batch_size


def is_stateful_stream(data: Any) -> bool:
    """Return whether it is torchdata's StatefulDataLoader without batches: a stream of samples, with a state."""
    return isinstance(data, DataLoader) and has_state(data) and data.batch_size is None and data.batch_sampler is None


def _settings(loader: DataLoader, shuffle: bool | None) -> dict[str, Any]:
    """Return the loader's options as settings. An option at torch's default sets nothing."""
    # A DistributedSampler divides the dataset among the ranks, and then a batch belongs to one rank.
    batches = loader.batch_sampler
    assert isinstance(batches, BatchSampler)
    per_rank = isinstance(batches.sampler, DistributedSampler)
    settings: dict[str, Any] = {"local_batch" if per_rank else "global_batch": batches.batch_size}

    # Only options that the loader was given: the settings may say the rest.
    if shuffle is not None:
        settings["data.shuffle"] = shuffle
    if batches.drop_last:
        settings["tail"] = "drop"
    if loader.num_workers:
        settings |= {"data.workers": loader.num_workers, "data.prefetch": loader.prefetch_factor}
    if loader.pin_memory:
        settings["data.pin_memory"] = True

    return settings


def _take_sampler(loader: DataLoader) -> tuple[Any, bool | None]:
    """Return (sampler, None), or (None, whether to shuffle) for a plain order; for a stream (None, None)."""
    # A stream has no order to choose: torch gives it a sampler that yields None.
    if isinstance(loader.dataset, IterableDataset):
        return None, None

    assert isinstance(loader.batch_sampler, BatchSampler)
    sampler: Any = loader.batch_sampler.sampler
    dataset: Any = loader.dataset

    # A sampler over another number of samples is kept: `as_sampler` later refuses it, or lists its ids.
    if not covers(sampler, len(dataset)):
        return sampler, None

    # Plain orders are Lockstep's own, which can be resumed anywhere.
    if type(sampler) is SequentialSampler:
        return None, False
    if type(sampler) is DistributedSampler:
        return None, sampler.shuffle
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        return None, True

    return sampler, None


def _take_collate(loader: DataLoader, collate: Collate) -> Collate:
    """Return the loader's collate_fn. Raise if the run has a collate of its own."""
    if not is_default_collate(collate):
        raise UserError(
            "the DataLoader has a collate_fn, and the run has a collate of its own",
            "only one of them can make the batches",
            "leave collate_fn out of the DataLoader, or the other: Task.collate, or the one given with the data",
        )

    return loader.collate_fn


def _refuse_unknown(loader: DataLoader) -> None:
    """Refuse a loader with code that a run would not call."""
    # A subclass with its own __iter__ would do something between dataset and batch that a run does not repeat.
    kind = type(loader)
    advice = "return its dataset, and set global_batch, data.shuffle and data.workers: see docs/data.md"
    if kind.__iter__ is not DataLoader.__iter__:
        raise UserError(
            f"the data is a {kind.__name__}, a DataLoader that iterates in its own way",
            "a run reads samples by their ids, and makes the batches itself",
            advice,
        )

    if loader.batch_sampler is None:
        raise UserError(
            "the DataLoader has batch_size=None, so it passes on what its dataset yields",
            "a run makes the batches itself, out of single samples",
            "return a dataset of single samples, and set global_batch",
        )

    if type(loader.batch_sampler) is not BatchSampler:
        raise UserError(
            f"the DataLoader's batch_sampler is a {type(loader.batch_sampler).__name__}, which makes batches in its "
            "own way",
            "a run divides every step into batches by global_batch and micro_batch, on any number of ranks",
            "return Sampled(dataset, sampler), where the sampler gives single samples; BucketedSampler of "
            "lockstep.data.samplers gives batches of similar lengths",
        )

    # At torch's defaults these are None, or 0.
    for name, instead in UNSUPPORTED.items():
        if getattr(loader, name, None):
            raise UserError(f"the DataLoader has {name}, which a run would not use", "", instead)


# Options of a DataLoader that change which samples are read, or how -> the advice to the user.
UNSUPPORTED = {
    "worker_init_fn": "leave it out: samples are seeded one by one; prepare other things when a process reads its "
    "first sample, in __getitem__",
    "multiprocessing_context": "leave it out: worker processes are forked",
    "timeout": "leave it out: a run that hangs is found and restarted (hang.step)",
}
