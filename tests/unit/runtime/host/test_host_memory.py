"""Freed memory of the host stays with the process, so that a step does not wait for fresh pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lockstep.runtime.host.memory import keep_freed_memory

# Eight blocks of 8 MB, made and freed in every step. Prints the page faults of ten steps.
STEPS = """
import os, resource, sys
from lockstep.runtime.host.memory import keep_freed_memory

def step():
    blocks = [bytearray(8 * 2**20) for _ in range(8)]

if "keep" in sys.argv:
    assert keep_freed_memory({})
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another C library")
def test_steps_find_their_memory_again() -> None:
    def faults(*words: str) -> int:
        done = subprocess.run([sys.executable, "-c", STEPS, *words], capture_output=True, text=True, check=True)
        return int(done.stdout)

    # 64 MB are 16,384 pages.
    assert faults() > 16_384
    assert faults("keep") < 1_000


def test_the_choice_of_the_user_stands() -> None:
    assert not keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert not keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"})
