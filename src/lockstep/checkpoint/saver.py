"""Saving while training goes on: a snapshot now, the writing in a thread, the news when it is asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.durable import free_bytes as free_bytes
from lockstep.checkpoint.json_values import from_json, to_json
from lockstep.checkpoint.retention import Retention as Retention
from lockstep.checkpoint.snapshot import Copying, Snapshot
from lockstep.checkpoint.snapshot import Slice as Slice
from lockstep.checkpoint.storage import Store
from lockstep.checkpoint.writer import Contents, Team, Writing


@dataclass(frozen=True)
class Report:
    """How a save ended on this rank. Only rank 0 commits: on other ranks `committed` is always False."""

    step: int
    committed: bool
    path: Path | None
    bytes: int  # of this rank's file
    stall_s: float  # how long training waited
    write_s: float
    error: str | None
    missing_bytes: int | None  # how much too small the disk is, where that was the reason


class Saver:
    """One rank's side of every save of a run. All ranks call `save` for the same steps; one save is in flight."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        token: str,
        retention: Retention,
        asynchronous: bool = True,
        patience_s: float = 600.0,
    ):
        assert token.isalnum(), token
        self._team = Team(store, rank, size, token, retention, patience_s)
        self._asynchronous = asynchronous
        self._snapshot = Snapshot()
        self._writing: Writing | None = None  # the last one, in flight or not
        self._thread: threading.Thread | None = None  # of the one in flight
        self._copying: Copying | None = None
        self._stall_s = 0.0
        self._reports: list[Report] = []
        self._saves = 0

    def prepare(self, slices: Sequence[Slice]) -> int:
        """Make the buffer for saves of `slices`, so that the first one is as quick as the others. Bytes of a save."""
        self._finish()
        return self._snapshot.fit(slices).file_size

    def save(
        self,
        step: int,
        slices: Sequence[Slice],
        aliases: Mapping[str, str],
        values: Mapping[str, Any],
        steady: Collection[str] = (),
    ) -> None:
        """Copy the state, and start to write it. Waits for the save in flight, since there is one buffer.

        The slices named in `steady` are copied while training goes on: nobody may change them before `let_change`.
        """
        began = time.perf_counter()
        self._finish()
        plain = from_json(to_json(dict(values)))  # a copy: training goes on changing them
        layout = self._snapshot.fit(slices)
        self._saves += 1
        self._writing = writing = Writing(self._team, step, self._saves)
        needed = self._team.size * (layout.file_size + layout.file_size // 100)  # the others write about as much
        if (free := free_bytes(self._team.store.root)) < needed:
            writing.refuse(layout.file_size, needed - free)
        else:
            self._copying = copying = self._snapshot.take(slices, steady if self._asynchronous else ())
            blocks, data = tuple(self._snapshot.blocks), self._snapshot.data()
            self._start(writing, Contents(blocks, layout, data, copying.run, dict(aliases), plain))
        self._stall_s = time.perf_counter() - began
        if self._thread is None:
            self._report(writing)

    def let_change(self) -> None:
        """Before the state changes: wait until it has been copied. Costs nothing when nothing is being copied."""
        if self._copying is not None:
            began = time.perf_counter()
            self._copying.wait()
            self._copying = None
            self._stall_s += time.perf_counter() - began

    @property
    def trouble(self) -> str | None:
        """Why the last save failed on this rank, until that save is abandoned or another begins."""
        return self._writing.error if self._writing is not None and self._writing.failed else None

    @property
    def failed(self) -> bool:
        return self.trouble is not None

    def wait_part(self) -> None:
        """Until this rank's own part is on disk, or has failed; rank 0 may still be waiting for the others."""
        if self._writing is not None:
            self._writing.part_ended.wait()

    def abandon(self, why: str) -> None:
        """Some rank's part failed: nobody commits this save, and what is staged of it goes."""
        if self._writing is not None:
            self._writing.abandon(why)
            if self._thread is None:
                self._writing.discard()

    def poll(self) -> list[Report]:
        """The saves that ended since the last time."""
        if self._thread is not None and not self._thread.is_alive():
            self._finish()
        found, self._reports = self._reports, []
        return found

    def wait(self, timeout: float | None = None) -> list[Report]:
        """Until nothing is in flight, or for `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self.poll()

    def close(self) -> None:
        """Give up what is in flight (call `wait` first to have it), and let go of the buffer."""
        if self._thread is not None:
            self.abandon("the run ended before this checkpoint was written")
            self._finish()
        self._snapshot.release()

    def _start(self, writing: Writing, contents: Contents) -> None:
        if self._asynchronous:
            self._thread = threading.Thread(target=writing.run, args=(contents,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            writing.run(contents)

    def _finish(self) -> None:
        """Wait for the save in flight, and keep its report."""
        if self._thread is not None and self._writing is not None:
            self._thread.join()
            self._thread = None
            if self._writing.abandoned:
                self._writing.discard()
            self._report(self._writing)

    def _report(self, writing: Writing) -> None:
        done = writing.committed
        self._reports.append(
            Report(
                step=writing.step,
                committed=done is not None,
                path=done,
                bytes=writing.bytes,
                stall_s=self._stall_s,
                write_s=writing.write_s,
                error=writing.error,
                missing_bytes=writing.missing_bytes,
            )
        )
