"""What `exact` cannot be combined with: settings under which the number of ranks would leave a trace in the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lockstep.errors import UserError


class _Rule(NamedTuple):
    fits: tuple[Any, ...]  # the values that do no harm
    found: str
    fix: str


STRATEGIES = ("ddp", "zero1", "fsdp", "fsdp-grads")
UNUSED = "freeze what nothing uses; add `0 * parameter.sum()` to the loss for what only some micro-batches use"

_RULES = {
    "strategy": _Rule(STRATEGIES, "a strategy that adds in an order of its own", "type strategy=ddp, or strategy=fsdp"),
    "mesh.tp": _Rule((None, 1), "layers that are cut, whose parts are added in another order", "leave mesh.tp out"),
    "mesh.pp": _Rule((None, 1), "stages, which draw other random numbers than a whole model", "leave mesh.pp out"),
    "local_batch": _Rule(
        (None,),
        "a batch that grows with the number of ranks",
        "type global_batch=N instead, the samples of all ranks together",
    ),
    "ddp.hook": _Rule(("none",), "gradients that lose bits on the way", "leave ddp.hook out"),
    "ddp.find_unused_parameters": _Rule((False,), "an exchange in an order of its own", UNUSED),
    "ddp.broadcast_buffers": _Rule((False,), "buffers that follow rank 0's samples", "leave ddp.broadcast_buffers out"),
    "ddp.sync_batchnorm": _Rule((False,), "statistics over whatever the ranks run at a time", "use GroupNorm"),
    "data.seed_samples": _Rule((True,), "random numbers that follow the ranks", "leave data.seed_samples out"),
    "data.sharding": _Rule(("stride",), "a dataset that cuts itself by ranks", "return a dataset with a length"),
    "speed_weights": _Rule(("none",), "shares that follow the speed of the ranks", "leave speed_weights out"),
    "precision": _Rule(
        ("auto", "fp32", "tf32", "bf16", "fp16"), "a format whose sums were not put in order", "type precision=bf16"
    ),
    "optimizer": _Rule(("task",), "an optimizer whose sums were not put in order", "leave optimizer out"),
    "graph": _Rule(("auto", False), "kernels that may be chosen anew when they are recorded", "leave graph out"),
    "attention": _Rule(
        ("auto", "flash", "efficient", "math"), "kernels that add in no fixed order", "leave attention out"
    ),
    "compile": _Rule(("auto", False), "kernels that are put together anew in every layout", "leave compile out"),
}


def inexact(leaves: Mapping[str, Any]) -> list[UserError]:
    """`leaves`: every setting by its dotted key, with `.value`; its text names the source."""
    exact, micro = leaves.get("exact"), leaves.get("micro_batch")
    if exact is None or not exact.value:
        return []
    broken = [(leaves[key], rule) for key, rule in _RULES.items() if key in leaves]
    problems = [
        UserError(f"{exact} and {leaf}", rule.found, rule.fix) for leaf, rule in broken if leaf.value not in rule.fits
    ]
    if micro is not None and micro.value == "auto":
        found = "micro-batches that follow the memory of the moment"
        problems.append(
            UserError(f"{exact} and {micro}", found, "type micro_batch=4, the same on every number of ranks")
        )
    return problems
