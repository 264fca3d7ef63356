"""The base of all sources over a dataset, map-style or a stream, and the options that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.config import DataConfig
from lockstep.data.transfer import Transfer
from lockstep.data.worker_process import LoaderBatches
from lockstep.runtime.context import EventLogger
from lockstep.runtime.world import World
from lockstep.task import BatchSource, MicroBatch


@dataclass(frozen=True)
class SourceOptions:
    """Options of a source over a dataset: the size of a step, the configuration, and this rank."""

    global_batch: int
    micro_batch_size: int
    tail: str  # how the last window of an epoch is treated, see `next_window`
    config: DataConfig
    seed: int
    data_world: World  # this rank among the ranks that train on different samples
    device: torch.device

    # Functions that a source calls.
    gather_states: Callable[[Any], list[Any]]  # returns the states of all ranks, by rank; collective
    log_event: EventLogger
    beat: Callable[[], None]  # tells the watchdog that this rank is making progress
    check_state: Callable[[Any], None]  # raises if a checkpoint cannot hold this state of a stream

    round_robin: bool = False  # micro-batches are assigned to ranks round-robin, not in contiguous ranges
    collective_forwards: bool = False  # forwards contain collectives: all ranks must run the same number of them
    exact: bool = False
    watches_dataset: bool = True  # a change of the dataset that worker processes do not see is an error

    @property
    def global_num_micro_batches(self) -> int:
        """The micro-batches of a full global batch, on all ranks together."""
        return -(-self.global_batch // self.micro_batch_size)

    @property
    def pins_memory(self) -> bool:
        """True if batches are put into pinned memory, from which a copy to a GPU does not block the host."""
        pin_memory = self.config.pin_memory
        if pin_memory == "auto":
            return self.device.type == "cuda"

        # Without an accelerator pinning has no use, and torch would warn about it.
        return pin_memory and (self.device.type != "cpu" or torch.accelerator.is_available())


class DatasetSource(BatchSource):
    """A source that reads the user's dataset.

    The first step of a run compares what ranks and worker processes have read. `same_on_all_ranks` and `read_again`
    are for that.
    """

    # The first sample of a stream, or the names of its files; None if it is not known.
    same_on_all_ranks: Any = None

    _loader_batches: Iterator[Any] | None = None  # set while worker processes read; `close` ends them

    def __init__(self, collate: Callable[[list[Any]], Any], options: SourceOptions):
        self.collate = collate
        self.options = options
        # With worker processes, the DataLoader pins the batches.
        self._transfer = Transfer(options.device, options.pins_memory and not options.config.workers)
        self._needs_transfer = options.device.type != "cpu"  # on a CPU a batch is there as soon as it has been read

    def read_again(self, micro: MicroBatch) -> Any:
        """Read a micro-batch again, in a process other than the first time. None: it need not be the same."""
        return None

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if isinstance(self._loader_batches, LoaderBatches):
            self._loader_batches.close()

        self._loader_batches = None
