"""Run a job to its end, whatever happens to its ranks and nodes on the way."""

from __future__ import annotations

import socket

from lockstep.errors import UserError
from lockstep.launch import wire
from lockstep.launch.coordinator import Coordinator
from lockstep.launch.follower import follow
from lockstep.launch.job import Job
from lockstep.launch.protocol import Ending
from lockstep.launch.signals import Signals

__all__ = ["Ending", "supervise"]


def supervise(job: Job) -> Ending:
    """On one node, or as one of several: who can have the address in `--join` coordinates, the others follow."""
    if job.join is None and job.nnodes.least > 1:
        raise UserError(
            f"--nnodes {job.nnodes}",
            "no address where the nodes meet",
            "type the same on every node, with one node's address: --join HOST:29400",
        )
    name = job.host or socket.gethostname()
    with Signals() as signals:
        if job.join is None:
            return Coordinator(job, name, signals, None, "127.0.0.1").run()
        listener = wire.claim(job.join)
        if listener is None:
            return follow(job, name, signals)
        address = listener.getsockname()[0]
        return Coordinator(job, name, signals, wire.Hub(listener), address).run()
