"""What every source over a dataset must know."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep.config import DataConfig
from lockstep.runtime.world import World


@dataclass(frozen=True)
class SourceOptions:
    """What a source over a dataset must know: the shape of a step, the configuration, and this rank."""

    global_batch: int
    micro_batch: int
    tail: str  # what happens to the last window of an epoch, see `next_window`
    config: DataConfig
    seed: int
    data_world: World  # the ranks that train on different samples, and which of them this one is
    device: torch.device
    interleaved: bool = False  # ranks take micro-batches in turns, instead of a range each
    collective_forwards: bool = False  # all ranks run the same number of micro-batches: some of weight 0 are added
    exact: bool = False

    @property
    def pins_memory(self) -> bool:
        pin_memory = self.config.pin_memory
        return self.device.type == "cuda" if pin_memory == "auto" else pin_memory
