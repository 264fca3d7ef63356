"""init=meta: construct a model without memory for its parameters, then initialise and shard it block by block.

So a model may be too large for any single rank. The weights equal those of init=host to the bit: the operations of the
constructor on its parameters are recorded while it runs (recording.py), and replayed for each parameter when its block
is initialised (replay.py). Buffers, and tensors that are plain attributes, are constructed as usual.
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
from lockstep.parallel.meta.replay import MemoryTrimmer, View, different_weights, is_unset
from lockstep.runtime.context import Runtime

# The memory for initialising one parameter may be this many times the size of the largest block: orthogonal_ needs four
# times the size of its weight. Less than SMALL_BYTES is always allowed.
MAX_BLOCKS_HELD = 4
SMALL_BYTES = 64 * 2**20


@contextmanager
def init_as_configured(config: RunConfig) -> Iterator[None]:
    """With init=meta, the parameters of models that are constructed inside the `with` block take no memory."""
    if config.init != "meta":
        yield
        return

    _check_strategy(config)
    with recording():
        yield


def _check_strategy(config: RunConfig) -> None:
    """Refuse init=meta for a strategy that does not shard block by block."""
    in_mesh = bool(config.mesh.tp or config.mesh.pp)
    if config.strategy_record.shards_parameters and not in_mesh:
        return

    # The strategy, the mesh, or both are in the way.
    mesh = " and a mesh" if in_mesh else ""
    remedy = "leave the mesh out, or set" if config.strategy_record.shards_parameters else "set strategy=fsdp, or"
    raise UserError(
        f"init=meta cannot be combined with strategy={config.strategy}{mesh}",
        "it initialises and shards one block after another, which needs fsdp without a mesh",
        f"{remedy} init=host",
    )


def check_init(model: nn.Module, config: RunConfig, trained: bool = True) -> None:
    """Check that the model was constructed as `init` says. (In a custom loop, the user constructs it.)

    A model that is not `trained` is held in full by every rank, and may already have its weights.
    """
    # init=host needs memory behind every parameter.
    kind = type(model).__name__
    if config.init != "meta":
        if any(p.is_meta for p in model.parameters()):
            raise UserError(
                f"init=host cannot be used: {kind} was constructed on the meta device and has no weights",
                "",
                "set init=meta, and construct it in `with run.init_module():`",
            )

        return

    _check_strategy(config)

    # Every parameter must have a recorded value, and no other.
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise UserError(
                f"init=meta cannot be used: {name!r} of {kind} has no shape before its first forward",
                "",
                "give the module its size, or set init=host",
            )

        if not p.is_meta and trained:
            raise UserError(
                f"init=meta cannot be used: {kind} already has weights",
                f"{name!r} is on {p.device}",
                "construct it in `with run.init_module():`, or set init=host",
            )

        if p.is_meta and not memories.is_empty(p):
            raise different_weights(
                f"{name!r} of {kind} was constructed on the meta device, so that its initialisation was not recorded",
                "construct it in `with run.init_module():` instead of `with torch.device('meta'):`",
            )


def fill_model(
    model: nn.Module, blocks: Iterable[nn.Module], shard: Callable[[nn.Module], Any], runtime: Runtime
) -> None:
    """Initialise the weights of `model`, and `shard` each block as soon as it is initialised."""
    filling = _Filling({id(block) for block in blocks}, shard)

    # Check first, because initialising a large model takes long.
    filling.check(model)
    filling.fill(model, "")
    memories.drop_unused()

    # init=host would broadcast rank 0's weights. Here, all ranks must initialise the same weights.
    digests = runtime.collectives.all_gather_json(filling.digest)
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise different_weights(
            f"model() gives rank {differing[0]} different weights than rank 0",
            "construct the same model on every rank",
        )


@dataclass
class _Filling:
    """Initialises the modules, children before parents.

    At any time, host memory holds at most the full tensors of one block, the tensors outside the blocks, and the
    temporary tensors for one parameter.
    """

    blocks: set[int]  # ids of modules
    shard: Callable[[nn.Module], Any]
    digest: int = 0  # digest of all weights so far
    # (empty tensor, initialised tensor), by the id of the empty one, so that tied parameters stay tied. Holding the
    # empty tensor ensures that its id is not reused.
    _filled: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)  # ids of modules
    _trimmer: MemoryTrimmer = field(default_factory=MemoryTrimmer)

    def check(self, model: nn.Module) -> None:
        """Refuse a parameter whose initialisation needs too many other tensors in memory at once."""
        # Bytes of each block, and of everything outside the blocks together.
        inside = [sum(map(_nbytes, m.parameters())) for m in model.modules() if id(m) in self.blocks]
        largest = max([sum(map(_nbytes, model.parameters())) - sum(inside), *inside])
        limit = max(MAX_BLOCKS_HELD * largest, SMALL_BYTES)

        for name, p in model.named_parameters():
            peak = memories.recipe(p).peak
            if peak > limit:
                raise UserError(
                    f"init=meta cannot initialise {name!r} without many other weights",
                    f"model() computes it from {peak >> 20} MiB, but the largest block has only {largest >> 20} MiB",
                    "initialise each block independently of the others, or set init=host",
                )

    def fill(self, module: nn.Module, name: str) -> None:
        """Initialise a module and everything inside it. `name` is its name in the model, for errors."""
        # A module may occur at several places of the model.
        if id(module) in self._done:
            return

        self._done.add(id(module))

        for child_name, child in module.named_children():
            self.fill(child, f"{name}.{child_name}" if name else child_name)

        self._fill_own(module, name)

        # Drop our references to the block's full tensors, so that sharding frees them.
        if id(module) in self.blocks:
            inside = {id(p) for p in module.parameters()}
            self._filled = {
                key: (empty, filled) for key, (empty, filled) in self._filled.items() if id(filled) not in inside
            }
            self.shard(module)

    def _fill_own(self, module: nn.Module, name: str) -> None:
        """Initialise the tensors of a module itself: parameters, buffers and plain attributes."""
        own = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
            *((key, value) for key, value in vars(module).items() if isinstance(value, Tensor)),
        ]
        for key, empty in own:
            # It has its values already: a buffer, for example.
            if not memories.is_empty(empty):
                continue

            if id(empty) not in self._filled:
                full_name = f"{name}.{key}" if name else key
                self._filled[id(empty)] = empty, self._initialise(empty, full_name)

            # Not `module._parameters[key] = ...`: recurrent modules also keep their weights in a list.
            setattr(module, key, self._filled[id(empty)][1])

    def _initialise(self, empty: Tensor, name: str) -> Tensor:
        """Return the tensor that replaces an empty one, with its values. Errors call it `name`."""
        recipe = memories.recipe(empty)

        # On the CPU, so that the device need not hold even one full block.
        tensor = recipe.make(View.of(empty))
        if recipe.may_be_unset and is_unset(tensor):
            raise UserError(
                f"init=meta cannot initialise {name!r}: model() leaves some of its elements uninitialised",
                "their values would be arbitrary",
                "set all of them in the constructor",
            )

        self._trimmer.add(recipe.peak)

        # All ranks compare their digests at the end, see `fill_model`.
        content = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        self.digest = zlib.crc32(content, self.digest)  # pyrefly: ignore[bad-argument-type]

        if isinstance(empty, nn.Parameter):
            tensor = nn.Parameter(tensor, empty.requires_grad)
            tensor.__dict__.update(empty.__dict__)  # attributes that the user set on the parameter

        return tensor


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
