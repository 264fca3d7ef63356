"""The one owner of `nn.Module._compiled_call_impl`, which torch calls in place of a module's hooks and forward.

Several features wrap the call of a module: torch.compile, the warm-up of a compiled call, CUDA graphs, and the
interception of blocks in a pipeline that is split automatically. Each of them is a link of one chain per module:

    intercept ( graph ( warmup ( compiled call, or the plain one ) ) )

The order does not depend on which link is installed first. A copy of a module has no chain: torch leaves the attribute
out when it copies or pickles a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

Call = Callable[..., Any]

# From the inside out. A warm-up must run the compiled code itself, a capture must not contain the warm-up.
ORDER = ("warmup", "graph", "intercept")


class Link(Protocol):
    """A wrapper around a module's call."""

    inner: Call  # what this link wraps; the chain sets it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""


class CallChain:
    """The links around one module's call. The module's attribute holds the chain as long as it has links."""

    def __init__(self, module: nn.Module):
        self._module = module
        # A user may have compiled the module before it came to us.
        self._compiled: Call | None = module._compiled_call_impl
        self._links: dict[str, Link] = {}
        self._outermost: Call = module._call_impl

    @classmethod
    def of(cls, module: nn.Module) -> CallChain:
        """Return the chain that is installed on `module`, or a new one without links."""
        # The attribute itself says whether there is a chain: no second record could disagree with it.
        current = module._compiled_call_impl
        return current if isinstance(current, CallChain) else cls(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._outermost(*args, **kwargs)

    def install(self, name: str, link: Link) -> None:
        """Put `link` into the position that ORDER gives to `name`; it replaces a link of the same name."""
        assert name in ORDER, name
        self._links[name] = link
        self._connect()

    def remove(self, name: str) -> None:
        """Remove the link `name`, if there is one. Without its last link the module is as it was before."""
        self._links.pop(name, None)
        self._connect()

    def find(self, name: str) -> Link | None:
        return self._links.get(name)

    def compile(self) -> None:
        """Compile the module inside all links."""
        self._module.compile()  # which writes the attribute
        self._compiled = self._module._compiled_call_impl
        self._connect()

    def uncompile(self) -> None:
        """Let the innermost link wrap the plain call."""
        self._compiled = None
        self._connect()

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """Run calls of the module without its links and without compiled code, inside a `with` block."""
        self._module._compiled_call_impl = None
        try:
            yield
        finally:
            self._connect()

    def _connect(self) -> None:
        """Tell every link what it wraps, from the inside out, and write the module's attribute."""
        self._outermost = self._compiled or self._module._call_impl
        for name in ORDER:
            if link := self._links.get(name):
                link.inner = self._outermost
                self._outermost = link

        # Without links the module is as torch left it, and nothing refers to the chain any more.
        self._module._compiled_call_impl = self if self._links else self._compiled


@contextmanager
def run_eagerly(model: nn.Module) -> Iterator[None]:
    """Run calls of `model` without preparation for their shapes.

    For a new shape torch.compile would compile, a CUDA graph would be captured and cuDNN would plan its attention;
    each takes far longer than the call itself. Hooks still run, so sharded parameters are gathered as usual.
    """
    kernels = torch.backends.cuda
    cudnn_was_on = kernels.cudnn_sdp_enabled()

    # The other attention kernels need no plan. If none of them is enabled, cuDNN has to stay on.
    has_alternative = kernels.flash_sdp_enabled() or kernels.mem_efficient_sdp_enabled() or kernels.math_sdp_enabled()

    kernels.enable_cudnn_sdp(cudnn_was_on and not has_alternative)
    try:
        # The stance reaches submodules that are compiled by themselves.
        with CallChain.of(model).bypassed(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        kernels.enable_cudnn_sdp(cudnn_was_on)
