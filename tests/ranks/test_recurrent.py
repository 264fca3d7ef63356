"""Recurrent layers whose weights are cut. On a GPU they move their weights together, in torch's own code, and torch
would gather into the place where they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.runtime.world import World
from pool import Pool
from ranks.support import ALL_PAIRS
from ranks.test_strategies import STRATEGIES, VOCABULARY, WIDTH, Ragged, assert_close, final


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.last = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in [*self.layers, self.last]:
            x = x + layer(x)[0]
        return self.head(x)


class Recurrent(Ragged):
    def model(self) -> nn.Module:
        return Reading()


@contextmanager
def weights_that_move() -> Iterator[None]:
    """What cuDNN does to them, here too."""

    def flatten(self: nn.RNNBase) -> None:
        weights = self._flat_weights
        if len(weights) == len(self._flat_weights_names) and not any(isinstance(w, DTensor) for w in weights):
            together = torch.cat([w.detach().flatten() for w in weights])
            for weight, part in zip(weights, together.split([w.numel() for w in weights]), strict=True):
                weight.data = part.view_as(weight)

    original = nn.RNNBase.flatten_parameters
    nn.RNNBase.flatten_parameters = flatten  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.RNNBase.flatten_parameters = original  # type: ignore[method-assign]


def moved(world: World, store: Any, values: dict[str, Any]) -> dict[str, Any]:
    """A job."""
    with weights_that_move():
        return final(world, store, values, None, Recurrent)


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, Any]:
    return pool.run(moved, {}, world=1)[0]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp-grads", "hsdp", "pp x fsdp"])
def test_they_learn_as_in_one_process(pool: Pool, alone: dict[str, Any], name: str) -> None:
    world = 4 if ALL_PAIRS or name in ("hsdp", "pp x fsdp") else 2
    for found in pool.run(moved, STRATEGIES[name], world=world):
        assert_close(found["weights"], alone["weights"])
