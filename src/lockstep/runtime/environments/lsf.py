"""LSF: `blaunch` starts a process for each slot, `jsrun` for each task; the script of `bsub` is a single process.

LSB_MCPU_HOSTS lists the hosts with their slots ("host1 8 host2 8"), LSB_DJOB_HOSTFILE names a file with a host for each
slot, and LSB_HOSTS is the same as a list. On machines with `jsrun` the first host only runs the script.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import UserError
from lockstep.runtime.environments.nodes import Nodes, check_number, port_of
from lockstep.runtime.host.network import join_host_port
from lockstep.runtime.world import World, whole_number

# jsrun numbers its tasks from 0, blaunch from 1.
JSRUN_RANK, JSRUN_SIZE = "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"
JSRUN_LOCAL_RANK, JSRUN_LOCAL_SIZE = "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"
BLAUNCH_TASK = "LSF_PM_TASKID"


def read(env: Mapping[str, str]) -> World | None:
    """Return the rank of a task of `jsrun python script.py`."""
    if "LSB_JOBID" not in env or JSRUN_RANK not in env or whole_number(env, JSRUN_SIZE) < 2:
        return None

    rank, size = whole_number(env, JSRUN_RANK), whole_number(env, JSRUN_SIZE)
    check_number(f"{JSRUN_RANK}={rank}", rank, f"{JSRUN_SIZE}={size}", size)
    return World(
        rank=rank,
        size=size,
        local_rank=whole_number(env, JSRUN_LOCAL_RANK),
        local_size=whole_number(env, JSRUN_LOCAL_SIZE, size),
        master_addr=env.get("MASTER_ADDR") or _compute_hosts(env)[0],
        master_port=whole_number(env, "MASTER_PORT", port_of("lsf", env["LSB_JOBID"])),
        launcher="jsrun",
    )


def read_nodes(env: Mapping[str, str]) -> Nodes | None:
    """Return the machines, for the launchers of `blaunch` or of `jsrun` with one task on each host."""
    if "LSB_JOBID" not in env or (BLAUNCH_TASK not in env and JSRUN_RANK not in env):
        return None

    hosts = _compute_hosts(env) if JSRUN_RANK in env else _hosts(env)
    if JSRUN_RANK in env:
        text, number, tasks = f"{JSRUN_RANK}={env[JSRUN_RANK]}", whole_number(env, JSRUN_RANK), JSRUN_SIZE
        if whole_number(env, tasks) != len(hosts):
            raise UserError(
                f"jsrun has started {env[tasks]} tasks on {len(hosts)} hosts",
                "each of them would start processes of its own",
                "use one task for each host (jsrun -r 1), or leave --nproc out: then each task is a rank",
            )
    else:
        text, number = f"{BLAUNCH_TASK}={env[BLAUNCH_TASK]}", whole_number(env, BLAUNCH_TASK) - 1

    check_number(text, number, f"{len(hosts)} hosts of LSF", len(hosts))
    if len(hosts) == 1:
        return None

    return Nodes("LSF", str(len(hosts)), number, join_host_port(hosts[0], port_of("lsf", env["LSB_JOBID"])))


def _hosts(env: Mapping[str, str]) -> list[str]:
    """Return each host of the job once, in LSF's order."""
    # The shortest description first: LSF leaves LSB_HOSTS out of large jobs.
    words = env.get("LSB_MCPU_HOSTS", "").split()[::2] or env.get("LSB_HOSTS", "").split()
    file = Path(env.get("LSB_DJOB_HOSTFILE", ""))
    if not words and file.is_file():
        words = file.read_text().split()

    if not words:
        raise UserError(
            "the hosts of this LSF job are not known",
            "none of LSB_MCPU_HOSTS, LSB_HOSTS and LSB_DJOB_HOSTFILE is set",
            "use --nnodes M and --join HOST:PORT, or export MASTER_ADDR=HOST for a script without a launcher",
        )

    return list(dict.fromkeys(words))


def _compute_hosts(env: Mapping[str, str]) -> list[str]:
    # The host of the script is the first one, and jsrun starts no task there.
    return _hosts(env)[1:] or _hosts(env)
