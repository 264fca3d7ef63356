"""Names and members that an object with a tensor for each parameter must have."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.checkpoint.state.stateful import RegisteredState
from lockstep.errors import UserError


class Without:
    parameter_tensors: dict[str, Tensor] = {"weight": torch.ones(2)}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class With(Without):
    def restart(self, names: Collection[str]) -> None:
        pass


def test_a_name_with_a_dot_could_be_that_of_the_models_tensors() -> None:
    """`model.enc` was accepted, and its tensors were saved in place of the weights of `enc`."""
    state = RegisteredState()
    with pytest.raises(UserError, match=r"'model\.enc' cannot be saved(.|\n)*no dots(.|\n)*'model_enc'"):
        state.add("model.enc", With())
    state.add("model_enc", With())
    assert list(state) == ["model_enc"]


def test_restart_is_asked_for_at_once_and_not_at_a_resume() -> None:
    with pytest.raises(UserError, match=r"it has parameter_tensors and no restart\(names\)"):
        RegisteredState().add("mean", Without())


class Wrapper:
    """Has all members of another object, as a compiled or traced one may."""

    def __getattr__(self, name: str) -> Any:
        return getattr(With(), name)


def test_the_tensors_behind_a_wrapper_are_saved_too() -> None:
    state = RegisteredState()
    state.add("mean", Wrapper())  # pyrefly: ignore[bad-argument-type]
    assert list(state.per_parameter) == ["mean"]
