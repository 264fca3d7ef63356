"""Floating-point operations: those of a forward, and the most that a device does per second."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

MATRIX = {"cuda": 8192, "cpu": 1024}  # rows of the matrices whose product sets the peak
REPEATS = 10


def count(loss_fn: Any, model: nn.Module, data: Any) -> float:
    """Return the operations of one call of the loss."""
    with FlopCounterMode(display=False) as counter:
        loss_fn(model, data)
    return float(counter.get_total_flops())


def matmul_rate(device: torch.device) -> float:
    """Return the floating-point operations per second of a large matrix product: bf16 on a GPU, fp32 on a CPU."""
    size = MATRIX["cuda" if device.type == "cuda" else "cpu"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(REPEATS):
        _wait(device)
        began = time.perf_counter()
        a @ a
        _wait(device)
        best = min(best, time.perf_counter() - began)

    return 2 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
