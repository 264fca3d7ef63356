"""Memory of the host that tensors have freed: this process keeps it for the next step.

A step allocates and frees the same tensors again and again. By default the C library gives much of that memory back to
the system, which must fill it with zeros, page by page, for the next step: a few per cent of the time of a small
GPT, and more on many ranks, because they do it at the same time. Training ends with its process, which then
gives all of it back. Tensors of more than 32 MB are always given back: the C library has no other choice for them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# The C library's numbers for the two values, and what they are set to, in bytes.
TRIM_THRESHOLD, KEPT_AT_MOST = -1, 2_000_000_000  # free memory at the end of the heap
MMAP_THRESHOLD, KEPT_EACH = -3, 32 * 2**20  # one tensor; the most that is allowed


def keep_freed_memory(env: Mapping[str, str] = os.environ) -> bool:
    """Let the C library keep freed memory. Returns whether it does.

    It does not if the user has chosen how the library works (MALLOC_... or GLIBC_TUNABLES), or with another library.
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in env)
    if chosen or "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", {}):
        return False

    library = ctypes.CDLL(None)
    return bool(library.mallopt(TRIM_THRESHOLD, KEPT_AT_MOST) and library.mallopt(MMAP_THRESHOLD, KEPT_EACH))
