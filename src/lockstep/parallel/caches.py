"""Caches of keys and values, which models of transformers keep for generating text. Training has no use for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lockstep.errors import UserError


def keep_no_cache(model: nn.Module) -> None:
    """Tell the modules of a Hugging Face model not to make a cache by themselves.

    No rank of a pipeline has the keys and values of all layers, and a block that is recomputed would fill its cache
    twice. No loss needs them.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def refuse_cache(block: nn.Module, arguments: Iterable[Any], remat: str) -> None:
    """Raise if a block that is recomputed gets a cache all the same: because the loss asks for one, or passes one."""
    for argument in arguments:
        # By the name of transformers' base class, which we do not import.
        if any(kind.__name__ == "Cache" for kind in type(argument).__mro__):
            raise UserError(
                f"remat={remat} would fill the cache of keys and values of {type(block).__name__} twice",
                f"it gets a {type(argument).__name__}, since the loss calls the model with use_cache=True or with "
                "past_key_values",
                "leave both out of the call, or type remat=none",
            )
