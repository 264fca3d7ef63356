"""Digests of state, which no other state has, and of frozen parameters: computed again when one has changed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from lockstep.checkpoint.state import digests
from lockstep.checkpoint.state.digests import FrozenDigests, digest
from lockstep.checkpoint.state.run_state import _check_next_samples
from lockstep.errors import UserError


class Plain:
    def __init__(self, value: int) -> None:
        self.value = value


# Without the lengths and kinds, the values of each line would have one digest.
ALIKE = {
    "lengths": ([1, 23], [12, 3], [123], [[1], 23], (1, 23), 123, "123"),
    "mappings": ({"a": 1, "b": 2}, {"a": "1b2"}, ["a", 1, "b", 2], {"a1b": 2}),
    "keys": ({1: 2}, {"1": 2}, {1: "2"}, {1: 2.0}),
    "nested": ([[], [1]], [[1], []], [[1]], [[], [], 1]),
    "sets": ({1, 23}, {12, 3}, frozenset()),
    "arrays": (np.array([1, 2]), np.array([[1, 2]]), np.array([1, 2], dtype=object), [1, 2]),
    "tensors": (torch.tensor([1, 2]), [torch.tensor([1, 2])], [torch.tensor([1]), torch.tensor([2])]),
    "objects": (Plain(1), Plain(12), ["Plain", {"value": 1}]),
    "plain": (True, 1, 1.0, "1", None),
}


@pytest.mark.parametrize("values", ALIKE.values(), ids=ALIKE)
def test_different_values_have_different_digests(values: tuple[object, ...]) -> None:
    assert len({digest(value) for value in values}) == len(values)


def test_every_order_of_the_same_ids_has_its_own_digest() -> None:
    orders = list(itertools.permutations([0, 1, 2, 10, 11, 12, 21]))
    assert len({digest([0, *order]) for order in orders}) == len(orders)


def test_equal_values_have_equal_digests_in_every_process() -> None:
    assert digest({"a": 1, "b": [2.5]}) == digest({"b": [2.5], "a": 1})
    assert digest({"x", "y"}) == digest({"y", "x"})
    assert digest([Plain(1), np.arange(3)]) == digest([Plain(1), np.arange(3)])


def test_the_digest_of_one_tensor_is_part_of_the_file_format() -> None:
    """Checkpoints with checkpoint.frozen=false hold such digests."""
    assert digest(torch.tensor([0.5])) == "dce07e604f13b52f7104772a933361c6a89ddcc37267b09dea0e1cccbd13e6a6"
    integers = torch.arange(3, dtype=torch.int32)
    assert digest(integers) == "4fba8acee72711f07716fa81268235b1a146575b88f3d894bf6976ea847bce76"


def test_another_order_of_the_samples_is_refused() -> None:
    saved = digest([0, 12, 3, 4])
    _check_next_samples(saved, saved, [])
    with pytest.raises(UserError, match="the order of the samples has changed"):
        _check_next_samples(saved, digest([0, 1, 23, 4]), [])


def test_a_checkpoint_without_a_digest_of_the_next_samples_is_not_checked() -> None:
    _check_next_samples(None, digest([0, 1, 23, 4]), [])
    _check_next_samples(digest([0, 1, 23, 4]), None, [])


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
