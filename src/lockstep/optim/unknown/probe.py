"""Probes a user-defined optimizer with small synthetic parameters: does it update every parameter independently?

If its update uses a norm over all parameters, for example, it gives different results for one parameter alone. If it
draws random numbers, a parameter gets other ones when another parameter is updated before it. The probe does not say
whether the optimizer also updates every element independently: calls cannot prove that.
"""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, defaultdict
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.optim.unknown.stand_ins import step_with_stand_ins
from lockstep.runtime.shards import to_local

# The scale of the gradients in each step: an optimizer may treat only large ones differently, by clipping.
SCALES = (1.0, 1e3, 1e-3)
LENGTHS = (12, 8)  # the lengths of the first two dimensions; further dimensions have length 2
RATE = 0.01
# By the dtype of the synthetic parameters. Differences are clearest in float64, but some optimizers, such as those with
# custom kernels, take float32 only. In bfloat16 rounding would hide that parameters depend on each other.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}


class ProbeFailed(Exception):
    """The optimizer raised an error, or its update of one parameter depends on others. The message is for the user."""


def check_independent(optimizer: torch.optim.Optimizer) -> None:
    """Raise ProbeFailed if the update of one parameter depends on others."""
    failure: Exception | None = None
    for dtype in TOLERANCES:
        try:
            with torch.random.fork_rng(devices=[]), redirect_stdout(io.StringIO()):
                together = _step_copy(optimizer, dtype)
                other_seed = _step_copy(optimizer, dtype, seed=1)
                apart = _step_copy(optimizer, dtype, one_by_one=True)
        except Exception as error:  # the user's code may raise anything
            failure = error
            continue

        # This comes first: on a GPU, whose generator goes on, random numbers make the other two differ as well.
        if _differ(together, other_seed):
            raise ProbeFailed("it draws random numbers, and a parameter would get other ones than on a single process")
        if _differ(together, apart):
            raise ProbeFailed("its update of one parameter depends on the others")

        return

    raise ProbeFailed(f"a probe with small parameters failed: {type(failure).__name__}: {failure}") from failure


def _step_copy(
    optimizer: torch.optim.Optimizer, dtype: torch.dtype, one_by_one: bool = False, seed: int = 0
) -> list[Tensor]:
    """Step a copy of the optimizer on synthetic parameters of this dtype, and return them.

    `seed` is for what the optimizer draws; parameters and gradients are always the same.
    """
    generator = torch.Generator().manual_seed(0)
    torch.default_generator.manual_seed(seed)  # the generators of GPUs stay: `check_independent` does not restore them
    copied, parameters = _copy(optimizer, dtype, generator)

    for scale in SCALES:
        for p in parameters:
            p.grad = (scale * torch.randn(p.shape, generator=generator, dtype=dtype)).to(p)

        if one_by_one:
            step_with_stand_ins(copied, gather=True)
        else:
            copied.step()

    return [p.detach() for p in parameters]


def _differ(first: list[Tensor], second: list[Tensor]) -> bool:
    """Return whether two lists of tensors differ by more than rounding."""

    def close(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, rtol=TOLERANCES[a.dtype], atol=TOLERANCES[a.dtype])

    return not all(map(close, first, second))


def _copy(
    optimizer: torch.optim.Optimizer, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """Return a copy of the optimizer with synthetic parameters, and these parameters."""
    groups: list[dict[str, Any]] = []
    state: defaultdict[Any, Any] = defaultdict(dict)
    memo: dict[int, Any] = {}  # by the id of a parameter: the tensor to which a copy of the settings refers instead

    for group in optimizer.param_groups:
        # Two synthetic parameters for each number of dimensions: their updates might depend on each other.
        by_dim: dict[int, list[nn.Parameter]] = {}
        for p in group["params"]:
            if p.dim() not in by_dim:
                by_dim[p.dim()] = [_synthetic(p, dtype, generator) for _ in range(2)]
                for tensor in by_dim[p.dim()] if optimizer.state.get(p) else ():
                    state[tensor] = {key: _state_like(v, p, tensor) for key, v in optimizer.state[p].items()}

            memo[id(p)] = by_dim[p.dim()][0]

        settings = {key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"}
        groups.append({"params": [p for pair in by_dim.values() for p in pair]} | settings)

        # A warm-up may have set the rate to 0, and then no parameter would change.
        if "lr" in group:
            groups[-1]["lr"] = torch.full_like(group["lr"], RATE) if isinstance(group["lr"], Tensor) else RATE

    # Without its constructor, whose arguments are unknown. The user's hooks are not called in a probe.
    copied = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key.endswith("_hooks"):
            copied.__dict__[key] = OrderedDict()
        elif key not in ("state", "param_groups", "step"):  # a scheduler may have wrapped `step`
            copied.__dict__[key] = copy.deepcopy(value, memo)

    copied.state, copied.param_groups = state, groups
    return copied, [p for group in groups for p in group["params"]]


def _synthetic(p: Tensor, dtype: torch.dtype, generator: torch.Generator) -> nn.Parameter:
    """Return a small random parameter with as many dimensions as `p`."""
    lengths = [*LENGTHS, *[2] * p.dim()][: p.dim()]
    device = "cpu" if p.is_meta else p.device  # a pipeline stage has meta tensors for the parameters of other stages
    return nn.Parameter(torch.randn(lengths, generator=generator, dtype=dtype).to(device))


def _state_like(value: Any, p: Tensor, tensor: Tensor) -> Any:
    """Return the value for a synthetic parameter, if the optimizer's constructor has already created state for `p`."""
    if isinstance(value, Tensor) and value.dim() and value.shape == p.shape:
        first = to_local(value).flatten()[:1]
        return torch.full_like(tensor, float(first) if first.numel() else 0.0, requires_grad=False)

    return copy.deepcopy(value)
