"""Caches of keys and values, which models of transformers keep for generating text. Training has no use for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.errors import UserError

ASKS = "use_cache"  # the argument of a forward that asks for a cache; None: as the model's config says


def keep_no_cache(model: nn.Module, always: bool) -> None:
    """Let the forwards of a Hugging Face model make no cache unless they are asked for one.

    No rank of a pipeline has the keys and values of all layers, and a block that is recomputed would fill its cache
    twice. No loss needs them. The config stays as it is: it is the user's, and saved with the model.

    always: in forwards without gradients as well
    """
    for module in model.modules():
        if not _is_transformers(module, "PreTrainedModel"):
            continue
        signature = inspect.signature(module.forward)
        if ASKS in signature.parameters:
            position = list(signature.parameters).index(ASKS)
            # As in remat.py: in a copy of the model a partial belongs to the copied module.
            forward: Any = partial(_forward, module, vars(module).get("forward"), position, always)
            forward.__signature__ = signature  # transformers reads it
            module.forward = forward


def _forward(
    module: nn.Module, original: Callable[..., Any] | None, position: int, always: bool, *args: Any, **kwargs: Any
) -> Any:
    if (always or torch.is_grad_enabled()) and len(args) <= position and kwargs.get(ASKS) is None:
        kwargs[ASKS] = False
    return original(*args, **kwargs) if original else type(module).forward(module, *args, **kwargs)


def refuse_cache(block: nn.Module, arguments: Iterable[Any], remat: str) -> None:
    """Raise if a block that is recomputed gets a cache all the same: because the loss asks for one, or passes one."""
    for argument in arguments:
        if _is_transformers(argument, "Cache"):
            raise UserError(
                f"remat={remat} would fill the cache of keys and values of {type(block).__name__} twice",
                f"it gets a {type(argument).__name__}, since the loss calls the model with use_cache=True or with "
                "past_key_values",
                "leave both out of the call, or type remat=none",
            )


def _is_transformers(value: Any, name: str) -> bool:
    """Return whether the value's class derives from the class of this name in transformers, which we do not import."""
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] == "transformers" for kind in type(value).__mro__
    )
