"""`exact: true`: the same bits at every number of ranks, under ddp and fsdp: weights, moments and logged numbers."""

from __future__ import annotations

import itertools
import math
import os
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from lockstep.engine.own_loop import OwnRun
from lockstep.engine.setup import open_run
from lockstep.observe.sinks import read_jsonl
from lockstep.parallel.exact import buckets
from lockstep.parallel.exact.buckets import BucketReducer, OrderedHook
from lockstep.runtime import context
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import Pool
from ranks.exact_models import MODELS, WORDS, Perceptron, Tokens, bits, digests
from ranks.support import assert_user_errors, configured, delay_collectives, train_by_hand

WORLDS, PIECES, PATIENCE = (1, 2, 3, 4, 5, 6, 8), (8, 12, 7), timedelta(minutes=3)
ALL_EXACT = "LOCKSTEP_ALL_EXACT" in os.environ
STEPS = 30 if ALL_EXACT else 9  # the last of an epoch is the 5th, 7th or 8th


class Case(NamedTuple):
    """What is trained. The ranks are no part of it."""

    model: str
    optimizer: str
    precision: str
    pieces: int  # micro-batches of a step

    def values(self) -> dict[str, Any]:
        batch = {"global_batch": 2 * self.pieces, "micro_batch": 2}  # of 100 samples: the last step is short
        rest = {"exact": True, "precision": self.precision, "clip.norm": 0.5, "lr.schedule": "cosine"}
        return batch | rest | {"steps": STEPS}


# Every model, optimizer, precision, world, strategy and number of micro-batches at least once.
SOME = [
    (Case("mlp", "sgd", "bf16", 12), "ddp", 5),
    (Case("mlp", "sgd", "bf16", 12), "fsdp", 3),
    (Case("transformer", "adamw", "fp32", 8), "ddp", 8),
    (Case("transformer", "adamw", "bf16", 8), "fsdp", 4),
    (Case("lstm", "adamw", "fp32", 7), "ddp", 6),
    (Case("lstm", "adamw", "fp32", 7), "fsdp", 2),
    (Case("conv", "sgd", "fp32", 8), "ddp", 2),
    (Case("conv", "sgd", "fp32", 8), "zero1", 3),
    (Case("tied", "adamw", "bf16", 8), "ddp", 4),
    (Case("tied", "adamw", "bf16", 8), "fsdp-grads", 3),
]
ALL = [
    (Case(*kind, pieces), strategy, world)
    for kind in itertools.product(MODELS, ("adamw", "sgd"), ("fp32", "bf16"))
    for pieces in (PIECES if kind[0] in ("mlp", "transformer") and kind[1:] == ("adamw", "fp32") else PIECES[:1])
    for strategy, world in itertools.product(("ddp", "fsdp"), WORLDS[1:])
    if world <= pieces
]


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Any:
    """What one process ends with, found once for every case."""
    found: dict[Case, dict[str, Any]] = {}

    def result(case: Case) -> dict[str, Any]:
        if case not in found:
            task = Tokens(case.model, case.optimizer)
            found[case] = pool.run(bits, task, case.values(), world=1, limit=PATIENCE)[0]
        return found[case]

    return result


@pytest.mark.parametrize(
    ("case", "strategy", "world"),
    ALL if ALL_EXACT else SOME,
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_the_same_bits_on_any_number_of_ranks(pool: Pool, alone: Any, case: Case, strategy: str, world: int) -> None:
    values, single = case.values() | {"strategy": strategy}, alone(case)
    every_rank = pool.run(bits, Tokens(case.model, case.optimizer), values, world=world, limit=PATIENCE)
    for found in every_rank:
        assert found["weights"] == single["weights"], _first_difference(found, single)
        if strategy != "zero1":  # where every rank holds the moments of its own part
            assert found["moments"] == single["moments"], _first_difference(found, single)
        assert found["eval"] == single["eval"]
    assert every_rank[0]["logged"] == single["logged"]
    assert single["logged"].count("accuracy") == STEPS // 3


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_without_it_the_bits_differ(pool: Pool, strategy: str) -> None:
    """The control: a test that compares bits must be able to fail."""
    values = Case("mlp", "adamw", "fp32", 8).values() | {"exact": False, "strategy": strategy, "steps": 10}
    single, several = (pool.run(bits, Tokens("mlp"), values, world=world)[0] for world in (1, 3))
    assert single["weights"] != several["weights"]
    assert single["logged"] != several["logged"]


MORE = {
    "fp16": {
        "precision": "fp16",
        "scaler.initial": 2.0**60,
        "scaler.maximum": 2.0**60,
        "scaler.backoff": 2.0**-8,
    },  # overflows at first
    "adaptive clipping": {"clip.norm": None, "clip.adaptive": 0.1},
    "adamw by name": {"optimizer": "adamw"},
    "sgd by name": {"optimizer": "sgd", "lr.peak": 0.1},
    "spikes": {"spike.policy": "skip", "spike.factor": 1e-6, "lr.peak": 1e-5},
}


@pytest.mark.parametrize("name", MORE)
def test_decisions_follow(pool: Pool, name: str) -> None:
    """What is decided from numbers (a skipped step, a scale, a clipped gradient) is decided alike."""
    values = Case("mlp", "adamw", "fp32", 8).values() | {"steps": 12} | MORE[name]
    single = pool.run(bits, Tokens("mlp"), values, world=1)[0]
    for strategy, world in (("ddp", 3), ("fsdp", 2)):
        found = pool.run(bits, Tokens("mlp"), values | {"strategy": strategy}, world=world)[0]
        assert (found["weights"], found["logged"]) == (single["weights"], single["logged"]), strategy
    if name in ("fp16", "spikes"):
        assert single["skipped"] > 0


def _first_difference(found: dict[str, Any], single: dict[str, Any]) -> str:
    return f"first {next(name for name in found['each'] if found['each'][name] != single['each'][name])}"


def by_hand(world: World, store: Any, values: dict[str, Any]) -> dict[str, Any]:
    resolved = configured(values | {"steps": 8, "checkpoint.at_end": False})
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test")
        own = OwnRun(builder)
        train_by_hand(own, Tokens("mlp"))
        own.close()
        assert builder.run is not None
        return digests(builder.run)


def test_a_loop_of_ones_own(pool: Pool) -> None:
    values = {"exact": True, "global_batch": 16}
    single, several = (pool.run(by_hand, values, world=world)[0] for world in (1, 3))
    assert (single["weights"], single["moments"], single["logged"]) == (
        several["weights"],
        several["moments"],
        several["logged"],
    )


# ---- what it costs ----


def counted(world: World, store: Any, pieces: int) -> dict[str, float]:
    """A job: bytes that this rank sends to others for the gradients of one step, and the sums that wait on it."""
    resolved = configured({"exact": True, "global_batch": pieces, "micro_batch": 1, "steps": 1})
    sent, waiting = [], []
    original = dist.batch_isend_irecv

    def counting(transfers: list[dist.P2POp]) -> list[dist.Work]:
        sent.extend(each.tensor.nbytes for each in transfers if each.op is dist.isend)
        return original(transfers)

    dist.batch_isend_irecv = counting
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test")
        driver = builder.setup_model(Perceptron(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1)).driver
        assert isinstance(driver.exact_reducer, BucketReducer)
        tree = driver.exact_reducer.tree
        run = builder.setup_run(Tokens("mlp").data(), torch.utils.data.default_collate)
        batches = next(run.step_batches())

        def loss(model: nn.Module, batch: Any) -> Loss:
            waiting.append(len(tree.partial_sums))
            return Tokens("mlp").loss(model, batch)

        run.stepper.step(batches, loss)
        run.checkpoints.close()
        gradient = sum(p.nbytes for p in driver.parameters.values())
        return {"share": sum(sent) / gradient, "waiting": max(waiting), "gradient": gradient}


@pytest.mark.parametrize(("world", "pieces"), [(2, 2), (4, 4), (2, 8)])
def test_bytes_and_copies(pool: Pool, world: int, pieces: int) -> None:
    """As many bytes as a ring sends, and log2(V/N) sums that wait."""
    for found in pool.run(counted, pieces, world=world):
        rounding = 2 * 4 * world / found["gradient"]  # slices are whole numbers of elements
        assert found["share"] == pytest.approx(2 * (world - 1) / world, abs=rounding)
        assert found["waiting"] == math.log2(pieces / world)


def otherwise(world: World, store: Any, how: str, *arguments: Any) -> dict[str, Any]:
    """A job: buckets travel in many pieces, the last one smaller than the number of ranks, as those of large models;
    or through a copy, as from a GPU that ranks share."""
    if how == "pieces":
        buckets.CHUNK = 87
    else:
        prepare = OrderedHook.prepare
        OrderedHook.prepare = lambda hook, *given: (setattr(hook, "through_host", True), prepare(hook, *given))
    return bits(world, store, *arguments)


@pytest.mark.parametrize("how", ["pieces", "copy"])
def test_the_way_they_travel_leaves_no_trace(pool: Pool, alone: Any, how: str) -> None:
    case = SOME[0][0]
    assert sum(p.numel() for p in Perceptron().parameters()) % 87 == 2
    found = pool.run(otherwise, how, Tokens(case.model, case.optimizer), case.values(), world=5, limit=PATIENCE)
    for rank in found:
        assert rank["weights"] == alone(case)["weights"]


def delayed(world: World, store: Any, *arguments: Any) -> dict[str, Any]:
    """A job: collectives run as late as they may, and buckets travel in many pieces."""
    buckets.CHUNK = 87
    delay_collectives()
    return bits(world, store, *arguments)


class Wide(Tokens):
    """In float64, the format of the control word, which shares a bucket with gradients then."""

    def model(self) -> nn.Module:
        return super().model().double()


def test_nothing_is_overwritten_while_it_travels(pool: Pool) -> None:
    """Neither the control word, which shares its bucket, nor a gradient."""
    values = {"exact": True, "global_batch": 6, "micro_batch": 2, "steps": 2, "log.every": 1}
    single = pool.run(bits, Wide("mlp"), values, world=1)[0]
    several = pool.run(delayed, Wide("mlp"), values, world=3)
    assert [found["weights"] for found in several] == [single["weights"]] * 3
    assert several[0]["logged"] == single["logged"]


# ---- what is refused ----


class Normed(nn.Module):
    def __init__(self, tracked: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)
        self.norm = nn.BatchNorm1d(6, track_running_stats=tracked)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2))


class Counting(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(tokens)


class Twice(nn.Module):
    """Two equal layers, which are blocks; each is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in [*self.layers, *self.layers]:
            x = torch.tanh(layer(x))
        return self.head(x)


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return itertools.cycle([(torch.zeros(8, dtype=torch.int64), torch.ones(7))])


class Streamed(Tokens):
    def data(self) -> Any:
        return Endless()


class Declared(Tokens):
    changing_buffers: Any = ("calls",)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        raise AssertionError("a step has begun")


class Misspelt(Declared):
    changing_buffers = ("counts",)


class Text(Declared):
    changing_buffers = "calls"


EXACT = {"exact": True, "global_batch": 4, "micro_batch": 1, "steps": 2}


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Tokens("norm", network=Normed), ("norm is a BatchNorm1d", "track_running_stats=False")),
        (Tokens("counting", network=Counting), ("the buffer 'calls' changed",)),
        (Declared("counting", network=Counting), ("the buffer 'calls' changes in training",)),
        (Misspelt("counting", network=Counting), ("'counts', which is no buffer of the model", "calls")),
        (Text("counting", network=Counting), ("a string, not a tuple",)),
        (Streamed("mlp"), ("data from a StridedStreamSource",)),
    ],
    ids=["batchnorm", "buffer", "declared", "misspelt", "text", "stream"],
)
def test_what_would_carry_the_ranks_into_the_result(pool: Pool, task: Task, words: tuple[str, ...]) -> None:
    assert_user_errors(pool.errors(bits, task, EXACT, world=2), *words)


def test_statistics_of_each_micro_batch_are_fine(pool: Pool) -> None:
    task = Tokens("norm", network=lambda: Normed(tracked=False))
    values = EXACT | {"global_batch": 8, "micro_batch": 2, "steps": 6}
    single, several = (pool.run(bits, task, values, world=world)[0] for world in (1, 3))
    assert (single["weights"], single["eval"]) == (several["weights"], several["eval"])


class Branches(nn.Module):
    """The first token of a micro-batch decides which branch it takes; one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)
        self.branches = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Sequential(nn.Linear(6, 6))])
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + torch.tanh(self.branches[int(tokens[0, 0]) % 3](x)))


def test_parameters_that_some_micro_batches_leave_out(pool: Pool) -> None:
    """Seven micro-batches: the ranks end with different numbers of roots, and in a short step some with none."""
    task = Tokens("branches", "sgd", network=Branches)
    values = EXACT | {"global_batch": 14, "micro_batch": 2, "steps": 10, "clip.norm": 0.5}
    (single,) = pool.run(bits, task, values, world=1)
    for world, strategy in ((2, "ddp"), (4, "ddp"), (3, "zero1")):
        more = {"strategy": strategy, "ddp.find_unused_parameters": True}
        several, *_ = pool.run(bits, task, values | more, world=world)
        assert (several["weights"], several["eval"]) == (single["weights"], single["eval"])
        assert several["logged"] == single["logged"]


class Laid(nn.Module):
    """Its parameters do not lie in memory in the order of their indices: channels last, transposed, with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)
        self.conv = nn.Conv2d(6, 6, (3, 2), padding="same").to(memory_format=torch.channels_last)
        self.mix = nn.Parameter(torch.randn(5, 6).t() / 3)
        self.gaps = nn.Parameter(torch.randn(6, 10)[:, ::2] / 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(1, 2)[..., None]
        return self.head(self.conv(x)[..., 0].transpose(1, 2) @ self.mix @ self.gaps.t())


@pytest.mark.parametrize("world", [2, 3])
def test_parameters_in_any_layout(pool: Pool, world: int) -> None:
    """DDP passes its hook views of a bucket that would read such gradients in a wrong order."""
    task = Tokens("laid", "sgd", network=Laid)
    values = EXACT | {"global_batch": 12, "micro_batch": 2, "steps": 4}
    single, several = (pool.run(bits, task, values, world=ranks)[0] for ranks in (1, world))
    assert several["weights"] == single["weights"], _first_difference(several, single)
    assert several["logged"] == single["logged"]


def test_a_block_that_is_called_twice(pool: Pool) -> None:
    """Under ddp it is one more graph; under fsdp it must be exact, or be refused."""
    task = Tokens("twice", network=Twice)
    single = pool.run(bits, task, EXACT, world=1)[0]
    assert pool.run(bits, task, EXACT, world=2)[0]["weights"] == single["weights"]
    cut = pool.outcomes(bits, task, EXACT | {"strategy": "fsdp"}, world=2)[0]
    refused = "called more than once" in str(getattr(cut, "error", ""))
    assert refused or cut["weights"] == single["weights"]


def unlike(world: World, store: Any) -> dict[str, Any]:
    """A job: rank 1 computes with other instructions."""
    if world.rank == 1:
        torch.backends.cpu.get_cpu_capability = lambda: "ABACUS"
    return bits(world, store, Tokens("mlp"), EXACT)


def test_ranks_that_compute_otherwise(pool: Pool) -> None:
    assert_user_errors(pool.errors(unlike, world=2), "cpu is", "ABACUS on rank 1", "machines of one kind")


def test_another_number_of_threads_is_refused_on_resume(pool: Pool, tmp_path: Any) -> None:
    values = EXACT | {"run_dir": str(tmp_path / "run"), "checkpoint.at_end": True}
    pool.run(bits, Tokens("mlp"), values, world=2)
    again = values | {"resume": "auto", "steps": 4, "threads": 2}
    assert_user_errors(pool.errors(bits, Tokens("mlp"), again, world=2), "a run with 1", "threads=1")


def test_another_cut_of_the_batch_is_told_on_resume(pool: Pool, tmp_path: Any) -> None:
    values = EXACT | {"run_dir": str(tmp_path / "run"), "checkpoint.at_end": True}
    pool.run(bits, Tokens("mlp"), values, world=2)
    pool.run(bits, Tokens("mlp"), values | {"resume": "auto", "steps": 4, "micro_batch": 2}, world=2)
    told = [event["facts"]["exact"] for event in read_jsonl(tmp_path / "run/events.jsonl") if event["event"] == "start"]
    assert "NOT the same bits" not in told[0]
    assert "NOT the same bits as before, because this has changed: micro_batch: 1 -> 2" in told[-1]
