"""Slurm: a batch script with one launcher on each node, which is requeued until the run has finished."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from lockstep.clusters import slurm_job
from lockstep.clusters.request import Request
from lockstep.clusters.slurm_job import SlurmJob, read_job
from lockstep.clusters.slurm_partitions import ask_cluster, check_fits, run
from lockstep.clusters.slurm_script import NAME, batch_script
from lockstep.errors import UserError, plural, printable

HELP = "a Slurm cluster: a batch script, which requeues itself before its time limit until the run has finished"

add_options = slurm_job.add_options

# What sbatch says if it has nobody to ask: nothing is wrong with the job.
UNREACHABLE = r"unable to contact slurm controller|configuration source|DNS SRV lookup failed|socket timed out"


def render(request: Request, options: argparse.Namespace) -> dict[str, str]:
    job = read_job(request, options)
    cluster = ask_cluster()
    if isinstance(cluster, str):
        print(f"lockstep: the job was not compared with a cluster: {printable(cluster)}", file=sys.stderr)
    else:
        check_fits(job, cluster)

    folder = options.out or (request.run_dir / "launch" if options.submit else Path())
    return {NAME: batch_script(job, folder / NAME)}


def submit(request: Request, options: argparse.Namespace, files: dict[str, Path]) -> int:
    # `lockstep --help` must not wait for yaml and pydantic.
    from lockstep.launch.run_dir import not_writable

    job = read_job(request, options)
    path = str(files[NAME])

    # Slurm does not make the folder of the log: without it the job would fail without a word.
    try:
        request.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_writable(request.run_dir, error) from error

    # sbatch prints what is wrong with the job, or when it would start.
    trial = run(["sbatch", "--test-only", path])
    if trial.returncode:
        raise _refused(trial.stderr, path)

    done = run(["sbatch", "--parsable", path])
    if done.returncode:
        raise _refused(done.stderr, path)

    number = done.stdout.strip().partition(";")[0]  # NUMBER;CLUSTER on several clusters
    print(_submitted(job, number))
    return 0


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
    log = str(job.log).replace("%%", "%").replace("%j", number).replace("%A", number).replace("%a", "*")
    what = f"{plural(len(job.varied), 'run')} of " if job.varied else ""
    return "\n".join(
        [
            f"lockstep: submitted job {number}: {what}{ranks} ranks (nodes x processes)",
            f"  run folder        {job.request.run_dir}",
            f"  log               tail -F {log}",
            f"  watch             squeue --jobs {number}",
            f"  save and requeue  scancel --signal=USR1 {number}",
            f"  cancel            scancel {number}",
        ]
    )
