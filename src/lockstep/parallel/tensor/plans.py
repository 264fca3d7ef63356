"""Decide which layers are sharded over a tp group, and how: by the task's own plan, or by well-known layer names.

colwise    the output features are sharded; what follows computes with shards, up to a "rowwise" layer
rowwise    the input features are sharded, and the sum over the group is a full tensor again
gathered   the output features are sharded, and gathered at once: what follows computes with the full tensor
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lockstep.errors import UserError

LayerStyle = str | ParallelStyle  # how one layer is sharded


# A model may write into the output of a layer (`mlp_output += attention_output`), which autograd refuses for the view
# that torch's styles return.
class _Gathered(ColwiseParallel):
    @staticmethod
    def _prepare_output_fn(output_layouts: Any, use_local_output: Any, mod: Any, outputs: Any, device_mesh: Any) -> Any:
        plain = ColwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)
        return plain.clone()


class _Rowwise(RowwiseParallel):
    @staticmethod
    def _prepare_output_fn(output_layouts: Any, use_local_output: Any, mod: Any, outputs: Any, device_mesh: Any) -> Any:
        plain = RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)
        return plain.clone()


STYLES: dict[str, ColwiseParallel | RowwiseParallel] = {
    "colwise": ColwiseParallel(use_local_output=False),
    "rowwise": _Rowwise(input_layouts=Replicate()),  # a plain input is full, a sharded one stays where it is
    "gathered": _Gathered(output_layouts=Replicate()),
}
EXAMPLE = '{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}'

# (opening layers, names of the closing layer, how the opening ones are sharded). Names are relative to some module. An
# entry applies if the module has all opening layers and one of the closing ones, which is rowwise.
#
# Attention is "gathered" where code between its layers mixes in full tensors (rotary positions, a bias for positions),
# as in most models of transformers, and where one layer computes queries, keys and values: a shard of its output may
# hold queries only. Then the weights are sharded, and attention itself is not.
KNOWN: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), ("down_proj",), "colwise"),
    (("w1", "w3"), ("w2",), "colwise"),
    (("up",), ("down",), "colwise"),
    (("up_proj",), ("down_proj",), "colwise"),
    (("fc1",), ("fc2",), "colwise"),
    (("lin1",), ("lin2",), "colwise"),
    (("linear1",), ("linear2",), "colwise"),
    (("c_fc",), ("c_proj",), "colwise"),
    (("fc_in",), ("fc_out",), "colwise"),
    (("wi_0", "wi_1"), ("wo",), "colwise"),
    (("wi",), ("wo",), "colwise"),
    (("dense_h_to_4h",), ("dense_4h_to_h",), "colwise"),
    (("intermediate.dense",), ("output.dense",), "colwise"),
    (("wq", "wk", "wv"), ("wo",), "colwise"),
    (("q", "k", "v"), ("out", "proj"), "colwise"),
    (("query", "key", "value"), ("out", "proj"), "colwise"),
    (("q", "k", "v"), ("o",), "gathered"),
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "dense"), "gathered"),
    (("q_lin", "k_lin", "v_lin"), ("out_lin",), "gathered"),
    (("self.query", "self.key", "self.value"), ("output.dense",), "gathered"),
    (("attention.query", "attention.key", "attention.value"), ("output.dense",), "gathered"),
    (("qkv",), ("out", "proj", "o", "o_proj", "out_proj"), "gathered"),
    (("qkv_proj",), ("o_proj", "out_proj", "out"), "gathered"),
    (("query_key_value",), ("dense",), "gathered"),
    (("c_attn",), ("c_proj",), "gathered"),
    (("Wqkv",), ("out_proj", "Wo"), "gathered"),
)
MAX_PARTS = 3  # of a relative name


def features(layer: nn.Module) -> tuple[int, int] | None:
    """Return the input and output features of a layer that the words of a plan are for; None: it is another one."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return _transposed_features(layer)


def _transposed_features(layer: nn.Module) -> tuple[int, int] | None:
    # `Conv1D` of transformers: a linear layer whose weight is (inputs, outputs). Recognised without importing it.
    weight = getattr(layer, "weight", None)
    if type(layer).__name__ != "Conv1D" or not hasattr(layer, "nf") or weight is None:
        return None
    return weight.shape[0], weight.shape[1]


class _Transposed(ParallelStyle):
    """Shards a layer whose weight is (inputs, outputs) as `style` would shard an nn.Linear."""

    def __init__(self, style: ColwiseParallel | RowwiseParallel):
        super().__init__()
        self._style = style
        self._rowwise = isinstance(style, RowwiseParallel)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = self._style
        wanted = (Shard(-1),) if self._rowwise else style.desired_input_layouts
        return distribute_module(
            module,
            device_mesh,
            self._partition,
            partial(style._prepare_input_fn, style.input_layouts, wanted),  # pyrefly: ignore[bad-argument-type]
            partial(style._prepare_output_fn, style.output_layouts, style.use_local_output),
        )

    def _partition(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        placements = {"weight": Shard(0 if self._rowwise else 1), "bias": Replicate() if self._rowwise else Shard(0)}
        for key, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter, device_mesh, [placements[key]], src_data_rank=None)
            module.register_parameter(key, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def style_of(layer: nn.Module, style: LayerStyle) -> ParallelStyle:
    """Return torch's style for a layer and its entry in the plan."""
    if not isinstance(style, str):
        return style
    return _Transposed(STYLES[style]) if _transposed_features(layer) else STYLES[style]


def choose_plan(model: nn.Module, task: Any, ways: int, others: int = 1) -> dict[str, LayerStyle]:
    """Return every sharded layer by its full name and refuse what would fail in the first forward.

    task: may have a `tensor_plan(model)`
    ways: the size of a tp group
    others: how many such groups there are
    """
    # In a custom loop there is no task, and the model may have a plan instead.
    if hasattr(task, "tensor_plan"):
        asked = task.tensor_plan(model)
    else:
        asked = model.tensor_plan() if hasattr(model, "tensor_plan") else None  # pyrefly: ignore[not-callable]

    plan = recognise(model) if asked is None else _expand(asked, model)
    if not plan:
        raise UserError(
            f"mesh.tp finds no layers to shard in {type(model).__name__}",
            "the task has no tensor_plan(model), and the model has no layer names that we know",
            f"write def tensor_plan(self, model): return {EXAMPLE} (in a custom loop, a method of the model, "
            "without the argument), or type strategy=fsdp without mesh.tp",
        )

    _check_layers(plan, model, ways)
    _check_divisible(plan, model, ways, others, has_plan=asked is not None)
    return plan


def recognise(model: nn.Module) -> dict[str, LayerStyle]:
    """Return a plan made from the names of layers.

    Embeddings and heads are not sharded: they are often tied, and the loss needs the full logits.
    """
    # By module, the layers inside it, under their names relative to it.
    inside: dict[str, set[str]] = {}
    for name, layer in model.named_modules():
        parts = name.split(".")
        for count in range(1, min(len(parts), MAX_PARTS) + 1) if features(layer) else ():
            inside.setdefault(".".join(parts[:-count]), set()).add(".".join(parts[-count:]))

    plan: dict[str, LayerStyle] = {}
    for module, layers in inside.items():
        for layer, style in _recognised(layers - _uncalled(model.get_submodule(module))):
            # If several entries match a layer, the first one decides.
            plan.setdefault(f"{module}.{layer}" if module else layer, style)

    return plan


def _uncalled(module: nn.Module) -> set[str]:
    """Return layers whose weight `module` uses without calling them: they cannot be sharded.

    Attention with biases for queries and values, but none for keys, does so (timm's BEiT, EVA and Swin V2).
    """
    return {"qkv"} if isinstance(getattr(module, "q_bias", None), nn.Parameter) else set()


def _recognised(layers: set[str]) -> Iterator[tuple[str, LayerStyle]]:
    for opening, closings, style in KNOWN:
        closing = next((layer for layer in closings if layer in layers), None)
        if closing and layers.issuperset(opening):
            yield from ((layer, style) for layer in opening)
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
        layers = [name for name, module in model.named_modules() if features(module)]
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
        if isinstance(style, str) and features(layer) is None:
            raise UserError(
                f"{name!r} in tensor_plan cannot be {style!r}: it is a {type(layer).__name__}",
                "these words are for nn.Linear",
                "name the nn.Linear layers inside it, or give a custom ParallelStyle of torch",
            )


def _check_divisible(plan: Mapping[str, LayerStyle], model: nn.Module, ways: int, others: int, has_plan: bool) -> None:
    # colwise shards the output features, rowwise the input features.
    sizes: dict[str, int] = {}
    for name, style in plan.items():
        found = features(model.get_submodule(name))
        if isinstance(style, str) and found:
            inputs, outputs = found
            sizes[name] = inputs if style == "rowwise" else outputs

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
