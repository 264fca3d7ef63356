"""The interfaces of the seed documents, used to the letter, as a reader of the documents would use them."""

from __future__ import annotations

import json
import os
import runpy
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

import lockstep.classic
from classic_net import Net, among, net, numbers, weights, write_rank
from lockstep.classic import AMPConfig, AMPTrainer, DDPManager, DistributedAMPTrainer, DistributedConfig
from lockstep.classic.clstm_ppo import gpu_optimizations
from lockstep.classic.train_script import main as train_script
from lockstep.errors import ConfigError, UserError
from lockstep.runtime.world import World
from pool import Pool
from ports import free_port

FP32 = AMPConfig(enabled=False, device="cpu")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def nothing_announced(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


# ---- one place to import from -------------------------------------------------------------------------------


def test_every_name_of_every_document_comes_from_one_place():
    """Document by document: 000, 001, 002, 003."""
    documents = (
        "AMPTrainer AMPConfig DistributedAMPTrainer DistributedConfig DynamicScaler",
        "DDPManager ElasticGPUConfig log_gpu_memory",
        "DistributedCLSTMPPOTrainer launch_distributed_training get_gpu_info print_gpu_info estimate_training_speedup "
        "print_training_speedup_estimates",
        "PretrainConfig load_synced_config generate_name PuzzleDataset create_model HierarchicalReasoningModel "
        "CastedSparseEmbeddingSignSGD_Distributed train_batch evaluate compute_metrics process_aggregated_metrics "
        "save_train_state",
    )
    for name in " ".join(documents).split():
        assert name in lockstep.classic.__all__
        assert callable(getattr(lockstep.classic, name))


# ---- ranks that are announced -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "begin",
    [
        lambda: DDPManager().initialize(),
        lambda: DistributedAMPTrainer(net(), FP32),
        lambda: DistributedAMPTrainer.is_distributed(),
        lambda: DistributedConfig.from_env(),
        lambda: lockstep.classic.DistributedCLSTMPPOTrainer(),
    ],
    ids=["DDPManager", "trainer", "is_distributed", "from_env", "clstm_ppo"],
)
def test_a_number_of_ranks_without_a_rank_never_trains_alone(begin, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="RANK is not set, but WORLD_SIZE=2 is"):
        begin()


@pytest.mark.parametrize("flags", [[], ["--distributed"], ["--elastic_gpu"]], ids=str)
def test_train_py_never_trains_alone_either(flags, monkeypatch, capsys):
    monkeypatch.setattr("lockstep.api.train", lambda *_: pytest.fail("it trains"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train_script("pixel_llm", [*flags, "preset=tiny"]) == 2
    assert "WORLD_SIZE=2 in the environment: that does not say which rank" in capsys.readouterr().err


def test_pretrain_never_trains_alone_either(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    from pretrain import main

    with pytest.raises(SystemExit, match="2"):
        main(["data_path=anywhere"])
    assert "RANK is not set, but WORLD_SIZE=2 is" in capsys.readouterr().err


def test_a_world_of_one_announces_nobody(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert DDPManager().initialize() is False
    assert not DistributedAMPTrainer.is_distributed()


def test_srun_gives_the_rank_that_the_environment_leaves_out(monkeypatch):
    """A batch script exports WORLD_SIZE, and `srun python script.py` starts the ranks."""
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "node1"}
    for name, value in (slurm | {"WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    joined: list[World] = []
    monkeypatch.setattr("lockstep.classic.process_group.join", lambda world, *_, **__: joined.append(world) or "none")
    assert DistributedAMPTrainer.is_distributed()
    assert DDPManager().initialize()
    assert [(world.rank, world.size) for world in joined] == [(1, 2)]
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="RANK is not set"):
        DDPManager().initialize()


def test_a_rank_of_a_machine_has_no_configuration(monkeypatch):
    """Some clouds set RANK and WORLD_SIZE for each machine: `from_env` took them for one machine's ranks."""
    for env in ({"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0"}):
        with pytest.raises(UserError, match="LOCAL_RANK not set"):
            DistributedConfig.from_env(env)
    assert DistributedConfig.from_env({"RANK": "0", "WORLD_SIZE": "1"}).world_size == 1


def test_latentwire_takes_ranks_without_a_flag(monkeypatch):
    """`WORLD_SIZE=4 RANK=0 LOCAL_RANK=0 python latentwire/train.py ...`: document 001 has no --distributed."""
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    trained = []
    monkeypatch.setattr("lockstep.api.train", lambda *words: trained.append(words[0]) or 0)
    script = Path(__file__).parent.parent.parent / "systems" / "latent_wire" / "latentwire" / "train.py"
    monkeypatch.setattr("sys.argv", [str(script), "preset=tiny"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script), run_name="__main__")
    assert left.value.code == 0
    assert trained == ["latent_wire"]


def test_arguments_must_agree_with_what_is_announced(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="WORLD_SIZE=4 in the environment"):
        DistributedAMPTrainer(net(), FP32, rank=1, world_size=2)


# ---- DistributedAMPTrainer ----------------------------------------------------------------------------------


def save_on_rank_0(world: World, store: Any, folder: Path) -> dict[str, Any]:
    """The documents write `if rank == 0: trainer.save_checkpoint(path)`."""
    among(world, store)
    trainer = DistributedAMPTrainer(net(), FP32, log_dir=folder / "logs")
    x, y = numbers(16)
    mine = slice(0, 5) if world.rank == 0 else slice(5, 8)
    trainer.training_step((x[:8][mine], y[:8][mine]))
    began = time.monotonic()
    if world.rank == 0:
        trainer.save_checkpoint(folder / "alone")
    trainer.training_step((x[8:][mine], y[8:][mine]))
    took = time.monotonic() - began
    end = weights(trainer.model)

    # All ranks load what one has saved, and go on to the same end.
    step = trainer.load_checkpoint(folder / "alone")
    trainer.training_step((x[8:][mine], y[8:][mine]))
    again = weights(trainer.model)

    # Called on all ranks, it returns on all of them when the checkpoint is there, or raises on all.
    saved = trainer.save_checkpoint(folder / "all")
    there = (saved / "manifest.json").exists()
    (folder / "file").touch()
    trainer.runtime.collectives.all_gather_json(None)
    with pytest.raises(UserError) as failed:
        trainer.save_checkpoint(folder / "file" / "folder")
    (folder / "file").unlink(missing_ok=True)
    trainer.runtime.collectives.all_gather_json(None)
    retried = trainer.save_checkpoint(folder / "file" / "folder").name
    with pytest.raises(UserError, match="names no rank"):
        trainer.save_checkpoint(folder, rank=7)

    # The writer does not come: the others do not wait for ever.
    trainer.time_limit = trainer.time_limit / 3000
    late = ""
    if world.rank == 1:
        with pytest.raises(UserError) as error:
            trainer.save_checkpoint(folder / "never")
        late = str(error.value)
    trainer.cleanup()
    return {
        "step": step, "same": torch.equal(end, again), "there": there, "failed": str(failed.value), "took": took,
        "late": late, "retried": retried,
    }  # fmt: skip


def test_rank_0_alone_can_save(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(save_on_rank_0, tmp_path, world=2)
    for one in found:
        assert one["step"] == 1
        assert one["same"]
        assert one["there"]
        assert "could not write the checkpoint" in one["failed"]
        assert one["retried"] == "step-00000002"
        assert one["took"] < 60  # of a limit of 30 minutes
    assert "waited for rank 0, which has not saved" in found[1]["late"]
    # Each rank has logged its own steps: before the load, and after it.
    x, y = numbers(16)
    for rank, mine in enumerate((slice(0, 5), slice(5, 8))):
        lines = [json.loads(line) for line in (tmp_path / "logs" / f"rank-{rank:05}.jsonl").read_text().splitlines()]
        assert [(line["step"], line["applied"], line["weight"]) for line in lines] == [
            (1, True, [5, 3][rank]), (2, True, [5, 3][rank]), (2, True, [5, 3][rank]),
        ]  # fmt: skip
        assert lines[0]["loss"] == pytest.approx(net()(x[:8][mine], y[:8][mine]).item(), rel=1e-6)
        assert lines[1]["grad_norm"] == lines[2]["grad_norm"] > 0


def load_on_rank_0(world: World, store: Any, folder: Path) -> list[str]:
    """`if rank == 0: trainer.load_checkpoint(path)` leaves the ranks with different weights."""
    among(world, store)
    trainer = DistributedAMPTrainer(net(), FP32)
    batch = numbers(8)[0][world.rank :: 2], numbers(8)[1][world.rank :: 2]
    trainer.training_step(batch)
    trainer.save_checkpoint(folder)
    found = []

    # A folder without a checkpoint is refused on all ranks alike; then all load, and train on.
    with pytest.raises(UserError) as nothing:
        trainer.load_checkpoint(folder / "empty")
    found.append(str(nothing.value))
    assert trainer.load_checkpoint(folder) == 1
    trainer.training_step(batch)

    # Rank 0 does not wait for the others. The next step shows on all of them what is wrong, even where the checkpoint
    # is of the step at which they all are.
    trainer.save_checkpoint(folder)
    trainer.arrival_limit = timedelta(seconds=0.1)
    if world.rank == 0:
        assert trainer.load_checkpoint(folder) == 2
    with pytest.raises(UserError) as alone:
        trainer.training_step(batch)
    found.append(str(alone.value))

    # The others do not wait for ever for a rank 0 that never loads.
    if world.rank == 1:
        trainer.time_limit = trainer.time_limit / 3000
        with pytest.raises(UserError, match="waited for rank 0, which has not called it"):
            trainer.load_checkpoint(folder)
    trainer.cleanup()
    return found


def test_a_checkpoint_that_rank_0_alone_loads_is_refused_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(load_on_rank_0, tmp_path, world=2)
    assert found[0] == found[1]
    nothing, alone = found[0]
    assert "found no checkpoint there" in nothing
    assert "1 of 2 ranks loaded a checkpoint before step 3" in alone
    assert "call load_checkpoint(path) on every rank" in alone


class Halting(Net):
    """One layer has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 1)


def wrapped_by_hand(world: World, store: Any) -> dict[str, Any]:
    """`trainer.model` and `trainer.wrap_model(model)`, with and without parameters that have no gradient."""
    among(world, store)
    found: dict[str, Any] = {}
    for unused in (False, True):
        torch.manual_seed(0)
        model = Halting() if unused else Net()
        how = DistributedConfig(world.size, world.rank, "gloo", num_gpus_per_node=2, find_unused_parameters=unused)
        trainer = DistributedAMPTrainer(model, FP32, distributed=how)
        x, y = numbers(8)
        mine = slice(0, 4) if world.rank == 0 else slice(4, 8)
        trainer.training_step((x[mine], y[mine]))
        trainer.model.eval().train()
        other, frozen = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False)
        again = trainer.wrap_model(other)
        again(torch.full((1, 2), float(world.rank))).sum().backward()
        found[str(unused)] = {
            "ddp": isinstance(trainer.model, DistributedDataParallel),
            "own": trainer.wrap_model(model) is trainer.wrap_model(trainer.model) is trainer.model,
            "names": list(trainer.model.state_dict()) == list(trainer.model.module.state_dict())
            == list(model.state_dict()),
            "attributes": trainer.model.module.hidden is trainer.model.hidden is model.hidden,
            "other": isinstance(again, DistributedDataParallel),
            "frozen": trainer.wrap_model(frozen) is frozen,
            "mean": other.weight.grad.tolist(),
            "weights": weights(model)[: weights(net()).numel()],
        }  # fmt: skip
    return found


def test_the_model_is_under_ddp_and_wrap_model_can_be_called(pool: Pool) -> None:
    alone = AMPTrainer(net(), FP32)
    alone.training_step(numbers(8))
    for one in pool.run(wrapped_by_hand, world=2):
        for found in one.values():
            assert all(found[name] for name in ("ddp", "own", "names", "attributes", "other", "frozen")), found
            assert found["mean"] == [[0.5, 0.5]]
            assert torch.allclose(found["weights"], weights(alone.model), atol=1e-6)


def test_alone_the_distributed_trainer_is_the_plain_one(tmp_path):
    """A script that goes from AMPTrainer to DistributedAMPTrainer changes the name, and on one process no bit."""
    ends = []
    for kind in (AMPTrainer, DistributedAMPTrainer):
        model = net()
        trainer = kind(model, AMPConfig(dtype="bfloat16", gradient_accumulation_steps=2, device="cpu"))
        for seed in range(4):
            trainer.training_step(numbers(8, seed=seed))
        trainer.save_checkpoint(tmp_path / kind.__name__)
        trainer.training_step(numbers(8))
        trainer.training_step(numbers(8, seed=5))
        assert trainer.load_checkpoint(tmp_path / "AMPTrainer") == 2
        ends.append((trainer.steps, trainer.train_epoch([numbers(4), numbers(4, seed=1)]), weights(model)))
    assert ends[0][:2] == ends[1][:2]
    assert torch.equal(ends[0][2], ends[1][2])
    assert issubclass(DistributedAMPTrainer, AMPTrainer)


def test_on_one_process_wrap_model_is_the_model():
    model, other = net(), nn.Linear(2, 1)
    trainer = DistributedAMPTrainer(model, FP32)
    assert trainer.wrap_model(model) is trainer.model is model
    assert trainer.wrap_model(other) is other
    assert trainer.setup_distributed() is trainer.runtime


def rank_that_waits(world: World, store: Any, port: int) -> str:
    """Rank 1 leaves rank 0 alone in a step."""
    os.environ["MASTER_PORT"] = str(port)
    store.set(f"rank {world.rank} is here", "")
    store.wait(["rank 0 is here", "rank 1 is here"], timedelta(minutes=2))  # the limit is for their start, too
    trainer = DistributedAMPTrainer(net(), FP32, world.rank, world.size, "gloo", timeout_mins=8 / 60)
    trainer.training_step(numbers(4, seed=world.rank))
    if world.rank == 1:
        store.wait(["rank 0 has given up"], timedelta(minutes=2))
        return ""
    with pytest.raises(RuntimeError) as error:
        trainer.training_step(numbers(4))
    store.set("rank 0 has given up", "")
    return str(error.value)


def test_a_rank_waits_no_longer_than_its_limit(pool: Pool) -> None:
    assert "imed out" in pool.run(rank_that_waits, free_port(), world=2)[0]
    for wrong in (0, -1, float("nan"), float("inf"), "30", None):
        with pytest.raises(UserError, match=f"timeout_mins={wrong!r} is not a time limit"):
            DistributedAMPTrainer(net(), FP32, timeout_mins=wrong)
        with pytest.raises(UserError, match=f"timeout_mins={wrong!r} is not a time limit"):
            DDPManager().initialize(timeout_mins=wrong)


# ---- DDPManager ---------------------------------------------------------------------------------------------


def test_a_backend_that_does_not_exist_is_not_replaced_by_another():
    with pytest.raises(UserError, match="backend=ncl"):
        DDPManager().initialize(backend="ncl")


def joined_by_the_script(world: World, store: Any) -> dict[str, Any]:
    """A script that has called `init_process_group` itself, with RANK and WORLD_SIZE, but without LOCAL_RANK."""
    among(world, store)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    found: dict[str, Any] = {}
    try:
        manager = DDPManager()
        found["joined"] = manager.initialize(), manager.rank, manager.world_size
        mine = torch.tensor([float(world.rank)])
        found["mean"] = [manager.all_reduce(mine.clone(), op).item() for op in ("mean", dist.ReduceOp.AVG)]
        with pytest.raises(UserError, match="int64 has no mean"):
            manager.all_reduce(torch.tensor([world.rank]))
        found["sum"] = manager.all_reduce(torch.tensor([world.rank]), "sum").item()

        # What the trainer refuses, validate() refuses.
        other = DistributedConfig(world_size=4, rank=3, num_gpus_per_node=4)
        for refuse in (other.validate, lambda: DistributedAMPTrainer(net(), FP32, distributed=other)):
            with pytest.raises(UserError, match=f"started as rank {world.rank} of 2"):
                refuse()
        found["valid"] = DistributedConfig(world_size=2, rank=world.rank, num_gpus_per_node=2).validate()
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
    return found


def test_a_process_group_that_the_script_has_joined_is_believed(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(joined_by_the_script, world=2)):
        assert found == {"joined": (True, rank, 2), "mean": [0.5, 0.5], "sum": 1, "valid": True}


def test_a_mean_of_whole_numbers_is_refused_on_one_process_too():
    with pytest.raises(UserError, match="int64 has no mean"):
        DDPManager().all_reduce(torch.tensor([1]))


# ---- DistributedConfig --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"device_ids": "0,1"}, "device_ids"),
        ({"device_ids": [0, "1"]}, "device_ids"),
        ({"device_ids": 3}, "device_ids"),
        ({"device_ids": []}, "device_ids"),
        ({"device_ids": [-1, 0]}, "device_ids"),
        ({"master_addr": None}, "master_addr"),
        ({"master_addr": " "}, "master_addr"),
        ({"master_port": "29500"}, "master_port"),
        ({"rank": None}, "rank"),
        ({"rank": 1.0}, "rank"),
        ({"world_size": True}, "world_size"),
        ({"backend": ["nccl"]}, "backend"),
        ({"broadcast_buffers": "no"}, "broadcast_buffers"),
        ({"num_nodes": {}}, "num_nodes"),
        ({"num_gpus_per_node": -2}, "num_gpus_per_node"),
        ({"find_unused_parameters": True, "gradient_as_bucket_view": False}, "gradient_as_bucket_view"),
    ],
    ids=str,
)
def test_validate_names_the_field_and_survives_any_type(wrong, field):
    config = DistributedConfig(**{"world_size": 2, "num_gpus_per_node": 2} | wrong)
    with pytest.raises(ConfigError) as error:
        config.validate()
    assert any(field in problem.problem for problem in error.value.problems), str(error.value)
    assert "ddp." not in str(error.value)


def test_what_validate_accepts_the_trainer_accepts(monkeypatch):
    """In a process that a launcher has started as rank 0 of 2."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    config = DistributedConfig(world_size=4, rank=3, num_gpus_per_node=4)
    with pytest.raises(ConfigError, match="started as rank 0 of 2"):
        config.validate()
    assert DistributedConfig(world_size=2, rank=0, num_gpus_per_node=2).validate()
    with pytest.raises(ConfigError, match="backend=carrier pigeon"):
        DistributedAMPTrainer(net(), FP32, backend="carrier pigeon")
    with pytest.raises(ConfigError, match="device_ids"):
        DistributedAMPTrainer(net(), FP32, device_ids="0")


def environment(rank: int, local_rank: int, local_size: int, node: int, size: int, nodes: int) -> dict[str, str]:
    """What torchrun sets in one process."""
    numbers = {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": node, "GROUP_WORLD_SIZE": nodes,
    }  # fmt: skip
    return {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}


def test_nodes_may_have_different_numbers_of_processes(tmp_path):
    """Nodes of 1, 3 and 2 processes; and back through the environment and through files."""
    places = [(node, local, size) for node, size in enumerate((1, 3, 2)) for local in range(size)]
    for rank, (node, local_rank, size) in enumerate(places):
        config = DistributedConfig.from_env(environment(rank, local_rank, size, node, 6, 3))
        assert config.validate()
        assert (config.rank, config.local_rank, config.node_rank) == (rank, local_rank, node)
        assert (config.num_nodes, config.num_gpus_per_node) == (3, size)
        assert DistributedConfig.from_env(config.to_env_dict()) == config
        config.save(tmp_path / "node.json")
        assert DistributedConfig.from_file(tmp_path / "node.json") == config
    # Equal nodes need no more than the documented fields.
    assert DistributedConfig.from_env(environment(3, 1, 2, 1, 4, 2)).first_rank is None
    config.first_rank = 5
    with pytest.raises(ConfigError, match="first_rank=5"):
        config.validate()


def test_two_torchruns_on_one_machine_have_met_at_localhost(monkeypatch):
    """Two agents on one machine are two nodes to torchrun: what they have met at is no mistake."""
    env = environment(1, 0, 2, 1, 3, 2) | {"MASTER_ADDR": "127.0.0.1"}
    with pytest.raises(ConfigError, match="master_addr=127"):
        DistributedConfig.from_env(env).validate()
    for name, value in (env | {"TORCHELASTIC_RUN_ID": "none"}).items():
        monkeypatch.setenv(name, value)
    assert DistributedConfig.from_env().validate()
    with pytest.raises(ConfigError, match="master_addr=localhost"):
        DistributedConfig(3, 1, master_addr="localhost", num_nodes=3, node_rank=1).validate()


def test_ranks_that_were_started_by_hand_have_a_configuration():
    """`WORLD_SIZE=4 RANK=1 LOCAL_RANK=1 python train.py`; our own launcher gives the size of a node as well."""
    config = DistributedConfig.from_env({"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"})
    assert config.validate()
    assert (config.num_nodes, config.num_gpus_per_node, config.local_rank) == (1, 4, 1)
    ours = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0"}
    config = DistributedConfig.from_env(ours)
    assert config.validate()
    assert (config.num_nodes, config.node_rank, config.local_rank) == (2, 1, 1)
    with pytest.raises(UserError, match="LOCAL_WORLD_SIZE is not set"):
        DistributedConfig.from_env({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"})


# ---- the trading agent --------------------------------------------------------------------------------------


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_function_is_launched_on_several_processes(tmp_path, monkeypatch, start_method):
    """Two new processes that import torch cost as much as fifty tests; forks show the same, but for the pickling."""
    monkeypatch.setattr(gpu_optimizations, "spawn", partial(start_processes, start_method=start_method))
    before = dict(os.environ)
    lockstep.classic.launch_distributed_training(write_rank, 2, str(tmp_path))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "1.0 0", "1": "1.0 1"}
    assert dict(os.environ) == before
    assert lockstep.classic.launch_distributed_training(lambda rank, size: (rank, size), 1) == (0, 1)


def test_a_function_that_cannot_be_sent_to_other_processes_is_named():
    with pytest.raises(UserError, match="cannot be handed to other processes"):
        lockstep.classic.launch_distributed_training(lambda rank, size: None, 2)


def test_the_files_of_the_documents_have_their_names():
    """`src/gpu_optimizations.py` beside the scripts of document 002, and `latentwire/train.py` of document 001."""
    systems = Path(__file__).parent.parent.parent / "systems"
    gpus = runpy.run_path(str(systems / "clstm_ppo" / "src" / "gpu_optimizations.py"))
    names = (
        "launch_distributed_training", "get_gpu_info", "print_gpu_info", "estimate_training_speedup",
        "print_training_speedup_estimates",
    )  # fmt: skip
    assert all(gpus[name] is getattr(lockstep.classic, name) for name in names)
    train = runpy.run_path(str(systems / "latent_wire" / "latentwire" / "train.py"))
    for name in ("DDPManager", "ElasticGPUConfig", "log_gpu_memory"):
        assert train[name] is getattr(lockstep.classic, name)


def test_the_functions_of_the_document_need_no_arguments(monkeypatch, capsys):
    lockstep.classic.print_training_speedup_estimates()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:3] for row in rows] == [
        ["1", "1.0x", "100%"], ["2", "1.9x", "95%"], ["4", "3.6x", "90%"], ["8", "6.8x", "85%"],
    ]  # fmt: skip
    assert lockstep.classic.estimate_training_speedup().gpus == 1
    trained = []
    monkeypatch.setattr(
        lockstep.classic.DistributedCLSTMPPOTrainer, "train", lambda self: trained.append(vars(self)) or {"score": 1.0}
    )
    assert lockstep.classic.launch_distributed_training() == {"score": 1.0}
    assert (trained[0]["num_episodes"], trained[0]["batch_size"]) == (5000, 128)


def test_only_the_main_process_saves_the_agent(tmp_path, monkeypatch):
    trainer = lockstep.classic.DistributedCLSTMPPOTrainer(1, 13, 8, preset="tiny")
    trainer.initialize()
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert trainer._save_checkpoint(tmp_path / "agent") == tmp_path / "agent"
    assert not any(tmp_path.iterdir())
    monkeypatch.setenv("RANK", "0")
    trainer._save_checkpoint(tmp_path / "agent")
    assert [path.name for path in tmp_path.iterdir()] == ["agent"]
