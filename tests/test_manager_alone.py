"""DDPManager where there are no other ranks: it makes none up, and never trains alone when some are announced."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.classic import DDPManager
from lockstep.errors import UserError
from ports import free_port

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def nothing_announced(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_one_process_stays_one():
    manager, model = DDPManager(), nn.Linear(2, 1)
    assert manager.initialize() is False
    assert not set(NAMES) & os.environ.keys()
    assert not dist.is_initialized()
    assert manager.wrap_model(model) is model
    manager.cleanup()


def test_ranks_that_do_not_come_are_an_error(monkeypatch):
    """This is rank 1 of 2, and rank 0 does not listen at its address."""
    announced = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (announced | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises((RuntimeError, UserError)):
        DDPManager().initialize(timeout_mins=1 / 60)
    assert not dist.is_initialized()


def test_set_epoch_refuses_a_foreign_loader():
    with pytest.raises(UserError, match="get_dataloader did not make"):
        DDPManager().set_epoch(DataLoader(TensorDataset(torch.arange(4))), 1)
