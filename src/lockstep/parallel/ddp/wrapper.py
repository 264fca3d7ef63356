"""Modules that stand between a task and its model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


class Wrapper(nn.Module):
    """A module around the user's model that has the model's attributes, parameter names and state dict."""

    def user_model(self) -> nn.Module:
        # Not `self.module`: before the constructor has set it, our own `__getattr__` would recurse.
        return nn.Module.__getattr__(self, "module")  # pyrefly: ignore[bad-return]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.user_model(), name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.user_model().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.user_model().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.user_model().load_state_dict(*args, **kwargs)
