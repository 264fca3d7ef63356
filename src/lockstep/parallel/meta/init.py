"""init=meta: construct a model without memory for its parameters, then initialise and shard it block by block.

This allows models that no single rank could hold. The weights are those of init=host, to the bit: what a constructor
does to its parameters is recorded while it runs (recording.py), and done again for each of them when its block is due
(replay.py). Buffers, and tensors that are plain attributes, stay as their constructors make them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.meta.recording import memories, recording
from lockstep.parallel.meta.replay import Freed, Place, is_unset, other_weights
from lockstep.runtime.context import Runtime

# What one parameter needs while it is made, in sizes of the largest block: orthogonal_ takes four times its weight.
MAX_BLOCKS_HELD = 4
SMALL_BYTES = 64 * 2**20


@contextmanager
def model_made_as_asked(config: RunConfig) -> Iterator[None]:
    """With init=meta, parameters of models that are made inside take no memory."""
    if config.init != "meta":
        yield
        return

    _check_strategy(config)
    with recording():
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


def check_made_as_asked(model: nn.Module, config: RunConfig, trained: bool = True) -> None:
    """Check that the model matches `init`: users who write their own loop construct it themselves.

    One that is not trained is held in full by every rank, and may have its weights already.
    """
    kind = type(model).__name__
    if config.init != "meta":
        if any(p.is_meta for p in model.parameters()):
            raise UserError(
                f"init=host cannot be used: {kind} was made on the meta device and has no weights",
                "",
                "type init=meta, and make it in `with run.init_module():`",
            )
        return

    _check_strategy(config)
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise UserError(
                f"init=meta cannot be used: {name!r} of {kind} has no shape before its first forward",
                "",
                "give the module its size, or type init=host",
            )
        if not p.is_meta and trained:
            raise UserError(
                f"init=meta cannot be used: {kind} already has weights",
                f"{name!r} is on {p.device}",
                "make it in `with run.init_module():`, or type init=host",
            )
        if p.is_meta and not memories.is_empty(p):
            raise other_weights(
                f"{name!r} of {kind} was made on the meta device, where nobody sees what its constructor does",
                "make it in `with run.init_module():` instead of `with torch.device('meta'):`",
            )


def fill(model: nn.Module, blocks: Iterable[nn.Module], shard: Callable[[nn.Module], Any], runtime: Runtime) -> None:
    """Give `model` its weights, and `shard` each block as soon as it has them."""
    filling = _Filling({id(block) for block in blocks}, shard)
    # Before any memory is allocated: initialising a large model takes too long to fail late.
    filling.check(model)
    filling.fill(model, "")
    memories.drop_unused()

    # init=host takes those of rank 0.
    digests = runtime.collectives.gather_json(filling.digest)
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise other_weights(
            f"model() gives rank {others[0]} other weights than rank 0",
            "let it depend on nothing but its configuration",
        )


@dataclass
class _Filling:
    """Walks through the modules, children before parents.

    Host memory never holds more full tensors than those of one block and of everything outside the blocks, and what
    one parameter needs while it is made.
    """

    blocks: set[int]  # ids of modules
    shard: Callable[[nn.Module], Any]
    digest: int = 0  # of all weights so far
    # Keyed by the id of the empty tensor, which the value keeps alive: tied parameters stay tied.
    _filled: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)  # ids of modules
    _freed: Freed = field(default_factory=Freed)

    def check(self, model: nn.Module) -> None:
        """Check that no parameter follows from so many others that they would not fit."""
        inside = [sum(map(_nbytes, m.parameters())) for m in model.modules() if id(m) in self.blocks]
        largest = max([sum(map(_nbytes, model.parameters())) - sum(inside), *inside])
        limit = max(MAX_BLOCKS_HELD * largest, SMALL_BYTES)
        for name, p in model.named_parameters():
            peak = memories.recipe(p).peak
            if peak > limit:
                raise UserError(
                    f"init=meta cannot make {name!r} without many other weights",
                    f"model() computes it from {peak >> 20} MiB, and the largest block has {largest >> 20} MiB",
                    "initialise each block by itself, or type init=host",
                )

    def fill(self, module: nn.Module, name: str) -> None:
        if id(module) in self._done:
            return

        self._done.add(id(module))
        for child_name, child in module.named_children():
            self.fill(child, f"{name}.{child_name}" if name else child_name)
        self._fill_own(module, name)

        # Nothing may hold the block's full tensors any more, so that sharding frees them.
        if id(module) in self.blocks:
            inside = {id(p) for p in module.parameters()}
            self._filled = {key: filled for key, filled in self._filled.items() if id(filled[1]) not in inside}
            self.shard(module)

    def _fill_own(self, module: nn.Module, name: str) -> None:
        own = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
            *((key, value) for key, value in vars(module).items() if isinstance(value, Tensor)),
        ]
        for key, empty in own:
            if memories.is_empty(empty):
                if id(empty) not in self._filled:
                    self._filled[id(empty)] = empty, self._made(empty, f"{name}.{key}" if name else key)
                # Not into `_parameters`: recurrent modules also keep them in a list.
                setattr(module, key, self._filled[id(empty)][1])

    def _made(self, empty: Tensor, name: str) -> Tensor:
        recipe = memories.recipe(empty)
        # In host memory: the device need not hold even one full block.
        made = recipe.make(Place.of(empty))
        if recipe.may_be_unset and is_unset(made):
            raise UserError(
                f"init=meta cannot make {name!r}: model() leaves some of its numbers unset",
                "they would be whatever was in memory",
                "set all of them in the constructor",
            )

        self._freed.add(recipe.peak)
        numbers = made.contiguous().view(-1).view(torch.uint8).numpy()
        self.digest = zlib.crc32(numbers, self.digest)  # pyrefly: ignore[bad-argument-type]
        if isinstance(empty, nn.Parameter):
            made = nn.Parameter(made, empty.requires_grad)
            made.__dict__.update(empty.__dict__)
        return made


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
