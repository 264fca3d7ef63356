"""The full state of a run, as a checkpoint holds it: tensors under the model's names, and plain state.

Nothing in it depends on the number of ranks: any world can resume from a checkpoint of any other.

    model.NAME                    parameters and buffers; the master weights of parameters stored in bfloat16
    optimizer.NUMBER.NAME.KEY     the optimizer state of parameter NAME
    extra.NAME                    tensors in a module's extra state
    part.NAME                     tensors in the state of a part: any other object with state, see `RunState`
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lockstep.checkpoint.load import CheckpointReader
from lockstep.checkpoint.reshard import parameter_of, read_into, read_state_like
from lockstep.checkpoint.state_tree import digest, pack, unpack
from lockstep.errors import UserError, plural
from lockstep.optim.bf16_masters import COMPENSATION
from lockstep.optim.optimizers import Optimizers
from lockstep.optim.registry import state_copies
from lockstep.runtime.layout import full_tensor, local
from lockstep.task import BatchSource, Task

# Plain state, as it is in the manifest.
JsonDict = dict[str, Any]

# Settings that determine the order of the samples. Those that end in a dot are prefixes.
ORDER_SETTINGS = ("seed", "data.", "global_batch", "tail", "task.")


class Stateful(Protocol):
    """A part of the run that has state.

    Optional members, looked up with `getattr`:

    read(name, reader)       reads this rank's shard of a tensor; a part without it has the same state on every rank
    changes_since(state)     lists what the user's code has changed since `state` was saved
    lasting, frozen_advice   see `Task`
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class SavedStepper(Stateful, Protocol):
    """The members of the engine's `Stepper` that checkpoints need."""

    counters: Any  # `counters.step` is the number of steps so far
    update: Any  # calls `update.before_update` before the next update of the parameters


class Change(NamedTuple):
    """A setting that differs from the one in the checkpoint."""

    key: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}"


class CapturedState(NamedTuple):
    """The result of `RunState.capture`. The tensors are not copied or gathered."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]  # for tied tensors: other name -> name in `tensors`
    plain_state: JsonDict


class RunState:
    """Captures the state of a run and restores it.

    State and tensors are named after parameters, not after ranks or positions. `reshard` decides which rank writes
    which tensor, and reads for each rank the tensors and shards that it holds now.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        stepper: SavedStepper,
        source: BatchSource,
        parts: Mapping[str, Stateful],
        *,
        keep_frozen: bool,
        holders: Mapping[str, tuple[int, ...]] | None = None,
        rank: int = 0,
        duplicates: frozenset[str] = frozenset(),
    ):
        """Store references to the objects of a run; nothing is copied.

        `parts`: the task, objects that the user's loop registered, and others. The data source is one more part.
        `keep_frozen`: whether frozen parameters are saved, or only their digests.
        `holders`: the ranks that hold a parameter, for parameters that not all ranks hold.
        `duplicates`: parameters whose shard a lower rank also holds; that rank saves it.
        """
        self.model = model
        self.optimizers = optimizers
        self.stepper = stepper
        self.source = source
        self.parts = parts
        self.duplicates = duplicates

        # Whether all ranks capture the same plain state and the same plain tensors. DTensors may still differ.
        self.same_on_all_ranks = not (optimizers.sharded or holders)

        # In a pipeline, the model of a rank has the names of all parameters, but only the tensors of its stage.
        self._foreign = {name for name, ranks in (holders or {}).items() if rank not in ranks}
        self._device = next(model.parameters()).device

        # Frozen parameters for which a checkpoint holds only digests.
        self._digest_only = {name for name, p in model.named_parameters() if not (p.requires_grad or keep_frozen)}

        # Tied parameters are in here under all of their names.
        self._trained = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}

        # The parameter groups as the user's code created them. A resumed run compares them with the saved ones.
        self._initial_groups = [_group_options(optimizer) for optimizer in optimizers.all]

    # ---- saving ----

    def capture(self) -> CapturedState:
        """Return the state of the run.

        Collective under fsdp with checkpoint.frozen=false: digests of frozen parameters need the full tensors.
        """
        captured = self.capture_tensors()
        return captured._replace(plain_state=captured.plain_state | {"stepper": self.stepper.state_dict()})

    def capture_tensors(self) -> CapturedState:
        """Like `capture`, but without the stepper's state, for which the host would wait. Collective like `capture`."""
        # `pack` adds the tensors that it finds to this dict.
        tensors: dict[str, Tensor] = {}

        state = {name: value for name, value in self.model.state_dict().items() if name not in self._digest_only}
        aliases = _tied_names(state)
        for name, value in state.items():
            if is_extra(name) or name in aliases or name in self._foreign:
                continue

            # If the parameter has a float32 master, save that: the parameter is only its rounded copy.
            to_save = self._tensor_to_save(name, value)
            if to_save is not None:
                tensors[f"model.{name}"] = to_save.detach()

        # These keys are part of the file format: do not rename them.
        parts = {"data": self.source, **self.parts}
        plain_state: JsonDict = {
            "model": {
                "extra": {name: pack(v, f"extra.{name}", tensors) for name, v in state.items() if is_extra(name)},
                "frozen_digests": {
                    name: digest(full_tensor(self.model.get_parameter(name)))
                    for name in sorted(self._digest_only - self._foreign)
                },
            },
            "optimizers": [self._capture_optimizer(number, tensors) for number in range(len(self.optimizers.all))],
            "parts": {name: pack(part.state_dict(), f"part.{name}", tensors) for name, part in parts.items()},
            "next_samples": next_samples(self.source),
        }
        aliases = {f"model.{name}": f"model.{first}" for name, first in aliases.items()}
        return CapturedState(tensors, aliases, plain_state)

    def _capture_optimizer(self, number: int, tensors: dict[str, Tensor]) -> JsonDict:
        optimizer = self.optimizers.all[number]
        names = self._names_by_id()

        # State is saved by parameter name, since the order of the groups may change between two runs.
        for key in optimizer.state:
            if id(key) not in names:
                raise UserError(
                    f"the state of {type(optimizer).__name__} cannot be saved: it belongs to no parameter of the model",
                    f"state of {key!r:.80}",
                    "keep such state in the parameter groups, or in the task's state_dict()",
                )

        # Save the options as the user's code set them, and as they are now, since some optimizers change them.
        prefix = f"optimizer.{number}"
        state = {names[id(p)]: p_state for p, p_state in optimizer.state.items() if p_state}
        return {
            "kind": type(optimizer).__name__,
            "state": pack(state, prefix, tensors),
            "params": [[names[id(p)] for p in group] for group in self.optimizers.groups[number]],
            "initial": pack(self._initial_groups[number], f"{prefix}.initial", tensors),
            "settings": pack(_group_options(optimizer), f"{prefix}.settings", tensors),
        }

    def changed_only_by_update(self) -> set[str]:
        """Return the names of tensors that only an update of the parameters changes: the optimizers' state.

        In contrast, a forward may change the model's buffers, and the user's code its parameters.
        """
        names = self._names_by_id()
        states = [
            (f"optimizer.{number}.{names[id(p)]}", state)
            for number, optimizer in enumerate(self.optimizers.all)
            for p, state in optimizer.state.items()
        ]
        return {f"{prefix}.{key}" for prefix, state in states for key in state}

    def bytes_at_start(self) -> tuple[int, int]:
        """Return the bytes of model and parts, and an estimate for the optimizers, which allocate their state later."""
        tensors = {
            name: tensor
            for name, tensor in self.model.state_dict().items()
            if not is_extra(name) and name not in self._digest_only
        }

        # Only the tensors that `pack` adds are used here, not its result.
        for name, part in self.parts.items():
            pack(part.state_dict(), f"part.{name}", tensors)

        known = sum(tensor.nbytes for tensor in tensors.values())

        # float32 masters are saved instead of bfloat16 parameters, which takes twice the bytes counted above.
        if self.optimizers.masters:
            known += sum(master.nbytes // 2 for master in self.optimizers.masters.persistent_tensors())

        groups = [(optimizer, group) for optimizer in self.optimizers.all for group in optimizer.param_groups]
        estimate = sum(
            int(state_copies(optimizer, group) * p.nbytes) for optimizer, group in groups for p in group["params"]
        )
        return known, estimate

    def digest_replicated(self) -> dict[str, str]:
        """Return a digest of each part whose state is replicated on every rank."""
        return {name: digest(part.state_dict()) for name, part in self.parts.items() if not getattr(part, "read", None)}

    # ---- restoring ----

    def restore(
        self, reader: CheckpointReader, plain_state: JsonDict, changed_settings: Sequence[Change] = ()
    ) -> list[str]:
        """Restore the tensors and shards that this rank holds. Raise a UserError if a different run was saved.

        Return descriptions of changes since the save that are not in `changed_settings`.
        """
        self._restore_model(reader, plain_state["model"])

        # Optimizers are matched by position, so the task must create them in the same order.
        saved_optimizers = plain_state["optimizers"]
        if len(saved_optimizers) != len(self.optimizers.all):
            saved_count = plural(len(saved_optimizers), "optimizer")
            raise _different_model(f"the checkpoint has {saved_count}, the task {len(self.optimizers.all)}")

        changed = []
        for number, saved in enumerate(saved_optimizers):
            changed += self._restore_optimizer(number, saved, reader)

        self.stepper.load_state_dict(plain_state["stepper"])
        states = {name: self._read_part(name, state, reader) for name, state in plain_state["parts"].items()}
        self.source.load_state_dict(states.pop("data"))

        # The data source must continue with the samples that the saved run would have taken next.
        _check_next_samples(plain_state["next_samples"], next_samples(self.source), changed_settings)
        return changed + self._restore_parts(states)

    def _restore_parts(self, states: JsonDict) -> list[str]:
        """Restore all parts except the data source. Return descriptions of the parts that gained or lost state."""
        changed = []
        for name, part in self.parts.items():
            saved = states.pop(name, None)
            current = part.state_dict()

            if saved:
                changes_since = getattr(part, "changes_since", None)
                if changes_since:
                    changed += changes_since(saved)
                part.load_state_dict(saved)
                if not current:
                    changed.append(f"{name}: has state in the checkpoint, but none in this run")
            elif current:
                changed.append(f"{name}: has no state in the checkpoint, and starts from the beginning")

        unused = [f"{name}: in the checkpoint, but not in use here" for name, state in states.items() if state]
        return changed + unused

    def _read_part(self, name: str, state: Any, reader: CheckpointReader) -> Any:
        """Read the tensors in the state of one part, which may have a `read` method (see `Stateful`)."""
        # The state of a part that this run does not have is only reported, not read.
        if name != "data" and name not in self.parts:
            return state

        own_read = getattr(self.parts.get(name), "read", None)
        read = (lambda tensor: own_read(tensor, reader)) if own_read else reader.read
        return unpack(state, read, self._device)

    def _restore_model(self, reader: CheckpointReader, saved_model: JsonDict) -> None:
        state = self.model.state_dict()
        saved = sorted(name.removeprefix("model.") for name in reader.names() if name.startswith("model."))
        self._check_same_model(state, saved, reader, saved_model["frozen_digests"])
        _check_same_ties(state, saved, reader)

        for name in saved:
            if name in self._foreign:
                continue
            read_into(state[name], f"model.{name}", reader)

            # If the checkpoint holds a master, `read_into` above has rounded it for the parameter.
            saved_tensor = self._tensor_to_save(name, state[name])
            if saved_tensor is not None and saved_tensor is not state[name]:
                read_into(saved_tensor, f"model.{name}", reader)

        # "NAME._extra_state" belongs to the module NAME.
        for name, value in saved_model["extra"].items():
            module = self.model.get_submodule(name.removesuffix("_extra_state").rstrip("."))
            module.set_extra_state(unpack(value, reader.read, self._device))

    def _check_same_model(
        self, state: dict[str, Tensor], saved: list[str], reader: CheckpointReader, digests: dict[str, str]
    ) -> None:
        """Check names, shapes and the digests of frozen parameters before anything is changed."""
        # Frozen parameters of which the checkpoint holds only a digest must have the same bits now.
        names = {name for name in state if not is_extra(name)}
        for name, saved_digest in digests.items():
            if name not in names or name in self._foreign:
                continue
            if digest(full_tensor(self.model.get_parameter(name))) != saved_digest:
                advice = [getattr(part, "frozen_advice", None) for part in self.parts.values()]
                raise UserError(
                    f"the values of the frozen parameter {name!r} differ from those when the checkpoint was written",
                    "the checkpoint holds only its digest (checkpoint.frozen=false)",
                    next(filter(None, advice), Task.frozen_advice),
                )

        differences = {
            "missing in the checkpoint": sorted(names - set(saved) - digests.keys()),
            "missing in this model": sorted(set(saved) - names),
        }
        descriptions = [
            f"{plural(len(missing), 'tensor')} {where}, first {missing[0]!r}"
            for where, missing in differences.items()
            if missing
        ]
        if descriptions:
            raise _different_model("; ".join(descriptions))

        for name in saved:
            shape = reader.shape(f"model.{name}")
            if tuple(state[name].shape) != shape:
                raise _different_model(
                    f"{name!r} has shape {shape} in the checkpoint and {tuple(state[name].shape)} in this model"
                )

    def _restore_optimizer(self, number: int, saved: JsonDict, reader: CheckpointReader) -> list[str]:
        optimizer = self.optimizers.all[number]
        self._check_same_optimizer(number, saved)
        changed, options = self._merge_group_options(number, saved, reader)

        # With ZeRO-1 or in a pipeline, a rank holds only some of the parameters.
        names = self._names_by_id()
        held = {names[id(p)]: (p, group) for group in optimizer.param_groups for p in group["params"]}
        needed = {name: state for name, state in saved["state"].items() if name in held and name not in self._foreign}
        states = self._read_optimizer_state(number, needed, reader)

        # torch numbers the parameters consecutively, over all groups.
        numbers = itertools.count()
        groups = [
            {**chosen, "lr": group["lr"], "params": list(itertools.islice(numbers, len(group["params"])))}
            for chosen, group in zip(options, optimizer.param_groups, strict=True)
        ]

        # Call the optimizer's own load_state_dict, with its hooks, since a subclass may compute more from the state.
        by_number = {position: states[name] for position, name in enumerate(held) if name in states}
        optimizer.load_state_dict({"state": by_number, "param_groups": groups})

        # load_state_dict has cast the state to the dtype of the parameters. Put back the values as they were saved.
        for name, state in states.items():
            p, group = held[name]
            optimizer.state[p].update({key: _on_device_of(p, key, value, group) for key, value in state.items()})

        return changed

    def _check_same_optimizer(self, number: int, saved: JsonDict) -> None:
        kind = type(self.optimizers.all[number]).__name__
        if saved["kind"] != kind:
            raise UserError(
                f"the checkpoint holds the state of {saved['kind']}, but the optimizer is now {kind}",
                "",
                "use the optimizer with which the run began, or start a new run from the exported weights",
            )

        # Compare the optimizer's parameters on all ranks; this rank may update only some of them.
        names = self._names_by_id()
        current = {names[id(p)] for group in self.optimizers.groups[number] for p in group}
        differing = current ^ {name for group in saved["params"] for name in group}
        if differing:
            raise _different_model(f"optimizer {number} does not hold the same parameters, such as {min(differing)!r}")

    def _read_optimizer_state(self, number: int, saved: JsonDict, reader: CheckpointReader) -> JsonDict:
        # The compensation (the rounding errors of bfloat16 parameters) is dropped if this run does not add it back.
        masters = self.optimizers.masters
        if not (masters and masters.rounding == "compensated"):
            saved = {name: {k: v for k, v in state.items() if k != COMPENSATION} for name, state in saved.items()}

        # State is sharded like its parameter, whose name is part of the tensor's name.
        parameters = dict(self.model.named_parameters())
        return unpack(
            saved, lambda name: read_state_like(name, parameters.get(parameter_of(name)), reader), self._device
        )

    def _merge_group_options(
        self, number: int, saved: JsonDict, reader: CheckpointReader
    ) -> tuple[list[str], list[JsonDict]]:
        """Return the user's changes to the parameter groups, and the options to use for each group.

        An option that the user's code has changed keeps its new value. All other options get their values from the end
        of the saved run, since some optimizers keep counters there.
        """
        options = _group_options(self.optimizers.all[number])
        initial = unpack(saved["initial"], reader.read, self._device)
        final = unpack(saved["settings"], reader.read, self._device)

        # Groups have no names, so they cannot be matched if their number differs.
        if len(initial) != len(options):
            change = f"optimizer {number} has {len(options)} parameter groups, {len(initial)} when it was saved"
            return [change], options

        # Compare the options that the user's code sets now with those that it set when the run began.
        changed = []
        for group, (now, before) in enumerate(zip(self._initial_groups[number], initial, strict=True)):
            for key in options[group]:
                if key in before and repr(before[key]) == repr(now[key]):
                    options[group][key] = final[group][key]
                elif key != "fused":  # depends on the device and does not change results
                    changed.append(f"optimizer {number}, group {group}: {key} {before.get(key)} -> {now[key]}")

        return changed, options

    # ---- parameters ----

    def _tensor_to_save(self, name: str, value: Tensor) -> Tensor | None:
        """Return the tensor to save for a parameter: its master, if it has one. None: another rank holds the master."""
        masters = self.optimizers.masters
        parameter = self._trained.get(name)
        if masters is None or not masters.persistent or parameter is None:
            return value
        return masters.master_of(parameter)

    def _names_by_id(self) -> dict[int, str]:
        """Return the names of the optimizers' tensors, by id: the parameters or their float32 masters."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        masters = self.optimizers.masters
        return names | masters.named() if masters else names


def is_extra(name: str) -> bool:
    """Whether a key of a state dict holds the result of a module's `get_extra_state`, which may be any object."""
    return name.rpartition(".")[2] == "_extra_state"


def next_samples(source: BatchSource) -> str | None:
    """Return a digest of the next samples, or None if the source cannot list them without reading them."""
    upcoming: Callable[[], Any] | None = getattr(source, "upcoming", None)
    return digest(upcoming()) if upcoming else None


def full_state(
    model: nn.Module, keep: bool, fetch: Callable[[str, Tensor], Tensor]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Gather the model's full tensors and the aliases of tied tensors. Collective: every rank must call it.

    Ranks without `keep` get no tensors. `fetch` is `Driver.fetch`, which gathers one tensor.
    """
    # In the order of the state dict, which is the same on every rank: `fetch` may be a collective.
    state = model.state_dict()
    aliases = _tied_names(state)
    tensors = {}
    for name, value in state.items():
        if is_extra(name) or name in aliases:
            continue
        full = fetch(name, value)
        if keep:
            tensors[name] = (full if full is value else full.cpu()).contiguous()

    return tensors, aliases


def _tied_names(state: Mapping[str, Any]) -> dict[str, str]:
    return _aliases({name: _identity(value) for name, value in state.items() if not is_extra(name)})


def _aliases(identities: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: first name with the same identity}, without the first names themselves."""
    first_names: dict[Any, str] = {}
    first_of = {name: first_names.setdefault(identity, name) for name, identity in identities.items()}
    return {name: first for name, first in first_of.items() if first != name}


def _identity(tensor: Tensor) -> Any:
    """Return a key that is equal for two tensors that share all their memory."""
    tensor = local(tensor)

    # An empty shard has no data pointer, but it has a storage object.
    if tensor.numel() == 0:
        return tensor.untyped_storage()._cdata
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _group_options(optimizer: torch.optim.Optimizer) -> list[JsonDict]:
    """Return a copy of the options of each parameter group, without the learning rate, which the schedule sets."""
    return [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]


def _on_device_of(parameter: Tensor, key: str, value: Any, group: JsonDict) -> Any:
    """Move a value of an optimizer's state to the device of its parameter, without a cast."""
    # As in torch, step counts stay on the host unless the optimizer's kernels read them.
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return value.to(parameter.device) if isinstance(value, Tensor) and not on_host else value


def _check_same_ties(state: dict[str, Tensor], saved: list[str], reader: CheckpointReader) -> None:
    tied_now = _aliases({name: _identity(state[name]) for name in saved})
    tied_before = _aliases({name: reader.original(f"model.{name}") for name in saved})
    for name in saved:
        if tied_now.get(name) != tied_before.get(name):
            here, there = "in this model", "in the checkpoint"
            tied, untied = (here, there) if name in tied_now else (there, here)
            raise _different_model(f"{name!r} is tied to another parameter {tied}, but not {untied}")


def _check_next_samples(saved: str | None, current: str | None, changed_settings: Sequence[Change]) -> None:
    # A source that cannot list its next samples is not checked.
    if saved is None or current is None or saved == current:
        return

    causes = [str(setting) for setting in changed_settings if setting.key.startswith(ORDER_SETTINGS)]
    undo = f"undo the changes ({', '.join(causes)})" if causes else "restore the dataset as it was"
    raise UserError(
        "the order of the samples has changed since the checkpoint was written",
        "the next samples are not the ones that the saved run would have taken",
        f"{undo}; or start a new run from the exported weights",
    )


def _different_model(found: str) -> UserError:
    return UserError(
        "the model differs from the model in the checkpoint",
        found,
        "restore the task and its options as they were, or start a new run (leave --resume out)",
    )
