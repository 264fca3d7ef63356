"""What this rank writes to a checkpoint: its shards of the state and, on rank 0, everything that is no tensor."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.checkpoint.saving.context import Contents
from lockstep.checkpoint.state.reshard import replicated_sizes, shards_to_write
from lockstep.checkpoint.state.run_state import CapturedState, RunState, merge_json_state
from lockstep.checkpoint.state.state_tree import CapturedTensor, pack
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.runtime.layout import LocalShard


def collect(state: RunState, runtime: Runtime, log_event: EventLogger, run_values: dict[str, Any]) -> Contents:
    """Return what this rank writes: its shards of the run's state and, on rank 0, the values of the manifest.

    Collective. `run_values`: these values, except the state of the run and of its loop.
    """
    # Rank 0 writes the JSON state of all ranks, which may hold different parameters.
    captured = state.capture()
    json_state = captured.json_state
    if not state.same_on_all_ranks:
        json_state = merge_json_state(runtime.collectives.gather_json(json_state))

    # Only the first save compares stateful objects between ranks, because the digests take time.
    if not state.ranks_compared:
        _warn_of_differences(state, captured, runtime, log_event)
        state.ranks_compared = True

    no_tensors: dict[str, torch.Tensor] = {}
    values = {"state": json_state, **pack({**run_values, "loop": state.loop_state()}, "values", no_tensors)}
    assert not no_tensors, f"not in the state: {list(no_tensors)}"

    later = {name for name, tensor in captured.tensors.items() if tensor.copy_later}
    return Contents(shards_of(captured.tensors, state, runtime), captured.aliases, values, later)


def shards_of(tensors: dict[str, CapturedTensor], state: RunState, runtime: Runtime) -> dict[str, LocalShard]:
    """Return what this rank writes of the tensors that all ranks have captured from `state`. Collective."""
    sizes = replicated_sizes(tensors)

    # If all ranks hold the same tensors, no exchange is needed.
    same = state.same_on_all_ranks
    all_sizes = [sizes] * runtime.world.size if same else runtime.collectives.gather_json(sizes)
    return shards_to_write(tensors, runtime.world.rank, all_sizes, state.duplicates)


def _warn_of_differences(state: RunState, captured: CapturedState, runtime: Runtime, log_event: EventLogger) -> None:
    """Warn if the state of an object differs between ranks, because only rank 0's is saved."""
    digests = runtime.collectives.gather_json(state.digest_replicated(captured))
    for name in digests[0]:
        if len({by_name[name] for by_name in digests}) > 1:
            log_event("warning", reason=f"the state of {name!r} differs between the ranks: rank 0's is saved")
