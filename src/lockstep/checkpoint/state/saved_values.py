"""Checks the `values` of a manifest, before a resume changes anything: their keys, their types, and their encoding.

`manifest_reader` checks all other fields of a manifest. What an object has saved is checked as far as it is decoded
here: the object itself decides what is in its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.manifest_reader import require
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.state.state_tree import MARKERS
from lockstep.errors import UserError

# The keys that a run has always saved. Another program's checkpoint may lack them.
RUN_KEYS = {"state", "config", "world", "plan"}

# The dtypes that numpy does not have.
NOT_IN_NUMPY = ("BF16", "F8_E4M3", "F8_E5M2")

# What the items of a list are called in messages.
_PLURALS = {dict: "dicts", list: "lists", str: "texts"}


def check_run_values(reader: CheckpointReader) -> None:
    """Raise a UserError unless `Resumer.load` can use the values besides the state."""
    values = reader.manifest.values
    with _refused(reader):
        missing = RUN_KEYS - values.keys()
        require(not missing, f"it does not contain {', '.join(sorted(missing))}")

        _check_texts(values["config"], "config")
        _check_count(values["world"], "world")
        _check_dict(values["plan"], "plan", "global_batch")
        _check_count(values["plan"]["global_batch"], "plan.global_batch")


def check_state(reader: CheckpointReader) -> None:
    """Raise a UserError unless `RunState.restore` can use the state."""
    values = reader.manifest.values
    with _refused(reader):
        _check_encoding(values, reader.manifest)
        _check_dict(values, "values", "state")
        _check_decodes_to_dict(values.get("loop", {}), "loop")

        state = values["state"]
        _check_dict(state, "state", "model", "optimizers", "stepper", "stateful", "next_samples")
        _check_decodes_to_dict(state["stepper"], "state.stepper")
        _check_dict(state["stateful"], "state.stateful", "data")
        _check_list(state.get("required", []), str, "state.required")

        next_samples = state["next_samples"]
        require(next_samples is None or isinstance(next_samples, str), "state.next_samples is not text")

        _check_dict(state["model"], "state.model", "extra", "frozen_digests")
        _check_dict(state["model"]["extra"], "state.model.extra")
        _check_texts(state["model"]["frozen_digests"], "state.model.frozen_digests")

        _check_list(state["optimizers"], dict, "state.optimizers")
        for number, optimizer in enumerate(state["optimizers"]):
            _check_optimizer(optimizer, f"state.optimizers.{number}")


def _check_optimizer(optimizer: dict[str, Any], what: str) -> None:
    _check_dict(optimizer, what, "kind", "state", "params", "initial", "settings")
    require(isinstance(optimizer["kind"], str), f"{what}.kind is not text")

    _check_dict(optimizer["state"], f"{what}.state")
    for name, state in optimizer["state"].items():
        _check_decodes_to_dict(state, f"{what}.state of {name!r}")

    _check_list(optimizer["params"], list, f"{what}.params")
    for group in optimizer["params"]:
        _check_list(group, str, f"a group of {what}.params")

    for key in ("initial", "settings"):
        _check_list(optimizer[key], dict, f"{what}.{key}")
        for options in optimizer[key]:
            _check_decodes_to_dict(options, f"a group of {what}.{key}")

    require(len(optimizer["initial"]) == len(optimizer["settings"]), f"{what} has two numbers of parameter groups")


def _check_encoding(value: Any, manifest: Manifest) -> None:
    """Check that `state_tree.unpack` can decode a value. The decoder of a manifest has checked "$float"."""
    match value:
        case {"$tensor": name} | {"$on_device": name} | {"$array": name}:
            known = isinstance(name, str) and (name in manifest.tensors or name in manifest.aliases)
            require(known, f"a value is the tensor {str(name)[:60]!r}, which it does not contain")
            entry = manifest.tensors[manifest.aliases.get(name, name)]
            require("$array" not in value or entry.dtype not in NOT_IN_NUMPY, f"{name!r} is no array: {entry.dtype}")

        case {"$tuple": items}:
            require(isinstance(items, list), "a tuple is not encoded as a list")
            _check_encoding(items, manifest)

        case {"$items": pairs}:
            _check_list(pairs, list, "an encoded dict")
            for pair in pairs:
                require(len(pair) == 2 and _can_be_key(pair[0]), "an encoded dict has something else than items")
                _check_encoding(pair, manifest)

        case dict():
            for item in value.values():
                _check_encoding(item, manifest)

        case list():
            for item in value:
                _check_encoding(item, manifest)


def _can_be_key(value: Any) -> bool:
    """Whether what this encodes can be the key of a dict: a plain value, a tensor, or a tuple of these."""
    match value:
        case {"$tuple": list(items)}:
            return all(map(_can_be_key, items))
        case {"$float": _} | {"$tensor": _} | {"$on_device": _}:
            return True
        case _:
            return not isinstance(value, dict | list)


# ---- types ----


def _check_dict(value: Any, what: str, *keys: str) -> None:
    """Check that this is a dict with at least these keys."""
    require(isinstance(value, dict), f"{what} is not a dict")
    missing = sorted(keys - value.keys())
    require(not missing, f"{what} lacks {', '.join(missing)}")


def _check_decodes_to_dict(value: Any, what: str) -> None:
    decodes = isinstance(value, dict) and not (MARKERS - {"$items"}) & value.keys()
    require(decodes, f"{what} is not a dict")


def _check_texts(value: Any, what: str) -> None:
    _check_dict(value, what)
    require(all(isinstance(text, str) for text in value.values()), f"{what} has values that are not text")


def _check_list(value: Any, kind: type, what: str) -> None:
    matches = isinstance(value, list) and all(isinstance(item, kind) for item in value)
    require(matches, f"{what} is not a list of {_PLURALS[kind]}")


def _check_count(value: Any, what: str) -> None:
    # `type`, not `isinstance`: True is not 1 here.
    require(type(value) is int and value > 0, f"{what} is not a count")


@contextmanager
def _refused(reader: CheckpointReader) -> Iterator[None]:
    """Turn the ValueError of a check into a UserError."""
    try:
        yield
    except ValueError as error:
        raise UserError(
            f"the checkpoint cannot be resumed: {error}",
            str(reader.checkpoint.path),
            "resume with the version of Lockstep that wrote it (lockstep ckpt show)",
        ) from None
