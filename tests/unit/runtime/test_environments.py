"""How a process learns that it is a rank: the variables of torchrun, Slurm, MPI, jsrun, and of none of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lockstep.errors import UserError
from lockstep.runtime import attempt_folder, environments
from lockstep.runtime.environments import NODES, RANKS, detect
from lockstep.runtime.environments.launcher import ATTEMPT, ATTEMPT_FOLDER, TERM_FILE, from_launcher
from lockstep.runtime.environments.nodes import FIRST_PORT, PORTS
from lockstep.runtime.environments.slurm import first_host, tasks_per_node
from lockstep.runtime.heartbeat import Heartbeat
from lockstep.runtime.world import World
from ports import free_port

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
}
# Task 3 of `srun --nodes=2 --ntasks=5 python script.py`: three tasks on the first node, two on the second.
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}


# Rank 3 of `mpirun -n 4` on two machines.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-4711@1",
    "PMIX_RANK": "3",
    "MASTER_ADDR": "node0",
}
INTEL_MPI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "node0"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "node0",
}
PALS = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "MASTER_ADDR": "node0"}
# Task 3 of `jsrun -n 4` with two tasks on each of two hosts; the script itself runs on a third one.
JSRUN = {
    "LSB_JOBID": "77",
    "LSB_MCPU_HOSTS": "batch1 1 c05 42 c06 42",
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}


def test_without_variables_there_is_one_process() -> None:
    assert detect({}) == World()


def test_every_reader_ignores_an_empty_environment() -> None:
    assert all(read({}) is None for read in (*RANKS, *NODES))


def test_torchrun() -> None:
    world = detect(TORCHRUN)
    assert world == World(3, 4, 1, 2, "10.0.0.1", 1234)
    assert environments.launched(TORCHRUN)


def test_a_hand_written_launcher_may_leave_out_the_rest() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert detect(env) == World(1, 2, 1, 2, "127.0.0.1", 29500)


@pytest.mark.parametrize(
    "half",
    [
        {"WORLD_SIZE": "2"},
        {"RANK": "1"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"},  # of a machine, in a cloud
        {"WORLD_SIZE": "2", "LOCAL_RANK": "1"},
    ],
)
def test_half_a_set_makes_no_rank_and_no_process_that_trains_alone(half: dict[str, str]) -> None:
    for question in (detect, environments.launched):
        with pytest.raises(UserError, match="does not say which rank this process is"):
            question(half)
    assert detect(half | {"LOCKSTEP_ENVIRONMENT": "none"}) == World()
    assert not environments.launched(half | {"LOCKSTEP_ENVIRONMENT": "none"})


@pytest.mark.parametrize("one", [{"WORLD_SIZE": "1"}, {"WORLD_SIZE": "1", "RANK": "0"}, {"LOCAL_RANK": "0"}])
def test_one_machine_of_one_is_no_riddle(one: dict[str, str]) -> None:
    assert detect(one) == World()
    assert not environments.launched(one)


def test_a_slurm_step_answers_what_half_a_set_leaves_open() -> None:
    assert detect(SLURM | {"WORLD_SIZE": "5"}) == detect(SLURM)
    assert not environments.launched(SLURM | {"WORLD_SIZE": "5"})


def test_our_launcher_says_where_its_ranks_meet() -> None:
    assert detect(TORCHRUN | {"LOCKSTEP_STORE_FILE": "/a/store"}).store_file == "/a/store"
    guarded = detect(TORCHRUN | {"LOCKSTEP_STORE_KEY_FILE": "/a/key", "LOCKSTEP_STORE_PORT": "5001"})
    assert (guarded.key_file, guarded.store_port) == ("/a/key", 5001)
    assert detect(TORCHRUN).store_file is detect(TORCHRUN).key_file is None


def test_ranks_of_torchrun_do_not_use_the_store_of_the_rank_that_started_it():
    outer = {"LOCKSTEP_STORE_FILE": "/a/store", "LOCKSTEP_STORE_KEY_FILE": "/a/key", "LOCKSTEP_STORE_PORT": "5001"}
    inner = detect(TORCHRUN | outer | {"TORCHELASTIC_RUN_ID": "none"})
    assert (inner.store_file, inner.key_file, inner.store_port) == (None, None, 0)


@pytest.mark.parametrize("name", [ATTEMPT_FOLDER, ATTEMPT, TERM_FILE])
def test_ranks_of_torchrun_are_no_ranks_of_the_launcher_whose_rank_started_it(name):
    """They would write their heartbeats over those of that rank, and resume because it was restarted."""
    assert from_launcher(name, {name: "1"}) == "1"
    assert from_launcher(name, {name: "1", "TORCHELASTIC_RUN_ID": "none"}) is None


def test_a_rank_of_our_launcher_knows_the_folder_that_it_shares_with_it(tmp_path):
    ours = {ATTEMPT_FOLDER: str(tmp_path)}
    assert attempt_folder.current(ours) == tmp_path
    assert attempt_folder.current({}) is None
    assert attempt_folder.current(ours | {"TORCHELASTIC_RUN_ID": "none"}) is None


@pytest.mark.parametrize("inside_torchrun", [True, False])
def test_only_a_rank_of_our_launcher_leaves_its_heartbeat_there(inside_torchrun, tmp_path, monkeypatch):
    monkeypatch.setenv(ATTEMPT_FOLDER, str(tmp_path))
    if inside_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    Heartbeat.from_env(0).beat("data")
    assert [path.name for path in tmp_path.iterdir()] == ([] if inside_torchrun else ["heartbeat-0"])


@pytest.mark.parametrize("wrong", [{"RANK": "4"}, {"RANK": "-1"}, {"RANK": "one"}, {"MASTER_PORT": "x"}])
def test_torchrun_variables_that_make_no_sense(wrong: dict[str, str]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        detect(TORCHRUN | wrong)


def test_slurm() -> None:
    world = detect(SLURM)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 5, 0, 2)
    assert world.master_addr == "gpu07"
    assert not environments.launched(SLURM)  # `srun lockstep train --nproc 8 ...` starts launchers, not ranks


def test_all_tasks_of_a_slurm_step_meet_at_one_address() -> None:
    tasks = [SLURM | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 3)} for rank in range(5)]
    worlds = [detect(task) for task in tasks]
    assert len({(world.master_addr, world.master_port) for world in worlds}) == 1
    assert [world.rank for world in worlds] == list(range(5))
    assert [world.local_size for world in worlds] == [3, 3, 3, 2, 2]


def test_ports_of_slurm_steps_differ_and_stay_in_range() -> None:
    ports = {
        detect(SLURM | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port
        for job in (1, 2, 99_999_999)
        for step in (0, 1)
    }
    assert len(ports) == 6
    assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in ports)


def test_the_user_decides_where_slurm_tasks_meet() -> None:
    world = detect(SLURM | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29400"})
    assert (world.master_addr, world.master_port) == ("10.0.0.9", 29400)


@pytest.mark.parametrize(
    "env",
    [
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},  # an interactive shell: `srun --pty bash` in an allocation of several
        {key: value for key, value in SLURM.items() if "STEP" not in key},  # the script of sbatch
        {"SLURM_JOB_ID": "4242", "SLURM_NTASKS": "5"},  # the shell of salloc
    ],
)
def test_a_slurm_job_of_one_process_stays_one_process(env: dict[str, str]) -> None:
    assert detect(env) == World()


def test_a_launcher_inside_a_slurm_step_decides() -> None:
    assert detect(SLURM | TORCHRUN) == detect(TORCHRUN)


@pytest.mark.parametrize("wrong", [{"SLURM_PROCID": "5"}, {"SLURM_PROCID": "x"}, {"SLURM_LOCALID": ""}])
def test_slurm_variables_that_make_no_sense(wrong: dict[str, str]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        detect(SLURM | wrong)


def test_a_slurm_step_without_an_address() -> None:
    env = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_NODELIST"}
    with pytest.raises(UserError, match="export MASTER_ADDR=HOST"):
        detect(env)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("gpu[3,5-7]", "gpu3"),
        ("gpu[003-120],cpu1", "gpu003"),
        ("rack[1-2]node[04-09]", "rack1node04"),
        ("node[1-2].cluster", "node1.cluster"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("3,2", [3, 2])])
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("env", "launcher", "host"),
    [
        (OPEN_MPI, "mpirun (Open MPI)", "node0"),
        (INTEL_MPI, "mpirun (MPICH or Intel MPI)", "node0"),
        (MVAPICH, "mpirun (MVAPICH)", "node0"),
        (PALS, "mpirun (a PMI launcher)", "node0"),
        (JSRUN, "jsrun", "c05"),
        (TORCHRUN, "RANK and WORLD_SIZE", "10.0.0.1"),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, "torchrun", "10.0.0.1"),
        (TORCHRUN | {"RAY_RAYLET_PID": "4711", "NODE_RANK": "1"}, "Ray Train", "10.0.0.1"),
        (TORCHRUN | {"LOCKSTEP_STORE_FILE": "/a/store", "RAY_RAYLET_PID": "4711"}, "lockstep", "10.0.0.1"),
        (SLURM | {"PMI_RANK": "3", "PMI_SIZE": "5"}, "srun", "gpu07"),  # srun --mpi=pmi2
    ],
)
def test_a_rank_knows_what_made_it_one(env: dict[str, str], launcher: str, host: str) -> None:
    world = detect(env)
    size = 5 if launcher == "srun" else 4
    local = (0, 2) if launcher == "srun" else (1, 2)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, size, *local)
    assert (world.launcher, world.master_addr) == (launcher, host)
    assert environments.launched(env) == ("RANK" in env)


def test_ranks_of_mpi_on_one_machine_meet_there_and_two_jobs_do_not() -> None:
    one = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    del one["MASTER_ADDR"]
    worlds = [detect(one | {"PMIX_NAMESPACE": f"prterun-host-{pid}@1"}) for pid in (4711, 4711, 4712)]
    assert {world.master_addr for world in worlds} == {"127.0.0.1"}
    assert worlds[0].master_port == worlds[1].master_port != worlds[2].master_port


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({name: value for name, value in OPEN_MPI.items() if name != "MASTER_ADDR"}, "mpirun -x MASTER_ADDR=HOST"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4 is not a rank"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK is not set"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "MPI_LOCALRANKID is not set"),
        (JSRUN | {"JSM_NAMESPACE_RANK": "4"}, "JSM_NAMESPACE_RANK=4 is not"),
        (JSRUN | {"LSB_MCPU_HOSTS": ""}, "the hosts of this LSF job are not known"),
    ],
)
def test_half_sets_of_mpi_and_lsf(env: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        detect(env)


@pytest.mark.parametrize(
    "env",
    [
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"LSB_JOBID": "77", "LSB_MCPU_HOSTS": "c05 8 c06 8"},  # the script of bsub
    ],
)
def test_one_process_of_mpi_or_lsf_stays_one_process(env: dict[str, str]) -> None:
    assert detect(env) == World()


TASK = """
import torch, torch.distributed as dist
from lockstep.runtime.context import join
from lockstep.runtime.environments import detect
world = detect()
join(world, torch.device("cpu"))
ranks = torch.tensor([world.rank + 1])
dist.all_reduce(ranks)
print(world.rank, world.local_size, int(ranks))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.long
def test_processes_with_the_variables_of_a_slurm_step_form_a_process_group() -> None:
    shared = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost"}
    shared |= {"SLURM_NODEID": "0", "MASTER_PORT": str(free_port())}
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", TASK],
            env=env | shared | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    assert [task.communicate(timeout=120)[0] for task in tasks] == ["0 2 3\n", "1 2 3\n"]
