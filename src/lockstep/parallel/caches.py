"""KV caches (`past_key_values`), which Hugging Face models create for generating text. Training does not need them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lockstep.errors import UserError


def disable_kv_cache(model: nn.Module) -> None:
    """Set `use_cache=False` in the configuration of a Hugging Face model.

    A rank of a pipeline does not have the keys and values of all layers, and a recomputed block would fill its cache
    twice.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def refuse_kv_cache(block: nn.Module, arguments: Iterable[Any], remat: str) -> None:
    """Raise if a recomputed block gets a KV cache, because the loss passes one or calls with use_cache=True."""
    for argument in arguments:
        # Compare names, in order not to import transformers.
        if any(kind.__name__ == "Cache" for kind in type(argument).__mro__):
            raise UserError(
                f"remat={remat} would fill the KV cache of {type(block).__name__} twice",
                f"it gets a {type(argument).__name__}, since the loss calls the model with use_cache=True or with "
                "past_key_values",
                "leave both out of the call, or type remat=none",
            )
