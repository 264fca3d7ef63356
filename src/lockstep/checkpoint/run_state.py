"""The whole state of a run, as a checkpoint holds it: tensors under the model's own names, and plain values.

Nothing in it knows a rank or a number of ranks: whatever saved it, any world can go on from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.checkpoint.load import CheckpointReader
from lockstep.checkpoint.reshard import Change, fill, read_beside, without_echoes
from lockstep.checkpoint.state_tree import digest, pack, unpack
from lockstep.errors import UserError
from lockstep.optim.bf16_masters import COMPENSATION
from lockstep.optim.optimizers import Optimizers
from lockstep.runtime.layout import local, whole
from lockstep.task import BatchSource, Task

Values = dict[str, Any]


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Counted(Stateful, Protocol):
    """The stepper, as far as a checkpoint needs it."""

    counters: Any  # .step, .applied
    before_update: Callable[[], None]  # called before parameters change, while a snapshot may still be taken


class RunState:
    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        stepper: Counted,
        source: BatchSource,
        others: Mapping[str, Stateful],
        keep_frozen: bool,
        holders: Mapping[str, tuple[int, ...]] = {},
        rank: int = 0,
        echoes: frozenset[str] = frozenset(),
    ):
        self.model, self.optimizers, self.stepper, self.source = model, optimizers, stepper, source
        self.alike = type(optimizers) is Optimizers and not holders  # every rank knows the same
        self.elsewhere = {name for name, ranks in holders.items() if rank not in ranks}  # here it is only a name
        self._echoes = echoes  # of what is cut over these, another rank saves the same part
        self.others = others  # the task, and what a loop of the user's own has registered
        self._device = next(model.parameters()).device
        self._left_out = set() if keep_frozen else {n for n, p in model.named_parameters() if not p.requires_grad}
        parameters = model.named_parameters(remove_duplicate=False)
        self._trained = {name: p for name, p in parameters if p.requires_grad}
        self._initial_groups = [_settings(optimizer) for optimizer in optimizers.all]

    def capture(self) -> tuple[dict[str, Tensor], dict[str, str], Values]:
        """(tensors, other names of tied ones, values). The tensors are the live ones: nothing is copied here."""
        tensors, aliases, values = self.capture_tensors()
        return tensors, aliases, values | {"stepper": self.stepper.state_dict()}

    def capture_tensors(self) -> tuple[dict[str, Tensor], dict[str, str], Values]:
        """The same, while the outcome of the last step may still be on its way."""
        tensors: dict[str, Tensor] = {}
        aliases: dict[str, str] = {}
        extra: Values = {}
        seen: dict[Any, str] = {}
        for name, value in self.model.state_dict().items():
            if name in self._left_out:
                continue
            full = f"model.{name}"
            if is_extra(name):
                extra[name] = pack(value, f"extra.{name}", tensors)
            elif (first := seen.setdefault(_identity(value), full)) != full:
                aliases[full] = first
            elif name not in self.elsewhere and (best := self._in_full(name, value)) is not None:
                tensors[full] = best.detach()
        parts = {"data": self.source.state_dict(), **{k: v.state_dict() for k, v in self.others.items()}}
        values: Values = {
            "model": {
                "extra": extra,
                "left_out": {n: digest(whole(self._named(n))) for n in sorted(self._left_out - self.elsewhere)},
            },
            "optimizers": [self._optimizer(number, tensors) for number in range(len(self.optimizers.all))],
            "parts": {name: pack(state, f"part.{name}", tensors) for name, state in parts.items()},
            "next_samples": next_samples(self.source),
        }
        return without_echoes(tensors, self._echoes), aliases, values

    def steady(self) -> set[str]:
        """What only an update changes, and nobody else has a reason to touch: what the optimizers keep. A model's own
        tensors may change in any forward, and parameters in any code of the user's."""
        by_id = self._names()
        return {
            f"optimizer.{number}.{by_id[id(p)]}.{key}"
            for number, optimizer in enumerate(self.optimizers.all)
            for p, state in optimizer.state.items()
            for key in state
        }

    def bytes_at_start(self) -> tuple[int, int]:
        """(of the model, of what its optimizers will keep: a guess, since they allocate later)."""
        named = self.model.state_dict().items()
        certain = sum(t.nbytes for name, t in named if not is_extra(name) and name not in self._left_out)
        if self.optimizers.masters:  # float32, where the model has bfloat16
            certain += sum(master.nbytes // 2 for master in self.optimizers.masters.held())
        copies = {"AdamW8bit": 0.5, "Adafactor": 0, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2}
        guess = sum(
            int(copies.get(type(optimizer).__name__, bool(group.get("momentum"))) * p.nbytes)
            for optimizer in self.optimizers.all
            for group in optimizer.param_groups
            for p in group["params"]
        )
        beside: dict[str, Tensor] = {}
        for name, other in self.others.items():
            pack(other.state_dict(), name, beside)
        return certain + sum(t.nbytes for t in beside.values()), guess

    def digest_of_others(self) -> dict[str, str]:
        """Of those that every rank holds whole."""
        whole_ones = {name: other for name, other in self.others.items() if not hasattr(other, "read")}
        return {name: digest(other.state_dict()) for name, other in whole_ones.items()}

    def restore(self, reader: CheckpointReader, values: Values, settings: Sequence[Change] = ()) -> list[str]:
        """Put everything back in place. `settings`: those that are not as they were. Returns what else the user has
        changed since, in words."""
        self._restore_model(reader, values["model"])
        changed = []
        for number, saved in enumerate(_as_many(values["optimizers"], len(self.optimizers.all))):
            changed += self._restore_optimizer(number, saved, reader)
        self.stepper.load_state_dict(values["stepper"])
        parts = {name: self._part(name, state, reader) for name, state in values["parts"].items()}
        self.source.load_state_dict(parts.pop("data"))
        _check_next_samples(values["next_samples"], next_samples(self.source), settings)
        for name, owner in self.others.items():
            saved, here = parts.pop(name, None), owner.state_dict()
            if saved:
                owner.load_state_dict(saved)
            if saved and not here:
                changed.append(f"{name}: has state in the checkpoint, and keeps none here")
            elif here and not saved:
                changed.append(f"{name}: has no state in the checkpoint, starts afresh")
        return changed + [f"{name}: in the checkpoint, but not in use here" for name, state in parts.items() if state]

    def _part(self, name: str, state: Any, reader: CheckpointReader) -> Any:
        """Its owner may know better what this rank needs of the saved tensors; without an owner they are not read."""
        owner = self.others.get(name)
        if owner is None and name != "data":
            return state
        own: Callable[[str, CheckpointReader], Tensor] | None = getattr(owner, "read", None)
        return unpack(state, reader.read if own is None else lambda tensor: own(tensor, reader), self._device)

    # ---- the model ----

    def _named(self, name: str) -> Tensor:
        return self.model.get_parameter(name)

    def _in_full(self, name: str, value: Tensor) -> Tensor | None:
        """What is saved of a parameter is its master, where it has one; None: another rank has that."""
        masters, parameter = self.optimizers.masters, self._trained.get(name)
        if masters is None or not masters.persistent or parameter is None:
            return value
        return masters.master_of(parameter)

    def _restore_model(self, reader: CheckpointReader, values: Values) -> None:
        here = self.model.state_dict()
        saved = {name.removeprefix("model.") for name in reader.names() if name.startswith("model.")}
        plain = {name for name in here if not is_extra(name)}
        left_out = values["left_out"]
        for name, expected in left_out.items():
            if name in plain - self.elsewhere and digest(whole(self._named(name))) != expected:
                raise UserError(
                    f"the frozen parameter {name!r} as it was when the checkpoint was written",
                    "other values; the checkpoint holds only its digest (checkpoint.frozen=false)",
                    getattr(self.others.get("task"), "frozen_advice", Task.frozen_advice),
                )
        missing, unexpected = sorted(plain - saved - left_out.keys()), sorted(saved - plain)
        if missing or unexpected:
            names = [f"{len(missing)} missing, first {missing[0]!r}"] if missing else []
            names += [f"{len(unexpected)} that this model has not, first {unexpected[0]!r}"] if unexpected else []
            raise _other_model("; ".join(names))
        tied, places = {}, {}
        for name in sorted(saved):
            source, target = f"model.{name}", here[name]
            if tuple(target.shape) != reader.shape(source):
                raise _other_model(f"{name!r} has shape {reader.shape(source)}, here {tuple(target.shape)}")
            original, place = reader.original(source), _identity(target)
            if tied.setdefault(place, original) != original:
                raise _other_model(f"{name!r} is tied to another parameter here, and is not in the checkpoint")
            if places.setdefault(original, place) != place:
                raise _other_model(f"{name!r} is tied to another parameter in the checkpoint, and is not here")
            if name not in self.elsewhere:
                fill(target, source, reader)
                if (kept := self._in_full(name, target)) is not None and kept is not target:
                    fill(kept, source, reader)
        for name, value in values["extra"].items():
            owner = name.removesuffix("_extra_state").rstrip(".")
            self.model.get_submodule(owner).set_extra_state(unpack(value, reader.read, self._device))

    # ---- the optimizers ----

    def _names(self) -> dict[int, str]:
        """Of what the optimizers hold: the parameters, or their stand-ins."""
        stand_ins = self.optimizers.masters.named() if self.optimizers.masters else {}
        return {id(p): name for name, p in self.model.named_parameters()} | stand_ins

    def _optimizer(self, number: int, tensors: dict[str, Tensor]) -> Values:
        optimizer, names = self.optimizers.all[number], self._names()
        prefix = f"optimizer.{number}"
        strangers = [key for key in optimizer.state if id(key) not in names]
        if strangers:
            raise UserError(
                f"to save the state of {type(optimizer).__name__}",
                f"state that belongs to no parameter of the model: {strangers[0]!r:.80}",
                "keep such state in the parameter groups, or in the task's state_dict()",
            )
        state = {names[id(p)]: kept for p, kept in optimizer.state.items() if kept}
        return {
            "kind": type(optimizer).__name__,
            "state": pack(state, prefix, tensors),
            "params": [[names[id(p)] for p in group] for group in self.optimizers.groups[number]],
            "initial": pack(self._initial_groups[number], f"{prefix}.initial", tensors),
            "settings": pack(_settings(optimizer), f"{prefix}.settings", tensors),
        }

    def _restore_optimizer(self, number: int, saved: Values, reader: CheckpointReader) -> list[str]:
        optimizer, names, masters = self.optimizers.all[number], self._names(), self.optimizers.masters
        if saved["kind"] != type(optimizer).__name__:
            raise UserError(
                f"to go on with {type(optimizer).__name__}",
                f"the state of {saved['kind']} in the checkpoint",
                "use the optimizer that the run began with, or start a new run from the exported weights",
            )
        order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        before = [name for group in saved["params"] for name in group]
        here = {names[id(p)] for group in self.optimizers.groups[number] for p in group}
        if here != set(before):
            name = sorted(here ^ set(before))[0]
            raise _other_model(f"optimizer {number} does not hold the same parameters, such as {name!r}")
        changed, groups = self._settings_to_use(number, saved, reader)
        unused = set() if masters and masters.rounding == "compensated" else {COMPENSATION}
        mine = {
            name: {key: value for key, value in kept.items() if key not in unused}
            for name, kept in saved["state"].items()
            if name in {*order} - self.elsewhere
        }
        parameters = dict(self.model.named_parameters())

        def read(name: str) -> Tensor:
            owner = name.removeprefix(f"optimizer.{number}.").rpartition(".")[0]
            return read_beside(name, parameters.get(owner), reader)

        state = unpack(mine, read, self._device)
        numbers = {name: index for index, name in enumerate(order)}
        index = iter(range(len(order)))
        packed = {
            "state": {numbers[name]: kept for name, kept in state.items()},
            "param_groups": [
                {**settings, "lr": group["lr"], "params": [next(index) for _ in group["params"]]}
                for settings, group in zip(groups, optimizer.param_groups, strict=True)
            ],
        }
        optimizer.load_state_dict(packed)  # torch puts every tensor on its device, but also casts it
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            for key, value in state.get(names[id(p)], {}).items():
                place = optimizer.state[p].get(key)
                moved = isinstance(value, Tensor) and isinstance(place, Tensor)
                optimizer.state[p][key] = value.to(place.device) if moved else value
        return changed

    def _settings_to_use(self, number: int, saved: Values, reader: CheckpointReader) -> tuple[list[str], list[Values]]:
        """A setting that the user has changed in code since stays changed; the rest is as the run left it, since some
        optimizers keep numbers of their own there."""
        optimizer = self.optimizers.all[number]
        mine, now = self._initial_groups[number], _settings(optimizer)
        initial, kept = (
            unpack(saved["initial"], reader.read, self._device),
            unpack(saved["settings"], reader.read, self._device),
        )
        if len(initial) != len(now):
            return [f"optimizer {number} has {len(now)} parameter groups, {len(initial)} when it was saved"], now
        changed, groups = [], []
        for group, (new, old) in enumerate(zip(mine, initial, strict=True)):
            chosen = dict(now[group])
            for key in chosen:
                if key not in old or repr(old[key]) != repr(new[key]):
                    if key != "fused":
                        changed.append(f"optimizer {number}, group {group}: {key} {old.get(key)} -> {new[key]}")
                else:
                    chosen[key] = kept[group][key]
            groups.append(chosen)
        return changed, groups


def is_extra(name: str) -> bool:
    """What a module adds to its state by `get_extra_state`: anything at all."""
    return name.rpartition(".")[2] == "_extra_state"


def next_samples(source: BatchSource) -> str | None:
    """What comes next, as a digest, if the source can tell without reading it."""
    upcoming: Callable[[], Any] | None = getattr(source, "upcoming", None)
    return digest(upcoming()) if upcoming else None


DECIDE_ORDER = ("seed", "data.", "global_batch", "tail", "task.")


def _check_next_samples(saved: str | None, here: str | None, settings: Sequence[Change]) -> None:
    if saved is not None and here is not None and saved != here:
        guilty = ", ".join(str(setting) for setting in settings if setting.key.startswith(DECIDE_ORDER))
        back = f"take back what has changed ({guilty})" if guilty else "restore the dataset as it was"
        raise UserError(
            "to go on at the next sample",
            "an order of the samples other than the one the run had: the next ones are not those it would have taken",
            f"{back}; or start a new run from the exported weights",
        )


def _settings(optimizer: torch.optim.Optimizer) -> list[Values]:
    return [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]


def full_state(
    model: nn.Module, keep: bool, fetch: Callable[[str, Tensor], Tensor]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Gather the model's full tensors, and the aliases of tied ones. Collective: every rank must call it.

    Ranks without `keep` get no tensors. `fetch` (a driver's) gathers one tensor, given its name.
    """
    found, aliases, seen = {}, {}, {}
    for name, value in model.state_dict().items():
        if is_extra(name):
            continue
        first = seen.setdefault(_identity(value), name)
        if first != name:
            aliases[name] = first
            continue
        full = fetch(name, value)
        if keep:
            found[name] = (full if full is value else full.cpu()).contiguous()
    return found, aliases


def _identity(tensor: Tensor) -> Any:
    """Equal for two names of one tensor."""
    tensor = local(tensor)
    if tensor.numel() == 0:  # a part without rows: it has no address, but a storage of its own
        return tensor.untyped_storage()._cdata
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _as_many(saved: list[Values], count: int) -> list[Values]:
    if len(saved) != count:
        raise _other_model(f"{len(saved)} optimizers, here {count}")
    return saved


def _other_model(found: str) -> UserError:
    return UserError(
        "to go on with the model of the checkpoint",
        found,
        "restore the task and its options as they were, or start a new run (leave --resume out)",
    )
