"""Random numbers during the check: draws do not depend on the batch.

A sample gets different random numbers in half of its batch than in the whole batch. To make the two comparable, every
draw is replaced by the mean of its distribution. Dropout then changes nothing, and noise is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Arguments = Mapping[str, Any]


class ConstantDraws(TorchDispatchMode):
    """Replaces the results of torch's random operators by constants; `unsupported` names those it cannot replace.

    `used`: there were such operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = False
        self.unsupported: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return result

        # Attention and recurrent kernels have the tag, but draw only with dropout.
        arguments = _by_name(func, args, kwargs)
        if not arguments.get("dropout_p", arguments.get("dropout", 1.0)):
            return result

        self.used = True
        name = func.overloadpacket.__name__
        replace = _REPLACEMENTS.get(name)

        # The result stays as it was drawn, and the caller tries the model in eval mode.
        if replace is None:
            self.unsupported.add(name)
            return result

        return replace(result, arguments)


def _by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return all arguments of a call by name, including defaults."""
    schema = func._schema.arguments

    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)}
    return defaults | given | kwargs


def _filled(value: Callable[[Arguments], Any]) -> Callable[[Tensor, Arguments], Tensor]:
    """Return a replacement that fills the result with `value(arguments)`, a number or a tensor."""

    def replace(result: Tensor, arguments: Arguments) -> Tensor:
        mean = value(arguments)
        return result.copy_(mean) if isinstance(mean, Tensor) else result.fill_(mean)

    return replace


def _middle(arguments: Arguments) -> Any:
    """Return the middle of the range of random integers. Operators call its ends by two names."""
    low = arguments.get("low", arguments.get("from", 0))
    high = arguments.get("high", arguments.get("to", 0))
    return ((low or 0) + (high or 0)) // 2


def _probability(arguments: Arguments) -> Any:
    """Return the mean of a Bernoulli distribution: a number, or a tensor of the result's shape."""
    # `bernoulli(probabilities)` has no argument p: its input holds the probabilities.
    probability = arguments.get("p")
    return arguments["self"] if probability is None else probability


# Replacements for torch's random operators, by name. Each takes the operator's result and its arguments.
_REPLACEMENTS: dict[str, Callable[[Any, Arguments], Any]] = {
    "rand": _filled(lambda arguments: 0.5),
    "rand_like": _filled(lambda arguments: 0.5),
    "uniform": _filled(lambda arguments: (arguments["from"] + arguments["to"]) / 2),
    "uniform_": _filled(lambda arguments: (arguments["from"] + arguments["to"]) / 2),
    "randn": _filled(lambda arguments: 0.0),
    "randn_like": _filled(lambda arguments: 0.0),
    "normal": _filled(lambda arguments: arguments["mean"]),
    "normal_": _filled(lambda arguments: arguments["mean"]),
    "randint": _filled(_middle),
    "randint_like": _filled(_middle),
    "random_": _filled(_middle),
    "bernoulli": _filled(_probability),
    "bernoulli_": _filled(_probability),
    "exponential_": _filled(lambda arguments: 1.0),
    "poisson": _filled(lambda arguments: arguments["self"]),
    "_standard_gamma": _filled(lambda arguments: arguments["self"]),
    "_sample_dirichlet": _filled(lambda arguments: arguments["self"] / arguments["self"].sum(-1, keepdim=True)),
    # As dropout with probability 0: the input, and a mask of ones.
    "native_dropout": lambda result, arguments: (arguments["input"].clone(), torch.ones_like(result[1])),
    # The indices (..., num_samples) of the most likely classes.
    "multinomial": lambda result, arguments: arguments["self"].topk(arguments["num_samples"], dim=-1).indices,
    # n - 1, ..., 0, not the identity: a loss that mixes samples must not mix each sample with itself.
    "randperm": lambda result, arguments: result.copy_(torch.arange(len(result) - 1, -1, -1, dtype=result.dtype)),
}
