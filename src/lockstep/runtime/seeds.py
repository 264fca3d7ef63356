"""Seeds of named random streams. They depend on what is computed, never on the rank that computes it.

A stream has a name and numbers, such as ("model", step, micro-batch), and its seed is a hash of them and the run's
seed. Two ranks that compute the same micro-batch draw the same numbers, and a resumed run draws what it would have
drawn.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
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


def used_generators(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Return the names of the generators whose state differs."""
    # A NumPy state is (name, key, position in the key, ...).
    same_key = np.array_equal(before["numpy"][1], after["numpy"][1])
    changed = {
        "random": before["random"] != after["random"],
        "numpy": before["numpy"][2] != after["numpy"][2] or not same_key,
        **{name: not torch.equal(before[name], after[name]) for name in before if name in ("torch", "cuda")},
    }
    return {name for name, was_used in changed.items() if was_used}


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Restore the global generators at the end, so that training draws the numbers that it would have drawn anyway."""
    states = rng_states(device)
    try:
        yield
    finally:
        torch.default_generator.set_state(states["torch"])
        _restore_host(states)
        if device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], device)


class HostSeeds:
    """Seeds Python's and numpy's global generators in a custom loop, if its first step draws from them.

    That step is the first one of this process, and all ranks agree about it. Like the seeds of torch, these are a pure
    function of step and micro-batch. Seeding takes some 10 us, so a loop that draws nothing is not seeded any more, and
    finds both generators as they would have been.
    """

    def __init__(self, seed: int, always: bool = False):
        """`always`: seed in every step, whatever the first one draws."""
        self._seed = seed
        self._is_first = not always
        self._draws = always

        # In the first step: the states before and after the last seeding, until `end`.
        self._states: tuple[dict[str, Any], dict[str, Any]] | None = None

    def begin(self, stream: str, *keys: int) -> None:
        """Seed the generators for the code of the user that follows, up to `end`."""
        if not (self._is_first or self._draws):
            return

        before = rng_states(CPU) if self._is_first else {}
        seed_host(derive(self._seed, stream, *keys))
        if self._is_first:
            self._states = before, rng_states(CPU)

    def end(self) -> None:
        """Find out whether code of the user has drawn since `begin`. If it has not, undo the seeding."""
        if self._states is None:
            return

        before, seeded = self._states
        self._states = None
        if used_generators(seeded, rng_states(CPU)) & {"numpy", "random"}:
            self._draws = True
        else:
            _restore_host(before)

    def end_step(self, step: int, on_any_rank: Callable[[bool], bool]) -> None:
        """End a step. What is drawn until the next one follows the step. Collective in the first step."""
        if self._is_first:
            self._is_first = False
            self._draws = on_any_rank(self._draws)

        if self._draws:
            seed_host(derive(self._seed, "update", step))


def _restore_host(states: dict[str, Any]) -> None:
    np.random.set_state(states["numpy"])
    random.setstate(states["random"])
