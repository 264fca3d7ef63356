"""Who works with whom: the ranks as a grid with named axes.

pp   stages of the model, one after another
dp   copies of the model (or parts of one that is gathered for use), each with samples of its own
tp   parts of every layer: the same samples, and an exchange inside each layer

Row-major in this order, so the ranks of a tp group are neighbours, inside one machine where it is large enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import Runtime
from lockstep.runtime.world import World

AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Mesh:
    """The grid, and this rank's place in it. Arithmetic only: no process group is needed."""

    sizes: Mapping[str, int]  # of all three axes
    rank: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes[axis] for axis in AXES)

    @property
    def plain(self) -> bool:
        """Only copies: nothing but samples is divided, whatever the strategy makes of it."""
        return self.sizes["pp"] == self.sizes["tp"] == 1

    def coordinate(self, axis: str) -> int:
        return self.rank // self._stride(axis) % self.sizes[axis]

    def ranks(self, axis: str) -> list[int]:
        """The ranks that differ from this one along `axis` only, and this one."""
        first = self.rank - self.coordinate(axis) * self._stride(axis)
        return [first + number * self._stride(axis) for number in range(self.sizes[axis])]

    @property
    def data_rank(self) -> int:
        """Which samples: ranks that differ in pp or tp go through the same ones."""
        return self.coordinate("dp")

    @property
    def data_size(self) -> int:
        return self.sizes["dp"]

    @property
    def reports_loss(self) -> bool:
        """Of the ranks that go through the same samples, the one whose loss and weight count: it is in the last stage,
        where the loss is known."""
        return self.coordinate("tp") == 0 and self.coordinate("pp") == self.sizes["pp"] - 1

    def _stride(self, axis: str) -> int:
        return math.prod(self.shape[AXES.index(axis) + 1 :])

    def __str__(self) -> str:
        return " x ".join(f"{axis} {self.sizes[axis]}" for axis in AXES if self.sizes[axis] > 1) or "dp 1"


class Axes:
    """The mesh in torch's terms, with process groups. Every rank must make one, at the same point."""

    def __init__(self, mesh: Mesh, runtime: Runtime):
        self.mesh, self._runtime = mesh, runtime
        self.devices: DeviceMesh = init_device_mesh(runtime.device.type, mesh.shape, mesh_dim_names=AXES)

    def along(self, axis: str) -> Collectives:
        """Agreements between the ranks that differ along `axis` only. `.group` is torch's own."""
        place = World(self.mesh.coordinate(axis), self.mesh.sizes[axis])
        return Collectives(place, self._runtime.device, self._runtime.heartbeat, self.devices.get_group(axis))


def plan_mesh(config: RunConfig, world: World) -> Mesh:
    """The grid that `mesh` and `strategy` ask for, or a refusal."""
    asked, size = config.mesh, world.size
    sizes = {"pp": asked.pp, "dp": asked.dp, "tp": asked.tp}
    _check_strategy(config, sizes)
    if config.strategy in ("pp", "tp") and sizes[config.strategy] is None:  # takes what no other axis has
        filled = config.strategy
    else:
        filled = "dp" if sizes["dp"] is None else None
    given = {axis: sizes[axis] or 1 for axis in AXES}
    product = math.prod(given.values())
    if filled and size % product == 0:
        given[filled] = size // product
    elif product != size:
        raise _misfit(sizes, given, filled, size)
    return Mesh(given, world.rank)


def _misfit(sizes: Mapping[str, int | None], given: Mapping[str, int], filled: str | None, size: int) -> UserError:
    """With the nearest grid that has as many places as there are ranks, and the nearest number of ranks."""
    product = math.prod(given.values())
    asked = ", ".join(f"mesh.{axis}={sizes[axis]}" for axis in AXES if sizes[axis])
    fixes = []
    for axis in [name for name in ("dp", "tp", "pp") if sizes[name]]:
        rest = product // given[axis]
        fitting = [n for n in range(1, size + 1) if (size % (n * rest) == 0 if filled else n * rest == size)]
        if fitting:
            fixes.append(f"type mesh.{axis}={min(fitting, key=lambda n: abs(n - given[axis]))}")
            break
    ranks = product * max(1, round(size / product)) if filled else product
    return UserError(
        f"{asked} on {size} rank{'s' * (size > 1)}",
        f"{size} is not a multiple of {product}" if filled else f"a grid of {product} places",
        ", or ".join([*fixes, f"--nproc {ranks}"]),
    )


def _check_strategy(config: RunConfig, sizes: Mapping[str, int | None]) -> None:
    strategy = config.strategy
    inner = [axis for axis in ("pp", "tp") if (sizes[axis] or 1) > 1]
    if inner and strategy in ("hsdp", "zero1"):
        raise UserError(
            f"strategy={strategy} with mesh.{inner[0]}={sizes[inner[0]]}",
            f"a strategy that knows no {inner[0]} axis",
            f"type strategy={'fsdp' if strategy == 'hsdp' else 'ddp'}, or leave mesh out",
        )
    if inner and config.fsdp.offload:
        raise UserError(
            f"fsdp.offload=true with mesh.{inner[0]}={sizes[inner[0]]}",
            "parameters in host memory and a mesh that exchanges them on the device",
            "leave fsdp.offload out, or the mesh",
        )
    if strategy in ("pp", "tp") and sizes[strategy] == 1:
        raise UserError(
            f"strategy={strategy} with mesh.{strategy}=1",
            "nothing to cut along that axis",
            f"leave mesh.{strategy} out, or type strategy=ddp",
        )
