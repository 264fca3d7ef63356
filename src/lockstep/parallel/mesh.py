"""The device mesh: the ranks as a grid with named axes.

pp   pipeline stages: each rank runs some consecutive layers of the model
dp   replicas of the model (or shards that are gathered for use), each with its own samples
tp   shards of every layer, on the same samples, with collectives inside each layer

Ranks are numbered row-major in this order. So the ranks of a tp group are consecutive, and lie on one machine if it has
enough devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from lockstep.config import RunConfig
from lockstep.errors import UserError, plural
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import Runtime
from lockstep.runtime.world import World

AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Mesh:
    """The sizes of the mesh and this rank's coordinates in it. Arithmetic only: it needs no process group."""

    sizes: Mapping[str, int]  # the size along each of AXES
    rank: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes[axis] for axis in AXES)

    @property
    def is_data_parallel_only(self) -> bool:
        """Whether dp is the only axis, so that each rank has its own samples. The strategy may still shard along dp."""
        return self.sizes["pp"] == self.sizes["tp"] == 1

    def coordinate(self, axis: str) -> int:
        # Row-major: the axes to the right vary faster.
        stride = math.prod(self.shape[AXES.index(axis) + 1 :])
        return self.rank // stride % self.sizes[axis]

    @property
    def data_size(self) -> int:
        """The number of groups of ranks with different samples. Ranks that differ only in pp or tp share samples."""
        return self.sizes["dp"]

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss and weight count: true on one rank of the last stage per group of samples."""
        return self.coordinate("tp") == 0 and self.coordinate("pp") == self.sizes["pp"] - 1

    def __str__(self) -> str:
        return " x ".join(f"{axis} {self.sizes[axis]}" for axis in AXES if self.sizes[axis] > 1) or "dp 1"


class Axes:
    """The mesh with torch's DeviceMesh and process groups. Collective: every rank must construct it together."""

    def __init__(self, mesh: Mesh, runtime: Runtime):
        self.mesh = mesh
        self.device_mesh = init_device_mesh(runtime.device.type, mesh.shape, mesh_dim_names=AXES)
        self._runtime = runtime

    def along(self, axis: str) -> Collectives:
        """Return collectives between the ranks that differ along `axis` only."""
        return Collectives(
            World(self.mesh.coordinate(axis), self.mesh.sizes[axis]),
            self._runtime.device,
            self._runtime.heartbeat,
            self.device_mesh.get_group(axis),
        )


def plan_mesh(config: RunConfig, world: World) -> Mesh:
    """Return the mesh for the settings `mesh` and `strategy`. A mesh that does not fit the world raises UserError."""
    sizes = {"pp": config.mesh.pp, "dp": config.mesh.dp, "tp": config.mesh.tp}
    _check_strategy(config, sizes)

    # One axis without a configured size takes all remaining ranks: the strategy's own axis, or else dp.
    free_axis = next((axis for axis in (config.strategy_record.axis, "dp") if axis and sizes[axis] is None), None)
    shape = {axis: sizes[axis] or 1 for axis in AXES}
    product = math.prod(shape.values())

    if free_axis and world.size % product == 0:
        shape[free_axis] = world.size // product
    elif product != world.size:
        configured = {axis: size for axis, size in sizes.items() if size}
        raise _misfit(configured, free_axis, world.size)

    # The other axes may take all ranks. The driver of the strategy then has nothing to do, unless another one runs.
    strategy = config.strategy_record
    runs = strategy.driver_in(shape) == strategy.driver
    if strategy.axis and shape[strategy.axis] == 1 and runs and not world.alone:
        taken = " and ".join(f"mesh.{axis}={size}" for axis, size in shape.items() if size > 1)
        raise UserError(
            f"strategy={strategy.name} on {world.size} ranks leaves nothing to shard: {taken} takes all of them",
            "",
            f"start twice as many ranks: --nproc {2 * world.size}; or set strategy=ddp",
        )

    return Mesh(shape, world.rank)


def _misfit(configured: Mapping[str, int], free_axis: str | None, world_size: int) -> UserError:
    """Return an error that names the nearest mesh for this world size, and the nearest world size for this mesh."""
    product = math.prod(configured.values())
    ranks = product * max(1, round(world_size / product)) if free_axis else product
    fixes = [f"--nproc {ranks}"]

    # Find the first axis whose size can be changed so that the mesh fits.
    for axis in [name for name in ("dp", "tp", "pp") if name in configured]:
        rest = product // configured[axis]  # the product of the other sizes
        sizes = range(1, world_size + 1)
        if free_axis:
            fitting = [size for size in sizes if world_size % (size * rest) == 0]
        else:
            fitting = [size for size in sizes if size * rest == world_size]

        if fitting:
            nearest = min(fitting, key=lambda size: abs(size - configured[axis]))
            fixes.insert(0, f"set mesh.{axis}={nearest}")
            break

    settings = ", ".join(f"mesh.{axis}={configured[axis]}" for axis in AXES if axis in configured)
    why = f"{world_size} is not a multiple of {product}" if free_axis else f"it needs {plural(product, 'rank')}"
    return UserError(
        f"the mesh {settings} does not fit {plural(world_size, 'rank')}: {why}",
        "",
        ", or ".join(fixes),
    )


def _check_strategy(config: RunConfig, sizes: Mapping[str, int | None]) -> None:
    strategy = config.strategy_record
    inner = [axis for axis in ("pp", "tp") if (sizes[axis] or 1) > 1]
    if inner and not strategy.composes_with_mesh:
        raise UserError(
            f"strategy={strategy.name} cannot be combined with mesh.{inner[0]}={sizes[inner[0]]}",
            "",
            f"set strategy={strategy.nearest}, or leave mesh out",
        )

    if inner and config.fsdp.offload:
        raise UserError(
            f"fsdp.offload=true cannot be combined with mesh.{inner[0]}={sizes[inner[0]]}",
            "parameters would be in host memory, but tp and pp exchange tensors on the device",
            "leave fsdp.offload out, or the mesh",
        )

    if strategy.axis is not None and sizes[strategy.axis] == 1:
        raise UserError(
            f"strategy={strategy.name} with mesh.{strategy.axis}=1 leaves nothing to shard along that axis",
            "",
            f"leave mesh.{strategy.axis} out, or set strategy=ddp",
        )


def is_sharded_along_tp(tensor: Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return False

    axes = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return any(axis == "tp" and placement != Replicate() for axis, placement in axes)
