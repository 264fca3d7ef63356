"""Choose which layers are sharded over a tp group, and how: by the task's own plan, or by well-known layer names.

colwise    shard the output features; the layers after it compute with shards, up to a "rowwise" layer
rowwise    shard the input features; the sum over the group is a full tensor again
gathered   shard the output features, and gather the output at once; the layers after it compute with the full tensor
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


# A model may write into the output of a layer (`mlp_output += attention_output`). The classes below return a clone,
# since autograd does not allow writing into the view that torch's styles return.
class _Gathered(ColwiseParallel):
    @staticmethod
    def _prepare_output_fn(output_layouts: Any, use_local_output: Any, mod: Any, outputs: Any, device_mesh: Any) -> Any:
        output = ColwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)
        return output.clone()


class _Rowwise(RowwiseParallel):
    @staticmethod
    def _prepare_output_fn(output_layouts: Any, use_local_output: Any, mod: Any, outputs: Any, device_mesh: Any) -> Any:
        output = RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)
        return output.clone()


STYLES: dict[str, ColwiseParallel | RowwiseParallel] = {
    "colwise": ColwiseParallel(use_local_output=False),
    "rowwise": _Rowwise(input_layouts=Replicate()),  # the layout of plain inputs; a DTensor keeps its own placement
    "gathered": _Gathered(output_layouts=Replicate()),
}
EXAMPLE = '{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}'

# (opening layers, possible closing layers, style of the opening layers). Names are relative to some module. An entry
# applies if the module has all opening layers and one of the closing layers, whose style is "rowwise".
#
# Attention is "gathered" if code between its layers adds full tensors (rotary embeddings, a position bias), as in most
# Hugging Face models, or if one layer computes queries, keys and values: a shard of its output might hold only queries.
# Then the weights are sharded, but attention itself is not.
KNOWN_LAYERS: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
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
MAX_PARTS = 3  # the most parts that a relative name in KNOWN_LAYERS may have


def features(layer: nn.Module) -> tuple[int, int] | None:
    """Return the input and output features of a linear layer; None for any other layer."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return _transposed_features(layer)


def _transposed_features(layer: nn.Module) -> tuple[int, int] | None:
    # transformers' `Conv1D`, a linear layer whose weight is (inputs, outputs). Recognised without importing it.
    weight = getattr(layer, "weight", None)
    if type(layer).__name__ != "Conv1D" or not hasattr(layer, "nf") or weight is None:
        return None
    return weight.shape[0], weight.shape[1]


class _Transposed(ParallelStyle):
    """Applies `style`, which is for nn.Linear, to a layer whose weight is (inputs, outputs)."""

    def __init__(self, style: ColwiseParallel | RowwiseParallel):
        super().__init__()
        self._style = style
        self._rowwise = isinstance(style, RowwiseParallel)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = self._style
        desired = (Shard(-1),) if self._rowwise else style.desired_input_layouts
        return distribute_module(
            module,
            device_mesh,
            self._partition,
            partial(style._prepare_input_fn, style.input_layouts, desired),  # pyrefly: ignore[bad-argument-type]
            partial(style._prepare_output_fn, style.output_layouts, style.use_local_output),
        )

    def _partition(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        placements = {"weight": Shard(0 if self._rowwise else 1), "bias": Replicate() if self._rowwise else Shard(0)}
        for key, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter, device_mesh, [placements[key]], src_data_rank=None)
            module.register_parameter(key, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def style_of(layer: nn.Module, style: LayerStyle) -> ParallelStyle:
    """Return torch's ParallelStyle for a layer and its style in the plan."""
    if not isinstance(style, str):
        return style
    return _Transposed(STYLES[style]) if _transposed_features(layer) else STYLES[style]


def choose_plan(model: nn.Module, task: Any, tp_size: int, tp_groups: int = 1) -> dict[str, LayerStyle]:
    """Return the style of every layer to shard, by its full name. Refuse plans that would fail in the first forward.

    task: may have a `tensor_plan(model)`
    tp_size: the number of ranks in a tp group
    tp_groups: the number of tp groups
    """
    # In a custom loop there is no task, and the model itself may have a plan.
    if hasattr(task, "tensor_plan"):
        user_plan = task.tensor_plan(model)
    else:
        user_plan = model.tensor_plan() if hasattr(model, "tensor_plan") else None  # pyrefly: ignore[not-callable]

    plan = recognise(model) if user_plan is None else _expand(user_plan, model)
    if not plan:
        raise UserError(
            f"mesh.tp finds no layers to shard in {type(model).__name__}",
            "the task has no tensor_plan(model), and Lockstep does not know the model's layer names",
            f"write def tensor_plan(self, model): return {EXAMPLE} (in a custom loop: a method of the model, without "
            "the argument), or set strategy=fsdp without mesh.tp",
        )

    _check_layers(plan, model, tp_size)
    _check_divisible(plan, model, tp_size, tp_groups, has_plan=user_plan is not None)
    return plan


def recognise(model: nn.Module) -> dict[str, LayerStyle]:
    """Return a plan from well-known layer names.

    Embeddings and heads are not sharded: they are often tied, and the loss needs the full logits.
    """
    # For each module, the names of the linear layers inside it, relative to the module.
    inside: dict[str, set[str]] = {}
    for name, layer in model.named_modules():
        if features(layer) is None:
            continue

        parts = name.split(".")
        for count in range(1, min(len(parts), MAX_PARTS) + 1):
            inside.setdefault(".".join(parts[:-count]), set()).add(".".join(parts[-count:]))

    plan: dict[str, LayerStyle] = {}
    for module, layers in inside.items():
        for layer, style in _recognised(layers - _uncalled(model.get_submodule(module))):
            # If several entries match a layer, the first one applies.
            plan.setdefault(f"{module}.{layer}" if module else layer, style)

    return plan


def _uncalled(module: nn.Module) -> set[str]:
    """Return the layers whose weights `module` uses without calling them, so that they cannot be sharded.

    Attention with biases for queries and values, but not for keys, does so (timm's BEiT, EVA and Swin V2).
    """
    return {"qkv"} if isinstance(getattr(module, "q_bias", None), nn.Parameter) else set()


def _recognised(layers: set[str]) -> Iterator[tuple[str, LayerStyle]]:
    for opening, closings, style in KNOWN_LAYERS:
        closing = next((layer for layer in closings if layer in layers), None)
        if closing and layers.issuperset(opening):
            yield from ((layer, style) for layer in opening)
            yield closing, "rowwise"


def _expand(user_plan: Mapping[str, LayerStyle], model: nn.Module) -> dict[str, LayerStyle]:
    """Return the user's plan with full layer names instead of patterns."""
    if not isinstance(user_plan, Mapping):
        raise UserError(
            f"tensor_plan(model) must return a dict of layer names and styles; it returned a "
            f"{type(user_plan).__name__}",
            "",
            f"return {EXAMPLE}",
        )

    plan: dict[str, LayerStyle] = {}
    for pattern, style in user_plan.items():
        # Search a list, not the dict: the user's value may not be hashable.
        if not isinstance(style, ParallelStyle) and style not in list(STYLES):
            raise UserError(
                f"tensor_plan has no style {style!r} (for {pattern!r})",
                "",
                f"write one of {', '.join(STYLES)}, or a ParallelStyle",
            )

        # A later pattern wins over an earlier one.
        plan |= dict.fromkeys(_matching(pattern, model), style)

    if not plan:
        raise UserError("tensor_plan(model) is empty", "", "name some layers, or set strategy=fsdp without mesh.tp")

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


def _check_layers(plan: Mapping[str, LayerStyle], model: nn.Module, tp_size: int) -> None:
    named = list(model.named_parameters(remove_duplicate=False))
    for name, style in plan.items():
        layer = model.get_submodule(name)

        # torch replaces the parameter in this layer only.
        for full_name, parameter in layer.named_parameters(prefix=name):
            tied = [other_name for other_name, p in named if p is parameter and other_name != full_name]
            if tied:
                raise UserError(
                    f"{name!r} in tensor_plan cannot be sharded over {tp_size} ranks: it is tied to another layer",
                    f"{full_name!r} is tied to {tied[0]!r}; sharding would untie them",
                    f"leave {name!r} out of the plan, or untie the two",
                )

        # Layers with a ParallelStyle are not checked: torch raises its own errors for them.
        if isinstance(style, str) and features(layer) is None:
            raise UserError(
                f"{name!r} in tensor_plan cannot be {style!r}: it is a {type(layer).__name__}",
                "this style is for nn.Linear",
                "name the nn.Linear layers inside it, or give a custom torch ParallelStyle",
            )


def _check_divisible(
    plan: Mapping[str, LayerStyle], model: nn.Module, tp_size: int, tp_groups: int, has_plan: bool
) -> None:
    # colwise shards the output features, rowwise the input features.
    sizes: dict[str, int] = {}
    for name, style in plan.items():
        linear = features(model.get_submodule(name))
        if isinstance(style, str) and linear:
            inputs, outputs = linear
            sizes[name] = inputs if style == "rowwise" else outputs

    # The error names the first layer that does not fit, and suggests a size that fits all layers.
    for name, size in sizes.items():
        if size % tp_size:
            side = "input" if plan[name] == "rowwise" else "output"
            without = f"leave {name!r} out of tensor_plan" if has_plan else f"write a tensor_plan without {name!r}"
            raise UserError(
                f"{name!r} cannot be sharded over {tp_size} ranks (mesh.tp)",
                f"it has {size} {side} features, which {tp_size} does not divide",
                ", or ".join([*_suggest_sizes(math.gcd(*sizes.values()), tp_size, tp_groups), without]),
            )


def _suggest_sizes(common: int, tp_size: int, tp_groups: int) -> list[str]:
    """Return a setting with which all layers can be sharded, or an empty list.

    `common` is the greatest common divisor of their features. The suggestion keeps the number of ranks if possible;
    otherwise it takes fewer ranks, or else a few more.
    """
    # Suggest less than twice as many ranks: more are hardly available.
    fitting = [size for size in range(2, 2 * tp_size) if common % size == 0]
    same_ranks = [size for size in fitting if tp_size % size == 0]
    if same_ranks:
        return [f"set mesh.tp={max(same_ranks)}"]

    if fitting:
        nearest = max([size for size in fitting if size < tp_size], default=fitting[0])
        return [f"set mesh.tp={nearest} --nproc {nearest * tp_groups}"]

    return []
