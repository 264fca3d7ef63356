"""Whether compiling pays: a run times its first steps, and weighs what compiling costs against what it saves.

the rule       `decide`, a pure function of `Facts`: all ranks have the same facts, and so decide alike
the history    what compiling has cost and gained on this machine, in a small file in the user's cache folder
the run        `StepTimer` measures steps, and `Judge` gathers the facts and remembers what came of the decision
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import gettempdir
from typing import Any

import torch
from torch import nn

from lockstep.config import RunConfig
from lockstep.parallel.blocks import class_name, find_blocks
from lockstep.parallel.compiled.batch_sizes import BatchWatch, Dims
from lockstep.parallel.compiled.side_effects import Function
from lockstep.parallel.compiled.targets import BLOCKS, LOSS, MODEL, compiles_itself
from lockstep.parallel.driver import Driver
from lockstep.runtime.context import Runtime

# Estimates for a model that this machine has not compiled yet. Speed-ups are those of a step on a GPU.
SPEEDUPS = {LOSS: 1.5, MODEL: 1.35, BLOCKS: 1.3}
START_S = 6.0  # seconds to load the compiler and start its workers
COLD_S = 6.0  # seconds more if nothing has been compiled on this machine before
LAYER_S = 0.25  # seconds for one layer, forward and backward
REPEATED_S = 0.05  # seconds for a layer of a further block, whose kernels are found in torch's cache
BLOCK_S = 0.5  # seconds to trace one more block by itself
DYNAMIC = 2.0  # with dynamic sizes it takes this many times as long

# Steps that are not timed, and steps that are. With dynamic sizes kernels are tuned for each size, and steps differ.
STEPS = 2, 3
STEPS_VARYING = 12, 12
SLOWER = 1.02  # compiled steps that take longer than this many times an eager one are given up

# A target that was never measured here may take at most this part of the time that is left: if it cannot be compiled,
# takes far longer than estimated or gains nothing, the run has lost no more. With SLOWER that is a tenth.
MOST_LOST = 0.08
# Set aside from it, in eager steps: what comparing takes, and what each timed step may lose if it is slower.
COMPARED, LOST_IN_STEP = 5, 0.5

# What was measured may cost this many times as much now, and the saving must be this many times the cost.
RECORD_MARGIN = 1.25
# A compilation that did not end takes at least this many times as long as it was given.
UNFINISHED = 2.0

MOST_MODELS = 200  # in the history: the oldest records are dropped beyond this


# ---- the rule ----


@dataclass(frozen=True)
class Payoff:
    """What compiling costs and gains. `measured`: in a run on this machine; otherwise it is an estimate."""

    cost_s: float
    speedup: float
    measured: bool = True


@dataclass(frozen=True)
class Facts:
    """What is known about a run when it decides."""

    # The run.
    steps_left: int
    step_s: float  # seconds of a step without compiled code, on the slowest rank
    sizes_vary: bool  # whether batches have different sizes

    # The model.
    layers: int  # modules with parameters of their own, in the whole model
    blocks: int = 0  # repeated blocks
    block_layers: int = 0  # those modules, in one block of each class
    all_block_layers: int = 0  # and in all blocks together

    # The machine, and what was tried on it.
    cold: bool = False  # nothing has been compiled on this machine before
    possible: tuple[str, ...] = (LOSS, MODEL, BLOCKS)
    records: Mapping[str, Payoff] = field(default_factory=dict)  # of earlier runs
    spent_s: float = 0.0  # seconds that compiling has taken in this run

    @property
    def eager_s(self) -> float:
        """Seconds of the steps that are left, without compiled code."""
        return self.steps_left * self.step_s

    @property
    def most_s(self) -> float:
        """How long something that was never measured may take to compile."""
        # What comparing and measuring may cost is set aside, and so is what was spent on an earlier try.
        timed = sum(STEPS_VARYING if self.sizes_vary else STEPS)
        aside_s = (COMPARED + LOST_IN_STEP * timed) * self.step_s
        return max(0.0, MOST_LOST * self.eager_s - aside_s - self.spent_s)


@dataclass(frozen=True)
class Decision:
    targets: tuple[str, ...]  # to try in this order; none: the run stays eager
    reason: str
    limit_s: float = 0.0  # seconds after which compiling is given up


def decide(facts: Facts) -> Decision:
    """Return what to compile: the targets that pay, the best one first."""
    eager_s = facts.eager_s  # the yardstick: the rest of the run without compiling
    left = f"{facts.steps_left} steps of {facts.step_s * 1e3:.3g} ms are left"

    # What each target costs and gains, and how long the run takes with those that pay.
    possible = preferred(facts.possible, facts.blocks, facts.sizes_vary)
    payoffs = {target: expected(facts, target) for target in possible}
    paying = {target: payoff for target, payoff in payoffs.items() if pays(facts, payoff)}
    seconds = {target: payoff.cost_s + eager_s / payoff.speedup for target, payoff in paying.items()}
    targets = tuple(sorted(seconds, key=lambda target: seconds[target]))

    if targets:
        best = targets[0]
        with_best = f"about {seconds[best]:.0f} s with {best} compiled"
        reason = f"{left}: {eager_s:.0f} s without compiling, {with_best}"

        # A target that was compiled here before may take as long as it did then, and a little more.
        known = [RECORD_MARGIN * payoff.cost_s for payoff in paying.values() if payoff.measured]
        return Decision(targets, reason, limit_s=max([facts.most_s, *known]))

    # Nothing pays. Explain it by the target that would be preferred.
    first = next(iter(payoffs.values()))
    gain_s = max(0.0, eager_s * (1 - 1 / first.speedup))
    reason = f"it would not pay: {left}, of which it would save about {gain_s:.0f} s for {first.cost_s:.0f} s"
    if gain_s > first.cost_s:
        # It would pay if the estimate were right, but too much is at stake if it is not.
        reason += f"; a first try may take {facts.most_s:.0f} s of them"

    return Decision((), reason)


def preferred(possible: Sequence[str], blocks: int, sizes_vary: bool) -> list[str]:
    """Return the possible targets for a model with this many repeated blocks, the preferred one first."""
    # A single block is hardly less than the model.
    if blocks < 2:
        return [target for target in possible if target != BLOCKS]

    # With dynamic sizes a whole model takes minutes to compile, and its blocks share the code of one.
    if sizes_vary and BLOCKS in possible:
        return [BLOCKS]

    return list(possible)


def expected(facts: Facts, target: str) -> Payoff:
    """Return what was measured on this machine, or else an estimate."""
    record = facts.records.get(target)
    if record and record.measured and not facts.cold:
        return record

    # Blocks of one class share their kernels, so further ones cost little.
    repeated = facts.all_block_layers - facts.block_layers
    if target == BLOCKS:
        own_s = LAYER_S * facts.block_layers + BLOCK_S * facts.blocks
    else:
        own_s = LAYER_S * (facts.layers - repeated) + REPEATED_S * repeated

    # Without a record of an earlier run, the estimate is all that there is.
    cost_s = START_S + COLD_S * facts.cold + own_s * (DYNAMIC if facts.sizes_vary else 1.0)
    if not record:
        return Payoff(cost_s, SPEEDUPS[target], measured=False)

    # There is a record that does not hold: torch's files are gone since then, or the try was given up. It still shows
    # how long it takes at least.
    at_least_s = record.cost_s if record.measured else UNFINISHED * record.cost_s
    return Payoff(max(cost_s, at_least_s), record.speedup, measured=False)


def pays(facts: Facts, payoff: Payoff) -> bool:
    """Return whether a target is worth its cost. An estimate may be wrong, so it must also be small."""
    saving_s = facts.eager_s * (1 - 1 / payoff.speedup)
    if payoff.measured:
        return saving_s > RECORD_MARGIN * payoff.cost_s

    return payoff.cost_s < min(saving_s, facts.most_s)


# ---- the history of this machine ----
#
# It is a hint, never needed: a file that is missing, damaged or cannot be written changes only how well a run
# estimates.


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
            if cost_s >= 0 and speedup > 0:
                records[target] = Payoff(cost_s, speedup, values.get("measured", True) is True)

    return records


def write_record(key: str, target: str, payoff: Payoff) -> None:
    """Add a record. If the file cannot be written, nothing happens."""
    # Read again, because another run may have written since. The model moves to the end, as the newest one.
    history = _read_history()
    records = history.pop(key, {})
    records[target] = {**asdict(payoff), "cost_s": round(payoff.cost_s, 2), "speedup": round(payoff.speedup, 3)}
    history[key] = records
    newest = dict(list(history.items())[-MOST_MODELS:])

    # Two runs may write at once: each replaces the whole file, and the last one wins.
    path = history_path()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(newest, indent=1))
        draft.replace(path)


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
    # The user may have named another folder than torch's own.
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder:
        return not Path(folder).is_dir()

    # torch's own folder has the name of the user, who may have none in a container.
    try:
        return not (Path(gettempdir()) / f"torchinductor_{getpass.getuser()}").is_dir()
    except (KeyError, OSError):
        return True


# ---- the facts of this run ----


class StepTimer:
    """Times a few steps, after some that are left out because they allocate, tune and connect.

    The step in which the timer is made does not count.
    """

    def __init__(self, warm_up: int, timed: int):
        self._warm_up = warm_up  # steps that are left out
        self._steps = warm_up + timed
        self._seconds: list[float] = []  # of each step so far, with those that are left out
        self._began: float | None = None  # None before the first whole step

    def begin_step(self) -> None:
        self._began = time.perf_counter()

    def end_step(self, runtime: Runtime) -> float | None:
        """Return the seconds of a step on the slowest rank once enough steps were timed. Collective then."""
        if self._began is None:
            return None

        # The host waits for the device, in the few steps that are timed.
        if runtime.device.type == "cuda":
            torch.cuda.synchronize()

        self._seconds.append(time.perf_counter() - self._began)
        if len(self._seconds) < self._steps:
            return None

        # The median leaves out a step that a checkpoint or another program has slowed down.
        own_s = median(self._seconds[self._warm_up :])
        return max(runtime.collectives.gather_json(own_s))


class Judge:
    """Gathers the facts for the rule: from the model, this run, and earlier runs on this machine."""

    def __init__(self, driver: Driver, config: RunConfig):
        self._model = driver.model
        self._runtime = driver.runtime
        self._ddp = config.ddp
        self._own_compile = compiles_itself(driver.model)  # asked before any code of ours is on the model
        self._key = ""  # of this model's records on this machine; none before a decision
        self.eager_s = 0.0  # seconds of a step without compiled code, on the slowest rank

    def possible(self, function: Function | None) -> tuple[str, ...]:
        """Return the targets that can be compiled at all. `function`: the loss, if there is one around the model."""
        # The model says itself which of its parts to compile.
        if self._own_compile:
            return (MODEL,)

        # DDP would look for the parameters in a result of the compiled loss, and not find them.
        hidden = self._ddp.static_graph or self._ddp.find_unused_parameters
        if function and not hidden:
            return (LOSS, MODEL, BLOCKS)
        return (MODEL, BLOCKS)

    def preferred(self, function: Function | None, varying: Dims) -> Sequence[str]:
        """Return what to compile, whether it pays or not."""
        return preferred(self.possible(function), len(find_blocks(self._model)), bool(varying))

    def decide(self, steps_left: int, spent_s: float, function: Function | None, watch: BatchWatch) -> Decision:
        """Decide by `eager_s`, and by what earlier runs with batches of these sizes have measured. Collective.

        spent_s: seconds that compiling has taken in this run
        """
        # Only rank 0 reads the file: the caches of two machines differ, and all ranks must decide by the same facts.
        self._key = model_key(self._model, self._runtime.device, [watch.sizes.describe(), bool(function)])
        cold, records = self._runtime.collectives.run_on_rank0(self._read_history)

        blocks = find_blocks(self._model)
        one_of_each_class = {class_name(block): block for block in blocks}.values()
        facts = Facts(
            steps_left=steps_left,
            step_s=self.eager_s,
            sizes_vary=bool(watch.varying),
            layers=_count_layers(self._model),
            blocks=len(blocks),
            block_layers=_count_layers(*one_of_each_class),
            all_block_layers=_count_layers(*blocks),
            cold=cold,
            possible=self.possible(function),
            records={target: Payoff(**values) for target, values in records.items()},
            spent_s=spent_s,
        )
        return decide(facts)

    def _read_history(self) -> tuple[bool, dict[str, dict[str, float]]]:
        """Return whether torch has compiled nothing on this machine, and the fields of the records by target."""
        records = {target: asdict(payoff) for target, payoff in read_records(self._key).items()}
        return is_cold(), records

    def remember(self, target: str, payoff: Payoff) -> None:
        """Write down for later runs what a target cost and gained, if this run has decided by measurements."""
        if self._key and self._runtime.is_main:
            write_record(self._key, target, payoff)

    def remember_unfinished(self, target: str, seconds: float) -> None:
        """Note how long compiling has taken so far: it may never end, and then the next run should know."""
        self.remember(target, Payoff(seconds, SPEEDUPS[target], measured=False))


def _count_layers(*roots: nn.Module) -> int:
    """Return how many modules have parameters of their own. One that several of `roots` share counts once."""
    modules = {module for root in roots for module in root.modules()}
    own_parameters = [list(module.parameters(recurse=False)) for module in modules]
    return sum(bool(parameters) for parameters in own_parameters)
