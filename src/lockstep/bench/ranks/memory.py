"""One rank of `bench memory`: its memory by category, its peak, and whether it grows."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from lockstep.bench.ranks.turns import opened, take
from lockstep.bench.ranks.workload import batch_of
from lockstep.engine.run import Run
from lockstep.plan.memory import bytes_of
from lockstep.runtime import environments


def measure(arguments: dict[str, Any]) -> Generator[Any, str, None]:
    """Yield the categories of a rank, then a turn for each "turn", or a row of the leak check for each "leak"."""
    micro_batch = batch_of(arguments)
    values = {
        "global_batch": micro_batch * arguments["accumulation"] * environments.detect().size,
        "micro_batch": micro_batch,
        "run_dir": str(Path(arguments["folder"]) / "run"),
    }
    with opened(arguments, values) as rank:
        # Memory of torch and of the process group is not the model's.
        before = psutil.Process().memory_info().rss

        # Tensors that autograd saves are counted in the first block only: the hooks would slow the others.
        with _saved_bytes(rank.task) as saved:
            loop = rank.loop(arguments["block"])
            run = next(loop)

        # The first timed block. Commands come from here on.
        command = yield _categories(run, saved, take(loop).peak_bytes, before)
        while True:
            value = _leak_row(run, loop) if command == "leak" else take(loop).as_dict()
            command = yield value


def _categories(run: Run, saved: list[int], peak: int, before: int) -> dict[str, Any]:
    """Return the bytes that this rank holds, by category."""
    # A state has a dict for each parameter, with tensors and plain numbers.
    states = [state for optimizer in run.trained_model.optimizers.all for state in optimizer.state.values()]
    held = [value for state in states for value in state.values() if isinstance(value, Tensor)]

    return {
        "parameters": bytes_of(run.driver.model.parameters()),
        "gradients": bytes_of(p.grad for p in run.driver.parameters.values() if p.grad is not None),
        "optimizer": bytes_of(held),
        "activations": saved[-1] if saved else 0,  # the last: checks before the first step call the loss, too
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
        # Parameters are saved for the backward as well, but are not activations.
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, int] = {}  # bytes, by the address of the storage: two tensors may share one

        def pack(tensor: Tensor) -> Tensor:
            # Called by autograd for each tensor that it saves. It keeps what is returned here.
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()

            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = loss(model, batch)

        found.append(sum(kept.values()))
        return result

    # On the instance, where it hides the method of the class until it is deleted.
    task.loss = counted
    try:
        yield found
    finally:
        del task.loss


def _leak_row(run: Run, loop: Iterator[Run]) -> dict[str, int]:
    """Train one block, and return the memory of this process after it."""
    next(loop)

    # Memory that only a cycle holds is no leak.
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, torch.nn.Parameter)]

    # Sparse and other tensors have no plain number of bytes.
    on_gpu = run.runtime.on_gpu
    return {
        "step": run.steps_done,
        "tensors": len(tensors),
        "tensor_bytes": bytes_of(tensor for tensor in tensors if tensor.layout == torch.strided),
        "resident": psutil.Process().memory_info().rss,
        "device": torch.cuda.memory_allocated() if on_gpu else 0,
    }
