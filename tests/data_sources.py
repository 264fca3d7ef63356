"""Options of a source that is opened without a run around it."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.config import DataConfig
from lockstep.data.dataset_source import SourceOptions
from lockstep.runtime.context import log_nothing
from lockstep.runtime.world import World


def source_options(
    global_batch: int,
    micro_batch_size: int,
    tail: str = "short",
    config: DataConfig | None = None,
    world: World | None = None,
    device: str | torch.device = "cpu",
    **others: Any,
) -> SourceOptions:
    """Return options of this rank alone unless a world is given. States are gathered from no other rank."""
    calls = {
        "gather_states": lambda state: [state],
        "log_event": log_nothing,
        "beat": lambda: None,
        "check_state": lambda state: None,
    }
    return SourceOptions(
        global_batch=global_batch,
        micro_batch_size=micro_batch_size,
        tail=tail,
        config=config or DataConfig(),
        seed=0,
        data_world=world or World(),
        device=torch.device(device),
        **(calls | others),
    )
