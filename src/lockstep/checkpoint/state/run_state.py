"""The full state of a run, as a checkpoint holds it: tensors, named as in the model's state dict, and the rest as JSON.

Nothing in it depends on the number of ranks: a checkpoint can be resumed on any number of ranks.

    model.NAME                    parameters and buffers; the master weights of parameters stored in bfloat16
    optimizer.NUMBER.NAME.KEY     the optimizer state of parameter NAME
    optimizer.NUMBER.initial      tensors in the options of the parameter groups when the run began
    optimizer.NUMBER.settings     tensors in these options at the save
    extra.NAME                    tensors in a module's extra state
    stateful.NAME                 tensors in the state of a `Stateful`: any other object with state
    NAME.PARAMETER                the tensors of a `PerParameter`; "ema" has the averages of parameters (`ema.decay`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep.checkpoint.manifest import InvalidCheckpoint
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.state.digests import digest
from lockstep.checkpoint.state.encoding import CapturedTensor, JsonDict, pack, pack_into, unpack
from lockstep.checkpoint.state.model_state import ModelState
from lockstep.checkpoint.state.optimizer_state import OptimizerStates, merge_optimizers
from lockstep.checkpoint.state.reshard import (
    ParameterHolders,
    Rank0Contents,
    RankContents,
    replicated_sizes,
    shards_to_write,
)
from lockstep.checkpoint.state.stateful import (
    TENSOR_KINDS,
    LoopState,
    RegisteredState,
    Stateful,
    capture_parameter_tensors,
    optional_members,
    restore_parameter_tensors,
)
from lockstep.config.changes import Change
from lockstep.errors import UserError
from lockstep.optim.optimizers import Optimizers
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.runtime.shards import LocalShard
from lockstep.task import BatchSource, Task

# How the keys of the settings begin that determine the order of the samples.
ORDER_SETTINGS = ("seed", "data.", "global_batch", "tail", "task.")

# What may help if an object, such as torch's AveragedModel, copies BatchNorm's running statistics between steps.
BATCHNORM_ADVICE = (
    "; if the difference is running statistics of BatchNorm, which each rank has of its own between steps, call "
    "run.sync_buffers() on every rank before they are copied, or compute them again at the end "
    "(torch.optim.swa_utils.update_bn)"
)


class CapturedState(NamedTuple):
    """The result of `RunState.capture`."""

    tensors: dict[str, CapturedTensor]
    aliases: dict[str, str]  # for tied tensors: other name -> name in `tensors`
    json_state: JsonDict

    # What the state_dict() of each stateful object returned. `json_state` and `tensors` encode it.
    states: dict[str, Any]


class RunState:
    """Captures the state of a run and restores it.

    State and tensors are named after parameters, not after ranks or positions. `reshard` decides which rank writes
    which tensor, and reads for each rank the tensors and shards that it holds now.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        stepper: Stateful,
        source: BatchSource,
        registered: RegisteredState,
        *,
        keep_frozen: bool,
        frozen_advice: str = Task.frozen_advice,
        holders: ParameterHolders = ParameterHolders(),
        on_any_rank: Callable[[bool], bool] = bool,
    ):
        """Keep references to the objects of a run; nothing is copied.

        `registered`: the task, objects that the user's loop registered, and others, but not the data source.
        `keep_frozen`: whether frozen parameters are saved, or only their digests.
        `frozen_advice`: see `Task`.
        `on_any_rank`: returns whether a value is true on any rank, for digests of sharded parameters. Collective.
        """
        self.model = model
        self.optimizers = optimizers
        self.stepper = stepper
        self.source = source
        self.registered = registered
        self.loop = LoopState()
        self._holders = holders
        self._ranks_compared = False  # whether the ranks have compared the state of what is registered
        self._frozen_advice = frozen_advice

        # Whether all ranks capture the same JSON state and the same replicated tensors. Shards may still differ.
        self._same_on_all_ranks = holders.all_on_every_rank and not optimizers.sharded

        self._device = next(model.parameters()).device
        self._model_state = ModelState(model, optimizers, holders.held_elsewhere, keep_frozen, on_any_rank)
        self._optimizer_states = OptimizerStates(model, optimizers, holders.held_elsewhere)

    # ---- saving ----

    def contents_of_rank(self, runtime: Runtime, log_event: EventLogger, about_run: dict[str, Any]) -> RankContents:
        """Return what this rank writes: its shards and, on rank 0, the values of the manifest. Collective.

        `about_run`: the values of the manifest that do not come from here: the settings, the plan, the versions.
        """
        # Rank 0 writes the JSON state of all ranks, which may hold different parameters.
        captured = self.capture()
        json_state = captured.json_state
        if not self._same_on_all_ranks:
            json_state = merge_json_state(runtime.collectives.all_gather_json(json_state))

        # Only the first save compares stateful objects between ranks, because the digests take time.
        if not self._ranks_compared:
            self._warn_of_differences(captured, runtime, log_event)
            self._ranks_compared = True

        no_tensors: dict[str, Tensor] = {}
        values = {"state": json_state, **pack({**about_run, "loop": self.loop.state_dict()}, "values", no_tensors)}
        assert not no_tensors, f"not in the state: {list(no_tensors)}"

        later = {name for name, tensor in captured.tensors.items() if tensor.copy_later}
        of_rank0 = Rank0Contents(captured.aliases, values)
        return RankContents(self.shards_of(captured.tensors, runtime), of_rank0, later)

    def shards_of(self, tensors: dict[str, CapturedTensor], runtime: Runtime) -> dict[str, LocalShard]:
        """Return what this rank writes of the tensors that all ranks have captured. Collective."""
        sizes = replicated_sizes(tensors)

        # If all ranks hold the same tensors, no exchange is needed.
        same = self._same_on_all_ranks
        all_sizes = [sizes] * runtime.world.size if same else runtime.collectives.all_gather_json(sizes)
        return shards_to_write(tensors, runtime.world.rank, all_sizes, self._holders.duplicates)

    def _warn_of_differences(self, captured: CapturedState, runtime: Runtime, log_event: EventLogger) -> None:
        """Warn if the state of an object differs between ranks, because only rank 0's is saved."""
        replicated = [name for name, stateful in self.registered.items() if not optional_members(stateful).read_shard]
        digests = runtime.collectives.all_gather_json({name: digest(captured.states[name]) for name in replicated})
        for name in digests[0]:
            if len({by_name[name] for by_name in digests}) > 1:
                advice = BATCHNORM_ADVICE if _has_statistics(captured.states[name]) else ""
                reason = f"the state of {name!r} differs between the ranks: rank 0's is saved{advice}"
                log_event("warning", reason=reason)

    def capture(self) -> CapturedState:
        """Return the state of the run, without the state of the loop.

        Collective if the `state_dict` of the data source is, and under fsdp with checkpoint.frozen=false: digests of
        frozen parameters need the full tensors.
        """
        captured = self._capture_objects()
        json_state = captured.json_state

        # The keys are part of the file format (see CONTRIBUTING).
        json_state["model"]["frozen_digests"] = self._model_state.frozen_digests()
        json_state["upcoming"] = digest_of_upcoming(self.source)

        # Between two steps, the state of the stepper is a few counters, without tensors.
        stepper_tensors: dict[str, Tensor] = {}
        json_state["stepper"] = pack(self.stepper.state_dict(), "stepper", stepper_tensors)
        assert not stepper_tensors, f"not in `tensors`: {list(stepper_tensors)}"
        return captured

    def capture_tensors(self) -> dict[str, CapturedTensor]:
        """Return the tensors that a save at this moment would write.

        The outcome of a step may still be pending, and no digest is computed. Collective if the `state_dict` of the
        data source is.
        """
        return self._capture_objects().tensors

    def _capture_objects(self) -> CapturedState:
        """Return the tensors and the JSON of all objects that may have tensors; `capture` adds the rest of the JSON."""
        tensors: dict[str, CapturedTensor] = {}
        model, aliases = self._model_state.capture(tensors)
        optimizers = self._optimizer_states.capture(tensors)
        states, encoded = self._capture_stateful(tensors, {"data": self.source, **self.registered})

        # The keys are part of the file format (see CONTRIBUTING).
        json_state: JsonDict = {
            "model": model,
            "optimizers": optimizers,
            "stateful": encoded,
            "required": sorted(name for name in self.registered.required if states[name]),
        }
        return CapturedState(tensors, aliases, json_state, states)

    def _capture_stateful(
        self, tensors: dict[str, CapturedTensor], objects: Mapping[str, Stateful]
    ) -> tuple[dict[str, Any], JsonDict]:
        """Add the tensors of stateful objects to `tensors`. Return their states, and the states as JSON."""
        for name, stateful in self.registered.per_parameter.items():
            tensors.update(capture_parameter_tensors(name, stateful))

        states = {name: stateful.state_dict() for name, stateful in objects.items()}
        return states, {
            name: pack_into(tensors, state, f"stateful.{name}", stateful=name) for name, state in states.items()
        }

    # ---- the size of a checkpoint, before the first step ----

    def bytes_without_optimizers(self, runtime: Runtime) -> int:
        """Return the bytes of the tensors that all ranks would write now, without those of the optimizers. Collective.

        The data source is not asked: it has not begun.
        """
        tensors: dict[str, CapturedTensor] = {}
        self._model_state.capture(tensors)
        self._capture_stateful(tensors, self.registered)
        here = sum(shard.local.nbytes for shard in self.shards_of(tensors, runtime).values())
        return sum(runtime.collectives.all_gather_json(here))

    def estimated_optimizer_bytes(self, runtime: Runtime) -> int:
        """Return an estimate of the bytes of the optimizers' state, which is allocated in the first step. Collective.

        All ranks get the same number, for the state that all of them write.
        """
        by_rank = runtime.collectives.all_gather_json(self._optimizer_states.estimated_bytes())

        # With ZeRO-1 the groups of a rank have only the parameters that it updates; otherwise they have all of them.
        return sum(by_rank) if self.optimizers.sharded else by_rank[0]

    # ---- restoring ----

    def restore(
        self,
        reader: CheckpointReader,
        changed_settings: Sequence[Change] = (),
        is_rewind: bool = False,
    ) -> list[str]:
        """Restore the tensors and shards that this rank holds.

        Raise a UserError if a different run was saved. Return descriptions of changes since the save that are not in
        `changed_settings`. `is_rewind`: whether this process has trained before, so that its objects may have state
        that must go.
        """
        require_values(reader, "state")
        values = reader.manifest.values
        with _naming_checkpoint(reader), reader.keeping_open():
            changes = self._restore(reader, values["state"], changed_settings, is_rewind)
            self.loop.load_state_dict(unpack(values.get("loop", {}), reader.read, self._device))

        return changes

    def _restore(
        self, reader: CheckpointReader, json_state: JsonDict, changed_settings: Sequence[Change], is_rewind: bool
    ) -> list[str]:
        self._check_required(json_state)

        # The model first: it checks that the checkpoint is of this model before anything is changed.
        self._model_state.restore(reader, json_state["model"], self._frozen_advice)

        # Some optimizers train other weights than they evaluate. A checkpoint holds the weights to evaluate, and the
        # state of the optimizers has the weights to train.
        changes = self._optimizer_states.restore(json_state["optimizers"], reader)
        self.optimizers.switch("train")
        self.stepper.load_state_dict(unpack(json_state["stepper"], reader.read, self._device))

        # The data source must continue with the samples that the saved run would have taken next.
        states = {name: self._read(name, state, reader) for name, state in json_state["stateful"].items()}
        self.source.load_state_dict(states.pop("data"))
        _check_next_samples(json_state.get("upcoming"), digest_of_upcoming(self.source), changed_settings)

        # The task and others come last: their `load_state_dict` may read what was restored above.
        for name, stateful in self.registered.per_parameter.items():
            changes += restore_parameter_tensors(name, stateful, reader)

        changes += self._restore_registered(states, is_rewind)
        return changes + self._unused(states, reader)

    def _check_required(self, json_state: JsonDict) -> None:
        """Check that the callbacks with state have the names that they had, before anything is changed."""
        # An older version did not save which names are required.
        before = set(json_state.get("required", ()))
        now = {name for name in self.registered.required if self.registered[name].state_dict()}
        differences = {
            "only in the checkpoint": before - self.registered.keys(),
            "only in this run": now - json_state["stateful"].keys(),
        }
        found = [f"{where}: {', '.join(sorted(names))}" for where, names in differences.items() if names]
        if found:
            raise UserError(
                "the callbacks with state are not those of the checkpoint",
                "; ".join(found),
                "pass the callbacks that the run had, by the same names; or start a new run from the exported weights",
            )

    def _restore_registered(self, states: JsonDict, is_rewind: bool) -> list[str]:
        """Restore what is registered. Return descriptions of the objects that gained or lost state."""
        changed = []
        for name, stateful in self.registered.items():
            saved = states.get(name)
            current = stateful.state_dict()

            # Differences are reported, not refused: an object that is not required may come and go.
            if saved:
                changed += optional_members(stateful).changes_since(saved)
                stateful.load_state_dict(saved)
                if not current and not is_rewind:
                    changed.append(f"{name}: has state in the checkpoint, but none in this run")
            elif current and is_rewind and name in states:
                # Its state was empty at the save. At a start, the user's code had none for it then, and its
                # `load_state_dict` may expect some.
                stateful.load_state_dict({})
            elif current:
                changed.append(f"{name}: has no state in the checkpoint, and starts from the beginning")

        return changed

    def _unused(self, states: JsonDict, reader: CheckpointReader) -> list[str]:
        """Return a line for each object in the checkpoint that this run does not have any more."""
        gone = [name for name, state in states.items() if state and name not in self.registered]

        # An object may have left nothing but a tensor for each parameter.
        known = tuple(f"{name}." for name in (*TENSOR_KINDS, *self.registered, *gone))
        gone += sorted({name.partition(".")[0] for name in reader.names() if not name.startswith(known)})
        return [f"{name}: in the checkpoint, but not in use here" for name in gone]

    def _read(self, name: str, state: Any, reader: CheckpointReader) -> Any:
        """Read the tensors in the state of one object, which may have a method `read_shard` (see `OptionalMembers`)."""
        # The state of an object that this run does not have is only reported, not read.
        if name != "data" and name not in self.registered:
            return state

        read_shard = optional_members(self.registered.get(name)).read_shard
        read = (lambda tensor: read_shard(tensor, reader)) if read_shard else reader.read
        return unpack(state, read, self._device)


def require_values(reader: CheckpointReader, *keys: str) -> None:
    """Raise a UserError unless the manifest has these keys: a program other than a run may have written it."""
    missing = sorted(keys - reader.manifest.values.keys())
    if missing:
        raise UserError(
            f"the checkpoint cannot be resumed: it does not contain {', '.join(missing)}",
            str(reader.checkpoint.path),
            "resume from a checkpoint that a run has saved (lockstep ckpt show)",
        )


@contextmanager
def _naming_checkpoint(reader: CheckpointReader) -> Iterator[None]:
    """Add to an error which checkpoint was being restored.

    The digest of the checkpoint is valid. So the error comes from the `load_state_dict` of an object, or from values
    that another version has saved, unless a file has changed since, or was deleted.
    """
    try:
        yield
    except InvalidCheckpoint as problem:
        raise UserError(
            f"the checkpoint {reader.checkpoint.path} has changed while it was restored",
            str(problem),
            "resume again, which verifies it and chooses another one if necessary",
        ) from None
    except Exception as error:
        if not isinstance(error, UserError):
            wrote = f"version {reader.manifest.lockstep} of Lockstep has written"
            error.add_note(f"raised while {reader.checkpoint.path} was restored, which {wrote}")

        raise


def merge_json_state(by_rank: list[JsonDict]) -> JsonDict:
    """Merge the JSON state of all ranks, which differs only where the ranks hold different parameters."""
    # In a pipeline, each rank has the extra state of its stage. If several ranks have the same key, the lowest rank's
    # value is used: it comes last here.
    model: JsonDict = {key: {} for key in by_rank[0]["model"]}
    for json_state in reversed(by_rank):
        for key, entries in model.items():
            entries.update(json_state["model"][key])

    optimizers = merge_optimizers([json_state["optimizers"] for json_state in by_rank])
    return {**by_rank[0], "model": model, "optimizers": optimizers}


def _has_statistics(state: Any) -> bool:
    """Return whether a state holds running statistics of a BatchNorm, at any depth."""
    if not isinstance(state, Mapping):
        return False

    return any(str(key).endswith("running_mean") or _has_statistics(value) for key, value in state.items())


def digest_of_upcoming(source: BatchSource) -> str | None:
    """Return a digest of the next samples, or None if the source cannot list them without reading them."""
    upcoming = source.upcoming()
    return None if upcoming is None else digest(upcoming)


def _check_next_samples(saved: str | None, current: str | None, changed_settings: Sequence[Change]) -> None:
    # A source that cannot list its next samples is not checked, nor is a checkpoint of an older version, which has an
    # ambiguous digest under another key.
    if saved is None or current is None or saved == current:
        return

    causes = [str(setting) for setting in changed_settings if setting.key.startswith(ORDER_SETTINGS)]
    undo = f"undo the changes ({', '.join(causes)})" if causes else "restore the dataset as it was"
    raise UserError(
        "the order of the samples has changed since the checkpoint was written",
        "the next samples are not the ones that the saved run would have taken",
        f"{undo}; or start a new run from the exported weights",
    )
