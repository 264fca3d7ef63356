"""The device mesh: the ranks as a grid with named axes.

pp   pipeline stages of the model, one after another
dp   replicas of the model (or shards that are gathered for use), each with its own samples
tp   shards of every layer: the same samples, and a collective inside each layer

Row-major in this order, so the ranks of a tp group are neighbours, inside one machine where it is large enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import init_device_mesh

from lockstep.config import RunConfig
from lockstep.errors import UserError, plural
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import Runtime
from lockstep.runtime.world import World

AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Mesh:
    """The grid, and this rank's coordinates in it. Arithmetic only: no process group is needed."""

    sizes: Mapping[str, int]  # of all three axes
    rank: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes[axis] for axis in AXES)

    @property
    def plain(self) -> bool:
        """Whether dp is the only axis: each rank has its own samples, whatever the strategy shards."""
        return self.sizes["pp"] == self.sizes["tp"] == 1

    def coordinate(self, axis: str) -> int:
        # Row-major: the axes to the right vary faster.
        stride = math.prod(self.shape[AXES.index(axis) + 1 :])
        return self.rank // stride % self.sizes[axis]

    @property
    def data_size(self) -> int:
        """How many groups of ranks have their own samples. Ranks that differ only in pp or tp train on the same."""
        return self.sizes["dp"]

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss and weight count: of the ranks that share samples, one in the last stage reports."""
        return self.coordinate("tp") == 0 and self.coordinate("pp") == self.sizes["pp"] - 1

    def __str__(self) -> str:
        return " x ".join(f"{axis} {self.sizes[axis]}" for axis in AXES if self.sizes[axis] > 1) or "dp 1"


class Axes:
    """The mesh as torch's DeviceMesh, with process groups. Collective: every rank must make one, at the same point."""

    def __init__(self, mesh: Mesh, runtime: Runtime):
        self.mesh = mesh
        self.devices = init_device_mesh(runtime.device.type, mesh.shape, mesh_dim_names=AXES)
        self._runtime = runtime

    def along(self, axis: str) -> Collectives:
        """Return collectives between the ranks that differ along `axis` only."""
        return Collectives(
            World(self.mesh.coordinate(axis), self.mesh.sizes[axis]),
            self._runtime.device,
            self._runtime.heartbeat,
            self.devices.get_group(axis),
        )


def plan_mesh(config: RunConfig, world: World) -> Mesh:
    """Return the mesh that the settings `mesh` and `strategy` ask for, or refuse it and name the nearest that fits."""
    sizes = {"pp": config.mesh.pp, "dp": config.mesh.dp, "tp": config.mesh.tp}
    _check_strategy(config, sizes)

    # One axis without a size takes the ranks that are left: the strategy's own axis, or dp.
    filled = next((axis for axis in (config.strategy_record.axis, "dp") if axis and sizes[axis] is None), None)
    shape = {axis: sizes[axis] or 1 for axis in AXES}
    product = math.prod(shape.values())

    if filled and world.size % product == 0:
        shape[filled] = world.size // product
    elif product != world.size:
        raise _misfit({axis: size for axis, size in sizes.items() if size}, filled, world.size)

    return Mesh(shape, world.rank)


def _misfit(asked_sizes: Mapping[str, int], filled: str | None, size: int) -> UserError:
    """Name the nearest mesh for this number of ranks, and the nearest number of ranks for this mesh."""
    product = math.prod(asked_sizes.values())
    ranks = product * max(1, round(size / product)) if filled else product
    fixes = [f"--nproc {ranks}"]

    # The first axis whose size can be changed so that the mesh fits.
    for axis in [name for name in ("dp", "tp", "pp") if name in asked_sizes]:
        rest = product // asked_sizes[axis]  # places along the other axes
        fitting = [n for n in range(1, size + 1) if (size % (n * rest) == 0 if filled else n * rest == size)]
        if fitting:
            nearest = min(fitting, key=lambda n: abs(n - asked_sizes[axis]))
            fixes.insert(0, f"type mesh.{axis}={nearest}")
            break

    asked = ", ".join(f"mesh.{axis}={asked_sizes[axis]}" for axis in AXES if axis in asked_sizes)
    why = f"{size} is not a multiple of {product}" if filled else f"it has {product} places"
    return UserError(
        f"the mesh {asked} does not fit {plural(size, 'rank')}: {why}",
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
            f"type strategy={strategy.nearest}, or leave mesh out",
        )

    if inner and config.fsdp.offload:
        raise UserError(
            f"fsdp.offload=true cannot be combined with mesh.{inner[0]}={sizes[inner[0]]}",
            "parameters would lie in host memory, and a mesh exchanges them on the device",
            "leave fsdp.offload out, or the mesh",
        )

    if strategy.axis is not None and sizes[strategy.axis] == 1:
        raise UserError(
            f"strategy={strategy.name} with mesh.{strategy.axis}=1 leaves nothing to shard along that axis",
            "",
            f"leave mesh.{strategy.axis} out, or type strategy=ddp",
        )
