"""Opens the source over the training data of a task, and refuses settings that do not fit the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset

from lockstep.config import DataConfig
from lockstep.data.dataset_source import SourceOptions
from lockstep.data.length_balance import check_lengths
from lockstep.data.loader import SampleReader
from lockstep.data.map_source import MapSource
from lockstep.data.samplers import Sampled, make_sampler
from lockstep.data.samplers.torch_samplers import bind_sampler
from lockstep.data.streams.cursor import has_state
from lockstep.data.streams.epochs import EpochSource
from lockstep.data.streams.resumable import ResumableStreamSource
from lockstep.data.streams.shards import Shards
from lockstep.data.streams.strided import StridedStreamSource
from lockstep.data.worker_copies import check_no_connection
from lockstep.errors import UserError
from lockstep.task import BatchSource

Collate = Callable[[list[Any]], Any]


def open_source(data: Any, collate: Collate, options: SourceOptions) -> BatchSource:
    """Return a source over `data`, the return value of `Task.data()`.

    `data` is a dataset with `__getitem__`, optionally with a sampler (`Sampled`), a stream, or already a source.
    """
    if isinstance(data, BatchSource):
        _refuse_balance(data, options.config)
        _refuse_reading(data, options.config)
        return data

    _refuse_other_sources(data)
    if isinstance(data, Shards):
        return _open_shards(data, collate, options)

    # A plain dataset, one with its own sampler, or a stream.
    data = bind_sampler(data, options.seed)
    dataset = data.dataset if isinstance(data, Sampled) else data
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    _check_readable(dataset, is_stream, options.config)
    return _open_stream(data, collate, options) if is_stream else _open_map(data, collate, options)


def _open_map(data: Any, collate: Collate, options: SourceOptions) -> MapSource:
    """Open a dataset with `__getitem__`, in the order of its sampler if it has one."""
    config = options.config
    dataset, sampler = (data.dataset, data.sampler) if isinstance(data, Sampled) else (data, None)

    # A setting that the sampler would overrule is refused, not ignored.
    if sampler is None:
        sampler = make_sampler(len(dataset), options.seed, config.shuffle)
    elif not config.shuffle:
        raise UserError(
            f"data.shuffle=false has no effect: the training data has a sampler, {type(sampler).__name__}",
            "the order is the sampler's",
            "leave data.shuffle out; or return the dataset without the sampler",
        )

    # Lengths are checked here, before the first step.
    lengths = None
    if config.balance == "length":
        lengths = check_lengths(data.known_lengths if isinstance(data, Sampled) else None, len(dataset))

    reader = SampleReader(dataset, collate, options.seed, config.seed_samples)
    return MapSource(reader, sampler, options, lengths)


def _open_stream(data: Any, collate: Collate, options: SourceOptions) -> EpochSource:
    """Open a stream: with an exact resume if it has a state, or if it may be read again up to its position."""
    config = options.config
    if isinstance(data, Sampled):
        raise UserError(
            f"a sampler needs a dataset with __getitem__; it got a {type(data.dataset).__name__}",
            "",
            "return the stream alone, or a dataset with __getitem__ and __len__",
        )

    _refuse_balance(data, config)
    if config.workers and getattr(data, "num_workers", 0):
        raise UserError(
            f"data.workers={config.workers} and num_workers={data.num_workers} of the "
            f"{type(data).__name__} would nest worker processes",
            "a worker process cannot start worker processes of its own",
            "set data.workers=0, or leave num_workers out of the loader",
        )

    # A stream with a state is a single virtual shard.
    if config.resume == "reread" or (has_state(data) and config.sharding == "stride"):
        return _open_shards(Shards([data]), collate, options)

    return StridedStreamSource(data, collate, options)


def _open_shards(shards: Shards, collate: Collate, options: SourceOptions) -> ResumableStreamSource:
    """Open a stream that resumes exactly."""
    _refuse_balance(shards, options.config)
    if options.config.sharding == "own":
        raise UserError(
            "data.sharding=own cannot be used with a stream that resumes exactly",
            "a stream that assigns its samples to ranks itself has a different position on each rank",
            "leave data.sharding out; or leave data.resume out, and return an iterable dataset instead of Shards",
        )

    return ResumableStreamSource(shards, collate, options)


def _refuse_other_sources(data: Any) -> None:
    """Refuse an object that looks like a source but lacks the defaults of BatchSource."""
    if hasattr(data, "take") and hasattr(data, "commit"):
        raise UserError(
            f"a batch source must derive from lockstep.BatchSource; {type(data).__name__} does not",
            "the engine also calls methods for which that class has defaults",
            f"write class {type(data).__name__}(lockstep.BatchSource)",
        )


def _refuse_balance(data: Any, config: DataConfig) -> None:
    """Refuse to balance the lengths of a stream, which are not known in advance."""
    if config.balance != "none":
        raise UserError(
            f"data.balance={config.balance} needs a dataset with __getitem__; the training data is a "
            f"{type(data).__name__}",
            "a step is divided by the lengths of its samples, before they are read",
            "leave data.balance out, or pack the stream (lockstep.data.packing)",
        )


def _refuse_reading(data: BatchSource, config: DataConfig) -> None:
    """Refuse settings that say how samples are read: a user's source reads them itself."""
    defaults = DataConfig()
    for key in ("shuffle", "workers", "resume", "sharding"):
        value = getattr(config, key)
        if value != getattr(defaults, key):
            raise UserError(
                f"data.{key}={str(value).lower()} has no effect: the training data is a batch source, "
                f"{type(data).__name__}",
                "a source chooses and reads its samples itself",
                f"leave data.{key} out",
            )


def check_is_data(data: Any) -> None:
    """Refuse None, the result of a function without `return`: it would be taken for a stream without a length."""
    if data is None:
        raise UserError(
            "the training data is None, not a dataset", "", "pass a dataset to run.steps, or return one from data()"
        )


def _check_readable(data: Any, is_stream: bool, config: DataConfig) -> None:
    """Refuse data that cannot be read, and settings that are for other kinds of data."""
    if not hasattr(data, "__iter__" if is_stream else "__len__"):
        problem = "can neither be indexed nor iterated over" if is_stream else "has no __len__"
        raise UserError(
            f"the training data cannot be read: a {type(data).__name__} {problem}",
            "",
            "return a torch Dataset, a list, or an IterableDataset",
        )

    # Map-style datasets are checked where their workers start (`read_all`).
    if config.workers and is_stream:
        check_no_connection(data)

    if config.resume == "reread" and not is_stream:
        raise UserError(
            f"data.resume=reread cannot be used with a {type(data).__name__} with __getitem__",
            "it is for streams; a dataset with __getitem__ resumes at the next sample without reading",
            "leave data.resume out",
        )

    if config.sharding == "own" and not is_stream:
        raise UserError(
            f"data.sharding=own cannot be used with a {type(data).__name__} with __getitem__",
            "it is for a stream that assigns its samples to the ranks itself",
            "return all samples on every rank, and leave data.sharding out",
        )
