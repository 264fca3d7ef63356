"""Kubernetes: Kubeflow Trainer sets torchrun's own variables (PET_*), and our own manifests set LOCKSTEP_*.

In both cases a Pod is a machine, and its container runs the launcher of that machine.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import UserError
from lockstep.runtime.environments.nodes import Nodes, check_number, count_or_auto, make_nodes, require
from lockstep.runtime.world import whole_number

# Set by the jobs that `lockstep launch` renders. LOCKSTEP_JOIN may list several addresses.
NNODES = "LOCKSTEP_NNODES"
JOIN = "LOCKSTEP_JOIN"
NPROC = "LOCKSTEP_NPROC"

# Set by Kubernetes in each Pod of an indexed Job, so also in those of a JobSet.
COMPLETION_INDEX = "JOB_COMPLETION_INDEX"

# Kubeflow's variables that describe a machine. torchrun reads more of them, such as PET_MASTER_PORT, which alone say
# nothing about a number of machines.
KUBEFLOW = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR")


def read_own_job(env: Mapping[str, str]) -> Nodes | None:
    """Read the variables that `lockstep launch` sets. The number of a Pod is its completion index."""
    if NNODES not in env and JOIN not in env:
        return None

    count = env.get(NNODES, "")
    least, _, most = count.partition(":")
    number = whole_number(env, COMPLETION_INDEX) if COMPLETION_INDEX in env else None
    platform = "lockstep launch" if number is None else "an indexed Job"
    require(platform, env, (NNODES,))
    if not (least.isdigit() and (most or least).isdigit() and 1 <= int(least) <= int(most or least)):
        raise UserError(
            f"{NNODES}={count} is not a number of machines", "neither a count nor a range", f"set {NNODES}=2"
        )

    if most == least:
        count = least
    if count != "1":
        require(platform, env, (NNODES, JOIN))
    if number is not None:
        check_number(f"{COMPLETION_INDEX}={number}", number, f"{NNODES}={count}", int(most or least))

    return Nodes(platform, count, number, env[JOIN] if count != "1" else None, count_or_auto(env, NPROC))


def read_kubeflow(env: Mapping[str, str]) -> Nodes | None:
    if not any(name in env for name in KUBEFLOW):
        return None

    platform = "Kubeflow Trainer"
    require(platform, env, ("PET_NNODES",))

    # A range is torchrun's elastic form; Kubeflow itself sets a number.
    if env["PET_NNODES"] != "1":
        require(platform, env, KUBEFLOW)

    host, port = env.get("PET_MASTER_ADDR", ""), whole_number(env, "PET_MASTER_PORT", 29500)
    return make_nodes(platform, env, "PET_NNODES", "PET_NODE_RANK", host, port, "PET_NPROC_PER_NODE")
