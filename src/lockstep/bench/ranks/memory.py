"""One rank of `bench memory`: what it holds by category, its peak, and whether that grows."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from lockstep import targets
from lockstep.bench.ranks.turns import by_lockstep, take
from lockstep.bench.ranks.workload import load, own_batch, settings_of
from lockstep.engine.run import Run
from lockstep.plan.memory import bytes_of
from lockstep.runtime import context
from lockstep.runtime.world import World


def measure(arguments: dict[str, Any]) -> Generator[Any, str, None]:
    """Yield the categories of a rank, then a turn for each "turn", or a row of the leak check for each "leak"."""
    kind = load(arguments["target"])
    layers, accumulation = arguments["layers"], arguments["accumulation"]
    micro_batch = arguments["batch"] or own_batch(kind, layers)
    values = {
        "global_batch": micro_batch * accumulation * World.from_env().size,
        "micro_batch": micro_batch,
        "log.every": arguments["block"],
        "run_dir": str(Path(arguments["folder"]) / "run"),
        "threads": arguments["threads"],
    }
    resolved = settings_of(kind, layers, values)
    with context.start(World.from_env(), resolved.config) as runtime:
        before = psutil.Process().memory_info().rss
        task = targets.make_task(kind, resolved.config.task)
        with _saved_bytes(task) as saved:
            loop = by_lockstep(task, resolved, runtime, arguments["block"])
            run = next(loop)
        first = take(loop).as_dict()
        command = yield _categories(run, saved, first["peak_bytes"], before)
        while True:
            value = _leak_row(run, loop) if command == "leak" else take(loop).as_dict()
            command = yield value


def _categories(run: Run, saved: list[int], peak: int, before: int) -> dict[str, Any]:
    """Return the bytes that this rank holds, by category."""
    driver, optimizers = run.driver, run.model_setup.optimizers
    states = [
        value
        for optimizer in optimizers.all
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return {
        "parameters": bytes_of(driver.model.parameters()),
        "gradients": bytes_of(p.grad for p in driver.parameters if p.grad is not None),
        "optimizer": bytes_of(states),
        "activations": saved[-1] if saved else 0,  # of a step; the checks before the first one call the loss too
        "device_peak": peak,
        "resident": psutil.Process().memory_info().rss - before,
        "torch": torch.__version__,
        "device": run.runtime.device.type,
        "strategy": run.config.strategy,
    }


@contextmanager
def _saved_bytes(task: Any) -> Iterator[list[int]]:
    """Collect, for each call of the loss, the bytes that autograd saves in it for the backward."""
    found: list[int] = []
    loss = task.loss

    def counted(model: Any, batch: Any) -> Any:
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = loss(model, batch)
        found.append(sum(kept.values()))
        return result

    task.loss = counted
    try:
        yield found
    finally:
        del task.loss


def _leak_row(run: Run, loop: Iterator[Run]) -> dict[str, int]:
    """Train one block, and return what this process holds after it."""
    next(loop)
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, torch.nn.Parameter)]
    on_gpu = run.runtime.device.type == "cuda"
    return {
        "step": run.stepper.counters.steps_done,
        "tensors": len(tensors),
        "tensor_bytes": bytes_of(tensor for tensor in tensors if tensor.layout == torch.strided),
        "resident": psutil.Process().memory_info().rss,
        "device": torch.cuda.memory_allocated() if on_gpu else 0,
    }
