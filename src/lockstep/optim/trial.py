"""Tries a user-defined optimizer on small synthetic parameters: does it update elements, or parameters, independently?

Calls cannot prove that an optimizer is elementwise. But if it uses a norm, a mean or a matrix product of a parameter,
it gives different results for two halves of the parameter than for the whole. If it uses a norm over all parameters, it
gives different results for one parameter alone.
"""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.optim.stand_ins import step_with_stand_ins
from lockstep.runtime.layout import local

ELEMENTWISE = "elementwise"
PER_PARAMETER = "per parameter"

# The scale of the gradients in each step: an optimizer may treat only large ones differently, by clipping.
SCALES = (1.0, 1e3, 1e-3)
LENGTHS = (12, 8)  # of the first two dimensions; further dimensions have length 2
RATE = 0.01
# By the dtype of the synthetic parameters. Differences are clearest in float64, but some optimizers, such as those with
# custom kernels, take float32 only. In bfloat16 rounding would hide that parameters depend on each other.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}


class TrialFailed(Exception):
    """The optimizer raised an error, or its update of one parameter depends on others. The message is for the user."""


class _Split(NamedTuple):
    """A synthetic parameter and the parts that the optimizer steps."""

    whole: Tensor
    dim: int  # along which it is split
    parts: list[nn.Parameter]


def classify_update(optimizer: torch.optim.Optimizer) -> str:
    """Return ELEMENTWISE or PER_PARAMETER, or raise TrialFailed if the optimizer is neither."""
    failure: Exception | None = None
    for dtype in TOLERANCES:
        try:
            with torch.random.fork_rng(devices=[]), redirect_stdout(io.StringIO()):
                return _classify_in(dtype, optimizer)
        except TrialFailed:
            raise
        except Exception as error:  # the user's code may raise anything
            failure = error
    raise TrialFailed(f"tried on a small parameter, it failed: {type(failure).__name__}: {failure}") from failure


def _classify_in(dtype: torch.dtype, optimizer: torch.optim.Optimizer) -> str:
    """Classify the update as `classify_update` does, on parameters of this dtype."""

    def run(split: Callable[[Tensor], list[Tensor]], one_by_one: bool = False) -> list[Tensor]:
        return _run(optimizer, lambda tensor: split(tensor.to(dtype)), one_by_one)

    together = run(_keep_whole)
    if _differ(together, run(_keep_whole, one_by_one=True)):
        raise TrialFailed("its update of one parameter depends on the others")

    splits = [run(partial(_halves, dim=dim)) for dim in range(2)]
    return PER_PARAMETER if any(_differ(together, split) for split in splits) else ELEMENTWISE


def _run(optimizer: torch.optim.Optimizer, split: Callable[[Tensor], list[Tensor]], one_by_one: bool) -> list[Tensor]:
    """Step synthetic parameters, each split by `split`, and return them concatenated again."""
    generator = torch.Generator().manual_seed(0)
    torch.default_generator.manual_seed(0)  # not those of GPUs, which `classify_update` does not restore
    copied, splits = _copy(optimizer, split, generator)
    for scale in SCALES:
        for whole, dim, parts in splits:
            gradient = scale * torch.randn(whole.shape, generator=generator, dtype=whole.dtype)
            gradients = gradient.split([p.shape[dim] for p in parts], dim) if whole.dim() else [gradient]
            for p, grad in zip(parts, gradients, strict=True):
                p.grad = grad.clone().to(p)
        if one_by_one:
            step_with_stand_ins(copied, gather=True)
        else:
            copied.step()
    return [
        torch.cat([p.detach() for p in parts], dim) if whole.dim() else parts[0].detach()
        for whole, dim, parts in splits
    ]


def _keep_whole(tensor: Tensor) -> list[Tensor]:
    return [tensor]


def _halves(tensor: Tensor, dim: int) -> list[Tensor]:
    if not tensor.dim():
        return [tensor]
    dim = min(dim, tensor.dim() - 1)
    return list(tensor.split(tensor.shape[dim] // 2, dim))


def _differ(first: list[Tensor], second: list[Tensor]) -> bool:
    def close(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, rtol=TOLERANCES[a.dtype], atol=TOLERANCES[a.dtype])

    return not all(map(close, first, second))


def _copy(
    optimizer: torch.optim.Optimizer, split: Callable[[Tensor], list[Tensor]], generator: torch.Generator
) -> tuple[torch.optim.Optimizer, list[_Split]]:
    """Return a copy of the optimizer with synthetic parameters, and these parameters."""
    splits: list[_Split] = []
    groups: list[dict[str, Any]] = []
    state: defaultdict[Any, Any] = defaultdict(dict)
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        parameters: list[nn.Parameter] = []
        by_dim: dict[int, list[nn.Parameter]] = {}
        for p in group["params"]:
            # Two synthetic parameters for each number of dimensions: their updates might depend on each other.
            if p.dim() not in by_dim:
                by_dim[p.dim()] = []
                for _ in range(2):
                    splits.append(_synthetic(p, split, generator))
                    by_dim[p.dim()] += splits[-1].parts
                parameters += by_dim[p.dim()]
                for tensor in by_dim[p.dim()]:
                    if optimizer.state.get(p):
                        state[tensor] = {key: _state_like(v, p, tensor) for key, v in optimizer.state[p].items()}
            memo[id(p)] = by_dim[p.dim()][0]
        settings = {key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"}
        groups.append({"params": parameters} | settings)
        if "lr" in group:
            # A warm-up may have set the rate to 0, and then no parameter would change.
            groups[-1]["lr"] = torch.full_like(group["lr"], RATE) if isinstance(group["lr"], Tensor) else RATE

    copied = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key.endswith("_hooks"):
            copied.__dict__[key] = OrderedDict()
        elif key not in ("state", "param_groups", "step"):  # a scheduler may have wrapped `step`
            copied.__dict__[key] = copy.deepcopy(value, memo)
    copied.state, copied.param_groups = state, groups
    return copied, splits


def _synthetic(p: Tensor, split: Callable[[Tensor], list[Tensor]], generator: torch.Generator) -> _Split:
    """Return a small random parameter with as many dimensions as `p`, split by `split`."""
    lengths = [*LENGTHS, *[2] * p.dim()][: p.dim()]
    whole = torch.randn(lengths, generator=generator, dtype=torch.float64)
    tensors = split(whole)
    device = "cpu" if p.is_meta else p.device  # a pipeline stage has meta tensors for the parameters of other stages
    parameters = [nn.Parameter(tensor.clone().to(device)) for tensor in tensors]
    changed = [dim for dim in range(p.dim()) if tensors[0].shape[dim] != whole.shape[dim]]
    return _Split(whole, changed[0] if changed else 0, parameters)


def _state_like(value: Any, p: Tensor, tensor: Tensor) -> Any:
    """Return the value for a synthetic parameter, if the optimizer's constructor has already created state for `p`."""
    if isinstance(value, Tensor) and value.dim() and value.shape == p.shape:
        first = local(value).flatten()[:1]
        return torch.full_like(tensor, float(first) if first.numel() else 0.0, requires_grad=False)
    return copy.deepcopy(value)
