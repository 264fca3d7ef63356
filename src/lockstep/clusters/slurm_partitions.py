"""What the partitions of a Slurm cluster offer, as `sinfo` says, and whether a job fits there.

Where `sinfo` is not there or does not answer, nothing is known, and nothing is checked. Otherwise a job that asks for
more than any node has is refused at once, instead of waiting in the queue forever.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.clusters.slurm_job import Component, SlurmJob, seconds_of
from lockstep.clusters.slurm_script import cpus_per_task, tasks_per_node
from lockstep.errors import UserError, plural, unknown_name

# How long a question to Slurm may take. A cluster that does not answer is not waited for.
ANSWER_S = 20.0

# Partition (the default one has a *), nodes, CPUs, memory in MB, generic resources, time limit, features.
COLUMNS = "%P|%D|%c|%m|%G|%l|%f"


@dataclass(frozen=True)
class PartitionNodes:
    """Equal nodes of a partition."""

    partition: str
    default: bool
    count: int
    cpus: int
    mem_mb: int
    gpus: int
    time: str
    features: tuple[str, ...]

    def __str__(self) -> str:
        has = f"{plural(self.cpus, 'CPU')}, {plural(self.gpus, 'GPU')}, {self.mem_mb} MB"
        return f"{plural(self.count, 'node')} with {has}"


def ask_cluster() -> list[PartitionNodes] | str:
    """Return the nodes of all partitions, or why they are not known."""
    try:
        # Also the partitions that are hidden from lists: a job may name one.
        done = run(["sinfo", "--all", "--noheader", "--exact", f"--format={COLUMNS}"])
    except UserError as error:
        return error.problem

    return parse_sinfo(done.stdout) if done.returncode == 0 else _last_line(done.stderr)


def run(
    words: Sequence[str], seconds: float = ANSWER_S, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm. Raises a UserError if there is no such command, or no answer."""
    found = ""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=seconds, env=env)
    except FileNotFoundError:
        problem = f"{words[0]} is not on this machine"
    except subprocess.TimeoutExpired:
        problem = f"{words[0]} did not answer within {seconds:.0f} s"
        if "--parsable" in words:
            found = "the job may have been submitted all the same: `squeue --me` shows it"

    raise UserError(problem, found, "run this on a login node of the cluster; or write the script with --out DIR")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]


def parse_sinfo(text: str) -> list[PartitionNodes]:
    found = []
    for line in text.splitlines():
        name, count, cpus, mem, gres, time, features = line.split("|", 6)
        found.append(
            PartitionNodes(
                partition=name.rstrip("*"),
                default=name.endswith("*"),
                count=int(count),
                cpus=_number(cpus),
                mem_mb=_number(mem),
                gpus=sum(int(number) for number in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres)),
                time=time,
                features=tuple(features.split(",")),
            )
        )

    return found


def _number(text: str) -> int:
    """Return the number in sinfo's `8` or `8+`, which means at least 8."""
    return int(text.rstrip("+"))


# ---- whether a job fits ----


def check_fits(job: SlurmJob, cluster: Sequence[PartitionNodes]) -> None:
    """Raise a UserError if a partition cannot run the job, with what it has and what to type."""
    for component in job.components:
        nodes = _of_partition(component, cluster)
        if nodes:
            _check_nodes(job, component, nodes)
            _check_limit(job, nodes[0])


def _of_partition(component: Component, cluster: Sequence[PartitionNodes]) -> list[PartitionNodes]:
    # A list of partitions means: whichever starts the job first. Slurm judges that.
    wanted = component.partition
    if wanted is not None and "," in wanted:
        return []

    if wanted is not None and cluster and wanted not in {nodes.partition for nodes in cluster}:
        raise unknown_name("--partition", wanted, dict.fromkeys(nodes.partition for nodes in cluster))

    return [nodes for nodes in cluster if (nodes.default if wanted is None else nodes.partition == wanted)]


@dataclass(frozen=True)
class Need:
    """Something that a job needs of a node."""

    text: str  # as it follows "2 nodes" in an error: " with 8 CPUs"
    met_by: Callable[[PartitionNodes], bool]
    fix: Callable[[PartitionNodes], str]  # what to type if too few nodes have it; the argument is the largest node


def _needs(job: SlurmJob, component: Component, nodes: Sequence[PartitionNodes]) -> Iterator[Need]:
    # An expression of several features is Slurm's to judge.
    feature = component.constraint
    if feature and re.fullmatch(r"[\w.-]+", feature):
        yield Need(
            f" with the feature {feature}", lambda one: feature in one.features, lambda _: "use another --constraint"
        )

    if gpus := component.gpus:
        most = max(one.gpus for one in nodes) or 1
        as_many = -(-gpus * component.nnodes.most // most)
        yield Need(
            f" with {plural(gpus, 'GPU')}",
            lambda one: one.gpus >= gpus,
            lambda largest: f"use --gpus-per-node {largest.gpus} --nproc {largest.gpus}, and --nnodes {as_many}",
        )

    cpus = tasks_per_node(job, component) * cpus_per_task(job, component)
    yield Need(
        f" with {plural(cpus, 'CPU')}",
        lambda one: one.cpus >= cpus,
        lambda largest: f"use --cpus-per-task {largest.cpus} at most",
    )

    if mem_mb := megabytes(component.mem):
        yield Need(
            f" with {mem_mb} MB",
            lambda one: one.mem_mb >= mem_mb,
            lambda largest: f"use --mem {largest.mem_mb}M at most",
        )


def _check_nodes(job: SlurmJob, component: Component, nodes: Sequence[PartitionNodes]) -> None:
    """Check one need after the other, so that the error names the one that no node, or too few nodes, can meet."""
    least = component.nnodes.least
    left = list(nodes)

    # The first need is that there are enough nodes of any kind.
    any_node = Need("", lambda one: True, lambda largest: "")
    for need in [any_node, *_needs(job, component, nodes)]:
        before, left = left, [one for one in left if need.met_by(one)]
        count = sum(one.count for one in left)
        if count >= least:
            continue

        largest = max(before, key=lambda one: (one.gpus, one.cpus, one.mem_mb))
        what = f"use --nnodes {count}" if left else need.fix(largest)
        raise UserError(
            f"partition {nodes[0].partition} does not have {plural(least, 'node')}{need.text}",
            "; ".join(map(str, nodes)),
            f"{what}, or another --partition",
        )


def _check_limit(job: SlurmJob, nodes: PartitionNodes) -> None:
    asked = seconds_of(job.time) if job.time else None
    limit = seconds_of(nodes.time) if nodes.time[:1].isdigit() else None  # or "infinite"
    if asked is not None and limit is not None and asked > limit:
        raise UserError(
            f"--time {job.time} is more than partition {nodes.partition} allows",
            f"a limit of {nodes.time}",
            f"use --time {nodes.time}: the job is requeued, and resumes, as often as it takes",
        )


def megabytes(text: str | None) -> int:
    """Return a size as sbatch takes it: 4000, 4000M, 64G. `0` means all memory of a node."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", (text or "0").upper(), re.ASCII)
    if not match:
        raise UserError(f"--mem {text} is not a size", "", "use --mem 64G")

    return int(match[1]) * {"K": 0, "": 1, "M": 1, "G": 1024, "T": 1024**2}[match[2]]
