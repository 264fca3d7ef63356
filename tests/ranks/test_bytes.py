"""How many bytes every strategy keeps on a rank, counted from live tensors right after a step.

With P parameters stored in float32, gradients as large, AdamW's two moments of 4 bytes each, and N ranks:

ddp          16P                    everything whole
zero1        4P + 4P + 8P/N         the moments are cut
fsdp-grads   16P/N                  but 4P + 12P/N from forward to backward: parameters are whole for so long
fsdp         16P/N
hsdp         16P/M                  M ranks in a group that holds one copy
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.engine.run import Run
from lockstep.parallel.layout import local
from lockstep.plan.memory import bytes_of
from lockstep.runtime import context
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
        run = Run(resolved, runtime, "test")
        run.adopt(Chain(), lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))
        run.open(TensorDataset(torch.randn(16, WIDTH)), torch.utils.data.default_collate)
        before_backward = []

        def loss(model: nn.Module, batch: Any) -> Loss:
            total = model(batch[0]).square().sum()
            before_backward.append(bytes_of(run.driver.model.parameters()))
            return Loss(total, len(batch[0]))

        for share in run.shares():
            run.finish(share, run.stepper.step(share, loss))
        parameters = run.driver.parameters
        grads = [p.grad for p in parameters if p.grad is not None]
        states: list[Tensor] = [
            value
            for optimizer in run.optimizers.all
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        run.keeper.close()
        found = {"parameters": parameters, "gradients": grads, "moments": states}
        # The whole memory behind a part: a small view into something large would be no saving.
        for tensors in (parameters, states):
            for tensor in map(local, tensors):
                assert tensor.untyped_storage().nbytes() <= max(tensor.nbytes, 4) + SLACK
        sizes = {name: bytes_of(tensors) for name, tensors in found.items()}
        return sizes | {"parameters before backward": max(before_backward)}


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
        # zero1 deals whole parameters, so its ranks hold about equally many.
        uneven = 2 * WIDTH * ROW if name == "zero1" else 0
        assert max(found) <= size + SLACK + uneven, part
