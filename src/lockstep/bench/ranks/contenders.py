"""The loops that `bench step` compares: one written by hand, Lockstep's two, and the loops of other libraries.

All of them train the same model with the same loss, fused AdamW, clipping by norm, a learning rate with warm-up, and a
log line after every block. Other libraries are used as their own documentation does, on batches that this module draws:
their data loading is not part of the comparison. Each loop is a generator that yields after every block of steps.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.bench.ranks.turns import by_lockstep, by_own_loop
from lockstep.bench.ranks.workload import MANY, settings_of
from lockstep.config import Resolved
from lockstep.engine.loop import fit as engine_fit
from lockstep.engine.setup import open_run
from lockstep.runtime.context import Runtime
from lockstep.runtime.environments.launcher import TORCHRUN_ID
from lockstep.runtime.world import World
from lockstep.task import Task

WARM_UP = 100  # steps of the learning rate
PEAK = 1e-3


@dataclass(frozen=True)
class Workload:
    """The options and tools that all loops share.

    The model begins with the same weights, and the batches come in the same order, whatever the loop. So the loops do
    the same work, and only what a library adds to it differs.
    """

    task: Task
    runtime: Runtime
    micro_batch: int
    accumulation: int
    block: int
    folder: Path
    steps: int = MANY  # the steps of a whole run

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    def micro_batches(self) -> Iterator[list[Tensor]]:
        """Yield this rank's batches of random order, epoch after epoch, on the device."""
        # The whole dataset is on the device: no loop waits for a copy.
        x, y = (tensor.to(self.device) for tensor in self.task.data().tensors)
        world = self.runtime.world
        epoch = 0

        while True:
            # All ranks draw the same order, and each takes every n-th sample of it, as DistributedSampler does.
            generator = torch.Generator().manual_seed(epoch)
            order = torch.randperm(len(x), generator=generator)[world.rank :: world.size]

            # A short rest at the end of an epoch is dropped, by all loops alike.
            for rows in order.split(self.micro_batch):
                if len(rows) == self.micro_batch:
                    rows = rows.to(self.device)
                    yield [x[rows], y[rows]]

            epoch += 1

    def mean_loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """Return the mean of a micro-batch, which is what other libraries call a loss.

        batch: inputs and targets, [micro_batch, ...] each. The result is a scalar with a graph.
        """
        loss = self.task.loss(model, batch)
        return loss.total / loss.weight

    def optimizer(self, model: nn.Module) -> Any:
        """Return the task's only optimizer: other libraries would take more than one in ways of their own."""
        return self.task.optimizer(model)

    def model(self) -> nn.Module:
        """Return the task's model, with the same first weights for all loops."""
        torch.manual_seed(0)
        return self.task.model()

    def log(self, name: str) -> Callable[[int, Tensor], None]:
        """Return a function that writes the mean loss of all ranks to a file, as a log line."""
        lines = (self.folder / f"{name}-{self.runtime.world.rank}.jsonl").open("a")

        def write(step: int, loss: Tensor) -> None:
            # Every rank must call it: the sum is a collective.
            mean = loss.detach().clone()
            if dist.is_initialized():
                dist.all_reduce(mean)

            # item() waits for the device, once in a block.
            lines.write(json.dumps({"step": step, "loss": mean.item() / self.runtime.world.size}) + "\n")
            lines.flush()

        return write


def rate(step: int) -> float:
    """Return the share of the peak rate that Lockstep's cosine schedule with a warm-up has at a step."""
    warmed = min(1.0, (step + 1) / (WARM_UP + 1))
    return warmed * 0.5 * (1 + math.cos(math.pi * min(1.0, step / MANY)))


# ---- loops ----


def by_hand(workload: Workload, name: str = "by hand") -> Iterator[None]:
    """The loop that a careful person writes.

    It divides every micro-batch's mean by the accumulation: that is wrong for ragged weights, and what people write.
    """
    # Without DDP on one rank: a careful person has no need for it there.
    inner = workload.model().to(workload.device)
    alone = workload.runtime.world.alone
    model: Any = inner if alone else DistributedDataParallel(inner, gradient_as_bucket_view=True)
    optimizer = workload.optimizer(inner)

    batches = workload.micro_batches()
    write = workload.log(name)
    for step in range(workload.steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK * rate(step)

        optimizer.zero_grad(set_to_none=True)

        # Gradients are exchanged once in a step, with the last micro-batch.
        for part in range(workload.accumulation):
            last = part == workload.accumulation - 1
            with nullcontext() if last or alone else model.no_sync():
                loss = workload.mean_loss(model, next(batches))
                (loss / workload.accumulation).backward()

        nn.utils.clip_grad_norm_(inner.parameters(), 1.0)
        optimizer.step()

        # The loss of the last micro-batch on each rank.
        if (step + 1) % workload.block == 0:
            write(step + 1, loss)
            yield


def fit(workload: Workload, name: str = "fit") -> Iterator[None]:
    """`lockstep.fit`, stopped after every block; a run of few steps is not stopped, and ends as every other run."""
    if workload.steps < MANY:
        engine_fit(workload.task, open_run(_settings(workload, name), workload.runtime, "bench", workload.task.unit))
        return

    for _ in by_lockstep(workload.task, _settings(workload, name), workload.runtime, workload.block):
        yield


def own_loop(workload: Workload, name: str = "own loop") -> Iterator[None]:
    """A loop around `lockstep.start`."""
    yield from by_own_loop(workload.task, _settings(workload, name), workload.runtime, workload.block)


def _settings(workload: Workload, name: str) -> Resolved:
    """Return the settings with which Lockstep does what the other loops do, in the same number format."""
    values: dict[str, Any] = {
        "global_batch": workload.micro_batch * workload.accumulation * workload.runtime.world.size,
        "micro_batch": workload.micro_batch,
        "clip.norm": 1.0,
        "lr.peak": PEAK,
        "lr.schedule": "cosine",
        "lr.warmup": WARM_UP,
        "log.every": workload.block,
        "run_dir": str(workload.folder / name.replace(" ", "-")),
        "compile": False,
        "graph": False,
        "precision": "fp32",
        "threads": torch.get_num_threads(),
        "device": workload.device.type,
        "steps": workload.steps,
    }

    # `...` leaves the setting at its default (`settings_of`).
    if workload.steps < MANY:
        values["checkpoint.at_end"] = ...  # as in every other run

    return settings_of(type(workload.task), [], values)


def with_accelerate(workload: Workload) -> Iterator[None]:
    """Accelerate's documented loop."""
    from accelerate import Accelerator  # pyrefly: ignore[missing-import]
    from accelerate.state import AcceleratorState, GradientState, PartialState  # pyrefly: ignore[missing-import]

    # It keeps its state for the life of the process.
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()

    accelerator = Accelerator(gradient_accumulation_steps=workload.accumulation, cpu=workload.device.type == "cpu")

    # `prepare` moves the model to the device, wraps it in DDP, and makes the scheduler step with the optimizer.
    inner = workload.model()
    optimizer = workload.optimizer(inner)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model, optimizer, scheduler = accelerator.prepare(inner, optimizer, scheduler)

    batches = workload.micro_batches()
    write = workload.log("accelerate")
    for step in range(workload.steps):
        for part in range(workload.accumulation):
            # It counts the batches of its own loader; with others, the last one must be announced.
            last = part == workload.accumulation - 1
            accelerator.gradient_state._set_sync_gradients(last)
            with nullcontext() if last else accelerator.no_sync(model):
                loss = workload.mean_loss(model, next(batches))
                accelerator.backward(loss)

        # Losses are divided by the accumulation in `backward`.
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        if (step + 1) % workload.block == 0:
            write(step + 1, loss)
            yield


def with_fabric(workload: Workload) -> Iterator[None]:
    """Lightning Fabric's documented loop."""
    from lightning.fabric import Fabric  # pyrefly: ignore[missing-import]

    fabric = Fabric(**_devices(workload))
    fabric.launch()

    # The scheduler takes torch's own optimizer, not Fabric's wrapper of it.
    inner = workload.model()
    model, optimizer = fabric.setup(inner, workload.optimizer(inner))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, rate)

    batches = workload.micro_batches()
    write = workload.log("fabric")
    for step in range(workload.steps):
        for part in range(workload.accumulation):
            with fabric.no_backward_sync(model, enabled=part < workload.accumulation - 1):
                loss = workload.mean_loss(model, next(batches))
                fabric.backward(loss / workload.accumulation)

        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        if (step + 1) % workload.block == 0:
            write(step + 1, loss)
            yield


def _devices(workload: Workload) -> dict[str, Any]:
    """Return Lightning's words for the ranks that are there."""
    world = workload.runtime.world
    return {
        "accelerator": "cpu" if workload.device.type == "cpu" else "cuda",
        "devices": world.size,
        "strategy": "auto" if world.alone else "ddp",
    }


def with_lightning(workload: Workload) -> Iterator[None]:
    """Lightning's Trainer, in a thread that is stopped after every block: its loop belongs to itself."""
    # The two threads never run at once: `go` gives the turn to the trainer, `done` gives it back.
    go = threading.Semaphore(0)
    done = threading.Semaphore(0)
    errors: list[BaseException] = []
    ended = threading.Event()

    def train() -> None:
        # Building belongs to the first turn, whose time includes its cost.
        go.acquire()
        try:
            _lightning_trainer(workload, go, done)
        except BaseException as error:
            # Raised again in the main thread, below.
            errors.append(error)

        ended.set()
        done.release()

    # A daemon: a process that ends does not wait for a training without an end.
    threading.Thread(target=train, daemon=True, name="lightning").start()

    while True:
        go.release()
        done.acquire()

        if errors:
            raise errors[0]
        if ended.is_set():
            return

        yield


def _lightning_trainer(workload: Workload, go: threading.Semaphore, done: threading.Semaphore) -> None:
    """Train with Lightning. After every block it says `done`, and waits until it may `go` on."""
    import lightning  # pyrefly: ignore[missing-import]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = workload.model()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            # Lightning divides by the accumulation itself.
            loss = workload.mean_loss(self.net, batch)
            self.last = loss.detach()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = workload.optimizer(self.net)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    class Stop(lightning.Callback):
        def __init__(self) -> None:
            self.write = workload.log("lightning")

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            # It is called after every micro-batch; a step has several.
            ended = (batch_idx + 1) % workload.accumulation == 0
            if ended and trainer.global_step % workload.block == 0:
                self.write(trainer.global_step, pl_module.last)
                done.release()
                go.acquire()

    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[list[Tensor]]:
            return workload.micro_batches()

    # Everything is off that the other loops do not do either.
    trainer = lightning.Trainer(
        **_devices(workload),
        max_steps=workload.steps,
        accumulate_grad_batches=workload.accumulation,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=str(workload.folder),
        callbacks=[Stop()],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Batches(), batch_size=None))


# By the name in the report: the package that must be installed, and the loop.
PEERS: dict[str, tuple[str, Callable[[Workload], Iterator[None]]]] = {
    "accelerate": ("accelerate", with_accelerate),
    "Fabric": ("lightning", with_fabric),
    "Lightning": ("lightning", with_lightning),
}


def contenders(workload: Workload, peers: bool) -> dict[str, Callable[[], Iterator[None]]]:
    """Return functions that make the loops, by name: the hand-written one first, and last once more, for the noise."""
    found: dict[str, Callable[[], Iterator[None]]] = {
        "by hand": lambda: by_hand(workload),
        "fit": lambda: fit(workload),
        "own loop": lambda: own_loop(workload),
    }

    for name, (package, make) in PEERS.items():
        if peers and importlib.util.find_spec(package):
            found[name] = lambda make=make: make(workload)

    # The same loop under two names: the difference of their times is the machine's own noise.
    found["by hand again"] = lambda: by_hand(workload, "again")
    return found


def prepare_peers(world: World) -> None:
    """Let other libraries find the ranks that are there, and keep them from warning about what was chosen here.

    Call it when the process group has been joined.
    """
    # A single process must not look like a rank of torchrun, or they would make a process group.
    if world.alone:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    else:
        # Without these variables Lightning would start ranks itself.
        os.environ |= {TORCHRUN_ID: "bench", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

    warnings.filterwarnings("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
