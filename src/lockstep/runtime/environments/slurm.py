"""Slurm: `srun python script.py` starts plain ranks, and sets SLURM_PROCID and its relatives in each of them.

With one task on each node, `srun lockstep train ... --nproc 8` starts a launcher on each of them (`read_nodes`).

Only a job step with several tasks counts. An interactive shell, a batch script and a step with one task have Slurm
variables as well (SLURM_NTASKS counts the tasks of the whole allocation there), but are single processes.

Limits: it is tested on a small cluster (`make test-slurm`), with Slurm 22.05. Rank 0 is expected on the first node
of the step. With `--distribution=arbitrary` it may be elsewhere: set MASTER_ADDR.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lockstep.errors import UserError, plural
from lockstep.runtime.environments.nodes import FIRST_PORT, PORTS, Nodes, check_number
from lockstep.runtime.host.network import join_host_port
from lockstep.runtime.world import World, whole_number


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

    return World(
        rank=rank,
        size=tasks,
        local_rank=whole_number(env, "SLURM_LOCALID"),
        local_size=_tasks_on_this_node(env, tasks),
        master_addr=_address(env),
        master_port=_port(env),
        launcher="srun",
    )


def read_nodes(env: Mapping[str, str]) -> Nodes | None:
    """Return the nodes of a step with one task on each of them: the tasks are launchers."""
    tasks = whole_number(env, "SLURM_STEP_NUM_TASKS", 1)
    if tasks < 2 or "SLURM_PROCID" not in env:
        return None

    nodes = whole_number(env, "SLURM_STEP_NUM_NODES", len(tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))))
    if nodes != tasks:
        raise UserError(
            f"srun has started {tasks} tasks on {plural(nodes, 'node')}",
            "each of them would start processes of its own",
            "use srun --ntasks-per-node=1, or leave --nproc out: then each task is a rank",
        )

    number = whole_number(env, "SLURM_NODEID")
    check_number(f"SLURM_NODEID={number}", number, f"SLURM_STEP_NUM_NODES={nodes}", nodes)
    restarts = whole_number(env, "SLURM_RESTART_COUNT", 0)
    return Nodes("Slurm", str(nodes), number, join_host_port(_address(env), _port(env)), restarts=restarts)


def _address(env: Mapping[str, str]) -> str:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    address = env.get("MASTER_ADDR") or first_host(nodes)
    if not address:
        raise UserError(
            "the ranks of this Slurm step have no address to meet at",
            "neither SLURM_STEP_NODELIST nor MASTER_ADDR is set",
            "export MASTER_ADDR=HOST, the host of rank 0",
        )

    return address


def _port(env: Mapping[str, str]) -> int:
    # All tasks of the step compute the same port, and other jobs most likely compute another port.
    job = whole_number(env, "SLURM_JOB_ID", 0)
    step = whole_number(env, "SLURM_STEP_ID", 0)
    return whole_number(env, "MASTER_PORT", FIRST_PORT + (31 * job + step) % PORTS)


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
