"""Models, configs and tokenizers of Hugging Face, from local files only."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.errors import UserError

# One of these is in a folder that holds weights.
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

# No code of a model folder is ever run.
LOCAL = {"local_files_only": True, "trust_remote_code": False}


def package(name: str) -> Any:
    """Import an optional package, or say how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"the package {name} is needed for lockstep.hf and cannot be imported",
            str(error),
            'pip install "lockstep-train[hf]"',
        ) from None


def load_config(path: Any, **changes: Any) -> Any:
    """Return the config of `path`: a folder, a config.json, a name in the local cache, or a config itself."""
    if not isinstance(path, str | Path):
        for key, value in changes.items():
            setattr(path, key, value)
        return path

    with _explained(path):
        return package("transformers").AutoConfig.from_pretrained(str(path), **LOCAL, **changes)


def load_model(auto: str, path: Any, **changes: Any) -> nn.Module:
    """Return a model of an Auto class, in float32: with its weights, or random ones if `path` is a config.

    `path`: a folder with weights, or its name in the local cache; a config.json or a config object for random weights.
    """
    transformers = package("transformers")
    kind = getattr(transformers, auto)
    if starts_random(path):
        config = load_config(path, **changes)
        return kind.from_config(config, dtype=torch.float32, trust_remote_code=False)

    folder = Path(path)
    if folder.is_dir() and not any((folder / name).exists() for name in WEIGHTS):
        raise UserError(
            f"the folder {path} holds no weights",
            f"none of {', '.join(WEIGHTS)}",
            f"to start from random weights, name the config: {folder / 'config.json'}",
        )

    with _explained(path):
        return kind.from_pretrained(str(path), **LOCAL, dtype=torch.float32, **changes)


def starts_random(path: Any) -> bool:
    return not isinstance(path, str | Path) or str(path).endswith(".json")


def load_tokenizer(path: Any) -> Any:
    """Return the tokenizer at `path`, or None if the folder has none."""
    folder = Path(path).parent if str(path).endswith(".json") else Path(path)
    if folder.is_dir() and not any(folder.glob("*token*")) and not any(folder.glob("vocab*")):
        return None

    with _explained(folder):
        return package("transformers").AutoTokenizer.from_pretrained(str(folder), **LOCAL)


def architecture(auto: str, config: Any) -> str:
    """Return the name of the class that an Auto class chooses for this config."""
    mapping = getattr(package("transformers"), auto)._model_mapping
    if type(config) not in mapping:
        raise UserError(
            f"{auto} has no model for the config {type(config).__name__}",
            f"model_type {config.model_type}",
            "use another task of lockstep.hf, or set the attribute `auto` of your own one",
        )

    found = mapping[type(config)]
    return (found[0] if isinstance(found, list | tuple) else found).__name__


@contextmanager
def _explained(path: Any) -> Iterator[None]:
    """Turn transformers' errors about missing files, which advise to go online, into ours."""
    try:
        yield
    except (OSError, json.JSONDecodeError) as error:
        there = Path(path).exists()
        fix = "the folder must hold what from_pretrained needs" if there else f"hf download {path} --local-dir FOLDER"
        raise UserError(
            f"{path} cannot be read as a Hugging Face model" if there else f"there is no local model {path}",
            str(error).partition("\n")[0]
            if there
            else "neither a folder, nor in the local cache; nothing is downloaded",
            fix if there else f"{fix}, where there is a network; then give that folder",
        ) from None
