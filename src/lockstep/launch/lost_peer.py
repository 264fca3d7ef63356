"""Recognises errors that are only the consequence of a lost peer."""

from __future__ import annotations

import re

from lockstep.errors import OutOfStep, SmallerMicroBatch, UserError

# The messages of gloo, NCCL and torch's store in a rank whose peer is gone. The one about a timeout is by NCCL's
# watchdog. A collective after it repeats why the communicator was aborted: only without such a reason is a peer gone.
_LOST_PEER = re.compile(
    r"connection (?:was )?(?:likely )?(?:closed|reset)|broken pipe|socket (?:timeout|error)|failed to recv, got 0 bytes"
    r"|remote process exited|ncclRemoteError|caused pair closure|connect(?:ion)? .*refused|timed out waiting"
    r"|watchdog caught collective operation timeout|communicator was aborted on rank \d+\.(?!\s*original reason)",
    re.IGNORECASE,
)

# A dataset may say the same about some server, so only exceptions of torch count: those that have a class of their own,
# and the RuntimeErrors of gloo. Their text names the line of C++ that raised it: "[.../tcp/pair.cc:537] ..."; the one
# exception is a collective after one that timed out.
_TORCH_ERRORS = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
_RAISED_BY_GLOO = re.compile(
    r"\[(?:enforce fail at )?\S+\.(?:cc|h):\d+\]|^Application timeout caused pair closure", re.MULTILINE
)


def reported_in(text: str) -> bool:
    """Return whether a process that aborted with this text reports a lost peer."""
    return bool(_LOST_PEER.search(text))


def reported_by_torch(kind: str, text: str) -> bool:
    """Return whether an exception is one of torch that reports a lost peer. `kind` is the name of its class."""
    raised_by_gloo = kind == "RuntimeError" and bool(_RAISED_BY_GLOO.search(text))
    return (kind in _TORCH_ERRORS or raised_by_gloo) and bool(_LOST_PEER.search(text))


def text_of(error: BaseException) -> str:
    """Return the text of an exception. The `__str__` of a program's own class may raise."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its text is not known: __str__ raised {type(failure).__name__})"


def reported_by(error: BaseException) -> bool:
    """Return whether an exception, or one of those that led to it, only reports a lost peer.

    A program may catch torch's exception and raise another one. Lockstep's own exceptions have worked out the cause.
    """
    chain = [error]
    for link in chain:
        if isinstance(link, UserError | OutOfStep | SmallerMicroBatch):
            continue

        if reported_by_torch(type(link).__name__, text_of(link)):
            return True

        # A program may have linked them in a circle, and may say which of its errors are equal.
        for earlier in (link.__cause__, link.__context__):
            if earlier is not None and all(earlier is not other for other in chain):
                chain.append(earlier)

    return False
