"""Parameter groups by the names of parameters (`optim.groups`): another rate or weight decay for some of them.

The patterns are matched with full names of parameters, before they are sharded, so the groups do not depend on the
strategy. A pattern that matches nothing is an error. `restricted_to` is about any group, in a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.value_types import GROUP_KEYS
from lockstep.errors import UserError, plural, some_names

Rule = Mapping[str, Any]
GroupPart = tuple[dict[str, Any], list[Tensor]]  # a parameter group, and some of its tensors


def apply_groups(rules: Sequence[Rule], optimizers: list[torch.optim.Optimizer], model: nn.Module) -> str | None:
    """Split the optimizers' groups by these rules, in place. Return a line for the banner, None without rules.

    The first rule that matches a parameter's name decides. A new group has the options of the group that its parameters
    come from, and those of the rule. The old group stays, even if it is empty: `lr.peak` is the rate of the first one.
    """
    if not rules:
        return None

    names = {id(p): name for name, p in model.named_parameters()}
    counts = [0] * len(rules)
    for optimizer in optimizers:
        # Names that torch keeps beside the parameters would no longer fit. All groups must have them, or none.
        for group in optimizer.param_groups:
            group.pop("param_names", None)

        for group in list(optimizer.param_groups):
            _split(optimizer, group, rules, names, counts)

    for rule, count in zip(rules, counts, strict=True):
        if not count:
            raise _unmatched(rule, rules, list(names.values()))

    return "; ".join(_describe(rule, count) for rule, count in zip(rules, counts, strict=True))


def _split(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    rules: Sequence[Rule],
    names: Mapping[int, str],
    counts: list[int],
) -> None:
    """Move the parameters of a group that match a rule into new groups."""
    chosen: dict[int, list[Any]] = {}
    kept = []
    for p in group["params"]:
        matching = [i for i, rule in enumerate(rules) if fnmatchcase(names.get(id(p), ""), rule["match"])]

        # The first rule that matches a name decides.
        if matching:
            chosen.setdefault(matching[0], []).append(p)
        else:
            kept.append(p)

    group["params"] = kept
    for index, parameters in sorted(chosen.items()):
        counts[index] += len(parameters)
        rule = rules[index]
        _check(rule, group, type(optimizer).__name__)

        # Whatever the rule does not name stays as it is in the group.
        options = {key: value for key, value in rule.items() if key not in GROUP_KEYS}
        rate = rule.get("lr", group["lr"] * rule.get("lr_scale", 1.0))
        optimizer.add_param_group({**group, **options, "lr": rate, "params": parameters})


def _check(rule: Rule, group: dict[str, Any], optimizer: str) -> None:
    """Check that this rule can be applied to a group of an optimizer."""
    if "initial_lr" in group:
        raise UserError(
            f"optim.groups would divide a group of {optimizer} after a scheduler was made for it",
            "the scheduler has one rate for each of the old groups",
            "make the groups in your code, or pass a function of the step instead of the scheduler",
        )

    known = set(group) - {"params", "lr"}
    for key in rule.keys() - known - set(GROUP_KEYS):
        raise UserError(
            f"optim.groups sets {key}, which {optimizer} does not have",
            f"its options are {', '.join(sorted(known))}",
            f"use one of them, or lr or lr_scale, for {rule['match']}",
        )


def _unmatched(rule: Rule, rules: Sequence[Rule], names: list[str]) -> UserError:
    """Return the error for a rule without parameters: no name matches, or an earlier rule has all that do."""
    matched = [name for name in names if fnmatchcase(name, rule["match"])]
    if matched:
        first = next(other for other in rules if fnmatchcase(matched[0], other["match"]))
        return UserError(
            f"optim.groups: {rule['match']!r} gets no parameters, because earlier rules match all of its own",
            f"{matched[0]} matches {first['match']!r} first",
            "put the more specific pattern first",
        )

    return UserError(
        f"optim.groups: no parameter is called {rule['match']!r}",
        f"the model has {some_names(names)}",
        "correct the pattern; * stands for any characters",
    )


def _describe(rule: Rule, count: int) -> str:
    """`*.bias (12 parameters): weight_decay 0`"""
    options = [f"{'lr x' if key == 'lr_scale' else key} {value}" for key, value in rule.items() if key != "match"]
    return f"{rule['match']} ({plural(count, 'parameter')}): {', '.join(options)}"


@contextmanager
def restricted_to(optimizer: torch.optim.Optimizer, parts: list[GroupPart]) -> Iterator[None]:
    """Let the optimizer see only these parts of its groups inside the `with` block.

    Each part becomes a parameter group with the settings of the group that it comes from.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": tensors} for group, tensors in parts]
    try:
        yield
    finally:
        used_groups = optimizer.param_groups
        optimizer.param_groups = groups

    # Some optimizers store numbers in their groups, which must be kept.
    for (group, _), used in zip(parts, used_groups, strict=True):
        group.update({key: value for key, value in used.items() if key != "params"})
