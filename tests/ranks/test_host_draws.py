"""Custom loops that draw from numpy's or Python's global generators: the same on any number of ranks, and resumed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.engine.own_loop import OwnRun
from lockstep.runtime import seeds
from lockstep.runtime.world import World
from pool import Pool
from ranks.support import open_watched

STEPS = 6
DATA = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)).double())
VALUES: dict[str, Any] = {"global_batch": 8, "micro_batch": 2, "steps": STEPS}


def mixup(x: Tensor) -> Tensor:
    share = np.random.beta(0.4, 0.4)
    return share * x + (1 - share) * x[torch.from_numpy(np.random.permutation(len(x)))]


def flip(x: Tensor) -> Tensor:
    return x.flip(1) if random.random() < 0.5 else x


def nothing(x: Tensor) -> Tensor:
    return x


CHANGES = {"mixup": mixup, "flip": flip, "nothing": nothing}


def train(run: OwnRun, inside: str, before: str = "nothing", after: str = "nothing") -> list[Tensor]:
    """Train a custom loop, which draws in the batches of a step, before them or after `apply`. Return its weights."""
    torch.manual_seed(5)
    model, _ = run.setup(plain := nn.Linear(4, 1).double(), torch.optim.SGD(plain.parameters(), lr=0.05))
    noise = 0.0
    for step in run.steps(DATA):
        factor = CHANGES[before](torch.arange(4.0).double()[None])
        for (x,) in step:
            changed = CHANGES[inside](x) * (1 + factor) + noise
            step.backward((model(changed) - x.sum(1, keepdim=True)).square().sum(), weight=len(x))
        step.apply()
        if after != "nothing":
            noise = float(CHANGES[after](torch.arange(4.0).double()[None])[0, 0])

    return [p.detach().clone() for p in plain.parameters()]


def train_on_rank(world: World, store: Any, *draws: str) -> list[Tensor]:
    with open_watched(world, store, VALUES) as builder:
        own = OwnRun(builder)
        weights = train(own, *draws)
        own.close()
        return weights


@pytest.mark.parametrize(
    "draws", [("mixup",), ("flip",), ("nothing", "flip"), ("flip", "nothing", "flip"), ("mixup", "flip", "flip")]
)
def test_ranks_draw_what_one_rank_draws(pool: Pool, draws: tuple[str, ...]) -> None:
    (alone,) = pool.run(train_on_rank, *draws, world=1)
    for weights in pool.run(train_on_rank, *draws, world=2):
        for a, b in zip(alone, weights, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def run_here(folder: Path, *draws: str, **values: Any) -> list[Tensor]:
    # numpy's and Python's generators of a new process.
    random.seed()
    np.random.seed()
    with lockstep.start(VALUES, run_dir=folder, log={"progress": "off"}, **values) as run:
        return train(run, *draws)


@pytest.mark.parametrize("draws", [("mixup",), ("flip",), ("nothing", "flip"), ("mixup", "flip")])
def test_a_resumed_loop_draws_what_it_would_have_drawn(tmp_path: Path, draws: tuple[str, ...]) -> None:
    whole = run_here(tmp_path / "whole", *draws)
    run_here(tmp_path / "cut", *draws, **{"steps": 2})
    resumed = run_here(tmp_path / "cut", *draws, **{"resume": "auto"})
    assert all(map(torch.equal, whole, resumed))


def count_seedings(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> int:
    seeded: list[int] = []
    original = seeds.seed_host
    with monkeypatch.context() as patch:
        patch.setattr(seeds, "seed_host", lambda value: (seeded.append(value), original(value)))
        run()

    return len(seeded)


def test_a_loop_that_draws_nothing_is_not_seeded_after_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seedings(draw: str, steps: int) -> int:
        folder = tmp_path / f"{draw}-{steps}"
        return count_seedings(monkeypatch, lambda: run_here(folder, draw, steps=steps))

    assert seedings("nothing", 6) == seedings("nothing", 1)

    # A step seeds before its batches, before each of the four, and after the update.
    assert seedings("flip", 6) == seedings("flip", 1) + 5 * 6


def test_a_loop_that_draws_nothing_finds_its_generators_untouched(tmp_path: Path) -> None:
    """A state that the script has set survives the first step, in which the generators are seeded to try."""
    settings = VALUES | {"data.seed_samples": False, "checkpoint.at_end": False, "log.progress": "off"}
    with lockstep.start(settings, run_dir=tmp_path / "run") as run:
        model, _ = run.setup(plain := nn.Linear(4, 1).double(), torch.optim.SGD(plain.parameters(), lr=0.05))
        random.seed(1)
        np.random.seed(1)
        expected = random.Random(1).random(), np.random.RandomState(1).rand()
        for step in run.steps(DATA):
            for (x,) in step:
                step.backward(model(x).square().sum(), weight=len(x))
            step.apply()

        assert (random.random(), np.random.rand()) == expected


def test_the_note_about_micro_batches_covers_them(tmp_path: Path) -> None:
    values = {"micro_batch": None, "steps": 1}
    run_here(tmp_path / "run", "mixup", **values)
    assert "random numbers that are drawn in a step" in (tmp_path / "run" / "events.jsonl").read_text()
