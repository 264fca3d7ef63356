"""The coordinator's access to the run folder: a thread reads and writes there, once a second and on request."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.launch.election import Lease, folder_identity
from lockstep.launch.times import HEARTBEAT_S, HELD_UP_S, LOST_AFTER_S
from lockstep.run_folder.checkpoint_facts import CheckpointFacts, read_checkpoint_facts
from lockstep.run_folder.events import append_event, belongs_to_earlier_run, end_of_earlier_run
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

        # When the last iteration of the coordinator's loop began, as the loop itself says (`note_iteration`).
        self.last_iteration_at = time.monotonic()

        # The identity of the run folder, from the first scan until the folder is found missing or replaced.
        self._identity: tuple[int, int] | None = None

        # What the coordinator's loop reads: what the checkpoints showed last, whether another node has taken over, the
        # contents of the files that `lockstep resize` left, and an error that ended this thread.
        self.checkpoints = CheckpointFacts()
        self.superseded = False
        self.resize_requests: deque[str] = deque()
        self.error: Exception | None = None

        # Whether the run folder is gone, until the loop has taken note of it.
        self._removed = False

        # How many scans the coordinator's loop has requested, and how many of these requests were answered. A scan that
        # is in progress does not answer a new request: it may have read a file that was changed afterwards.
        self._requested_scans = 0
        self._finished_scans = 0
        self._scan_finished = threading.Condition()

        # Events that the coordinator's loop has left, to be written to events.jsonl.
        self._events: deque[dict[str, Any]] = deque()
        self._awake = threading.Event()
        self._earlier_end: int | None = None  # see `end_of_earlier_run`

        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="lockstep-folder")

    # ---- the thread ----

    def _run(self) -> None:
        # Before any rank can begin.
        self._earlier_end = end_of_earlier_run(self._run_dir)
        try:
            while not self.superseded and not self._closed:
                self.look_at_folder()
                self._serve_until(time.monotonic() + HEARTBEAT_S)
        except Exception as error:
            # The coordinator's loop raises every error: without this thread nothing renews the lease.
            self.error = error
        finally:
            self._write_events()

    def _serve_until(self, next_scan: float) -> None:
        """Scan when the loop requests it, and write its events, until it is time to look at everything again."""
        while not self._closed and (seconds := next_scan - time.monotonic()) > 0:
            self._awake.wait(seconds)
            self._awake.clear()

            # The loop waits for a scan, but not for its events.
            if self._requested_scans > self._finished_scans:
                self._scan()

            self._write_events()

    def _write_events(self) -> None:
        while self._events:
            event = self._events.popleft()

            # A request that was refused is no failure of the run that the folder holds.
            is_refusal = event["event"] == "failure" and event.get("for_user") and event.get("attempt") == 0
            if not (is_refusal and belongs_to_earlier_run(self._run_dir, self._earlier_end)):
                append_event(self._run_dir, event)

    def look_at_folder(self) -> None:
        """Look once at everything that the coordinator must know. Only the thread does that: it may block."""
        self._renew_lease()
        self._scan()
        self._notice_removal()
        request = take_request(self._run_dir)
        if request is not None:
            self.resize_requests.append(request)

    def _renew_lease(self) -> None:
        """Renew the lease, unless the coordinator's loop stalls."""
        # The loop may stall, for example in a write to a terminal stopped with Ctrl-S, for as long as it takes the
        # other nodes to lose this one. Then the lease is not renewed: another node is to take over.
        stalls = time.monotonic() - self.last_iteration_at > LOST_AFTER_S
        if self._lease is not None and not stalls:
            self._lease.renew()

    def _scan(self) -> None:
        """Look whether another node has taken over, and at the checkpoints."""
        # Requests that come from now on are left to the next scan.
        requested = self._requested_scans

        if self._lease is not None and self._lease.superseded():
            self.superseded = True

        # If the disk fails, the checkpoints are taken to be as they were.
        with suppress(OSError):
            self.checkpoints = read_checkpoint_facts(self._run_dir / CHECKPOINTS)

        with self._scan_finished:
            self._finished_scans = requested
            self._scan_finished.notify_all()

    def _notice_removal(self) -> None:
        """Note that the run folder is gone or another one: nothing that is trained from now on can be saved there."""
        # A disk error says nothing about the folder.
        with suppress(OSError):
            found = folder_identity(self._run_dir)
            if self._identity is None:
                self._identity = found
            elif found != self._identity:
                self._identity = None
                self._removed = True

    # ---- for the coordinator's loop ----

    def start(self) -> None:
        self._thread.start()

    def note_iteration(self, now: float) -> None:
        """Note that an iteration of the loop begins."""
        self.last_iteration_at = now

    def take_removed(self) -> bool:
        """Return whether the run folder was found missing or replaced since the last call."""
        if not self._removed:
            return False

        self._removed = False
        return True

    def refresh(self) -> None:
        """Have the thread scan now, and wait until it has: a decision must not depend on what was true a second ago.

        If the disk does not answer within HELD_UP_S, the loop goes on with what was seen last.
        """
        # Before the thread has begun, no other node waits for this one.
        if self._thread.ident is None:
            self._scan()
            return

        self._requested_scans += 1
        self._awake.set()
        with self._scan_finished:
            self._scan_finished.wait_for(self._is_answered, HELD_UP_S)

    def _is_answered(self) -> bool:
        """Return whether all requests for a scan were answered, or none will be."""
        return self._finished_scans == self._requested_scans or not self._thread.is_alive()

    def record_event(self, event: Mapping[str, Any]) -> None:
        """Have an event appended to the run's events. The coordinator's loop does not wait for the disk."""
        self._events.append({"time": time.time(), **event})
        self._awake.set()

    def close(self) -> None:
        """End the thread. If its disk does not answer, events that were not written are lost."""
        self._closed = True
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join(END_S)
