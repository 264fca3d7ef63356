"""Run a job to its end, whatever happens to its ranks and nodes on the way: `supervise` is the entry point."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

from lockstep.errors import UserError
from lockstep.launch.agent import Agent
from lockstep.launch.coordinator import Coordinator
from lockstep.launch.job import Job, parse_address
from lockstep.launch.nodes.node_launcher import Outcome, run_node
from lockstep.run_folder.start_from import hold_for_new_job
from lockstep.runtime.host.network import check_interfaces
from lockstep.runtime.preemption import PREEMPT_SIGNALS, signal_handler


def supervise(job: Job) -> Outcome:
    """Run the job on this node, alone or as one of several."""
    if job.join is None and job.nnodes.least > 1:
        raise UserError(
            f"--nnodes {job.nnodes} needs --join",
            "no address where the nodes meet",
            "run the same command on every node, with one node's address: --join HOST:29400",
        )

    # A single rank needs no network.
    if job.join is not None or job.nproc.most > 1:
        check_interfaces(os.environ, parse_address(job.addresses[0])[0] if job.join is not None else None)

    host = job.host or socket.gethostname()
    with collect_signals() as signals:
        if job.join is not None:
            return run_node(job, host, signals)

        with hold_for_new_job(job.run_dir, job.goes_back_to), closing(Agent(job, host)) as agent:
            ending = Coordinator(job, agent, signals).run()
            assert ending is not None, "only a job on several nodes can be taken over"
            return Outcome(ending, ended_here=True)


@contextmanager
def collect_signals() -> Iterator[list[str]]:
    """Yield a list that gets the names of received PREEMPT_SIGNALS; outside the main thread it stays empty."""
    received: list[str] = []

    def note(number: int, frame: object) -> None:
        received.append(signal.Signals(number).name)

    with signal_handler(note, PREEMPT_SIGNALS):
        yield received
