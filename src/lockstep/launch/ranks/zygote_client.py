"""The launcher's side of the zygote (`zygote.py`): it starts that process, asks it for ranks and reads its reports."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.launch.ranks.post_mortem import signal_name
from lockstep.launch.ranks.zygote import LENGTH_BYTES, RankChange, close_all
from lockstep.launch.wire.sockets import LineReader

# How long the zygote's imports may take, from a slow shared disk, and how long it may take to answer requests.
READY_S = 600.0
ANSWER_S = 15.0


class ZygoteClient:
    """A zygote process, as its launcher sees it."""

    def __init__(self, entry: str, preload: Sequence[str], env: Mapping[str, str]):
        self.env = dict(env)
        self.alive = True

        # Whether its imports are done. Until then requests wait here, with their file descriptors.
        self.ready = False
        self._imports_too_long = False
        self._unsent: list[tuple[bytes, list[int]]] = []

        # The number of requests without an answer, and the time of the first of them. A zygote that does not answer in
        # time is killed.
        self._unanswered = 0
        self._since = time.monotonic()

        # The timeout is for writing a request, because a suspended zygote reads nothing.
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(3.0)
        self._lines = LineReader(self._socket)

        with theirs:
            self._process = subprocess.Popen(
                # -P: a file in the working folder must not replace a standard module of the same name.
                [sys.executable, "-P", "-m", "lockstep.launch.ranks.zygote", str(theirs.fileno()), entry, *preload],
                env=self.env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C at the terminal reaches only the launcher
            )

        self.pid = self._process.pid

    def fileno(self) -> int:
        return self._socket.fileno()

    # ---- requests ----

    def fork(self, rank: int, env: Mapping[str, str], spec: dict[str, Any], log: Path | None, lifeline: int) -> None:
        """Ask for a rank, whose reports have the number `rank`. Its `lifeline` closes when the launcher dies.

        `env` has its rank among its peers, which is another number where one zygote serves several worlds
        (`lockstep verify`).
        """
        request = json.dumps({"rank": rank, "env": dict(env), "spec": spec, "log": str(log) if log else None})

        self._unsent.append((request.encode(), [os.dup(lifeline)]))

        # The limit for an answer begins with the first request that has none.
        if not self._unanswered:
            self._since = time.monotonic()

        self._unanswered += 1
        self._send()

    def _send(self) -> None:
        """Send the requests that wait, if the zygote can take them."""
        while self.ready and self.alive and self._unsent:
            request, fds = self._unsent.pop(0)
            # The length comes first, together with the lifeline: a descriptor needs at least one byte of data.
            try:
                socket.send_fds(self._socket, [len(request).to_bytes(LENGTH_BYTES)], fds)
                self._socket.sendall(request)
            except OSError:
                self.alive = False
            finally:
                close_all(fds)

    def drop_unsent(self) -> None:
        """Drop the requests that have not been sent yet."""
        for _, fds in self._unsent:
            close_all(fds)

        self._unanswered -= len(self._unsent)
        self._unsent.clear()

    # ---- reports ----

    def poll(self) -> list[RankChange]:
        """Return the ranks that have started or ended since the last call."""
        # A zygote that is halted, or stalls in an import, answers no request.
        timeout = ANSWER_S if self.ready else READY_S
        if self.alive and self._unanswered and time.monotonic() - self._since > timeout:
            self._imports_too_long = not self.ready
            self.kill_zygote()

        # If nothing more will arrive, the process has ended.
        lines = self._lines.read() if self.alive else []
        self.alive = self.alive and not self._lines.ended

        # Its first line only says that the imports are done; requests can be sent from now on.
        if not self.ready and lines:
            del lines[0]
            self.ready = True
            self._since = time.monotonic()
            self._send()

        changes = [RankChange(**json.loads(line)) for line in lines]
        self._unanswered -= sum(change.answers_request for change in changes)

        return changes

    # ---- its end ----

    def kill_zygote(self) -> None:
        """Kill the zygote, and with it the ranks that it forked: the kernel kills them (`die_with_parent`)."""
        self._process.kill()
        self.alive = False

    def close(self) -> None:
        """End the zygote, which kills the ranks that it forked."""
        self.alive = False
        self.drop_unsent()
        self._socket.close()

        # While it imports, it does not notice that the socket is closed. If it has closed its own end, it is about to
        # end by itself, and its exit code says why.
        try:
            self._process.wait(timeout=2.0 if self.ready or self._lines.ended else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # ---- after its end ----

    @property
    def cannot_import(self) -> bool:
        """Whether its imports failed or took too long: the next zygote's most likely would as well.

        A zygote that a signal killed while it imported, like the OOM killer's, says nothing about its imports.
        """
        if self.ready:
            return False

        return self._imports_too_long or self._exit_code >= 0

    @property
    def how_it_ended(self) -> str:
        """How it ended, as a verb phrase."""
        if self.ready:
            return "died"

        if self._imports_too_long:
            return f"did not finish its imports within {READY_S:.0f} s"

        if self._exit_code >= 0:
            return "exited while importing; the error is on that node's terminal"

        return f"was killed by {signal_name(-self._exit_code)} while importing"

    @property
    def _exit_code(self) -> int:
        """The exit code after `close`; a negative one is a signal."""
        assert self._process.returncode is not None, "the zygote is closed first"
        return self._process.returncode
