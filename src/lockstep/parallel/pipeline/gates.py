"""A model's own forward, run in stages without being rewritten.

Every rank of a pipeline has the same samples, so each can call the forward with them. A gate before every block decides
what happens there. Blocks of earlier stages do not run: the last of them gives what was received, the others NaN. After
the last block of a stage the forward is left. Whatever lies between blocks (masks, positions, a condition) every stage
computes for itself, up to where it leaves. What it lacks the weights for comes to NaN; survey.py has made sure that
nothing depends on that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.parallel.pipeline.stages import WHAT_TO_WRITE, Given
from lockstep.parallel.trees import Opaque, put_together, take_apart

Rule = Callable[[int, Callable[[], Any]], Any]  # (number of the block, what it would do) -> what it gives


class _Left(BaseException):
    """The forward has come to the end of a stage. Not an Exception: no `except` of the model's may take it for one."""

    def __init__(self, passed: tuple[Tensor, ...]):
        self.passed = passed


class Gates:
    """One before each of `blocks`."""

    def __init__(self, blocks: Sequence[nn.Module]):
        self.blocks: list[nn.Module] = []
        self._rule: Rule | None = None
        self.put_before(blocks)

    def put_before(self, blocks: Sequence[nn.Module]) -> None:
        """Before these, numbered in this order, and before no others."""
        for block in self.blocks:
            block._compiled_call_impl = None
        self.blocks = list(blocks)
        for number, block in enumerate(self.blocks):
            self._close(number, block, block._call_impl)

    def compile(self, number: int) -> None:
        block = self.blocks[number]
        block.compile()
        assert block._compiled_call_impl is not None
        self._close(number, block, block._compiled_call_impl)

    @contextmanager
    def under(self, rule: Rule) -> Iterator[None]:
        self._rule = rule
        try:
            yield
        finally:
            self._rule = None

    def _close(self, number: int, block: nn.Module, inside: Callable[..., Any]) -> None:
        # torch calls this instead of a module's hooks and forward, if it is there. So whatever hangs on a block
        # (recomputing, gathering, a compiled form) lies behind its gate. Copies of a module have none.
        block._compiled_call_impl = partial(self._pass, number, inside)

    def _pass(self, number: int, inside: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Without a rule (when something is computed again in the backward) a gate is open."""
        call = partial(inside, *args, **kwargs)
        return call() if self._rule is None else self._rule(number, call)


@dataclass(frozen=True)
class Form:
    """What a block returns: tensors, of which shapes and types are known, and the rest."""

    like: tuple[Tensor, ...]  # without memory
    rest: Any

    @staticmethod
    def of(output: Any) -> Form:
        tensors, rest = take_apart(output)
        return Form(tuple(torch.empty_like(tensor, device="meta") for tensor in tensors), rest)

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        return put_together(list(tensors), self.rest)

    def nothing(self, received: Sequence[Tensor], came: Form) -> Any:
        """The same full of NaN. The micro-batch may have other sizes than the one the form was taken from; `received`,
        whose form is `came`, has them too."""
        made = []
        for number, tensor in enumerate(self.like):
            twin = number if number < len(received) else 0
            known, here = came.like[twin], received[twin]
            sizes = list(tensor.shape)
            for dim in range(min(tensor.dim(), known.dim())):
                if sizes[dim] == known.shape[dim]:
                    sizes[dim] = here.shape[dim]
            lost = float("nan") if tensor.is_floating_point() else 0
            made.append(torch.full(sizes, lost, dtype=tensor.dtype, device=here.device))
        return self.fill(made)


class Span(nn.Module):
    """The stage that runs blocks `first` to `last` of a model, and what lies around them."""

    def __init__(
        self, model: nn.Module, gates: Gates, forms: Sequence[Form], first: int, last: int, spared: Sequence[str] = ()
    ):
        """`spared`: buffers outside the blocks that the code of another stage writes into, by name. It may run here
        too, and must not count twice."""
        super().__init__()
        self.model, self.first, self.last = model, first, last
        self._gates, self._forms, self._spared = gates, forms, list(spared)
        self._ends = last == len(gates.blocks) - 1

    @property
    def blocks(self) -> list[nn.Module]:
        return self._gates.blocks[self.first : self.last + 1]

    def changing(self) -> list[Tensor]:
        """The buffers that a forward may write into: those outside the blocks too, though it may come to nothing."""
        mine = {id(buffer) for block in self.blocks for buffer in block.buffers()}
        others = {id(buffer) for block in self._gates.blocks for buffer in block.buffers()} - mine
        return [buffer for buffer in self.model.buffers() if id(buffer) not in others]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Block by block: a compiler cannot leave a forward in its middle."""
        for number in range(self.first, self.last + 1):
            self._gates.compile(number)

    def forward(self, given: Given, received: Sequence[Tensor] | None) -> Any:
        """What the model returns, or a tuple for the next stage."""
        self._taken = received is None
        args, kwargs = given
        try:
            with self._sparing(), self._gates.under(partial(self._rule, received or ())):
                output = self.model(*args, **kwargs)
        except _Left as left:
            output, left_early = left.passed, True
        else:
            left_early = False
        if left_early == self._ends or not self._taken:
            raise UserError(
                f"{type(self.model).__name__} in stages, cut after blocks that its forward calls",
                f"a forward that has left out block {self.last if self._taken else self.first - 1}",
                WHAT_TO_WRITE,
            )
        return output

    def _passed_on(self, output: Any) -> tuple[Tensor, ...]:
        try:
            return tuple(take_apart(output)[0])
        except Opaque as opaque:
            raise UserError(
                "blocks that pass plain tensors on to the next stage",
                f"block {self.last} returns {opaque}",
                'in tensor_plan(model) write "rowwise" or "gathered" for the last layer of a block (a DTensor is cut); '
                "or list the stages in stages(model)",
            ) from None

    @contextmanager
    def _sparing(self) -> Iterator[None]:
        """Copies take the place of what is not ours to change; a backward may still need what was written into."""
        places = [name.rpartition(".") for name in self._spared]
        held = [(self.model.get_submodule(module)._buffers, own) for module, _, own in places]
        before = [buffers[own] for buffers, own in held]
        for (buffers, own), buffer in zip(held, before, strict=True):
            assert buffer is not None
            buffers[own] = buffer.clone()
        try:
            yield
        finally:
            for (buffers, own), buffer in zip(held, before, strict=True):
                buffers[own] = buffer

    def _rule(self, received: Sequence[Tensor], number: int, call: Callable[[], Any]) -> Any:
        if number >= self.first:
            output = call()
            if number == self.last and not self._ends:
                raise _Left(self._passed_on(output))
            return output
        if number < self.first - 1:
            return self._forms[number].nothing(received, self._forms[self.first - 1])
        self._taken = True
        return self._forms[number].fill([tensor.clone() for tensor in received])  # which the model may write into
