"""Runs a constructor with parameters that take no memory, and records how they would get their values.

Everything is as on the host: what a parameter is asked for (its device, one of its numbers), and every random number
that is drawn. So a constructor cannot tell the difference, and the generators move as they would.
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
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.errors import UserError
from lockstep.parallel.meta.replay import (
    CPU,
    Call,
    Freed,
    Memory,
    Operand,
    OwnGenerator,
    Place,
    Recipe,
    Value,
    covers,
    is_leaf,
    other_weights,
    sample_of,
    tensors_in,
)

META = torch.device("meta")
# Numbers from outside of torch cannot be made again: they are kept until the parameters are made.
MAX_KEPT_BYTES = 64 * 2**20

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
OVERWRITES = {
    "normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "exponential_", "log_normal_", "cauchy_",
    "geometric_", "bernoulli_", "_foreach_zero_", "_foreach_copy_",
}  # fmt: skip


# Over all recordings: a model may use tensors of another one.
_numbers = itertools.count()


class Memories:
    """What is known of the memory of tensors."""

    def __init__(self) -> None:
        # By torch's own address of the memory, which is not used again while a weak reference exists.
        self._known: dict[int, tuple[StorageWeakRef, Memory]] = {}

    def add(self, storage: torch.UntypedStorage, memory: Memory) -> Memory:
        self._known[storage._cdata] = StorageWeakRef(storage), memory
        return memory

    def of(self, tensor: Tensor) -> Memory | None:
        if tensor.layout != torch.strided:
            return None
        known = self._known.get(tensor.untyped_storage()._cdata)
        return known[1] if known else None

    def is_empty(self, tensor: Tensor) -> bool:
        """Whether a tensor has a value, but no memory."""
        memory = self.of(tensor)
        return memory is not None and memory.empty

    def recipe(self, tensor: Tensor) -> Recipe:
        memory = self.of(tensor)
        assert memory is not None
        assert memory.value is not None
        return Recipe(memory.value)

    def drop_unused(self) -> None:
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}


memories = Memories()


@contextmanager
def recording() -> Iterator[None]:
    """Move each parameter to the meta device as soon as a module registers it, and record what happens to it."""
    memories.drop_unused()
    recorder = _Recorder()
    # Keyed by the original, compared by identity: a parameter that two modules share stays one.
    empty = WeakTensorKeyDictionary()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if is_lazy(parameter):
            return None
        with torch._C.DisableTorchFunction(), recorder.paused():
            if parameter.is_meta:
                return None
            if parameter not in empty:
                empty[parameter] = recorder.emptied(parameter)
            return empty[parameter]

    hook = register_module_parameter_registration_hook(to_meta)  # pyrefly: ignore[bad-argument-type]
    try:
        with hook, recorder, _AsOnHost():
            yield
        recorder.check_seen()
    except UserError:
        raise
    except Exception as error:
        error.add_note("lockstep: with init=meta, parameters have no memory while the model is made; try init=host")
        raise


class _AsOnHost(TorchFunctionMode):
    """Lets parameters without memory say that they are on the CPU: functions of torch.nn.init ask, and do nothing."""

    ANSWERS = {"is_meta": False, "is_cpu": True, "device": CPU}
    GETTERS = {getattr(Tensor, name).__get__: answer for name, answer in ANSWERS.items()}
    # These give a tensor's memory to others, who may write into it.
    SHOW = {Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.GETTERS and memories.is_empty(args[0]):
            return self.GETTERS[func]
        if func in self.SHOW and (memory := memories.of(args[0])):
            memory.seen = True
        # torch would make a tensor of the number on the meta device, where it is lost.
        if func is Tensor.__setitem__ and isinstance(args[2], int | float | complex) and memories.is_empty(args[0]):
            args = *args[:2], torch.tensor(args[2], dtype=args[0].dtype, device=CPU)
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Notes every call that makes or changes a tensor; those on empty tensors are only noted."""

    def __init__(self) -> None:
        super().__init__()
        self._kept_bytes = 0
        self._freed = Freed()
        self._paused = False
        self._left: list[tuple[torch.UntypedStorage, Memory]] = []  # by parameters, and seen by others than torch

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def emptied(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a parameter without memory that stands for one with memory."""
        self._freed.add(self._empty(parameter).nbytes)
        made = nn.Parameter(_without_memory(parameter), parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        return made

    def _empty(self, tensor: Tensor) -> Memory:
        memory = self._operand(tensor, crosses=True).memory
        if memory.seen and not memory.empty:
            self._left.append((tensor.untyped_storage(), memory))
        memory.empty = True
        return memory

    def check_seen(self) -> None:
        """Refuse what others than torch have written into a parameter's memory: the parameter has left it by then."""
        for storage, memory in self._left:
            if memory.kept is not None and not torch.equal(_bytes_of(storage), memory.kept):
                raise other_weights(
                    "model() changes a parameter by something else than torch's functions (numpy, for example) after a "
                    "module has it",
                    "change it before that, or with torch",
                )
            memory.kept = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {})) if self._paused else self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        to_meta = any(_is_device(argument, "meta") for argument in [*args, *kwargs.values()])
        if not to_meta and not any(memories.is_empty(tensor) for tensor in tensors):
            return self._on_host(func, args, kwargs, tensors)
        if _name(func).startswith("_foreach_") and len(args[0]) > 1:
            return self._each(func, args, kwargs)

        if _name(func) == "set_":
            # The tensor moves to another memory, which has its own value.
            for tensor in tensors[1:]:
                self._empty(tensor)
            return func(*_without_memory(args), **kwargs)

        written = _written(func, args, kwargs)
        reads_numbers = not written and not any("Tensor" in str(result.type) for result in func._schema.returns)
        if reads_numbers or not all(memories.is_empty(tensor) for tensor in written):
            result = func(*self._real(args), **self._real(kwargs))
            self._forget(written)
            return result

        return self._on_meta(func, args, kwargs, written)

    def _on_host(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Run a call between tensors that have memory. A parameter may be made of its results."""
        # What torch has not made cannot be made again, nor what follows from it.
        repeatable = func.namespace in ("aten", "prims") and all(_is_known(tensor) for tensor in tensors)
        written = _written(func, args, kwargs)
        call = self._noted(func, args, kwargs, written) if repeatable else None
        result = func(*args, **kwargs)
        if call:
            self._keep(call, written, result)
        else:
            self._forget(written)
        return result

    def _on_meta(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        """Note a call on tensors without memory, and return what has the shape of its result."""
        if _name(func).startswith("resize"):
            raise other_weights("model() resizes a parameter", "make it as it should be")

        call = self._noted(func, args, kwargs, written)
        if call.state is not None or _generator_in(args, kwargs):
            self._draw(func, args, kwargs, written)

        # What only changes numbers has nothing to do; its result is what it changes.
        returns = func._schema.returns
        if written and torch.Tag.inplace_view not in func.tags and all(_is_alias(result) for result in returns):
            result = written[0] if len(returns) == 1 else tuple(written[: len(returns)]) or None
        else:
            try:
                result = func(*_without_memory(args), **_without_memory(kwargs))
            except (NotImplementedError, RuntimeError):
                # The shape of the result follows from numbers: nonzero, unique, ...
                if written or call.state is not None:
                    raise
                return func(*self._real(args), **self._real(kwargs))

        self._keep(call, written, result, empty=True)
        return result

    def _each(self, func: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
        """Note a call for many tensors as one for each: no parameter may need all others."""
        count = len(args[0])
        results: list[Tensor] = []
        for i in range(count):

            def one(argument: Any, i: int = i) -> Any:
                return [argument[i]] if isinstance(argument, list | tuple) and len(argument) == count else argument

            part = self._call(func, tuple(map(one, args)), {key: one(value) for key, value in kwargs.items()})
            results += part or []
        return results or None

    def _draw(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> None:
        """Draw what a call would draw, so that the generator moves on."""
        tensors = tensors_in((args, kwargs))
        self._freed.add(sum(tensor.nbytes for tensor in tensors))
        if len(tensors) == 1 and written:
            real = torch.empty_strided(tensors[0].shape, tensors[0].stride(), dtype=tensors[0].dtype)
            args, kwargs = tree_map(lambda leaf: real if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            func(*args, **kwargs)
        else:
            func(*self._real(args), **self._real(kwargs))

    def _real(self, tree: Any) -> Any:
        """Give empty tensors among the arguments their numbers."""

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and memories.is_empty(leaf):
                recipe = memories.recipe(leaf)
                self._freed.add(recipe.peak)
                return recipe.make(Place.of(leaf))
            return CPU if _is_device(leaf, "meta") else leaf

        return tree_map(real, tree)

    def _noted(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Call:
        crosses = any(memories.is_empty(tensor) for tensor in tensors_in((args, kwargs)))
        overwritten = None
        if _name(func) in OVERWRITES and len(written) == 1 and (memory := memories.of(written[0])):
            others = [t for t in tensors_in((args, kwargs)) if t is not written[0]]
            if covers(Place.of(written[0]), memory) and all(memories.of(t) is not memory for t in others):
                overwritten = written[0]

        def noted(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                operand = self._operand(leaf, crosses)
                return operand._replace(value=None) if leaf is overwritten else operand
            if isinstance(leaf, torch.Generator):
                return OwnGenerator(leaf.get_state())
            return CPU if _is_device(leaf, "meta") else leaf

        # Before the call: it may change what it reads, and moves the generator.
        own = _generator_in(args, kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags and not own
        args, kwargs = tree_map(noted, (args, kwargs))
        call = Call(next(_numbers), func, args, kwargs, torch.get_rng_state() if draws else None)
        call.unset = _name(func) in ALLOCATIONS
        tree_map(lambda leaf: call.operands.append(leaf) if is_leaf(leaf) else None, (args, kwargs), is_leaf=is_leaf)
        call.operands = [operand for operand in call.operands if isinstance(operand, Operand)]
        return call

    def _operand(self, tensor: Tensor, crosses: bool) -> Operand:
        """Return how to get a tensor's numbers again. `crosses`: from real memory into what is made again later."""
        if tensor.is_conj() or tensor.is_neg():
            raise other_weights("model() initialises weights by conjugated views", "call resolve_conj() on them")

        memory = memories.of(tensor)
        if memory is None or memory.value is None or not _is_known(tensor):
            memory = self._kept(tensor)
        elif crosses and not memory.empty and not Recipe(memory.value).may_be_unset:
            memory.value.samples.append((Place.of(tensor), sample_of(tensor)))
        return Operand(memory, memory.value, Place.of(tensor))

    def _kept(self, tensor: Tensor) -> Memory:
        """Keep the numbers of a tensor that torch's functions have not made."""
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":
            raise other_weights(
                f"model() uses a tensor of shape {list(tensor.shape)} on the meta device, which has no numbers",
                "make it on the CPU",
            )

        memory = memories.of(tensor) or memories.add(storage, Memory(storage.nbytes(), seen=True))
        if memory.value and memory.kept is not None and torch.equal(_bytes_of(storage), memory.kept):
            return memory

        self._kept_bytes += storage.nbytes()
        if self._kept_bytes > MAX_KEPT_BYTES:
            raise UserError(
                f"init=meta would have to keep more than {MAX_KEPT_BYTES >> 20} MiB of the weights on every rank",
                f"model() makes {list(tensor.shape)} numbers by other means than torch's functions (numpy, a file), "
                "and they cannot be made again when they are needed",
                "draw them with torch, load them as a checkpoint, or type init=host",
            )

        numbers = memory.kept = _bytes_of(storage).clone()
        call = Call(next(_numbers), numbers.clone, (), {}, results=[(0, memory, Place.of(numbers))])
        memory.value = Value(memory, call)
        call.values = [memory.value]
        return memory

    def _keep(self, call: Call, written: list[Tensor], result: Any, empty: bool = False) -> None:
        """Note what a call has made and changed."""
        for number, tensor in enumerate(tensors_in(result)):
            if (empty or _is_on_cpu(tensor)) and memories.of(tensor) is None:
                storage = tensor.untyped_storage()
                memory = memories.add(storage, Memory(storage.nbytes(), empty=empty))
                memory.value = Value(memory, call)
                call.results.append((number, memory, Place.of(tensor)))
                call.values.append(memory.value)

        for memory in {memories.of(tensor) for tensor in written}:
            assert memory is not None
            memory.value = Value(memory, call)
            call.values.append(memory.value)

    def _forget(self, written: list[Tensor]) -> None:
        for tensor in written:
            if memory := memories.of(tensor):
                memory.value = None


def _name(func: Any) -> str:
    return func._schema.name.split("::")[1]


def _is_alias(result: Any) -> bool:
    return result.alias_info is not None and result.alias_info.is_write


def _is_known(tensor: Tensor) -> bool:
    memory = memories.of(tensor)
    return memory is not None and memory.value is not None and (memory.empty or not memory.seen)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return Place(torch.uint8, (storage.nbytes(),), (1,), 0).tensor(storage).cpu()


def _is_device(leaf: Any, kind: str) -> bool:
    return isinstance(leaf, torch.device) and leaf.type == kind


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device == CPU and tensor.layout == torch.strided


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def _generator_in(args: Any, kwargs: Any) -> bool:
    return any(isinstance(value, torch.Generator) for value in [*args, *kwargs.values()])


def _without_memory(tree: Any) -> Any:
    """Return arguments for a call on the meta device."""

    def without(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.device.type == "meta":
                return leaf
            memory, storage = memories.of(leaf), torch.UntypedStorage(leaf.untyped_storage().nbytes(), device="meta")
            if memory and memory.empty:
                memories.add(storage, memory)
            return Place.of(leaf).tensor(storage)
        if isinstance(leaf, torch.device) and leaf.type not in ("cpu", "meta"):
            raise UserError(
                f"init=meta cannot be used: model() moves its weights to {leaf}",
                "they have no memory yet; each block is moved when it is made",
                "leave that out of model(), or type init=host",
            )
        return META if _is_device(leaf, "cpu") else None if isinstance(leaf, torch.Generator) else leaf

    return tree_map(without, tree)
