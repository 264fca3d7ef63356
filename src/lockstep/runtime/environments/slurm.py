"""Slurm: `srun python script.py` starts plain ranks, and sets SLURM_PROCID and its relatives in each of them.

Only a job step with several tasks counts. An interactive shell, a batch script and a step with one task have Slurm
variables as well (SLURM_NTASKS counts the tasks of the whole allocation there), but are single processes.

Limits: it is tested with the variables that Slurm documents, not yet on a cluster. Rank 0 is expected on the first node
of the step. With `--distribution=arbitrary` it may be elsewhere: set MASTER_ADDR.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lockstep.errors import UserError
from lockstep.runtime.world import World, whole_number

# Ports for the rendezvous, below the ports that systems assign automatically (32768 and up on Linux).
FIRST_PORT = 10_000
PORTS = 20_000


def read(env: Mapping[str, str]) -> World | None:
    # SLURM_STEP_* variables are set by srun alone.
    tasks = whole_number(env, "SLURM_STEP_NUM_TASKS", 1)
    if tasks < 2 or "SLURM_PROCID" not in env:
        return None

    rank = whole_number(env, "SLURM_PROCID")
    if not 0 <= rank < tasks:
        raise UserError(
            f"SLURM_PROCID={rank} is not a task of SLURM_STEP_NUM_TASKS={tasks}",
            "tasks go from 0 to SLURM_STEP_NUM_TASKS - 1",
            "start the processes with srun, or with `lockstep train --nproc N`",
        )

    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    address = env.get("MASTER_ADDR") or first_host(nodes)
    if not address:
        raise UserError(
            "the ranks of this Slurm step have no address to meet at",
            "neither SLURM_STEP_NODELIST nor MASTER_ADDR is set",
            "export MASTER_ADDR=HOST, the host of rank 0",
        )

    # All tasks of the step compute the same port, and other jobs most likely compute another port.
    job = whole_number(env, "SLURM_JOB_ID", 0)
    step = whole_number(env, "SLURM_STEP_ID", 0)

    return World(
        rank=rank,
        size=tasks,
        local_rank=whole_number(env, "SLURM_LOCALID"),
        local_size=_tasks_on_this_node(env, tasks),
        master_addr=address,
        master_port=whole_number(env, "MASTER_PORT", FIRST_PORT + (31 * job + step) % PORTS),
    )


def _tasks_on_this_node(env: Mapping[str, str], tasks: int) -> int:
    counts = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = whole_number(env, "SLURM_NODEID", 0) if counts else 0
    return counts[node] if node < len(counts) else whole_number(env, "SLURM_NTASKS_PER_NODE", tasks)


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's notation: "2(x3),1" means 2, 2, 2, 1."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)

    return counts


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's notation: "node[03-05,07],gpu1" begins with node03."""
    # Up to the first comma that is not inside brackets.
    first = re.findall(r"(?:[^,\[]|\[[^\]]*\])*", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
