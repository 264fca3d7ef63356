"""The full state of a run, as a checkpoint holds it: tensors, named as in the model's state dict, and the rest as JSON.

Nothing in it depends on the number of ranks: a checkpoint can be resumed on any number of ranks.

    model.NAME                    parameters and buffers; the master weights of parameters stored in bfloat16
    optimizer.NUMBER.NAME.KEY     the optimizer state of parameter NAME
    optimizer.NUMBER.initial      tensors in the options of the parameter groups when the run began
    optimizer.NUMBER.settings     tensors in these options at the save
    ema.NAME                      averages of parameters (`ema.decay`)
    extra.NAME                    tensors in a module's extra state
    part.NAME                     tensors in the state of a `Part`: any other object with state
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep.checkpoint.load import CheckpointReader
from lockstep.checkpoint.state.digests import digest
from lockstep.checkpoint.state.model_state import ModelState
from lockstep.checkpoint.state.optimizer_state import OptimizerStates, merge_optimizers
from lockstep.checkpoint.state.part import Part, optional_members
from lockstep.checkpoint.state.reshard import read_into
from lockstep.checkpoint.state.state_tree import JsonDict, pack, unpack
from lockstep.config.changes import Change
from lockstep.errors import UserError, plural
from lockstep.optim.optimizers import Optimizers
from lockstep.optim.weight_average import WeightAverage
from lockstep.task import BatchSource, Task

# How the names of callbacks begin among those of the parts.
CALLBACK = "callback "

# Settings that determine the order of the samples. Those that end in a dot are prefixes.
ORDER_SETTINGS = ("seed", "data.", "global_batch", "tail", "task.")


class CapturedState(NamedTuple):
    """The result of `RunState.capture`. The tensors are not copied or gathered."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]  # for tied tensors: other name -> name in `tensors`
    plain_state: JsonDict

    # What each part's state_dict() returned, which `plain_state` and `tensors` encode.
    part_states: dict[str, Any]

    # The tensors that may be copied while training continues: optimizer state and averages, which change only after
    # `wait_for_copy`. The model is copied at once: a forward may change its buffers, and the user's code its
    # parameters.
    copy_later: frozenset[str]


class RunState:
    """Captures the state of a run and restores it.

    State and tensors are named after parameters, not after ranks or positions. `reshard` decides which rank writes
    which tensor, and reads for each rank the tensors and shards that it holds now.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        stepper: Part,
        source: BatchSource,
        parts: Mapping[str, Part],
        *,
        keep_frozen: bool,
        holders: Mapping[str, tuple[int, ...]] | None = None,
        rank: int = 0,
        duplicates: frozenset[str] = frozenset(),
        average: WeightAverage | None = None,
        on_any_rank: Callable[[bool], bool] = bool,
    ):
        """Keep references to the objects of a run; nothing is copied.

        `parts`: the task, objects that the user's loop registered, and others. The data source is one more part.
        `keep_frozen`: whether frozen parameters are saved, or only their digests.
        `holders`: the ranks that hold a parameter, for parameters that not all ranks hold.
        `duplicates`: see `RankRole.duplicates`.
        `average`: the averages of the parameters that this rank holds, with `ema.decay`.
        `on_any_rank`: returns whether a value is true on any rank, for digests of sharded parameters. Collective.
        """
        self.model = model
        self.optimizers = optimizers
        self.stepper = stepper
        self.source = source
        self.parts = parts
        self.duplicates = duplicates
        self.average = average

        # Whether all ranks capture the same plain state and the same replicated tensors. Shards may still differ.
        self.same_on_all_ranks = not (optimizers.sharded or holders)

        # In a pipeline, the model of a rank has the names of all parameters, but only the tensors of its stage.
        held_elsewhere = {name for name, ranks in (holders or {}).items() if rank not in ranks}
        self._device = next(model.parameters()).device
        self._model_state = ModelState(model, optimizers, held_elsewhere, keep_frozen, on_any_rank)
        self._optimizer_states = OptimizerStates(model, optimizers, held_elsewhere)

    # ---- saving ----

    def capture(self) -> CapturedState:
        """Return the state of the run.

        Collective under fsdp with checkpoint.frozen=false: digests of frozen parameters need the full tensors.
        """
        captured = self._capture_tensors()
        captured.plain_state["model"]["frozen_digests"] = self._model_state.frozen_digests()
        captured.plain_state["next_samples"] = next_samples(self.source)

        # The stepper has state only between two steps, and no tensors.
        stepper_tensors: dict[str, Tensor] = {}
        captured.plain_state["stepper"] = pack(self.stepper.state_dict(), "stepper", stepper_tensors)
        assert not stepper_tensors, f"not in `tensors`: {list(stepper_tensors)}"
        return captured

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that `capture` returns, without computing digests.

        Collective if the `state_dict` of the data source is.
        """
        return self._capture_tensors().tensors

    def _capture_tensors(self) -> CapturedState:
        """Return all tensors, and the plain state that belongs to them."""
        tensors: dict[str, Tensor] = {}
        model, aliases = self._model_state.capture(tensors)
        optimizers, copy_later = self._optimizer_states.capture(tensors)

        # Averages change after every step, even a skipped one; `Run.end_step` waits for the copy, as an update does.
        averages = {f"ema.{name}": tensor for name, tensor in self.average.averages.items()} if self.average else {}
        tensors |= averages
        copy_later = copy_later | averages.keys()

        parts = {"data": self.source, **self.parts}
        part_states = {name: part.state_dict() for name, part in parts.items()}

        # The keys are part of the file format (see CONTRIBUTING), like those that `capture` adds.
        plain_state: JsonDict = {
            "model": model,
            "optimizers": optimizers,
            "parts": {name: pack(state, f"part.{name}", tensors) for name, state in part_states.items()},
        }
        return CapturedState(tensors, aliases, plain_state, part_states, copy_later)

    def bytes_at_start(self) -> tuple[int, int]:
        """Return the bytes of model and parts, and an estimate for the optimizers, which allocate their state later."""
        tensors = self._model_state.tensors()

        # Only the tensors that `pack` adds are used here, not its result.
        for name, part in self.parts.items():
            pack(part.state_dict(), f"part.{name}", tensors)

        known = sum(tensor.nbytes for tensor in tensors.values())

        if self.average:
            known += sum(average.nbytes for average in self.average.averages.values())

        # float32 masters are saved instead of bfloat16 parameters, which takes twice the bytes counted above.
        if self.optimizers.masters:
            known += sum(master.nbytes // 2 for master in self.optimizers.masters.persistent_tensors())

        return known, self._optimizer_states.estimated_bytes()

    def digest_replicated(self, captured: CapturedState) -> dict[str, str]:
        """Return a digest of the state of each part that is replicated on every rank."""
        replicated = [name for name, part in self.parts.items() if optional_members(part).read_shard is None]
        return {name: digest(captured.part_states[name]) for name in replicated}

    # ---- restoring ----

    def restore(
        self, reader: CheckpointReader, plain_state: JsonDict, changed_settings: Sequence[Change] = ()
    ) -> list[str]:
        """Restore the tensors and shards that this rank holds. Raise a UserError if a different run was saved.

        Return descriptions of changes since the save that are not in `changed_settings`.
        """
        with reader.keeping_open():
            return self._restore(reader, plain_state, changed_settings)

    def _restore(
        self, reader: CheckpointReader, plain_state: JsonDict, changed_settings: Sequence[Change]
    ) -> list[str]:
        self._check_callbacks(plain_state["parts"])

        # The model first: it checks that the checkpoint is of this model before anything is changed.
        self._model_state.restore(reader, plain_state["model"], self._frozen_advice())

        # Some optimizers train other weights than they evaluate. A checkpoint holds those to evaluate, and the
        # optimizers' state has the others.
        changes = self._optimizer_states.restore(plain_state["optimizers"], reader)
        self.optimizers.use_training_weights()
        self.stepper.load_state_dict(unpack(plain_state["stepper"], reader.read, self._device))

        # The data source must continue with the samples that the saved run would have taken next.
        parts = {name: self._read_part(name, state, reader) for name, state in plain_state["parts"].items()}
        self.source.load_state_dict(parts.pop("data"))
        _check_next_samples(plain_state["next_samples"], next_samples(self.source), changed_settings)

        # The task and other parts come last: their `load_state_dict` may read what was restored above.
        changes += self._restore_average(reader)
        changes += self._restore_parts(parts)
        return changes

    def _frozen_advice(self) -> str:
        advice = [optional_members(part).frozen_advice for part in self.parts.values()]
        return next(filter(None, advice), Task.frozen_advice)

    def _restore_average(self, reader: CheckpointReader) -> list[str]:
        """Restore the averages of the parameters. Return a line if the checkpoint has none, or they are not in use."""
        saved = {name.removeprefix("ema.") for name in reader.names() if name.startswith("ema.")}
        if self.average is None:
            return ["ema: in the checkpoint, but not in use here"] if saved else []

        for name in saved & self.average.averages.keys():
            read_into(self.average.averages[name], f"ema.{name}", reader)

        # A parameter that was frozen when the checkpoint was written has no average in it either.
        missing = sorted(self.average.averages.keys() - saved)
        self.average.restart(missing)
        if not missing:
            return []

        return [f"ema: {plural(len(missing), 'average')} not in the checkpoint, starting from the weights"]

    def _check_callbacks(self, saved: JsonDict) -> None:
        """Check that the callbacks with state have the names that they had, before anything is changed."""
        now = {name for name, part in self.parts.items() if name.startswith(CALLBACK) and part.state_dict()}
        before = {name for name, state in saved.items() if name.startswith(CALLBACK) and state}
        differences = {"only in the checkpoint": before - self.parts.keys(), "only in this run": now - saved.keys()}
        found = [f"{where}: {', '.join(sorted(names))}" for where, names in differences.items() if names]
        if found:
            raise UserError(
                "the callbacks with state are not those of the checkpoint",
                "; ".join(found),
                "pass the callbacks that the run had, by the same names; or start a new run from the exported weights",
            )

    def _restore_parts(self, states: JsonDict) -> list[str]:
        """Restore all parts except the data source. Return descriptions of the parts that gained or lost state."""
        changed = []
        for name, part in self.parts.items():
            saved = states.pop(name, None)
            current = part.state_dict()

            # What changed between the two is reported, not refused: a part that is no callback may come and go.
            if saved:
                changed += optional_members(part).changes_since(saved)
                part.load_state_dict(saved)
                if not current:
                    changed.append(f"{name}: has state in the checkpoint, but none in this run")
            elif current:
                changed.append(f"{name}: has no state in the checkpoint, and starts from the beginning")

        # A part that this run does not have any more.
        unused = [f"{name}: in the checkpoint, but not in use here" for name, state in states.items() if state]
        return changed + unused

    def _read_part(self, name: str, state: Any, reader: CheckpointReader) -> Any:
        """Read the tensors in the state of one part, which may have a method `read_shard` (see `Part`)."""
        # The state of a part that this run does not have is only reported, not read.
        if name != "data" and name not in self.parts:
            return state

        read_shard = optional_members(self.parts.get(name)).read_shard
        read = (lambda tensor: read_shard(tensor, reader)) if read_shard else reader.read
        return unpack(state, read, self._device)


def merge_plain_state(by_rank: list[JsonDict]) -> JsonDict:
    """Merge the plain state of all ranks, which differs only where the ranks hold different parameters."""
    # In a pipeline, each rank has the extra state of its stage. If several ranks have it, the lowest rank's is used: it
    # comes last here and overwrites the others.
    model: JsonDict = {key: {} for key in by_rank[0]["model"]}
    for plain_state in reversed(by_rank):
        for key, entries in model.items():
            entries.update(plain_state["model"][key])

    optimizers = merge_optimizers([plain_state["optimizers"] for plain_state in by_rank])
    return {**by_rank[0], "model": model, "optimizers": optimizers}


def next_samples(source: BatchSource) -> str | None:
    """Return a digest of the next samples, or None if the source cannot list them without reading them."""
    upcoming = source.upcoming()
    return None if upcoming is None else digest(upcoming)


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
