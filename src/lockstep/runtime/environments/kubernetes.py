"""Kubernetes: Kubeflow Trainer sets torchrun's own variables (PET_*), and a Job of your own may set LOCKSTEP_*.

In both cases a Pod is a machine, and its container runs the launcher of that machine. (The manifests of `lockstep
launch kubernetes` need neither: their command has --nnodes and --join.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lockstep.runtime.environments.nodes import (
    Nodes,
    check_number,
    count_or_auto,
    count_or_range,
    make_nodes,
    require,
)
from lockstep.runtime.host.network import join_host_port
from lockstep.runtime.world import whole_number

# For the user to set, in an indexed Job or elsewhere. LOCKSTEP_JOIN may list several addresses.
NNODES = "LOCKSTEP_NNODES"
JOIN = "LOCKSTEP_JOIN"
NPROC = "LOCKSTEP_NPROC"

# Set by Kubernetes in each Pod of an indexed Job, so also in those of a JobSet.
COMPLETION_INDEX = "JOB_COMPLETION_INDEX"

# Kubeflow's variables that describe a machine. torchrun reads more of them, such as PET_MASTER_PORT, which alone say
# nothing about a number of machines.
KUBEFLOW = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR")

# Where the machines of torchrun's elastic form meet: HOST[:PORT].
ENDPOINT = "PET_RDZV_ENDPOINT"


def read_own_job(env: Mapping[str, str]) -> Nodes | None:
    """Read variables that the user has set for a job. The number of a Pod is its completion index."""
    if NNODES not in env and JOIN not in env:
        return None

    number = whole_number(env, COMPLETION_INDEX) if COMPLETION_INDEX in env else None
    platform = NNODES if number is None else "an indexed Job"
    require(platform, env, (NNODES,))

    count, most = count_or_range(env, NNODES)
    if count != "1":
        require(platform, env, (NNODES, JOIN))

    if number is not None:
        check_number(f"{COMPLETION_INDEX}={number}", number, f"{NNODES}={count}", most)

    return Nodes(platform, count, number, env[JOIN] if count != "1" else None, count_or_auto(env, NPROC))


def read_kubeflow(env: Mapping[str, str]) -> Nodes | None:
    if not any(name in env for name in KUBEFLOW):
        return None

    platform = "Kubeflow Trainer"
    require(platform, env, ("PET_NNODES",))

    # A range is torchrun's elastic form, in which machines may have no numbers, and meet elsewhere.
    count, _ = count_or_range(env, "PET_NNODES")
    endpoint = env.get(ENDPOINT)
    if ":" in count and endpoint:
        join = endpoint if re.search(r":\d+$", endpoint) else join_host_port(endpoint, 29400)
        return Nodes(platform, count, None, join, count_or_auto(env, "PET_NPROC_PER_NODE"))

    if count != "1":
        require(platform, env, KUBEFLOW)

    host, port = env.get("PET_MASTER_ADDR", ""), whole_number(env, "PET_MASTER_PORT", 29500)
    return make_nodes(platform, env, "PET_NNODES", "PET_NODE_RANK", host, port, "PET_NPROC_PER_NODE")
