"""Random numbers that depend on nothing but their key, and so are the same on any rank, in any order."""

from __future__ import annotations

import zlib

import numpy as np

STRIDE = np.uint64(0x9E3779B97F4A7C15)


def uniform(seed: int, split: str, ids: np.ndarray, count: int) -> np.ndarray:
    """`count` numbers in [0, 1) for each sample: (N, count)."""
    stream = np.array([zlib.crc32(f"{seed} {split}".encode())], np.uint64) << np.uint64(32)
    sample = _mix(ids.astype(np.uint64) + _mix(stream))
    numbers = _mix(sample[:, None] + np.arange(1, count + 1, dtype=np.uint64) * STRIDE)
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """Spread every bit over all 64: shifts and odd factors, each of which can be undone, so no two keys meet."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def pick(numbers: np.ndarray, count: int) -> np.ndarray:
    """Without repetition: `count` places of the last axis, in random order."""
    return numbers.argsort(-1)[..., :count]
