"""Out of memory: say what took it and what would help; or, with micro_batch=auto, go on one size down.

The rank that ran out ends, and its launcher stops the others, which wait for it in a collective.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.errors import SmallerMicroBatch, UserError
from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.cudagraph.graphs import has_captures
from lockstep.plan.memory import Footprint, Option, amount, bytes_of, options
from lockstep.plan.plan import smaller_micro_batch
from lockstep.runtime.context import Runtime
from lockstep.runtime.heartbeat import FOLDER

if TYPE_CHECKING:
    from lockstep.engine.run import Run

SIZE = r"[\d.]+ (?:[KMGT]i)?B|\d+ bytes"
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def is_one(error: RuntimeError) -> bool:
    """Whether it says that memory has run out, a GPU's or the host's."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def noted_micro_batch(run_dir: Path, runtime: Runtime) -> int | None:
    """What an earlier attempt of this run found to be the most."""
    if FOLDER not in os.environ:
        raise UserError(
            "micro_batch=auto, which starts again with a smaller one when memory runs out",
            "nobody who could start again: these ranks have no launcher of ours",
            "start them with `lockstep train ... --nproc N` or fit(..., nproc=N), or type micro_batch=8",
        )
    path = _note(run_dir)
    return runtime.collectives.run_on_rank0(
        lambda: json.loads(path.read_text())["micro_batch"] if path.exists() else None
    )


def explanation(error: RuntimeError, run: Run) -> Exception:
    found = _what_was_missing(str(error))
    if not hasattr(run, "driver"):
        return UserError("to build the model", found, "build a smaller one, or type device=cpu")
    held = _footprint(run)
    on_host = not isinstance(error, torch.OutOfMemoryError)
    first = [Option("graph=false", None)] if has_captures(run.driver.model) else []
    if not run.opened:
        asked = "to put the model on its device"
        less = options(held, run.config, run.runtime.world.size, micro_batch=1, blocks=1, on_host=on_host)
    elif run.runtime.heartbeat.phase == "evaluate":
        batch = run.evaluation_batch()
        asked, less = f"an evaluation in batches of {batch}", []
        first += [Option(f"evaluate.batch={batch // 2}", None)] if batch > 1 else []
    else:
        asked = f"step {run.stepper.counters.step} with micro-batches of {run.plan.micro_batch}"
        if smaller := _one_size_down(run):
            return SmallerMicroBatch(f"{asked} does not fit: {found}; going on with micro-batches of {smaller}")
        blocks = len(find_blocks(run.driver.model, run.config.blocks))
        less = options(held, run.config, run.runtime.world.size, run.plan.micro_batch, blocks, on_host)
    missing = _missing(str(error), held.to_come)
    less = sorted(less, key=lambda option: not option.enough(missing))  # otherwise as they are
    advice = "; ".join(option.text(missing) for option in [*first, *less])
    return UserError(asked, f"{found}; it holds {held}", f"type one of these, the first first: {advice}")


def _one_size_down(run: Run) -> int | None:
    """With micro_batch=auto under our launcher: leave a note for the next attempt, which begins at the last commit."""
    if run.config.micro_batch != "auto" or FOLDER not in os.environ or run.plan.micro_batch == 1:
        return None
    smaller = smaller_micro_batch(run.plan)
    staged = run.run_dir / f"micro_batch.json.{run.runtime.world.rank}"  # several ranks may run out at once
    staged.write_text(json.dumps({"micro_batch": smaller}))
    os.replace(staged, _note(run.run_dir))
    return smaller


def _note(run_dir: Path) -> Path:
    return run_dir / "micro_batch.json"


def _footprint(run: Run) -> Footprint:
    model, made, device = run.driver.model, getattr(run, "optimizers", None), run.runtime.device

    def count(tensors: Iterable[Any]) -> int:
        """What is offloaded lies elsewhere."""
        return bytes_of(t for t in tensors if isinstance(t, Tensor) and t.device.type == device.type)

    states = [state for optimizer in (made.all if made else []) for state in optimizer.state.values()]
    masters = made.masters.held() if made and made.masters else []
    held = Footprint(
        parameters=count([*model.parameters(), *model.buffers()]),
        gradients=count(p.grad for p in model.parameters()),
        optimizer=count([*masters, *(value for state in states for value in state.values())]),
        to_come=sum(
            moments * count(parameters)
            for optimizer in (made.all if made else [])
            for moments, parameters in _moments_to_come(optimizer)
        ),
    )
    if device.type != "cuda":
        return held
    worst = torch.cuda.max_memory_allocated(device)
    return replace(held, activations=max(0, worst - held.parameters - held.gradients - held.optimizer))


def _moments_to_come(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, list[Tensor]]]:
    """How many, each as large as these parameters, torch's own optimizers make in a first step. Of others nothing is
    known."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    for group in optimizer.param_groups:
        moments = 2 if "betas" in group else int(bool(group.get("momentum")))
        yield moments, [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]


def _what_was_missing(message: str) -> str:
    wanted, free = _wanted(message), _free(message)
    if wanted is None:
        return f"out of memory: {message.splitlines()[0] if message else 'no details'}"
    allowed = _size(rf"({SIZE}) allowed", message)
    of = f" of the {amount(allowed)} that gpu_memory allows" if allowed is not None else ""
    return f"out of memory: {amount(wanted)} wanted" + ("" if free is None else f", {amount(free)} free{of}")


def _missing(message: str, to_come: int) -> int | None:
    wanted, free = _wanted(message), _free(message)
    return None if wanted is None or free is None else max(0, wanted - free + to_come)


def _wanted(message: str) -> int | None:
    return _size(rf"allocate ({SIZE})", message)


def _free(message: str) -> int | None:
    """As torch writes it: `Tried to allocate 2.00 GiB. GPU 0 has ... of which 1.50 GiB is free`; with a limit, also
    `4.00 GiB allowed; Of the allocated memory 3.50 GiB is allocated by PyTorch`."""
    free = _size(rf"of which ({SIZE}) is free", message)
    allowed, taken = _size(rf"({SIZE}) allowed", message), _size(rf"({SIZE}) is allocated by PyTorch", message)
    if free is None or allowed is None or taken is None:
        return free
    return max(0, min(free, allowed - taken))


def _size(pattern: str, message: str) -> int | None:
    found = re.search(pattern, message)
    if found is None:
        return None
    number, unit = found[1].split()
    return round(float(number) * UNITS[unit.removesuffix("bytes").removesuffix("B").removesuffix("i")])


# Errors of torch's in the words of a run: what was asked, what was found, what to type.


@contextmanager
def explained(run: Run) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if is_one(error):
            raise explanation(error, run) from error
        if (
            "mixed torch.Tensor and DTensor" in str(error)
            and hasattr(run, "driver")
            and not run.driver.placement.replicated
        ):
            raise _outside_the_model(error, run) from error
        raise


def _outside_the_model(error: RuntimeError, run: Run) -> UserError:
    """Only in a forward are parameters whole that this rank holds parts of."""
    asked = f"strategy={run.config.strategy}" + (f" mesh.tp={run.config.mesh.tp}" if run.config.mesh.tp else "")
    return UserError(
        f"{asked}, with a task that computes with parameters, or calls a part of the model, by itself",
        f"parameters of which this rank holds a part: {str(error).splitlines()[0]}",
        "do that inside the model's forward, which the task calls; let the optimizer's weight_decay be the penalty of "
        "weights; or type strategy=ddp, where parameters are whole",
    )
