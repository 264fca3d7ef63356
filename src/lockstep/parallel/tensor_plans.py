"""Which layers are cut over a tp group, and how: the task's own plan, or one found by the names that layers go by.

colwise    the output features are cut; what follows computes with parts, up to a "rowwise" layer
rowwise    the input features are cut, and the sum over the group is whole again
gathered   the output features are cut, and put together at once: what follows computes with the whole
"""

from __future__ import annotations

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


def choose_plan(model: nn.Module, task: Any) -> dict[str, Cut]:
    """Every cut layer by its full name. In a loop of the user's own there is no task: the model may have the method."""
    if hasattr(task, "tensor_plan"):
        asked: Mapping[str, Cut] | None = task.tensor_plan(model)
    else:
        asked = model.tensor_plan() if hasattr(model, "tensor_plan") else None  # pyrefly: ignore[not-callable]
    if asked is None:
        found = recognise(model)
        if not found:
            raise UserError(
                "layers to cut over a tp group",
                f"no tensor_plan(model) in the task, and no names in {type(model).__name__} that we know",
                'write def tensor_plan(self, model): return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"} '
                "(in a loop of your own, a method of the model, without the argument), or type strategy=fsdp",
            )
        return found
    return _spell_out(asked, model)


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
        raise UserError("layers to cut over a tp group", "an empty tensor_plan", "name some, or type strategy=fsdp")
    return plan


def check_plan(plan: Mapping[str, Cut], model: nn.Module, ways: int) -> None:
    """What would fail in the first forward, or come out wrong, is refused by name."""
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
        if isinstance(cut, str):
            _check_linear(name, layer, cut, ways)


def _check_linear(name: str, layer: nn.Module, cut: str, ways: int) -> None:
    if not isinstance(layer, nn.Linear):
        raise UserError(
            f"tensor_plan: {name!r}: {cut!r}",
            f"a {type(layer).__name__}; these words are for nn.Linear",
            "name the nn.Linear layers inside it, or give a torch ParallelStyle of your own",
        )
    size = layer.in_features if cut == "rowwise" else layer.out_features
    if size % ways:
        fits = max(divisor for divisor in range(1, ways) if size % divisor == ways % divisor == 0)  # of the ranks, too
        raise UserError(
            f"{name!r} cut over {ways} ranks (mesh.tp)",
            f"{size} {'input' if cut == 'rowwise' else 'output'} features, which {ways} does not divide",
            f"type mesh.tp={fits}" if fits > 1 else f"leave {name!r} out of tensor_plan",
        )


def _tied(model: nn.Module) -> dict[str, str]:
    """Every parameter that has more than one name, and one of its other names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    several = [group for group in names.values() if len(group) > 1]
    return {name: next(other for other in group if other != name) for group in several for name in group}
