"""One word of configuration, another way to execute: the same parameters after the same steps."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.engine import loop
from lockstep.engine.run import Run
from lockstep.engine.state import whole_state
from lockstep.errors import Preempted
from lockstep.runtime import context
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import configured

LENGTH, WIDTH, VOCABULARY = 52, 8, 13


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
        self.blocks = nn.ModuleList(Block() for _ in range(3))
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

    def stages(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Small)
        return [Front(model), *model.blocks, model.head]

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


# The sixth step is short, and the seventh begins another epoch.
BASE = {"global_batch": 10, "micro_batch": 2, "steps": 10, "clip.norm": 0.3, "lr.schedule": "cosine", "lr.warmup": 2}
BASE |= {"evaluate.batch": 15}  # four batches, the last one short
LEAVE_AT = 5


def final(
    world: World, store: Any, values: dict[str, Any], leave_at: int | None = None, kind: type[Ragged] = Ragged
) -> dict[str, Any]:
    """A job: the whole model after a run, and what was measured on it."""
    resolved = configured(BASE | values)
    with context.start(world, resolved.config, store=store) as runtime:
        run = Run(resolved, runtime, "test")
        task = kind()
        if leave_at is not None:
            notice = runtime.notice
            original = run.finish

            def finish(share: Any, result: Any) -> None:
                if run.stepper.counters.step == leave_at - 1 and world.rank == 0:
                    notice.signal = "SIGTERM"
                original(share, result)

            run.finish = finish
        try:
            summary = loop.fit(task, run)
        except Preempted as left:
            summary = {"left": left.step}
        weights, _ = whole_state(run.driver.model, keep=True, pipeline=run.driver.pipeline)
        return {"weights": {name: t.cpu().clone() for name, t in weights.items()}, "summary": summary}


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
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_ends_with_the_same_parameters(
    pool: Pool, single: dict[str, Any], name: str, world: int
) -> None:
    for found in pool.run(final, STRATEGIES[name], world=world):
        assert_close(found["weights"], single["weights"])
        assert found["summary"]["eval_loss"] == pytest.approx(single["summary"]["eval_loss"], rel=1e-5)


class TiedBlocks(Ragged):
    """The first two blocks share a weight, and the last one is used in every second step only, on all ranks."""

    def model(self) -> nn.Module:
        self.net = Small()
        self.net.blocks[1].up.weight = self.net.blocks[0].up.weight
        return self.net

    def after_step(self, model: nn.Module, step: int) -> None:
        last = self.net.blocks[2]
        last.forward = (lambda x: x) if step % 2 else type(last).forward.__get__(last)  # type: ignore[method-assign]


SHARED = {name: STRATEGIES[name] for name in ("unused", "fsdp", "fsdp-grads", "hsdp")}
SHARED |= {"zero1": STRATEGIES["zero1"] | STRATEGIES["unused"]}


def test_blocks_that_share_a_weight_and_one_that_rests(pool: Pool) -> None:
    (expected,) = pool.run(final, {"steps": 4}, None, TiedBlocks, world=1)
    for values in SHARED.values():
        for found in pool.run(final, values | {"steps": 4}, None, TiedBlocks, world=2):
            assert_close(found["weights"], expected["weights"])


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For every strategy a run on 4 ranks that has left early."""
    folder = tmp_path_factory.mktemp("saved")
    for name, values in STRATEGIES.items():
        left = pool.run(final, values | {"run_dir": str(folder / name)}, LEAVE_AT, world=4)
        assert left[0]["summary"] == {"left": LEAVE_AT}
    return {name: folder / name for name in STRATEGIES}


NAMES = list(STRATEGIES)
# A checkpoint knows no strategy, so that a ring and a hub say what all pairs do; LOCKSTEP_ALL_PAIRS=1 runs those.
RING = {(name, NAMES[(i + 5) % len(NAMES)]) for i, name in enumerate(NAMES)}
HUB = {pair for name in NAMES for pair in ((name, "ddp"), ("ddp", name))}
ALL = {(before, after) for before in NAMES for after in NAMES}


@pytest.mark.parametrize(("before", "after"), sorted(ALL if os.environ.get("LOCKSTEP_ALL_PAIRS") else RING | HUB))
def test_save_in_any_resume_in_any_other(
    pool: Pool, single: dict[str, Any], saved: dict[str, Path], tmp_path: Path, before: str, after: str
) -> None:
    shutil.copytree(saved[before], tmp_path / "run")
    values = {"run_dir": str(tmp_path / "run"), "resume": "auto"}
    for found in pool.run(final, STRATEGIES[after] | values, world=2):
        assert_close(found["weights"], single["weights"])
