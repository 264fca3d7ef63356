"""The classic interfaces around a loop of one's own: configuration, manager and scaler; and train.py."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import preloaded
from classic_net import among, numbers, weights
from lockstep.classic import (
    DDPManager,
    DistributedConfig,
    DynamicScaler,
    log_gpu_memory,
)
from lockstep.classic.train_script import check_processes
from lockstep.errors import ConfigError, UserError
from lockstep.runtime.world import World
from pool import Pool
from ports import free_port

ROOT = Path(__file__).parent.parent


# ---- DistributedConfig --------------------------------------------------------------------------------------


def test_a_configuration_survives_the_environment_and_files(tmp_path):
    config = DistributedConfig(
        world_size=9, rank=5, master_addr="node0", num_nodes=3, node_rank=1, num_gpus_per_node=3,
        device_ids=[0, 2, 3], find_unused_parameters=True, backend="gloo", launch_method="torch.distributed.launch",
    )  # fmt: skip
    assert config.validate() is True
    env = config.to_env_dict()
    assert all(isinstance(value, str) for value in env.values())
    assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == ("5", "2", "9")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["CUDA_VISIBLE_DEVICES"]) == ("node0", "29500", "0,2,3")
    assert DistributedConfig.from_env(env) == config
    config.save(tmp_path / "dist.json")
    assert DistributedConfig.from_json(tmp_path / "dist.json") == config
    (tmp_path / "dist.yaml").write_text("world_size: 2\nnum_gpus_per_node: 2\nbackend: gloo\n")
    assert DistributedConfig.from_yaml(tmp_path / "dist.yaml").backend == "gloo"
    (tmp_path / "dist.yaml").write_text("wrld_size: 2\n")
    with pytest.raises(UserError, match="wrld_size"):
        DistributedConfig.from_yaml(tmp_path / "dist.yaml")


def test_what_torchrun_sets_is_understood():
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    config = DistributedConfig.from_env(env | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert (config.rank, config.local_rank, config.num_nodes, config.master_port) == (3, 1, 2, 1234)
    assert config.validate()
    assert DistributedConfig.from_env({}) == DistributedConfig()
    with pytest.raises(UserError, match="WORLD_SIZE is not set"):
        DistributedConfig.from_env({"LOCAL_RANK": "0"})
    with pytest.raises(UserError, match="RANK"):
        DistributedConfig.from_env({"RANK": "first", "WORLD_SIZE": "2"})


def test_its_fields_and_defaults_are_the_documented_ones():
    *documented, extra = fields(DistributedConfig)
    assert (extra.name, extra.default) == ("first_rank", None)  # for nodes of different sizes
    assert {f.name: getattr(DistributedConfig(), f.name) for f in documented} == {
        "world_size": 1, "rank": 0, "backend": "nccl", "master_addr": "localhost", "master_port": 29500,
        "num_nodes": 1, "node_rank": 0, "num_gpus_per_node": 1, "device_ids": None, "find_unused_parameters": False,
        "broadcast_buffers": True, "gradient_as_bucket_view": True, "launch_method": "torchrun",
    }  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"world_size": 3},
        {"rank": 2},
        {"rank": -1},
        {"node_rank": 1},
        {"master_port": 70000},
        {"backend": "carrier pigeon"},
        {"launch_method": "by hand"},
        {"device_ids": [0, 0]},
        {"device_ids": [1]},
        {"num_nodes": 2, "world_size": 4},
        {"world_size": "2"},
        {"num_gpus_per_node": 0},
    ],
    ids=str,
)
def test_common_mistakes_are_found(wrong):
    with pytest.raises(ConfigError) as error:
        DistributedConfig(**{"world_size": 2, "num_gpus_per_node": 2} | wrong).validate()
    key = next(iter(wrong))
    assert any(key in f"{problem.problem} {problem.found}" for problem in error.value.problems)


@pytest.mark.parametrize("method", ["torchrun", "torch.distributed.launch"])
def test_the_launch_command_follows_the_method(method):
    config = DistributedConfig(
        world_size=4, num_nodes=2, num_gpus_per_node=2, master_addr="node0", launch_method=method
    )
    words = config.command("train.py", ["--distributed"])
    assert method in " ".join(words)
    assert {"--nproc_per_node=2", "--nnodes=2", "--node_rank=0", "--master_addr=node0"} <= set(words)
    assert words[-2:] == ["train.py", "--distributed"]


# ---- DDPManager ---------------------------------------------------------------------------------------------


def managed(world: World, store: Any) -> dict[str, Any]:
    """Two trainable modules and a frozen one, in a loop of plain PyTorch."""
    among(world, store)
    manager = DDPManager()
    several = manager.initialize(timeout_mins=2)
    torch.manual_seed(0)
    frozen, encoder, head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4), nn.Linear(4, 1)
    kinds = [type(manager.wrap_model(module)) for module in (frozen, encoder)]
    encoder, head = manager.wrap_model(encoder), manager.wrap_model(head)
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
    loader = manager.get_dataloader(TensorDataset(torch.arange(22), *numbers(22)), batch_size=8 // world.size)
    seen: list[list[int]] = []
    for _ in range(2):
        for ids, x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(head(torch.tanh(encoder(frozen(x)))).squeeze(-1), y).backward()
            optimizer.step()
            seen.append(ids.tolist())
    manager.set_epoch(loader, 0)
    again = [ids.tolist() for ids, _, _ in loader]
    rank = torch.tensor(float(manager.rank))
    reduced = {op: manager.all_reduce(rank.clone(), op).item() for op in ("mean", "sum", "max", "min")}
    manager.barrier()
    manager.cleanup()
    return {
        "several": several, "kinds": kinds, "seen": seen, "again": again, "reduced": reduced, "main": manager.is_main,
        "weights": torch.cat([weights(encoder), weights(head)]), "ranks": (manager.rank, manager.world_size),
    }  # fmt: skip


def test_a_managed_loop_is_the_same_on_two_ranks(pool: Pool) -> None:
    [alone], two = pool.run(managed, world=1), pool.run(managed, world=2)
    assert not alone["several"]
    assert [one["ranks"] for one in two] == [(0, 2), (1, 2)]
    assert [one["main"] for one in two] == [True, False]
    assert two[0]["kinds"] == [nn.Linear, DistributedDataParallel]  # frozen: moved, not wrapped
    for one in two:
        assert torch.allclose(one["weights"], alone["weights"], atol=1e-6)
        assert one["reduced"] == {"mean": 0.5, "sum": 1.0, "max": 1.0, "min": 0.0}
    # No sample twice in an epoch, another order in the next, and the same one again for the same epoch.
    both = [sorted(a + b) for a, b in zip(two[0]["seen"], two[1]["seen"], strict=True)]
    assert [sorted(batch) for batch in alone["seen"]] == both
    first, second = both[0] + both[1], both[2] + both[3]
    assert len(first) == len(set(first)) == 16
    assert first != second
    assert two[0]["again"] == two[0]["seen"][:2]


def test_a_batch_that_some_rank_would_not_get_is_refused():
    manager = DDPManager()
    manager.world = World(0, 4, 0, 4)
    data = TensorDataset(torch.arange(9))
    with pytest.raises(UserError, match="the last batch has 1 samples"):
        manager.get_dataloader(data, batch_size=2, drop_last=False)
    with pytest.raises(UserError, match="fill no batch"):
        manager.get_dataloader(data, batch_size=3)
    with pytest.raises(UserError, match="does not exist"):
        manager.all_reduce(torch.ones(1), "median")


def test_gpu_memory_is_logged(capsys):
    assert log_gpu_memory() == capsys.readouterr().out.strip() != ""


# ---- DynamicScaler ------------------------------------------------------------------------------------------


def test_the_scaler_in_a_plain_loop():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = DynamicScaler(init_scale=8.0, growth_interval=2)
    scales = []
    for factor in (1.0, math.inf, 1.0, 1.0):
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).mean()
        scaler.scale(loss * factor).backward()
        before = weights(model)
        scaler.unscale(optimizer)  # before clipping, say
        with pytest.raises(UserError, match="called twice"):
            scaler.unscale(optimizer)
        went = scaler.step(optimizer)
        assert went == (factor == 1.0)
        if went:
            assert torch.allclose(before - weights(model), torch.full((3,), 0.1), atol=1e-6)  # the scale is out again
        scaler.update()
        scales.append(scaler.value)
    assert scales == [8.0, 4.0, 4.0, 8.0]
    other = DynamicScaler()
    other.load_state_dict(scaler.state_dict())
    assert (other.value, list(other.history)) == (8.0, list(scaler.history))
    assert DynamicScaler().value == 2.0**15


# ---- train.py -----------------------------------------------------------------------------------------------


def test_ranks_started_by_hand_train_together(tmp_path):
    (tmp_path / "config.yaml").write_text("preset: tiny\nsteps: 3\nrun_dir: run\nevaluate: {at_end: false}\n")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "MASTER_PORT": str(free_port())}
    script = str(ROOT / "systems" / "pixel_llm" / "train.py")
    words = (script, "--config", "config.yaml", "--distributed", "log.every=1")

    def start(rank):
        numbers = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        return preloaded.run_python(*words, cwd=tmp_path, env=env | numbers)

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(start, range(2))
    assert (first.returncode, second.returncode) == (0, 0), (first, second)
    assert "pixel_llm  2 ranks" in first.stdout
    assert "3/3" in first.stdout
    assert second.stdout == ""  # only the main process prints
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_distributed_without_ranks_is_refused(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="WORLD_SIZE not set"):
        check_processes(distributed=True, takes_any=False)
    check_processes(distributed=False, takes_any=True)
