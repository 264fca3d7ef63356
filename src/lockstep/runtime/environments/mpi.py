"""MPI: `mpirun python script.py` starts plain ranks; Open MPI, MPICH, Intel MPI and MVAPICH each have their variables.

Only several processes count, as under Slurm. MPI's variables name no host: ranks on one machine meet there, and for
several machines the user sets MASTER_ADDR.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import UserError
from lockstep.runtime.environments.nodes import port_of
from lockstep.runtime.world import World, whole_number

# Name -> the variables of rank, size, local rank, local size. PMIX_RANK is of no use: no variable has the size.
FAMILIES = {
    "Open MPI": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    "MVAPICH": (
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        *("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "a PMI launcher": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
}

# Variables that identify this start of mpirun, or its batch job.
JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PBS_JOBID", "LSB_JOBID")


def read(env: Mapping[str, str]) -> World | None:
    for name, variables in FAMILIES.items():
        if all(variable in env for variable in variables[:3]):
            return _world(name, env, *variables)

    # Half a set: without its local rank a process cannot choose its device.
    for rank, size, local_rank, _ in FAMILIES.values():
        if rank in env and whole_number(env, size, 1) > 1:
            raise UserError(
                f"{rank}={env[rank]} and {size}={env[size]} do not say which rank of its machine this process is",
                f"{local_rank} is not set",
                f"set {local_rank}, or start the processes with torchrun or `lockstep train --nproc N`",
            )

    return None


def _world(name: str, env: Mapping[str, str], *variables: str) -> World | None:
    rank, size, local_rank = (whole_number(env, variable) for variable in variables[:3])
    if size < 2:
        return None

    if not 0 <= rank < size:
        raise UserError(
            f"{variables[0]}={rank} is not a rank of {variables[1]}={size}",
            f"ranks go from 0 to {variables[1]} - 1",
            "start the processes with mpirun, or with `lockstep train --nproc N`",
        )

    local_size = whole_number(env, variables[3], size)
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if local_size == size else None)
    if address is None:
        raise UserError(
            f"the ranks that {name} has started on several machines have no address to meet at",
            f"{local_size} of {size} ranks are on this machine, and MASTER_ADDR is not set",
            "pass the host of rank 0 on: mpirun -x MASTER_ADDR=HOST (Open MPI), or -genv MASTER_ADDR HOST",
        )

    job = next((env[variable] for variable in JOB if variable in env), None)
    port = 29500 if job is None else port_of("mpi", job)
    return World(
        rank, size, local_rank, local_size, address, whole_number(env, "MASTER_PORT", port), launcher=f"mpirun ({name})"
    )
