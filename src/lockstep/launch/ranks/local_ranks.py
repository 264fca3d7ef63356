"""The processes of the ranks of one attempt on this node: asks them for their stacks, and to save, and kills them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import files
from lockstep.launch.hangs import flight_recorder, stacks
from lockstep.launch.hangs.suspicion import process_stat
from lockstep.launch.ranks import rank_record
from lockstep.launch.ranks.oom_kills import OomKills
from lockstep.launch.ranks.zygote import kill_process_group
from lockstep.launch.times import HOUR_S, RANKS_ANSWER_S
from lockstep.launch.wire.messages import Start
from lockstep.runtime import attempt_folder

# How many characters the stacks of all ranks of a node may have: a message has a largest size. The main thread of a
# rank is at the end of its text.
STACKS_SIZE = 4 * 2**20

# How many of the last collectives of a rank are enough to compare it with others.
COLLECTIVES_SENT = 100


@dataclass
class LocalRank:
    """A rank of this node, and what shows how it ended."""

    number: int
    host: str
    folder: Path  # the attempt's
    log: Path | None
    log_began: int = 0  # the size of the log when this rank was started
    oom_kills: OomKills = field(default_factory=OomKills)
    pid: int | None = None  # None until the zygote forks it


class LocalRanks:
    """The ranks of one attempt on this node, which write their logs to `logs`."""

    def __init__(self, start: Start, host: str, logs: Path):
        self.attempt = start.attempt

        # All attempts append to the same logs, so note where this attempt begins; rank 0 writes to the terminal. This
        # comes first: if the disk fails, there is nothing to remove.
        numbers = range(start.first_rank, start.first_rank + start.count)
        log_of = {number: logs / f"rank-{number}.log" if number else None for number in numbers}
        began = {number: log.stat().st_size if log and log.exists() else 0 for number, log in log_of.items()}

        # Heartbeats, failure records, stacks and settings. Readable by this user alone.
        self.folder = Path(tempfile.mkdtemp(prefix="lockstep-"))
        self._touched = time.monotonic()

        # A pipe that carries no data. Ranks hold its read end, the lifeline, and kill themselves when the write end is
        # closed: by this process, or by the kernel because this process is dead.
        try:
            self.lifeline, write_end = os.pipe()
        except OSError:
            self.folder.rmdir()
            raise

        self._lifeline_writer = os.fdopen(write_end, "wb", buffering=0)

        # The ranks that have not ended, by number. The zygote may not have forked them yet.
        self._oom_kills = OomKills()
        self.running = {
            number: LocalRank(number, host, self.folder, log, began[number], self._oom_kills)
            for number, log in log_of.items()
        }

        # The processes of ranks whose zygote was lost. No process reports their ends, so the agent looks for them.
        self._orphans: set[int] = set()

        # Whether the ranks were asked to save and exit, whether their settings were taken, and when they were killed.
        self.was_asked_to_save = False
        self._settings_taken = False
        self.killed_at: float | None = None

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the ranks that exist, by rank."""
        return {number: rank.pid for number, rank in self.running.items() if rank.pid}

    def do_housekeeping(self) -> None:
        """Do what is due now and then while the ranks run. Called about once a second."""
        self._oom_kills.count()

        # Some systems remove files from /tmp that were not touched for days.
        if time.monotonic() - self._touched > HOUR_S:
            self._touched = time.monotonic()

            # If the folder is gone, the ranks go on training, but nothing is known about them: see `view_of`.
            with suppress(OSError):
                for path in (self.folder, *self.folder.iterdir()):
                    os.utime(path)

    def take_settings(self) -> dict[str, Any] | None:
        """Return the task's settings, once: None before rank 0 has written them, and after they were taken."""
        # Rank 0 renames the file into place once it has read the configuration.
        text = "" if self._settings_taken else files.read(attempt_folder.settings(self.folder))
        self._settings_taken = self._settings_taken or bool(text)
        return json.loads(text) if text else None

    # ---- where they are ----

    def stacks_and_collectives(self) -> tuple[dict[int, str], dict[int, list[Any]]]:
        """Return the stack of each rank, and the last collectives of those that answer. That takes seconds.

        A rank that does not answer has an empty stack. If the folder is full or gone, the ranks are not asked for their
        collectives.
        """
        answers = stacks.collect(self.folder, self.pids, RANKS_ANSWER_S)
        answering = [rank for rank, text in answers.items() if text]
        recorded: dict[int, list[Any]] = {}
        with suppress(OSError):
            recorded = flight_recorder.collect(self.folder, answering, RANKS_ANSWER_S)

        most = STACKS_SIZE // max(len(answers), 1)
        texts = {rank: stacks.comparable(text)[-most:] for rank, text in answers.items()}
        last = {rank: flight_recorder.comparable(entries[-COLLECTIVES_SENT:]) for rank, entries in recorded.items()}
        return texts, last

    # ---- their end ----

    def kill_those_that_failed(self) -> bool:
        """Kill the ranks that have recorded a failure and have not ended since. Return whether there are any."""
        records_of = {pid: rank_record.read(self.folder, number) for number, pid in self.pids.items()}
        failed = [pid for pid, record in records_of.items() if record is not None and record.failure is not None]
        for pid in failed:
            kill_process_group(pid)

        return bool(failed)

    def ask_to_save(self, signal: str | None = None) -> None:
        """Ask the ranks to save and exit; `signal` is the one that asks for it.

        The ranks always get SIGTERM. Their worker processes get no signal: ranks need them until the save.
        """
        self.was_asked_to_save = True

        # Without this file, the ranks name SIGTERM as the signal that ended them.
        with suppress(OSError):
            files.write(attempt_folder.preempt_signal(self.folder), signal or "")

        for pid in self.pids.values():
            _ask_rank_to_save(pid)

    def begin_kill(self, any_forked: bool) -> None:
        """Kill the ranks; `all_gone` says when they are gone. `any_forked`: whether any may have a process.

        The state on disk is consistent at any moment, so there is nothing to wait for.
        """
        self.killed_at = time.monotonic()
        if not any_forked:
            self.running.clear()

        self.kill_all()

    def kill_all(self) -> None:
        """Kill every rank of this node with its worker processes, and close the lifeline."""
        self._lifeline_writer.close()
        for pid in self.pids.values():
            kill_process_group(pid)

    def rank_started(self, rank: LocalRank, pid: int) -> None:
        """Note the process of a rank, and carry out the orders that came before it existed."""
        rank.pid = pid

        if self.was_killed:
            kill_process_group(pid)
        elif self.was_asked_to_save:
            _ask_rank_to_save(pid)

    def ended(self, number: int) -> None:
        """Note that the process of a rank has ended, or that it never gets one."""
        del self.running[number]

    def zygote_lost(self) -> None:
        """Kill the ranks, because no process reports their ends any more."""
        self.kill_all()
        self._orphans |= set(self.pids.values())
        self.running.clear()

    @property
    def was_killed(self) -> bool:
        return self.killed_at is not None

    @property
    def seconds_since_kill(self) -> float:
        """How long ago the ranks were killed; 0 if they were not."""
        return 0.0 if self.killed_at is None else time.monotonic() - self.killed_at

    @property
    def any_process_left(self) -> bool:
        """Whether the process of some rank still exists. One that is dead, and was not reaped, does not count."""
        return any(_is_left(pid) for pid in {*self.pids.values(), *self._orphans})

    @property
    def all_gone(self) -> bool:
        """Whether all ranks have ended, or will never exist."""
        return not self.running and not self.any_process_left

    def close(self) -> None:
        """Kill the ranks that are left, and remove what they shared with their launcher."""
        self.kill_all()
        os.close(self.lifeline)
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_left(pid: int) -> bool:
    stat = process_stat(pid)
    return bool(stat) and stat[0] not in ("Z", "X")


def _ask_rank_to_save(pid: int) -> None:
    """Ask one process to save and exit, if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
