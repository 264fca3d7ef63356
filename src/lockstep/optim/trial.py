"""Try an optimizer of the user's on small made-up parameters: does it treat every element, or every parameter, alike?

Code cannot be proved elementwise by calling it. But what uses a norm, a mean or a product of matrices gives other
numbers for two halves of a parameter than for the whole, and what uses a norm over all parameters gives other numbers
for one of them alone.
"""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.optim.stand_ins import step_with_stand_ins
from lockstep.runtime.layout import local

ELEMENTWISE = "every element by itself"
PER_PARAMETER = "every parameter by itself"

# The size of the gradients in one step after another: an optimizer may clip only large ones.
SCALES = (1.0, 1e3, 1e-3)
LENGTHS = (12, 8)  # of the first dimensions; others have two
RATE = 0.01
# By the format of the made-up parameters. In float64 what differs stands out best, but some optimizers, such as those
# with kernels of their own, take float32 only. In bfloat16 rounding would hide that parameters depend on each other.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}


class CannotTry(Exception):
    """The optimizer does not step made-up parameters, or parameters depend on each other; the reason is for people."""


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return ELEMENTWISE or PER_PARAMETER; raise CannotTry with the reason if it is neither."""
    failure: Exception | None = None
    for dtype in TOLERANCES:
        try:
            with torch.random.fork_rng(devices=[]), redirect_stdout(io.StringIO()):
                return _kind_in(dtype, optimizer)
        except CannotTry:
            raise
        except Exception as error:  # the user's code may raise anything
            failure = error
    raise CannotTry(f"tried on a small parameter, it failed: {type(failure).__name__}: {failure}") from failure


def _kind_in(dtype: torch.dtype, optimizer: torch.optim.Optimizer) -> str:
    """Return the kind as `kind_of` does, tried on parameters of this dtype."""

    def run(split: Callable[[Tensor], list[Tensor]], one_by_one: bool = False) -> list[Tensor]:
        return _run(optimizer, lambda tensor: split(tensor.to(dtype)), one_by_one)

    together = run(_keep_whole)
    if _differ(together, run(_keep_whole, one_by_one=True)):
        raise CannotTry("its update of one parameter depends on the others")

    splits = [run(lambda tensor, dim=dim: _halves(tensor, dim)) for dim in range(2)]
    return PER_PARAMETER if any(_differ(together, split) for split in splits) else ELEMENTWISE


def _run(optimizer: torch.optim.Optimizer, split: Callable[[Tensor], list[Tensor]], one_by_one: bool) -> list[Tensor]:
    """Return the made-up parameters after a few steps, put together again: one tensor for each that was split."""
    generator = torch.Generator().manual_seed(0)
    torch.default_generator.manual_seed(0)  # of the host only: those of a GPU are not restored
    tried, parts = _copy(optimizer, split, generator)
    for scale in SCALES:
        for (whole, dim), tensors in parts:
            gradient = scale * torch.randn(whole.shape, generator=generator, dtype=whole.dtype)
            shares = gradient.split([p.shape[dim] for p in tensors], dim) if whole.dim() else [gradient]
            for p, grad in zip(tensors, shares, strict=True):
                p.grad = grad.clone().to(p)
        if one_by_one:
            step_with_stand_ins(tried, whole=True)
        else:
            tried.step()
    return [
        torch.cat([p.detach() for p in tensors], dim) if whole.dim() else tensors[0].detach()
        for (whole, dim), tensors in parts
    ]


def _keep_whole(tensor: Tensor) -> list[Tensor]:
    return [tensor]


def _halves(tensor: Tensor, dim: int) -> list[Tensor]:
    if not tensor.dim():
        return [tensor]
    dim = min(dim, tensor.dim() - 1)
    return list(tensor.split(tensor.shape[dim] // 2, dim))


def _differ(expected: list[Tensor], found: list[Tensor]) -> bool:
    def close(a: Tensor, b: Tensor) -> bool:
        return torch.allclose(a, b, rtol=TOLERANCES[a.dtype], atol=TOLERANCES[a.dtype])

    return not all(map(close, expected, found))


def _copy(
    optimizer: torch.optim.Optimizer, split: Callable[[Tensor], list[Tensor]], generator: torch.Generator
) -> tuple[torch.optim.Optimizer, list[Any]]:
    """Return a copy of the optimizer with made-up parameters, and these: ((whole, dimension), tensors) for each."""
    parts: list[Any] = []
    groups: list[dict[str, Any]] = []
    state: defaultdict[Any, Any] = defaultdict(dict)
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        made: list[nn.Parameter] = []
        by_dim: dict[int, list[nn.Parameter]] = {}
        for p in group["params"]:
            # One parameter of each number of dimensions, twice: they might depend on each other.
            if p.dim() not in by_dim:
                by_dim[p.dim()] = []
                for _ in range(2):
                    tensors, part = _made_up(p, split, generator)
                    parts.append(part)
                    by_dim[p.dim()] += tensors
                made += by_dim[p.dim()]
                for tensor in by_dim[p.dim()]:
                    if optimizer.state.get(p):
                        state[tensor] = {key: _state_like(v, p, tensor) for key, v in optimizer.state[p].items()}
            memo[id(p)] = by_dim[p.dim()][0]
        groups.append({"params": made} | {k: copy.deepcopy(v, memo) for k, v in group.items() if k != "params"})
        if "lr" in group:
            # Before the first step a warm-up may have set it to 0, and nothing would move.
            groups[-1]["lr"] = torch.full_like(group["lr"], RATE) if isinstance(group["lr"], Tensor) else RATE

    tried = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key.endswith("_hooks"):
            tried.__dict__[key] = OrderedDict()
        elif key not in ("state", "param_groups", "step"):  # a scheduler wraps the step of the original
            tried.__dict__[key] = copy.deepcopy(value, memo)
    tried.state, tried.param_groups = state, groups
    return tried, parts


def _made_up(
    p: Tensor, split: Callable[[Tensor], list[Tensor]], generator: torch.Generator
) -> tuple[list[nn.Parameter], Any]:
    lengths = [*LENGTHS, *[2] * p.dim()][: p.dim()]
    whole = torch.randn(lengths, generator=generator, dtype=torch.float64)
    tensors = split(whole)
    device = "cpu" if p.is_meta else p.device  # a stage has only placeholders of the others' parameters
    parameters = [nn.Parameter(tensor.clone().to(device)) for tensor in tensors]
    changed = [dim for dim in range(p.dim()) if tensors[0].shape[dim] != whole.shape[dim]]
    return parameters, ((whole, changed[0] if changed else 0), parameters)


def _state_like(value: Any, p: Tensor, tensor: Tensor) -> Any:
    """Return a value of the state that the optimizer's constructor has set up, for a made-up parameter."""
    if isinstance(value, Tensor) and value.dim() and value.shape == p.shape:
        first = local(value).flatten()[:1]
        return torch.full_like(tensor, float(first) if first.numel() else 0.0, requires_grad=False)
    return copy.deepcopy(value)
