"""Several models in one run, as one module: their gradients are reduced together, and a checkpoint holds them all."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn


class SeveralModels(nn.Module):
    """A module whose forward is told which of the models to call. Parameters are named `0.NAME`, `1.NAME` and so on."""

    def __init__(self, models: Sequence[nn.Module]):
        super().__init__()
        self.count = len(models)
        for number, model in enumerate(models):
            self.add_module(str(number), model)

    def forward(self, number: int, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule(str(number))(*args, **kwargs)

    def __iter__(self) -> Iterator[OneOfSeveral]:
        return self.called_by(self)

    def called_by(self, module: nn.Module) -> Iterator[OneOfSeveral]:
        """Yield the models. Their calls go through `module`, which wraps this one, so that it sees all of them."""
        for number in range(self.count):
            yield OneOfSeveral(module, number, self.get_submodule(str(number)))


class OneOfSeveral:
    """What the user calls in place of one of the models. It looks like that model, with its parameters and names."""

    def __init__(self, module: nn.Module, number: int, model: nn.Module):
        vars(self).update(_module=module, _number=number, _model=model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(self._number, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        # For a moving average of its weights: a model by itself, as the copy of a single one is.
        return copy.deepcopy(self._model, memo)
