"""Replay the recorded calls that compute a tensor.

Only the calls that the tensor depends on are run, in their order and with the generator states of that time. So a
parameter gets the bits that it would have got on the host, however many others are never computed on this rank.
"""

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


def different_weights(found: str, fix: str) -> UserError:
    """Return the error for a constructor whose weights cannot be reproduced."""
    return UserError("init=meta would start from different weights than init=host", found, f"{fix}; or set init=host")


class View(NamedTuple):
    """The position of a tensor in its memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # offset in elements

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def tensor(self, storage: torch.UntypedStorage) -> Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.shape, self.stride)


@dataclass(eq=False)
class Memory:
    """The memory of one or several tensors: a storage in torch's words, which may exist only as a record."""

    nbytes: int
    value: Value | None = None  # None: its content cannot be replayed
    empty: bool = False  # there is no real memory, only the recorded value
    exposed: bool = False  # code that is not recorded (numpy) may change the content, so it is saved at every use
    saved: Tensor | None = None  # all bytes, when they were last used


@dataclass(eq=False)
class Value:
    """The content of a memory after a call."""

    memory: Memory
    call: Call
    samples: list[tuple[View, Tensor]] = field(default_factory=list)  # some of the actual elements, for a comparison


class Operand(NamedTuple):
    """A tensor among the arguments of a call. Without a value, the call overwrites all of it."""

    memory: Memory
    value: Value | None
    view: View


class GeneratorState(NamedTuple):
    """A torch.Generator among the arguments of a call."""

    state: Tensor

    def make(self) -> torch.Generator:
        generator = torch.Generator()
        generator.set_state(self.state)
        return generator


@dataclass(eq=False)
class Call:
    """A recorded call of one of torch's functions, which can be replayed."""

    number: int  # position in the order of the calls
    function: Callable[..., Any]
    args: Any  # arguments with an Operand for every tensor
    kwargs: Any
    state: Tensor | None = None  # the state of torch's default generator, if the call draws from it
    unset: bool = False  # whether the call only allocates memory, as torch.empty does
    operands: list[Operand] = field(default_factory=list)
    results: list[tuple[int, Memory, View]] = field(default_factory=list)  # new memories, with the index of the result
    values: list[Value] = field(default_factory=list)  # values of all memories that it creates or writes

    def run(self, storages: dict[Memory, torch.UntypedStorage]) -> None:
        """Replay the call. `storages` holds the actual memory of its operands, and gets that of its results."""

        def argument(leaf: Any) -> Any:
            if isinstance(leaf, Operand):
                # Not computed by an earlier call: this one overwrites all of it.
                if leaf.memory not in storages:
                    storages[leaf.memory] = torch.UntypedStorage(leaf.memory.nbytes)

                return leaf.view.tensor(storages[leaf.memory])

            return leaf.make() if isinstance(leaf, GeneratorState) else leaf

        # Draw the same random numbers as when the call was recorded.
        args, kwargs = tree_map(argument, (self.args, self.kwargs), is_leaf=is_leaf)
        if self.state is not None:
            torch.set_rng_state(self.state)

        # A function without a recorded state must draw none.
        before = torch.get_rng_state()
        outputs = tensors_in(self.function(*args, **kwargs))
        if self.state is None and not torch.equal(torch.get_rng_state(), before):
            raise different_weights(
                f"model() calls {self.function}, which draws random numbers that are not recorded",
                "draw them with another function",
            )

        for index, memory, view in self.results:
            result = outputs[index]

            # Some functions return other strides on the meta device than on the CPU.
            if View.of(result) != view or result.untyped_storage().nbytes() != memory.nbytes:
                result = view.tensor(torch.UntypedStorage(memory.nbytes)).copy_(result)

            # If these marks are still there at the end, the constructor has left elements uninitialised.
            if self.unset:
                mark_unset(result)

            storages[memory] = result.untyped_storage()


def is_leaf(leaf: Any) -> bool:
    return isinstance(leaf, Operand | GeneratorState)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Recipe:
    """All calls that are needed to compute a value. Calls whose results were overwritten are left out.

    The calls are in the order in which they ran. A memory is freed after its last use, so that computing one parameter
    needs little more than the parameter itself.
    """

    def __init__(self, value: Value):
        """`value`: what to compute."""
        self.value = value
        self.calls = _needed(value)

        # After this call a memory can be freed: the last one that uses it, since later calls overwrite the entries of
        # earlier ones. That of the result is never freed.
        self._last_use = {memory: call.number for call in self.calls for memory in _memories(call)}
        self._last_use[value.memory] = self.calls[-1].number + 1

    @property
    def peak(self) -> int:
        """The peak memory of `make`, in bytes."""
        live: set[Memory] = set()
        peak = 0
        for call in self.calls:
            live.update(_memories(call))
            peak = max(peak, sum(memory.nbytes for memory in live))

            # As in `make`, what no later call uses is freed at once.
            live = {memory for memory in live if self._last_use[memory] > call.number}

        return peak

    @property
    def may_be_unset(self) -> bool:
        return any(call.unset for call in self.calls)

    def make(self, view: View) -> Tensor:
        """Replay the calls and return a view of the result, on the CPU. The generators do not advance."""
        # Calls set the generator to its state of that time, so it is restored at the end.
        storages: dict[Memory, torch.UntypedStorage] = {}
        state = torch.get_rng_state()

        try:
            with torch.no_grad():
                for call in self.calls:
                    call.run(storages)
                    for value in call.values:
                        _compare(value, storages)

                    # Free what no later call uses.
                    for memory in _memories(call):
                        if self._last_use[memory] <= call.number:
                            del storages[memory]
        finally:
            torch.set_rng_state(state)

        tensor = view.tensor(storages[self.value.memory])

        # A clone of a part does not keep the whole memory alive.
        return tensor if covers(view, self.value.memory) else tensor.clone()


def _needed(value: Value) -> list[Call]:
    """Return the calls that a value depends on, in order."""
    # From the value backwards, along the operands of each call. Numbers are in the order in which the calls ran.
    calls: dict[int, Call] = {}
    pending = [value.call]

    while pending:
        call = pending.pop()
        if call.number not in calls:
            calls[call.number] = call
            pending += [operand.value.call for operand in call.operands if operand.value]

    return [calls[number] for number in sorted(calls)]


def _memories(call: Call) -> set[Memory]:
    return {operand.memory for operand in call.operands} | {memory for _, memory, _ in call.results}


def _compare(value: Value, storages: dict[Memory, torch.UntypedStorage]) -> None:
    """Check that the replay gives the recorded samples: a change of a tensor with numpy cannot be recorded."""
    for view, sample in value.samples:
        if not same_bits(sample_of(view.tensor(storages[value.memory])), sample):
            raise different_weights(
                f"model() changes a tensor of shape {list(view.shape)} without torch's functions (with numpy, for "
                "example)",
                "set it with torch.from_numpy(...)",
            )


def covers(view: View, memory: Memory) -> bool:
    """Whether a view is contiguous and covers all of its memory."""
    # The elements of a contiguous tensor are counted from the last dimension up.
    count = 1
    for size, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if size != 1 and stride != count:
            return False

        count *= size

    return view.offset == 0 and count * view.dtype.itemsize == memory.nbytes


def sample_of(tensor: Tensor) -> Tensor:
    """Return up to 64 elements. Reading all of a large tensor would allocate pages that were never written."""
    # Flattening copies a tensor that is not contiguous, so only its first row is sampled.
    source = tensor.detach() if tensor.is_contiguous() else tensor.detach()[:1]
    flat = source.reshape(-1)
    return flat[:: max(1, flat.numel() // 64)].clone()


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def mark_unset(tensor: Tensor) -> None:
    """Fill an uninitialised tensor with a value that no initialisation sets. For bool there is no such value."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def is_unset(tensor: Tensor) -> bool:
    """Return whether some element still has the value of `mark_unset`."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).min).any())


class MemoryTrimmer:
    """Returns freed memory to the system.

    glibc keeps freed blocks of up to 32 MiB, and as soon as a small allocation lies in such a block, the next large one
    goes elsewhere. So the process would grow to the size of the whole model, although most of its memory is free.
    """

    EVERY_BYTES = 128 * 2**20

    def __init__(self) -> None:
        self._bytes = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it

    def add(self, nbytes: int) -> None:
        """Count freed bytes, and trim from time to time."""
        self._bytes += nbytes
        if self._bytes >= self.EVERY_BYTES and self._trim:
            self._trim(0)
            self._bytes = 0
