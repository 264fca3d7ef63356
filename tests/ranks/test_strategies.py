"""One word of configuration, another way to execute: the same parameters after the same steps."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.engine import loop
from lockstep.engine.diagnose import explained
from lockstep.engine.end import full_state
from lockstep.engine.setup import open_run
from lockstep.errors import Preempted
from lockstep.parallel.apply import parallelize
from lockstep.precision import PRECISIONS
from lockstep.runtime import context
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import ALL_PAIRS, DEVICE, assert_user_errors, configured, open_watched, preempted_run

LENGTH, WIDTH, VOCABULARY = 32, 8, 13


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Small(nn.Module):
    """Blocks, tied weights, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.frozen(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Front(nn.Module):
    """What comes before the blocks: for a pipeline."""

    def __init__(self, model: Small) -> None:
        super().__init__()
        self.embed, self.frozen = model.embed, model.frozen

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return x + self.frozen(x)


class Ragged(Task):
    def model(self) -> nn.Module:
        return Small()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def data(self) -> Any:
        g = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, VOCABULARY, (LENGTH, 7), generator=g)
        counted = torch.randint(0, 7, (LENGTH,), generator=g)
        return TensorDataset(tokens, torch.arange(6) < counted[:, None])

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, mask = batch
        logits = model(tokens[:, :-1])
        each = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return Loss((each * mask.flatten()).sum(), mask.sum())

    def eval_data(self) -> Any:
        return self.data()


class Listed(Ragged):
    """A pipeline that is cut where the task says."""

    def stages(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Small)
        return [Front(model), *model.blocks, model.head]


# The fourth step is short, and the fifth begins another epoch.
BASE = {"global_batch": 10, "micro_batch": 2, "clip.norm": 0.3, "lr.schedule": "cosine", "lr.warmup": 2}
BASE |= {"steps": 10 if ALL_PAIRS else 5}
BASE |= {"evaluate.batch": 9}  # four batches, the last one short
SAVED_AT = 3


def final(
    world: World, store: Any, values: dict[str, Any], leave_at: int | None = None, kind: type[Ragged] = Ragged
) -> dict[str, Any]:
    """A job: the whole model after a run, and what was measured on it."""
    resolved = configured(BASE | values)
    with context.start(world, resolved.config, store=store) as runtime:
        task = kind()
        builder = open_run(resolved, runtime, "test", run_class=preempted_run(runtime, leave_at))
        try:
            summary = loop.fit(task, builder)
        except Preempted as left:
            summary = {"left": left.step}
        run = builder.run
        assert run is not None
        weights, _ = full_state(run.driver, keep=True)
        copies = {name: t.cpu().clone() for name, t in weights.items()}
        return {"weights": copies, "summary": summary, "resumed": run.resumed is not None}


@pytest.fixture(scope="module")
def single(pool: Pool) -> dict[str, Any]:
    return pool.run(final, {}, world=1)[0]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        error = float((found[name] - expected[name]).norm() / expected[name].norm().clamp(min=1e-9))
        assert error <= 1e-5, f"{name}: off by {error:.1e}"


STRATEGIES = {
    "ddp": {"strategy": "ddp"},
    "unused": {"ddp.find_unused_parameters": True},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp-grads": {"strategy": "fsdp-grads"},
    "hsdp": {"strategy": "hsdp", "fsdp.replicas": 2},
    "tp": {"strategy": "tp"},
    "ddp x tp": {"mesh.tp": 2},
    "fsdp x tp": {"strategy": "fsdp", "mesh.tp": 2},
    "pp": {"strategy": "pp"},
    "pp gpipe x dp": {"mesh.pp": 2, "pp.schedule": "gpipe"},
    "pp interleaved": {"mesh.pp": 2, "pp.schedule": "interleaved"},
    "pp zero-bubble": {"mesh.pp": 2, "pp.schedule": "zero-bubble"},
    "pp x tp": {"mesh.pp": 2, "mesh.tp": 2},
    "pp x fsdp": {"strategy": "fsdp", "mesh.pp": 2},
    "pp x dp x tp": {"mesh": {"pp": 2, "dp": 2, "tp": 2}},
}


# How many ranks they run on, where not on 2 and 4: a grid has as many places as it has.
WORLDS = {"pp x tp": (4,), "pp x fsdp": (4,), "pp x dp x tp": (8,)}
PAIRS = ("tp", "fsdp-grads")  # two ranks show as much as four, at half the cost; LOCKSTEP_ALL_PAIRS=1 runs both
LISTED = ("pp gpipe x dp", "pp zero-bubble")  # the others are cut by themselves


def worlds(name: str) -> tuple[int, ...]:
    return WORLDS.get(name, (2, 4))


def most(name: str) -> int:
    """How many ranks a strategy is trained on for most tests."""
    return worlds(name)[0 if name in PAIRS and not ALL_PAIRS else -1]


def kind(name: str) -> type[Ragged]:
    return Listed if name in LISTED else Ragged


class Trained(NamedTuple):
    every_rank: list[dict[str, Any]]
    checkpoint: Path  # of step SAVED_AT


@pytest.fixture(scope="module")
def trained(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Trained]:
    """What a run with a strategy left, trained once for every number of ranks."""
    folder = tmp_path_factory.mktemp("trained")

    @functools.cache
    def run(name: str, world: int) -> Trained:
        run_dir = folder / f"{name} {world}"
        values = STRATEGIES[name] | {"run_dir": str(run_dir), "checkpoint.every": SAVED_AT, "checkpoint.keep": 9}
        every_rank = pool.run(final, values, None, kind(name), world=world)
        return Trained(every_rank, run_dir / "checkpoints" / f"step-{SAVED_AT:08}")

    return run


@pytest.mark.parametrize(
    ("name", "world"),
    [(name, world) for name in STRATEGIES for world in (worlds(name) if ALL_PAIRS else (most(name),))],
)
def test_every_strategy_ends_with_the_same_parameters(
    trained: Callable[[str, int], Trained], single: dict[str, Any], name: str, world: int
) -> None:
    for found in trained(name, world).every_rank:
        assert_close(found["weights"], single["weights"])
        assert found["summary"]["eval_loss"] == pytest.approx(single["summary"]["eval_loss"], rel=1e-5)


class Resting(Ragged):
    """One block is used in every second step only, on all ranks."""

    def model(self) -> nn.Module:
        self.net = Small()
        return self.net

    def after_step(self, run: Any, result: Any) -> None:
        last = self.net.blocks[2]
        last.forward = (lambda x: x) if run.steps_done % 2 else type(last).forward.__get__(last)  # type: ignore[method-assign]


class TiedBlocks(Resting):
    """And the first block shares a weight with the second, and with the last one."""

    def model(self) -> nn.Module:
        self.net = Small()
        for block in (self.net.blocks[1], self.net.blocks[3]):
            block.up.weight = self.net.blocks[0].up.weight
        return self.net


@pytest.fixture(scope="module")
def short(pool: Pool) -> dict[type[Ragged], dict[str, Any]]:
    return {kind: pool.run(final, {"steps": 4}, None, kind, world=1)[0] for kind in (TiedBlocks, Resting)}


SHARED = ("unused", "zero1", "fsdp", "fsdp-grads", "hsdp", "pp", "pp interleaved", "pp x fsdp")
CUT_LAYERS = ("tp", "pp x tp")  # where a tied weight is refused


@pytest.mark.parametrize("name", SHARED + CUT_LAYERS)
def test_blocks_that_share_a_weight_and_one_that_rests(pool: Pool, short: dict[Any, Any], name: str) -> None:
    kind = Resting if name in CUT_LAYERS else TiedBlocks
    values = STRATEGIES[name] | (STRATEGIES["unused"] if name == "zero1" else {})
    for found in pool.run(final, values | {"steps": 4}, None, kind, world=worlds(name)[0]):
        assert_close(found["weights"], short[kind]["weights"])


class WithNumbers(Small):
    """Parameters without a dimension: one in a block, one outside, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].gain = nn.Parameter(torch.tensor(0.7))
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.fixed = nn.Parameter(torch.tensor(0.9), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.fixed
        for block in self.blocks:
            x = block(x) * getattr(block, "gain", 1.0)
        return self.head(x) * self.scale


class Numbers(Ragged):
    def model(self) -> nn.Module:
        return WithNumbers()


@pytest.mark.parametrize("name", ["fsdp", "fsdp-grads", "hsdp", "fsdp x tp"] if ALL_PAIRS else ["fsdp x tp"])
def test_single_numbers_stay_whole(pool: Pool, tmp_path: Path, name: str) -> None:
    (expected,) = pool.run(final, {"steps": 4}, None, Numbers, world=1)
    assert expected["weights"]["scale"] != 1.3
    values = STRATEGIES[name] | {"steps": 4, "run_dir": str(tmp_path / "run"), "resume": "auto"}
    for found in pool.run(final, values, 2, Numbers, world=4):
        assert found["summary"] == {"left": 2}
    for found in pool.run(final, values, None, Numbers, world=2):
        assert found["resumed"]
        assert_close(found["weights"], expected["weights"])


class Penalty(Ragged):
    """A loss that reads a weight."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        plain = super().loss(model, batch)
        return Loss(plain.total + dict(model.named_parameters())["blocks.0.up.weight"].square().sum(), plain.weight)


def penalised(world: World, store: Any, values: dict[str, Any]) -> None:
    resolved = configured(BASE | values)
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test")
        with explained(builder):
            loop.fit(Penalty(), builder)


@pytest.mark.parametrize("name", ["fsdp", "tp", "fsdp x tp"])
def test_a_loss_that_reads_what_is_cut(pool: Pool, name: str) -> None:
    errors = pool.errors(penalised, STRATEGIES[name], world=2)
    assert_user_errors(errors, "the task uses them", "set strategy=ddp")


def told_of_blocks(world: World, store: Any, kind: type[Ragged], name: str) -> dict[str, str]:
    resolved = configured(BASE | STRATEGIES[name] | {"steps": 1})
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test")
        loop.fit(kind(), builder)
        return dict(builder.driver.role.banner)


def test_blocks_that_are_gathered_with_the_rest_are_told(pool: Pool) -> None:
    assert pool.run(told_of_blocks, Resting, "fsdp", world=2)[0] == {}
    assert "3 of 4 blocks share a parameter" in pool.run(told_of_blocks, TiedBlocks, "fsdp", world=2)[0]["fsdp"]


def test_they_are_told_of_all_stages(pool: Pool) -> None:
    for told in pool.run(told_of_blocks, TiedBlocks, "pp x fsdp", world=4):
        assert "3 of 4 blocks share a parameter" in told["fsdp"]
    assert pool.run(told_of_blocks, Resting, "pp x fsdp", world=4)[0] == {}


@pytest.mark.parametrize("name", CUT_LAYERS)
def test_a_tied_weight_is_not_cut_by_half(pool: Pool, name: str) -> None:
    errors = pool.errors(final, STRATEGIES[name], None, TiedBlocks, world=worlds(name)[0])
    assert_user_errors(errors, "'blocks.0.up.weight' is tied to 'blocks.1.up.weight'", "untie")


NAMES = list(STRATEGIES)
# A checkpoint knows no strategy: each must write one that another reads, and read one that another wrote. A ring says
# that; LOCKSTEP_ALL_PAIRS=1 runs all pairs.
RING = {(name, (NAMES * 2)[i + 5]) for i, name in enumerate(NAMES)}
ALL = {(before, after) for before in NAMES for after in NAMES}


@pytest.mark.parametrize(("before", "after"), sorted(ALL if ALL_PAIRS else RING))
def test_save_in_any_resume_in_any_other(
    pool: Pool,
    single: dict[str, Any],
    trained: Callable[[str, int], Trained],
    tmp_path: Path,
    before: str,
    after: str,
) -> None:
    checkpoint = trained(before, most(before)).checkpoint
    shutil.copytree(checkpoint, tmp_path / "run" / "checkpoints" / checkpoint.name)
    values = {"run_dir": str(tmp_path / "run"), "resume": "auto"}
    for found in pool.run(final, STRATEGIES[after] | values, None, kind(after), world=worlds(after)[0]):
        assert found["resumed"], "it has begun again, from nothing"
        assert_close(found["weights"], single["weights"])


def autocast_of(world: World, store: Any) -> Any:
    """A job: what a pipeline runs its stages in, if the model made precision=auto another one than the device's."""
    with open_watched(world, store, {"strategy": "pp", "precision": "bf16", "global_batch": 4, "steps": 1}) as builder:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        driver = parallelize(model, builder.config, builder.runtime, PRECISIONS["fp32"])
        builder.runtime.collectives.final_barrier()
        return driver._pipeline.autocast


def test_a_pipeline_computes_in_the_precision_of_the_run(pool: Pool) -> None:
    assert pool.run(autocast_of, world=2) == [nullcontext, nullcontext]


def role_of(world: World, store: Any, values: dict[str, Any]) -> tuple[bool, bool]:
    """A job: whether forwards are collective, and whether a rank can evaluate by itself."""
    with open_watched(world, store, values) as builder:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        task = SimpleNamespace(tensor_plan=lambda _: {"0": "colwise", "2": "rowwise"})
        role = parallelize(model, builder.config, builder.runtime, builder.precision, task).role
        builder.runtime.collectives.final_barrier()
        return role.collective_forwards, role.replicated


@pytest.mark.parametrize(
    ("values", "ranks", "expected"),
    [
        ({"strategy": "ddp"}, 2, (False, True)),
        ({"strategy": "zero1"}, 2, (False, True)),
        ({"strategy": "ddp", "ddp.find_unused_parameters": True}, 2, (False, True)),
        ({"strategy": "fsdp"}, 2, (True, False)),
        ({"strategy": "ddp", "mesh.tp": 2}, 2, (True, False)),
        ({"strategy": "fsdp"}, 1, (False, True)),
    ],
)
def test_whether_forwards_are_collective_follows_from_the_settings(
    pool: Pool, values: dict[str, Any], ranks: int, expected: tuple[bool, bool]
) -> None:
    if "mesh.tp" in values and DEVICE != "cpu":
        pytest.skip("ranks that share a GPU use gloo")
    assert pool.run(role_of, values, world=ranks) == [expected] * ranks
