"""The classic trainers: the names, arguments and methods that scripts expect, with the core's results behind them."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from classic_net import Net, among, net, numbers, weights
from lockstep.checkpoint import command as ckpt
from lockstep.classic import (
    AMPConfig,
    AMPTrainer,
    DDPManager,
    DistributedAMPTrainer,
    DistributedConfig,
)
from lockstep.classic.distributed_amp_trainer import own_gpu
from lockstep.classic.train_script import check_processes
from lockstep.config import ScalerConfig
from lockstep.errors import ConfigError, UserError
from lockstep.runtime.world import World
from pool import Pool
from ports import free_port

FP32 = AMPConfig(enabled=False, device="cpu")


def digest(model: nn.Module) -> str:
    return hashlib.sha256(weights(model).numpy().tobytes()).hexdigest()


def plain_loop(batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the weights that a trainer should reach, computed in plain PyTorch."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for x, y in batches:
        optimizer.zero_grad()
        model(x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return weights(model)


# ---- AMPTrainer ---------------------------------------------------------------------------------------------


def test_it_trains_as_plain_pytorch_does():
    x, y = numbers(40)
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 40, 8)]
    trainer = AMPTrainer(net(), FP32)
    losses = [trainer.training_step(batch).loss for batch in batches]
    assert torch.allclose(weights(trainer.model), plain_loop(batches), atol=1e-6)
    assert losses[0] == pytest.approx(net()(*batches[0]).item(), rel=1e-6)
    assert trainer.steps == 5


def test_accumulated_batches_of_any_size_are_one_batch():
    x, y = numbers(32)
    trainer = AMPTrainer(net(), AMPConfig(enabled=False, gradient_accumulation_steps=3, device="cpu"))
    cuts = [(0, 3), (3, 20), (20, 32)]
    results = [trainer.training_step((x[a:b], y[a:b])).result for a, b in cuts]
    assert [result is None for result in results] == [True, True, False]
    assert torch.allclose(weights(trainer.model), plain_loop([(x, y)]), atol=1e-6)


class Overflows(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * (math.inf if bool(x[0, 0] > 50) else 1.0)


def test_an_overflow_is_skipped_and_lowers_the_scale():
    scaler = ScalerConfig(initial=1024.0, interval=2)
    trainer = AMPTrainer(Overflows(), AMPConfig(scaler=scaler, device="cpu"))
    x, y = numbers(8)
    bad = x.clone()
    bad[0, 0] = 100.0
    scales = []
    for inputs in (x, bad, x, x):
        before = weights(trainer.model)
        applied = trainer.training_step((inputs, y)).result.applied
        assert applied == (inputs is x)
        assert torch.equal(before, weights(trainer.model)) != applied
        scales.append(trainer.scaler.value)
    assert scales == [1024.0, 512.0, 512.0, 1024.0]
    fixed = AMPTrainer(Overflows(), AMPConfig(static_scale=256.0, device="cpu"))
    fixed.training_step((bad, y))
    assert fixed.scaler.value == 256.0


class Fails(torch.autograd.Function):
    """Its second backward raises, after the gradients of the last layer were added."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Fails.calls += 1
        if Fails.calls == 2:
            raise torch.OutOfMemoryError("too large")
        return gradient


class TwoLayers(nn.Module):
    def __init__(self, fails):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.between = Fails.apply if fails else lambda x: x

    def forward(self, x):
        return self.last(self.between(self.first(x))).square().mean()


def train_on(batches, fails):
    trainer = AMPTrainer(TwoLayers(fails), AMPConfig(enabled=False, gradient_accumulation_steps=2, device="cpu"))
    trained = []
    for x in batches:
        try:
            trained.append(trainer.training_step((x,)).result)
        except torch.OutOfMemoryError:
            continue
    return trainer, [result.weight for result in trained if result]


def test_a_caller_may_go_on_after_a_backward_that_has_raised():
    """The batches of this step are dropped: a part of the gradients was added."""
    Fails.calls = 0
    batches = torch.randn(4, 8, 4).unbind()
    trainer, trained = train_on(batches, fails=True)
    expected, _ = train_on(batches[2:], fails=False)
    assert trained == [16]
    assert torch.allclose(weights(trainer.model), weights(expected.model))


def test_one_of_several_processes_cannot_begin_a_step_anew():
    Fails.calls = 1
    trainer = AMPTrainer(TwoLayers(fails=True), FP32)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.training_step((torch.ones(8, 4),))
    trainer.runtime = SimpleNamespace(world=World(0, 2))
    with pytest.raises(UserError, match="the backward of a batch has raised in optimizer step 1"):
        trainer.training_step((torch.ones(8, 4),))


@pytest.mark.parametrize(
    ("model", "batch", "loss_fn"),
    [
        (nn.Linear(4, 2), numbers(3)[0], None),  # its output is no loss
        (nn.Linear(4, 2), {"input": numbers(3)[0]}, None),
        (nn.Linear(4, 2), numbers(3)[0], lambda model, x: {"nothing": model(x)}),
    ],
    ids=["a tensor", "a mapping", "loss_fn"],
)
def test_a_missing_loss_is_an_error(model, batch, loss_fn):
    with pytest.raises(UserError, match="must return a loss for the batch"):
        AMPTrainer(model, FP32, loss_fn=loss_fn).training_step(batch)


def test_a_wrong_configuration_is_refused_when_it_is_made():
    with pytest.raises(ConfigError) as error:
        AMPConfig(dtype="float17", max_grad_norm=-1.0, gradient_accumulation_steps=0, lr_schedule="cosine")
    assert len(error.value.problems) == 4
    assert AMPConfig(dtype="bfloat16").precision == "bf16"


# ---- DistributedAMPTrainer ----------------------------------------------------------------------------------


def test_its_arguments_are_the_documented_ones():
    named = list(inspect.signature(DistributedAMPTrainer).parameters.values())
    documented = ["model", "config", "rank", "world_size", "backend", "device_ids"]
    assert [p.name for p in named if p.kind is p.POSITIONAL_OR_KEYWORD] == documented
    assert {p.name: p.default for p in named[2:6]} == {
        "rank": 0,
        "world_size": 1,
        "backend": "nccl",
        "device_ids": None,
    }
    assert issubclass(DistributedAMPTrainer, AMPTrainer)


def train_unevenly(world: World, store: Any, folder: Path) -> dict[str, Any]:
    """Rank 0 has 5 samples of every step and rank 1 has 3; then 3 batches against 1."""
    among(world, store)
    trainer = DistributedAMPTrainer(net(), FP32, backend="gloo")
    x, y = numbers(24)
    mine = slice(0, 5) if world.rank == 0 else slice(5, 8)
    for start in (0, 8):
        trainer.training_step((x[start : start + 8][mine], y[start : start + 8][mine]))
    saved = trainer.save_checkpoint(folder)
    trainer.training_step((x[16:][mine], y[16:][mine]))
    after, wrapped = weights(trainer.model), type(trainer.model)
    again = DistributedAMPTrainer(Net(), FP32, world.rank, world.size, "gloo")
    step = again.load_checkpoint(folder)
    again.training_step((x[16:][mine], y[16:][mine]))
    epochs = [[(x[i : i + 2], y[i : i + 2]) for i in (0, 2, 4)], [(x[6:8], y[6:8])]]
    mean = again.train_epoch(epochs[world.rank])
    return {
        "after": after,
        "saved": str(saved),
        "step": step,
        "steps": again.steps,
        "mean": mean,
        "end": weights(again.model),
        "digest": digest(again.model),
        "ddp": issubclass(wrapped, DistributedDataParallel),
        "distributed": DistributedAMPTrainer.is_distributed(),
        "ranks": (trainer.rank, trainer.world_size),
    }


def train_resumed(world: World, store: Any, folder: Path) -> Tensor:
    """On one process, from what two have saved."""
    trainer = DistributedAMPTrainer(Net(), FP32)
    trainer.load_checkpoint(folder)
    x, y = numbers(24)
    trainer.training_step((x[16:], y[16:]))
    return weights(trainer.model)


def test_uneven_ranks_give_what_one_process_gives(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(train_unevenly, tmp_path, world=2)
    x, y = numbers(24)
    batches = [(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:], y[16:])]
    expected = plain_loop(batches)
    ids = [[0, 1, 6, 7], [2, 3], [4, 5]]  # of the steps of `train_epoch`: rank 1 brings something to the first only
    end = plain_loop([*batches, *((x[some], y[some]) for some in ids)])
    for rank, one in enumerate(found):
        assert torch.allclose(one["end"], end, atol=1e-6)
        assert torch.allclose(one["after"], expected, atol=1e-6)
        assert one["ranks"] == (rank, 2)
        assert one["ddp"]
        assert one["distributed"]
        assert one["step"] == 2
        assert one["steps"] == 3 + 3  # the rank with one batch waited for the other's three
    assert found[0]["digest"] == found[1]["digest"]
    assert found[0]["mean"] == found[1]["mean"] > 0
    # One rank has written one intact file, and another number of ranks resumes from it.
    parts = list(Path(found[0]["saved"]).glob("rank-*"))
    assert len(parts) == 1
    assert ckpt.verify(tmp_path)[1] == 0
    resumed = pool.run(train_resumed, tmp_path, world=1)[0]
    assert torch.allclose(resumed, expected, atol=1e-6)


def one_step_of_four(world: World, store: Any) -> tuple[Tensor, float]:
    """One step: 1, 6, 2 and 7 samples."""
    among(world, store)
    trainer = DistributedAMPTrainer(net(), FP32)
    ends = [0, 1, 7, 9, 16]
    mine = slice(ends[world.rank], ends[world.rank + 1])
    x, y = numbers(16)
    result = trainer.training_step((x[mine], y[mine])).result
    assert result is not None
    return weights(trainer.model), result.weight


def same_samples(world: World, store: Any) -> str:
    among(world, store)
    with pytest.raises(UserError) as error:
        DistributedAMPTrainer(net(), FP32).train_epoch([numbers(16)])
    return str(error.value)


def test_a_loader_that_is_not_sharded_is_refused(pool: Pool) -> None:
    for said in pool.run(same_samples, world=2):
        assert "ranks 0 and 1 read the same first batch" in said
        assert "DDPManager.get_dataloader" in said


def test_four_ranks_are_one_process_too(pool: Pool) -> None:
    for found, weight in pool.run(one_step_of_four, world=4):
        assert torch.allclose(found, plain_loop([numbers(16)]), atol=1e-6)
        assert weight == 16


def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    trainer = AMPTrainer(net(), FP32)
    trainer.training_step(numbers(8))
    path = trainer.save_checkpoint(tmp_path)
    part = next(path.glob("rank-*"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged"):
        AMPTrainer(net(), FP32).load_checkpoint(tmp_path)


def overflow_on_rank_1(world: World, store: Any) -> tuple[list[bool], float, str]:
    among(world, store)
    torch.manual_seed(0)
    trainer = DistributedAMPTrainer(Overflows(), AMPConfig(scaler=ScalerConfig(initial=1024.0), device="cpu"))
    applied = []
    for step in range(3):
        x, y = numbers(4 + world.rank, seed=10 * step + world.rank)
        if step == 1 and world.rank == 1:
            x[0, 0] = 100.0
        applied.append(trainer.training_step((x, y)).result.applied)
    return applied, trainer.scaler.value, digest(trainer.model)


def test_an_overflow_on_one_rank_is_skipped_by_all(pool: Pool) -> None:
    one, two = pool.run(overflow_on_rank_1, world=2)
    assert one == two
    assert one[:2] == ([True, False, True], 512.0)


class Halting(nn.Module):
    """One layer has no part in the loss; a buffer follows the data of the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)
        self.register_buffer("moved", torch.zeros(()))
        self.found: list[float] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.found.append(self.moved.item())
        self.moved += x.sum()
        return F.mse_loss(self.used(x).squeeze(-1), y)


def joined_by_arguments(world: World, store: Any, port: int) -> dict[str, Any]:
    """No launcher: rank and world size are arguments, and the trainer joins and leaves by itself."""
    os.environ["MASTER_PORT"] = str(port)
    first = DistributedAMPTrainer(net(), FP32, world.rank, world.size, "gloo")
    found: dict[str, Any] = {"ranks": (first.rank, first.world_size, first.runtime.backend)}
    for unused, buffers in ((True, True), (True, False), (False, False)):
        how = DistributedConfig(
            world.size, world.rank, "gloo", num_gpus_per_node=2, find_unused_parameters=unused,
            broadcast_buffers=buffers, gradient_as_bucket_view=unused,
        )  # fmt: skip
        model = Halting()
        trainer = DistributedAMPTrainer(model, FP32, distributed=how)
        try:
            for _ in range(2):
                trainer.training_step(numbers(4, seed=world.rank))
            found[f"{unused} {buffers}"] = model.found
        except UserError as error:
            found["refused"] = str(error)
        trainer.cleanup()  # it has not joined, so it does not leave
    assert torch.distributed.is_initialized()
    first.cleanup()
    found["left"] = not torch.distributed.is_initialized()
    return found


def test_a_configuration_reaches_the_wrapped_model(pool: Pool) -> None:
    one, two = pool.run(joined_by_arguments, free_port(), world=2)
    assert one["True True"] == two["True True"]  # rank 0's buffers, before every step
    assert one["True False"][1] != two["True False"][1]
    assert "unused" in one["refused"]
    assert [found["left"] for found in (one, two)] == [True, True]
    assert [found["ranks"] for found in (one, two)] == [(0, 2, "gloo"), (1, 2, "gloo")]


def test_ranks_that_were_announced_are_never_ignored(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="WORLD_SIZE is not set"):
        DistributedAMPTrainer(net(), FP32)
    with pytest.raises(UserError, match="WORLD_SIZE is not set"):
        DDPManager().initialize()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="LOCAL_RANK not set"):
        DistributedAMPTrainer(net(), FP32)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UserError, match="rank 0 of 2"):
        DistributedAMPTrainer(net(), FP32, rank=1, world_size=4)
    with pytest.raises(UserError, match="add --distributed"):
        check_processes(distributed=False, takes_any=False)
    assert DistributedAMPTrainer.is_distributed()


def test_every_process_of_a_machine_has_its_own_gpu(monkeypatch):
    world = World(rank=5, size=9, local_rank=2, local_size=3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert own_gpu(None, world, True, usual=2) == 2
    assert own_gpu([4], world, False, usual=2) == 4
    assert own_gpu([0, 2, 3], world, True, usual=2) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,3")
    assert own_gpu([0, 2, 3], world, True, usual=2) == 2


def test_a_failed_start_is_never_a_start_alone(monkeypatch):
    """MASTER_ADDR and MASTER_PORT are used as the user has set them."""
    announced = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "node7", "MASTER_PORT": "12355"}
    for name, value in announced.items():
        monkeypatch.setenv(name, value)
    joined = []

    def no_rank_joins(world: World, *_: Any, **__: Any) -> str:
        joined.append((world.master_addr, world.master_port))
        raise RuntimeError("no rank joined")

    monkeypatch.setattr("lockstep.classic.process_group.join", no_rank_joins)
    with pytest.raises(RuntimeError, match="no rank joined"):
        DDPManager().initialize()
    assert joined == [("node7", 12355)]
    assert {name: os.environ[name] for name in announced} == announced
