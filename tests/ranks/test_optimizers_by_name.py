"""Optimizers that keep less: the same parameters on any number of ranks, and after a change; a loss near AdamW's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.config import resolve
from lockstep.errors import UserError
from lockstep.optim import adamw8bit
from lockstep.optim.bf16_masters import MasterWeights
from lockstep.optim.registry import OPTIMIZERS, build_optimizers
from lockstep.runtime.world import World
from pool import Pool
from ranks.test_storage import trained
from ranks.test_strategies import STRATEGIES, Ragged, assert_close, final

SINGLE: dict[str, dict[str, Tensor]] = {}


def small_state(world: World, store: Any, values: dict[str, Any], leave_at: int | None = None) -> dict[str, Any]:
    """A job: even the small matrices of this model become bytes."""
    adamw8bit.MIN_ELEMENTS = 64
    return final(world, store, {"steps": 7} | values, leave_at)


def single(pool: Pool, name: str) -> dict[str, Tensor]:
    if name not in SINGLE:
        SINGLE[name] = pool.run(small_state, {"optimizer": name}, world=1)[0]["weights"]
    return SINGLE[name]


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "pp"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_parameters_on_any_number_of_ranks(pool: Pool, name: str, strategy: str) -> None:
    for found in pool.run(small_state, STRATEGIES[strategy] | {"optimizer": name}, world=2):
        assert_close(found["weights"], single(pool, name))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_its_state_is_resharded(pool: Pool, tmp_path: Path, name: str) -> None:
    """Three shards of unequal size -> replicated -> two groups with a replica each -> one rank."""
    values = {"optimizer": name, "run_dir": str(tmp_path / "run"), "resume": "auto"}
    chain = [("fsdp", 3, 2), ("ddp", 2, 4), ("hsdp", 4, 6), ("ddp", 1, None)]
    for strategy, world, leave_at in chain:
        found = pool.run(small_state, values | STRATEGIES[strategy], leave_at, world=world)
        assert found[0]["summary"].get("left") == leave_at
        assert found[0]["resumed"] == ((strategy, world, leave_at) != chain[0])
    assert_close(found[0]["weights"], single(pool, name))


class Seeded(Ragged):
    """The same model wherever it is made."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return super().model()


def by_torch(steps: int) -> dict[str, Tensor]:
    """A plain loop with torch's own Muon for matrices, and AdamW for embeddings and vectors."""
    task = Seeded()
    model = task.model()
    trained = [p for p in model.parameters() if p.requires_grad]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in trained if p.dim() == 2 and id(p) not in embeddings]
    rest = [p for p in trained if not any(p is matrix for matrix in matrices)]
    assert len(matrices) > 2
    assert rest
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=0.01)

    batch = task.data()[:10]
    for _ in range(steps):
        loss = task.loss(model, batch)
        (loss.total / loss.weight).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def seeded(world: World, store: Any, values: dict[str, Any]) -> dict[str, Tensor]:
    """A job: the first ten samples in every step, at a constant rate."""
    alone = {"steps": 3, "epochs": None, "data.shuffle": False, "clip.norm": None, "lr.schedule": "constant"}
    alone |= {"lr.warmup": 0, "optimizer": "muon", "micro_batch": 5}
    return final(world, store, alone | values, kind=FirstTen)["weights"]


class FirstTen(Seeded):
    def data(self) -> Any:
        return torch.utils.data.TensorDataset(*super().data()[:10])


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", pytest.param("ddp", marks=pytest.mark.long)])
def test_muon_is_torchs_own_on_whole_matrices(pool: Pool, strategy: str) -> None:
    """Shards of a matrix, updated one by one, would become other matrices."""
    expected = by_torch(steps=3)
    for found in pool.run(seeded, STRATEGIES[strategy], world=2):
        assert_close(found, {name: expected[name] for name in found})


def test_with_bf16_storage(pool: Pool) -> None:
    """Six bytes per parameter in all, and the same bits on two ranks as on one."""
    values = {"optimizer": "adamw8bit", "precision": "bf16-pure-stochastic"}
    values |= {"global_batch": 4, "micro_batch": 2, "clip.norm": None}
    one = pool.run(small_state, values, world=1)[0]["weights"]
    two = pool.run(small_state, values | STRATEGIES["fsdp"], world=2)[0]["weights"]
    assert all(torch.equal(two[key], one[key]) for key in one)


def test_char_lm_learns_as_with_adamw(pool: Pool) -> None:
    """Adafactor has no momentum, and wants a smaller rate."""
    adamw = pool.run(trained, {}, world=1)[0]
    for values in ({"optimizer": "adamw8bit"}, {"optimizer": "adafactor", "lr.peak": 3e-3}):
        assert pool.run(trained, values, world=1)[0] == pytest.approx(adamw, rel=0.02), values


def test_bytes_hold_the_moments():
    """One round trip costs about 1 % of a block's length; nothing that is not 0 becomes 0 in a divisor."""
    torch.manual_seed(0)
    for signed, moment in ((True, torch.randn(8, 300)), (False, torch.rand(8, 300).pow(12))):
        codes, scales = torch.zeros(8, 300, dtype=torch.uint8), torch.zeros(8, 2)
        adamw8bit._to_bytes_(moment.clone(), codes, scales, signed)
        found = adamw8bit._from_bytes(codes, scales, signed)
        assert float((found - moment).norm() / moment.norm()) < 0.015
        assert signed or bool((found[moment > 0] > 0).all())
        assert torch.equal(scales[:, 0], moment[:, :150].abs().amax(1))


class WithoutParameters(torch.optim.Optimizer):
    """Moves something that is no parameter."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {"lr": 0.1})
        self.steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1


def test_an_optimizer_without_parameters_is_left_alone_and_stepped():
    model, other = torch.nn.Linear(2, 2).bfloat16(), WithoutParameters()
    config = resolve([("test", {"optimizer": "adamw8bit"})]).config
    made, kept = build_optimizers(config, [torch.optim.AdamW(model.parameters()), other])
    assert isinstance(made, adamw8bit.AdamW8bit)
    assert kept is other
    MasterWeights([made, kept], model, "master", seed=0).step_optimizer(kept, None, pass_count=0)
    assert other.steps == 1


def test_weights_whose_rows_are_not_one_after_another():
    torch.manual_seed(0)
    plain = torch.nn.Conv2d(64, 64, 3, bias=False)
    other = torch.nn.Conv2d(64, 64, 3, bias=False).to(memory_format=torch.channels_last)
    other.load_state_dict(plain.state_dict())
    for model in (plain, other):
        optimizer = adamw8bit.AdamW8bit(model.parameters(), lr=0.1)
        for step in range(3):
            model.weight.grad = torch.linspace(-1, 1 + step, 64 * 64 * 9).view(64, 64, 3, 3)
            optimizer.step()
    assert not other.weight.is_contiguous()
    assert torch.equal(other.weight, plain.weight)


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_on_the_step_of_the_replaced_optimizer_is_not_lost(register: str):
    made = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    getattr(made, register)(lambda *_: None)
    config = resolve([("test", {"optimizer": "adamw"})]).config
    with pytest.raises(UserError, match=rf"optimizer=adamw replaces the task's AdamW.*{register}"):
        build_optimizers(config, made)

    # The task's own keeps it.
    assert build_optimizers(resolve([("test", {})]).config, made) is made


def test_groups_are_taken_over():
    config = resolve([("test", {"optimizer": "adamw8bit"})]).config
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    made = torch.optim.AdamW(
        [{"params": [first], "lr": 0.1}, {"params": [second], "weight_decay": 0.0}], betas=(0.8, 0.9)
    )
    (optimizer,) = build_optimizers(config, made)
    kept = [(group["lr"], group["weight_decay"], group["betas"]) for group in optimizer.param_groups]
    assert kept == [(0.1, 0.01, (0.8, 0.9)), (1e-3, 0.0, (0.8, 0.9))]
    assert build_optimizers(resolve([("test", {})]).config, made) is made
    with pytest.raises(UserError, match=r"optimizer=adamw8bit with tensor parallelism \(mesh\.tp\)"):
        build_optimizers(resolve([("test", {"optimizer": "adamw8bit", "mesh.tp": 2})]).config, made)
