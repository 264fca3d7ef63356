"""Random numbers during the check: generators that are put back afterwards, and draws that do not depend on the batch.

A sample gets other random numbers in a half of its batch than in the whole. To compare the two, every draw is replaced
by one number for all elements: the mean of the distribution. Dropout then changes nothing, and noise is zero.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.runtime.seeds import seed_host, seed_torch

Arguments = Mapping[str, Any]


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the global generators, by name."""
    states: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def drawn(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Return the names of the generators that were drawn from."""
    words = before["numpy"][1], after["numpy"][1]
    changed = {
        "random": before["random"] != after["random"],
        "numpy": before["numpy"][2] != after["numpy"][2] or not np.array_equal(*words),
        **{name: not torch.equal(before[name], after[name]) for name in before if name in ("torch", "cuda")},
    }
    return {name for name, moved in changed.items() if moved}


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Put the global generators back at the end: training must draw what it would have drawn."""
    states = generator_states(device)
    try:
        yield
    finally:
        torch.default_generator.set_state(states["torch"])
        np.random.set_state(states["numpy"])
        random.setstate(states["random"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], device)


def seed_all(value: int, device: torch.device) -> None:
    seed_torch(value, device)
    seed_host(value)


class HeldStill(TorchDispatchMode):
    """Replaces what torch's random operators draw. `missed` names those that it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.missed: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawn = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return drawn

        # Attention and recurrent kernels have the tag, and draw only with dropout.
        given = _by_name(func, args, kwargs)
        if not given.get("dropout_p", given.get("dropout", 1.0)):
            return drawn

        name = func.overloadpacket.__name__
        replace = _REPLACED.get(name)
        if replace is None:
            self.missed.add(name)
            return drawn
        return replace(drawn, given)


def _by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    schema = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return defaults | {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs


def _filled(value: Callable[[Arguments], Any]) -> Callable[[Tensor, Arguments], Tensor]:
    """Return a replacement that sets all elements to one number, or to those of a tensor of parameters."""

    def replace(drawn: Tensor, given: Arguments) -> Tensor:
        number = value(given)
        return drawn.copy_(number) if isinstance(number, Tensor) else drawn.fill_(number)

    return replace


def _middle(given: Arguments) -> Any:
    low, high = given.get("low", given.get("from", 0)), given.get("high", given.get("to", 0))
    return ((low or 0) + (high or 0)) // 2


def _probability(given: Arguments) -> Any:
    # `bernoulli(probabilities)` has them in place of a parameter p.
    probability = given.get("p")
    return given["self"] if probability is None else probability


def _keep_all(drawn: tuple[Tensor, Tensor], given: Arguments) -> tuple[Tensor, Tensor]:
    return given["input"].clone(), torch.ones_like(drawn[1])


def _largest(drawn: Tensor, given: Arguments) -> Tensor:
    return given["self"].topk(given["num_samples"], dim=-1).indices


# The replacement of each operator of torch that draws.
_REPLACED: dict[str, Callable[[Any, Arguments], Any]] = {
    "rand": _filled(lambda given: 0.5),
    "rand_like": _filled(lambda given: 0.5),
    "uniform": _filled(lambda given: (given["from"] + given["to"]) / 2),
    "uniform_": _filled(lambda given: (given["from"] + given["to"]) / 2),
    "randn": _filled(lambda given: 0.0),
    "randn_like": _filled(lambda given: 0.0),
    "normal": _filled(lambda given: given["mean"]),
    "normal_": _filled(lambda given: given["mean"]),
    "randint": _filled(_middle),
    "randint_like": _filled(_middle),
    "random_": _filled(_middle),
    "bernoulli": _filled(_probability),
    "bernoulli_": _filled(_probability),
    "exponential_": _filled(lambda given: 1.0),
    "poisson": _filled(lambda given: given["self"]),
    "_standard_gamma": _filled(lambda given: given["self"]),
    "_sample_dirichlet": _filled(lambda given: given["self"] / given["self"].sum(-1, keepdim=True)),
    "native_dropout": _keep_all,
    "multinomial": _largest,
    # Not in order: a loss that mixes its samples must not mix each with itself.
    "randperm": lambda drawn, given: drawn.copy_(torch.arange(len(drawn) - 1, -1, -1, dtype=drawn.dtype)),
}
