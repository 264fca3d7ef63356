"""Slurm: a batch script with one launcher on each node, which is requeued until the run has finished.

The script asks Slurm for a signal before the time limit. The launchers then save and exit with the code that means
"start again", and the script puts the job back into the queue. So a run may last for weeks in a queue whose limit is
hours.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from pathlib import Path

from lockstep.clusters import slurm_job
from lockstep.clusters.request import JobRequest
from lockstep.clusters.slurm_job import SlurmJob, read_job
from lockstep.clusters.slurm_partitions import ask_cluster, check_fits, run
from lockstep.clusters.slurm_script import NAME, batch_script
from lockstep.errors import UserError, plural, printable
from lockstep.run_folder.names import LAUNCH

HELP = "a Slurm cluster: a batch script, which requeues itself before its time limit until the run has finished"

# How long sbatch may take. A busy controller answers late, and may have taken the job before sbatch is stopped.
SUBMIT_S = 120.0

# Options that the script may set, and the variables by which sbatch would replace their values.
VARIABLES = (
    ("account", "SBATCH_ACCOUNT"),
    ("array", "SBATCH_ARRAY_INX"),
    ("constraint", "SBATCH_CONSTRAINT"),
    ("gpus-per-node", "SBATCH_GPUS_PER_NODE"),
    ("job-name", "SBATCH_JOB_NAME"),
    ("mem", "SBATCH_MEM_PER_NODE"),
    ("open-mode", "SBATCH_OPEN_MODE"),
    ("output", "SBATCH_OUTPUT"),
    ("partition", "SBATCH_PARTITION"),
    ("qos", "SBATCH_QOS"),
    ("requeue", "SBATCH_NO_REQUEUE"),
    ("signal", "SBATCH_SIGNAL"),
    ("time", "SBATCH_TIMELIMIT"),
)

add_options = slurm_job.add_options

# What sbatch says if it reaches no controller: nothing is wrong with the job.
UNREACHABLE = r"unable to contact slurm controller|configuration source|DNS SRV lookup failed|socket timed out"


def render(request: JobRequest, options: argparse.Namespace) -> dict[str, str]:
    job = read_job(request, options)
    cluster = ask_cluster()
    if isinstance(cluster, str):
        print(f"lockstep: the job was not compared with a cluster: {printable(cluster)}", file=sys.stderr)
    else:
        check_fits(job, cluster)

    folder = options.out or (request.run_dir / LAUNCH if options.submit else Path())
    return {NAME: batch_script(job, folder / NAME)}


def submit(request: JobRequest, options: argparse.Namespace, files: dict[str, Path]) -> int:
    # `lockstep --help` must not wait for yaml and pydantic.
    from lockstep.run_folder.run_dir import not_writable

    job = read_job(request, options)
    path = str(files[NAME])

    # Slurm does not make the folder of the log: without it the job would fail without a word.
    try:
        request.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_writable(request.run_dir, error) from error

    # sbatch prints what is wrong with the job, or when it would start.
    env = _without_overrides(files[NAME].read_text())
    trial = run(["sbatch", "--test-only", path], SUBMIT_S, env)
    if trial.returncode:
        raise _refused(trial.stderr, path)

    # Said before it is done: a job may begin at once, and cost.
    print(printable(f"lockstep: submitting it: {shlex.join(['sbatch', path])}"), file=sys.stderr, flush=True)
    done = run(["sbatch", "--parsable", path], SUBMIT_S, env)
    if done.returncode:
        raise _refused(done.stderr, path)

    number = done.stdout.strip().partition(";")[0]  # NUMBER;CLUSTER on several clusters
    print(_submitted(job, number))
    return 0


def _without_overrides(script: str) -> dict[str, str]:
    """Return the environment without variables that sbatch would believe more than the lines of the script."""
    written = set(re.findall(r"^#SBATCH --([\w-]+)", script, re.MULTILINE))
    overruled = {variable for option, variable in VARIABLES if option in written}
    return {name: value for name, value in os.environ.items() if name not in overruled}


def _refused(said: str, path: str) -> UserError:
    lines = [re.sub(r"^sbatch: (error|fatal): ", "", line).strip() for line in said.splitlines()]
    reasons = [printable(line) for line in lines if line]
    if re.search(UNREACHABLE, said, re.IGNORECASE):
        return UserError(
            "no controller of a Slurm cluster can be reached from this machine",
            "; ".join(reasons),
            f"submit it on a login node of the cluster, in this folder: sbatch {path}",
        )

    return UserError(
        "Slurm does not accept the job",
        "; ".join(reasons) or "sbatch gave no reason",
        f"change the options; `sinfo` shows what the cluster has, and {path} what was asked for",
    )


def _submitted(job: SlurmJob, number: str) -> str:
    """Return what to say about a job that was submitted: where to look, and how to end it."""
    ranks = " + ".join(f"{part.nnodes} x {part.ranks}" for part in job.components)
    log = f"{shlex.quote(str(job.request.run_dir))}/slurm-{number}{'_*' if job.array else ''}.log"
    what = f"{plural(len(job.varied), 'run')} of " if job.varied else ""
    return "\n".join(
        [
            f"lockstep: submitted job {number}: {what}{ranks} ranks (nodes x processes)",
            f"  run folder        {shlex.quote(str(job.request.run_dir))}",
            f"  log               tail -F {log}",
            f"  watch             squeue --jobs {number}",
            f"  save and requeue  scancel --signal=USR1 {number}",
            f"  cancel            scancel {number}",
        ]
    )
