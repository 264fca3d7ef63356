"""Optimizers by name (`optimizer=adamw8bit`), which take over the parameter groups of the task's optimizer.

What is known about a class is one entry in TRAITS, which also has torch's other classes; how it is built by name is one
entry in OPTIMIZERS. This module imports torch only when it builds an optimizer, so that a launcher can check names
quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from lockstep.config import RunConfig
from lockstep.errors import UserError, unknown_name

if TYPE_CHECKING:
    import torch
    from torch import nn

# The name of the task's own optimizer.
OWN = "task"


@dataclass(frozen=True)
class OptimizerTraits:
    """The known facts about one class of optimizers, and not about its subclasses. The defaults assume nothing."""

    # Bytes of state per element of a large matrix. None: a float32 if the group has momentum, and nothing otherwise.
    state_bytes: float | None = None
    # Whether it divides gradients by `grad_scale` inside its fused kernel.
    divides: bool = False
    # Whether that kernel also skips correctly on the device (`found_inf`).
    skips: bool = False
    # Whether it is correct on DTensors. Other optimizers get plain tensors instead (optim/unknown/stand_ins.py).
    works_on_shards: bool = False
    # Whether it fails on DTensors, but updates every element independently: it can step the shards as plain tensors.
    elementwise: bool = False
    # Whether each update has the same bits however parameters are sharded. Only optimizers built by name are asked.
    exact: bool = False
    # Whether its state is per row of a parameter: tensor parallelism may shard rows.
    needs_full_rows: bool = False


# The class of an optimizer, as MODULE:CLASS -> its traits.
TRAITS = {
    "torch.optim.adadelta:Adadelta": OptimizerTraits(works_on_shards=True),
    "torch.optim:Adafactor": OptimizerTraits(state_bytes=0),
    "torch.optim.adagrad:Adagrad": OptimizerTraits(divides=True, works_on_shards=True),
    "torch.optim.adam:Adam": OptimizerTraits(state_bytes=8, divides=True, skips=True, works_on_shards=True),
    "torch.optim.adamax:Adamax": OptimizerTraits(state_bytes=8, works_on_shards=True),
    "torch.optim.adamw:AdamW": OptimizerTraits(
        state_bytes=8, divides=True, skips=True, works_on_shards=True, exact=True
    ),
    "torch.optim.asgd:ASGD": OptimizerTraits(works_on_shards=True),
    "torch.optim:Muon": OptimizerTraits(state_bytes=4),
    "torch.optim.nadam:NAdam": OptimizerTraits(state_bytes=8, works_on_shards=True),
    "torch.optim.radam:RAdam": OptimizerTraits(state_bytes=8, works_on_shards=True),
    "torch.optim.rmsprop:RMSprop": OptimizerTraits(works_on_shards=True),
    "torch.optim.rprop:Rprop": OptimizerTraits(elementwise=True),
    # It cannot skip on the device: skipping the first step would leave its momentum uninitialised.
    "torch.optim.sgd:SGD": OptimizerTraits(divides=True, works_on_shards=True, exact=True),
    "torch.optim.sparse_adam:SparseAdam": OptimizerTraits(),
    # One float32 per row and column: negligible per element.
    "lockstep.optim.adafactor:Adafactor": OptimizerTraits(state_bytes=0, works_on_shards=True, needs_full_rows=True),
    # Two moments of one byte, each with a float32 scale per 256 elements.
    "lockstep.optim.adamw8bit:AdamW8bit": OptimizerTraits(
        state_bytes=2 + 2 * 4 / 256, works_on_shards=True, needs_full_rows=True
    ),
    "lockstep.optim.schedule_free:AdamWScheduleFree": OptimizerTraits(state_bytes=12, works_on_shards=True),
}


@dataclass(frozen=True)
class OptimizerSpec:
    """The way in which a run builds an optimizer by name."""

    path: str  # the path of its class, as in TRAITS
    # Keys of the task's groups that it takes over. Other keys, such as the betas of another optimizer, are dropped.
    options: tuple[str, ...]
    about: str  # a description of its state, for the banner
    # Whether it updates only matrices. All other parameters, and embeddings, then get the optimizer `others`.
    others: str | None = None
    # Further arguments of its constructor.
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def traits(self) -> OptimizerTraits:
        return TRAITS[self.path]


OPTIMIZERS = {
    "adamw": OptimizerSpec(
        "torch.optim.adamw:AdamW",
        options=("lr", "betas", "eps", "weight_decay", "maximize"),
        about="torch's AdamW, two moments in float32",
        arguments={"fused": True},
    ),
    "sgd": OptimizerSpec(
        # Not fused: torch has no fused SGD for DTensors (2.13).
        "torch.optim.sgd:SGD",
        options=("lr", "momentum", "dampening", "nesterov", "weight_decay", "maximize"),
        about="torch's SGD, without state, or with 4 bytes per parameter if the task's groups have momentum",
    ),
    "adamw8bit": OptimizerSpec(
        "lockstep.optim.adamw8bit:AdamW8bit",
        options=("lr", "betas", "eps", "weight_decay"),
        about="both moments in 8 bits, those of vectors and small parameters in float32",
    ),
    "adafactor": OptimizerSpec(
        "lockstep.optim.adafactor:Adafactor",
        options=("lr", "weight_decay"),
        about="one mean of squared gradients per row and per column, no momentum",
    ),
    "muon": OptimizerSpec(
        "torch.optim:Muon",
        options=("lr", "weight_decay"),
        about="torch's Muon for matrices, one momentum; AdamW for embeddings and all other parameters",
        others="adamw",
        # Updates as large as AdamW's, so that the task's rate and weight decay still fit.
        arguments={"adjust_lr_fn": "match_rms_adamw"},
    ),
    "schedule_free": OptimizerSpec(
        "lockstep.optim.schedule_free:AdamWScheduleFree",
        options=("lr", "betas", "eps", "weight_decay"),
        about="schedule-free AdamW, whose average of the weights is evaluated and saved",
    ),
}

NAMES = (OWN, *OPTIMIZERS)


def describe(name: str) -> str:
    """Return the banner line about the state of this optimizer."""
    spec = OPTIMIZERS[name]
    state_bytes = spec.traits.state_bytes
    size = f" (about {state_bytes:.2g} bytes of state per parameter)" if state_bytes else ""
    return f"{name} in place of the task's: {spec.about}{size}"


def check_exact(name: str) -> None:
    """Refuse an optimizer by name with exact=true, if its updates depend on how parameters are sharded."""
    if name != OWN and not OPTIMIZERS[name].traits.exact:
        known = [other for other, spec in OPTIMIZERS.items() if spec.traits.exact]
        raise UserError(
            f"exact=true cannot be combined with optimizer={name}",
            "an optimizer that is not known to be exact",
            f"leave optimizer out, or set optimizer={' or '.join(known)}",
        )


def state_copies(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> float:
    """Estimate the size of a group's state as a multiple of the size of its parameters, in float32."""
    # By its name alone, because a class of the same name elsewhere most likely has the same state.
    name = f":{type(optimizer).__name__}"
    for path, traits in TRAITS.items():
        if path.endswith(name) and traits.state_bytes is not None:
            return traits.state_bytes / 4

    # Other optimizers, such as SGD, are assumed to have one copy with momentum, and none without.
    return float(bool(group.get("momentum")))


def build_optimizers(config: RunConfig, optimizers: Any, model: nn.Module | None = None) -> Any:
    """Return the task's own `optimizers`, or replacements by the setting `optimizer` with the same groups.

    `optimizers` is an optimizer or a list of them. Anything else is returned unchanged; `Optimizers` refuses it.
    `model`: some optimizers treat the matrices of its embeddings differently.
    """
    import torch

    if config.optimizer == OWN:
        return optimizers
    if config.optimizer not in OPTIMIZERS:
        raise unknown_name("optimizer", config.optimizer, NAMES)

    if config.exact:
        check_exact(config.optimizer)

    spec = OPTIMIZERS[config.optimizer]
    if spec.traits.needs_full_rows and config.uses_axis("tp"):
        raise UserError(
            f"optimizer={config.optimizer} with tensor parallelism (mesh.tp) is not possible: mesh.tp shards rows of a "
            "parameter, and the state of this optimizer is per row",
            "",
            "set strategy=fsdp without mesh.tp, or optimizer=task",
        )

    built: list[torch.optim.Optimizer] = []
    for optimizer in optimizers if isinstance(optimizers, list | tuple) else [optimizers]:
        if not isinstance(optimizer, torch.optim.Optimizer):
            return optimizers

        # An optimizer that updates something without a gradient, such as a sparse table, is kept.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(p.requires_grad for p in parameters):
            built.append(optimizer)
            continue

        _check_replaceable(config.optimizer, spec, optimizer)
        if spec.others is None:
            built.append(_make(spec, optimizer.param_groups))
        else:
            built += _make_both(config.optimizer, optimizer.param_groups, model)

    return built


def _check_replaceable(name: str, spec: OptimizerSpec, optimizer: torch.optim.Optimizer) -> None:
    """Refuse to replace an optimizer that does something which the other one would not do."""
    from lockstep.optim.capabilities import HOOK_FIX, hooks_of

    kind = next((kind for kind in ("pre", "post") if hooks_of(optimizer, kind)), None)
    if kind:
        raise UserError(
            f"optimizer={name} replaces the task's {type(optimizer).__name__}, which has a hook on its step "
            f"(register_step_{kind}_hook)",
            "the hook would never be called",
            f"{HOOK_FIX}; or set optimizer={OWN}",
        )

    if "maximize" not in spec.options and any(group.get("maximize") for group in optimizer.param_groups):
        raise UserError(
            f"optimizer={name} cannot maximize, and the task's {type(optimizer).__name__} has maximize=True",
            "it would train in the opposite direction",
            f"return the negative loss, without maximize; or set optimizer={OWN}",
        )


def _make(spec: OptimizerSpec, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer with the same parameter groups, and the options that it takes over."""
    keys = ("params", *spec.options)
    return resolve_name(spec.path)(
        [{key: group[key] for key in keys if key in group} for group in groups], **spec.arguments
    )


def _make_both(name: str, groups: list[dict[str, Any]], model: nn.Module | None) -> list[torch.optim.Optimizer]:
    """Return an optimizer for the matrices of these groups, and one for all other parameters, if there are any."""
    from torch import nn

    spec = OPTIMIZERS[name]
    assert spec.others is not None

    modules = model.modules() if model is not None else ()
    embeddings = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}

    def part(of_matrices: bool) -> list[dict[str, Any]]:
        parts = [
            {
                **group,
                "params": [p for p in group["params"] if (p.dim() == 2 and id(p) not in embeddings) == of_matrices],
            }
            for group in groups
        ]
        return [group for group in parts if group["params"]]

    matrices, rest = part(True), part(False)
    if not matrices:
        raise UserError(
            f"the model has no matrices besides embeddings, and optimizer={name} updates only matrices",
            "",
            f"set optimizer={spec.others}",
        )

    return [_make(spec, matrices), *([_make(OPTIMIZERS[spec.others], rest)] if rest else [])]
