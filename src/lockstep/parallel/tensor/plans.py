"""Which layers are cut over a tp group, and how: the task's own plan, or one found by the names that layers go by.

colwise    the output features are cut; what follows computes with parts, up to a "rowwise" layer
rowwise    the input features are cut, and the sum over the group is whole again
gathered   the output features are cut, and put together at once: what follows computes with the whole
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from lockstep.errors import UserError

Cut = str | ParallelStyle
WORDS = ("colwise", "rowwise", "gathered")

# (layers that open, layers that close) of one module: all of a row must be there.
PAIRS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("up",), "down"),
    (("up_proj",), "down_proj"),
    (("fc1",), "fc2"),
    (("linear1",), "linear2"),
    (("c_fc",), "c_proj"),
    (("fc_in",), "fc_out"),
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("q_proj", "k_proj", "v_proj"), "out_proj"),
    (("wq", "wk", "wv"), "wo"),
    (("q", "k", "v"), "o"),
    (("q", "k", "v"), "out"),
    (("q", "k", "v"), "proj"),
    (("query", "key", "value"), "out"),
    (("query", "key", "value"), "proj"),
)
# Queries, keys and values in one matrix: its rows cannot be cut in a row, since every rank needs some of all three.
# The weights are cut, attention itself is not.
FUSED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qkv", ("out", "proj", "o", "o_proj", "out_proj")),
    ("qkv_proj", ("o_proj", "out_proj", "out")),
    ("c_attn", ("c_proj",)),
    ("Wqkv", ("out_proj", "Wo")),
)


def choose_plan(model: nn.Module, task: Any, ways: int, others: int = 1) -> dict[str, Cut]:
    """Every cut layer by its full name; what would fail in the first forward is refused. `ways`: ranks of a tp group;
    `others`: how many such groups there are."""
    asked = _asked(model, task)
    plan = _recognised(model) if asked is None else _spell_out(asked, model)
    _check_whole(plan, model, ways)
    _check_even(plan, model, ways, others, has_plan=asked is not None)
    return plan


def _asked(model: nn.Module, task: Any) -> Mapping[str, Cut] | None:
    """In a loop of the user's own there is no task: the model may have the method."""
    if hasattr(task, "tensor_plan"):
        return task.tensor_plan(model)
    return model.tensor_plan() if hasattr(model, "tensor_plan") else None  # pyrefly: ignore[not-callable]


def _recognised(model: nn.Module) -> dict[str, Cut]:
    found = recognise(model)
    if not found:
        raise UserError(
            "layers to cut over a tp group",
            f"no tensor_plan(model) in the task, and no names in {type(model).__name__} that we know",
            'write def tensor_plan(self, model): return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"} '
            "(in a loop of your own, a method of the model, without the argument), or type strategy=fsdp without "
            "mesh.tp",
        )
    return found


def recognise(model: nn.Module) -> dict[str, Cut]:
    """Embeddings and heads stay whole: they are often tied, and the loss wants all of the logits."""
    found: dict[str, Cut] = {}
    for name, module in model.named_modules():
        children = {child for child, layer in module.named_children() if isinstance(layer, nn.Linear)}
        for child, cut in _within(children):
            found.setdefault(f"{name}.{child}" if name else child, cut)
    return found


def _within(children: set[str]) -> Iterator[tuple[str, Cut]]:
    for opening, closing in PAIRS:
        if closing in children and children.issuperset(opening):
            yield from ((child, "colwise") for child in opening)
            yield closing, "rowwise"
    for fused, closings in FUSED:
        closing = next((child for child in closings if child in children), None)
        if fused in children and closing:
            yield fused, "gathered"
            yield closing, "rowwise"


def _spell_out(asked: Mapping[str, Cut], model: nn.Module) -> dict[str, Cut]:
    if not isinstance(asked, Mapping):
        raise UserError(
            "tensor_plan(model): layers by name, and how each is cut",
            f"a {type(asked).__name__}",
            'return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}',
        )
    names = [name for name, _ in model.named_modules() if name]
    plan: dict[str, Cut] = {}
    for pattern, cut in asked.items():
        if not isinstance(cut, ParallelStyle) and cut not in WORDS:
            raise UserError(
                f"tensor_plan: {pattern!r}: {cut!r}",
                "no such cut",
                f"write one of {', '.join(WORDS)}, or a ParallelStyle",
            )
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
            raise UserError(
                f"tensor_plan: {pattern!r}",
                f"no such layer in {type(model).__name__}",
                f"name layers of the model, such as {', '.join(layers[:4]) or 'none: it has no nn.Linear'}",
            )
        plan |= dict.fromkeys(matching, cut)
    if not plan:
        raise UserError(
            "layers to cut over a tp group", "an empty tensor_plan", "name some, or type strategy=fsdp without mesh.tp"
        )
    return plan


def _check_whole(plan: Mapping[str, Cut], model: nn.Module, ways: int) -> None:
    """Layers that can be cut, each without another."""
    tied = _tied(model)
    for name, cut in plan.items():
        layer = model.get_submodule(name)
        shared = [p for p in (f"{name}.{own}" for own, _ in layer.named_parameters()) if p in tied]
        if shared:
            raise UserError(
                f"tensor_plan: {name!r} cut over {ways} ranks",
                f"{shared[0]!r} is tied to {tied[shared[0]]!r}; a cut would part them",
                f"leave {name!r} out of the plan, or untie the two",
            )
        if isinstance(cut, str) and not isinstance(layer, nn.Linear):
            raise UserError(
                f"tensor_plan: {name!r}: {cut!r}",
                f"a {type(layer).__name__}; these words are for nn.Linear",
                "name the nn.Linear layers inside it, or give a torch ParallelStyle of your own",
            )


def _check_even(plan: Mapping[str, Cut], model: nn.Module, ways: int, others: int, has_plan: bool) -> None:
    layers = {name: model.get_submodule(name) for name, cut in plan.items() if isinstance(cut, str)}
    sizes = {
        name: layer.in_features if plan[name] == "rowwise" else layer.out_features
        for name, layer in layers.items()
        if isinstance(layer, nn.Linear)
    }
    for name, size in sizes.items():
        if size % ways:
            left_out = f"leave {name!r} out of tensor_plan" if has_plan else f"write a tensor_plan without {name!r}"
            raise UserError(
                f"{name!r} cut over {ways} ranks (mesh.tp)",
                f"{size} {'input' if plan[name] == 'rowwise' else 'output'} features, which {ways} does not divide",
                ", or ".join([*_other_ways(math.gcd(*sizes.values()), ways, others), left_out]),
            )


def _other_ways(common: int, ways: int, others: int) -> list[str]:
    """What to type so that all layers divide, whose features have `common` as their largest common divisor: with as
    many ranks, or else with fewer, or with a few more."""
    fitting = [n for n in range(2, 2 * ways) if common % n == 0]
    if same_ranks := [n for n in fitting if ways % n == 0]:
        return [f"type mesh.tp={max(same_ranks)}"]
    if fitting:
        nearest = max([n for n in fitting if n < ways], default=fitting[0])
        return [f"type mesh.tp={nearest} --nproc {nearest * others}"]
    return []


def _tied(model: nn.Module) -> dict[str, str]:
    """Every parameter that has more than one name, and one of its other names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    several = [group for group in names.values() if len(group) > 1]
    return {name: next(other for other in group if other != name) for group in several for name in group}
