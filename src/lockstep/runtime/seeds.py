"""Seeds of named random streams. They depend on what is computed, never on the rank that computes it.

A stream has a name and numbers, such as ("model", step, micro-batch), and its seed is a hash of them and the run's
seed. Two ranks that compute the same micro-batch draw the same numbers, and a resumed run draws what it would have
drawn.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

CPU = torch.device("cpu")


def derive(seed: int, stream: str, *keys: int) -> int:
    """Return a 63-bit seed that is a pure function of the arguments, stable over platforms and versions."""
    # A cryptographic hash, not Python's: neighbouring keys must give unrelated streams.
    text = f"{seed}/{stream}/" + "/".join(map(str, keys))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_torch(value: int, device: torch.device) -> None:
    """Seed the generators that model code draws from: the CPU's and `device`'s.

    `torch.manual_seed` visits every back-end and takes about 100 us; this takes about 1.
    """
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)


def seed_everything(value: int, device: torch.device = CPU) -> None:
    """Seed the global generators of torch, `random` and numpy: before a sample is made, for example."""
    seed_torch(value, device)
    seed_host(value)


def seed_host(value: int) -> None:
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)  # numpy takes 32 bits


def reseed_at(seed: int, steps_done: int) -> None:
    """Give Python's and numpy's generators the seed of a checkpoint. `seed`: that of the run.

    A save and a resume both call this, so that a resumed run draws the same numbers as one that went on. A checkpoint
    does not hold the states of these generators: it can be resumed on another number of ranks.
    """
    seed_host(derive(seed, "checkpoint", steps_done))


def rng_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the global generators, by name."""
    states: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)

    return states


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Restore the global generators at the end, so that training draws the numbers that it would have drawn anyway."""
    states = rng_states(device)
    try:
        yield
    finally:
        torch.default_generator.set_state(states["torch"])
        np.random.set_state(states["numpy"])
        random.setstate(states["random"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], device)
