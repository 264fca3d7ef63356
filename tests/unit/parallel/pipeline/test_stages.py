"""The layers between which a pipeline splits a model."""

from __future__ import annotations

from torch import nn

from lockstep.parallel.pipeline.stages import list_layers


def test_a_layer_that_comes_twice_is_called_twice() -> None:
    first, second, both = nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()
    model = nn.Sequential(first, both, nn.Sequential(second, both))
    assert list_layers(model, None) == [first, both, second, both]
