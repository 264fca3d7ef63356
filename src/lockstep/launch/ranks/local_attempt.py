"""The ranks of one attempt on this node, and the folder that they share with their launcher."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from lockstep.launch import records
from lockstep.launch.hangs import flight_recorder, stacks
from lockstep.launch.hangs.suspicion import process_stat, view_of
from lockstep.launch.ranks import post_mortem
from lockstep.launch.ranks.local_rank import LocalRank
from lockstep.launch.ranks.zygote import kill_process_group
from lockstep.launch.wire.messages import NodeBeat, Stacks, Start
from lockstep.runtime.preemption import PREEMPT_FILE

# How long ranks have to write their stacks, and then their collectives. The agent does nothing else meanwhile, and its
# last heartbeat may be BEAT_S old: together with BEAT_S, the sum must stay below LOST_AFTER_S.
RANKS_STACKS_S = 1.5
COLLECTIVES_S = 1.5

# How many characters the stacks of all ranks of a node may have: a message has a largest size. The main thread of a
# rank is at the end of its text.
STACKS_SIZE = 4 * 2**20

# How often the files that ranks share with their launcher are touched.
TOUCH_S = 3600.0

# How often OOM kills are counted again. A rank that the kernel kills may take a while to end, because its memory is
# freed first: so a rank's end is compared with the count before the last one.
COUNT_OOM_KILLS_S = 30.0


class LocalAttempt:
    """The ranks of one attempt on this node, which write their logs to `logs`."""

    def __init__(self, start: Start, host: str, logs: Path):
        self.number = start.attempt
        self._host = host
        self._logs = logs

        # Heartbeats, failure records, stacks and settings. Readable by this user alone.
        self.folder = Path(tempfile.mkdtemp(prefix="lockstep-"))
        self._touched = time.monotonic()

        # A pipe that carries no data. Ranks hold its read end, the lifeline, and kill themselves when the write end is
        # closed: by this process, or by the kernel because this process is dead.
        self.lifeline, write_end = os.pipe()
        self._lifeline_writer = os.fdopen(write_end, "wb", buffering=0)

        # If a later count of OOM kills is larger than this one, the kernel killed a rank for lack of memory.
        self._oom_kills = post_mortem.oom_kills()
        self._oom_kills_counted = time.monotonic()

        # The ranks that have not ended, by number.
        numbers = range(start.first_rank, start.first_rank + start.count)
        self.ranks = {number: self._local_rank(number, self._oom_kills) for number in numbers}

        # The processes of ranks whose zygote was lost: there is no other way to learn of their end than to look.
        self._orphans: set[int] = set()

        # Whether the ranks were asked to save and exit, and when they were killed.
        self.preempted = False
        self.killed_at: float | None = None

    def _local_rank(self, number: int, oom_kills: int | None) -> LocalRank:
        """Return a rank whose process does not exist yet."""
        # Rank 0 writes to the terminal. All attempts append to the same logs, so note where this attempt begins.
        log = self._logs / f"rank-{number}.log" if number else None
        began = log.stat().st_size if log and log.exists() else 0
        return LocalRank(number, self._host, self.folder, log, began, oom_kills)

    # ---- while they run ----

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the ranks that exist, by rank."""
        return {number: rank.pid for number, rank in self.ranks.items() if rank.pid}

    def _touch_files(self) -> None:
        """Touch all files now and then, because some systems remove files from /tmp that were not touched for days."""
        if time.monotonic() - self._touched > TOUCH_S:
            self._touched = time.monotonic()

            # If the folder is gone, the ranks' own errors say so.
            with suppress(OSError):
                for path in (self.folder, *self.folder.iterdir()):
                    os.utime(path)

    def _count_oom_kills(self) -> None:
        """Count OOM kills again now and then, so that one of long ago is not taken for the cause of a later SIGKILL."""
        if time.monotonic() - self._oom_kills_counted > COUNT_OOM_KILLS_S:
            for rank in self.ranks.values():
                rank.oom_kills_before = self._oom_kills

            self._oom_kills = post_mortem.oom_kills()
            self._oom_kills_counted = time.monotonic()

    def beat(self) -> NodeBeat:
        """Return the heartbeats of all ranks, and the task's settings. Called about once a second."""
        self._touch_files()
        self._count_oom_kills()

        # There is no view of a rank that died before its first heartbeat.
        views = [view_of(number, self._host, pid, self.folder) for number, pid in self.pids.items()]

        # Rank 0 renames the file into place once it has read the configuration.
        settings = json.loads(records.read(self.folder / "settings.json") or "{}")

        return NodeBeat([view for view in views if view is not None], settings, self.number)

    def collect_stacks(self) -> Stacks:
        """Return the stacks of all living ranks. One that does not answer has an empty stack, and no collectives."""
        answers = stacks.collect(self.folder, self.pids, RANKS_STACKS_S)
        answering = [rank for rank, text in answers.items() if text]
        recorded = flight_recorder.collect(self.folder, answering, COLLECTIVES_S)

        # The last 100 collectives are enough to compare ranks.
        most = STACKS_SIZE // max(len(answers), 1)
        texts = {rank: stacks.comparable(text)[-most:] for rank, text in answers.items()}
        last = {rank: flight_recorder.comparable(entries[-100:]) for rank, entries in recorded.items()}
        return Stacks.of(self.number, texts, last)

    # ---- their end ----

    def preempt(self, signal: str | None = None) -> None:
        """Ask the ranks to save and exit; `signal` is the one that asks for it.

        The ranks always get SIGTERM. Their worker processes get no signal: ranks need them until the save.
        """
        self.preempted = True

        # Without this file, the ranks name SIGTERM as the signal that ended them.
        with suppress(OSError):
            records.write(self.folder / PREEMPT_FILE, signal or "")

        for pid in self.pids.values():
            _preempt_rank(pid)

    def kill_all(self) -> None:
        """Kill every rank of this node with its worker processes, and close the lifeline."""
        self._lifeline_writer.close()
        for pid in self.pids.values():
            kill_process_group(pid)

    def rank_started(self, rank: LocalRank, pid: int) -> None:
        """Note the process of a rank, and carry out the orders that came before it existed."""
        rank.pid = pid

        if self.killed_at is not None:
            kill_process_group(pid)
        elif self.preempted:
            _preempt_rank(pid)

    def zygote_lost(self) -> None:
        """Kill the ranks, because no process reports their ends any more."""
        self.kill_all()
        self._orphans |= set(self.pids.values())
        self.ranks.clear()

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
        return not self.ranks and not self.any_process_left

    def close(self) -> None:
        """Kill the ranks that are left, and remove what they shared with their launcher."""
        self.kill_all()
        os.close(self.lifeline)
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_left(pid: int) -> bool:
    stat = process_stat(pid)
    return bool(stat) and stat[0] not in ("Z", "X")


def _preempt_rank(pid: int) -> None:
    """Ask one process to save and exit, if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
