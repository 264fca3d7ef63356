"""What a Slurm job asks for, and what can be wrong with that before the cluster is asked.

sbatch accepts many jobs that can never run, or not as meant: fewer CPUs than processes, a limit shorter than the time
that saving takes, an option that contradicts another one. They are refused here, with the option to type instead.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from lockstep.clusters.request import JobRequest
from lockstep.errors import UserError, plural, unknown_name
from lockstep.launch.job import Bounds, parse_nnodes, parse_nproc

# Slurm looks at time limits about twice a minute, and may send its signal this many seconds early.
SIGNAL_EARLY_S = 60

# Options of sbatch that the script sets itself: the rest of the script depends on them.
SCRIPT_OPTIONS = {
    **dict.fromkeys(("-N", "--nodes"), "--nnodes"),
    **dict.fromkeys(("-n", "--ntasks", "--ntasks-per-node"), "--nproc"),
    **dict.fromkeys(("-o", "--output", "-J", "--job-name"), "run_dir="),
    **dict.fromkeys(("--signal",), "--signal-before"),
    **dict.fromkeys(("-a", "--array"), "--array"),
    **dict.fromkeys(("-t", "--time"), "--time"),
    **dict.fromkeys(("-c", "--cpus-per-task"), "--cpus-per-task"),
    **dict.fromkeys(("-G", "--gpus", "--gpus-per-node", "--gpus-per-task"), "--gpus-per-node"),
    **dict.fromkeys(("-p", "--partition"), "--partition"),
    **dict.fromkeys(("-C", "--constraint"), "--constraint"),
    **dict.fromkeys(("-A", "--account"), "--account"),
    **dict.fromkeys(("-q", "--qos"), "--qos"),
    **dict.fromkeys(("--mem",), "--mem"),
    # A relative run_dir, and the job's log in it, would be elsewhere.
    **dict.fromkeys(("-D", "--chdir"), "`cd DIR` before `lockstep launch`"),
}


@dataclass(frozen=True)
class Component:
    """Nodes of one kind, and what each of them needs. Most jobs have one component."""

    nnodes: Bounds
    nproc: str  # as typed: a count, a range or auto
    partition: str | None = None
    constraint: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    gpus_per_node: str | None = None  # a count, or TYPE:COUNT

    @property
    def gpus(self) -> int:
        return int(self.gpus_per_node.rpartition(":")[2]) if self.gpus_per_node else 0

    @property
    def ranks(self) -> Bounds:
        """The ranks of one node. `auto` is one for each GPU that is asked for; without GPUs it is two."""
        count = str(self.gpus or 2) if self.nproc == "auto" else self.nproc
        return replace(parse_nproc(count), start_with=None)


@dataclass(frozen=True)
class SlurmJob:
    """A request, with everything that only Slurm needs to know."""

    request: JobRequest
    components: tuple[Component, ...]
    mode: str  # agent: a launcher on each node; srun: the tasks are the ranks
    time: str | None = None
    account: str | None = None
    qos: str | None = None
    array: str | None = None
    varied: tuple[tuple[str, ...], ...] = ()  # the settings of each task of the array
    signal_before: int = 120
    max_requeues: int = 100
    setup: tuple[str, ...] = ()  # lines that the script runs first
    sbatch: tuple[str, ...] = ()  # further options of sbatch, each a line of the script

    @property
    def nnodes(self) -> Bounds:
        parts = [component.nnodes for component in self.components]
        return Bounds(sum(part.least for part in parts), sum(part.most for part in parts))

    @property
    def log(self) -> Path:
        """The job's output; the words with % are Slurm's."""
        folder = Path(str(self.request.run_dir).replace("%", "%%"))
        return folder / ("slurm-%A_%a.log" if self.array else "slurm-%j.log")


# ---- the command line ----


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only Slurm has."""
    add = parser.add_argument
    add("--time", metavar="H:M:S", help="time limit, as sbatch takes it; the job is requeued when it is over")
    add("--partition", metavar="NAME", help="partition (default: the cluster's)")
    add("--account", metavar="NAME", help="account to charge")
    add("--qos", metavar="NAME", help="quality of service")
    add("--constraint", metavar="FEATURES", help="features that the nodes must have")

    # What each node must have.
    add("--cpus-per-task", type=int, metavar="N", help="CPUs that the ranks of a node share (default: one each)")
    add("--mem", metavar="SIZE", help="memory of each node, such as 64G")
    add("--gpus-per-node", metavar="[TYPE:]N", help="GPUs of each node, one for each process")

    # Several runs, and nodes of several kinds.
    add("--array", metavar="0-3", help="one run for each index, in run_dir/task-INDEX")
    add(
        "--vary",
        action="append",
        default=[],
        metavar="key=A,B",
        help="an array with one run for each value; for each combination, if given more than once",
    )
    add(
        "--component", action="append", default=[], metavar="'nproc=8 nnodes=1 ...'", help="further nodes, unlike these"
    )

    # How the job ends, and starts again.
    add("--signal-before", type=int, default=120, metavar="S", help="seconds left to save in (default 120)")
    add("--max-requeues", type=int, default=100, metavar="N", help="how often the job may start again (default 100)")
    add(
        "--mode",
        choices=("agent", "srun"),
        default="agent",
        help="agent: a launcher on each node, which restarts its ranks (default); srun: the tasks are the ranks",
    )

    # Lines of the script that only its user knows.
    add("--setup", action="append", default=[], metavar="LINE", help="a line to run first, such as 'module load cuda'")
    add("--sbatch", action="append", default=[], metavar="'exclusive ...'", help="further options for sbatch")


def read_job(request: JobRequest, options: argparse.Namespace, env: Mapping[str, str] = os.environ) -> SlurmJob:
    """Return the job that was typed. Raises a UserError for what cannot work on any cluster."""
    default = env.get("SBATCH_PARTITION") or None
    first = Component(
        request.nnodes,
        request.nproc,
        options.partition or default,
        options.constraint,
        options.cpus_per_task,
        options.mem,
        options.gpus_per_node,
    )

    # The values of --vary decide how many tasks the array has.
    varied = _combinations(options.vary)
    job = SlurmJob(
        request=request,
        components=(first, *(_parse_component(text, default) for text in options.component)),
        mode=options.mode,
        time=options.time,
        account=options.account,
        qos=options.qos,
        array=options.array or (f"0-{len(varied) - 1}" if varied else None),
        varied=varied,
        signal_before=options.signal_before,
        max_requeues=options.max_requeues,
        setup=tuple(options.setup),
        sbatch=tuple(_parse_sbatch(text) for text in options.sbatch),
    )
    check(job)
    return job


def _parse_component(text: str, partition: str | None) -> Component:
    """Parse `nproc=8 nnodes=1 constraint=h100`: names of the options, without their dashes."""
    known = [field.name for field in fields(Component)]
    values: dict[str, str] = {"partition": partition} if partition else {}
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        name = name.replace("-", "_")
        if name not in known or not equals:
            raise unknown_name("--component", word, [f"{name}=..." for name in known])

        values[name] = value

    # The other fields hold text, as it was typed.
    cpus = values.pop("cpus_per_task", None)
    return Component(
        nnodes=parse_nnodes(values.pop("nnodes", None)),
        nproc=values.pop("nproc", "auto"),
        cpus_per_task=None if cpus is None else _whole("--component cpus_per_task", cpus),
        **values,
    )


def _parse_sbatch(text: str) -> str:
    """Return options of sbatch for a line of the script. The dashes may be left out, if all options are one word each.

    (A shell and argparse take `--sbatch=--exclusive`, and not `--sbatch --exclusive`.)
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--sbatch {text} cannot be read", str(error), "close the quotes") from None

    if words and not words[0].startswith("-"):
        words = [f"--{word}" for word in words]

    return shlex.join(words)


def _combinations(vary: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the settings of each task of the array: every combination of the values."""
    # `lockstep --help` must not wait for pydantic.
    from lockstep.config import check as check_settings
    from lockstep.config import read_layers

    choices: list[list[str]] = []
    for word in vary:
        key, equals, values = word.partition("=")
        if not (key and equals and values):
            raise UserError(f"--vary {word} is not a setting", "the form is key=A,B", "use --vary lr.peak=1e-3,3e-4")

        if key in ("run_dir", "resume"):
            raise UserError(
                f"--vary {key} is not possible: each run of an array has a folder of its own, in which it resumes",
                f"run_dir/task-INDEX; --vary {word}",
                "set run_dir=FOLDER for all of them, and vary other settings",
            )

        choices.append([f"{key}={value}" for value in values.split(",")])

    combinations = tuple(itertools.product(*choices)) if choices else ()
    for words in combinations:
        check_settings(read_layers([], words))

    return combinations


# ---- what cannot work ----


def check(job: SlurmJob) -> None:
    """Refuse a job that can work on no cluster, before any cluster is asked."""
    _check_words(job)
    _check_time(job)
    _check_array(job)
    for component in job.components:
        _check_component(job, component)

    if len(job.components) > 1 and (job.mode == "srun" or job.nnodes.least != job.nnodes.most or job.array):
        raise UserError(
            "a job with --component needs a fixed number of nodes, and a launcher on each",
            f"--mode {job.mode}, --nnodes {job.nnodes}" + (f", --array {job.array}" if job.array else ""),
            "use --mode agent, --nnodes with one number, and no array",
        )


def _check_words(job: SlurmJob) -> None:
    """Refuse text that would change the script: a space or a line break in a value would begin another option."""
    values = {"--time": job.time, "--account": job.account, "--qos": job.qos, "--array": job.array}
    for component in job.components:
        values |= {"--partition": component.partition, "--mem": component.mem, "--constraint": component.constraint}
        for name, value in values.items():
            if value is not None and not re.fullmatch(r"\S+", value):
                raise UserError(f"{name} {value!r} is not one word", "", f"write {name} without spaces")

    for word in (word for text in job.sbatch for word in shlex.split(text)):
        if (name := _script_option(word)) is not None:
            raise UserError(
                f"--sbatch {word}: the script sets {name} itself", "", f"use {SCRIPT_OPTIONS[name]} in its place"
            )

    if "\n" in "".join([*job.sbatch, *job.setup]):
        raise UserError("a line break in --sbatch or --setup", "", "give --setup once for each line")

    # With a backslash, Slurm would not replace %j in the name of the log.
    folder = str(job.request.run_dir)
    if "\\" in folder or not folder.isprintable():
        raise UserError(
            f"run_dir={folder!r} cannot be written into a batch script",
            "a backslash, or a character that cannot be printed",
            "use letters, digits, - and _",
        )

    if ":" in job.request.script_arguments:
        raise UserError(
            "srun cannot pass on an argument that is only a colon",
            "to srun it separates the components of a job",
            "write it into a file of settings, or as a part of another argument",
        )


def _script_option(word: str) -> str | None:
    """Return the option of SCRIPT_OPTIONS that a word sets, or None. Long ones may be shortened, as sbatch allows."""
    name = re.match(r"--[\w-]+|-\w|", word)[0]  # type: ignore[index]
    if name in SCRIPT_OPTIONS:
        return name

    return next((option for option in SCRIPT_OPTIONS if len(name) > 2 and option.startswith(name)), None)


def _check_time(job: SlurmJob) -> None:
    """Refuse times that leave no room to train and to save."""
    if job.signal_before < 1 or job.signal_before > 65535:
        raise UserError(
            f"--signal-before {job.signal_before} is not a number of seconds",
            "Slurm takes 1 to 65535",
            "use --signal-before 120",
        )

    if job.time is None:
        return

    limit, least = seconds_of(job.time), job.signal_before + SIGNAL_EARLY_S
    if limit is not None and limit <= least:
        raise UserError(
            f"--time {job.time} leaves no time to train before the signal to save",
            f"a limit of {limit:.0f} s; the signal comes {job.signal_before} to {least} s before it",
            f"use a --time of more than {least} s, or a smaller --signal-before",
        )


def seconds_of(text: str) -> float | None:
    """Return a time limit in seconds; None for no limit. Slurm's forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    if text.lower() in ("infinite", "unlimited", "0"):
        return None

    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if not match:
        raise UserError(f"--time {text} is not a time limit", "", "use HOURS:MINUTES:SECONDS, as in --time 4:00:00")

    # The forms differ in what their first number counts.
    days, *parts = (int(part) if part else None for part in match.groups())
    first, second, third = parts
    if days is not None:  # D-H[:M[:S]]
        return 86400.0 * days + 3600 * (first or 0) + 60 * (second or 0) + (third or 0)
    if third is not None:  # H:M:S
        return 3600.0 * (first or 0) + 60 * (second or 0) + third

    return 60.0 * (first or 0) + (second or 0)  # M[:S]


def _check_array(job: SlurmJob) -> None:
    """Refuse indexes that are not a list, or that do not fit the combinations of --vary."""
    if not job.array:
        return

    if not re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", job.array, re.ASCII):
        raise UserError(f"--array {job.array} is not a list of indexes", "", "use --array 0-3, or --array 0-9%2")

    last = len(job.varied) - 1
    indexes = job.array.partition("%")[0]
    if job.varied and indexes != f"0-{last}":
        raise UserError(
            f"--array {job.array} does not fit --vary",
            f"{plural(len(job.varied), 'combination')} of settings, with the indexes 0-{last}",
            "leave --array out, or add only a limit to these: --array " + f"0-{last}%2",
        )


def _check_component(job: SlurmJob, component: Component) -> None:
    """Check that processes, GPUs and CPUs of a node go together."""
    if component.gpus_per_node and not re.fullmatch(r"([\w.-]+:)?[1-9]\d*", component.gpus_per_node, re.ASCII):
        raise UserError(
            f"--gpus-per-node {component.gpus_per_node} is not a number of GPUs",
            "the form is N or TYPE:N",
            "use --gpus-per-node 4, or --gpus-per-node a100:4",
        )

    ranks, gpus = component.ranks, component.gpus
    if gpus and not ranks.least <= gpus <= ranks.most:
        raise _processes_and_gpus(component, ranks, gpus)

    if job.mode == "srun":
        _check_plain_ranks(job, component)
        return

    cpus = component.cpus_per_task
    if cpus is not None and cpus < ranks.most:
        raise UserError(
            f"{plural(ranks.most, 'process', 'processes')} on each node cannot share {plural(cpus, 'CPU')}",
            f"--cpus-per-task {cpus}: one task on each node, which starts the processes of --nproc {component.nproc}",
            f"use --cpus-per-task {ranks.most}, or more for the workers that read data",
        )


def _processes_and_gpus(component: Component, ranks: Bounds, gpus: int) -> UserError:
    """Return the error for processes that do not match the GPUs of a node, with a job of the same size that does."""
    nodes, total = component.nnodes.most, ranks.most * component.nnodes.most
    fix = f"use --nproc {gpus} for {gpus * nodes} processes in all"
    if total % gpus == 0 and total // gpus != nodes:
        fix += f", or --nproc {gpus} --nnodes {total // gpus} for {total}"

    kind = component.gpus_per_node.rpartition(":")[0] if component.gpus_per_node else ""
    typed = f"{kind}:{ranks.most}" if kind else f"{ranks.most}"
    what = "more processes than GPUs" if gpus < ranks.most else "GPUs that no process would use"
    return UserError(
        f"--nproc {component.nproc} and --gpus-per-node {component.gpus_per_node}: {what} on each node",
        f"one process for each GPU; {plural(nodes, 'node')} x {ranks} processes, {nodes} x {gpus} GPUs",
        f"{fix}; or --gpus-per-node {typed}, if the nodes have as many",
    )


def _check_plain_ranks(job: SlurmJob, component: Component) -> None:
    """Refuse numbers that are not fixed: without a launcher nothing can change them."""
    auto = component.nproc == "auto" and not component.gpus
    if auto or component.ranks.least != component.ranks.most or job.nnodes.least != job.nnodes.most:
        raise UserError(
            "--mode srun needs fixed numbers: Slurm starts the ranks, and nothing restarts them in another number",
            f"--nproc {component.nproc} --nnodes {job.nnodes}",
            "use one number for each, as in --nproc 4 --nnodes 2; or --mode agent",
        )


def _whole(name: str, text: str) -> int:
    """Return a whole number. Raises a UserError."""
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{name}={text} is not a whole number", "", f"use {name}=8")

    return int(text)
