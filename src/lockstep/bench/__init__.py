"""`lockstep bench`: measures scaling, communication, memory, steps, data and checkpoints on the hardware that is there.

Ranks that take turns are in `ranks`, what is asked of them in `kinds`. Only `ranks` imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def benchmark_weak_scaling(num_gpus: Sequence[int] = (1, 2, 4, 8), **options: Any) -> dict[int, dict[str, Any]]:
    """Benchmark with a fixed batch per rank. Returns throughput, speed-up and efficiency by number of ranks.

    `fair_test` says whether each rank had a device or cores of its own on a quiet machine; else `unfair_because`.
    `options` are those of `lockstep bench weak`: target, batch, repeats or seconds, block, layers, cores_per_rank and
    siblings.
    """
    from lockstep.bench.kinds.scaling import scaling_results

    return scaling_results("weak", num_gpus, **options)


def benchmark_strong_scaling(num_gpus: Sequence[int] = (1, 2, 4, 8), **options: Any) -> dict[int, dict[str, Any]]:
    """Benchmark with a fixed global batch. See `benchmark_weak_scaling`."""
    from lockstep.bench.kinds.scaling import scaling_results

    return scaling_results("strong", num_gpus, **options)
