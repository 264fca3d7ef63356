"""What compiling has cost and gained on this machine: a small JSON file in the user's cache folder.

It is a hint, never needed: a file that is missing, damaged or cannot be written changes only how well a run estimates.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from torch import nn

from lockstep.parallel.compiled.decision import Payoff

MOST_MODELS = 200  # the oldest records are dropped beyond this


def history_path() -> Path:
    """Return the file, in the folder that the desktop's convention names for caches."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # not Path.home(), which may raise
    return Path(folder) / "lockstep" / "compile.json"


def is_cold() -> bool:
    """Return whether torch has no compiled code on disk: the first compilation of a machine takes longer."""
    # Where torch keeps it, unless the user has named another folder.
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder:
        return not Path(folder).is_dir()

    # In a container the user may have no name.
    try:
        return not (Path(gettempdir()) / f"torchinductor_{getpass.getuser()}").is_dir()
    except (KeyError, OSError):
        return True


def signature(model: nn.Module, device: torch.device, sizes: Any) -> str:
    """Return a key for a model on this kind of device, with batches of these sizes."""
    # Everything that decides how much there is to compile, and how fast the result is.
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    tensors = [[n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in model.named_parameters()]
    autocast = ""
    if torch.is_autocast_enabled(device.type):
        autocast = str(torch.get_autocast_dtype(device.type))

    parts = [type(model).__qualname__, tensors, name, torch.__version__, autocast, sizes]
    text = json.dumps(parts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(key: str, path: Path | None = None) -> dict[str, Payoff]:
    """Return the records of a model by target; none if there is no file, or a damaged one."""
    records = {}
    for target, values in _load(path or history_path()).get(key, {}).items():
        # A file from another version, or one that somebody edited.
        with suppress(TypeError, ValueError, KeyError):
            cost_s = float(values["cost_s"])
            speedup = float(values["speedup"])
            if cost_s >= 0 and speedup > 0:
                records[target] = Payoff(cost_s, speedup, values.get("measured", True) is True)

    return records


def write(key: str, target: str, record: Payoff, path: Path | None = None) -> None:
    """Add a record. If the file cannot be written, nothing happens."""
    # Read again, because another run may have written since.
    path = path or history_path()
    everything = _load(path)
    of_model = everything.pop(key, {})  # taken out, to be put back as the newest
    of_model[target] = {**asdict(record), "cost_s": round(record.cost_s, 2), "speedup": round(record.speedup, 3)}
    everything[key] = of_model  # the newest is last

    # Two runs may write at once: each replaces the whole file, and the last one wins.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        newest = dict(list(everything.items())[-MOST_MODELS:])
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(newest, indent=1))
        draft.replace(path)


def _load(path: Path) -> dict[str, dict[str, Any]]:
    """Return the records of all models, by key and target; nothing if the file cannot be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}

    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if isinstance(value, dict)}
