"""The two roles of a node in a term: it follows the coordinator, or is the coordinator itself."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import dataclass

from lockstep.launch.election import Lease, Term
from lockstep.launch.failure import Failure
from lockstep.launch.wire.connections import Connection
from lockstep.launch.wire.messages import CoordinatorState, JobEnd


@dataclass(frozen=True)
class JoinedTerm:
    """What a node knows about the term in which it last belonged to the job."""

    term: Term
    number: int  # the node's number in that term
    state: CoordinatorState  # the last one that was received
    local_address: str  # this machine's address on the connection to the coordinator


@dataclass
class CoordinatorRole:
    """What a node needs to coordinate: a listening socket, its term, and the state of the previous coordinator."""

    resources: ExitStack  # holds the run folder and the listening socket until it is closed
    listener: socket.socket
    lease: Lease
    inherited: CoordinatorState | None = None
    failure: Failure | None = None  # the loss of the previous coordinator


# The next step of a node: it follows the coordinator at the other end of a connection, or coordinates, or ends.
NextStep = Connection | CoordinatorRole | JobEnd
