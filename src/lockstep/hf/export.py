"""`lockstep ckpt export --format hf`: a folder that `from_pretrained` opens, from a checkpoint of any strategy.

The folder appears as a whole or not at all. Host memory holds the model's weights once.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.choose import run_folder_of
from lockstep.checkpoint.export import read_weights
from lockstep.checkpoint.state.digests import digest
from lockstep.checkpoint.storage.folder import Checkpoint
from lockstep.errors import UserError, plural
from lockstep.hf import adapters
from lockstep.hf.local import LOCAL, load_config, load_model, no_progress_bars, package
from lockstep.run_folder.names import ASSETS, EXPORT

CONFIG = "config.json"
GENERATION = "generation_config.json"


@dataclass(frozen=True)
class ExportOptions:
    """The options of the command."""

    out: Path | None = None  # the folder to write
    assets: Path | None = None  # a folder with config.json and the tokenizer; None: the run's own
    max_shard_size: str = "5GB"  # the largest size of a file of weights
    merge: bool = False  # write adapters merged into their base model
    base: Path | None = None  # the folder of the base model, if it has moved
    overwrite: bool = False  # replace the folder if it exists
    ema: bool = False  # write the averages of the weights


def export(path: Path, checkpoint: Checkpoint, options: ExportOptions) -> str:
    """Write the weights of a checkpoint, found at `path`, as a Hugging Face folder. Return the text to print."""
    run = run_folder_of(path)
    out = options.out or run / EXPORT / f"{checkpoint.name}-hf"
    if out.exists() and not options.overwrite:
        raise UserError(f"{out} already exists", "", "name another folder with --out, or add --overwrite")

    _check_replaceable(out, [run, options.assets, options.base])
    assets = options.assets or run / ASSETS
    if not (assets / CONFIG).exists():
        raise UserError(
            f"the config of the model is not known: there is no {assets / CONFIG}",
            "a task of lockstep.hf writes it; others may, in Task.write_assets",
            "name a folder with config.json and the tokenizer: --assets FOLDER",
        )

    has_adapter = (assets / adapters.CONFIG).exists()
    if options.merge and not has_adapter:
        raise UserError(
            "--merge has no effect: the run has no adapters", f"no {assets / adapters.CONFIG}", "leave it out"
        )

    weights = _Weights.read(checkpoint, assets, options)
    write = _write_adapter if has_adapter and not options.merge else _write_model
    return _replace_folder(out, lambda draft: write(draft, weights, options.max_shard_size))


def _check_replaceable(out: Path, needed: list[Path | None]) -> None:
    """Raise if replacing `out` would delete what the export reads, or anything that is no model."""
    if not out.exists():
        return

    for path in needed:
        if path is not None and path.resolve().is_relative_to(out.resolve()):
            raise UserError(
                f"--overwrite would delete {path}, which the export needs",
                f"it is {out}, or in it",
                "set another --out",
            )

    # An export has files alone, and a config of a model or of adapters.
    names = [entry.name for entry in out.iterdir()] if out.is_dir() and not out.is_symlink() else None
    is_model = names is not None and (not names or CONFIG in names or adapters.CONFIG in names)
    if not is_model or any(entry.is_dir() for entry in out.iterdir()):
        raise UserError(
            f"--overwrite replaces a folder with a model, and {out} is something else",
            "a file, a link, or a folder with other contents",
            "set another --out, or delete it yourself",
        )


@dataclass(frozen=True)
class _Weights:
    """The tensors of the checkpoint, and where the others are."""

    state: dict[str, Tensor]  # tied tensors under all of their names
    digests: dict[str, str]  # digests of the frozen parameters that it does not hold
    assets: Path
    base: Path | None  # the folder that frozen parameters come from
    location: str

    @classmethod
    def read(cls, checkpoint: Checkpoint, assets: Path, options: ExportOptions) -> _Weights:
        weights = read_weights(checkpoint, options.ema)
        state = weights.tensors | {name: weights.tensors[original] for name, original in weights.aliases.items()}
        return cls(state, weights.frozen_digests, assets, options.base, str(checkpoint.path))


def _write_model(draft: Path, weights: _Weights, max_shard_size: str) -> str:
    """Write config, generation config, tokenizer, and the weights in shards with an index."""
    # Adapters are merged into the model that they were trained on.
    if (weights.assets / adapters.CONFIG).exists():
        model = _merged(weights)
        state = model.state_dict()
    else:
        state = weights.state | _frozen(weights)
        model = _skeleton(weights.assets)
        _check_names(model, state, weights.location)

    # from_pretrained opens a model in the dtype that its config names, so it must be the dtype of the weights.
    model.to(next(tensor.dtype for tensor in state.values() if tensor.is_floating_point()))
    if (weights.assets / GENERATION).exists():
        model.generation_config = package("transformers").GenerationConfig.from_pretrained(weights.assets, **LOCAL)

    count = len(state)
    with no_progress_bars():
        model.save_pretrained(draft, state_dict=state, max_shard_size=max_shard_size)  # which empties `state`

    _copy_others(weights.assets, draft)
    files = len(list(draft.glob("model*.safetensors")))
    return f"{plural(count, 'tensor')} in {plural(files, 'file')}"


def _skeleton(assets: Path) -> Any:
    """Return the model without memory for its weights: it knows which are tied, and how they are named on disk."""
    kind = getattr(package("transformers"), _class_name(assets))
    with torch.device("meta"):
        return kind(load_config(assets))


def _class_name(assets: Path) -> str:
    """Return the name of the class that was trained."""
    names = getattr(load_config(assets), "architectures", None) or [""]
    if not hasattr(package("transformers"), names[0]):
        raise UserError(
            f"{assets / CONFIG} does not name a class of transformers",
            f"architectures: {names}",
            'add "architectures": ["LlamaForCausalLM"], or the class that was trained',
        )

    return names[0]


def _check_names(model: nn.Module, state: Mapping[str, Tensor], location: str) -> None:
    """Refuse weights of another model: a name too many, one too few, or another shape."""
    expected = model.state_dict()
    missing = sorted(expected.keys() - state.keys())
    extra = sorted(state.keys() - expected.keys())
    shapes = sorted(name for name in expected.keys() & state.keys() if expected[name].shape != state[name].shape)

    # One kind of problem at a time: the first explains the others.
    for problem, names in (("lacks", missing), ("has in addition", extra), ("has in another shape", shapes)):
        if names:
            raise UserError(
                f"the weights in {location} are not those of {type(model).__name__}",
                f"the checkpoint {problem} {plural(len(names), 'tensor')}, first {names[0]!r}",
                "name the folder of the model that was trained: --assets FOLDER",
            )


def _frozen(weights: _Weights) -> dict[str, Tensor]:
    """Return the frozen parameters that the checkpoint does not hold, from the base model."""
    if not weights.digests:
        return {}

    state = load_model(_class_name(weights.assets), _base_folder(weights, None)).state_dict()
    _check_digests(weights, state)
    return {name: state[name] for name in weights.digests}


def _base_folder(weights: _Weights, recorded: str | None) -> Path:
    """Return the folder of the base model: as typed, or as it was recorded. Raises a UserError."""
    folder = weights.base or (Path(recorded) if recorded else None)
    if folder is None or not folder.is_dir():
        raise UserError(
            "the frozen weights of the base model are needed, and no checkpoint holds them",
            f"the base model was {folder}" if folder else "where they come from is not recorded",
            "name its folder: --base FOLDER",
        )

    return folder


def _check_digests(weights: _Weights, state: Mapping[str, Tensor]) -> None:
    """Raise unless the base model has the frozen weights that were used in training."""
    for name, expected in weights.digests.items():
        if name not in state or digest(state[name]) != expected:
            raise UserError(
                "the base model is not the one that the adapters were trained with",
                f"{name!r} differs from the digest in {weights.location}",
                "name the right folder: --base FOLDER",
            )


def _copy_others(assets: Path, draft: Path) -> None:
    """Copy the tokenizer and whatever else the task wrote."""
    for file in assets.iterdir():
        if file.is_file() and file.name not in (CONFIG, GENERATION, adapters.CONFIG, "README.md"):
            shutil.copyfile(file, draft / file.name)


# ---- adapters ----


def _write_adapter(draft: Path, weights: _Weights, max_shard_size: str) -> str:
    """Write adapter_config.json and adapter_model.safetensors, and the tokenizer."""
    peft = package("peft")
    config = peft.PeftConfig.from_pretrained(str(weights.assets))
    with torch.device("meta"):
        model = peft.PeftModel(_skeleton(weights.assets), config)

    # "auto" would look for the base model's config on the network.
    model.save_pretrained(str(draft), state_dict=weights.state, save_embedding_layers=False)
    _copy_others(weights.assets, draft)
    return f"adapters of {config.base_model_name_or_path or 'a model with random weights'}"


def _merged(weights: _Weights) -> Any:
    """Return the base model with the adapters added to its weights."""
    peft = package("peft")
    config = peft.PeftConfig.from_pretrained(str(weights.assets))

    base = load_model(_class_name(weights.assets), _base_folder(weights, config.base_model_name_or_path))
    model = peft.PeftModel(base, config, autocast_adapter_dtype=False)

    _check_digests(weights, model.state_dict())

    # The checkpoint holds the adapters alone; the rest is the base model, whose digests were checked.
    missing, extra = model.load_state_dict(weights.state, strict=False)
    assert not extra
    assert set(missing) <= set(weights.digests), "the digests cover what the checkpoint does not hold"
    return model.merge_and_unload()


# ---- the folder ----


def _replace_folder(out: Path, write: Callable[[Path], str]) -> str:
    """Write a folder next to `out` and rename it, so that `out` is complete whenever it exists."""
    out.parent.mkdir(parents=True, exist_ok=True)

    token = secrets.token_hex(4)
    draft, old = (out.with_name(f".{out.name}.{token}.{end}") for end in ("tmp", "old"))
    draft.mkdir()

    # Everything is on the disk before the folder gets its name.
    try:
        text = write(draft)
        for file in [*draft.iterdir(), draft]:
            _sync(file)

        # Between the two renames there is no `out`; the old one is still there, under another name.
        if out.exists():
            out.rename(old)

        draft.rename(out)
        _sync(out.parent)
    except BaseException:  # also Ctrl-C: no half of a folder stays
        shutil.rmtree(draft, ignore_errors=True)
        if old.exists() and not out.exists():
            with suppress(OSError):
                old.rename(out)

        raise

    shutil.rmtree(old, ignore_errors=True)
    return f"{out}\n{text}"


def _sync(path: Path) -> None:
    """Write a file or a folder through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
