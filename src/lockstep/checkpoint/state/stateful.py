"""Stateful objects: everything besides the model and the optimizers whose state is saved with a run.

To save one more, write a class with the methods of `Stateful` and pass an object to `RegisteredState.add`; a resume, a
rewind and the check for free space then know it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeGuard

from torch import Tensor

from lockstep.checkpoint.manifest import MODEL
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.state.encoding import CapturedTensor, JsonDict
from lockstep.checkpoint.state.reshard import read_into
from lockstep.errors import UserError, plural

# How the names of all tensors begin, except the tensors of a `PerParameter`.
TENSOR_KINDS = (MODEL, "optimizer", "extra", "stateful")


class Stateful(Protocol):
    """An object whose state is saved with the run, under a name: the task, the data source or a scheduler, for example.

    It is torch's protocol of the same name, declared here because the module that has it imports 78 others. Most of
    these objects are the user's, so there is no base class. They may have the members of `OptionalMembers` in addition.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class PerParameter(Stateful, Protocol):
    """A stateful object that also has a tensor for each parameter, sharded like the parameter: averages, for example.

    The tensors are saved as NAME.PARAMETER, and restored in place before `load_state_dict` is called. A save copies
    them while training waits, unless the object has `copy_later` (see `OptionalMembers`).
    """

    # The tensors that this rank holds, by the name of the parameter. They exist from the start, and are never replaced.
    parameter_tensors: Mapping[str, Tensor]

    def restart(self, names: Collection[str], /) -> None:
        """Let the tensors of these parameters begin afresh, because the checkpoint has none for them."""


def is_per_parameter(stateful: object) -> TypeGuard[PerParameter]:
    """Return whether an object has a tensor for each parameter."""
    # Not `isinstance` with a protocol that is checked at runtime: from Python 3.12 on it does not see the members that
    # a wrapper has through `__getattr__`, and their tensors would be silently lost.
    return hasattr(stateful, "parameter_tensors")


class OptionalMembers(NamedTuple):
    """What any stateful object may have besides its state, with a default where it has none."""

    # read_shard(name, reader) reads this rank's shard of a tensor. None: the state is the same on every rank.
    read_shard: Callable[[str, CheckpointReader], Tensor] | None

    # changes_since(state) lists what the user's code has changed since `state` was saved.
    changes_since: Callable[[dict[str, Any]], list[str]]

    # Of a `PerParameter`: whether its tensors change only after `Update.wait_for_copy`, so that a save may copy them
    # while training continues.
    copy_later: bool


def optional_members(stateful: object) -> OptionalMembers:
    """Return the optional members of a stateful object."""
    return OptionalMembers(
        read_shard=getattr(stateful, "read_shard", None),
        changes_since=getattr(stateful, "changes_since", None) or (lambda state: []),
        copy_later=getattr(stateful, "copy_later", False),
    )


class RegisteredState(Mapping[str, Stateful]):
    """Stateful objects by the names under which checkpoints hold their state, in the order of restoring."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}
        self._is_open = True

        # The objects among them that have a tensor for each parameter.
        self.per_parameter: dict[str, PerParameter] = {}

        # Names that must be in both the checkpoint and the resumed run, or in neither. All others may come and go.
        self.required: set[str] = set()

    def add(self, name: str, stateful: Stateful, required: bool = False) -> None:
        """Save and restore `stateful` with every checkpoint. The name "data" is reserved for the data source.

        `required`: a resume is refused if only one of checkpoint and run has state of this name.
        """
        has_tensors = is_per_parameter(stateful)
        if name in ("data", *self) or (has_tensors and name in TENSOR_KINDS):
            raise UserError(f"{name!r} cannot be saved with the run: the name is taken", "", "use another name")

        # NAME.PARAMETER must be the name of no other tensor, such as one of the model's.
        if has_tensors and "." in name:
            raise UserError(
                f"{name!r} cannot be saved with the run: the name of an object with parameter_tensors has no dots",
                "a dot ends its name in the names of its tensors, NAME.PARAMETER",
                f"use another name, for example {name.replace('.', '_')!r}",
            )

        if has_tensors and not hasattr(stateful, "restart"):
            raise UserError(
                f"{name!r} cannot be saved with the run: it has parameter_tensors and no restart(names)",
                "a resume calls it for the parameters of which a checkpoint has no tensor",
                "add restart(names), which lets the tensors of these parameters begin afresh",
            )

        if not hasattr(stateful, "load_state_dict"):
            raise UserError(
                f"{name!r} cannot be saved with the run: it has state_dict() and no load_state_dict()",
                "a resumed run could not restore it",
                "add load_state_dict(state), or remove state_dict()",
            )

        if not self._is_open:
            raise UserError(
                f"{name!r} cannot be saved with the run: its checkpoints are already open",
                "it would be saved, but a resumed run would not restore it",
                "add it before the first step: call run.register before run.steps",
            )

        self._objects[name] = stateful
        if is_per_parameter(stateful):
            self.per_parameter[name] = stateful

        if required:
            self.required.add(name)

    def close(self) -> None:
        """Refuse what is added from now on: the run resumes, so it would be saved, but never restored."""
        self._is_open = False

    def __getitem__(self, name: str) -> Stateful:
        return self._objects[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)


# ---- a tensor for each parameter ----


def capture_parameter_tensors(name: str, stateful: PerParameter) -> dict[str, CapturedTensor]:
    """Return the tensors that the object called `name` has for parameters, under the names that a checkpoint uses."""
    copy_later = optional_members(stateful).copy_later
    return {
        f"{name}.{parameter}": CapturedTensor(tensor, parameter=parameter, copy_later=copy_later)
        for parameter, tensor in stateful.parameter_tensors.items()
    }


def restore_parameter_tensors(name: str, stateful: PerParameter, reader: CheckpointReader) -> list[str]:
    """Restore the tensors that the object called `name` has for parameters. Return a line if some are not saved."""
    missing = []
    for parameter, tensor in stateful.parameter_tensors.items():
        if f"{name}.{parameter}" in reader.manifest.tensors:
            read_into(tensor, f"{name}.{parameter}", reader)
        else:
            missing.append(parameter)

    # A parameter that was frozen when the checkpoint was written has no tensor in it either.
    if not missing:
        return []

    stateful.restart(missing)
    return [f"{name}: {plural(len(missing), 'tensor')} not in the checkpoint, starting afresh"]


# ---- what the loop keeps between two steps: the clock, the log line, a requested stop, early stopping ----


class LoopState:
    """The state of the objects of the loop, by name. It consists of plain values, without tensors.

    A resume restores the state before these objects exist, so `add_and_restore` restores each of them.
    `load_state_dict` restores the objects that are there at a rewind.
    """

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}
        self._kept_in_rewinds: set[str] = set()

        # Their state in the checkpoint from which the run was resumed; None: the run was not resumed.
        self._saved: JsonDict | None = None

    def add_and_restore(self, name: str, stateful: Stateful, rewinds: bool = True) -> None:
        """Save the state of an object from now on, and restore it at once if the run was resumed.

        An older version may not have saved the object, so each value of its state has a default. `rewinds`: whether a
        rewind restores it, too.
        """
        assert name not in self._objects, name
        self._objects[name] = stateful
        if not rewinds:
            self._kept_in_rewinds.add(name)

        if self._saved is not None:
            stateful.load_state_dict(self._saved.get(name, {}))

    def state_dict(self) -> JsonDict:
        """Return the state of all objects. Collective."""
        return {name: stateful.state_dict() for name, stateful in self._objects.items()}

    def load_state_dict(self, saved: JsonDict) -> None:
        """Restore the objects that a rewind restores. At a resume there are none yet."""
        self._saved = saved
        for name, stateful in self._objects.items():
            if name not in self._kept_in_rewinds:
                stateful.load_state_dict(saved.get(name, {}))
