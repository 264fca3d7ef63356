"""A Ray cluster: one actor per node, in a placement group. This package is not the library: `import ray` is."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from lockstep.clusters.request import JobRequest
from lockstep.errors import UserError
from lockstep.launch.job import parse_nproc

HELP = "a Ray cluster: one actor per node, replaced when its node is lost; grows and shrinks within --nnodes"

SCRIPT = """\
#!/bin/sh
# Runs on the head node of the Ray cluster, which gets a copy of this folder. Without the first line of the command, the
# rest runs it from any machine of the cluster, with the output on this terminal.
exec {submit}\\
    {launch}
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", default="auto", metavar="auto|HOST:PORT", help="the cluster (default auto)")
    parser.add_argument("--cpus-per-node", type=_amount, metavar="N", help="CPUs of each node (default: --nproc)")
    parser.add_argument("--gpus-per-node", type=_amount, metavar="N", help="GPUs of each node (default: none)")
    parser.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        help="wait this long for nodes (default: 300 for busy ones, and not at all for ones that the cluster lacks)",
    )


def _amount(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number")

    return int(text)


def needed(request: JobRequest, options: argparse.Namespace) -> dict[str, float]:
    """Return what each node must have: a CPU for each process unless another number was asked for, and the GPUs."""
    gpus = options.gpus_per_node or 0
    cpus = options.cpus_per_node
    if cpus is None:
        # How many processes `auto` means is known on the node only.
        cpus = max(1, gpus) if request.nproc == "auto" else parse_nproc(request.nproc).most

    amounts = {"CPU": float(cpus), "GPU": float(gpus)}
    need = {name: amount for name, amount in amounts.items() if amount}
    if not need:
        raise UserError(
            "a node of this job would need nothing",
            "--cpus-per-node 0 and no --gpus-per-node",
            "ask for a CPU or a GPU at least: Ray places actors by what they need",
        )

    return need


def command(request: JobRequest, options: argparse.Namespace, address: str) -> str:
    """Return the command that submits, and resumes, this job."""
    nodes = request.nnodes
    words = ["lockstep", "launch", "ray", *request.target_words]
    words += ["--nproc", request.nproc, "--nnodes", f"{nodes.least}:{nodes.most}"]
    for option, value in (
        ("--address", None if address == "auto" else address),
        ("--cpus-per-node", options.cpus_per_node),
        ("--gpus-per-node", options.gpus_per_node),
        ("--wait", None if options.wait is None else f"{options.wait:g}"),
    ):
        words += [] if value is None else [option, str(value)]

    return shlex.join([*words, "--submit", *request.last_words])


def _absolute(request: JobRequest) -> JobRequest:
    # The working folder of a process on another node may have another path.
    return replace(request, run_dir=request.run_dir.absolute())


def render(request: JobRequest, options: argparse.Namespace) -> dict[str, str]:
    needed(request, options)

    # Inside the cluster, the driver finds it by itself.
    launch = command(_absolute(request), options, "auto")
    return {"ray-job.sh": SCRIPT.format(submit="ray job submit --working-dir . -- ", launch=launch)}


def submit(request: JobRequest, options: argparse.Namespace, files: dict[str, Path]) -> int:
    """Run the job on the cluster, as its driver, until it ends."""
    from lockstep.clusters.ray.cluster import RayCluster
    from lockstep.clusters.ray.driver import RayDriver
    from lockstep.launch.supervisor import collect_signals

    need = needed(request, options)
    cluster = RayCluster(options.address)
    try:
        if cluster.uploaded_folder and not request.run_dir.is_absolute():
            raise UserError(
                f"run_dir={request.run_dir} would be inside the copy of the working folder that Ray has made",
                "every node has a copy of its own, which Ray removes",
                "set run_dir to an absolute path that all nodes of the cluster see",
            )

        request = _absolute(request)
        print(f"lockstep: joined the Ray cluster at {cluster.address}", file=sys.stderr, flush=True)

        # Ray handles SIGTERM as well, from the moment of the connection.
        with collect_signals() as signals:
            again = command(request, options, options.address)
            return RayDriver(cluster, request, need, signals, options.wait, again).run()
    finally:
        cluster.close()
