"""One save from the snapshot to the commit. Each rank writes and confirms its part; rank 0 commits when all have.

A power cut or a kill at any moment leaves the old state or the new one: contents reach the disk before names, the
manifest before the rename, and the rename before `latest` moves and before anything old is deleted. No torch here.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

import lockstep
from lockstep import faults
from lockstep.checkpoint import format, retention
from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint.durable import cut, free_bytes, replace_file, spoken, sync_folder, write_chunks, write_file
from lockstep.checkpoint.format import Block, Layout
from lockstep.checkpoint.manifest import File, Manifest, Piece, TensorEntry
from lockstep.checkpoint.storage import Store, folder_name


@dataclass(frozen=True)
class Team:
    """Who writes, where to, and by which rules; the same for every save of a run."""

    store: Store
    rank: int
    size: int
    token: str
    retention: retention.Retention
    patience_s: float


@dataclass(frozen=True)
class Contents:
    """What this rank has to write. Rank 0's `aliases` and `values` count."""

    blocks: tuple[Block, ...]
    layout: Layout
    data: memoryview
    complete: Callable[[], None]  # raises if `data` cannot be what it should be
    aliases: dict[str, str]
    values: dict[str, Any]


class GivenUp(Exception):
    """This save will not be committed, and no disk is to blame."""


class Writing:
    """The state of one save. `run` may be called in a thread; the rest belongs to the thread that trains."""

    def __init__(self, team: Team, step: int, number: int):
        self.team, self.step = team, step
        self.folder = team.store.staged(step, team.token, str(number))
        self.committed: Path | None = None
        self.error: str | None = None
        self.missing_bytes: int | None = None
        self.bytes = 0
        self.write_s = 0.0
        self.part_ended = threading.Event()  # this rank's part is on disk, or never will be
        self._stop = threading.Event()
        self._why_stopped = ""
        self._began = time.perf_counter()

    @property
    def abandoned(self) -> bool:
        return self._stop.is_set()

    @property
    def failed(self) -> bool:
        return self.error is not None and self.committed is None and not self.abandoned

    def run(self, contents: Contents) -> None:
        """Write, confirm and (rank 0) commit. Never raises: what went wrong is in `error`."""
        self._began = time.perf_counter()
        self.bytes = contents.layout.file_size
        try:
            contents.complete()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_part(contents)
            self._stop_the_clock()
            self.part_ended.set()
            if self.team.rank == 0:
                self._commit(contents)
            self._go_on()
        except BaseException as error:  # in a thread nobody else would see it
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Keep the reason, free the disk, and let rank 0 know."""
        if self.committed is None:
            self.discard()
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                self.missing_bytes = max(1, self.bytes - free_bytes(self.team.store.root))
        self.error = self._words(error)
        if self.committed is None and self.team.rank != 0 and not self.abandoned:
            self._send({"error": self.error, "missing_bytes": self.missing_bytes})
        self.part_ended.set()

    def refuse(self, size: int, missing: int) -> None:
        """There is no room: nothing is written."""
        self.bytes, self.missing_bytes = size, missing
        self.fail(GivenUp(f"{self._no_room()}: {spoken(size)} to write, {spoken(missing)} too little"))

    def abandon(self, why: str) -> None:
        self._why_stopped = why
        self._stop.set()

    def discard(self) -> None:
        """Remove what this rank has staged; rank 0 removes everything. Does nothing once it is committed."""
        if self.team.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        for name in (format.part_name(self.team.rank), _confirmation(self.team.rank)):
            try:
                (self.folder / name).unlink(missing_ok=True)
            except OSError:
                pass  # a later start cleans up
        if self.abandoned:  # by all: until then rank 0 may be about to write into a folder that is still empty
            try:
                self.folder.rmdir()
            except OSError:
                pass  # others still have files in it

    # ---- every rank ----

    def _write_part(self, contents: Contents) -> None:
        name, digest = format.part_name(self.team.rank), xxhash.xxh3_128()
        write_chunks(self.folder / name, self._chunks(contents), digest.update)
        pieces = [
            [block.name, block.dtype, block.whole, key, block.offset, block.shape]
            for key, block in zip(
                contents.layout.keys, (contents.blocks[index] for index in contents.layout.order), strict=True
            )
        ]
        self._send({"size": self.bytes, "digest": digest.hexdigest(), "pieces": pieces})

    def _chunks(self, contents: Contents) -> Iterator[memoryview]:
        yield memoryview(contents.layout.header)
        chunks = cut(contents.data)
        for number, chunk in enumerate(chunks):
            self._go_on()
            if number == len(chunks) // 2 and faults.fire("write", self.step) == "disk full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield chunk

    def _send(self, confirmation: dict[str, Any]) -> None:
        """Tell rank 0 how this rank's part went."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            data = json.dumps(confirmation).encode()
            replace_file(self.folder / _confirmation(self.team.rank), data, sync_name=False)
        except OSError:
            if "error" not in confirmation:
                raise

    def _stop_the_clock(self) -> None:
        self.write_s = time.perf_counter() - self._began

    def _go_on(self) -> None:
        if self.abandoned:
            self.discard()
            raise GivenUp(self._why_stopped)

    # ---- rank 0 ----

    def _commit(self, contents: Contents) -> None:
        manifest = self._manifest(contents, self._confirmations())
        write_file(self.folder / manifests.NAME, manifests.encode(manifest))
        for rank in range(self.team.size):
            (self.folder / _confirmation(rank)).unlink()
        sync_folder(self.folder)
        store, final = self.team.store, self.team.store.root / folder_name(self.step)
        faults.fire("rename", self.step)
        if (owner := store.owner()) not in (None, self.team.token):
            raise GivenUp(f"another attempt has taken over this run (its token is {owner})")
        if final.exists():  # of another history, or damaged: this run is here now
            store.set_aside(final, "undone")
        os.rename(self.folder, final)
        sync_folder(store.root)
        self.committed = final
        faults.fire("latest", self.step)
        store.move_latest()
        self._stop_the_clock()
        retention.apply(store, self.team.retention, self.team.token)
        _spoil(final / format.part_name(0), faults.fire("committed", self.step))

    def _confirmations(self) -> list[dict[str, Any]]:
        """Those of all ranks, by rank. Waits for them, and not for ever."""
        found: dict[int, dict[str, Any]] = {}
        deadline, pause = time.monotonic() + self.team.patience_s, 0.01
        while True:
            for rank in set(range(self.team.size)) - found.keys():
                if (data := _read(self.folder / _confirmation(rank))) is not None:
                    found[rank] = self._checked(rank, json.loads(data))
            missing = sorted(set(range(self.team.size)) - found.keys())
            if not missing:
                return [found[rank] for rank in range(self.team.size)]
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, missing))
                raise GivenUp(f"no word from rank {ranks} for {self.team.patience_s:.0f} s, waiting for their parts")
            self._stop.wait(pause)
            self._go_on()
            pause = min(pause * 1.5, 0.25)

    def _checked(self, rank: int, confirmation: dict[str, Any]) -> dict[str, Any]:
        if "error" in confirmation:
            self.missing_bytes = confirmation["missing_bytes"]
            raise GivenUp(f"rank {rank}: {confirmation['error']}")
        size = (self.folder / format.part_name(rank)).stat().st_size
        if size != confirmation["size"]:
            raise GivenUp(f"rank {rank} wrote {confirmation['size']:,} bytes, and {size:,} are there")
        return confirmation

    def _manifest(self, contents: Contents, confirmations: list[dict[str, Any]]) -> Manifest:
        wholes: dict[str, tuple[str, tuple[int, ...]]] = {}
        pieces: dict[str, list[Piece]] = {}
        files = []
        for rank, confirmation in enumerate(confirmations):
            file = format.part_name(rank)
            files.append(File(file, confirmation["size"], confirmation["digest"]))
            for name, dtype, whole, key, offset, shape in confirmation["pieces"]:
                if wholes.setdefault(name, (dtype, tuple(whole))) != (dtype, tuple(whole)):
                    raise GivenUp(f"the ranks do not agree on the dtype and shape of {name!r}")
                pieces.setdefault(name, []).append(Piece(file, key, tuple(offset), tuple(shape)))
        tensors = {name: TensorEntry(*whole, tuple(pieces[name])) for name, whole in wholes.items()}
        made = Manifest(
            self.step, time.time(), lockstep.__version__, tuple(files), tensors, contents.aliases, contents.values
        )
        manifests.decode(manifests.encode(made), self.folder)  # nothing is committed that could not be loaded
        return made

    # ---- words ----

    def _words(self, error: BaseException) -> str:
        if self.abandoned:
            return self._why_stopped
        if isinstance(error, GivenUp | manifests.Damaged):
            return str(error)
        if isinstance(error, FileNotFoundError) and not self.folder.exists() and self.committed is None:
            return "rank 0 gave up, or another attempt has taken over: the staged folder is gone"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{self._no_room()} while writing {spoken(self.bytes)}"
        return f"{type(error).__name__}: {error}"

    def _no_room(self) -> str:
        return f"no space left on the disk of {self.team.store.root}"


def _confirmation(rank: int) -> str:
    return f"part-{rank:05d}.json"


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _spoil(path: Path, how: str | None) -> None:
    """Faults on purpose: what a bad disk would do to a committed file."""
    middle = path.stat().st_size // 2
    if how == "truncate":
        os.truncate(path, middle)
    elif how == "corrupt":
        with open(path, "r+b") as file:
            file.seek(middle)
            byte = file.read(1)
            file.seek(middle)
            file.write(bytes([byte[0] ^ 0x10]))
