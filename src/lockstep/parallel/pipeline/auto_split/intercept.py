"""Intercept the calls of a model's blocks, as links of their call chains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from lockstep.parallel.call_chain import Call, CallChain

Handler = Callable[[int, Callable[[], Any]], Any]  # (number of the block, its call) -> what the call returns


class BlockInterceptor:
    """Passes every call of a block to a handler, while there is one.

    What else hangs on a block (recomputation, FSDP's gathers, compiled code) happens inside the intercepted call.
    """

    def __init__(self, blocks: Sequence[nn.Module]):
        self.blocks: list[nn.Module] = []
        self._handler: Handler | None = None
        self.install(blocks)

    def install(self, blocks: Sequence[nn.Module]) -> None:
        """Intercept these blocks, numbered in this order, and no others."""
        # Numbers may change: after a trace they follow the order of calls.
        for block in self.blocks:
            CallChain.of(block).remove("intercept")
        self.blocks = list(blocks)
        for number, block in enumerate(self.blocks):
            chain = CallChain.of(block)
            chain.uncompile()  # a trace must see the block's autograd graph
            chain.install("intercept", _InterceptedCall(self, number))

    def compile(self, number: int) -> None:
        """Compile a block; its call stays intercepted."""
        CallChain.of(self.blocks[number]).compile()

    @contextmanager
    def handled_by(self, handler: Handler) -> Iterator[None]:
        self._handler = handler
        try:
            yield
        finally:
            self._handler = None

    def handle(self, number: int, call: Callable[[], Any]) -> Any:
        """Without a handler (when a block is recomputed in the backward) the block just runs."""
        return call() if self._handler is None else self._handler(number, call)


class _InterceptedCall:
    """The link of one block."""

    inner: Call

    def __init__(self, interceptor: BlockInterceptor, number: int):
        self._interceptor = interceptor
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._interceptor.handle(self._number, partial(self.inner, *args, **kwargs))
