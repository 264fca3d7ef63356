"""What the coordinator reads from the run folder, and writes there, once a second."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.launch.election import Lease, folder_identity
from lockstep.launch.times import HEARTBEAT_S, LOOK_S, LOST_AFTER_S
from lockstep.run_folder.checkpoint_facts import CheckpointFacts, read_checkpoint_facts
from lockstep.run_folder.events import append_event
from lockstep.run_folder.names import CHECKPOINTS
from lockstep.run_folder.resize import take_request

# How long the end of a job waits for the thread that looks at the run folder, whose disk may not answer.
END_S = 2.0


class FolderWatch:
    """A thread that looks at the run folder once a second, and renews the coordinator's lease and writes events there.

    All of this is in a thread because a disk may answer slowly: the coordinator's loop must go on meanwhile, or the
    other nodes would lose it.
    """

    def __init__(self, run_dir: Path, lease: Lease | None):
        self._run_dir = run_dir
        self._lease = lease

        # When the last iteration of the coordinator's loop began, as the loop itself says.
        self.last_iteration_at = time.monotonic()

        # The run folder, once it was seen, and until it is found missing or replaced.
        self._identity: tuple[int, int] | None = None
        self._notice_removal()

        # What the coordinator's loop reads: what the checkpoints showed last, whether another node has taken over, the
        # contents of the files that `lockstep resize` left, whether the run folder is gone, and an error that ended
        # this thread.
        self.checkpoints = CheckpointFacts()
        self.superseded = False
        self.resize_requests: deque[str] = deque()
        self.removed = False
        self.error: Exception | None = None

        # Held during a look at the checkpoints, so that an older one does not replace a newer one.
        self._looking = threading.Lock()

        # Events that the coordinator's loop has left, to be written to events.jsonl.
        self._events: deque[dict[str, Any]] = deque()
        self._awake = threading.Event()

        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="lockstep-folder")

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self.superseded and not self._closed:
                self.look_at_folder()
                self._write_events_until(time.monotonic() + HEARTBEAT_S)
        except Exception as error:
            # The coordinator's loop raises it, whatever it is: without this thread nothing renews the lease.
            self.error = error
        finally:
            self._write_events()

    def _write_events_until(self, next_look: float) -> None:
        """Write each event at once, until it is time for the next look."""
        while not self._closed and (seconds := next_look - time.monotonic()) > 0:
            self._awake.wait(seconds)
            self._awake.clear()
            self._write_events()

    def _write_events(self) -> None:
        while self._events:
            append_event(self._run_dir, self._events.popleft())

    def log(self, event: Mapping[str, Any]) -> None:
        """Have an event appended to the run's events. The coordinator's loop does not wait for the disk."""
        self._events.append({"time": time.time(), **event})
        self._awake.set()

    def look_at_folder(self) -> None:
        """Look once at everything that the coordinator must know."""
        self._look_at_term()
        self.look_at_checkpoints()
        self._notice_removal()
        request = take_request(self._run_dir)
        if request is not None:
            self.resize_requests.append(request)

    def _look_at_term(self) -> None:
        """Renew the lease, and check whether another node has taken over."""
        # The loop may stall, for example in a write to a terminal stopped with Ctrl-S, for as long as it takes the
        # other nodes to lose this one. Then the lease is not renewed: another node is to take over.
        stalls = time.monotonic() - self.last_iteration_at > LOST_AFTER_S
        if self._lease is not None and not stalls:
            self._lease.renew()

        self.look_for_successor()

    def look_for_successor(self) -> None:
        """Check whether another node has taken over. The coordinator's loop calls this as well; it may block."""
        if self._lease is not None and self._lease.superseded():
            self.superseded = True

    def look_at_checkpoints(self) -> CheckpointFacts:
        """Return what the checkpoints show now or, if the disk fails or does not answer, what they showed last.

        The coordinator's loop calls this as well, when something has happened: what follows must not depend on what was
        true a second ago.
        """
        # If the thread has been waiting for the disk for this long, the loop must go on without it.
        if not self._looking.acquire(timeout=LOOK_S):
            return self.checkpoints

        try:
            with suppress(OSError):
                self.checkpoints = read_checkpoint_facts(self._run_dir / CHECKPOINTS)
        finally:
            self._looking.release()

        return self.checkpoints

    def _notice_removal(self) -> None:
        """Note that the run folder is gone or another one: nothing that is trained from now on can be saved there."""
        # A disk error says nothing about the folder.
        with suppress(OSError):
            found = folder_identity(self._run_dir)
            if self._identity is None:
                self._identity = found
            elif found != self._identity:
                self._identity = None
                self.removed = True

    def close(self) -> None:
        """End the thread. If its disk does not answer, events that were not written are lost."""
        self._closed = True
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join(END_S)
