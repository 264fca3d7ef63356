"""What cannot work is refused before the first step: what was asked, what was found, and what to type instead.

Every row goes the way of a real run, as rank 0 of several. The other ranks are pretended, by torch's process group that
sends nothing: what is not refused comes to its first step. There the row fails; and there it must come when the value
is typed that the refusal names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from lockstep.config import read_layers, resolve
from lockstep.data.samplers import Sampled
from lockstep.engine import loop
from lockstep.engine.log.banner import _compile
from lockstep.engine.own_loop import OwnRun
from lockstep.engine.setup import RunBuilder, open_run
from lockstep.errors import ConfigError, UserError
from lockstep.observe.sinks import read_jsonl
from lockstep.parallel.apply import only_if_it_pays
from lockstep.parallel.compiled.compiler import Compiler
from lockstep.parallel.driver import DriverSetup
from lockstep.parallel.mesh import Mesh
from lockstep.parallel.micro_batches import SingleDriver
from lockstep.precision import PRECISIONS
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import Runtime, log_nothing, start
from lockstep.runtime.environments.launcher import ATTEMPT_FOLDER
from lockstep.runtime.heartbeat import Heartbeat
from lockstep.runtime.host.threads import Threads
from lockstep.runtime.preemption import PreemptionNotice
from lockstep.runtime.world import World
from lockstep.task import Loss, MicroBatch, RunView, Task


class Echo(Collectives):
    """All ranks say what this one says."""

    def all_gather_json(self, value: Any, caller: str = "") -> list[Any]:
        return [value] * self.world.size

    def all_reduce_(self, values: Tensor) -> Tensor:
        return values.mul_(self.world.size)

    def broadcast_(self, tensors: list[Tensor], source: int = 0) -> None:
        pass


@contextmanager
def pretended(ranks: int) -> Iterator[Runtime]:
    world, device, heartbeat = World(0, ranks, 0, ranks), torch.device("cpu"), Heartbeat()
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield Runtime(
            world, device, "fake", Echo(world, device, heartbeat), Threads(1, ""), heartbeat, PreemptionNotice()
        )
    finally:
        if ranks > 1:
            dist.destroy_process_group()


# ---- tasks ----------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, inner: int = 8):
        super().__init__()
        self.up, self.down = nn.Linear(4, inner), nn.Linear(inner, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """With blocks, with layers of usual names, and with a forward that is not a row of modules."""

    def __init__(self, inner: int = 8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(inner) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Strange(nn.Module):
    """No blocks, and no names that mean anything."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.beta(self.alpha(x))


class Bare(nn.Module):
    """A weight and no parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Unset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


class StrangeScaled(Strange):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


class OwnLoader(DataLoader):
    def __iter__(self) -> Any:
        return iter(())


class NoLength(Dataset):
    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(4)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(64, 4))


ROWS = TensorDataset(torch.ones(64, 4))


@dataclass
class Asked(Task):
    """A task with one thing wrong."""

    make: Callable[[], Any] = Net
    samples: Any = field(default_factory=lambda: ROWS)
    held_out: Any = None
    plan: Any = None
    parts: Callable[[Any], Any] = lambda model: None
    made_optimizer: Callable[[Any], Any] = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)

    def model(self) -> Any:
        return self.make()

    def data(self) -> Any:
        return self.samples

    def eval_data(self) -> Any:
        return self.held_out

    def tensor_plan(self, model: nn.Module) -> Any:
        return self.plan

    def stages(self, model: nn.Module) -> Any:
        return self.parts(model)

    def optimizer(self, model: nn.Module) -> Any:
        return self.made_optimizer(model)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        raise FirstStep


class Placed(Asked):
    """Keeps something for every place in the global batch."""

    def before_batch(self, run: RunView, micro: MicroBatch) -> None:
        pass


class FirstStep(Exception):
    """Nothing was refused."""


# ---- the table ------------------------------------------------------------------------------------------

PLAIN = {"global_batch": 16, "micro_batch": 4, "steps": 2}


@dataclass(frozen=True)
class Row:
    """Settings besides PLAIN, of which one is wrong; then words of the problem, of its reason (which may be part of the
    problem or of what was found), and of what to type."""

    values: dict[str, Any]
    asked: str
    found: str
    fix: str
    task: Asked = field(default_factory=Asked)
    ranks: int = 4
    mends: bool = True  # the first value to type, if it names one, is enough; False: it needs more than that


def net_in_row() -> nn.Module:
    return nn.Sequential(Block(), Block())


def long_row() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(8)))


CONFIGURATION = {
    "a misspelt strategy": Row({"strategy": "fsdpp"}, "strategy = fsdpp", "'zero1', 'fsdp-grads'", "set strategy=fsdp"),
    "with an underscore": Row({"strategy": "fsdp_grads"}, "fsdp_grads", "should be", "set strategy=fsdp-grads"),
    "another tool's word": Row({"strategy": "zero3"}, "strategy = zero3", "should be 'ddp'", "set strategy=fsdp"),
    "another tool's format": Row({"precision": "bfloat16"}, "bfloat16", "should be 'auto'", "set precision=bf16"),
    "a micro-batch above the batch": Row(
        {"micro_batch": 32},
        "micro_batch = 32",
        "larger than global_batch",
        "set micro_batch=16, or global_batch=32",
        ranks=1,
    ),
    "half a word of remat": Row({"remat": "every"}, "remat = every", "'every-2'", "set remat=every-2"),
    "a hook with fsdp": Row(
        {"ddp.hook": "bf16", "strategy": "fsdp"}, "strategy = fsdp", "DistributedDataParallel", "set ddp.hook=none"
    ),
    "a hook with tp": Row({"ddp.hook": "powersgd", "mesh.tp": 2}, "mesh.tp = 2", "not used then", "leave mesh.tp out"),
    "buckets with fsdp": Row(
        {"ddp.bucket_mb": 3.0, "strategy": "fsdp"}, "strategy = fsdp", "not used then", "set ddp.bucket_mb=auto"
    ),
    "a static graph with unused parameters": Row(
        {"ddp.static_graph": True, "ddp.find_unused_parameters": True},
        "ddp.static_graph = true",
        "not used then",
        "set ddp.static_graph=false",
    ),
    "a static graph that may have to be cut": Row(
        {"ddp.static_graph": True, "micro_batch": "auto"}, "micro_batch = auto", "one micro-batch", "leave ddp.static"
    ),
    "buffers of rank 0 with fsdp": Row(
        {"ddp.broadcast_buffers": True, "strategy": "fsdp"},
        "ddp.broadcast_buffers = true",
        "not used then",
        "set ddp.broadcast_buffers=false",
    ),
    "offload without fsdp": Row(
        {"fsdp.offload": True}, "with strategy=ddp", "a sharded model", "strategy=fsdp", mends=False
    ),
    "copies without hsdp": Row(
        {"fsdp.replicas": 2, "strategy": "fsdp"}, "fsdp.replicas = 2", "only hsdp", "set strategy=hsdp"
    ),
    "a schedule without a pipeline": Row(
        {"pp.schedule": "gpipe"}, "pp.schedule", "no pipeline", "set strategy=pp", Asked(long_row)
    ),
    "stages that the schedule has not": Row(
        {"strategy": "pp", "pp.stages_per_rank": 2},
        "pp.schedule = 1f1b",
        "one stage on each",
        "pp.schedule=interleaved",
        Asked(long_row),
    ),
    "interleaving one stage": Row(
        {"strategy": "pp", "pp.schedule": "interleaved", "pp.stages_per_rank": 1},
        "interleaved",
        "several stages",
        "set pp.stages_per_rank=2",
        Asked(long_row),
    ),
    "blocks for nothing": Row({"blocks": ["Block"]}, 'blocks = ["Block"]', "block by block", "set remat=full"),
    "a rank of powersgd without it": Row(
        {"ddp.powersgd_rank": 2, "ddp.hook": "bf16"}, "ddp.hook=bf16", "not compressed", "set ddp.hook=powersgd"
    ),
    "a loss scale without fp16": Row(
        {"scaler.initial": 8.0, "precision": "bf16"}, "scaler.initial", "needs no loss scale", "set precision=fp16"
    ),
    "a lowest rate of a constant one": Row(
        {"lr.min_ratio": 0.1}, "lr.schedule=constant", "does not fall", "set lr.schedule=cosine"
    ),
    "a batch rule without a batch": Row(
        {"lr.scaling": "linear"}, "lr.scaling", "reference_batch", "add lr.reference_batch=256"
    ),
    "a batch for no rule": Row({"lr.reference_batch": 64}, "reference_batch", "peak", "set lr.scaling=linear"),
    "spikes that are not detected": Row(
        {"spike.window": 32}, "spike.window", "detection is off", "set spike.policy=skip"
    ),
    "an improvement that stops nothing": Row(
        {"stop.min_delta": 0.1, "evaluate.every": 1},
        "stop.min_delta",
        "no evaluation stops the run",
        "set stop.patience=5",
        Asked(held_out=ROWS),
    ),
    "the best of nothing": Row(
        {"checkpoint.best_mode": "max", "evaluate.every": 1},
        "best_mode",
        "no best",
        "checkpoint.best=",
        Asked(held_out=ROWS),
    ),
    "the best weights of nothing": Row(
        {"checkpoint.final": "best", "evaluate.every": 1},
        "checkpoint.final",
        "no best",
        "checkpoint.best=",
        Asked(held_out=ROWS),
    ),
    "two kinds of clipping": Row({"clip.norm": 1.0, "clip.value": 1.0}, "clip.value", "at most one", "keep one"),
    "speeds with fsdp": Row(
        {"load_balance": "auto", "strategy": "fsdp", "micro_batch": 1},
        "strategy = fsdp",
        "wait for",
        "set strategy=ddp",
    ),
    "speeds with a mesh": Row(
        {"load_balance": [1, 2], "mesh.pp": 2}, "mesh.pp = 2", "wait for each other", "leave mesh.pp out"
    ),
    "lengths in a pipeline": Row(
        {"data.balance": "length", "mesh.pp": 2}, "mesh.pp = 2", "equal numbers of samples", "leave data.balance out"
    ),
    "speeds with statistics of all ranks": Row(
        {"load_balance": "auto", "ddp.sync_batchnorm": True},
        "ddp.sync_batchnorm = true",
        "wait for each other",
        "leave ddp.sync_batchnorm out",
    ),
    "speeds with a static graph": Row(
        {"load_balance": "auto", "ddp.static_graph": True}, "static_graph", "one micro-batch", "leave ddp.static_graph"
    ),
}
GRAPHS = {
    f"graphs with {key}": Row(
        {"graph": True, key: value} | more,
        f"graph = true (command line) cannot be combined with {key}",
        "not captured",
        "set graph=auto",
    )
    for key, value, more in (
        ("strategy", "fsdp", {}),
        ("mesh.tp", 2, {}),
        ("remat", "full", {}),
        ("ddp.find_unused_parameters", True, {}),
    )
} | {
    "graphs with statistics of all ranks": Row(
        {"graph": True, "ddp.sync_batchnorm": True},
        "graph = true (command line) cannot be combined with ddp.sync_batchnorm",
        "not captured",
        "set graph=auto",
        mends=False,  # this model has no BatchNorm
    ),
    "cuDNN, repeatable": Row(
        {"attention": "cudnn", "deterministic": True}, "attention = cudnn", "no fixed order", "set attention=flash"
    ),
    "graphs on a CPU": Row({"graph": True}, "graph=true", "for GPUs", "leave graph out"),
    "exact graphs": Row({"graph": True, "exact": True}, "exact = true", "chosen again", "leave graph out"),
}
GRID = {
    "a mesh that does not divide": Row(
        {"mesh.tp": 3}, "mesh.tp=3 does not fit 4 ranks", "not a multiple", "set mesh.tp=2"
    ),
    "a mesh that is full": Row({"mesh": {"dp": 4, "tp": 2}}, "mesh.dp=4, mesh.tp=2", "needs 8 ranks", "set mesh.dp=2"),
    "hsdp with tp": Row(
        {"strategy": "hsdp", "mesh.tp": 2}, "strategy=hsdp", "cannot be combined with mesh.tp", "set strategy=fsdp"
    ),
    "zero1 with pp": Row(
        {"strategy": "zero1", "mesh.pp": 2},
        "strategy=zero1",
        "cannot be combined with mesh.pp",
        "set strategy=ddp",
        Asked(long_row),
    ),
    "offload on a CPU": Row({"strategy": "fsdp", "fsdp.offload": True}, "offload=true", "a CPU", "leave fsdp.offload"),
    "offload with tp": Row(
        {"strategy": "fsdp", "fsdp.offload": True, "mesh.tp": 2},
        "offload=true",
        "host memory",
        "leave fsdp.offload out",
    ),
    "tp over one rank": Row({"strategy": "tp", "mesh.tp": 1}, "mesh.tp=1", "nothing to shard", "leave mesh.tp out"),
    "three copies on four ranks": Row(
        {"strategy": "hsdp", "fsdp.replicas": 3}, "into 3 replicas", "4 is not a multiple of 3", "set fsdp.replicas=2"
    ),
    "hsdp with pp": Row(
        {"strategy": "hsdp", "mesh.pp": 2},
        "strategy=hsdp",
        "cannot be combined with mesh.pp",
        "set strategy=fsdp",
        Asked(long_row),
    ),
    "interleaved stages that are cut": Row(
        {"strategy": "fsdp", "mesh.pp": 2, "pp.schedule": "interleaved"},
        "pp.schedule=interleaved cannot be combined with strategy=fsdp",
        "in full from forward to backward",
        "set pp.schedule=1f1b",
        Asked(long_row),
    ),
    "zero-bubble, compiled": Row(
        {"strategy": "pp", "pp.schedule": "zero-bubble", "compile": True},
        "compile=true",
        "two halves",
        "compile=false",
        Asked(long_row),
    ),
}
MODEL = {
    "no module": Row(
        {}, "must return an nn.Module; it returned a tuple", "", "the module itself", Asked(lambda: (Net(), 1))
    ),
    "wrapped": Row(
        {}, "wrapped in DataParallel", "a plain model", "set strategy=ddp", Asked(lambda: nn.DataParallel(Net()))
    ),
    "compiled": Row(
        {}, "wrapped in OptimizedModule", "a plain model", "set compile=true", Asked(lambda: torch.compile(Net()))
    ),
    "half weights": Row({}, "float32", "half precision", "model.float()", Asked(lambda: Net().bfloat16())),
    "frozen": Row(
        {}, "nothing to train", "requires_grad", "unfreeze the parameters", Asked(lambda: Net().requires_grad_(False))
    ),
    "remat without blocks": Row(
        {"remat": "full"}, "remat=full finds no blocks", "no ModuleList", "blocks=[", Asked(Strange)
    ),
    "blocks that are not there": Row(
        {"remat": "full", "blocks": ["Blok"]}, "blocks=[Blok]", "no module of this class", "set blocks=[Block]"
    ),
    "one of two blocks that is not there": Row(
        {"remat": "full", "blocks": ["Block", "Tree"]},
        "blocks=[Tree]",
        "no module of this class",
        "set blocks=[Block]",
    ),
    "blocks that nobody calls": Row(
        {"strategy": "fsdp", "blocks": ["ModuleList"]}, "blocks=[ModuleList]", "no forward", "set blocks=[Block]"
    ),
    "the model as its block": Row(
        {"strategy": "fsdp", "blocks": ["Net"]}, "blocks=[Net]", "the model itself", "set blocks=[Block]"
    ),
    "a block of a model without parts": Row(
        {"strategy": "fsdp", "blocks": ["Bare"]}, "blocks=[Bare]", "the model itself", "leave blocks out", Asked(Bare)
    ),
    "remat of every block by number": Row(
        {"remat": "every-1"}, "every-1 would recompute all blocks", "", "set remat=full"
    ),
    "remat of fewer blocks than there are": Row(
        {"remat": "every-4"}, "remat=every-4", "the model has 3 blocks", "set remat=every-3"
    ),
    "remat of BatchNorm": Row(
        {"remat": "full", "blocks": ["BatchNorm1d"]},
        "count every batch twice",
        "running statistics",
        "GroupNorm",
        Asked(Strange),
    ),
    "meta under ddp": Row(
        {"init": "meta"},
        "init=meta cannot be combined with strategy=ddp",
        "one block after another",
        "set strategy=fsdp",
    ),
    "meta with a mesh": Row(
        {"init": "meta", "strategy": "fsdp", "mesh.tp": 2},
        "and a mesh",
        "one block after another",
        "leave the mesh out",
    ),
    "meta, with weights that nobody sets": Row(
        {"init": "meta", "strategy": "fsdp"},
        "cannot initialise 'weight'",
        "would be arbitrary",
        "set all of them",
        Asked(Unset),
        mends=False,
    ),
    "a scalar to cut": Row(
        {"strategy": "fsdp", "mesh.pp": 2},
        "strategy=fsdp with mesh.pp",
        "'scale': it has no dimension",
        "set strategy=ddp",
        Asked(Scaled),
    ),
    "tp without a plan": Row(
        {"strategy": "tp"}, "no layers to shard", "no tensor_plan", "tensor_plan(", Asked(Strange)
    ),
    "tp of 6 features": Row(
        {"strategy": "tp"}, "over 4 ranks", "6 output features", "set mesh.tp=2", Asked(lambda: Net(6))
    ),
    "tp of 6 features, over ranks that do not fit": Row(
        {"strategy": "tp", "mesh.dp": 2},
        "over 5 ranks",
        "6 output features",
        "set mesh.tp=3 --nproc 6, or write a tensor_plan without 'blocks.0.up'",
        Asked(lambda: Net(6)),
        ranks=10,
        mends=False,
    ),
    "a plan of 6 features": Row(
        {"strategy": "tp"},
        "over 5 ranks",
        "6 output features",
        "leave 'blocks.0.up' out of tensor_plan",
        Asked(lambda: Net(6), plan={"blocks.*.up": "colwise"}),
        ranks=5,
        mends=False,
    ),
    "tp of a model with a scalar": Row(
        {"strategy": "tp"}, "no layers to shard", "no tensor_plan", "set strategy=fsdp", Asked(StrangeScaled)
    ),
    "a plan that is a list": Row({"strategy": "tp"}, "returned a list", "", "colwise", Asked(plan=["up"])),
    "a plan for nobody": Row(
        {"strategy": "tp"},
        "'layers.*' in tensor_plan matches no layer",
        "",
        "blocks.0.up",
        Asked(plan={"layers.*": "colwise"}),
    ),
    "a pipeline without stages": Row(
        {"strategy": "pp"}, "into stages", "no ModuleList", "[Front(model), Middle(model)", Asked(Strange)
    ),
    "more stages than parts": Row(
        {"strategy": "pp"}, "into 4 stages", "split into 2", "at most 2 stages", Asked(net_in_row)
    ),
    "stages that are no modules": Row(
        {"strategy": "pp"}, "it contains a str", "", "Front(model)", Asked(parts=lambda model: ["blocks"])
    ),
    "one micro-batch in a pipeline": Row(
        {"strategy": "pp", "micro_batch": 16},
        "mesh.pp",
        "1 micro-batch of 16 samples",
        "micro_batch=8",
        Asked(net_in_row),
        ranks=2,
    ),
    "no optimizer": Row({}, "it returned a NoneType", "", "torch.optim", Asked(made_optimizer=lambda model: None)),
    "statistics beside bf16 weights": Row(
        {"precision": "bf16-master"},
        "with BatchNorm ('beta') on a CPU",
        "stay in float32",
        "set precision=bf16",
        Asked(Strange),
    ),
    "places of a batch in a pipeline": Row(
        {"strategy": "pp"}, "before_batch()", "in flight together", "set strategy=ddp", Placed(long_row)
    ),
    "places of a batch divided by length": Row(
        {"data.balance": "length"}, "before_batch()", "change their places", "leave data.balance out", Placed()
    ),
    "places of a batch that move": Row(
        {"load_balance": "auto", "micro_batch": 1}, "before_batch()", "other ranks", "give one number", Placed()
    ),
    "tf32 on a CPU": Row(
        {"precision": "tf32"}, "precision=tf32 cannot be used on cpu, which has no TF32", "", "set precision=fp32"
    ),
}
BATCH = {
    "fewer samples than ranks": Row(
        {"global_batch": 3, "micro_batch": None},
        "global_batch=3 cannot be split over 4",
        "1 rank would have nothing",
        "--nproc 3",
    ),
    "fewer micro-batches than ranks": Row(
        {"micro_batch": 8}, "micro-batches of 8 cannot be split over 4", "cannot be split", "set micro_batch=4 or less"
    ),
    "a static graph of several micro-batches": Row(
        {"ddp.static_graph": True, "micro_batch": 1}, "static_graph=true", "4 micro-batches per rank", "micro_batch=4"
    ),
    "one speed for four ranks": Row(
        {"load_balance": [1.0]}, "load_balance=[1.0] has 1 number for 4 ranks", "", "load_balance=auto"
    ),
    "nothing to assign": Row(
        {"load_balance": "auto"},
        "cannot assign 4 micro-batches to 4 ranks",
        "each rank has at most one, so none can be moved",
        "set micro_batch=1",
    ),
    "a micro-batch that nobody can lower": Row(
        {"micro_batch": "auto"}, "micro_batch=auto", "started by another", "--nproc N"
    ),
    "less than a step": Row({"steps": None, "epochs": 0.01}, "epochs=0.01", "less than half a step", "set steps=1"),
    "no whole step": Row({"tail": "drop", "global_batch": 128}, "tail=drop", "leaves no step", "set tail=short"),
}
DATA = {
    "a loader without batches": Row(
        {}, "batch_size=None", "makes the batches", "set global_batch", Asked(samples=DataLoader(ROWS, batch_size=None))
    ),
    "a loader with batches of its own": Row(
        {},
        "batch_sampler is a list",
        "divides every step",
        "Sampled(dataset, sampler)",
        Asked(samples=DataLoader(ROWS, batch_sampler=[[0, 1], [2, 3]])),
    ),
    "a loader that prepares its workers": Row(
        {},
        "has worker_init_fn",
        "would not use",
        "seeded one by one",
        Asked(samples=DataLoader(ROWS, worker_init_fn=print)),
    ),
    "a loader that iterates in its own way": Row(
        {}, "is a OwnLoader", "by their ids", "its dataset", Asked(samples=OwnLoader(ROWS))
    ),
    "a loader to evaluate on that repeats samples": Row(
        {},
        "has a RandomSampler",
        "every sample counts once",
        "Subset(dataset, ids)",
        Asked(held_out=DataLoader(ROWS, sampler=RandomSampler(ROWS, replacement=True))),
    ),
    "a loader to evaluate on that leaves samples out": Row(
        {},
        "has drop_last=True",
        "every sample counts once",
        "leave drop_last",
        Asked(held_out=DataLoader(ROWS, drop_last=True)),
    ),
    "no lengths": Row(
        {"data.balance": "length"}, "needs the length of each sample", "has none", "Sampled(dataset, len"
    ),
    "too few lengths": Row(
        {"data.balance": "length"},
        "2 lengths for 64 samples",
        "",
        "one length for each sample",
        Asked(samples=Sampled(ROWS, lengths=[1, 2])),
    ),
    "lengths of a stream": Row(
        {"data.balance": "length"}, "is a Stream", "before they are read", "leave data.balance", Asked(samples=Stream())
    ),
    "a number": Row({}, "a int can neither be indexed nor iterated", "", "torch Dataset", Asked(samples=5)),
    "no data": Row({"epochs": 2.0, "steps": None}, "data is None", "", "run.steps", Asked(samples=None)),
    "no length": Row(
        {}, "data cannot be read: a NoLength has no __len__", "", "torch Dataset", Asked(samples=NoLength())
    ),
    "no samples": Row({}, "the dataset has no samples", "no samples", "check the path", Asked(samples=[])),
    "shards of its own": Row({"data.sharding": "own"}, "sharding=own cannot", "for a stream", "leave data.sharding"),
    "rereading no stream": Row(
        {"data.resume": "reread"}, "reread cannot", "it is for streams", "leave data.resume out"
    ),
    "rereading its own shards": Row(
        {"data.resume": "reread", "data.sharding": "own"},
        "sharding=own cannot be used with a stream that resumes exactly",
        "a different position on each rank",
        "leave data.sharding out",
        Asked(samples=Stream()),
    ),
    "speeds of a stream": Row(
        {"load_balance": "auto", "micro_batch": 1},
        "load_balance cannot be used with data from a StridedStreamSource",
        "its own samples",
        "leave load_balance",
        Asked(samples=Stream()),
    ),
    "numbers of a stream": Row(
        {"log.samples": True}, "the samples of a stream have none", "", "leave", Asked(samples=Stream())
    ),
    "an uneven stream": Row(
        {"global_batch": 18, "micro_batch": 2},
        "on 4 ranks",
        "the same number of micro-batches",
        "multiple of 4",
        Asked(samples=Stream()),
    ),
    "epochs of a stream": Row(
        {"steps": None, "epochs": 2},
        "epochs=2.0 cannot be counted",
        "without a length",
        "set steps",
        Asked(samples=Stream()),
    ),
    "rewinding a stream": Row(
        {"nonfinite.policy": "rewind"},
        "rewind",
        "StridedStreamSource",
        "set nonfinite.policy=skip",
        Asked(samples=Stream()),
    ),
    "an evaluation of a stream": Row(
        {}, "this one is a stream", "every sample", "list(stream)", Asked(held_out=Stream())
    ),
    "an evaluation of nothing": Row({}, "to evaluate on has no samples", "", "return None", Asked(held_out=[])),
    "patience without evaluations": Row(
        {"stop.patience": 3},
        "there is no evaluation during the run",
        "",
        "set evaluate.every",
        Asked(held_out=ROWS),
    ),
    "a set that is not there": Row(
        {"evaluate.monitor": "val", "evaluate.every": 1},
        "evaluate.monitor=val",
        "",
        "leave evaluate.monitor out",
        Asked(held_out=ROWS),
    ),
    "the best without evaluations": Row(
        {"checkpoint.best": "eval_loss"},
        "there is no evaluation during the run",
        "",
        "set evaluate.every",
        Asked(held_out=ROWS),
    ),
}
TABLE = CONFIGURATION | GRAPHS | GRID | MODEL | BATCH | DATA


def attempt(row: Row, folder: Path, train: Callable[[RunBuilder, Asked], Any], *fix: str) -> None:
    values = {"device": "cpu", "compile": False, "run_dir": str(folder / f"run{len(fix)}"), "log.progress": "off"}
    layers = [("task default", values), ("command line", PLAIN | row.values), ("fix", read_layers([], fix)[0][1])]
    resolved = resolve(layers)
    with pretended(row.ranks) as runtime:
        train(open_run(resolved, runtime, "asked"), row.task)


def check_refused(row: Row, folder: Path, train: Callable[[RunBuilder, Asked], Any]) -> None:
    with pytest.raises(UserError) as refused:
        attempt(row, folder, train)
    told = refused.value
    if isinstance(told, ConfigError):
        (told,) = told.problems
    assert row.asked in told.problem
    assert row.found in f"{told.problem}\n{told.found}"
    assert row.fix in told.fix
    if row.mends and (typed := re.match(r"set ([\w.]+=(\[.*?\]|[\w.-]+))", told.fix)):
        with pytest.raises(FirstStep):
            attempt(row, folder, train, typed[1])


@pytest.mark.parametrize("name", TABLE)
def test_refused_before_the_first_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTEMPT_FOLDER, raising=False)
    check_refused(TABLE[name], tmp_path, lambda builder, task: loop.fit(task, builder))


def by_hand(builder: RunBuilder, task: Asked) -> None:
    own = OwnRun(builder)
    model = task.make()
    own.setup(model, task.optimizer(model))
    for _ in own.steps(task.data()):
        raise FirstStep


OWN_LOOPS = {
    "a pipeline": Row({"strategy": "pp"}, "custom loop", "one micro-batch after another", "fit", Asked(net_in_row), 2),
    "meta under ddp": Row(
        {"init": "meta"},
        "init=meta cannot be combined with strategy=ddp",
        "one block after another",
        "set strategy=fsdp",
        mends=False,
    ),
    "meta, made with weights": Row(
        {"init": "meta", "strategy": "fsdp"},
        "init=meta cannot be used: Net already has weights",
        "",
        "with run.init_module():",
    ),
    "a loader without batches": DATA["a loader without batches"],
    "speeds of a stream": DATA["speeds of a stream"],
}


@pytest.mark.parametrize("name", OWN_LOOPS)
def test_refused_in_a_loop_of_ones_own(name: str, tmp_path: Path) -> None:
    check_refused(OWN_LOOPS[name], tmp_path, by_hand)


# ---- what is not refused --------------------------------------------------------------------------------

TOLD = [
    ({}, 2, {}, Net),
    ({}, 1, {}, Net),
    ({"strategy": "zero1"}, 2, {"strategy": "zero1: optimizer state sharded over 2 ranks"}, Net),
    ({"strategy": "fsdp"}, 2, {"strategy": "fsdp: 3 blocks of Block, sharded over 2 ranks"}, Net),
    ({"strategy": "fsdp"}, 1, {"strategy": "fsdp: one process, so nothing is sharded"}, Net),
    (
        {"strategy": "fsdp"},
        2,
        {
            "strategy": "fsdp: no blocks, sharded over 2 ranks: the full model is gathered at once, which saves little "
            "(name some, such as blocks=[Linear])"
        },
        Strange,
    ),
    ({"strategy": "hsdp"}, 4, {"strategy": "hsdp: 3 blocks of Block, sharded over 2 ranks, 2 replicas"}, Net),
    (
        {"strategy": "hsdp"},
        2,
        {"strategy": "hsdp: 2 replicas on one rank each, so nothing is sharded (set strategy=ddp, or strategy=fsdp)"},
        Net,
    ),
    ({"mesh.tp": 2}, 4, {"strategy": "ddp: 6 layers sharded over 2 ranks; 2 replicas"}, Net),
    ({"strategy": "pp", "mesh.pp": 2}, 4, {"strategy": "pp: 2 stages over 2 ranks; 2 replicas"}, long_row),
    ({"strategy": "pp", "pp.schedule": "interleaved"}, 2, {"strategy": "pp: 4 stages over 2 ranks"}, long_row),
    (
        {"strategy": "fsdp", "mesh.pp": 2},
        4,
        {"strategy": "fsdp: 2 stages over 2 ranks; 8 blocks of Block, sharded over 2 ranks"},
        long_row,
    ),
    (
        {"strategy": "fsdp", "mesh.tp": 2},
        2,
        {
            "strategy": "fsdp: 6 layers sharded over 2 ranks; one group of ranks with samples of its own, so nothing "
            "more is sharded (mesh.dp is 1)"
        },
        Net,
    ),
    ({"remat": "full"}, 2, {"remat": "full: 3 blocks of Block"}, Net),
    ({"remat": "every-2"}, 1, {"remat": "every-2: 2 blocks of Block (of 3)"}, Net),
]


@pytest.mark.parametrize(("values", "ranks", "expected", "make"), TOLD)
def test_how_the_ranks_share_the_model_is_told(
    values: dict[str, Any], ranks: int, expected: dict[str, str], make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(FirstStep):
        attempt(Row(values, "", "", "", Asked(make), ranks), tmp_path, lambda builder, task: loop.fit(task, builder))
    (start,) = (record for record in read_jsonl(tmp_path / "run0/events.jsonl") if record["event"] == "start")
    plan = json.loads((tmp_path / "run0/plan.json").read_text())
    for told in (start["facts"], plan):
        assert {key: told[key] for key in ("strategy", "remat") if key in told} == expected


@pytest.mark.parametrize(
    ("values", "ranks", "expected", "make"),
    [
        ({"strategy": "fsdp"}, 1, "the loss with the model, or as much of it as can be", Net),
        ({"strategy": "fsdp"}, 2, "the model, in the first step: forwards are collective", Net),
        ({"mesh.tp": 2}, 2, "the model, in the first step: forwards are collective", Net),
        ({"strategy": "pp"}, 2, "the stages, in the first step: forwards are collective", long_row),
    ],
)
def test_what_is_compiled_is_told(
    values: dict[str, Any], ranks: int, expected: str, make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    row = Row(values | {"compile": True}, "", "", "", Asked(make), ranks)
    with pytest.raises(FirstStep):
        attempt(row, tmp_path, lambda builder, task: loop.fit(task, builder))
    (start,) = (record for record in read_jsonl(tmp_path / "run0/events.jsonl") if record["event"] == "start")
    assert start["facts"]["compile"].startswith(expected)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "if it pays: the first steps are timed"),
        ({"deterministic": True}, "in the first step: a repeatable run must not depend on the time"),
        ({"precision": "fp8"}, "in the first step: float8 needs it"),
    ],
)
def test_compile_auto_says_when_nothing_is_measured(values: dict[str, Any], words: str) -> None:
    config = resolve([("test", {"device": "cpu"})]).config
    precision = PRECISIONS[values.get("precision", "fp32")]
    with start(World(), config) as runtime:
        config = resolve([("test", values)]).config
        driver = SingleDriver(nn.Linear(2, 2), DriverSetup(config, runtime, precision))
        pays = only_if_it_pays(config, precision)
        driver.compiler = Compiler(driver, config, log_nothing, pays, precision.loses_bits, None)

    assert words in _compile(driver, Mesh({"dp": 1, "tp": 1, "pp": 1}, rank=0))


@pytest.mark.parametrize(
    "task", [{"fsdp.offload": True, "strategy": "fsdp"}, {"lr.min_ratio": 0.1, "blocks": ["Block"]}]
)
def test_a_task_may_prepare_options_and_a_user_may_switch_them_off(task: dict[str, Any]) -> None:
    resolve([("task default", task), ("command line", {"strategy": "ddp", "lr.schedule": "constant"})])


@pytest.mark.parametrize(
    "values", [{"precision": "fp8"}, {"strategy": "pp"}, {"mesh.pp": 2}, {"strategy": "fsdp"}, {"compile": True}]
)
def test_blocks_may_be_named_where_something_is_done_by_blocks(values: dict[str, Any]) -> None:
    resolve([("command line", values | {"blocks": ["Block"]})])


def test_places_of_a_batch_that_stay_where_they_are(tmp_path: Path) -> None:
    row = Row({"load_balance": [1, 2, 1, 1], "micro_batch": 1}, "", "", "", Placed())
    with pytest.raises(FirstStep):
        attempt(row, tmp_path, lambda builder, task: loop.fit(task, builder))


def test_a_process_group_of_another_size_than_the_environment_says() -> None:
    alone = start(World(), resolve([]).config)
    with pretended(4), pytest.raises(UserError, match="rank 0 of 4 there, RANK=0 of WORLD_SIZE=1"), alone:
        pass


def test_a_file_may_be_overruled_and_what_a_run_has_written_is_read_back() -> None:
    file = {"strategy": "fsdp", "fsdp.offload": True, "lr.schedule": "cosine", "lr.min_ratio": 0.1}
    overruled = resolve([("file a.yaml", file), ("command line", {"strategy": "ddp", "lr.schedule": "constant"})])
    written = overruled.config.model_dump()
    assert resolve([("file config.yaml", written)]).config == overruled.config
    with pytest.raises(ConfigError, match="can be offloaded"):
        resolve([("file a.yaml", {"strategy": "ddp"}), ("command line", {"fsdp.offload": True})])
