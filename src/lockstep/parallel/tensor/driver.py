"""Layers that are cut over the ranks of a tp group, which all go through the same samples.

What is cut is a DTensor, weights and activations alike, and everything plain is whole and equal on all ranks of the
group. So the layers between two cut ones compute what they would on one device, or torch refuses them; no part is
ever taken for the whole. Random numbers are drawn for the micro-batch, so plain activations drop the same elements
on every rank; those of a cut activation are torch's own, and differ from a single process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lockstep.errors import UserError
from lockstep.parallel.driver import ShardedDriver
from lockstep.parallel.mesh import Axes
from lockstep.parallel.tensor.plans import LayerStyle, choose_plan
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import Runtime
from lockstep.runtime.layout import local

aten = torch.ops.aten


def cut_layers(model: nn.Module, task: Any, axes: Axes, runtime: Runtime) -> None:
    """Replace the weights that the plan names by this rank's part of them; all others stay as they are."""
    ways = axes.mesh.sizes["tp"]
    plan = choose_plan(model, task, ways, runtime.world.size // ways)
    runtime.collectives.broadcast_([p.detach() for p in model.parameters() if p.requires_grad])
    runtime.collectives.broadcast_(list(model.buffers()))
    lay_out(model, plan, axes, runtime)
    explain_mixtures(model)


def lay_out(model: nn.Module, plan: Mapping[str, LayerStyle], axes: Axes, runtime: Runtime) -> None:
    """Every rank of a tp group has the whole of these layers already."""
    styles = {name: _style(cut) for name, cut in plan.items()}
    parallelize_module(model, axes.devices["tp"], styles, src_data_rank=None)
    if runtime.device.type == "cpu":
        _teach_cpu_attention()


def _style(cut: LayerStyle) -> ParallelStyle:
    if isinstance(cut, ParallelStyle):
        return cut
    if cut == "rowwise":  # what comes in plain is whole, and a cut input stays where it is
        return RowwiseParallel(input_layouts=Replicate())
    return ColwiseParallel(use_local_output=False) if cut == "colwise" else ColwiseParallel(output_layouts=Replicate())


def _teach_cpu_attention() -> None:
    """torch knows how to cut attention by heads on a GPU, and has not been told that its CPU kernel is no different."""
    kernel, back = (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
    places: list[Placement] = [Shard(1), Replicate()]  # heads, or nothing

    @register_sharding(kernel.default)
    def forward(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        return [([place] * 2, [place] * 3 + [None] * len(rest)) for place in places]

    @register_sharding(back.default)
    def backward(grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, *rest: Any, **options: Any) -> Any:
        return [([place] * 3, [place] * 6 + [None] * len(rest)) for place in places]


def explain_mixtures(model: nn.Module) -> None:
    """torch does not compute with a part and a whole at once; say which word of the plan leads to it."""
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            if not any(word in str(error) for word in ("DTensor", "sharding strategy", "unevenly sharded")):
                raise
            raise UserError(
                f"{type(model).__name__} with layers that are cut (mesh.tp)",
                f"an operation between two of them that torch cannot cut: {str(error).splitlines()[0]}",
                'in tensor_plan(model) write "gathered" instead of "colwise" for the layer before it: its output is '
                "then whole on every rank",
            ) from error

    model.forward = forward


class TensorDriver(ShardedDriver):
    """Cut layers, copied over the dp axis: after the last backward this rank's parts are added over the copies."""

    def __init__(self, model: nn.Module, axes: Axes, runtime: Runtime):
        super().__init__(model, runtime)
        self._copies, self._parts = axes.along("dp"), axes.along("tp")

    def add_gradients(self) -> None:
        for p in self.parameters:
            settle_gradient(p)
        add_copies(self.parameters, self._copies)
        agree_on_plain(self.parameters, self._parts)


def add_copies(parameters: list[nn.Parameter], copies: Collectives) -> None:
    """Gradients become sums over `copies`. What nobody has used keeps none, as in a single process."""
    if copies.world.alone or not parameters:
        return
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float64)
    users = copies.sum_(used.to(copies.device)).tolist()
    live = [p for p, count in zip(parameters, users, strict=True) if count]
    for p in live:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    sum_gradients(live, copies)


def sum_gradients(parameters: list[nn.Parameter], copies: Collectives) -> None:
    """One sum for each number format, of this rank's parts. All of `copies` have gradients for the same ones."""
    if copies.world.alone:
        return
    everything = [local(p.grad) for p in parameters if p.grad is not None]
    for dtype in dict.fromkeys(grad.dtype for grad in everything):  # in one order on all ranks
        grads = [grad for grad in everything if grad.dtype == dtype]
        flat = copies.sum_(torch.cat([grad.flatten() for grad in grads]))
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])


def settle_gradient(parameter: nn.Parameter) -> None:
    """A gradient may be left as terms of a sum over the group; the optimizer wants it laid out like its parameter."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)


def agree_on_plain(parameters: list[nn.Parameter], parts: Collectives) -> None:
    """Every rank of a tp group computes the gradients of what is not cut by itself. On a GPU some kernels add in any
    order, and copies that differ in a last bit would drift apart: the first rank's count."""
    if parts.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        parts.broadcast_([local(p.grad) for p in parameters if p.grad is not None and not is_cut_along_tp(p)])


def is_cut_along_tp(tensor: Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return False
    axes = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return any(axis == "tp" and placement != Replicate() for axis, placement in axes)
