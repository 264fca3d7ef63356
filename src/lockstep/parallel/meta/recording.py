"""Run a constructor with parameters that take no memory, and record how they get their values.

A tensor is "empty" here if it has a recorded value, but no memory. A constructor cannot tell an empty parameter from a
parameter on the CPU: it reports the CPU as its device, and reading an element computes it. Random numbers are drawn as
usual, so the generators advance as with init=host.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.errors import UserError
from lockstep.parallel.meta.replay import (
    CPU,
    Call,
    GeneratorState,
    Memory,
    MemoryTrimmer,
    Operand,
    Recipe,
    Value,
    View,
    covers,
    different_weights,
    is_leaf,
    sample_of,
    tensors_in,
)

META = torch.device("meta")

# The content of tensors that torch's functions did not compute cannot be replayed, so it is saved.
MAX_SAVED_BYTES = 64 * 2**20

# Functions by their names in torch's schemas: those that only allocate, and those that overwrite their first argument
# without reading it.
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
OVERWRITES = {
    "normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "exponential_", "log_normal_", "cauchy_",
    "geometric_", "bernoulli_", "_foreach_zero_", "_foreach_copy_",
}  # fmt: skip


# Numbers of calls. They are unique over all recordings, because a model may use tensors of another one.
_numbers = itertools.count()


class Memories:
    """The recorded memories of tensors."""

    def __init__(self) -> None:
        # By the address of torch's storage object, which is not reused while a weak reference exists.
        self._known: dict[int, tuple[StorageWeakRef, Memory]] = {}

    def add(self, storage: torch.UntypedStorage, memory: Memory) -> Memory:
        """Note that a storage stands for a memory."""
        self._known[storage._cdata] = StorageWeakRef(storage), memory
        return memory

    def of(self, tensor: Tensor) -> Memory | None:
        """Return the recorded memory of a tensor, or None."""
        if tensor.layout != torch.strided:
            return None

        known = self._known.get(tensor.untyped_storage()._cdata)
        return known[1] if known else None

    def is_empty(self, tensor: Tensor) -> bool:
        """Whether a tensor has a recorded value, but no memory."""
        memory = self.of(tensor)
        return memory is not None and memory.empty

    def recipe(self, tensor: Tensor) -> Recipe:
        """Return how to compute the content of a tensor's memory."""
        memory = self.of(tensor)
        assert memory is not None
        assert memory.value is not None
        return Recipe(memory.value)

    def drop_unused(self) -> None:
        """Forget the memories of tensors that no longer exist."""
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}


memories = Memories()


@contextmanager
def recording() -> Iterator[None]:
    """Move each parameter to the meta device as soon as a module registers it, and record all operations on it."""
    memories.drop_unused()
    recorder = _Recorder()

    # By the original parameter, compared by identity, so that a tied parameter stays tied.
    empty = WeakTensorKeyDictionary()

    # torch calls it whenever a module registers a parameter, and registers what it returns; None: the parameter itself.
    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if is_lazy(parameter):
            return None

        with torch._C.DisableTorchFunction(), recorder.paused():
            if parameter.is_meta:
                return None

            if parameter not in empty:
                empty[parameter] = recorder.to_meta(parameter)

            return empty[parameter]

    hook = register_module_parameter_registration_hook(to_meta)  # pyrefly: ignore[bad-argument-type]
    try:
        with hook, recorder, _PretendHost():
            yield

        recorder.check_exposed()
    except UserError:
        raise
    except Exception as error:
        error.add_note("lockstep: with init=meta, parameters have no memory in the constructor; try init=host")
        raise


class _PretendHost(TorchFunctionMode):
    """Makes empty parameters report that they are on the CPU: torch.nn.init skips parameters on the meta device."""

    ANSWERS = {"is_meta": False, "is_cpu": True, "device": CPU}

    # A property such as `tensor.device` arrives here as its getter.
    GETTERS = {getattr(Tensor, name).__get__: answer for name, answer in ANSWERS.items()}

    # These functions expose a tensor's memory to code that is not recorded and may write into it.
    EXPOSING = {Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer for an empty tensor, or let the call go on to the recorder. torch calls it for every function."""
        if func in self.GETTERS and memories.is_empty(args[0]):
            return self.GETTERS[func]

        # From now on, the content is compared whenever it is used.
        if func in self.EXPOSING:
            memory = memories.of(args[0])
            if memory:
                memory.exposed = True

        # torch would convert the number to a tensor on the meta device, where its value is lost.
        if func is Tensor.__setitem__ and isinstance(args[2], int | float | complex) and memories.is_empty(args[0]):
            args = *args[:2], torch.tensor(args[2], dtype=args[0].dtype, device=CPU)

        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Records every call that creates or changes a tensor. Calls on empty tensors are recorded without being run.

    Each call is one record: the function, its arguments as recorded values, and the state of the generator. The values
    of a parameter are later computed by replaying only the records that it depends on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._saved_bytes = 0  # bytes of contents that cannot be replayed
        self._trimmer = MemoryTrimmer()
        self._paused = False
        self._exposed: list[tuple[torch.UntypedStorage, Memory]] = []  # exposed original memories of parameters

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let calls run without recording them."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def to_meta(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return an empty parameter with the same recorded value."""
        # The memory of the original is freed as soon as the constructor drops it.
        self._trimmer.add(self._empty(parameter).nbytes)

        # With the attributes that the user has set on the parameter.
        empty = nn.Parameter(_without_memory(parameter), parameter.requires_grad)
        empty.__dict__.update(parameter.__dict__)
        return empty

    def _empty(self, tensor: Tensor) -> Memory:
        """Mark the memory of a tensor as empty, and return it."""
        memory = self._operand(tensor, crosses=True).memory
        if memory.exposed and not memory.empty:
            self._exposed.append((tensor.untyped_storage(), memory))

        memory.empty = True
        return memory

    def check_exposed(self) -> None:
        """Refuse writes by other code than torch into the original memory of a parameter: they had no effect on it."""
        for storage, memory in self._exposed:
            if memory.saved is not None and not torch.equal(_bytes_of(storage), memory.saved):
                raise different_weights(
                    "model() changes a parameter without torch's functions (with numpy, for example) after a module "
                    "has registered it",
                    "change it before that, or with torch",
                )

            memory.saved = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call, or run it. torch calls this for every operation, below autograd."""
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {})) if self._paused else self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call on the host, record it without running it, or run it with empty arguments materialized."""
        # Most calls of a constructor are on ordinary tensors.
        tensors = tensors_in((args, kwargs))
        names_meta = any(_is_device(argument, "meta") for argument in [*args, *kwargs.values()])
        some_are_empty = any(memories.is_empty(tensor) for tensor in tensors)
        if not names_meta and not some_are_empty:
            return self._on_host(func, args, kwargs, tensors)

        if _name(func).startswith("_foreach_") and len(args[0]) > 1:
            return self._split_foreach(func, args, kwargs)

        # After `set_` the tensor uses another memory, which has its own value.
        if _name(func) == "set_":
            for tensor in tensors[1:]:
                self._empty(tensor)

            return func(*_without_memory(args), **kwargs)

        # A call that returns Python numbers, or writes into a tensor with memory, needs the actual values.
        written = written_tensors(func, args, kwargs)
        returns_numbers = not written and not any("Tensor" in str(result.type) for result in func._schema.returns)
        if returns_numbers or not all(memories.is_empty(tensor) for tensor in written):
            result = func(*self._materialize(args), **self._materialize(kwargs))
            self._drop_values(written)
            return result

        return self._on_meta(func, args, kwargs, written)

    def _on_host(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Run a call on tensors that have memory. A parameter may be computed from its results."""
        # A call can be replayed only if it is torch's own, and if its arguments are known.
        replayable = func.namespace in ("aten", "prims") and all(_is_known(tensor) for tensor in tensors)
        written = written_tensors(func, args, kwargs)
        call = self._record_call(func, args, kwargs, written) if replayable else None

        result = func(*args, **kwargs)

        if call:
            self._record_results(call, written, result)
        else:
            self._drop_values(written)

        return result

    def _on_meta(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        """Record a call on empty tensors, and return an empty result."""
        if _name(func).startswith("resize"):
            raise different_weights("model() resizes a parameter", "construct it with its final size")

        # Random numbers are drawn, although they are not kept: later calls must find the generator as with init=host.
        call = self._record_call(func, args, kwargs, written)
        if call.state is not None or _generator_in(args, kwargs):
            self._draw(func, args, kwargs, written)

        # An in-place call that changes no shape has nothing to do on the meta device: it returns its argument.
        returns = func._schema.returns
        if written and torch.Tag.inplace_view not in func.tags and all(_is_alias(result) for result in returns):
            result = written[0] if len(returns) == 1 else tuple(written[: len(returns)]) or None
        else:
            try:
                result = func(*_without_memory(args), **_without_memory(kwargs))
            except (NotImplementedError, RuntimeError):
                # The shape of the result depends on values: nonzero, unique, ...
                if written or call.state is not None:
                    raise

                return func(*self._materialize(args), **self._materialize(kwargs))

        self._record_results(call, written, result, empty=True)
        return result

    def _split_foreach(self, func: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
        """Record a `_foreach_` call as one call per tensor, so that replaying one tensor does not need all others."""
        count = len(args[0])
        results: list[Tensor] = []
        for i in range(count):

            def one(argument: Any, i: int = i) -> Any:
                return [argument[i]] if isinstance(argument, list | tuple) and len(argument) == count else argument

            part = self._call(func, tuple(map(one, args)), {key: one(value) for key, value in kwargs.items()})
            results += part or []

        return results or None

    def _draw(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> None:
        """Draw the random numbers that a call would draw, so that the generator advances."""
        # The call runs on real memory, which is dropped after it.
        tensors = tensors_in((args, kwargs))
        self._trimmer.add(sum(tensor.nbytes for tensor in tensors))

        # An in-place call on one tensor, such as normal_(), does not depend on the tensor's values.
        if len(tensors) == 1 and written:
            # With the same strides, which decide in which order a kernel fills a tensor.
            buffer = torch.empty_strided(tensors[0].shape, tensors[0].stride(), dtype=tensors[0].dtype)
            args, kwargs = tree_map(lambda leaf: buffer if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            func(*args, **kwargs)
        else:
            func(*self._materialize(args), **self._materialize(kwargs))

    def _materialize(self, tree: Any) -> Any:
        """Return the arguments with the values of all empty tensors computed."""

        def materialize(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and memories.is_empty(leaf):
                recipe = memories.recipe(leaf)
                self._trimmer.add(recipe.peak)
                return recipe.make(View.of(leaf))

            return CPU if _is_device(leaf, "meta") else leaf

        return tree_map(materialize, tree)

    def _record_call(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Call:
        """Return a record of a call that is about to run, from which it can be replayed."""
        tensors = tensors_in((args, kwargs))
        crosses = any(memories.is_empty(tensor) for tensor in tensors)
        overwritten = _overwritten(func, tensors, written)

        # What stands in the record for an argument: its recorded value, the state of a generator, or itself.
        def record(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                operand = self._operand(leaf, crosses)
                return operand._replace(value=None) if leaf is overwritten else operand

            if isinstance(leaf, torch.Generator):
                return GeneratorState(leaf.get_state())

            return CPU if _is_device(leaf, "meta") else leaf

        # Record the arguments and the generator before the call, which may change both.
        uses_default_generator = torch.Tag.nondeterministic_seeded in func.tags and not _generator_in(args, kwargs)
        args, kwargs = tree_map(record, (args, kwargs))
        state = torch.get_rng_state() if uses_default_generator else None

        # Numbers are in the order of the calls, also over several recordings.
        call = Call(next(_numbers), func, args, kwargs, state)
        call.unset = _name(func) in ALLOCATIONS

        # Every tensor among the arguments must be computed before the call is replayed.
        leaves = tree_leaves((args, kwargs), is_leaf=is_leaf)
        call.operands = [leaf for leaf in leaves if isinstance(leaf, Operand)]

        return call

    def _operand(self, tensor: Tensor, crosses: bool) -> Operand:
        """Return how to recompute a tensor.

        crosses: an empty tensor will depend on this one, even if this one has memory
        """
        if tensor.is_conj() or tensor.is_neg():
            raise different_weights("model() initialises weights with conjugated views", "call resolve_conj() on them")

        # Samples of a tensor with memory show, at the replay, whether code that is not recorded has changed it.
        memory = memories.of(tensor)
        if memory is None or memory.value is None or not _is_known(tensor):
            memory = self._save_content(tensor)
        elif crosses and not memory.empty and not Recipe(memory.value).may_be_unset:
            memory.value.samples.append((View.of(tensor), sample_of(tensor)))

        return Operand(memory, memory.value, View.of(tensor))

    def _save_content(self, tensor: Tensor) -> Memory:
        """Save the content of a tensor that torch's functions did not compute."""
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":
            raise different_weights(
                f"model() uses a tensor of shape {list(tensor.shape)} on the meta device, which has no values",
                "create it on the CPU",
            )

        # Saved before, and not changed since.
        memory = memories.of(tensor) or memories.add(storage, Memory(storage.nbytes(), exposed=True))
        if memory.value and memory.saved is not None and torch.equal(_bytes_of(storage), memory.saved):
            return memory

        self._saved_bytes += storage.nbytes()
        if self._saved_bytes > MAX_SAVED_BYTES:
            raise UserError(
                f"init=meta would have to keep more than {MAX_SAVED_BYTES >> 20} MiB of the weights on every rank",
                f"model() creates a tensor of shape {list(tensor.shape)} without torch's functions (with numpy, or "
                "from a file), so that it cannot be recomputed later",
                "draw them with torch, load them as a checkpoint, or set init=host",
            )

        # The saved bytes are a call like any other: replaying it returns a copy of them.
        numbers = memory.saved = _bytes_of(storage).clone()
        call = Call(next(_numbers), numbers.clone, (), {}, results=[(0, memory, View.of(numbers))])
        memory.value = Value(memory, call)
        call.values = [memory.value]
        return memory

    def _record_results(self, call: Call, written: list[Tensor], result: Any, empty: bool = False) -> None:
        """Record the tensors that a call has created or changed."""
        # New memories. A view, or an argument that is returned, has a known one.
        for index, tensor in enumerate(tensors_in(result)):
            if (empty or _is_on_cpu(tensor)) and memories.of(tensor) is None:
                storage = tensor.untyped_storage()
                memory = memories.add(storage, Memory(storage.nbytes(), empty=empty))
                memory.value = Value(memory, call)
                call.results.append((index, memory, View.of(tensor)))
                call.values.append(memory.value)

        # A call that writes in place gives its memory another value.
        for memory in {memories.of(tensor) for tensor in written}:
            assert memory is not None
            memory.value = Value(memory, call)
            call.values.append(memory.value)

    def _drop_values(self, written: list[Tensor]) -> None:
        """Drop the recorded values of tensors that a call has written and that cannot be replayed."""
        for tensor in written:
            memory = memories.of(tensor)
            if memory:
                memory.value = None


def _overwritten(func: Any, tensors: list[Tensor], written: list[Tensor]) -> Tensor | None:
    """Return the tensor whose whole memory a call overwrites without reading it, or None.

    Earlier calls on that memory need not be replayed.
    """
    if _name(func) not in OVERWRITES or len(written) != 1:
        return None

    target = written[0]
    memory = memories.of(target)
    if memory is None or not covers(View.of(target), memory):
        return None

    # The call reads the memory if another argument is a view of it.
    for tensor in tensors:
        if tensor is not target and memories.of(tensor) is memory:
            return None

    return target


def _name(func: Any) -> str:
    """Return `normal_` for `aten::normal_`."""
    return func._schema.name.split("::")[1]


def _is_alias(result: Any) -> bool:
    return result.alias_info is not None and result.alias_info.is_write


def _is_known(tensor: Tensor) -> bool:
    """Whether the tensor's value is recorded and can be replayed."""
    memory = memories.of(tensor)
    return memory is not None and memory.value is not None and (memory.empty or not memory.exposed)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return the content of a storage on the CPU, (bytes,) uint8."""
    return View(torch.uint8, (storage.nbytes(),), (1,), 0).tensor(storage).cpu()


def _is_device(leaf: Any, kind: str) -> bool:
    return isinstance(leaf, torch.device) and leaf.type == kind


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device == CPU and tensor.layout == torch.strided


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that a call writes into, by its schema."""
    written: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            # Schemas list all arguments in order, however they were passed.
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += tensors_in(value)

    return written


def _generator_in(args: Any, kwargs: Any) -> bool:
    return any(isinstance(value, torch.Generator) for value in [*args, *kwargs.values()])


def _without_memory(tree: Any) -> Any:
    """Return the arguments with all tensors and devices on the meta device."""

    def without(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.device.type == "meta":
                return leaf

            # The copy on the meta device stands for the same memory.
            storage = torch.UntypedStorage(leaf.untyped_storage().nbytes(), device="meta")
            memory = memories.of(leaf)
            if memory and memory.empty:
                memories.add(storage, memory)

            return View.of(leaf).tensor(storage)

        if isinstance(leaf, torch.device) and leaf.type not in ("cpu", "meta"):
            raise UserError(
                f"init=meta cannot be used: model() moves its weights to {leaf}",
                "they have no memory yet; each block is moved when it is initialised",
                "leave the move out of model(), or set init=host",
            )

        if isinstance(leaf, torch.Generator):
            return None  # kernels of the meta device accept no CPU generator

        return META if _is_device(leaf, "cpu") else leaf

    return tree_map(without, tree)
