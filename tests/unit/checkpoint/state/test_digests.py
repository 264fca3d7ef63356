"""Digests of frozen parameters: computed once, and again when a parameter has changed."""

from __future__ import annotations

import pytest
import torch

from lockstep.checkpoint.state import digests
from lockstep.checkpoint.state.digests import FrozenDigests, digest


def test_a_digest_is_computed_again_only_if_its_parameter_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    monkeypatch.setattr(digests, "digest", lambda tensor: computed.append(1) or digest(tensor))
    parameters = {name: torch.nn.Parameter(torch.randn(3), requires_grad=False) for name in "ba"}
    found = FrozenDigests(parameters, on_any_rank=bool)

    first = found.current()
    assert list(first) == ["a", "b"]
    assert found.current() == found.current() == first
    assert len(computed) == 2

    # In place, as an optimizer does; through `.data`, which torch does not count; and values that change places.
    with torch.no_grad():
        parameters["a"].add_(1)
    second = found.current()
    parameters["b"].data[0] += 1
    third = found.current()
    with torch.no_grad():
        parameters["b"].copy_(parameters["b"].flip(0))
    assert found.current()["b"] != third["b"] != first["b"]
    assert second["a"] != first["a"]
    assert second["b"] == first["b"]
    assert found.current() == {name: digest(p) for name, p in sorted(parameters.items())}
    assert len(computed) == 8


def test_no_frozen_parameters() -> None:
    assert FrozenDigests({}, on_any_rank=bool).current() == {}
