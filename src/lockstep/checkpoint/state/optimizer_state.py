"""The state of a run's optimizers, as a checkpoint holds it.

Optimizers are matched by their order; the state in each, by parameter name.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.state.digests import digest
from lockstep.checkpoint.state.encoding import CapturedTensor, JsonDict, pack_into, unpack
from lockstep.checkpoint.state.reshard import different_model_error, read_state_like
from lockstep.errors import UserError, plural
from lockstep.optim.bf16_masters import COMPENSATION
from lockstep.optim.optimizers import Optimizers
from lockstep.optim.registry import state_copies
from lockstep.runtime.shards import in_memory_order_of


class OptimizerStates:
    """Captures and restores the state of all optimizers of a run.

    State is saved by the names of parameters, not by their positions in groups. So it can be restored on another number
    of ranks, with another strategy, or by an optimizer whose groups were put in another order.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers, held_elsewhere: Collection[str]):
        """`held_elsewhere`: see `ParameterHolders`."""
        self.model = model
        self.optimizers = optimizers
        self._held_elsewhere = held_elsewhere
        self._device = next(model.parameters()).device

        # The options of the parameter groups as the user's code set them. A resume compares them with the saved ones.
        # Tensors are copied, since an optimizer may change them in place.
        self._options_at_start = [
            [{key: _copied(value) for key, value in group.items()} for group in _group_options(optimizer)]
            for optimizer in optimizers.all
        ]

    # ---- saving ----

    def capture(self, tensors: dict[str, CapturedTensor]) -> list[JsonDict]:
        """Add all tensors to `tensors`. Return the rest of the state of each optimizer."""
        return [self._capture(number, tensors) for number in range(len(self.optimizers.all))]

    def _capture(self, number: int, tensors: dict[str, CapturedTensor]) -> JsonDict:
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

        prefix = f"optimizer.{number}"
        packed_state = {}
        for p, state in optimizer.state.items():
            if state:
                name = names[id(p)]
                packed_state[name] = pack_into(tensors, state, f"{prefix}.{name}", parameter=name, copy_later=True)

        # The options of the parameter groups are saved as the user's code set them, and as they are now, since some
        # optimizers change them.
        options_at_start = pack_into(tensors, self._options_at_start[number], f"{prefix}.initial")
        options_at_save = pack_into(tensors, _group_options(optimizer), f"{prefix}.settings")

        # The keys are part of the file format (see CONTRIBUTING).
        return {
            "kind": type(optimizer).__name__,
            "state": packed_state,
            "params": [[names[id(p)] for p in group] for group in self.optimizers.groups[number]],
            "initial": options_at_start,
            "settings": options_at_save,
        }

    def estimated_bytes(self) -> int:
        """Return an estimate of the bytes of the state, which optimizers allocate in their first step."""
        groups = [(optimizer, group) for optimizer in self.optimizers.all for group in optimizer.param_groups]
        return sum(
            int(state_copies(optimizer, group) * p.nbytes) for optimizer, group in groups for p in group["params"]
        )

    # ---- restoring ----

    def restore(self, saved: list[JsonDict], reader: CheckpointReader) -> list[str]:
        """Restore the state of the parameters that this rank updates. Return descriptions of changed options."""
        if len(saved) != len(self.optimizers.all):
            saved_count = plural(len(saved), "optimizer")
            raise different_model_error(f"the checkpoint has {saved_count}, the task {len(self.optimizers.all)}")

        return [change for number, state in enumerate(saved) for change in self._restore(number, state, reader)]

    def _restore(self, number: int, saved: JsonDict, reader: CheckpointReader) -> list[str]:
        optimizer = self.optimizers.all[number]
        self._check_same(number, saved)
        changed, options = self._merge_options(number, saved, reader)

        # With ZeRO-1 or in a pipeline, a rank holds only some of the parameters.
        names = self._names_by_id()
        held = {names[id(p)]: (p, group) for group in optimizer.param_groups for p in group["params"]}
        needed = {
            name: state for name, state in saved["state"].items() if name in held and name not in self._held_elsewhere
        }
        states = {name: _in_memory_order(state, held[name][0]) for name, state in self._read(needed, reader).items()}

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

    def _check_same(self, number: int, saved: JsonDict) -> None:
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
            raise different_model_error(
                f"optimizer {number} does not hold the same parameters, such as {min(differing)!r}"
            )

    def _read(self, saved: JsonDict, reader: CheckpointReader) -> JsonDict:
        # The compensation (the rounding errors of bfloat16 parameters) is dropped if this run does not add it back.
        masters = self.optimizers.masters
        if not (masters and masters.rounding == "compensated"):
            saved = {name: {k: v for k, v in state.items() if k != COMPENSATION} for name, state in saved.items()}

        # State is sharded like its parameter.
        parameters = dict(self.model.named_parameters())
        return {
            name: unpack(state, partial(read_state_like, parameter=parameters.get(name), reader=reader), self._device)
            for name, state in saved.items()
        }

    def _merge_options(
        self, number: int, saved: JsonDict, reader: CheckpointReader
    ) -> tuple[list[str], list[JsonDict]]:
        """Return the user's changes to the parameter groups, and the options to use for each group.

        An option that the user's code sets to another value than in the saved run keeps this new value. All other
        options get the values of the save: some optimizers keep counters there, and some add options in the first
        step().
        """
        # The options of each group, as the user's code set them in the saved run and in this one, and at the save.
        set_before = unpack(saved["initial"], reader.read, self._device)
        set_now = self._options_at_start[number]
        at_save = unpack(saved["settings"], reader.read, self._device)

        # Groups have no names, so they cannot be matched if their number differs.
        current = _group_options(self.optimizers.all[number])
        if len(set_before) != len(current):
            change = f"optimizer {number} has {len(current)} parameter groups, {len(set_before)} when it was saved"
            return [change], current

        changed = []
        merged = []
        for group, options in enumerate(current):
            before, now = set_before[group], set_now[group]
            different = _different_keys(before, now)
            kept = {key: value for key, value in options.items() if key in different & now.keys()}
            as_saved = {key: value for key, value in at_save[group].items() if key not in different}
            merged.append(kept | as_saved)

            # `fused` depends on the device and does not change results.
            for key in sorted(different - {"fused"}):
                values = f"{_as_text(before.get(key))} -> {_as_text(now.get(key))}"
                changed.append(f"optimizer {number}, group {group}: {key} {values}")

        return changed, merged

    def _names_by_id(self) -> dict[int, str]:
        """Return the names of the optimizers' tensors, by id: the parameters or their float32 masters."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        masters = self.optimizers.masters
        return names | masters.named() if masters else names


def merge_optimizers(by_rank: list[list[JsonDict]]) -> list[JsonDict]:
    """Merge what `capture` returned on each rank: with ZeRO-1, each has the state of its own parameters."""
    merged = [{**optimizer, "state": {}} for optimizer in by_rank[0]]
    for optimizers in by_rank:
        for optimizer, saved in zip(merged, optimizers, strict=True):
            optimizer["state"].update(saved["state"])

    return merged


def _group_options(optimizer: torch.optim.Optimizer) -> list[JsonDict]:
    """Return a copy of the options of each parameter group, without the learning rate, which the schedule sets."""
    return [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]


def _different_keys(before: JsonDict, now: JsonDict) -> set[str]:
    """Return the keys that only one of two dicts has, or that have different values in them."""
    in_both = before.keys() & now.keys()
    changed = {key for key in in_both if digest(before[key]) != digest(now[key])}
    return (before.keys() ^ now.keys()) | changed


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _as_text(value: Any) -> str:
    """Return the value of an option for a message: all digits of a small tensor, which its repr rounds."""
    return str(value.tolist() if isinstance(value, Tensor) and value.numel() <= 8 else value)


def _in_memory_order(state: JsonDict, parameter: Tensor) -> JsonDict:
    """Return the state of `parameter` as its optimizer would have made it: a checkpoint has tensors in index order."""
    return {
        key: in_memory_order_of(parameter, value)
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else value
        for key, value in state.items()
    }


def _on_device_of(parameter: Tensor, key: str, value: Any, group: JsonDict) -> Any:
    """Move a value of an optimizer's state to the device of its parameter, without a cast."""
    # As in torch, step counts stay on the host unless the optimizer's kernels read them.
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return value.to(parameter.device) if isinstance(value, Tensor) and not on_host else value
