"""Values that are sound one by one, but not together, whatever their sources."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.config.exact import inexact
from lockstep.config.leaves import Leaf, typed
from lockstep.errors import UserError

RIVALS = (("steps", "epochs"), ("global_batch", "local_batch"), ("clip.norm", "clip.value", "clip.adaptive"))
NOT_ABOVE = (  # the first must not be larger than the second
    ("micro_batch", "global_batch"),
    ("micro_batch", "local_batch"),
    ("scaler.minimum", "scaler.initial"),
    ("scaler.initial", "scaler.maximum"),
)

ONLY_DDP = {  # and the values that ask for nothing
    "ddp.hook": "none",
    "ddp.static_graph": False,
    "ddp.gradient_as_bucket_view": True,
    "ddp.sync_batchnorm": False,
    "ddp.broadcast_buffers": False,
}


def rivals(leaves: Mapping[str, Leaf]) -> list[UserError]:
    """Keys of one layer that answer the same question."""
    problems = []
    for group in RIVALS:
        both = [leaves[key] for key in group if key in leaves and leaves[key].value is not None]
        if len(both) > 1:
            fix = f"keep one, such as {both[0].key}={typed(both[0].value)}"
            found = f"at most one of {', '.join(group)} can be set"
            problems.append(UserError(" and ".join(map(str, both)), found, fix))
    return problems


def clashes(leaves: Mapping[str, Leaf]) -> list[UserError]:
    """Values that are sound one by one, but not together. A rule without all its keys is not judged."""
    problems = []
    scaling, reference = leaves.get("lr.scaling"), leaves.get("lr.reference_batch")
    if scaling and reference and scaling.value not in (None, "none") and reference.value is None:
        found = "lr.reference_batch, the batch that the rate was tuned for, is not set"
        problems.append(UserError(str(scaling), found, "add lr.reference_batch=256, or type lr.scaling=none"))
    for low, high in [(leaves[a], leaves[b]) for a, b in NOT_ABOVE if a in leaves and b in leaves]:
        both_numbers = all(isinstance(leaf.value, int | float) for leaf in (low, high))
        if both_numbers and low.value > high.value:
            fix = f"type {low.key}={typed(high.value)}, or {high.key}={typed(low.value)}"
            problems.append(UserError(f"{low} and {high}", f"{low.key} is larger than {high.key}", fix))
    return problems + _without_ddp(leaves) + inexact(leaves)


def _without_ddp(leaves: Mapping[str, Leaf]) -> list[UserError]:
    """Options of torch's DDP, where something else runs the model or exchanges the gradients."""
    strategy, unused = leaves.get("strategy"), leaves.get("ddp.find_unused_parameters")
    rivals = [strategy] if strategy and strategy.value not in ("ddp", "zero1") else []
    rivals += [unused] if unused and unused.value else []
    rivals += [leaves[key] for key in ("mesh.tp", "mesh.pp") if key in leaves and (leaves[key].value or 1) > 1]
    asked = [leaves[key] for key, usual in ONLY_DDP.items() if key in leaves and leaves[key].value not in (None, usual)]
    found = "an option of torch's DistributedDataParallel, which does not run then"
    return [
        UserError(
            f"{leaf} and {rival}", found, f"type {leaf.key}={typed(ONLY_DDP[leaf.key])}, or leave {rival.key} out"
        )
        for leaf in asked
        for rival in rivals
        if (leaf.key, rival.key) != ("ddp.broadcast_buffers", "ddp.find_unused_parameters")  # which knows that one, too
    ]
