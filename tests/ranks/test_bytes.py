"""How many bytes every strategy keeps on a rank, counted from live tensors right after a step.

With P parameters stored in float32, gradients as large, AdamW's two moments of 4 bytes each, and N ranks:

ddp          16P                    everything whole
zero1        4P + 4P + 8P/N         the moments are cut
fsdp-grads   16P/N                  but 4P + 12P/N from forward to backward: parameters are whole for so long
fsdp         16P/N
hsdp         16P/M                  M ranks in a group that holds one copy

With precision=bf16-master parameters and gradients take 2 bytes, and master weights and moments 12:

ddp          16P
zero1        4P + 12P/N
fsdp-grads   2P + 14P/N             parameters as the model has them from forward to backward, after that 16P/N. Beside
                                    them torch keeps this rank's part of the parameters, 2P/N, which is counted apart
fsdp         16P/N
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.engine.setup import open_run
from lockstep.plan.memory import bytes_of
from lockstep.runtime import context
from lockstep.runtime.shards import to_local
from lockstep.runtime.world import World
from lockstep.task import Loss
from pool import Pool
from ranks.support import configured
from ranks.test_strategies import STRATEGIES

WIDTH, BLOCKS, CLASSES = 64, 3, 6
ROW = 4 * (WIDTH + 1)
SLACK = 2 * ROW + 64  # bytes: the head's rows do not divide evenly; and the step counters of AdamW


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


PARAMETERS = sum(p.numel() for p in Chain().parameters())


def counted(world: World, store: Any, values: dict[str, Any]) -> dict[str, int]:
    """A job: two steps, then what lies on this rank."""
    resolved = configured({"global_batch": 8, "micro_batch": 2, "steps": 2} | values)
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test")
        builder.setup_model(Chain(), lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))
        run = builder.setup_run(TensorDataset(torch.randn(16, WIDTH)), torch.utils.data.default_collate)
        before_backward, beside = [], [0]

        def loss(model: nn.Module, batch: Any) -> Loss:
            total = model(batch[0]).square().sum()
            before_backward.append(bytes_of(run.driver.model.parameters()))
            beside.append(bytes_of(run.driver.parameters.values()) if before_backward[-1] > before[0] else 0)
            return Loss(total, len(batch[0]))

        before = [bytes_of(run.driver.parameters.values())]
        for batches in run.step_batches():
            run.end_step(batches, run.stepper.step(batches, loss))
        parameters = [*run.driver.parameters.values()]
        grads = [p.grad for p in parameters if p.grad is not None]
        states: list[Tensor] = [
            value
            for optimizer in run.trained_model.optimizers.all
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        if run.trained_model.optimizers.masters:
            states += run.trained_model.optimizers.masters.persistent_tensors()
        run.checkpoints.close()
        found = {"parameters": parameters, "gradients": grads, "moments": states}
        # The whole memory behind a part: a small view into something large would be no saving.
        for tensors in (parameters, states):
            for tensor in map(to_local, tensors):
                assert tensor.untyped_storage().nbytes() <= max(tensor.nbytes, 4) + SLACK
        sizes = {name: bytes_of(tensors) for name, tensors in found.items()}
        return sizes | {"parameters before backward": max(before_backward), "parts beside": max(beside)}


def expected(name: str, ranks: int) -> dict[str, float]:
    whole = 4.0 * PARAMETERS
    group = {"hsdp": max(1, ranks // 2)}.get(name, ranks)
    cut = 1 if name in ("ddp", "zero1") else group
    return {
        "parameters": whole / cut,
        "parameters before backward": whole if name == "fsdp-grads" else whole / cut,
        "gradients": whole / cut,
        "moments": 2 * whole / (ranks if name == "zero1" else cut),
    }


NAMES = [name for name in ("ddp", "zero1", "fsdp-grads", "fsdp", "hsdp") if name in STRATEGIES]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_follow_the_formula(pool: Pool, name: str, ranks: int) -> None:
    every_rank = pool.run(counted, STRATEGIES[name], world=ranks)
    for part, size in expected(name, ranks).items():
        found = [rank[part] for rank in every_rank]
        assert sum(found) / ranks == pytest.approx(size, abs=SLACK), part
        # zero1 assigns whole parameters, so its ranks hold about the same number.
        uneven = 2 * WIDTH * ROW if name == "zero1" else 0
        assert max(found) <= size + SLACK + uneven, part


# What the whole of a rank's parameters, gradients and optimizer state takes, in bytes per parameter.
MASTER = {
    "ddp": lambda n: 16,
    "zero1": lambda n: 4 + 12 / n,
    "fsdp-grads": lambda n: 2 + 14 / n,
    "fsdp": lambda n: 16 / n,
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MASTER)
def test_bytes_in_mixed_precision(pool: Pool, name: str, ranks: int) -> None:
    every_rank = pool.run(counted, STRATEGIES[name] | {"precision": "bf16-master"}, world=ranks)
    in_use = "parameters before backward" if name == "fsdp-grads" else "parameters"
    totals = [rank[in_use] + rank["gradients"] + rank["moments"] for rank in every_rank]
    size = MASTER[name](ranks) * PARAMETERS
    assert sum(totals) / ranks == pytest.approx(size, abs=2 * SLACK)
    assert max(totals) <= size + 2 * SLACK + (3 * WIDTH * ROW if name == "zero1" else 0)
    cut = ranks if name.startswith("fsdp") else 1
    for rank in every_rank:
        assert rank["parameters"] == pytest.approx(2 * PARAMETERS / cut, abs=SLACK)
        assert rank["gradients"] == pytest.approx(2 * PARAMETERS / cut, abs=SLACK)
    beside = 2 * PARAMETERS / ranks if name == "fsdp-grads" and ranks > 1 else 0
    assert max(rank["parts beside"] for rank in every_rank) == pytest.approx(beside, abs=SLACK)


VECTORS = BLOCKS * WIDTH + CLASSES
SMALL = WIDTH * CLASSES  # the head: too small for bytes
SQUARES = BLOCKS * WIDTH * WIDTH
LEAN = {  # bytes of the optimizer's state, without its step counters
    "adamw8bit": 2 * SQUARES + BLOCKS * 2 * 4 * WIDTH + 8 * (VECTORS + SMALL),
    "adafactor": 4 * (BLOCKS * 2 * WIDTH + WIDTH + CLASSES + VECTORS),
}


@pytest.mark.parametrize(("name", "ranks"), [("ddp", 1), ("fsdp", 2)])
@pytest.mark.parametrize("optimizer", LEAN)
def test_bytes_of_lean_optimizers(pool: Pool, optimizer: str, name: str, ranks: int) -> None:
    for rank in pool.run(counted, STRATEGIES[name] | {"optimizer": optimizer}, world=ranks):
        whole = BLOCKS * 4 * WIDTH + 4 * WIDTH if optimizer == "adafactor" else 0  # column means: on every rank
        expected = (LEAN[optimizer] - whole) / ranks + whole
        assert rank["moments"] == pytest.approx(expected, abs=64)
        assert rank["moments"] < 0.3 * 8 * PARAMETERS / ranks
