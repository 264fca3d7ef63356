"""What each platform says about the machines of a job, and what `lockstep train` makes of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.runtime import environments
from lockstep.runtime.environments import NODES, JobShape, detect, place
from lockstep.runtime.environments.nodes import FIRST_PORT, PORTS, Nodes
from lockstep.runtime.world import World

KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "auto",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}
OWN_JOB = {
    "LOCKSTEP_NNODES": "2",
    "LOCKSTEP_JOIN": "job-0.job:29400",
    "LOCKSTEP_NPROC": "4",
    "JOB_COMPLETION_INDEX": "1",
}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-managed-2026-11-16-12-00-00-000000_train_7-0",
}
DSTACK = {
    "DSTACK_NODES_NUM": "2",
    "DSTACK_NODE_RANK": "1",
    "DSTACK_MASTER_NODE_IP": "10.0.0.5",
    "DSTACK_NODES_IPS": "10.0.0.5\n10.0.0.6",
    "DSTACK_GPUS_PER_NODE": "8",
    "DSTACK_RUN_NAME": "wise-fox-1",
}
LEPTON = {
    "LEPTON_JOB_TOTAL_WORKERS": "2",
    "LEPTON_JOB_WORKER_INDEX": "1",
    "LEPTON_JOB_NAME": "train-x",
    "LEPTON_JOB_SERVICE_PREFIX": "train-x-abc",
    "LEPTON_SUBDOMAIN": "train-x-svc",
    "LEPTON_RESOURCE_ACCELERATOR_NUM": "8",
    "LEPTON_JOB_FAILURE_COUNT": "3",
}
PAI_DLC = {
    "WORLD_SIZE": "2",
    "RANK": "1",
    "NPROC_PER_NODE": "8",
    "MASTER_ADDR": "dlc18isgeayd-master-0",
    "MASTER_PORT": "23456",
}
BLAUNCH = {"LSB_JOBID": "77", "LSB_MCPU_HOSTS": "c05 1 c06 1", "LSF_PM_TASKID": "2"}
JSRUN = {
    "LSB_JOBID": "77",
    "LSB_MCPU_HOSTS": "batch1 1 c05 42 c06 42",
    "JSM_NAMESPACE_RANK": "1",
    "JSM_NAMESPACE_SIZE": "2",
    "JSM_NAMESPACE_LOCAL_RANK": "0",
}
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_RESTART_COUNT": "1",
}

# Environment -> platform, host of the meeting point, its port if the platform names one, processes, restarts.
PLATFORMS = {
    "Kubeflow Trainer": (KUBEFLOW, "job-node-0-0.job", 29500, "auto", 0),
    "an indexed Job": (OWN_JOB, "job-0.job", 29400, "4", 0),
    "SkyPilot": (SKYPILOT, "10.0.0.5", None, "8", 0),
    "dstack": (DSTACK, "10.0.0.5", None, "8", 0),
    "DGX Lepton": (LEPTON, "train-x-abc-0.train-x-svc", None, "8", 3),
    "PAI-DLC": (PAI_DLC, "dlc18isgeayd-master-0", 23456, "8", 0),
    "LSF": (BLAUNCH, "c05", None, None, 0),
    "LSF, jsrun": (JSRUN, "c05", None, None, 0),
    "Slurm": (SLURM, "gpu07", FIRST_PORT + 31 * 4242 % PORTS, None, 1),
}


def read(env: dict[str, str]) -> list[Nodes]:
    return [found for reader in NODES if (found := reader(env)) is not None]


@pytest.mark.parametrize("name", PLATFORMS)
def test_one_reader_knows_a_platform_and_the_others_say_not_mine(name: str) -> None:
    env, host, port, nproc, restarts = PLATFORMS[name]
    (nodes,) = read(env)
    assert (nodes.platform, nodes.count, nodes.number) == (name.partition(",")[0], "2", 1)
    assert (nodes.nproc, nodes.restarts) == (nproc, restarts)
    found_host, _, found_port = (nodes.join or "").rpartition(":")
    assert found_host == host
    assert int(found_port) == port if port else FIRST_PORT <= int(found_port) < FIRST_PORT + PORTS


@pytest.mark.parametrize("name", PLATFORMS)
def test_the_launcher_takes_the_nodes_and_says_where_from(name: str) -> None:
    env, *_, nproc, restarts = PLATFORMS[name]
    (nodes,) = read(env)
    placed = place("3", None, None, env)
    assert (placed.nproc, placed.nnodes, placed.join, placed.node) == ("3", "2", nodes.join, 1)
    again = {0: "", 1: "; 1 restart before this one", 3: "; 3 restarts before this one"}[restarts]
    assert placed.source == f"nodes from {nodes.platform}: 2, this one 1, meeting at {nodes.join}{again}"

    # `auto` is what the platform was asked for, if it says a number.
    assert place("auto", None, None, env).nproc == (nproc or "auto")


@pytest.mark.parametrize("name", PLATFORMS)
def test_what_is_typed_wins(name: str) -> None:
    env, *_ = PLATFORMS[name]
    (nodes,) = read(env)
    assert place("3", "5", "a:1", env) == JobShape("3", "5", "a:1")
    assert place("3", "1", None, env) == JobShape("3", "1", None)

    # A meeting point that was typed may be on any machine.
    typed = place("3", None, "a:1", env)
    assert (typed.nnodes, typed.join, typed.node) == ("2", "a:1", None)
    typed = place("3", "1:4", None, env)
    assert (typed.nnodes, typed.join, typed.node) == ("1:4", nodes.join, 1)
    assert place("3", None, None, env | {"LOCKSTEP_ENVIRONMENT": "none"}) == JobShape("3", None, None)


@pytest.mark.parametrize("name", PLATFORMS)
def test_all_nodes_of_a_job_compute_the_same_meeting_point(name: str) -> None:
    env, *_ = PLATFORMS[name]
    numbers = {
        "PET_NODE_RANK": "0",
        "JOB_COMPLETION_INDEX": "0",
        "SKYPILOT_NODE_RANK": "0",
        "DSTACK_NODE_RANK": "0",
        "LEPTON_JOB_WORKER_INDEX": "0",
        "RANK": "0",
        "LSF_PM_TASKID": "1",
        "JSM_NAMESPACE_RANK": "0",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
    }
    first = env | {variable: number for variable, number in numbers.items() if variable in env}
    (one,), (other,) = read(first), read(env)
    assert (one.number, one.join) == (0, other.join)


@pytest.mark.parametrize("name", PLATFORMS)
def test_without_nproc_no_machine_trains_alone(name: str) -> None:
    env, *_, nproc, _ = PLATFORMS[name]
    if name in ("Slurm", "LSF, jsrun"):  # a task of srun or jsrun is a rank
        assert place(None, None, None, env).here
        assert environments.detect(env | {"MASTER_ADDR": "a"}).size == 2
        return

    if nproc is None:
        with pytest.raises(UserError, match="add --nproc auto"):
            place(None, None, None, env)
    else:
        assert place(None, None, None, env).nproc == nproc

    # A script without a launcher: `lockstep.fit` in `python script.py`.
    with pytest.raises(UserError, match="runs this command on 2 machines, and this process is not a rank"):
        detect(env)
    assert not environments.launched(env)
    assert detect(env | {"LOCKSTEP_ENVIRONMENT": "none"}) == World()


RANK = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_rank_on_such_a_machine_is_a_rank(name: str) -> None:
    env, *_ = PLATFORMS[name]
    assert (detect(env | RANK).rank, detect(env | RANK).size) == (5, 8)
    assert environments.launched(env | RANK)
    assert place(None, None, None, env | RANK).here


@pytest.mark.parametrize("missing", ["PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"])
def test_half_a_set_of_kubeflow(missing: str) -> None:
    env = {name: value for name, value in KUBEFLOW.items() if name != missing}
    with pytest.raises(UserError, match=f"the variables of Kubeflow Trainer are not complete: {missing} not set"):
        place("auto", None, None, env)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0"}, "SKYPILOT_NODE_IPS not set"),
        ({"SKYPILOT_NODE_IPS": "10.0.0.5"}, "SKYPILOT_NUM_NODES and SKYPILOT_NODE_RANK not set"),
        ({"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "0"}, "DSTACK_MASTER_NODE_IP not set"),
        ({"LEPTON_JOB_TOTAL_WORKERS": "2"}, "LEPTON_JOB_WORKER_INDEX and LEPTON_JOB_NAME not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "NPROC_PER_NODE": "8"}, "PAI-DLC are not complete: MASTER_ADDR not set"),
        ({"LOCKSTEP_NNODES": "2"}, "LOCKSTEP_JOIN not set"),
        ({"LOCKSTEP_JOIN": "a:1"}, "LOCKSTEP_NNODES not set"),
        ({"LSB_JOBID": "77", "LSF_PM_TASKID": "1"}, "the hosts of this LSF job are not known"),
        # Contradictions.
        (KUBEFLOW | {"PET_NODE_RANK": "2"}, "PET_NODE_RANK=2 is not a machine of PET_NNODES=2"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "x"}, "SKYPILOT_NODE_RANK must be a whole number"),
        (OWN_JOB | {"LOCKSTEP_NNODES": "3:2"}, "LOCKSTEP_NNODES=3:2 is not a number of machines"),
        (OWN_JOB | {"JOB_COMPLETION_INDEX": "2"}, "JOB_COMPLETION_INDEX=2 is not a machine"),
        (BLAUNCH | {"LSF_PM_TASKID": "3"}, "LSF_PM_TASKID=3 is not a machine of 2 hosts"),
        (JSRUN | {"JSM_NAMESPACE_SIZE": "4"}, "jsrun has started 4 tasks on 2 hosts"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "4"}, "srun has started 4 tasks on 2 nodes"),
    ],
)
def test_half_sets_and_contradictions_are_refused(env: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        place("2", None, None, env)


@pytest.mark.parametrize(
    "env",
    [
        {"PET_MASTER_PORT": "1234"},  # an option of torchrun, given as a variable
        {"JOB_COMPLETION_INDEX": "3"},  # an indexed Job of independent tasks, such as a sweep
        {"NPROC_PER_NODE": "8"},
        {"LSB_JOBID": "77", "LSB_MCPU_HOSTS": "c05 8 c06 8"},  # the script of bsub
        {"SLURM_JOB_ID": "4242", "SLURM_NNODES": "2"},  # the script of sbatch
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {**BLAUNCH, "LSB_MCPU_HOSTS": "c05 1", "LSF_PM_TASKID": "1"},
    ],
)
def test_variables_that_announce_no_machines(env: dict[str, str]) -> None:
    assert read(env) == []
    assert place("2", None, None, env) == JobShape("2", None, None)
    assert detect(env) == World() or "SLURM_STEP_NUM_TASKS" in env


@pytest.mark.parametrize(
    "env",
    [
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"},
        {"LOCKSTEP_NNODES": "1", "LOCKSTEP_NPROC": "4"},
        {"DSTACK_NODES_NUM": "1", "DSTACK_NODE_RANK": "0", "DSTACK_GPUS_PER_NODE": "4"},
        SKYPILOT | {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_GPUS_PER_NODE": "4"},
        PAI_DLC | {"WORLD_SIZE": "1", "RANK": "0", "NPROC_PER_NODE": "4"},
    ],
)
def test_one_machine_needs_no_meeting_point(env: dict[str, str]) -> None:
    placed = place("auto", None, None, env)
    assert (placed.nproc, placed.nnodes, placed.join) == ("4", None, None)
    assert placed.source.startswith("processes from ")
    assert place(None, None, None, env) == placed, "without --nproc the platform's number is used"
    assert place("2", None, None, env) == JobShape("2", None, None)
    assert detect(env) == World()


@pytest.mark.parametrize(
    ("text", "nproc"),
    [("1", None), ("0", None), ("", None), ("8", "8"), ("auto", "auto"), ("gpu", "auto"), ("cpu", str(os.cpu_count()))],
)
def test_processes_of_one_machine_as_torchrun_takes_them(text: str, nproc: str | None) -> None:
    """One process on one machine needs no launcher."""
    placed = place(None, None, None, {"PET_NNODES": "1", "PET_NPROC_PER_NODE": text})
    assert placed.nproc == (nproc if nproc != "1" else None)
    assert placed.source == (f"processes from Kubeflow Trainer: {nproc}" if placed.nproc else "")


def test_a_share_of_a_gpu_is_one_process() -> None:
    share = SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "0.5"}
    assert place("auto", None, None, share).nproc == "1"
    assert place(None, None, None, share | {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}).here
    with pytest.raises(UserError, match="SKYPILOT_NUM_GPUS_PER_NODE must be a whole number"):
        place("auto", None, None, SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "1.5"})


def test_a_range_of_machines_is_passed_on() -> None:
    placed = place("auto", None, None, KUBEFLOW | {"PET_NNODES": "2:4", "PET_NODE_RANK": "3"})
    assert (placed.nnodes, placed.join, placed.node) == ("2:4", "job-node-0-0.job:29500", 3)
    assert place("auto", None, None, KUBEFLOW | {"PET_NNODES": "2:2"}).nnodes == "2"
    with pytest.raises(UserError, match="PET_NNODES=4:2 is not a number of machines"):
        place("auto", None, None, KUBEFLOW | {"PET_NNODES": "4:2"})

    # torchrun's elastic form has no numbers of machines.
    elastic = {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "job-worker-0", "PET_NPROC_PER_NODE": "2"}
    placed = place(None, None, None, elastic)
    assert (placed.nproc, placed.nnodes, placed.join, placed.node) == ("2", "1:4", "job-worker-0:29400", None)
    assert place(None, None, None, elastic | {"PET_RDZV_ENDPOINT": "h:23456"}).join == "h:23456"
    with pytest.raises(UserError, match="PET_NODE_RANK and PET_MASTER_ADDR not set"):
        place("2", None, None, {"PET_NNODES": "1:4"})


def test_a_job_of_your_own_may_be_elastic_and_have_several_addresses() -> None:
    env = {"LOCKSTEP_NNODES": "1:4", "LOCKSTEP_JOIN": "a:29400,b:29400"}
    placed = place("auto", None, None, env)
    assert (placed.nproc, placed.nnodes, placed.join, placed.node) == ("auto", "1:4", "a:29400,b:29400", None)
    assert "nodes from LOCKSTEP_NNODES: 1:4, meeting at" in placed.source
    assert read(env | {"LOCKSTEP_NNODES": "2:2"})[0].count == "2"


def test_the_hosts_of_lsf_come_from_whatever_lists_them(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("c05\nc05\nc06\nc06\n")
    rest = {"LSB_JOBID": "77", "LSF_PM_TASKID": "1"}
    lists = [{"LSB_HOSTS": "c05 c05 c06 c06"}, {"LSB_DJOB_HOSTFILE": str(tmp_path / "hosts")}]
    for hosts in lists:
        (nodes,) = read(rest | hosts)
        assert (nodes.count, (nodes.join or "").partition(":")[0]) == ("2", "c05")


def test_the_port_changes_with_the_job() -> None:
    other = SKYPILOT | {"SKYPILOT_TASK_ID": "another"}
    assert read(SKYPILOT)[0].join != read(other)[0].join


def test_skypilot_knows_more_than_what_it_runs_on() -> None:
    (first, *_) = read(SKYPILOT | SLURM)
    assert first.platform == "SkyPilot"
    assert place("2", None, None, SKYPILOT | SLURM).join == first.join


def test_launchers_in_the_ranks_of_mpirun_are_refused() -> None:
    env = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    with pytest.raises(UserError, match=r"--nproc cannot be used here: mpirun \(Open MPI\) has already made"):
        place("2", None, None, env)
    assert place("2", "2", "a:1", env) == JobShape("2", "2", "a:1")
    assert place(None, None, None, env).here
