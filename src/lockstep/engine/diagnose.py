"""Turns torch's errors into errors about the run, with the cause and the setting to type.

The most important one is out of memory. With micro_batch=auto the rank records a smaller size in the run folder and
ends. The launcher then kills the other ranks, which wait in a collective, and restarts all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep import files
from lockstep.engine.checks.token_ids import explain_index
from lockstep.engine.evaluation.evaluator import evaluation_batch
from lockstep.errors import SmallerMicroBatch, UserError
from lockstep.optim.capabilities import is_known
from lockstep.optim.registry import state_copies
from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.compiled.compiler import compiler_of
from lockstep.parallel.cudagraph.graphs import has_captures
from lockstep.parallel.ddp.driver import gradient_in_parts
from lockstep.parallel.driver import Driver
from lockstep.parallel.exact.block_inputs import BlockInputs
from lockstep.parallel.fsdp.forward_checks import hidden_output
from lockstep.plan.memory import Footprint, Option, amount, bytes_of, options
from lockstep.plan.plan import smaller_micro_batch
from lockstep.run_folder.names import MICRO_BATCH
from lockstep.runtime import attempt_folder
from lockstep.runtime.context import Runtime

if TYPE_CHECKING:
    from lockstep.engine.run import Run
    from lockstep.engine.setup import RunBuilder

SIZE = r"[\d.]+ (?:[KMGT]i)?B|\d+ bytes"  # a size in torch's messages
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

# Autograd nodes around the inputs of a block, as torch's errors name them: one of exact mode, one of FSDP.
INPUT_NODES = (BlockInputs.__name__, "RegisterPostBackwardFunction")

# With both nodes, a block's only input is a plain view of the output of FSDP's node. torch 2.11 and 2.13 call it:
VIEWS = ("of ViewBackward0 is a view", "of View is a view")

# Parts of torch's errors about a second backward through compiled code.
COMPILED_TWICE = ("compiled with non-empty donated buffers", "does not currently support double backward")


@contextmanager
def explained(builder: RunBuilder) -> Iterator[None]:
    """Replace known errors of torch by a UserError that says what to do."""
    try:
        yield
    except ValueError as error:
        # Map-style datasets are checked before the first step. The last batch of a stream is not known by then.
        if "Expected more than 1 value per channel" in str(error):
            raise UserError(
                "a BatchNorm got a micro-batch of one sample: one value per channel has no variance",
                str(error).splitlines()[0],
                "set a larger micro_batch, and drop a last micro-batch of one sample; or use GroupNorm",
            ) from error

        raise
    except IndexError as error:
        explanation = explain_index(error, builder)
        if explanation:
            raise explanation from error

        raise
    except RuntimeError as error:
        # For host memory torch raises a plain RuntimeError.
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise _explain_out_of_memory(error, builder) from error

        # torch raises this if an operation gets a plain tensor and a sharded parameter.
        driver = builder.driver
        if "mixed torch.Tensor and DTensor" in str(error) and driver and not driver.role.replicated:
            raise _explain_sharded_parameters(error, builder) from error

        # A compiled backward frees the buffers that a second backward would need.
        if any(words in str(error) for words in COMPILED_TWICE):
            raise UserError(
                "the loss computes a gradient through the model and keeps its graph; compiled code does not allow that",
                str(error).splitlines()[0],
                "set compile=false",
            ) from error

        # In a step after the first. In the first one, the driver names the parameter.
        if "Expected to mark a variable ready only once" in str(error):
            raise gradient_in_parts("a gradient") from error

        # This includes NotImplementedError, a RuntimeError that torch raises for operators without a sparse kernel.
        if "sparse" in str(error).lower():
            raise UserError(
                "sparse gradients are not supported",
                str(error).splitlines()[0],
                "leave sparse=True out of F.embedding and F.embedding_bag: the gradient is then dense",
            ) from error

        # Parameters without storage: FSDP has freed them, and its hook that gathers them again did not run.
        if "out of bounds for storage of size 0" in str(error) and driver and not driver.role.replicated:
            raise hidden_output(str(error).splitlines()[0]) from error

        if _is_about_input(str(error), builder):
            raise _explain_changed_input(error, builder) from error

        # An index that is out of range, on a GPU.
        explanation = explain_index(error, builder)
        if explanation:
            raise explanation from error

        raise


def _explain_sharded_parameters(error: RuntimeError, builder: RunBuilder) -> UserError:
    config = builder.config
    tensor_parallel = f" mesh.tp={config.mesh.tp}" if config.mesh.tp else ""
    return UserError(
        f"strategy={config.strategy}{tensor_parallel} shards parameters, and the task uses them, or calls a part of "
        "the model, outside the model's forward",
        str(error).splitlines()[0],
        "do that inside the model's forward, which the task calls; use the optimizer's weight_decay as a penalty on "
        "weights; or set strategy=ddp, which keeps full parameters on every rank",
    )


def _is_about_input(text: str, builder: RunBuilder) -> bool:
    """Return whether torch's error is about a block that changes its input in place."""
    sharded = builder.driver is not None and not builder.driver.role.replicated
    nodes = (*INPUT_NODES, *VIEWS) if builder.config.exact and sharded else INPUT_NODES
    return "is a view and is being modified inplace" in text and any(node in text for node in nodes)


def _explain_changed_input(error: RuntimeError, builder: RunBuilder) -> UserError:
    config = builder.config
    return UserError(
        f"{'exact=true' if config.exact else f'strategy={config.strategy}'} cannot be used with a block that changes "
        "its input in place",
        str(error).splitlines()[0],
        "in that block's forward write x = x + y instead of x += y, relu(x) instead of relu_(x), inplace=False; or "
        "begin with x = x.clone()",
    )


# ---- out of memory ----


def _explain_out_of_memory(error: RuntimeError, builder: RunBuilder) -> Exception:
    """Return an error that names the allocation that failed, the uses of memory, and advice, the best first."""
    shortage = Shortage.of(str(error))
    driver = builder.driver
    if driver is None:
        return UserError(
            "the model does not fit into the memory of this device",
            str(shortage),
            "build a smaller one, or set device=cpu",
        )

    footprint = _footprint(driver, builder)
    on_host = not isinstance(error, torch.OutOfMemoryError)
    config = builder.config
    world = builder.runtime.world

    # Captured graphs hold extra memory, so the first advice is to switch them off.
    first = [Option("graph=false", None)] if has_captures(driver.model) else []

    # The steps that are timed before anything is compiled need more memory than compiled ones.
    compiler = compiler_of(driver)
    if compiler and compiler.state == "time":
        first.append(Option("compile=true", None))

    # The phase of the run decides what was being computed, and what could be made smaller.
    run = builder.run
    advice: list[Option] = []

    if run is None:
        what = "the model"
        advice = options(footprint, config, world.size, micro_batch=1, blocks=1, on_host=on_host)
    elif builder.runtime.heartbeat.phase == "evaluate":
        batch = evaluation_batch(run.config, run.plan.global_batch)
        what = f"an evaluation in batches of {batch}"
        if batch > 1:
            first.append(Option(f"evaluate.batch={batch // 2}", None))
    else:
        # With micro_batch=auto there is nothing to advise: the next attempt takes a smaller one.
        # Before the batches of a step are there, `progress` is that of the step before.
        index = run.steps_done if builder.runtime.heartbeat.phase == "data" else run.progress.step
        what = f"step {index + 1} with micro-batches of {run.plan.micro_batch}"
        smaller = _record_smaller_micro_batch(run)
        if smaller:
            return SmallerMicroBatch(f"{what} does not fit: {shortage}; continuing with micro-batches of {smaller}")

        blocks = find_blocks(driver.model, config.blocks)
        advice = options(footprint, config, world.size, run.plan.micro_batch, len(blocks), on_host)

    # Options that free enough memory by themselves come first. The sort is stable, so the order is otherwise kept.
    missing = shortage.missing(footprint.to_come)
    advice = sorted(advice, key=lambda option: not option.enough(missing))
    fix = "; ".join(option.text(missing) for option in [*first, *advice])
    found = f"{shortage}; it holds {footprint}"
    return UserError(f"{what} does not fit into memory", found, f"try these in order: {fix}")


def _footprint(driver: Driver, builder: RunBuilder) -> Footprint:
    """Return the bytes of all tensors on this rank's device, by purpose."""
    device = builder.runtime.device
    model = driver.model

    def count(tensors: Iterable[Any]) -> int:
        # Offloaded tensors are on another device.
        return bytes_of(t for t in tensors if isinstance(t, Tensor) and t.device.type == device.type)

    # The optimizers' state, and the bytes that their first step will still allocate.
    state: list[Any] = []
    to_come = 0

    # An error may come before there are optimizers.
    if builder.trained_model:
        optimizers = builder.trained_model.optimizers
        for optimizer in optimizers.all:
            state += [value for values in optimizer.state.values() for value in values.values()]

            # The size of the state is not known for a user's optimizer.
            groups = optimizer.param_groups if is_known(optimizer) else []
            for group in groups:
                stateless = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
                to_come += round(state_copies(optimizer, group) * count(stateless))

        if optimizers.masters:
            state += optimizers.masters.persistent_tensors()

    footprint = Footprint(
        parameters=count([*model.parameters(), *model.buffers()]),
        gradients=count(p.grad for p in model.parameters()),
        optimizer=count(state),
        to_come=to_come,
    )

    if device.type != "cuda":
        return footprint

    # Everything else at the peak was activations, or temporary buffers.
    peak = torch.cuda.max_memory_allocated(device)
    rest = peak - footprint.parameters - footprint.gradients - footprint.optimizer
    return replace(footprint, activations=max(0, rest))


# ---- micro_batch=auto ----


def recorded_micro_batch(run_dir: Path, runtime: Runtime) -> int | None:
    """Return the largest micro-batch that fits, if an earlier attempt of this run recorded it. Collective."""
    if attempt_folder.current() is None:
        raise UserError(
            "micro_batch=auto needs Lockstep's launcher, which restarts the ranks when memory runs out",
            "these ranks were started by another launcher",
            "start them with `lockstep train ... --nproc N` or fit(..., nproc=N), or set micro_batch=8",
        )

    path = run_dir / MICRO_BATCH
    return runtime.collectives.run_on_rank0(
        lambda: json.loads(files.read_bytes(path))["micro_batch"] if path.exists() else None
    )


def _record_smaller_micro_batch(run: Run) -> int | None:
    """With micro_batch=auto, record a smaller size for the next attempt, and return it. Otherwise return None."""
    if run.config.micro_batch != "auto" or attempt_folder.current() is None or run.plan.micro_batch == 1:
        return None

    # The next attempt resumes from the last checkpoint with this size.
    smaller = smaller_micro_batch(run.plan)
    files.write(run.folder.path / MICRO_BATCH, json.dumps({"micro_batch": smaller}))
    return smaller


# ---- torch's message ----


@dataclass(frozen=True)
class Shortage:
    """The sizes in torch's message about a failed allocation, in bytes, or None where they are missing.

    torch writes `Tried to allocate 2.00 GiB. GPU 0 has ... of which 1.50 GiB is free`; with a limit, also `4.00 GiB
    allowed; Of the allocated memory 3.50 GiB is allocated by PyTorch`.
    """

    message: str
    wanted: int | None
    free: int | None
    allowed: int | None  # the limit that gpu_memory sets

    @classmethod
    def of(cls, message: str) -> Shortage:
        """Read the sizes in torch's message."""
        free = _size(rf"of which ({SIZE}) is free", message)
        allowed = _size(rf"({SIZE}) allowed", message)
        allocated = _size(rf"({SIZE}) is allocated by PyTorch", message)

        # The limit gpu_memory applies only to memory that PyTorch allocates.
        if free is not None and allowed is not None and allocated is not None:
            free = max(0, min(free, allowed - allocated))

        return cls(message, _size(rf"allocate ({SIZE})", message), free, allowed)

    def missing(self, to_come: int) -> int | None:
        """Return how many more bytes are needed, including the `to_come` bytes that the optimizer will allocate."""
        if self.wanted is None or self.free is None:
            return None

        return max(0, self.wanted - self.free + to_come)

    def __str__(self) -> str:
        if self.wanted is None:
            details = self.message.splitlines()[0] if self.message else "no details"
            return f"out of memory: {details}"

        free = "" if self.free is None else f", {amount(self.free)} free"
        limit = ""
        if free and self.allowed is not None:
            limit = f" of the {amount(self.allowed)} that gpu_memory allows"

        return f"out of memory: {amount(self.wanted)} wanted{free}{limit}"


def _size(pattern: str, message: str) -> int | None:
    """Return the size that the pattern finds in torch's message, in bytes, or None."""
    match = re.search(pattern, message)
    if match is None:
        return None

    number, unit = match[1].split()

    # `MiB`, `B` and `bytes` leave `M`, nothing and nothing.
    prefix = unit.removesuffix("bytes").removesuffix("B").removesuffix("i")
    return round(float(number) * UNITS[prefix])
