"""Decide which layers are sharded over a tp group, and how: by the task's own plan, or by well-known layer names.

colwise    the output features are sharded; what follows computes with shards, up to a "rowwise" layer
rowwise    the input features are sharded, and the sum over the group is a full tensor again
gathered   the output features are sharded, and gathered at once: what follows computes with the full tensor
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lockstep.errors import UserError

LayerStyle = str | ParallelStyle  # how one layer is sharded
STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(use_local_output=False),
    "rowwise": RowwiseParallel(input_layouts=Replicate()),  # a plain input is full, a sharded one stays where it is
    "gathered": ColwiseParallel(output_layouts=Replicate()),
}
EXAMPLE = '{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}'

# (colwise layers, rowwise layer) of one module. An entry applies if the module has all of these layers.
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
# (one layer for queries, keys and values, names of the layer after attention). A shard of the fused matrix may hold
# queries only, while every rank needs some of all three. So its output is gathered: the weights are sharded, and
# attention itself is not.
FUSED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qkv", ("out", "proj", "o", "o_proj", "out_proj")),
    ("qkv_proj", ("o_proj", "out_proj", "out")),
    ("c_attn", ("c_proj",)),
    ("Wqkv", ("out_proj", "Wo")),
)


def choose_plan(model: nn.Module, task: Any, ways: int, others: int = 1) -> dict[str, LayerStyle]:
    """Return every sharded layer by its full name and refuse what would fail in the first forward.

    task: may have a `tensor_plan(model)`
    ways: the size of a tp group
    others: how many such groups there are
    """
    # In a user's own loop there is no task, and the model may have a plan instead.
    if hasattr(task, "tensor_plan"):
        asked = task.tensor_plan(model)
    else:
        asked = model.tensor_plan() if hasattr(model, "tensor_plan") else None  # pyrefly: ignore[not-callable]

    plan = recognise(model) if asked is None else _expand(asked, model)
    if not plan:
        raise UserError(
            f"mesh.tp finds no layers to shard in {type(model).__name__}",
            "the task has no tensor_plan(model), and the model has no layer names that we know",
            f"write def tensor_plan(self, model): return {EXAMPLE} (in a loop of your own, a method of the model, "
            "without the argument), or type strategy=fsdp without mesh.tp",
        )

    _check_layers(plan, model, ways)
    _check_divisible(plan, model, ways, others, has_plan=asked is not None)
    return plan


def recognise(model: nn.Module) -> dict[str, LayerStyle]:
    """Return a plan made from the names of layers.

    Embeddings and heads are not sharded: they are often tied, and the loss needs the full logits.
    """
    plan: dict[str, LayerStyle] = {}
    # Names count within one module: `up` and `down` of different modules are no pair.
    for name, module in model.named_modules():
        children = {child for child, layer in module.named_children() if isinstance(layer, nn.Linear)}
        for child, style in _recognised_children(children):
            # If several entries match a layer, the first one decides.
            plan.setdefault(f"{name}.{child}" if name else child, style)

    return plan


def _recognised_children(children: set[str]) -> Iterator[tuple[str, LayerStyle]]:
    for opening, closing in PAIRS:
        if closing in children and children.issuperset(opening):
            for child in opening:
                yield child, "colwise"

            yield closing, "rowwise"

    for fused, closings in FUSED:
        closing = next((child for child in closings if child in children), None)
        if fused in children and closing:
            yield fused, "gathered"
            yield closing, "rowwise"


def _expand(asked: Mapping[str, LayerStyle], model: nn.Module) -> dict[str, LayerStyle]:
    """Return the plan with full names in place of patterns."""
    if not isinstance(asked, Mapping):
        raise UserError(
            f"tensor_plan(model) must return a dict of layers and how each is sharded; it returned a "
            f"{type(asked).__name__}",
            "",
            f"return {EXAMPLE}",
        )

    plan: dict[str, LayerStyle] = {}
    for pattern, style in asked.items():
        # Looked up in a list, not in the dict: what the user wrote may not be hashable.
        if not isinstance(style, ParallelStyle) and style not in list(STYLES):
            raise UserError(
                f"tensor_plan has no style {style!r} (for {pattern!r})",
                "",
                f"write one of {', '.join(STYLES)}, or a ParallelStyle",
            )

        # A later pattern wins over an earlier one.
        plan |= dict.fromkeys(_matching(pattern, model), style)

    if not plan:
        raise UserError("tensor_plan(model) is empty", "", "name some layers, or type strategy=fsdp without mesh.tp")

    return plan


def _matching(pattern: str, model: nn.Module) -> list[str]:
    # `*` in a pattern matches any text, dots included.
    names = [name for name, _ in model.named_modules() if name and fnmatchcase(name, pattern)]
    if not names:
        layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise UserError(
            f"{pattern!r} in tensor_plan matches no layer of {type(model).__name__}",
            "",
            f"name layers of the model, such as {', '.join(layers[:4]) or 'none: it has no nn.Linear'}",
        )

    return names


def _check_layers(plan: Mapping[str, LayerStyle], model: nn.Module, ways: int) -> None:
    named = list(model.named_parameters(remove_duplicate=False))
    for name, style in plan.items():
        layer = model.get_submodule(name)

        # torch replaces the parameter in this layer only.
        for full_name, parameter in layer.named_parameters(prefix=name):
            tied = [other_name for other_name, p in named if p is parameter and other_name != full_name]
            if tied:
                raise UserError(
                    f"{name!r} in tensor_plan cannot be sharded over {ways} ranks: it is tied to another layer",
                    f"{full_name!r} is tied to {tied[0]!r}; sharding would untie them",
                    f"leave {name!r} out of the plan, or untie the two",
                )

        # For a ParallelStyle the user is responsible.
        if isinstance(style, str) and not isinstance(layer, nn.Linear):
            raise UserError(
                f"{name!r} in tensor_plan cannot be {style!r}: it is a {type(layer).__name__}",
                "these words are for nn.Linear",
                "name the nn.Linear layers inside it, or give a torch ParallelStyle of your own",
            )


def _check_divisible(plan: Mapping[str, LayerStyle], model: nn.Module, ways: int, others: int, has_plan: bool) -> None:
    # colwise shards the output features, rowwise the input features.
    sizes: dict[str, int] = {}
    for name, style in plan.items():
        layer = model.get_submodule(name)
        if isinstance(style, str) and isinstance(layer, nn.Linear):
            sizes[name] = layer.in_features if style == "rowwise" else layer.out_features

    # The first one that does not divide is named; what to type instead must suit all of them.
    for name, size in sizes.items():
        if size % ways:
            side = "input" if plan[name] == "rowwise" else "output"
            without = f"leave {name!r} out of tensor_plan" if has_plan else f"write a tensor_plan without {name!r}"
            raise UserError(
                f"{name!r} cannot be sharded over {ways} ranks (mesh.tp)",
                f"it has {size} {side} features, which {ways} does not divide",
                ", or ".join([*_other_ways(math.gcd(*sizes.values()), ways, others), without]),
            )


def _other_ways(common: int, ways: int, others: int) -> list[str]:
    """Return what to type so that all layers divide.

    `common` is the greatest common divisor of their features. We propose the same number of ranks if possible, or else
    fewer, or else a few more.
    """
    # At most twice as many ranks: more would be another job.
    fitting = [n for n in range(2, 2 * ways) if common % n == 0]
    if same_ranks := [n for n in fitting if ways % n == 0]:
        return [f"type mesh.tp={max(same_ranks)}"]

    if fitting:
        nearest = max([n for n in fitting if n < ways], default=fitting[0])
        return [f"type mesh.tp={nearest} --nproc {nearest * others}"]

    return []
