"""How tensors got their values: the calls of torch's functions that made them, which can be run again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.errors import UserError

CPU = torch.device("cpu")


def other_weights(found: str, fix: str) -> UserError:
    return UserError("init=meta would start from other weights than init=host", found, f"{fix}; or type init=host")


class Place(NamedTuple):
    """Where in its memory a tensor lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def tensor(self, storage: torch.UntypedStorage) -> Tensor:
        blank = torch.empty(0, dtype=self.dtype, device=storage.device)
        return blank.set_(storage, self.offset, self.shape, self.stride)


@dataclass(eq=False)
class Memory:
    """The memory of one or several tensors."""

    nbytes: int
    value: Value | None = None  # None: made by something that cannot be run again
    empty: bool = False  # a parameter lies in it, or follows from one: there are no numbers, only a value
    seen: bool = False  # by others than torch (numpy), who may change its numbers: they are kept whenever they are used
    kept: Tensor | None = None  # all bytes, when they were last used


@dataclass(eq=False)
class Value:
    """What a memory holds after a call."""

    memory: Memory
    call: Call
    samples: list[tuple[Place, Tensor]] = field(default_factory=list)  # some of the numbers that it really held


class Operand(NamedTuple):
    """A tensor among the arguments of a call. Without a value, the call overwrites all of it."""

    memory: Memory
    value: Value | None
    place: Place


class OwnGenerator(NamedTuple):
    state: Tensor

    def make(self) -> torch.Generator:
        generator = torch.Generator()
        generator.set_state(self.state)
        return generator


@dataclass(eq=False)
class Call:
    """A call of one of torch's functions, with all it takes to run it again."""

    number: int  # in the order of the calls
    function: Callable[..., Any]
    args: Any  # with an Operand for every tensor
    kwargs: Any
    state: Tensor | None = None  # of torch's generator, if the call draws from it
    unset: bool = False  # memory that the call allocates and does not set
    operands: list[Operand] = field(default_factory=list)
    results: list[tuple[int, Memory, Place]] = field(default_factory=list)  # new memories, by the number of the result
    values: list[Value] = field(default_factory=list)  # of all memories that it makes or writes

    def run(self, held: dict[Memory, torch.UntypedStorage]) -> None:
        def argument(leaf: Any) -> Any:
            if isinstance(leaf, Operand):
                if leaf.memory not in held:
                    held[leaf.memory] = torch.UntypedStorage(leaf.memory.nbytes)
                return leaf.place.tensor(held[leaf.memory])
            return leaf.make() if isinstance(leaf, OwnGenerator) else leaf

        args, kwargs = tree_map(argument, (self.args, self.kwargs), is_leaf=is_leaf)
        if self.state is not None:
            torch.set_rng_state(self.state)
        before = torch.get_rng_state()
        found = tensors_in(self.function(*args, **kwargs))
        if self.state is None and not torch.equal(torch.get_rng_state(), before):
            raise other_weights(f"model() calls {self.function}, which draws random numbers", "draw them otherwise")

        for number, memory, place in self.results:
            result = found[number]
            # Some functions lay out their results otherwise on the meta device.
            if Place.of(result) != place or result.untyped_storage().nbytes() != memory.nbytes:
                laid_out = place.tensor(torch.UntypedStorage(memory.nbytes))
                result = laid_out.copy_(result)
            if self.unset:
                mark_unset(result)
            held[memory] = result.untyped_storage()


def is_leaf(leaf: Any) -> bool:
    return isinstance(leaf, Operand | OwnGenerator)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Recipe:
    """All calls that give a memory its value, without those whose results were overwritten."""

    def __init__(self, value: Value):
        self.value = value
        self.calls = _needed(value)
        self._last_use = {memory: call.number for call in self.calls for memory in _memories(call)}
        self._last_use[value.memory] = self.calls[-1].number + 1

    @property
    def peak(self) -> int:
        """The bytes that `make` needs at most."""
        held: set[Memory] = set()
        peak = 0
        for call in self.calls:
            held.update(_memories(call))
            peak = max(peak, sum(memory.nbytes for memory in held))
            held = {memory for memory in held if self._last_use[memory] > call.number}
        return peak

    @property
    def may_be_unset(self) -> bool:
        return any(call.unset for call in self.calls)

    def make(self, place: Place) -> Tensor:
        """Return what lies at a place of the memory, in host memory. All generators stay as they are."""
        held: dict[Memory, torch.UntypedStorage] = {}
        state = torch.get_rng_state()
        try:
            with torch.no_grad():
                for call in self.calls:
                    call.run(held)
                    for value in call.values:
                        _compare(value, held)
                    for memory in _memories(call):
                        if self._last_use[memory] <= call.number:
                            del held[memory]
        finally:
            torch.set_rng_state(state)

        made = place.tensor(held[self.value.memory])
        return made if covers(place, self.value.memory) else made.clone()


def _needed(value: Value) -> list[Call]:
    calls: dict[int, Call] = {}
    waiting = [value.call]
    while waiting:
        call = waiting.pop()
        if call.number not in calls:
            calls[call.number] = call
            waiting += [operand.value.call for operand in call.operands if operand.value]
    return [calls[number] for number in sorted(calls)]


def _memories(call: Call) -> set[Memory]:
    return {operand.memory for operand in call.operands} | {memory for _, memory, _ in call.results}


def _compare(value: Value, held: dict[Memory, torch.UntypedStorage]) -> None:
    """Check that a call gave the same numbers as before: numpy can change a tensor, and torch does not see it."""
    for place, sample in value.samples:
        if not same_bits(sample_of(place.tensor(held[value.memory])), sample):
            raise other_weights(
                f"model() changes a tensor of shape {list(place.shape)} by something other than torch's functions "
                "(numpy, for example)",
                "set it with torch.from_numpy(...)",
            )


def covers(place: Place, memory: Memory) -> bool:
    """Whether a tensor is all of its memory."""
    count = 1
    for size, stride in zip(reversed(place.shape), reversed(place.stride), strict=True):
        if size != 1 and stride != count:
            return False
        count *= size
    return place.offset == 0 and count * place.dtype.itemsize == memory.nbytes


def sample_of(tensor: Tensor) -> Tensor:
    """Return up to 64 numbers: reading all of a large tensor that nobody has written would cost its memory."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[:1].reshape(-1)
    return flat[:: max(1, flat.numel() // 64)].clone()


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def mark_unset(tensor: Tensor) -> None:
    """Fill a tensor with a value that no initialisation sets. A bool has none."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def is_unset(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).min).any())


class Freed:
    """Counts memory that was freed, and gives it back to the system.

    The C library keeps blocks of up to 32 MiB, and as soon as something small lies in one, the next block is put
    elsewhere: a model of such parameters would be held as a whole, though all of it is free.
    """

    EVERY_BYTES = 128 * 2**20

    def __init__(self) -> None:
        self._bytes = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it

    def add(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self._bytes >= self.EVERY_BYTES and self._trim:
            self._trim(0)
            self._bytes = 0
