"""Sketches of samples: what is kept of a sample, to see later whether it is the same one.

Integers and text are compared exactly, by a digest. Floats are compared by their mean, their standard deviation and a
few values, with a tolerance: other CPUs, builds of torch and numbers of threads round in other ways.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import PurePath, PureWindowsPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint.state.digests import digest

# What is kept of floats: few enough for the JSON of a checkpoint.
MAX_ARRAYS = 64  # of one sample
MAX_READ = 1_000_000  # values of one array that are read
KEPT = 32  # values of one array that are kept

# How far floats may be apart: in standard deviations, in units of their precision, and in any case.
OF_STD, OF_PRECISION, ALWAYS = 1e-2, 4.0, 1e-6

# The same file may be in another folder on another machine, or in a temporary one.
ABSOLUTE = re.compile(r"(file:)?([A-Za-z]:)?[/\\]")


def sketch(data: Any) -> dict[str, Any]:
    """Return the sketch of a sample, as JSON. Of an object whose contents are not known, only the class counts."""
    floats: list[list[float]] = []
    return {"exact": digest(_without_floats(data, floats)), "floats": floats}


def is_same(sketch: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two sketches may be of the same sample."""
    if sketch["exact"] != other["exact"] or len(sketch["floats"]) != len(other["floats"]):
        return False

    return all(map(_are_close, sketch["floats"], other["floats"]))


def _are_close(floats: list[float], others: list[float]) -> bool:
    if len(floats) != len(others) or floats[:2] != others[:2]:
        return False

    # Of the smaller deviation: an outlier in one of them must not hide a difference.
    precision, deviation = floats[0], min(floats[2], others[2])
    a, b = np.array(floats[2:]), np.array(others[2:])
    tolerance = ALWAYS + OF_STD * deviation + OF_PRECISION * precision * np.maximum(np.abs(a), np.abs(b))
    return bool((np.abs(a - b) <= tolerance).all())


def _sketch_floats(values: np.ndarray, precision: float) -> list[float]:
    """Return [precision, how many are no number, standard deviation, mean, a few values]."""
    values = values[:: len(values) // MAX_READ + 1].astype(np.float64)
    finite = np.isfinite(values)
    values = np.where(finite, values, 0.0)
    few = values[:: max(1, len(values) // KEPT)]
    counted = values[finite] if finite.any() else np.zeros(1)
    return [precision, float((~finite).sum()), float(counted.std()), float(counted.mean()), *few.tolist()]


def _without_floats(data: Any, floats: list[list[float]]) -> Any:
    """Return what is compared exactly: the data with the kind and the shape in place of floats, which go to `floats`.

    Folders are left out, too.
    """
    match data:
        case Tensor() if data.is_floating_point() or data.is_complex():
            whole = torch.view_as_real(data.detach().resolve_conj()) if data.is_complex() else data.detach()
            precision = max(torch.finfo(whole.dtype).eps, torch.finfo(torch.float32).eps)
            _keep(floats, lambda: whole.to("cpu", torch.float64).reshape(-1).numpy(), precision)
            return f"{data.dtype}{tuple(data.shape)}"

        case np.ndarray() | np.generic() if data.dtype.kind in "fc":
            whole = np.asarray(data).reshape(-1)
            precision = max(float(np.finfo(data.dtype.name).eps), torch.finfo(torch.float32).eps)
            _keep(
                floats, lambda: np.concatenate([whole.real, whole.imag]) if data.dtype.kind == "c" else whole, precision
            )
            return f"{data.dtype}{data.shape}"

        case float():
            return _without_floats(np.float64(data), floats)

        case str() if ABSOLUTE.match(data):
            return PureWindowsPath(data).name  # which knows both kinds of slashes

        case PurePath():
            return data.name

        case list() if data and (kinds := set(map(type, data))) <= {int, float}:
            # As an array, since a list of tokens may be long.
            array = np.asarray(data)
            return ["list", _without_floats(array, floats) if array.dtype.kind == "f" else array, len(kinds)]

        case Mapping():
            return {key: _without_floats(data[key], floats) for key in sorted(data, key=repr)}

        case list():
            return [_without_floats(value, floats) for value in data]

        case tuple():
            return tuple(_without_floats(value, floats) for value in data)

        case set() | frozenset():
            return ["set", *(_without_floats(value, floats) for value in sorted(data, key=repr))]

        case np.ndarray() if data.dtype == object:
            return _without_floats(data.tolist(), floats)

        case Tensor() | np.ndarray() | np.generic() | int() | str() | bytes() | None:
            return data

        case type():
            return data.__qualname__

        case _ if hasattr(data, "__array__") or hasattr(data, "__array_interface__"):
            # Such as an image of PIL.
            return [type(data).__qualname__, _without_floats(np.asarray(data), floats)]

        case _ if dataclasses.is_dataclass(data):
            values = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
            return [type(data).__qualname__, _without_floats(values, floats)]

        case _ if type(data).__repr__ is object.__repr__:
            return [type(data).__qualname__, _without_floats(getattr(data, "__dict__", {}), floats)]

        case _:
            return type(data).__qualname__


def _keep(floats: list[list[float]], values: Any, precision: float) -> None:
    if len(floats) < MAX_ARRAYS:
        floats.append(_sketch_floats(values(), precision))
