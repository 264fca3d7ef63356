"""The only code that sets `nn.Module._compiled_call_impl`, which torch calls in place of a module's hooks and forward.

Several features wrap the call of a module: torch.compile, the choice between compiled and eager code, CUDA graphs, and
the interception of blocks in a pipeline that is split automatically, and the notice of calls by the user's code. Each
of them is a link of one chain per module:

    watch ( intercept ( graph ( compile ( compiled call, or `_call_impl` ) ) ) )

The order does not depend on which link is installed first. A copy of a module has no chain: torch drops the attribute
when it copies or pickles a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.runtime.attention import without_cudnn

Call = Callable[..., Any]

# From the innermost to the outermost link: a graph records what the compiled code does.
LINK_ORDER = ("compile", "graph", "intercept", "watch")


class Link(Protocol):
    """A wrapper around a module's call."""

    inner: Call  # the next link inside, or the module's own call; the chain sets it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""


class CallChain:
    """The links around one module's call. The chain is the module's `_compiled_call_impl` as long as it has links.

    `install` puts a link at its place in the fixed order, `remove` takes it out again. A module without links calls its
    forward as torch would.
    """

    def __init__(self, module: nn.Module):
        self._module = module
        # The user may have compiled the module already.
        self._compiled: Call | None = module._compiled_call_impl
        self._links: dict[str, Link] = {}
        self._outermost: Call = module._call_impl

    @classmethod
    def of(cls, module: nn.Module) -> CallChain:
        """Return the chain that is installed on `module`, or a new one without links."""
        # The attribute is the only record of the chain, so that it cannot disagree with another one.
        current = module._compiled_call_impl
        return current if isinstance(current, CallChain) else cls(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._outermost(*args, **kwargs)

    def install(self, name: str, link: Link) -> None:
        """Insert `link` at the position of `name` in LINK_ORDER. It replaces a link of the same name."""
        assert name in LINK_ORDER, name
        self._links[name] = link
        self._connect()

    def remove(self, name: str) -> None:
        """Remove the link `name`, if there is one. After the last removal the module is as before the first install."""
        self._links.pop(name, None)
        self._connect()

    def find(self, name: str) -> Link | None:
        return self._links.get(name)

    @property
    def compiled(self) -> Call | None:
        """The compiled call of the module, or None."""
        return self._compiled

    def compile(self, **options: Any) -> None:
        """Compile the module inside all links. `options` are those of torch.compile."""
        # A model that overrides `compile` may leave its own call alone, and the chain must not find itself there.
        self._module._compiled_call_impl = None
        self._module.compile(**options)
        self._compiled = self._module._compiled_call_impl

        # torch does not compile the forward of its own containers, such as Sequential, but it does so inside ours.
        kind = type(self._module)
        if kind.compile is nn.Module.compile and kind.forward.__module__.startswith("torch.nn."):
            self._compiled = torch.compile(partial(_call, self._module), **options)

        self._connect()

    def uncompile(self) -> None:
        """Drop the compiled call: the innermost link wraps the module's eager call again."""
        self._compiled = None
        self._connect()

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """Inside the `with` block, run calls of the module without its links and without compiled code."""
        self._module._compiled_call_impl = None
        try:
            yield
        finally:
            self._connect()

    def _connect(self) -> None:
        """Set the `inner` of every link, from the innermost out, and the module's `_compiled_call_impl`."""
        self._outermost = self._compiled or self._module._call_impl
        for name in LINK_ORDER:
            link = self._links.get(name)
            if link:
                link.inner = self._outermost
                self._outermost = link

        # Without links, the module gets back the attribute that torch set.
        self._module._compiled_call_impl = self if self._links else self._compiled


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


@contextmanager
def run_eagerly(model: nn.Module) -> Iterator[None]:
    """Inside the `with` block, run `model` without torch.compile, CUDA graphs and cuDNN attention.

    For each new shape, these compile, capture or plan, which takes far longer than the call itself. Hooks still run, so
    sharded parameters are gathered as usual.
    """
    # The stance also covers submodules that are compiled separately.
    with without_cudnn(), CallChain.of(model).bypassed(), torch.compiler.set_stance("force_eager"):
        yield
