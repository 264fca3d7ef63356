"""Which backend the ranks get, and which ones are refused. The GPUs are pretended: the rules need none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.errors import UserError
from lockstep.runtime import context
from lockstep.runtime.world import World

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TWO = World(0, 2, 0, 2)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("nccl", "nccl is not available"),
        ("cpu:gloo,cuda:nccl", "nccl is not available"),
        ("mpi", "mpi is not available, torch .* was built without it"),
    ],
)
def test_a_backend_that_is_not_there_is_refused_with_those_that_are(monkeypatch, asked: str, said: str) -> None:
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)
    with pytest.raises(UserError, match=said) as refused:
        context.check_backend(asked, CPU)
    assert refused.value.found == "available: gloo"


@pytest.mark.parametrize(
    ("asked", "device", "shared", "backend"),
    [
        ("auto", CPU, False, "gloo"),
        ("auto", GPU, False, "nccl"),
        ("auto", GPU, True, "gloo"),
        ("gloo", GPU, True, "gloo"),
        ("nccl", GPU, False, "nccl"),
        ("cpu:gloo,cuda:nccl", GPU, False, "cpu:gloo,cuda:nccl"),
        ("mpi", CPU, False, "mpi"),
    ],
)
def test_the_backend_of_the_devices(monkeypatch, asked: str, device: torch.device, shared: bool, backend: str) -> None:
    _pretend(monkeypatch, shared)
    context.check_backend(asked, device)
    assert context._backend_for(TWO, device, SimpleNamespace(), asked) == backend  # pyrefly: ignore


@pytest.mark.parametrize("asked", ["nccl", "cpu:gloo,cuda:nccl"])
def test_more_ranks_than_gpus_are_refused_where_nccl_is_asked_for(monkeypatch, asked: str) -> None:
    _pretend(monkeypatch, shared=True)
    with pytest.raises(UserError, match="needs a GPU for each rank") as refused:
        context._backend_for(TWO, GPU, SimpleNamespace(), asked)  # pyrefly: ignore
    assert refused.value.found == "2 ranks and 1 GPU on this machine"
    assert "set backend=gloo to share the GPUs" in refused.value.fix


def _pretend(monkeypatch: Any, shared: bool) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 if shared else 2)
    monkeypatch.setattr(context, "device_name", lambda device: "GPU-0")
    monkeypatch.setattr(context, "share_devices", lambda world, name, store: shared)
