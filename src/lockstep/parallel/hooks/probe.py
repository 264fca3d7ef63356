"""Tell whether the hooks of a parameter are linear: call them with made-up gradients, and undo what the calls left.

A hook is linear if f(a + b) = f(a) + f(b) and f(s a) = s f(a), at every size that a gradient may have, and if it does
not hide a NaN. Code cannot be proved linear by calling it; but what people write to limit, normalise or shift a
gradient shows at one of the sizes.
"""

from __future__ import annotations

import builtins
import functools
import io
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

Hooks = Mapping[int, Callable[..., Any]]  # by torch's number for each

SIZES = (2.0**-80, 2.0**-40, 2.0**-20, 2.0, 2.0**20, 2.0**40)  # powers of two, so that multiplying loses nothing
MOST_ITEMS = 10_000  # of what a hook can reach: more is data, and not the state of a hook
MOST_ELEMENTS = 2**20  # of a tensor whose value is restored


def call_hooks(on_gradient: Hooks, after_accumulation: Hooks, grad: Tensor, parameter: Callable[[], Tensor]) -> Tensor:
    """Return what the hooks make of `grad`, called as torch calls them in the first backward of a step."""
    for hook in list(on_gradient.values()):
        changed = hook(grad)
        grad = grad if changed is None else changed

    if not after_accumulation:
        return grad

    # These read and set `parameter.grad`, which holds the sum of earlier micro-batches.
    full = parameter()
    earlier = full.grad
    try:
        full.grad = grad
        for hook in list(after_accumulation.values()):
            hook(full)
        changed = full.grad
    finally:
        full.grad = earlier

    if changed is None:
        raise ValueError("a hook set the gradient to None")
    return changed


def problem_with(on_gradient: Hooks, after_accumulation: Hooks, parameter: nn.Parameter) -> str | None:
    """Return what shows that the hooks are not linear, or None. `parameter` has the shape of the full parameter."""
    weights = parameter.detach().clone()

    def call(grad: Tensor) -> Tensor:
        grad = grad.clone()
        changed = call_hooks(on_gradient, after_accumulation, grad, lambda: parameter)
        if changed.shape != grad.shape or changed.dtype != grad.dtype or changed.device != grad.device:
            raise TypeError(f"it returned {_kind(changed)} for {_kind(grad)}")
        return changed.clone()

    hooks = [*on_gradient.values(), *after_accumulation.values()]
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _undone(hooks), redirect_stdout(io.StringIO()):
        try:
            problem = _nonlinearity(call, weights)
        except Exception as error:  # a hook is the user's code, and may raise anything
            problem = f"called with a made-up gradient, it failed: {type(error).__name__}: {error}"

        if not _same(parameter.detach(), weights, 0.0):
            parameter.copy_(weights)
            return "it changes the parameter itself"
        return problem


def _nonlinearity(call: Callable[[Tensor], Tensor], like: Tensor) -> str | None:
    tolerance = min(1024 * torch.finfo(like.dtype).eps, 0.05)
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device, like.dtype) for _ in range(2)
    )
    of_first, of_second = call(first), call(second)

    if not _same(call(first + second), of_first + of_second, tolerance):
        return "the sum of two gradients gave something other than the two of them"

    for size in SIZES:
        if not _same(call(first * size), of_first * size, tolerance):
            return f"a gradient that was {size:.0e} times as large gave something other than {size:.0e} times as much"

    nothing = torch.full_like(first, torch.nan)
    try:
        hidden = not _same(call(nothing + second), call(nothing) + of_second, tolerance)
    except Exception:
        # It is there to stop at a NaN, and will.
        return None
    return "a gradient of NaN gave numbers: the step would not be skipped" if hidden else None


def _same(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether two tensors are equal up to a fraction of their length. A NaN is equal to a NaN."""
    missing = expected.isnan()
    if not torch.equal(found.isnan(), missing):
        return False

    # In float64: the squares of the smallest and the largest would not fit into float32.
    found, expected = (tensor.double().masked_fill(missing, 0.0) for tensor in (found, expected))
    return bool((found - expected).norm() <= tolerance * expected.norm())


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} in {tensor.dtype} on {tensor.device}"


# ---- what a hook holds ----


def reachable(hook: Callable[..., Any]) -> Iterator[Any]:
    """Yield what the code of a hook can reach by itself: variables, and what is in them. Not what it must look up.

    The parameters and children of a module are looked up: a module always has the current ones.
    """
    seen: dict[int, Any] = {}  # holds the objects, so that no number is used twice
    waiting: deque[Any] = deque([hook])
    while waiting and len(seen) < MOST_ITEMS:
        item = waiting.popleft()
        if id(item) in seen:
            continue

        seen[id(item)] = item
        yield item
        waiting.extend(_inside(item))


def _inside(item: Any) -> list[Any]:
    match item:
        case types.FunctionType():
            defaults = [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
            return [*(item.__closure__ or ()), *defaults, *_globals_of(item).values()]
        case types.CellType():
            return [item.cell_contents] if _is_set(item) else []
        case types.MethodType():
            return [item.__self__, item.__func__]
        case functools.partial():
            return [item.func, item.args, item.keywords]
        case dict():
            return list(item.values())
        case list() | tuple() | set() | frozenset() | deque():
            return list(item)
        case nn.Module():
            looked_up = ("_parameters", "_modules")
            return [value for name, value in vars(item).items() if name not in looked_up]
        case Tensor() | types.ModuleType() | type() | str() | bytes() | None:
            return []

    # An object with attributes. A hook may be one, and then its class has the code.
    attributes = [vars(item)] if hasattr(item, "__dict__") else []
    return [*attributes, type(item).__call__] if callable(item) else attributes


def _globals_of(function: types.FunctionType) -> dict[str, Any]:
    names = [name for name in function.__code__.co_names if not hasattr(builtins, name)]
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


def _is_set(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 an empty cell raises
    except ValueError:
        return False
    return True


@contextmanager
def _undone(hooks: list[Callable[..., Any]]) -> Iterator[None]:
    """Restore at the end what the hooks can reach: counters, lists, attributes, small tensors."""
    undo = [restore for hook in hooks for item in reachable(hook) if (restore := _restorer(item))]
    try:
        yield
    finally:
        for restore in undo:
            restore()


def _restorer(item: Any) -> Callable[[], None] | None:
    match item:
        case types.FunctionType():
            return functools.partial(item.__globals__.update, _globals_of(item))
        case types.CellType() if _is_set(item):
            return functools.partial(setattr, item, "cell_contents", item.cell_contents)
        case dict():
            return functools.partial(_refill, item, dict(item))
        case list() | deque():
            return functools.partial(_refill_list, item, list(item))
        case Tensor() if not isinstance(item, nn.Parameter) and not item.is_meta and item.numel() <= MOST_ELEMENTS:
            return functools.partial(_rewrite, item, item._version, item.detach().clone())
    return None


def _refill(container: dict[Any, Any], content: dict[Any, Any]) -> None:
    for key in container.keys() - content.keys():
        del container[key]

    # Nothing is written that is as it was: another thread may use it.
    container.update({key: value for key, value in content.items() if container.get(key, container) is not value})


def _refill_list(container: Any, content: list[Any]) -> None:
    if list(map(id, container)) != list(map(id, content)):
        container.clear()
        container.extend(content)


def _rewrite(tensor: Tensor, version: int, value: Tensor) -> None:
    if tensor._version != version:
        tensor.detach().copy_(value)
