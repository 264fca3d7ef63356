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

from lockstep.errors import UserError, pip_install

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
            pip_install("hf"),
        ) from None


def local_folder(path: str | Path) -> Path:
    """Return an existing path as it is, and for the name of a model its folder in the local cache.

    transformers itself must get a folder: given a name, it looks for some files on the network even with
    local_files_only=True.
    """
    if Path(path).exists():
        return Path(path)

    hub = package("huggingface_hub")
    try:
        return Path(hub.snapshot_download(str(path), local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or not a name
        raise UserError(
            f"there is no local model {path}",
            "neither a file or folder, nor in the local cache; nothing is downloaded",
            f"where there is a network: hf download {path} --local-dir FOLDER; then give that folder",
        ) from None


def load_config(path: Any, **changes: Any) -> Any:
    """Return the config of `path`: a folder, a config.json, a name in the local cache, or a config itself."""
    if not isinstance(path, str | Path):
        for key, value in changes.items():
            setattr(path, key, value)

        return path

    folder = local_folder(path)
    with _explained(folder):
        return package("transformers").AutoConfig.from_pretrained(str(folder), **LOCAL, **changes)


def load_model(auto: str, path: Any, **changes: Any) -> nn.Module:
    """Return a model of an Auto class, in float32: with its weights, or random ones if `path` is a config.

    `path`: a folder with weights, or its name in the local cache; a config.json or a config object for random weights.
    """
    transformers = package("transformers")
    kind = getattr(transformers, auto)
    if auto.startswith("Auto"):
        architecture(auto, load_config(path))

    if starts_random(path):
        config = load_config(path, **changes)
        return kind.from_config(config, dtype=torch.float32, trust_remote_code=False)

    folder = local_folder(path)
    if not any((folder / name).exists() for name in WEIGHTS):
        raise UserError(
            f"the folder {folder} holds no weights",
            f"none of {', '.join(WEIGHTS)}",
            f"to start from random weights, name the config: {folder / 'config.json'}",
        )

    with _explained(folder), no_progress_bars():
        return kind.from_pretrained(str(folder), **LOCAL, dtype=torch.float32, **changes)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Every rank would print them."""
    logging = package("transformers").utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()

    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def starts_random(path: Any) -> bool:
    return not isinstance(path, str | Path) or str(path).endswith(".json")


def load_tokenizer(path: Any) -> Any:
    """Return the tokenizer at `path`, or None if the folder has none."""
    found = local_folder(path)
    folder = found.parent if found.is_file() else found
    if not any(folder.glob("*token*")) and not any(folder.glob("vocab*")):
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
def _explained(folder: Path) -> Iterator[None]:
    """Turn transformers' errors about missing files, which advise to go online, into ours."""
    try:
        yield
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(
            f"{folder} cannot be read as a Hugging Face model",
            str(error).partition("\n")[0],
            "give a folder that from_pretrained opens",
        ) from None
    except RuntimeError as error:
        # transformers lists the tensors in its log.
        if "ignore_mismatched_sizes" not in str(error):
            raise

        raise UserError(
            f"the weights in {folder} have other shapes than the model",
            "the lines above list them; a head with another number of labels is one reason",
            "leave task.num_labels out; or give a folder without the head",
        ) from None
