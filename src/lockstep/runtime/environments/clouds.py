"""Clouds that run one command on each machine: SkyPilot, dstack, DGX Lepton, PAI-DLC.

Each sets variables with the number of machines, the place of this one and the address of the first. The launcher of
each machine gets the same answers as from --nnodes and --join.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.runtime.environments.nodes import Nodes, make_nodes, port_of, require
from lockstep.runtime.world import whole_number


def read_skypilot(env: Mapping[str, str]) -> Nodes | None:
    names = ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")
    if not any(name in env for name in names):
        return None

    require("SkyPilot", env, names)

    # The task's id stays the same when SkyPilot recovers a job.
    host = env["SKYPILOT_NODE_IPS"].split()[0]
    port = port_of("skypilot", env.get("SKYPILOT_TASK_ID", ""))
    return make_nodes("SkyPilot", env, *names[:2], host, port, "SKYPILOT_NUM_GPUS_PER_NODE")


def read_dstack(env: Mapping[str, str]) -> Nodes | None:
    names = ("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP")
    if not any(name in env for name in names):
        return None

    # A task with one machine has no master.
    if env.get("DSTACK_NODES_NUM") != "1":
        require("dstack", env, names)

    host, port = env.get("DSTACK_MASTER_NODE_IP", ""), port_of("dstack", env.get("DSTACK_RUN_NAME", ""))
    return make_nodes("dstack", env, *names[:2], host, port, "DSTACK_GPUS_PER_NODE")


def read_lepton(env: Mapping[str, str]) -> Nodes | None:
    names = ("LEPTON_JOB_TOTAL_WORKERS", "LEPTON_JOB_WORKER_INDEX")
    if not any(name in env for name in names):
        return None

    require("DGX Lepton", env, (*names, "LEPTON_JOB_NAME"))

    # Worker 0 has this name inside the job, by the documentation's own script.
    job = env["LEPTON_JOB_NAME"]
    prefix = env.get("LEPTON_JOB_SERVICE_PREFIX") or job
    domain = env.get("LEPTON_SUBDOMAIN") or f"{job}-job-svc"
    return make_nodes(
        "DGX Lepton",
        env,
        *names,
        f"{prefix}-0.{domain}",
        port_of("lepton", job),
        "LEPTON_RESOURCE_ACCELERATOR_NUM",
        "LEPTON_JOB_FAILURE_COUNT",
    )


def read_pai_dlc(env: Mapping[str, str]) -> Nodes | None:
    """Read PAI-DLC's variables, in which WORLD_SIZE counts machines and RANK numbers them.

    Baidu's AIHC sets the same. A process with LOCAL_RANK is a rank of a launcher that was started there.
    """
    names = ("WORLD_SIZE", "RANK", "NPROC_PER_NODE", "MASTER_ADDR")
    if "LOCAL_RANK" in env or not all(name in env for name in names[:3]):
        return None

    if env["WORLD_SIZE"] != "1":
        require("PAI-DLC", env, names)

    host, port = env.get("MASTER_ADDR", ""), whole_number(env, "MASTER_PORT", 29500)
    return make_nodes("PAI-DLC", env, *names[:2], host, port, "NPROC_PER_NODE")
