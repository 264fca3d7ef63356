"""A trainer's state in a folder, in the core's format: committed by one rename, every byte checked when it is read."""

from __future__ import annotations

import secrets
from pathlib import Path

from lockstep.checkpoint.load import CheckpointReader, find
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.run_state import RunState
from lockstep.checkpoint.saver import Saver, Slice
from lockstep.checkpoint.storage import Store
from lockstep.errors import UserError
from lockstep.launch.run_dir import is_checkpoint
from lockstep.runtime.context import Runtime

KEEP = 3  # newest checkpoints


def save_state(state: RunState, runtime: Runtime, folder: Path, writer: int) -> Path:
    """One rank writes; the others wait, and hear of what went wrong."""
    found: list[str | None] = [None, None]
    if runtime.world.rank == writer:
        found = _write(state, Store(folder / "checkpoints"), runtime.world.size)
    path, error = runtime.collectives.gather_json(found)[writer]
    if path is None:
        raise UserError(f"save_checkpoint({str(folder)!r})", str(error), "make room, or choose another folder")
    return Path(path)


def _write(state: RunState, store: Store, world: int) -> list[str | None]:
    token = secrets.token_hex(4)
    store.claim(token)
    store.clean(token)
    tensors, aliases, values = state.capture()
    slices = [Slice.whole(name, tensor) for name, tensor in tensors.items()]
    saver = Saver(store, 0, 1, token, Retention(KEEP), asynchronous=False)
    saver.save(state.stepper.counters.step, slices, aliases, {"state": values, "world": world})
    [report] = saver.wait()
    saver.close()
    return [str(report.path) if report.path else None, report.error]


def load_state(state: RunState, runtime: Runtime, path: Path) -> int:
    only = path if is_checkpoint(path) else None
    store = Store(path.parent if only else path / "checkpoints")
    found = find(store, runtime.world.rank, runtime.world.size, runtime.collectives.gather_json, only)
    if found is None:
        raise UserError(
            f"load_checkpoint({str(path)!r})", "no checkpoint there", "give the folder that save_checkpoint was given"
        )
    state.restore(CheckpointReader(found.path, found.manifest), found.manifest.values["state"])
    runtime.collectives.gather_json(None)  # nobody saves there before all have read
    return state.stepper.counters.step
