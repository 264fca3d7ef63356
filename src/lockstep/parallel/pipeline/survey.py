"""Where a model may be cut whose forward is one piece of code: between blocks that are called once, one after another.

The whole model runs once, on two samples, in the host's memory. What every block returns is taken off the graph. So
the graph that ends at a block shows which parameters it needs, and whether it needs more of what went before than the
block before it gave: then there is no cut in between. At last every stage runs with NaN in place of all that it will
not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.parallel.backward_graph import leaves_below
from lockstep.parallel.pipeline.gates import Form, Gates, Span
from lockstep.parallel.pipeline.stages import WHAT_TO_WRITE, Given, balance, placeholder, too_few
from lockstep.parallel.surroundings import SourceContext
from lockstep.parallel.trees import Opaque, take_apart

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass
class _Found:
    """What one forward has shown. Segment n ends with what block n returns; the last one is what comes after all."""

    order: list[int] = field(default_factory=list)  # blocks, as they were called
    forms: list[Form] = field(default_factory=list)
    needs: list[set[int]] = field(default_factory=list)  # parameters of each segment
    changed: list[set[int]] = field(default_factory=list)  # buffers of each segment
    closed: set[int] = field(default_factory=set)  # blocks after which there is no cut


def cut_forward(
    model: nn.Module, blocks: Sequence[nn.Module], given: Given, count: int, autocast: Autocast
) -> tuple[list[Span], list[list[Tensor]]]:
    """`count` stages with about equally many parameters, and the tensors that each of them uses."""
    gates = Gates(blocks)
    with SourceContext(model):
        found = _look(model, gates, given, autocast)
        gates.put_before([blocks[number] for number in found.order])
        open_after = [n for n in range(len(found.order) - 1) if n not in found.closed]
        if len(open_after) + 1 < count:
            raise too_few(count, len(open_after) + 1, f": {len(found.order)} blocks in {type(model).__name__}")
        ends = _choose(model, found, [*open_after, len(found.order)], count)
        starts = [0, *(end + 1 for end in ends[:-1])]
        used = [_used(model, gates, found, first, end) for first, end in zip(starts, ends, strict=True)]
        spans = []
        for first, end, mine in zip(starts, ends, used, strict=True):
            spared = set().union(*found.changed) - {id(tensor) for tensor in mine}
            names = [name for name, buffer in model.named_buffers() if id(buffer) in spared]
            spans.append(Span(model, gates, found.forms, first, min(end, len(found.order) - 1), names))
        _rehearse(model, spans, used, given, autocast)
    return spans, used


def _look(model: nn.Module, gates: Gates, given: Given, autocast: Autocast) -> _Found:
    found, given_by = _Found(), {}
    outside = [(buffer, buffer.clone()) for buffer in _outside(model, gates)]

    def end_segment(tensors: Sequence[Tensor], own: Iterator[nn.Parameter]) -> None:
        here = len(found.needs)
        leaves = _leaves(tensors)
        found.needs.append(leaves - given_by.keys() | {id(p) for p in own})
        for before in {given_by[leaf] for leaf in leaves & given_by.keys()}:
            found.closed.update(range(before + 1, here))
        changed = [(buffer, before) for buffer, before in outside if not torch.equal(buffer, before)]
        found.changed.append({id(buffer) for buffer, _ in changed})
        for buffer, before in changed:
            before.copy_(buffer)

    def rule(number: int, call: Callable[[], Any]) -> Any:
        if number in found.order:
            raise _uncut(model, f"block {number} ({type(gates.blocks[number]).__name__}) is called twice")
        found.order.append(number)
        output = call()
        tensors = _tensors(output, model, f"block {number} returns")
        form = Form.of(output)
        end_segment(tensors, gates.blocks[number].parameters())
        if not tensors or not all(tensor.is_floating_point() for tensor in tensors):
            found.closed.add(len(found.forms))
        fresh = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        given_by.update({id(tensor): len(found.forms) for tensor in fresh})
        kept.extend(fresh)  # or another tensor might get the same id
        found.forms.append(form)
        return form.fill([tensor.clone() for tensor in fresh])

    kept: list[Tensor] = []
    with _all_trainable(model), torch.enable_grad(), autocast(), gates.under(rule):
        try:
            output = model(*given[0], **given[1])
        except UserError:
            raise
        except Exception as error:
            raise _uncut(model, f"its forward, on the CPU: {type(error).__name__}: {str(error)[:300]}") from error
        end_segment(_tensors(output, model, "it returns"), iter(()))
    return found


def _choose(model: nn.Module, found: _Found, ends: Sequence[int], count: int) -> list[int]:
    """The last segments of the stages."""
    sizes = {id(p): p.numel() for p in model.parameters()}
    counted: set[int] = set()
    parts, start = [], 0
    for end in ends:
        new = set().union(*found.needs[start : end + 1]) - counted
        counted |= new
        parts.append(sum(sizes.get(tensor, 0) for tensor in new))
        start = end + 1
    return [ends[number - 1] for number in balance(parts, count)]


def _used(model: nn.Module, gates: Gates, found: _Found, first: int, end: int) -> list[Tensor]:
    """By the segments `first` to `end`. What no segment has used is everybody's: the next batch may use it."""

    def of(start: int, stop: int) -> set[int]:
        buffers = {id(b) for block in gates.blocks[start:stop] for b in block.buffers()}
        return buffers.union(*found.needs[start:stop], *found.changed[start:stop])

    mine, somebodys = of(first, end + 1), of(0, len(found.needs))
    return [t for t in [*model.parameters(), *model.buffers()] if id(t) in mine or id(t) not in somebodys]


def _rehearse(
    model: nn.Module, spans: Sequence[Span], used: Sequence[Sequence[Tensor]], given: Given, autocast: Autocast
) -> None:
    """Every stage with NaN for all that it will not have: nothing of it may be in what it passes on."""
    passed: Any = None
    for number, (span, mine) in enumerate(zip(spans, used, strict=True)):
        here = {id(tensor) for tensor in mine}
        try:
            with torch.no_grad(), autocast(), _only(model, here):
                passed = span(given, None if number == 0 else passed)
        except Exception as error:
            missing = f"stage {number}, without what the others have: {type(error).__name__}: {str(error)[:300]}"
            raise _uncut(model, missing) from error
        if any(bool(tensor.isnan().any()) for tensor in take_apart(passed)[0]):
            block = f"block {span.first - 1}" if number else "the first block"
            raise _uncut(model, f"what comes after {block} depends on more than what that block returns; or on NaN")


def _tensors(output: Any, model: nn.Module, whose: str) -> list[Tensor]:
    try:
        return take_apart(output)[0]
    except Opaque as opaque:
        raise _uncut(model, f"{whose} {opaque}, which may hold tensors out of sight") from None


def _outside(model: nn.Module, gates: Gates) -> list[Tensor]:
    inside = {id(buffer) for block in gates.blocks for buffer in block.buffers()}
    return [buffer for buffer in model.buffers() if id(buffer) not in inside]


def _leaves(tensors: Sequence[Tensor]) -> set[int]:
    """The tensors that the graph of these begins with."""
    below = leaves_below(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)
    return {id(tensor) for tensor in [*below, *(tensor for tensor in tensors if tensor.is_leaf)]}


@contextmanager
def _all_trainable(model: nn.Module) -> Iterator[None]:
    """What is frozen shows in a graph only if it is not."""
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


@contextmanager
def _only(model: nn.Module, mine: set[int]) -> Iterator[None]:
    """Parameters that are not `mine` are NaN."""
    others = [(p, p.data) for p in model.parameters() if id(p) not in mine]
    for p, _ in others:
        p.data = placeholder(p, p.device)
    try:
        yield
    finally:
        for p, data in others:
            p.data = data


def _uncut(model: nn.Module, found: str) -> UserError:
    return UserError(f"to cut {type(model).__name__} into stages between its blocks", found, WHAT_TO_WRITE)
