"""The state of a run's model, as a checkpoint holds it: parameters, buffers, and the extra state of modules."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn

from lockstep.checkpoint.manifest import weight_name
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.state.digests import FrozenDigests, digest
from lockstep.checkpoint.state.encoding import CapturedTensor, JsonDict, pack_into, unpack
from lockstep.checkpoint.state.reshard import different_model_error, read_into
from lockstep.checkpoint.state.tensor_names import aliases_by_key, aliases_in, frozen_names, is_extra, storage_key
from lockstep.errors import UserError, plural
from lockstep.optim.optimizers import Optimizers
from lockstep.runtime.shards import full_tensor


class ModelState:
    """Captures the state of a model and restores it. If parameters have float32 masters, the masters are saved."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        held_elsewhere: Collection[str],
        keep_frozen: bool,
        on_any_rank: Callable[[bool], bool],
    ):
        """`held_elsewhere`: see `ParameterHolders`.

        `keep_frozen` and `on_any_rank`: see `RunState`.
        """
        self.model = model
        self.optimizers = optimizers
        self._held_elsewhere = held_elsewhere
        self._device = next(model.parameters()).device

        # Frozen parameters for which a checkpoint holds only digests.
        self._digest_only = set() if keep_frozen else frozen_names(model)
        here = self._digest_only - set(held_elsewhere)
        self._frozen = FrozenDigests({name: model.get_parameter(name) for name in here}, on_any_rank)

        # Tied parameters are in here under all of their names.
        self._trained = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}

    # ---- saving ----

    def capture(self, tensors: dict[str, CapturedTensor]) -> tuple[JsonDict, dict[str, str]]:
        """Add all tensors to `tensors`. Return the rest of the state, without digests, and the aliases of tied ones."""
        state = self._saved_state()
        aliases = aliases_in(state)
        for name, value in state.items():
            if is_extra(name) or name in aliases or name in self._held_elsewhere:
                continue

            # If the parameter has a float32 master, save that: the parameter is only its rounded copy.
            to_save = self._master_or_parameter(name, value)
            if to_save is not None:
                tensors[weight_name(name)] = CapturedTensor(to_save.detach(), parameter=name)

        # The key is part of the file format (see CONTRIBUTING), like "frozen_digests".
        extra = {name: pack_into(tensors, value, f"extra.{name}") for name, value in state.items() if is_extra(name)}
        return {"extra": extra}, {weight_name(name): weight_name(first) for name, first in aliases.items()}

    def frozen_digests(self) -> dict[str, str]:
        """Return the digests of frozen parameters that are not saved. Collective if they are sharded."""
        return self._frozen.current()

    def _saved_state(self) -> dict[str, Any]:
        """Return the model's state dict, without the parameters of which only digests are saved."""
        return {name: value for name, value in self.model.state_dict().items() if name not in self._digest_only}

    # ---- restoring ----

    def restore(self, reader: CheckpointReader, saved_model: JsonDict, frozen_advice: str) -> None:
        """Restore what this rank holds of the model. Raise a UserError if another model was saved.

        `frozen_advice`: what to do if frozen parameters, of which only digests were saved, differ.
        """
        state = self.model.state_dict()
        saved = reader.weight_names()

        # Check everything before anything is changed.
        digests = {name: saved_digest for name, saved_digest in saved_model["frozen_digests"].items() if name in state}
        self._check_frozen(digests, frozen_advice)
        self._check_same_names(state, saved, saved_model["frozen_digests"])
        _check_same_shapes(state, saved, reader)
        _check_same_ties(state, saved, reader)
        modules = {name: self._module_of(name) for name in saved_model["extra"]}

        for name in saved:
            if name in self._held_elsewhere:
                continue

            read_into(state[name], weight_name(name), reader)

            # The parameter is now the rounded copy; its float32 master is read separately.
            master = self._master_or_parameter(name, state[name])
            if master is not None and master is not state[name]:
                read_into(master, weight_name(name), reader)

        for name, value in saved_model["extra"].items():
            modules[name].set_extra_state(unpack(value, reader.read, self._device))

    def _module_of(self, extra: str) -> nn.Module:
        """Return the module of a key "NAME._extra_state". Raise a UserError if the model does not have it."""
        name = extra.removesuffix("_extra_state").rstrip(".")
        try:
            return self.model.get_submodule(name)
        except AttributeError:
            raise different_model_error(
                f"the module {name!r}, which had extra state, is missing in this model"
            ) from None

    def _check_frozen(self, saved_digests: dict[str, str], advice: str) -> None:
        """Check that frozen parameters of which the checkpoint holds only a digest have the same bits now."""
        for name, saved_digest in saved_digests.items():
            if name in self._held_elsewhere or digest(full_tensor(self.model.get_parameter(name))) == saved_digest:
                continue

            raise UserError(
                f"the values of the frozen parameter {name!r} differ from those when the checkpoint was written",
                "the checkpoint holds only its digest (checkpoint.frozen=false)",
                advice,
            )

    def _check_same_names(self, state: dict[str, Tensor], saved: list[str], digests: dict[str, str]) -> None:
        """Check that each tensor of the model is in the checkpoint, at least as a digest, and vice versa."""
        names = {name for name in state if not is_extra(name)}

        # A model may leave frozen parameters out of its state dict.
        gone = digests.keys() - names - {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        differences = {
            "missing in the checkpoint": sorted(names - set(saved) - digests.keys()),
            "missing in this model": sorted((set(saved) - names) | gone),
        }
        descriptions = [
            f"{plural(len(missing), 'tensor')} {where}, first {missing[0]!r}"
            for where, missing in differences.items()
            if missing
        ]
        if descriptions:
            raise different_model_error("; ".join(descriptions))

    # ---- both ----

    def _master_or_parameter(self, name: str, value: Tensor) -> Tensor | None:
        """Return the float32 master of a parameter; `value` if it has none; None if another rank holds the master."""
        masters = self.optimizers.masters
        parameter = self._trained.get(name)
        if masters is None or not masters.persistent or parameter is None:
            return value

        return masters.master_of(parameter)


# ---- the same model? ----


def _check_same_shapes(state: dict[str, Tensor], saved: list[str], reader: CheckpointReader) -> None:
    for name in saved:
        before, now = reader.shape(weight_name(name)), tuple(state[name].shape)
        if before != now:
            raise different_model_error(f"{name!r} has shape {before} in the checkpoint and {now} in this model")


def _check_same_ties(state: dict[str, Tensor], saved: list[str], reader: CheckpointReader) -> None:
    aliases_now = aliases_by_key({name: storage_key(state[name]) for name in saved})
    aliases_before = aliases_by_key({name: reader.stored_name(weight_name(name)) for name in saved})

    for name in saved:
        if aliases_now.get(name) != aliases_before.get(name):
            here, there = "in this model", "in the checkpoint"
            tied, untied = (here, there) if name in aliases_now else (there, here)
            raise different_model_error(f"{name!r} is tied to another parameter {tied}, but not {untied}")
