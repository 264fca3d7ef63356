"""Several models of one run, as one module: their gradients are reduced together, and one checkpoint holds them all."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn


class SeveralModels(nn.Module):
    """A module whose forward gets the index of the model to call. Parameters are named `0.NAME`, `1.NAME` and so on."""

    def __init__(self, models: Sequence[nn.Module]):
        super().__init__()
        self.count = len(models)
        for index, model in enumerate(models):
            self.add_module(str(index), model)

    def forward(self, index: int, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule(str(index))(*args, **kwargs)

    def __iter__(self) -> Iterator[OneOfSeveral]:
        """Yield a proxy of each model. Its calls go through this module."""
        for index in range(self.count):
            yield OneOfSeveral(self, index, self.get_submodule(str(index)))


class OneOfSeveral:
    """A proxy of one of the models, for the user's code. It has the attributes, parameters and names of that model."""

    def __init__(self, module: SeveralModels, index: int, model: nn.Module):
        # Not by assignment, which `__setattr__` forwards to the model.
        vars(self).update(_module=module, _index=index, _model=model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(self._index, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        # A user may copy a model for a moving average of its weights: copy the model itself, not the proxy.
        return copy.deepcopy(self._model, memo)
