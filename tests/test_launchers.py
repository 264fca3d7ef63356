"""Two ranks of each launcher train what one process trains: torchrun, srun, mpirun, spawned processes, by hand.

Slurm and MPI are represented by the variables that they set; `tests/faults` has the ranks of our own launcher.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import preloaded
from ports import free_port

ROOT = Path(__file__).parent.parent
SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import lockstep

class Line(lockstep.Task):
    defaults = {"steps": 5, "global_batch": 6, "micro_batch": 1, "evaluate": {"at_end": False}}

    def model(self):
        return nn.Linear(3, 1)

    def data(self):
        x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, torch.arange(20.0))

    def loss(self, model, batch):
        x, weight = batch
        return lockstep.Loss(((model(x)[:, 0] - x.sum(1)) ** 2 * weight).sum(), weight.sum())

def main():
    lockstep.fit(Line(), run_dir=sys.argv[1])

if __name__ == "__main__":
    main()
"""

# torch.multiprocessing.spawn starts fresh processes; forked ones, which are the same to Lockstep, start at once.
SPAWN = """
import os, sys
import torch.distributed as dist
from torch.multiprocessing import start_processes
import train

def rank(number, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    train.main()
    dist.destroy_process_group()

start_processes(rank, (sys.argv[2],), nprocs=2, start_method="fork")
"""
CLASSIC = """
import functools
from torch.multiprocessing import start_processes
import lockstep.classic.clstm_ppo.gpu_optimizations as module
import train

module.spawn = functools.partial(start_processes, start_method="fork")
module.launch_distributed_training(lambda rank, world_size: train.main(), 2)
"""
BY_HAND = ({"RANK": "0", "LOCAL_RANK": "0"}, {"RANK": "1", "LOCAL_RANK": "1"})
TASKS = ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"})
RANKS_OF_MPI = tuple({f"OMPI_COMM_WORLD_{name}": rank for name in ("RANK", "LOCAL_RANK")} for rank in "01")
SLURM = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NODEID": "0",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "job"}

# Name in the banner -> the variables of all ranks, and those of each rank.
STARTED_ONE_BY_ONE = {
    "srun": (SLURM, TASKS),
    "mpirun (Open MPI)": (OPEN_MPI, RANKS_OF_MPI),
    "RANK and WORLD_SIZE": ({"WORLD_SIZE": "2"}, BY_HAND),
}
STARTED_BY_ONE = {
    "torchrun": (*preloaded.TORCHRUN, "--standalone", "--nproc-per-node=2", "train.py"),
    # `torch.distributed.launch` is torchrun by its old name.
    "torchrun, by its old name": ("-m", "torch.distributed.launch", "--use-env", "--nproc-per-node=2", "train.py"),
    "the script": ("spawn.py",),
    "RANK and WORLD_SIZE": ("classic.py",),
}


def start(words: tuple[str, ...], env: Mapping[str, str], folder: Path, output) -> preloaded.Command:
    plain = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return preloaded.start_python(*words, env=plain | env, cwd=folder, stdout=output, stderr=output)


def run(folder: Path, *commands: tuple[tuple[str, ...], Mapping[str, str]]) -> str:
    """Run commands side by side, and return what they printed."""
    with tempfile.TemporaryFile() as output:

        def said() -> str:
            output.seek(0)
            return output.read().decode()

        started = [start(words, env, folder, output) for words, env in commands]
        codes = [preloaded.wait(process, 240, said) for process in started]
        text = said()
    assert not any(codes), text
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("launchers")
    for name, text in (("train.py", SCRIPT), ("spawn.py", SPAWN), ("classic.py", CLASSIC)):
        (made / name).write_text(text)
    run(made, (("train.py", "alone"), {}))
    return made


def check(folder: Path, name: str) -> None:
    one, other = (load_file(folder / run_dir / "model.safetensors") for run_dir in ("alone", name))
    for key, weight in one.items():
        torch.testing.assert_close(other[key], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("launcher", STARTED_BY_ONE)
def test_processes_that_one_command_starts(folder: Path, launcher: str) -> None:
    words = (*STARTED_BY_ONE[launcher], f"by-{launcher}", str(folder / f"store-{launcher}"))
    said = run(folder, (words, {"PET_MASTER_PORT": str(free_port())}))
    assert f"2 processes from {launcher.partition(',')[0]} over gloo" in said
    check(folder, f"by-{launcher}")


@pytest.mark.parametrize("launcher", STARTED_ONE_BY_ONE)
def test_processes_that_are_started_one_by_one(folder: Path, launcher: str) -> None:
    shared, each = STARTED_ONE_BY_ONE[launcher]
    meeting = {"MASTER_PORT": str(free_port())}
    said = run(folder, *((("train.py", launcher), meeting | shared | own) for own in each))
    assert f"2 processes from {launcher} over gloo" in said
    check(folder, launcher)


def test_a_platform_tells_launchers_where_to_meet(folder: Path) -> None:
    """The machine that the platform numbers 0 coordinates, even if another one could and was earlier."""
    words = (*preloaded.COMMAND, "train", "train.py:Line", "--nproc", "auto", "run_dir=platform")
    shared = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    machines = [shared | {"PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": number} for number in "10"]
    said = run(folder, *((words, machine) for machine in machines))
    for number in "01":
        meeting = f"127.0.0.1:{shared['PET_MASTER_PORT']}"
        # Without the end of the line: both write to one pipe, and a line break may come after the other's text.
        assert f"lockstep: nodes from Kubeflow Trainer: 2, this one {number}, meeting at {meeting}" in said
    check(folder, "platform")


def test_announced_machines_do_not_train_alone(folder: Path) -> None:
    env = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1"}
    with tempfile.TemporaryFile() as output:
        process = start(("train.py", "announced"), env, folder, output)
        assert process.wait(240) == 1
        output.seek(0)
        assert b"Kubeflow Trainer runs this command on 2 machines, and this process is not a rank" in output.read()
    assert not (folder / "announced").exists()
