"""The facts by which a run decides whether to compile: `StepTimer` measures steps, `CompileFacts` gathers the rest.

What compiling has cost and gained on this machine is in a small file in the user's cache folder. It is a hint, never
needed: a file that is missing, damaged or cannot be written changes only how well a run estimates.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import gettempdir
from typing import Any

import torch
from torch import nn

from lockstep import files
from lockstep.config import RunConfig
from lockstep.parallel.blocks import class_name, find_blocks
from lockstep.parallel.compiled.batch_sizes import Dims, SeenShapes, tensors_in
from lockstep.parallel.compiled.kernel_times import saving_s
from lockstep.parallel.compiled.payoff import SPEEDUPS, Facts, Payoff, preferred
from lockstep.parallel.compiled.side_effects import Function
from lockstep.parallel.compiled.targets import BLOCKS, LOSS, MODEL, compiles_itself
from lockstep.parallel.micro_batches import MicroBatchDriver
from lockstep.runtime.autograd_graph import autograd_nodes
from lockstep.runtime.context import Runtime
from lockstep.task import Loss

MOST_MODELS = 200  # the oldest records are dropped beyond this


class StepTimer:
    """Times a few steps, after some that are left out because they allocate, tune and connect.

    The step in which the timer is made does not count.
    """

    def __init__(self, warm_up: int, timed: int):
        self._warm_up = warm_up  # steps that are left out
        self._steps = warm_up + timed
        self._seconds: list[float] = []  # seconds of each step so far, the warm-up included
        self._began: float | None = None  # None before the first whole step

    def begin_step(self) -> None:
        self._began = time.perf_counter()

    def end_step(self, runtime: Runtime) -> float | None:
        """Return the seconds of a step on the slowest rank once enough steps were timed. Collective then."""
        if self._began is None:
            return None

        # The host waits for the device, in the few steps that are timed.
        if runtime.on_gpu:
            torch.cuda.synchronize()

        self._seconds.append(time.perf_counter() - self._began)
        if len(self._seconds) < self._steps:
            return None

        # The median leaves out a step that a checkpoint or another program has slowed down.
        own_s = median(self._seconds[self._warm_up :])
        return runtime.collectives.max(own_s)


class CompileFacts:
    """Gathers the facts for the rule: from the model, this run, and earlier runs on this machine."""

    def __init__(self, driver: MicroBatchDriver, config: RunConfig):
        self._model = driver.model
        self._runtime = driver.runtime
        self._named_blocks = config.blocks
        self._own_compile = compiles_itself(driver.model)  # asked before any code of ours is on the model
        self._key = ""  # key of this model's records on this machine; empty before the first decision
        self._cold = False  # whether torch had compiled nothing on this machine, at the last decision
        self._records: dict[str, Payoff] = {}  # records of earlier runs, by target
        self.eager_s = 0.0  # seconds of a step without compiled code, on the slowest rank
        self._saving_s: float | None = None  # seconds that compiling saves of a step, by its kernels, on every rank
        self._operations = 0  # operations of the first training call of the loss or the model

    def possible(self, function: Function | None) -> tuple[str, ...]:
        """Return the targets that can be compiled at all. `function`: the loss that calls the model."""
        # The model says itself which of its parts to compile.
        if self._own_compile:
            return (MODEL,)

        return (LOSS, MODEL, BLOCKS) if function else (MODEL, BLOCKS)

    def preferred(self, function: Function | None, varying: Dims) -> list[str]:
        """Return what to compile, whether it pays or not."""
        return preferred(self.possible(function), len(find_blocks(self._model, self._named_blocks)), bool(varying))

    def count_operations_once(self, result: Any) -> Any:
        """Return `result`, of an eager call. The operations of the first one show how much there is to compile."""
        self._operations = self._operations or count_operations(result)
        return result

    def gather(self, steps_left: int, spent_s: float, function: Function | None, shapes: SeenShapes) -> Facts:
        """Return what is known now, also from earlier runs with batches of these sizes. Collective.

        spent_s: seconds that compiling has taken in this run
        """
        # Only rank 0 reads the file: the caches of two machines differ, and all ranks must decide by the same facts.
        self._key = model_key(self._model, self._runtime.device, [shapes.describe(), bool(function)])
        self._cold, records = self._runtime.collectives.run_on_rank0(self._read_history)
        self._records = {target: Payoff(**values) for target, values in records.items()}

        blocks = find_blocks(self._model, self._named_blocks)
        operations = self._runtime.collectives.max(self._operations)
        one_of_each_class = {class_name(block): block for block in blocks}.values()
        return Facts(
            steps_left=steps_left,
            step_s=self.eager_s,
            sizes_vary=bool(shapes.varying),
            saving_s=self._saving_s,
            layers=_count_layers(self._model),
            blocks=len(blocks),
            block_layers=_count_layers(*one_of_each_class),
            operations=int(operations),
            cold=self._cold,
            possible=self.possible(function),
            records=self._records,
            spent_s=spent_s,
        )

    def note_kernels(self, kernels: list[tuple[str, float]]) -> None:
        """Note what compiling would save of the kernels of a step; the least of all ranks counts. Collective."""
        savings = self._runtime.collectives.all_gather_json(saving_s(kernels, self.eager_s))
        self._saving_s = None if None in savings else min(savings)

    def _read_history(self) -> tuple[bool, dict[str, dict[str, Any]]]:
        """Return whether torch has compiled nothing on this machine, and the fields of the records by target."""
        records = {target: asdict(payoff) for target, payoff in read_records(self._key).items()}
        return is_cold(), records

    def remember(self, target: str, cost_s: float, speedup: float) -> None:
        """Write down for later runs what a target cost and gained."""
        # If torch found code on disk, the cost without it is that of an earlier run.
        former = self._records.get(target)
        known_s = former.cold_cost_s if former else None
        self._write(target, Payoff(cost_s, speedup, cold_cost_s=cost_s if self._cold else known_s))

    def remember_unfinished(self, target: str, seconds: float) -> None:
        """Note how long compiling has taken so far: it may never end, and then the next run should know."""
        self._write(target, Payoff(seconds, SPEEDUPS[target], measured=False))

    def _write(self, target: str, payoff: Payoff) -> None:
        # Without a key this run has not decided by measurements.
        if self._key and self._runtime.is_main:
            write_record(self._key, target, payoff)


def _count_layers(*roots: nn.Module) -> int:
    """Return how many modules have parameters of their own. One that several of `roots` share counts once."""
    modules = {module for root in roots for module in root.modules()}
    own_parameters = [list(module.parameters(recurse=False)) for module in modules]
    return sum(bool(parameters) for parameters in own_parameters)


def count_operations(result: Any) -> int:
    """Return how many operations of autograd have led to a loss, or to the outputs of a model."""
    tensors = [result.total] if isinstance(result, Loss) else tensors_in(result)
    return sum(1 for _ in autograd_nodes(tensor.grad_fn for tensor in tensors))


# ---- what earlier runs have measured ----


def history_path() -> Path:
    """Return the file, in the folder that the desktop's convention names for caches."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # not Path.home(), which may raise
    return Path(folder) / "lockstep" / "compile.json"


def model_key(model: nn.Module, device: torch.device, sizes: Any) -> str:
    """Return a key for a model on this kind of device, with batches of these sizes."""
    # Everything that decides how much there is to compile, and how fast the result is.
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parameters = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()]
    autocast = ""
    if torch.is_autocast_enabled(device.type):
        autocast = str(torch.get_autocast_dtype(device.type))

    parts = [type(model).__qualname__, parameters, kind, torch.__version__, autocast, sizes]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def read_records(key: str) -> dict[str, Payoff]:
    """Return the records of a model by target; none if there is no file, or a damaged one."""
    records = {}
    for target, values in _read_history().get(key, {}).items():
        # A file from another version, or one that was edited.
        with suppress(TypeError, ValueError, KeyError):
            cost_s = float(values["cost_s"])
            speedup = float(values["speedup"])
            cold_cost_s = values.get("cold_cost_s")
            cold_cost_s = None if cold_cost_s is None else float(cold_cost_s)
            if cost_s >= 0 and speedup > 0:
                records[target] = Payoff(cost_s, speedup, values.get("measured", True) is True, cold_cost_s)

    return records


def write_record(key: str, target: str, payoff: Payoff) -> None:
    """Add a record. If the file cannot be written, nothing happens."""
    # Read again, because another run may have written since. The model moves to the end, as the newest one.
    history = _read_history()
    records = history.pop(key, {})
    records[target] = asdict(payoff)
    history[key] = records
    newest = dict(list(history.items())[-MOST_MODELS:])

    # Two runs may write at once: each replaces the whole file, and the last one wins.
    path = history_path()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, json.dumps(newest, indent=1))


def _read_history() -> dict[str, dict[str, Any]]:
    """Return the records of all models, by key and target; nothing if the file cannot be read."""
    try:
        content = json.loads(history_path().read_text())
    except (OSError, ValueError):
        return {}

    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if isinstance(value, dict)}


def is_cold() -> bool:
    """Return whether torch has no compiled code on disk: the first compilation of a machine takes longer."""
    folder = torch_cache()
    return folder is None or not folder.is_dir()


def torch_cache() -> Path | None:
    """Return the folder in which torch keeps compiled code, or None if that is not known."""
    # The user may have named another folder than torch's own.
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder:
        return Path(folder)

    # torch's own folder has the name of the user, who may have none in a container.
    try:
        return Path(gettempdir()) / f"torchinductor_{getpass.getuser()}"
    except (KeyError, OSError):
        return None
