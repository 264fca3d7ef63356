"""What this rank writes to a checkpoint: its shards of the state and, on rank 0, everything that is no tensor."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.checkpoint.saving.saver import Contents
from lockstep.checkpoint.state.reshard import replicated_sizes, shards_to_write
from lockstep.checkpoint.state.run_state import CapturedState, RunState, merge_plain_state
from lockstep.checkpoint.state.state_tree import pack
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.runtime.layout import LocalShard


class ContentsCollector:
    """Collects the contents of each checkpoint of a run. Its methods are collective."""

    def __init__(self, state: RunState, runtime: Runtime, log_event: EventLogger):
        self._state = state
        self._runtime = runtime
        self._log_event = log_event
        self._parts_compared = False  # whether the ranks have compared the state of their parts

    def shards(self) -> dict[str, LocalShard]:
        """Return the shards that `collect` would return now, without the rest of the state."""
        return self._shards(self._state.tensors())

    def collect(self, run_values: dict[str, Any]) -> Contents:
        """Return what this rank writes: its shards of the run's state and, on rank 0, the values of the manifest.

        `run_values`: these values, except the state of the run.
        """
        # Rank 0 writes the plain state of all ranks, which may hold different parameters.
        captured = self._state.capture()
        plain_state = captured.plain_state
        if not self._state.same_on_all_ranks:
            plain_state = merge_plain_state(self._runtime.collectives.gather_json(plain_state))

        # Only the first save compares the parts between ranks, because the digests take time.
        if not self._parts_compared:
            self._warn_of_differences(captured)
            self._parts_compared = True

        no_tensors: dict[str, torch.Tensor] = {}
        values = {"state": plain_state, **pack(run_values, "values", no_tensors)}
        assert not no_tensors, f"not in the state: {list(no_tensors)}"
        return Contents(self._shards(captured.tensors), captured.aliases, values, captured.copy_later)

    def _shards(self, tensors: dict[str, torch.Tensor]) -> dict[str, LocalShard]:
        world = self._runtime.world
        sizes = replicated_sizes(tensors)

        # If all ranks hold the same tensors, no exchange is needed.
        same = self._state.same_on_all_ranks
        all_sizes = [sizes] * world.size if same else self._runtime.collectives.gather_json(sizes)
        return shards_to_write(tensors, world.rank, all_sizes, self._state.duplicates)

    def _warn_of_differences(self, captured: CapturedState) -> None:
        """Warn if the state of a part differs between ranks, because only rank 0's is saved."""
        digests = self._runtime.collectives.gather_json(self._state.digest_replicated(captured))
        for name in digests[0]:
            if len({by_name[name] for by_name in digests}) > 1:
                reason = f"the state of {name!r} differs between the ranks: rank 0's is saved"
                self._log_event("warning", reason=reason)
