"""Optimizers by name (`optimizer=adamw8bit`), which take over the parameter groups of the task's optimizer.

Each optimizer is one entry in OPTIMIZERS, plus its own module. This module imports torch only when it builds an
optimizer, so that a launcher can check names quickly.
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
class OptimizerKind:
    """An optimizer that a run can build by name."""

    path: str  # of its class, as MODULE:CLASS
    # Keys of the task's groups that it takes over. Other keys, such as the betas of another optimizer, are dropped.
    options: tuple[str, ...]
    state_bytes: float  # bytes of state per element of a large matrix
    about: str  # a description of its state, for the banner
    # Names of optimizer classes with this state, including the user's: used to estimate memory.
    classes: tuple[str, ...] = ()
    # Whether its state is per row of a parameter: tensor parallelism may shard rows.
    needs_full_rows: bool = False
    # Whether it updates only matrices. All other parameters, and embeddings, then get the optimizer `others`.
    others: str | None = None
    # Further arguments of its constructor.
    arguments: dict[str, Any] = field(default_factory=dict)


OPTIMIZERS = {
    "adamw": OptimizerKind(
        "torch.optim:AdamW",
        options=("lr", "betas", "eps", "weight_decay", "maximize"),
        state_bytes=8,
        about="torch's AdamW, two moments in float32",
        classes=("AdamW", "Adam", "NAdam", "RAdam", "Adamax"),
        arguments={"fused": True},
    ),
    "sgd": OptimizerKind(
        # Not fused: torch has no fused SGD for DTensors (2.13).
        "torch.optim:SGD",
        options=("lr", "momentum", "dampening", "nesterov", "weight_decay", "maximize"),
        state_bytes=0,
        about="torch's SGD, without state, or with 4 bytes per parameter if the task's groups have momentum",
    ),
    "adamw8bit": OptimizerKind(
        "lockstep.optim.adamw8bit:AdamW8bit",
        options=("lr", "betas", "eps", "weight_decay"),
        # Two moments of one byte, each with a float32 scale per 256 elements.
        state_bytes=2 + 2 * 4 / 256,
        about="both moments in 8 bits, those of vectors and small parameters in float32",
        classes=("AdamW8bit",),
        needs_full_rows=True,
    ),
    "adafactor": OptimizerKind(
        "lockstep.optim.adafactor:Adafactor",
        options=("lr", "weight_decay"),
        # One float32 per row and column: negligible per element.
        state_bytes=0,
        about="one mean of squared gradients per row and per column, no momentum",
        classes=("Adafactor",),
        needs_full_rows=True,
    ),
    "muon": OptimizerKind(
        "torch.optim:Muon",
        options=("lr", "weight_decay"),
        state_bytes=4,
        about="torch's Muon for matrices, one momentum; AdamW for embeddings and all other parameters",
        classes=("Muon",),
        others="adamw",
        # Updates as large as AdamW's, so that the task's rate and weight decay still fit.
        arguments={"adjust_lr_fn": "match_rms_adamw"},
    ),
    "schedule_free": OptimizerKind(
        "lockstep.optim.schedule_free:AdamWScheduleFree",
        options=("lr", "betas", "eps", "weight_decay"),
        state_bytes=12,
        about="schedule-free AdamW, whose average of the weights is evaluated and saved",
        classes=("AdamWScheduleFree",),
    ),
}

NAMES = (OWN, *OPTIMIZERS)


def describe(name: str) -> str:
    """Return the banner line about the state of this optimizer."""
    kind = OPTIMIZERS[name]
    size = f" (about {kind.state_bytes:.2g} bytes of state per parameter)" if kind.state_bytes else ""
    return f"{name} in place of the task's: {kind.about}{size}"


def state_copies(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> float:
    """Estimate the size of a group's state as a multiple of the size of its parameters, in float32."""
    for kind in OPTIMIZERS.values():
        if type(optimizer).__name__ in kind.classes:
            return kind.state_bytes / 4

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

    kind = OPTIMIZERS[config.optimizer]
    if kind.needs_full_rows and config.uses_axis("tp"):
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

        _check_replaceable(config.optimizer, kind, optimizer)
        if kind.others is None:
            built.append(_make(kind, optimizer.param_groups))
        else:
            built += _make_both(kind, OPTIMIZERS[kind.others], optimizer.param_groups, model)

    return built


def _check_replaceable(name: str, kind: OptimizerKind, optimizer: torch.optim.Optimizer) -> None:
    """Refuse to replace an optimizer that does something which the other one would not do."""
    from lockstep.optim.kinds import HOOK_FIX, step_hook

    if hook := step_hook(optimizer):
        raise UserError(
            f"optimizer={name} replaces the task's {type(optimizer).__name__}, which has a hook on its step ({hook})",
            "the hook would never be called",
            f"{HOOK_FIX}; or set optimizer={OWN}",
        )

    if "maximize" not in kind.options and any(group.get("maximize") for group in optimizer.param_groups):
        raise UserError(
            f"optimizer={name} cannot maximize, and the task's {type(optimizer).__name__} has maximize=True",
            "it would train in the opposite direction",
            f"return the negative loss, without maximize; or set optimizer={OWN}",
        )


def _make(kind: OptimizerKind, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer with the same parameter groups, and the options that it takes over."""
    keys = ("params", *kind.options)
    return resolve_name(kind.path)(
        [{key: group[key] for key in keys if key in group} for group in groups], **kind.arguments
    )


def _make_both(
    kind: OptimizerKind, others: OptimizerKind, groups: list[dict[str, Any]], model: nn.Module | None
) -> list[torch.optim.Optimizer]:
    """Return an optimizer for the matrices of these groups, and one for all other parameters, if there are any."""
    from torch import nn

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
            "the model has no matrices besides embeddings, and optimizer=muon updates only matrices",
            "",
            "set optimizer=adamw",
        )

    return [_make(kind, matrices), *([_make(others, rest)] if rest else [])]
