"""The grid of ranks: who stands where, what follows from what was asked, and what cannot be."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import pytest

from lockstep.errors import UserError
from lockstep.parallel.mesh import Mesh, plan_mesh
from lockstep.runtime.world import World
from ranks.support import configured


def test_the_grid_has_tp_innermost_and_one_voice_per_share_of_the_data() -> None:
    sizes = {"pp": 2, "dp": 3, "tp": 2}
    places = [Mesh(sizes, rank) for rank in range(12)]
    assert [tuple(place.coordinate(axis) for axis in ("pp", "dp", "tp")) for place in places] == [
        (pp, dp, tp) for pp in range(2) for dp in range(3) for tp in range(2)
    ]
    assert [place.rank for place in places if place.reports_loss] == [6, 8, 10]
    assert {place.coordinate("dp") for place in places if place.reports_loss} == {0, 1, 2}


ACCEPTED = [
    ({}, 4, (1, 4, 1)),
    ({"strategy": "tp"}, 4, (1, 1, 4)),
    ({"strategy": "tp"}, 1, (1, 1, 1)),
    ({"strategy": "tp", "mesh.dp": 2}, 4, (1, 2, 2)),
    ({"mesh.tp": 2}, 8, (1, 4, 2)),
    ({"mesh": {"pp": 2, "dp": 2, "tp": 2}}, 8, (2, 2, 2)),
    ({"strategy": "hsdp", "mesh.dp": 4}, 4, (1, 4, 1)),
]


@pytest.mark.parametrize(("values", "size", "shape"), ACCEPTED)
def test_what_is_not_said_about_the_grid_follows(values: dict[str, Any], size: int, shape: tuple[int, ...]) -> None:
    assert plan_mesh(configured(values).config, World(size=size)).shape == shape


DRIVERS = [
    ({"strategy": "ddp"}, "make_driver"),
    ({"strategy": "zero1"}, "make_driver"),
    ({"strategy": "fsdp"}, "FSDPDriver"),
    ({"strategy": "hsdp"}, "FSDPDriver"),
    ({"strategy": "tp"}, "TensorDriver"),
    ({"strategy": "ddp", "mesh.tp": 2}, "TensorDriver"),
    ({"strategy": "fsdp", "mesh.tp": 2}, "FSDPDriver"),
    ({"strategy": "fsdp-grads", "mesh.pp": 2}, "PipelineDriver"),
    ({"strategy": "tp", "mesh.pp": 2}, "PipelineDriver"),
    ({"strategy": "pp", "mesh.tp": 2}, "PipelineDriver"),
]


@pytest.mark.parametrize(("values", "name"), DRIVERS)
def test_the_record_of_the_strategy_names_what_makes_the_driver(values: dict[str, Any], name: str) -> None:
    config = configured(values).config
    path = config.strategy_record.driver_in(plan_mesh(config, World(size=8)).sizes)
    assert resolve_name(path).__name__ == name


REFUSED = [
    ({"mesh.tp": 3}, 4, "4 is not a multiple of 3", "set mesh.tp=2, or --nproc 3"),
    ({"mesh.tp": 2}, 1, "1 is not a multiple of 2", "set mesh.tp=1, or --nproc 2"),
    ({"mesh": {"dp": 3, "tp": 2}}, 8, "it needs 6 ranks", "set mesh.dp=4, or --nproc 6"),
    ({"mesh": {"pp": 3, "dp": 1, "tp": 3}}, 8, "it needs 9 ranks", "--nproc 9"),
    ({"strategy": "hsdp", "mesh.tp": 2}, 4, "cannot be combined with mesh.tp=2", "set strategy=fsdp"),
    ({"strategy": "zero1", "mesh.tp": 2}, 4, "cannot be combined with mesh.tp=2", "set strategy=ddp"),
    ({"strategy": "tp", "mesh.tp": 1}, 4, "nothing to shard", "leave mesh.tp out"),
    ({"strategy": "tp", "mesh.dp": 2}, 2, "nothing to shard: mesh.dp=2 takes all", "--nproc 4"),
    ({"strategy": "pp", "mesh.dp": 2}, 2, "nothing to shard: mesh.dp=2 takes all", "--nproc 4"),
    ({"strategy": "pp", "mesh.tp": 2}, 2, "nothing to shard: mesh.tp=2 takes all", "--nproc 4"),
    ({"strategy": "tp", "mesh.dp": 3}, 4, "4 is not a multiple of 3", "mesh.dp=2"),
    ({"strategy": "fsdp", "fsdp.offload": True, "mesh.tp": 2}, 4, "in host memory", "leave fsdp.offload out"),
]


@pytest.mark.parametrize(("values", "size", "problem", "fix"), REFUSED)
def test_grids_that_cannot_be_are_refused(values: dict[str, Any], size: int, problem: str, fix: str) -> None:
    with pytest.raises(UserError) as refusal:
        plan_mesh(configured(values).config, World(size=size))
    assert problem in str(refusal.value)
    assert fix in refusal.value.fix
