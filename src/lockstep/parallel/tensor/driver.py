"""Tensor parallelism: layers sharded over the ranks of a tp group, which all train on the same samples.

Sharded weights and activations are DTensors. Every plain tensor is full, and equal on all ranks of the group. So layers
between two sharded layers compute the same as on one device, or DTensor raises an error: a shard is never mistaken for
the full tensor. Random numbers are seeded per micro-batch, so dropout on plain activations drops the same elements on
every rank. For sharded activations torch draws its own numbers, and dropout differs from a single process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import parallelize_module

from lockstep.errors import UserError
from lockstep.parallel.driver import DriverSetup, broadcast_model
from lockstep.parallel.gradients import broadcast_unsharded_gradients, count_and_sum, redistribute_gradient
from lockstep.parallel.inner_gradients import InnerGradient, refuse_second_derivative
from lockstep.parallel.mesh import Axes
from lockstep.parallel.sharded import ShardedDriver
from lockstep.parallel.tensor.plans import LayerStyle, choose_plan, style_of
from lockstep.runtime.context import Runtime


class TensorDriver(ShardedDriver):
    """Sums gradients over the replicas along dp, after the last backward."""

    def __init__(self, model: nn.Module, setup: DriverSetup):
        """Take a model whose layers are already sharded: see `shard_layers`."""
        assert setup.axes is not None
        super().__init__(model, setup, setup.role, setup.hooks)
        self._dp_group = setup.dp_group
        self._tp_group = setup.axes.along("tp")

    def before_inner_gradient(self, inner: InnerGradient) -> None:
        super().before_inner_gradient(inner)
        refuse_second_derivative(inner, self.leaf_names())

    def _reduce_gradients(self) -> None:
        # First within the tp group: only gradients with equal placements can be summed over replicas.
        parameters = [*self.parameters.values()]
        for parameter in parameters:
            redistribute_gradient(parameter)

        count_and_sum(parameters, self._dp_group)
        broadcast_unsharded_gradients(parameters, self._tp_group)


def shard_layers(model: nn.Module, task: Any, axes: Axes, runtime: Runtime) -> None:
    """Replace the weights of the layers in the plan with this rank's shards, in place."""
    tp_size = axes.mesh.sizes["tp"]

    # Choose the plan before the first collective, so that a bad plan raises on all ranks.
    plan = choose_plan(model, task, tp_size, runtime.world.size // tp_size)

    gathered = [name for name, style in plan.items() if style == "gathered"]
    if gathered and runtime.on_gpu and runtime.backend == "gloo":
        # Torch 2.11 crashes there, in `wait_tensor`.
        raise UserError(
            "tensor parallelism (mesh.tp) on GPUs cannot run over gloo if the output of a layer is gathered",
            f"{gathered[0]} is sharded as {plan[gathered[0]]!r}, and ranks share a GPU",
            "give every rank a GPU of its own (nccl), or set device=cpu",
        )

    broadcast_model(model, runtime.collectives)
    apply_plan(model, plan, axes, runtime)
    explain_dtensor_errors(model)


def apply_plan(model: nn.Module, plan: Mapping[str, LayerStyle], axes: Axes, runtime: Runtime) -> None:
    """Shard the layers in the plan. Every rank of a tp group must hold the same full weights."""
    styles = {name: style_of(model.get_submodule(name), style) for name, style in plan.items()}
    # src_data_rank=None: each rank takes its shard from its own full weights, without communication.
    parallelize_module(model, axes.device_mesh["tp"], styles, src_data_rank=None)
    if runtime.device.type == "cpu":
        _register_cpu_attention()


def _register_cpu_attention() -> None:
    """Register how CPU attention is sharded by heads. torch itself only registers its GPU kernels."""
    placements: list[Placement] = [Shard(1), Replicate()]  # along heads, or not at all

    @register_sharding(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
    def forward(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        return [([placement] * 2, [placement] * 3 + [None] * len(rest)) for placement in placements]

    @register_sharding(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    def backward(grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, *rest: Any, **options: Any) -> Any:
        return [([placement] * 3, [placement] * 6 + [None] * len(rest)) for placement in placements]


def explain_dtensor_errors(model: nn.Module) -> None:
    """Replace torch's errors about operations that DTensor cannot shard with advice for the plan."""
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            # torch has no error class for this, so the text must tell. All other errors pass through unchanged.
            texts = ("DTensor", "sharding strategy", "Sharding prop", "unevenly sharded")
            if not any(text in str(error) for text in texts):
                raise

            raise UserError(
                f"torch cannot shard an operation between two sharded layers of {type(model).__name__} (mesh.tp)",
                str(error).splitlines()[0],
                'in tensor_plan(model) write "gathered" instead of "colwise" for the layer before it, so that its '
                "output is full on every rank",
            ) from error

    model.forward = forward
