"""The batch script of a Slurm job: what its user reads, edits and keeps."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from lockstep.clusters.slurm_job import Component, SlurmJob
from lockstep.errors import FINAL_CODES, SRUN_CODES, ExitCode, final_codes
from lockstep.launch.terminal import ONE_LOG

NAME = "job.slurm"

# Words of the script that the shell must expand. All other words are quoted.
RUN = "$run"
JOIN = "$first:$port"
SETTINGS = "${settings[@]}"
EXPANDED = {f"run_dir={RUN}": f'run_dir="{RUN}"', JOIN: f'"{JOIN}"', SETTINGS: f'"{SETTINGS}"'}


def batch_script(job: SlurmJob, path: Path) -> str:
    """Return the script; `path` is where it will be."""
    parts = [
        "#!/bin/bash",
        *_directives(job),
        "#",
        *_comment(job, path),
        "",
        *_preparation(job),
        "",
        *_step(job),
        "code=$?",
        "",
        *_verdict(job),
    ]
    return "\n".join(parts) + "\n"


def _quoted(word: str) -> str:
    return EXPANDED.get(word) or shlex.quote(word)


# ---- the options of sbatch ----


def _directives(job: SlurmJob) -> list[str]:
    first, *others = job.components
    options = [
        ("job-name", job.request.name),
        ("account", job.account),
        ("qos", job.qos),
        ("time", job.time),
        *_of_component(job, first),
        ("array", job.array),
        ("output", str(job.log)),
        ("open-mode", "append"),
        ("signal", f"USR1@{job.signal_before}"),
    ]
    lines = [f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options if value is not None]
    lines.append("#SBATCH --requeue")

    # The nodes that are left continue, if the job may have fewer.
    if job.nnodes.least < job.nnodes.most:
        lines.append("#SBATCH --no-kill")

    lines += [f"#SBATCH {text}" for text in job.sbatch]

    for other in others:
        shared = [("account", job.account), ("qos", job.qos), ("time", job.time)]
        options = [*shared, *_of_component(job, other), ("signal", f"USR1@{job.signal_before}")]
        lines.append("#SBATCH hetjob")
        lines += [f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options if value is not None]
        lines += [f"#SBATCH {text}" for text in job.sbatch]

    return lines


def _of_component(job: SlurmJob, component: Component) -> list[tuple[str, str | None]]:
    nodes = component.nnodes

    # With a number of tasks, Slurm takes the lower end of a range of nodes as what the job needs, and gives no more.
    tasks = str(tasks_per_node(job, component)) if nodes.least == nodes.most else None
    return [
        ("partition", component.partition),
        ("constraint", component.constraint),
        ("nodes", f"{nodes.least}" if nodes.least == nodes.most else f"{nodes.least}-{nodes.most}"),
        ("ntasks-per-node", tasks),
        ("cpus-per-task", str(cpus_per_task(job, component))),
        ("gpus-per-node", component.gpus_per_node),
        ("mem", component.mem),
    ]


def tasks_per_node(job: SlurmJob, component: Component) -> int:
    return component.ranks.most if job.mode == "srun" else 1


def cpus_per_task(job: SlurmJob, component: Component) -> int:
    """Return the CPUs of a task. Slurm's default is one, and the ranks of a node would share it."""
    return component.cpus_per_task or (1 if job.mode == "srun" else component.ranks.most)


# ---- what the script says and does ----


def _comment(job: SlurmJob, path: Path) -> list[str]:
    return [
        "# Written by `lockstep launch slurm`. To submit it by hand, from the folder in which that was typed:",
        "#",
        f"#   mkdir -p {shlex.quote(str(job.request.run_dir))}",
        f"#   sbatch {shlex.quote(str(path))}",
        "#",
        "# (Slurm does not make the folder of the log.)",
        "#",
        f"# {job.signal_before} s before the time limit Slurm sends SIGUSR1 to the tasks. All ranks save after the",
        f"# same step, the tasks exit with {ExitCode.RESTART}, and the job is requeued: it resumes in the same folder.",
        "# `scancel JOB` ends the job; `scancel --signal=USR1 JOB` makes it save and requeue now.",
    ]


def _preparation(job: SlurmJob) -> list[str]:
    lines = []
    if _is_installed():
        lines.append(f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH")

    # Afterwards, so that an environment that a line of --setup activates is the one that is used.
    lines += job.setup
    if lines:
        lines.append("")

    folder = shlex.quote(str(job.request.run_dir))
    if job.array:
        lines += ["# Each task of the array has a run folder of its own.", f'run={folder}/task-"$SLURM_ARRAY_TASK_ID"']
    else:
        lines.append(f"run={folder}")

    if job.varied:
        lines.append('case "$SLURM_ARRAY_TASK_ID" in')
        lines += [f"{index}) settings=({shlex.join(words)}) ;;" for index, words in enumerate(job.varied)]
        lines.append("esac")

    if _meets(job):
        lines += [
            "",
            "# The launchers meet at the first node, where this script runs. The port is another one for each job.",
            "first=$SLURMD_NODENAME",
            "port=$((10000 + SLURM_JOB_ID % 20000))",
            'while (: < "/dev/tcp/$first/$port") 2> /dev/null; do port=$((port + 1)); done # in use',
            f"export {ONE_LOG}=1 # what concerns the whole job is printed once",
        ]

    final = " ".join(map(str, final_codes(_may_lose_nodes(job))))
    lines += [
        "",
        "# srun returns the highest exit code of its tasks. These codes are raised, so that they win over all others.",
        f"export {FINAL_CODES}={shlex.quote(final)}",
    ]

    if _may_lose_nodes(job):
        lines += ["", 'mkdir -p "$run"', 'touch "$run/.job-started"']

    return lines


def _meets(job: SlurmJob) -> bool:
    return job.mode == "agent" and job.nnodes.most > 1


def _may_lose_nodes(job: SlurmJob) -> bool:
    return job.nnodes.least < job.nnodes.most


def _is_installed() -> bool:
    return (Path(sys.executable).parent / "lockstep").exists()


def _step(job: SlurmJob) -> list[str]:
    """Return the command that starts the tasks: `srun`, its options, and `lockstep train`."""
    if job.mode == "srun":
        why = "# The tasks are the ranks. If one ends, the others have two minutes to save, or to report an error."
    else:
        why = "# One launcher on each node: it starts the ranks there, watches them, and restarts them after a failure."

    several = len(job.components) > 1
    steps = []
    for index, component in enumerate(job.components):
        options = [f"--het-group={index}"] if several else []
        options.append(f"--ntasks-per-node={tasks_per_node(job, component)}")

        # srun takes neither of the two from sbatch, or not in every version.
        options.append(f"--cpus-per-task={cpus_per_task(job, component)}")
        if component.gpus_per_node:
            options.append(f"--gpus-per-node={component.gpus_per_node}")

        # Neither a launcher that fails nor, in a job that may have fewer nodes, a lost node ends the others.
        options.append("--kill-on-bad-exit=0")
        if _may_lose_nodes(job):
            options.append("--no-kill")
        if job.mode == "srun":
            options.append("--wait=120")

        steps.append([shlex.join(options), *_train_lines(job, component)])

    lines = [f"srun {steps[0][0]} \\", *_continued(steps[0][1:])]
    for options, *train in steps[1:]:
        lines[-1] += " \\"
        lines += [f"  : {options} \\", *_continued(train)]

    return [why, *lines]


def _train_lines(job: SlurmJob, component: Component) -> list[str]:
    """Return `lockstep train ...` for the tasks of a component, in lines of a readable length."""
    program = ("lockstep",) if _is_installed() else (sys.executable, "-m", "lockstep")
    request = replace(job.request, run_dir=Path(RUN), nproc=component.nproc, nnodes=job.nnodes)
    if job.varied:
        request = replace(request, overrides=(*request.overrides, SETTINGS))

    if job.mode == "srun":
        words = request.rank_command(program=program)
    else:
        words = request.train_command(*(["--join", JOIN] if _meets(job) else []), program=program)

    # The options begin a line of their own.
    start = words.index("--nproc") if "--nproc" in words else words.index("--resume")
    return [" ".join(map(_quoted, part)) for part in (words[:start], words[start:])]


def _continued(lines: Iterable[str]) -> list[str]:
    """Return the lines of one command, each but the last with a backslash."""
    *first, last = lines
    return [*(f"    {line} \\" for line in first), f"    {last}"]


def _verdict(job: SlurmJob) -> list[str]:
    """Return what the script does with the exit code of its tasks."""
    refused, interrupted = SRUN_CODES[ExitCode.REFUSED], ExitCode.INTERRUPTED
    lines = []
    if _may_lose_nodes(job):
        lines += [
            "# If a node was lost, srun has failed, even if the run has finished on the other nodes.",
            '[ "$run/summary.json" -nt "$run/.job-started" ] && code=0',
            "",
            "# A node that cannot take part does not end a run that makes progress without it.",
            f'if [ "$code" -eq {refused} ] && [ -n "$(find "$run/checkpoints" -newer "$run/.job-started")" ]; then',
            f"    code={ExitCode.RESTART}",
            "fi",
            "",
        ]

    cases = " ".join(f"{high}) code={code.value} ;;" for code, high in SRUN_CODES.items())
    lines += ["# What the raised codes stand for.", f'case "$code" in {cases} esac', ""]

    # A task of an array may have the number of the whole array as its job's number.
    who = '"$SLURM_JOB_ID"'
    again = "sbatch"
    if job.array:
        who = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
        again = 'sbatch --array="$SLURM_ARRAY_TASK_ID"'

    return [
        *lines,
        f"# {ExitCode.RESTART}: saved, start me again. Above 128: killed by a signal; {interrupted}: by Ctrl-C.",
        "# 0: finished. Anything else: failed, and the reason is above.",
        f"killed=$((code > 128 && code != {interrupted}))",
        f'if [ "$code" -eq {ExitCode.RESTART} ] || [ "$killed" -eq 1 ]; then',
        "    export LOCKSTEP_RESTARTS=$((${LOCKSTEP_RESTARTS:-0} + ${SLURM_RESTART_COUNT:-0} + 1))",
        "    unset SLURM_RESTART_COUNT",
        f'    if [ "$LOCKSTEP_RESTARTS" -gt {job.max_requeues} ]; then',
        f'        echo "not requeued: this was start $LOCKSTEP_RESTARTS, and --max-requeues is {job.max_requeues}"',
        f"    elif ! scontrol requeue {who}; then # not permitted here: submit it again",
        f'        {again} --dependency=afterany:"$SLURM_JOB_ID" "$0"',
        "    fi",
        "fi",
        'exit "$code"',
    ]
