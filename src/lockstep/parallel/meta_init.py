"""init=meta: construct a model without memory for its parameters, then initialise and shard it block by block.

This allows models that no single rank could hold. Buffers, and tensors that are plain attributes, stay as their
constructors make them.

Parameters are set by the `reset_parameters()` of their modules, as full tensors in host memory, children before
parents: the order in which constructors draw their random numbers. So a model whose constructors only make modules
starts with the same bits as without init=meta, on any number of ranks. Anything else that a constructor does to
parameters (`self.apply(init)`, say) would be lost, and is refused unless a `reset_parameters()` also does it. So is a
model() that seeds a generator or converts its weights afterwards. One that draws random numbers for its buffers starts
with others than without init=meta, and the banner says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.runtime.context import Runtime
from lockstep.runtime.seeds import derive, seed_torch


def make_model(make: Callable[[], nn.Module], config: RunConfig) -> nn.Module:
    """Return `make()`; with init=meta its parameters take no memory."""
    if config.init != "meta":
        return make()

    _check_strategy(config)
    construction = _Construction(torch.initial_seed(), torch.get_rng_state(), _host_generators())
    with _parameters_on_meta(construction):
        model = make()

    construction.finish(model)
    _constructions[model] = construction
    return model


class _CountedWrites(TorchDispatchMode):
    """Counts what is written to the memory of some tensors, under any of its names: `p`, `p.data`, a view."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[int, int] = {}
        self.seeds: set[int] = set()  # of torch's generator, at every write

    def watch(self, tensor: Tensor) -> None:
        self._counts[_memory(tensor)] = 0  # another tensor may have been there before

    def count(self, tensor: Tensor) -> int:
        return self._counts.get(_memory(tensor), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and isinstance(value, Tensor) and _memory(value) in self._counts:
                    self._counts[_memory(value)] += 1
                    self.seeds.add(torch.initial_seed())

        return func(*args, **(kwargs or {}))


class _Made(NamedTuple):
    """A parameter on the meta device, as its module registered it."""

    empty: nn.Parameter
    dtype: torch.dtype
    memory: int
    sample: Tensor  # of its values at that moment


@dataclass(eq=False)
class _Construction:
    """What model() did with empty parameters that `fill` must do again, in the same order."""

    torch_seed: int  # before model(), as the states of the generators
    torch_state: Tensor
    host_before: Any
    host_after: Any = None
    draws: bool = False  # model() draws from torch's generator for something else than parameters
    order: dict[int, int] = field(default_factory=dict)  # by the id of a module: when it got its first parameter
    written: dict[int, int] = field(default_factory=dict)  # by the id of a parameter: how often it was written
    values: dict[int, Tensor] = field(default_factory=dict)  # by the id of a parameter: a sample of what it starts with
    made: list[_Made] = field(default_factory=list)
    writes: _CountedWrites = field(default_factory=_CountedWrites)

    def finish(self, model: nn.Module) -> None:
        """Check what would give other weights than init=host, and keep what `fill` needs."""
        self.host_after = _host_generators()
        names = {id(p): name for name, p in model.named_parameters()}
        for empty, dtype, memory, _ in self.made:
            if id(empty) in names and (empty.dtype != dtype or _memory(empty) != memory):
                how = f"converts it from {dtype} to {empty.dtype}" if empty.dtype != dtype else "replaces its data"
                raise _other_weights(
                    f"model() makes {names[id(empty)]!r} and later {how}",
                    "make it as it should be: with dtype=..., or after torch.set_default_dtype(...)",
                )

        if {torch.initial_seed(), *self.writes.seeds} != {self.torch_seed}:
            raise _other_weights(
                "model() seeds torch's generator (torch.manual_seed)",
                "leave that out of model(), and type seed=... for other weights",
            )

        # Nothing is drawn for a parameter on the meta device.
        self.draws = not torch.equal(torch.get_rng_state(), self.torch_state)
        # A parameter that is never written keeps the values that it came with. Random ones cannot be drawn again.
        kept = [made for made in self.made if id(made.empty) in names]
        self.written = {id(made.empty): self.writes.count(made.empty) for made in kept}
        unwritten = [made for made in kept if not self.written[id(made.empty)]]
        self.values = {id(made.empty): made.sample for made in unwritten if not self.draws or _is_constant(made.sample)}
        self.made.clear()


_constructions: WeakKeyDictionary[nn.Module, _Construction] = WeakKeyDictionary()


@contextmanager
def _parameters_on_meta(construction: _Construction) -> Iterator[None]:
    """Move each parameter to the meta device as soon as a module registers it."""
    # Keyed by the original, compared by identity: a parameter that two modules share stays one.
    empty = WeakTensorKeyDictionary()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        construction.order.setdefault(id(module), len(construction.order))
        if parameter.is_meta or is_lazy(parameter):
            return None

        if parameter not in empty:
            empty[parameter] = made = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            construction.made.append(_Made(made, made.dtype, _memory(made), _sample(parameter)))
            construction.writes.watch(made)
        return empty[parameter]

    with register_module_parameter_registration_hook(to_meta), construction.writes:  # pyrefly: ignore[bad-argument-type]
        yield


def _check_strategy(config: RunConfig) -> None:
    in_mesh = bool(config.mesh.tp or config.mesh.pp)
    if config.strategy_record.shards_parameters and not in_mesh:
        return

    mesh = " and a mesh" if in_mesh else ""
    remedy = "leave the mesh out, or type" if config.strategy_record.shards_parameters else "type strategy=fsdp, or"
    raise UserError(
        f"init=meta with strategy={config.strategy}{mesh} is not possible",
        "the ranks hold full layers, or shard them in another way, and would need the weights first",
        f"{remedy} init=host",
    )


def check_made_as_asked(model: nn.Module, config: RunConfig) -> None:
    """Check that the model matches `init`: users who write their own loop construct it themselves."""
    on_meta = [p.is_meta for p in model.parameters()]
    if config.init == "meta":
        _check_strategy(config)
        if not all(on_meta):
            raise UserError(
                f"init=meta cannot be used: {type(model).__name__} already has weights",
                "",
                "make it in `with torch.device('meta'):`, or type init=host",
            )
        if model not in _constructions:
            _check_made_by_hand(model, config)
    elif any(on_meta):
        raise UserError(
            f"init=host cannot be used: {type(model).__name__} was made on the meta device and has no weights",
            "",
            "type init=meta",
        )


def _check_made_by_hand(model: nn.Module, config: RunConfig) -> None:
    """Check what shows that a loop of the user's own would start from other weights than with init=host."""
    for name, p in model.named_parameters():
        if p.is_floating_point() and p.dtype != torch.get_default_dtype():
            raise _other_weights(
                f"{name!r} is in {p.dtype}, and torch makes weights in {torch.get_default_dtype()}: it may have been "
                "drawn as such, or converted after that, and on the meta device this cannot be seen",
                f"call torch.set_default_dtype({p.dtype}) before the model is made, and convert nothing",
            )

    seeded = torch.Generator().manual_seed(derive(config.seed, "init"))
    if not torch.equal(torch.get_rng_state(), seeded.get_state()):
        raise _other_weights(
            "between lockstep.start(...) and run.setup(...) the script seeds torch's generator (torch.manual_seed), or "
            "draws from it",
            "do that before lockstep.start(...), or use a torch.Generator of your own; seed=... gives other weights",
        )


def fill(
    model: nn.Module, blocks: Iterable[nn.Module], shard: Callable[[nn.Module], Any], seed: int, runtime: Runtime
) -> dict[str, str]:
    """Give `model` its weights, the same on every rank, and `shard` each block as soon as it is initialised.

    Returns a banner line if they cannot be those of init=host.
    """
    # The same seed as before a constructor, so that the same numbers are drawn.
    seed_torch(derive(seed, "init"), runtime.device)
    # Before any memory is allocated: initialising a large model takes too long to fail late.
    _check_can_be_filled(model)

    construction = _constructions.pop(model, None)
    filling = _Filling({id(block) for block in blocks}, shard, construction)
    with _same_host_numbers(construction) if construction else nullcontext():
        filling.fill(model, "")
        filling.finish(model)

    other = "model() draws random numbers outside of reset_parameters(), so they are not those of init=host"
    return {"init": f"meta: {other}"} if construction and construction.draws else {}


@contextmanager
def _same_host_numbers(construction: _Construction) -> Iterator[None]:
    """Let each reset_parameters() draw again what it drew in model() from numpy and random."""
    if construction.host_after == construction.host_before:
        yield
        return

    _set_host_generators(construction.host_before)
    yield
    if _host_generators() != construction.host_after:
        raise _other_weights(
            "model() draws from numpy or random outside of reset_parameters(), or seeds them",
            "leave that out of model(), or draw from a generator of your own",
        )


class _FilledParameter(NamedTuple):
    """A parameter with memory, and the empty one that it replaces."""

    module_name: str
    module: nn.Module
    name: str  # in the module
    empty: nn.Parameter
    full: nn.Parameter
    version: int  # of `full` when it was made: torch counts in-place changes


@dataclass
class _Filling:
    """Walks through the modules, children before parents.

    Host memory never holds more full tensors than those of one block and of everything outside the blocks.
    """

    blocks: set[int]  # ids of modules
    shard: Callable[[nn.Module], Any]
    construction: _Construction | None  # None: in a loop of the user's own
    # Keyed by the id of the empty parameter, which the value keeps alive: tied parameters stay tied.
    _filled: dict[int, _FilledParameter] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)  # ids of modules
    _sharded: list[nn.Parameter] = field(default_factory=list)
    _writes: _CountedWrites = field(default_factory=_CountedWrites)

    def fill(self, module: nn.Module, name: str) -> None:
        if id(module) in self._done:
            return

        self._done.add(id(module))

        # Children first, as constructors do: a parent's reset may change what they drew.
        for child_name, child in sorted(module.named_children(), key=self._when):
            self.fill(child, f"{name}.{child_name}" if name else child_name)

        self._fill_own(module, name)

        # The block's full tensors are not needed any more.
        if id(module) in self.blocks:
            self.finish(module)
            self.shard(module)
            self._sharded += module.parameters()

    def _when(self, child: tuple[str, nn.Module]) -> int:
        """Return when a child was made, which need not be when it was assigned."""
        order = self.construction.order if self.construction else {}
        return min((order[id(m)] for m in child[1].modules() if id(m) in order), default=-1)

    def finish(self, module: nn.Module) -> None:
        """Check the parameters inside `module` and drop their records so that sharding frees the full tensors."""
        inside = {id(p) for p in module.parameters()}
        for key in [key for key, record in self._filled.items() if id(record.full) in inside]:
            record = self._filled.pop(key)
            # torch counts in-place changes on meta as well: the constructor must not have made more of them.
            # It does not count those through `p.data`, which `_writes` does.
            missing = record.full._version - record.version < record.empty._version
            written = self.construction.written.get(key, 0) if self.construction else 0
            if missing or self._writes.count(record.full) < written:
                raise _not_filled(
                    record.module_name,
                    record.module,
                    f"does not set {record.name} as a constructor does, which changes it once more",
                    "do that in it, or in a reset_parameters() of its block",
                )

            expected = self.construction.values.get(key) if self.construction else None
            if expected is not None and not torch.equal(_sample(record.full), expected):
                raise _not_filled(
                    record.module_name,
                    record.module,
                    f"does not give {record.name} the values that model() gives it",
                    "set them in a reset_parameters() of the module that assigns it",
                )

    def _fill_own(self, module: nn.Module, name: str) -> None:
        reset = _reset_of(module)
        if reset is None:
            return

        tied, blank = self._allocate(module, name)

        # Sharded blocks must not be set any more: their full tensors are gone.
        versions = [p._version for p in self._sharded]
        with self._writes:
            reset()

        # The reset drew tied parameters again, as the constructor did; the earlier values count.
        for tensor, value in tied:
            tensor.detach().copy_(value)

        if versions != [p._version for p in self._sharded]:
            raise _not_filled(name, module, "sets blocks that have been sharded already", "set them in the blocks' own")

        unset = [key for key in blank if _is_blank(getattr(module, key))]
        if unset:
            raise _not_filled(name, module, f"leaves {', '.join(unset)} unset", f"set {unset[0]} in it")

    def _allocate(self, module: nn.Module, name: str) -> tuple[list[tuple[nn.Parameter, Tensor]], list[str]]:
        """Allocate memory for the module's own parameters and buffers.

        Returns the parameters that an earlier module already set, with their values, and the names of all
        parameters and buffers that had no memory.
        """
        tied = []
        blank = list(_own_empty(module))
        for key, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            # Two modules share the parameter, and the first one set it.
            if record := self._filled.get(id(old)):
                new = record.full
                tied.append((new, new.detach().clone()))
            else:
                # In host memory: the device need not hold even one full block.
                new = nn.Parameter(_blank_like(old), old.requires_grad)
                self._writes.watch(new)
                self._filled[id(old)] = _FilledParameter(name, module, key, old, new, new._version)

            setattr(module, key, new)  # not into `_parameters`: recurrent modules also keep them in a list

        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, key, _blank_like(buffer))

        return tied, blank


def _check_can_be_filled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        own = _own_empty(module)
        lost = [key for key, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]

        # A bool has no value that could mark it as blank.
        lost += [key for key, value in own.items() if value.dtype == torch.bool]

        if lost:
            raise _not_filled(name, module, f"keeps {lost[0]}, which is made in its constructor", "make it in forward")
        if own and _reset_of(module) is None:
            raise _not_filled(name, module, "has none", f"write one that sets {', '.join(own)}")


def _own_empty(module: nn.Module) -> dict[str, Tensor]:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {name: tensor for name, tensor in own if tensor.is_meta}


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """Return `reset_parameters`; torch's attention has it under a private name."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _blank_like(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory, filled with a value that no initialisation sets."""
    inexact = tensor.is_floating_point() or tensor.is_complex()
    return torch.full_like(tensor, torch.nan if inexact else torch.iinfo(tensor.dtype).min, device="cpu")


def _is_blank(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())

    return bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _memory(tensor: Tensor) -> int:
    """Return a number for the memory of a tensor, which exists on the meta device as well."""
    return tensor.untyped_storage()._cdata


def _sample(tensor: Tensor) -> Tensor:
    """Return up to 64 values: reading all of a large tensor that is never written would cost its memory."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // 64)].clone()


def _is_constant(values: Tensor) -> bool:
    return bool((values == values[:1]).all())


def _host_generators() -> Any:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, tuple(keys), *rest)


def _set_host_generators(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _other_weights(found: str, fix: str) -> UserError:
    return UserError("init=meta would start from other weights than init=host", found, f"{fix}; or type init=host")


def _not_filled(name: str, module: nn.Module, problem: str, fix: str) -> UserError:
    kind = f"{type(module).__name__} ({name})" if name else type(module).__name__
    return UserError(
        f"init=meta cannot initialise {kind}: its reset_parameters() must set all its weights",
        f"{kind} {problem}",
        f"{fix}; or type init=host",
    )
