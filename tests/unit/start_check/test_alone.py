"""What a loss gets from torch's collectives when it is told that there is one rank. No process group exists here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.start_check.alone import as_one_rank

OWN = torch.tensor([1.0, 2.0])


def into(call: Callable[[Tensor], Any]) -> Callable[[], Tensor]:
    """Return what a collective writes into a tensor."""

    def run() -> Tensor:
        place = torch.zeros(2)
        call(place)
        return place

    return run


def into_list(call: Callable[[list[Any]], Any], empty: Any = None) -> Callable[[], Any]:
    """Return what a collective writes into a list with a place for each rank."""

    def run() -> Any:
        places = [torch.zeros(2) if empty is None else empty] * dist.get_world_size()
        call(places)
        return places[0]

    return run


def asynchronous() -> Tensor:
    place = OWN.clone()
    dist.all_reduce(place, async_op=True).wait()  # pyrefly: ignore[missing-attribute]
    return place


COLLECTIVES: dict[str, Callable[[], Any]] = {
    "all_reduce, later": asynchronous,
    "all_gather": into_list(lambda places: dist.all_gather(places, OWN)),
    "all_gather, by name": into_list(lambda places: dist.all_gather(tensor=OWN, tensor_list=places)),
    "all_gather_into_tensor": into(lambda place: dist.all_gather_into_tensor(place.view(1, 2), OWN)),
    "all_gather_object": into_list(lambda places: dist.all_gather_object(places, OWN), empty="nothing"),
    "all_to_all": into_list(lambda places: dist.all_to_all(places, [OWN])),
    "all_to_all_single": into(lambda place: dist.all_to_all_single(place, OWN)),
    "gather": into_list(lambda places: dist.gather(OWN, places if dist.get_rank() == 0 else None)),
    "gather_object": into_list(lambda places: dist.gather_object(OWN, places), empty="nothing"),
    "reduce_scatter": into(lambda place: dist.reduce_scatter(place, [OWN])),
    "reduce_scatter_tensor": into(lambda place: dist.reduce_scatter_tensor(place, OWN)),
    "scatter": into(lambda place: dist.scatter(place, [OWN])),
    "scatter_object_list": into_list(lambda places: dist.scatter_object_list(places, [OWN]), empty="nothing"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_gives_what_this_rank_has(name: str) -> None:
    with as_one_rank():
        assert torch.equal(COLLECTIVES[name](), OWN)


def test_torch_is_left_as_it_was() -> None:
    before = dict(vars(dist))
    with as_one_rank():
        dist.barrier()
        dist.broadcast(OWN, src=0)
    assert dict(vars(dist)) == before


def test_what_needs_another_rank_is_said_and_not_waited_for() -> None:
    with as_one_rank():
        with pytest.raises(RuntimeError, match="needs another rank"):
            dist.send(OWN, dst=1)
        with pytest.raises(RuntimeError, match="a list for 2 ranks where there is one"):
            dist.all_gather([OWN, OWN], OWN)
