"""KV caches (`past_key_values`), which Hugging Face models create for generating text. Training does not need them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.errors import UserError

ASKS = "use_cache"  # the argument of a forward that asks for a cache; None: as the model's config says


def disable_kv_cache(model: nn.Module, always: bool) -> None:
    """Make the forwards of a Hugging Face model run with `use_cache=False`, unless a call asks for a cache.

    No loss needs keys and values. With them a call cannot be captured as a CUDA graph, and each block is compiled by
    itself; a recomputed block would fill its cache twice, and a rank of a pipeline does not have all layers. The config
    stays as it is: it belongs to the user, and is saved with the model.

    always: in forwards without gradients as well
    """
    for module in model.modules():
        if not _is_transformers(module, "PreTrainedModel"):
            continue

        signature = inspect.signature(module.forward)
        if ASKS in signature.parameters:
            position = list(signature.parameters).index(ASKS)
            # As in activation_checkpointing.py: in a copy of the model a partial belongs to the copied module.
            forward: Any = partial(_forward, module, vars(module).get("forward"), position, always)
            forward.__signature__ = signature  # transformers reads it
            module.forward = forward


def _forward(
    module: nn.Module, original: Callable[..., Any] | None, position: int, always: bool, *args: Any, **kwargs: Any
) -> Any:
    if (always or torch.is_grad_enabled()) and len(args) <= position and kwargs.get(ASKS) is None:
        kwargs[ASKS] = False
    return original(*args, **kwargs) if original else type(module).forward(module, *args, **kwargs)


def refuse_kv_cache(block: nn.Module, arguments: Iterable[Any], remat: str) -> None:
    """Raise if a recomputed block gets a KV cache, because the loss passes one or calls with use_cache=True."""
    for argument in arguments:
        if _is_transformers(argument, "Cache"):
            raise UserError(
                f"remat={remat} would fill the KV cache of {type(block).__name__} twice",
                f"it gets a {type(argument).__name__}, since the loss calls the model with use_cache=True or with "
                "past_key_values",
                "leave both out of the call, or set remat=none",
            )


def _is_transformers(value: Any, name: str) -> bool:
    """Return whether the value's class derives from the class of this name in transformers, which we do not import."""
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] == "transformers" for kind in type(value).__mro__
    )
