"""What FSDP would lose of a model's forward: found in the first pass, and kept where that is possible.

FSDP gathers the parameters of a block for its forward, and again when the backward reaches a tensor that the block
returned. It passes copies of the containers that a block is given. So these would be lost, or end in a crash:

- a parameter that a module also keeps in a list: it stays full, and is not trained
- a change of a gathered parameter
- a change of a dictionary or list that a block was given
- a tensor that a block keeps and does not return: its backward reads parameters that have been freed

The last is gathered for if it is an attribute of one of the block's modules; that is looked for in every forward. All
else is an error in the first pass, and costs nothing in later ones.
"""

from __future__ import annotations

import dataclasses
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.fsdp import torch_private
from lockstep.runtime.autograd_graph import autograd_nodes

_autograd: Any = torch.autograd
# The types of most attributes: every forward goes through them, and `isinstance` takes several times as long.
NOT_TENSORS = frozenset({bool, int, float, str, dict, OrderedDict, set, list, tuple, type(None)})
Originals = Mapping[str, weakref.ref[nn.Parameter]]


class _Call(NamedTuple):
    """One forward of a module, in autograd's numbers: nodes are numbered as they are made, and the last runs first."""

    module: FSDPModule
    start: int
    end: int
    gathers: Sequence[int]  # the nodes before which FSDP gathers the module's parameters again


class ForwardChecks:
    """Watches the forwards of all sharded modules.

    The driver calls `begin_pass` before the first forward of each pass, `check_graph` before each backward, and
    `check_pass` after it.
    """

    def __init__(self, model: nn.Module, modules: Sequence[FSDPModule], originals: Originals, config: RunConfig):
        """Watch `modules`, which are sharded. `originals`: see `parameters_before`."""
        self._model = model
        self._names = {id(shard): name for name, shard in model.named_parameters()}
        self._modules = modules
        self._originals = originals
        self.strategy = config.strategy
        self._reshards = config.strategy_record.reshard_after_forward
        self._passes = 0
        self._changed: list[Tensor] = []  # shards of the parameters that a forward has changed

        # The caller's containers from whose copies a forward has removed entries, each with the error.
        self._shortened: list[tuple[Any, UserError]] = []
        self._calls: list[_Call] = []

        for module in modules:
            watch = _Watch(self, module)
            torch_private.watch_forwards(module, watch.before, watch.after)

    @property
    def in_first_pass(self) -> bool:
        return self._passes == 1

    def begin_pass(self) -> None:
        self._passes += 1
        self._calls.clear()

    def check_graph(self, outputs: Sequence[Tensor]) -> None:
        """Raise if a backward from `outputs` would use parameters that FSDP does not gather for it."""
        if not (self._reshards and self.in_first_pass):
            return

        nodes = {node._sequence_nr(): node for node in autograd_nodes(output.grad_fn for output in outputs)}
        numbers = sorted(nodes)
        for call in self._calls:
            gathers = max((number for number in call.gathers if number in nodes), default=-1)
            first = bisect_left(numbers, max(call.start, gathers + 1))
            early = [nodes[number] for number in numbers[first : bisect_left(numbers, call.end)]]
            leaves = {id(full): shard for shard, full in gathered_parameters([call.module])}
            used = _leaf_below(early, call.start, leaves)
            if used is not None:
                raise hidden_output(
                    f"{self.name_of(call.module)} keeps a tensor that it computed with {self._names[id(used)]!r}"
                )

    def check_pass(self) -> None:
        """Raise if the first pass has shown something that FSDP loses."""
        if self.in_first_pass:
            self._shortened.clear()
            self._check_originals()
            self.check_unchanged()
            self._check_reduced()

    def check_unchanged(self) -> None:
        """Raise if a forward has changed a gathered parameter: its shard stays as it was."""
        if self._changed:
            raise UserError(
                f"strategy={self.strategy} gathers parameters for a forward only, and a forward changes "
                f"{self._names[id(self._changed[0])]!r} in place: the change would be lost",
                "max_norm of nn.Embedding does this, for example",
                "compute the changed values in a tensor of their own, or change parameters in after_step(run, result); "
                "or set strategy=ddp",
            )

    def note_call(self, call: _Call) -> None:
        if self._reshards:
            self._calls.append(call)

    def note_shortened(self, container: Any, error: UserError) -> None:
        """Raise the error if the container is given to another forward. A list of its own may be used up by a block."""
        self._shortened.append((container, error))

    def check_given(self, value: Any) -> None:
        for container, error in self._shortened:
            if value is container:
                raise error

    def note_changed(self, shards: Sequence[Tensor]) -> None:
        self._changed += shards

    def name_of(self, module: FSDPModule) -> str:
        name = next((name for name, other in self._model.named_modules() if other is module), "")
        return repr(name) if name else f"the forward of {type(self._model).__name__}"

    def keeps_parameters_gathered(self) -> bool:
        return not self._reshards

    def _check_originals(self) -> None:
        """Raise if the loss depends on a parameter of before the sharding: it would never be trained."""
        current = dict(self._model.named_parameters(remove_duplicate=False))
        for name, original in self._originals.items():
            parameter = original()
            if parameter is not None and parameter.grad is not None and parameter is not current[name]:
                raise UserError(
                    f"strategy={self.strategy} replaces the parameter {name!r} by a shard of it, and the loss "
                    "still uses the full one, which is not trained",
                    "it is kept in a list, a dictionary or another object, where torch cannot replace it",
                    "keep it in an nn.ParameterList, or read the module's attribute in every forward; "
                    "or set strategy=ddp or strategy=zero1",
                )

    def _check_reduced(self) -> None:
        """Raise if FSDP did not reduce every gradient.

        It sets its hooks on the tensors in a block's output, and may have missed some.
        """
        unreduced = [
            self._names[id(shard)] for shard, full in gathered_parameters(self._modules) if full.grad is not None
        ]
        if unreduced:
            raise hidden_output(f"the gradient of {unreduced[0]!r} was not reduced")


class _Watch:
    """Looks at one module, just before and just after each of its forwards, while its parameters are gathered."""

    def __init__(self, checks: ForwardChecks, module: FSDPModule):
        self._checks = checks
        self._module = module
        self._start = 0  # the number of the forward's first node
        self._copies: list[tuple[Any, Any, dict[Any, Any]]] = []  # containers, FSDP's copies, and what was in them
        self._digests: list[Tensor] = []

        # The attributes of the module's own submodules: a sharded submodule has a watch of its own.
        parts: list[Any] = list(cast(nn.Module, module).modules())
        inner = [part for part in parts if isinstance(part, FSDPModule) and part is not module]
        others = {id(part) for child in inner for part in cast(nn.Module, child).modules()}
        own = [part for part in parts if id(part) not in others]
        self._attributes = [values for part in own for values in (vars(part), part._buffers)]

    def before(self, passed: tuple[Any, Any], received: tuple[Any, Any]) -> None:
        """`passed` are the caller's (args, kwargs), and `received` those that the forward gets."""
        if not torch.is_grad_enabled():
            return

        self._start = _autograd._get_sequence_nr()
        if self._checks.in_first_pass:
            # In a pipeline the last micro-batch's backward may not have begun, and would end in an error of torch's.
            self._checks.check_unchanged()
            pairs = list(zip(_inside(passed), _inside(received), strict=True))
            for original, _ in pairs:
                self._checks.check_given(original)

            self._copies = [(a, b, items) for a, b in pairs if a is not b and (items := _items(b))]
            self._digests = self._digest()

    def after(self, output: Any) -> None:
        if not torch.is_grad_enabled():
            return

        kept = [] if self._checks.keeps_parameters_gathered() else self._kept_tensors()
        for tensor in kept:
            torch_private.gather_before_backward(self._module, tensor)

        if self._checks.in_first_pass:
            self._check_containers(output)
            self._check_parameters()

            tensors = [*kept, *(value for value in _walk(output) if isinstance(value, Tensor))]
            nodes: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
            gathers = [node._sequence_nr() for node in nodes]
            self._checks.note_call(_Call(self._module, self._start, _autograd._get_sequence_nr(), gathers))

    def _kept_tensors(self) -> list[Tensor]:
        """Return the tensors of this forward's graph that are attributes now."""
        return [
            value
            for values in self._attributes
            for value in values.values()
            if type(value) not in NOT_TENSORS
            and isinstance(value, Tensor)
            and value.grad_fn is not None
            and value.grad_fn._sequence_nr() >= self._start  # one that the module was given is gathered for elsewhere
        ]

    def _check_containers(self, output: Any) -> None:
        """Raise if the forward changed the copy of a container and does not return it."""
        returned = {id(value) for value in _walk(output)}
        copies, self._copies = self._copies, []
        for original, copy, before in copies:
            now = _items(copy)
            changed = [key for key in {**before, **now} if now.get(key, before) is not before.get(key, now)]
            if not changed or id(copy) in returned:
                continue

            kind = type(copy).__name__
            error = UserError(
                f"{self._checks.name_of(self._module)} changes a {kind} that it is given, but "
                f"strategy={self._checks.strategy} gives it a copy: the change would be lost",
                f"it changes the entry {changed[0]!r}",
                f"return the {kind} from forward and use what is returned, or let forward change a copy of its "
                "own; or set strategy=ddp or strategy=zero1",
            )
            known = {id(value) for value in before.values()}
            if len(now) < len(before) and all(id(value) in known for value in now.values()):
                self._checks.note_shortened(original, error)
            else:
                raise error

    def _check_parameters(self) -> None:
        """Note the parameters that the forward has changed, also through `.data`."""
        pairs = gathered_parameters([self._module])
        same = [torch.equal(old, new) for old, new in zip(self._digests, self._digest(), strict=True)]
        self._digests = []
        self._checks.note_changed(
            [shard for (shard, full), is_same in zip(pairs, same, strict=True) if full._version or not is_same]
        )

    def _digest(self) -> list[Tensor]:
        """Return the sum of the bytes of every gathered parameter."""
        digests = []
        for _, full in gathered_parameters([self._module]):
            data = full.to_local() if isinstance(full, DTensor) else full
            # A subclass (float8) has no bytes of its own.
            plain = data.detach() if type(data) in (Tensor, nn.Parameter) else torch.zeros(1)
            digests.append(plain.reshape(-1).view(torch.uint8).sum())

        return digests


def parameters_before(model: nn.Module) -> Originals:
    """Return the parameters before the sharding, which replaces them in modules, but not in the user's own objects."""
    return {name: weakref.ref(p) for name, p in model.named_parameters() if p.dim()}


def gathered_parameters(modules: Sequence[FSDPModule]) -> list[tuple[Tensor, Tensor]]:
    """Return (shard, gathered parameter) of every parameter of these groups that has been gathered so far."""
    pairs = []
    for module in modules:
        for parameter in torch_private.grouped_parameters(module):
            full = torch_private.gathered(parameter)
            if full is not None:
                pairs.append((torch_private.shard(parameter), full))

    return pairs


def hidden_output(found: str) -> UserError:
    """Return the error for outputs on which FSDP could not set its hooks."""
    return UserError(
        "FSDP could not hook the backward of a block, or of the model: forward returns its tensors inside an object "
        "that torch does not look into, or keeps one in such an object, which the loss uses",
        found,
        "return tensors, or tuples, lists, dicts or dataclasses of them, from forward, or keep a tensor as an "
        "attribute of the block (self.aux = ...); or set strategy=ddp",
    )


def check_shardable(model: nn.Module, config: RunConfig) -> None:
    """Refuse parameters that torch's FSDP cannot shard, by name."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise UserError(
                f"strategy={config.strategy} cannot shard the parameters of {name or 'the model'!r}, which is compiled "
                "by TorchScript",
                f"it is a {type(module).__name__}",
                "leave torch.jit.script and torch.jit.trace out (compile=true compiles the model); or set "
                "strategy=ddp or strategy=zero1",
            )

    for name, parameter in model.named_parameters():
        if not parameter.is_contiguous():
            problem, fix = "is not contiguous", "call model.to(memory_format=torch.contiguous_format), or .contiguous()"
        elif not parameter.numel():
            problem, fix = "has no elements", "leave it out"
        else:
            continue

        raise UserError(
            f"strategy={config.strategy} cannot shard the parameter {name!r}, which {problem}",
            f"shape {tuple(parameter.shape)}, strides {parameter.stride()}",
            f"{fix}; or set strategy=ddp or strategy=zero1",
        )


def _leaf_below(starts: Sequence[Any], number: int, leaves: Mapping[int, Tensor]) -> Tensor | None:
    """Return one of `leaves` that a backward from `starts` reaches over nodes from this number on, or None."""
    pending, seen = list(starts), set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or node._sequence_nr() < number:
            continue

        seen.add(node)
        leaf = getattr(node, "variable", None)
        if id(leaf) in leaves:
            return leaves[id(leaf)]

        pending.extend(following for following, _ in node.next_functions)

    return None


def _inside(arguments: tuple[Any, Any]) -> list[Any]:
    """Return all values in (args, kwargs)."""
    args, kwargs = arguments
    return [value for argument in (*args, *kwargs.values()) for value in _walk(argument)]


def _walk(value: Any) -> Iterator[Any]:
    """Yield `value`, and everything in it if it is a container into which FSDP looks."""
    yield value
    for item in _items(value).values():
        yield from _walk(item)


def _items(value: Any) -> dict[Any, Any]:
    """Return what is in a container, by key or index; nothing for all other values."""
    if isinstance(value, dict):
        return dict(value)

    if isinstance(value, list | tuple):
        return dict(enumerate(value))

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}

    return {}
