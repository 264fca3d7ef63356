"""Test whether the hooks of a parameter are linear: call them with random gradients, and undo their side effects.

A hook f is linear if f(a + b) = f(a) + f(b) and f(s a) = s f(a) at every magnitude that a gradient may have, and if it
does not hide a NaN. Calls cannot prove that code is linear. But hooks that limit, normalise or shift a gradient fail at
one of the magnitudes tested.
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

Hooks = Mapping[int, Callable[..., Any]]  # the hooks by torch's hook id

SCALES = (2.0**-80, 2.0**-40, 2.0**-20, 2.0, 2.0**20, 2.0**40)  # powers of two: multiplying by them does not round
MAX_OBJECTS = 10_000  # objects searched per hook: beyond that, it is data rather than the state of a hook
MAX_ELEMENTS = 2**20  # larger tensors are not restored


def call_hooks(on_gradient: Hooks, after_accumulation: Hooks, grad: Tensor, parameter: Callable[[], Tensor]) -> Tensor:
    """Return `grad` as the hooks change it. They are called as torch calls them in the first backward of a pass."""
    for hook in list(on_gradient.values()):
        changed = hook(grad)
        grad = grad if changed is None else changed

    if not after_accumulation:
        return grad

    # These hooks read and set `parameter.grad`, which at this point holds the sum of earlier micro-batches.
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
    """Return a sentence that says how the hooks fail to be linear, or None. `parameter` has the full shape."""
    weights = parameter.detach().clone()

    def call(grad: Tensor) -> Tensor:
        grad = grad.clone()
        changed = call_hooks(on_gradient, after_accumulation, grad, lambda: parameter)
        if changed.shape != grad.shape or changed.dtype != grad.dtype or changed.device != grad.device:
            raise TypeError(f"it returned {_describe(changed)} for {_describe(grad)}")

        return changed.clone()

    hooks = [*on_gradient.values(), *after_accumulation.values()]
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _state_restored(hooks), redirect_stdout(io.StringIO()):
        try:
            problem = _nonlinearity(call, weights)
        except Exception as error:  # a hook is the user's code, and may raise anything
            problem = f"called with a random gradient, it failed: {type(error).__name__}: {error}"

        if not _close(parameter.detach(), weights, 0.0):
            parameter.copy_(weights)
            return "it changes the parameter itself"

        return problem


def _nonlinearity(call: Callable[[Tensor], Tensor], like: Tensor) -> str | None:
    """Return how `call` fails to be linear, or None. The gradients have the shape, dtype and device of `like`."""
    tolerance = min(1024 * torch.finfo(like.dtype).eps, 0.05)
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device, like.dtype) for _ in range(2)
    )
    from_first, from_second = call(first), call(second)

    if not _close(call(first + second), from_first + from_second, tolerance):
        return "for the sum of two gradients it did not return the sum of its two results"

    for scale in SCALES:
        if not _close(call(first * scale), from_first * scale, tolerance):
            return f"for a gradient {scale:.0e} times as large it did not return {scale:.0e} times as much"

    nan = torch.full_like(first, torch.nan)
    try:
        hides_nan = not _close(call(nan + second), call(nan) + from_second, tolerance)
    except Exception:
        # A hook that raises on NaN will also raise in training, which is fine.
        return None

    return "for a gradient of NaN it returned numbers: the step would not be skipped" if hides_nan else None


def _close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether the difference is at most `tolerance` times the norm of `expected`. NaN is equal to NaN."""
    is_nan = expected.isnan()
    if not torch.equal(actual.isnan(), is_nan):
        return False

    # In float64, because squares of the smallest and largest magnitudes tested do not fit into float32.
    actual, expected = (tensor.double().masked_fill(is_nan, 0.0) for tensor in (actual, expected))
    return bool((actual - expected).norm() <= tolerance * expected.norm())


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} in {tensor.dtype} on {tensor.device}"


# ---- the objects that a hook references ----


def reachable(hook: Callable[..., Any]) -> Iterator[Any]:
    """Yield the objects that a hook references, directly or through others: closures, globals, attributes, containers.

    Parameters and children of a module are left out: the hook looks them up in the module, which has the current ones.
    """
    seen: dict[int, Any] = {}  # holds the objects themselves, so that no id is reused
    pending: deque[Any] = deque([hook])
    while pending and len(seen) < MAX_OBJECTS:
        item = pending.popleft()
        if id(item) in seen:
            continue

        seen[id(item)] = item
        yield item
        pending.extend(_references(item))


def _references(item: Any) -> list[Any]:
    """Return the objects that `item` references itself."""
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
            left_out = ("_parameters", "_modules")
            return [value for name, value in vars(item).items() if name not in left_out]

        case Tensor() | types.ModuleType() | type() | str() | bytes() | None:
            return []

    # Any other object: its attributes. If it is callable, it may be the hook itself, and its class holds the code.
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
def _state_restored(hooks: list[Callable[..., Any]]) -> Iterator[None]:
    """At the end of the `with` block, restore the objects that the hooks reference: counters, lists, small tensors."""
    restorers = [_restorer(item) for hook in hooks for item in reachable(hook)]
    try:
        yield
    finally:
        for restore in restorers:
            if restore:
                restore()


def _restorer(item: Any) -> Callable[[], None] | None:
    """Return a function that restores the present content of `item`, or None if there is nothing to restore."""
    match item:
        case types.FunctionType():
            return functools.partial(item.__globals__.update, _globals_of(item))
        case types.CellType() if _is_set(item):
            return functools.partial(setattr, item, "cell_contents", item.cell_contents)
        case dict():
            return functools.partial(_refill, item, dict(item))
        case list() | deque():
            return functools.partial(_refill_list, item, list(item))
        case Tensor() if not isinstance(item, nn.Parameter) and not item.is_meta and item.numel() <= MAX_ELEMENTS:
            return functools.partial(_rewrite, item, item._version, item.detach().clone())

    return None


def _refill(container: dict[Any, Any], content: dict[Any, Any]) -> None:
    for key in container.keys() - content.keys():
        del container[key]

    # Write only entries that changed: another thread may use the dict.
    container.update({key: value for key, value in content.items() if container.get(key, container) is not value})


def _refill_list(container: Any, content: list[Any]) -> None:
    if list(map(id, container)) != list(map(id, content)):
        container.clear()
        container.extend(content)


def _rewrite(tensor: Tensor, version: int, value: Tensor) -> None:
    if tensor._version != version:
        tensor.detach().copy_(value)
