"""The launcher's side of the zygote (`zygote.py`): it starts that process, asks it for ranks and reads its reports."""

from __future__ import annotations

import json
import math
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
from lockstep.launch.times import HELD_UP_S, ZYGOTE_END_S
from lockstep.launch.wire.sockets import LineReader

# How long the zygote's imports may take, from a slow shared disk, and how long it may take to answer a request.
READY_S = 600.0
ANSWER_S = 15.0

# The pause between two tries to start the process, if the system refuses it.
START_RETRY_S = 0.5


class ZygoteClient:
    """A zygote process, as its launcher sees it.

    The system may refuse the process: there are too many, or there is too little memory. `poll` then tries again for
    `patience` seconds, while requests wait. Without patience the error is raised at once.
    """

    def __init__(self, entry: str, preload: Sequence[str], env: Mapping[str, str], patience: float = 0.0):
        self.env = dict(env)
        self.alive = True
        self._arguments = [entry, *preload]

        # The process, and the socket to it with the lines that arrive there; None until the system has allowed it.
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lines: LineReader | None = None

        # Why the last try to start it failed, when the next try is due, and when to give up.
        self.refusal: OSError | None = None
        self._try_again_at = math.inf
        self._patience = patience
        self._give_up_at = time.monotonic() + patience

        # Whether its imports are done. Until then requests wait here, with their file descriptors.
        self.ready = False
        self._imports_too_long = False
        self._unsent: list[tuple[bytes, list[int]]] = []

        # Why it was killed here, as a verb phrase; empty if it was not.
        self._why_killed = ""

        # How many requests were sent and not answered yet, and since when the zygote could have answered the first of
        # them: since it was sent, since the imports were done, or since the last answer. A slow zygote is killed.
        self._unanswered = 0
        self._since = time.monotonic()

        self._start()
        if self.refusal is not None and not patience:
            raise self.refusal

    def _start(self) -> None:
        """Try to start the process."""
        python = [sys.executable, "-P", "-m", "lockstep.launch.ranks.zygote"]
        try:
            ours, theirs = socket.socketpair()
            try:
                self._process = subprocess.Popen(
                    # -P: a file in the working folder must not replace a standard module of the same name.
                    [*python, str(theirs.fileno()), *self._arguments],
                    env=self.env,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # so that Ctrl-C at the terminal reaches only the launcher
                )
            except OSError:
                ours.close()
                raise
            finally:
                theirs.close()

        except OSError as error:
            self.refusal = error
            self._try_again_at = time.monotonic() + START_RETRY_S
            return

        self.refusal = None
        self._try_again_at = math.inf
        self._since = time.monotonic()

        self._socket = ours
        self._lines = LineReader(self._socket)

    @property
    def pid(self) -> int | None:
        """The zygote's process; None if it was never started."""
        return self._process.pid if self._process is not None else None

    @property
    def sockets(self) -> list[socket.socket]:
        """What to wait for: reports of the zygote, if it was started."""
        return [self._socket] if self.alive and self._socket is not None else []

    # ---- requests ----

    def fork(
        self,
        rank: int,
        env: Mapping[str, str],
        spec: dict[str, Any],
        log: Path | None,
        lifeline: int,
        attempt: int = 0,
    ) -> None:
        """Ask for a rank, whose reports name `attempt` and `rank`. Its `lifeline` closes when the launcher dies.

        `env` has its rank among its peers, which is another number where one zygote serves several worlds
        (`lockstep verify`).
        """
        where = {"attempt": attempt, "rank": rank, "log": str(log) if log else None}
        request = json.dumps({**where, "env": dict(env), "spec": spec})
        if not self._awaits_answer:
            self._since = time.monotonic()

        self._unsent.append((request.encode(), [os.dup(lifeline)]))
        self._send()

    @property
    def _awaits_answer(self) -> bool:
        """Whether there are requests that the zygote has not answered yet, sent or not."""
        return bool(self._unsent) or self._unanswered > 0

    def _send(self) -> None:
        """Send the requests that wait, if the zygote can take them. A suspended one reads nothing."""
        while self.ready and self.alive and self._unsent:
            assert self._socket is not None
            request, fds = self._unsent.pop(0)
            self._unanswered += 1
            # The length comes first, together with the lifeline: a descriptor needs at least one byte of data.
            data = len(request).to_bytes(LENGTH_BYTES) + request
            give_up_at = time.monotonic() + HELD_UP_S
            try:
                self._socket.settimeout(HELD_UP_S)
                sent = socket.send_fds(self._socket, [data], fds)

                # Both parts together may take that long. 0 would mean a socket that does not wait at all.
                self._socket.settimeout(max(give_up_at - time.monotonic(), 0.001))
                self._socket.sendall(data[sent:])
            except TimeoutError:
                self.kill_zygote(f"did not take a request within {HELD_UP_S:.0f} s")
            except OSError:
                self.alive = False
            finally:
                close_all(fds)

    def drop_unsent(self) -> None:
        """Drop the requests that have not been sent yet."""
        for _, fds in self._unsent:
            close_all(fds)

        self._unsent.clear()

    # ---- reports ----

    def poll(self) -> list[RankChange]:
        """Return the ranks that have started or ended since the last call."""
        if self._process is None:
            self._try_again()

        # The reports come first: if this launcher was halted itself, answers may have arrived meanwhile.
        changes = self._read_reports()

        # A zygote that is halted, or stalls in an import, answers no request.
        timeout = ANSWER_S if self.ready else READY_S
        if self.alive and self._awaits_answer and time.monotonic() - self._since > timeout:
            self._imports_too_long = not self.ready
            what = "answer a request" if self.ready else "finish its imports"
            self.kill_zygote(f"did not {what} within {timeout:.0f} s")

        return changes

    def _read_reports(self) -> list[RankChange]:
        """Read what the zygote has reported, and note what that says about the zygote itself."""
        if not self.alive or self._lines is None:
            return []

        # If nothing more will arrive, the process has ended.
        lines = self._lines.read()
        self.alive = not self._lines.ended

        # Its first line only says that the imports are done; requests can be sent from now on.
        if not self.ready and lines:
            del lines[0]
            self.ready = True
            self._since = time.monotonic()
            self._send()

        changes = [RankChange(**json.loads(line)) for line in lines]
        answers = sum(change.answers_request for change in changes)
        if answers:
            self._unanswered -= answers
            self._since = time.monotonic()

        return changes

    def _try_again(self) -> None:
        """Try again to start the process, if that is due, or give up."""
        now = time.monotonic()
        if now >= self._give_up_at:
            self.alive = False
        elif now >= self._try_again_at:
            self._start()

    # ---- its end ----

    def kill_zygote(self, why: str) -> None:
        """Kill the zygote, and with it the ranks that it forked: the kernel kills them (`die_with_parent`).

        `why`: a verb phrase, for `how_it_ended`.
        """
        if self._process is not None:
            self._process.kill()

        self._why_killed = why
        self.alive = False

    def close(self) -> None:
        """End the zygote, which kills the ranks that it forked."""
        self.alive = False
        self.drop_unsent()
        if self._process is None or self._socket is None or self._lines is None:
            return

        self._socket.close()

        # While it imports, it does not notice that the socket is closed. If it has closed its own end, it is about to
        # end by itself, and its exit code says why.
        try:
            self._process.wait(timeout=ZYGOTE_END_S if self.ready or self._lines.ended else 0.0)
        except subprocess.TimeoutExpired:
            self.kill_zygote(self._why_killed or f"closed its connection, and did not end within {ZYGOTE_END_S:.0f} s")
            self._process.wait()

    # ---- after its end ----

    @property
    def cannot_import(self) -> bool:
        """Whether its imports failed or took too long: the next zygote's most likely would as well.

        A signal that killed it while it imported, for example the OOM killer's, says nothing about the imports.
        """
        if self.ready or self._process is None:
            return False

        return self._imports_too_long or self._exit_code >= 0

    @property
    def how_it_ended(self) -> str:
        """How it ended, as a verb phrase."""
        if self.refusal is not None:
            return f"could not be started within {self._patience:.0f} s: {self.refusal.strerror or self.refusal}"

        if self._why_killed:
            return self._why_killed

        when = "" if self.ready else " while importing"
        if self._exit_code < 0:
            return f"was killed by {signal_name(-self._exit_code)}{when}"

        if self.ready:
            return f"exited with code {self._exit_code}"

        return "exited while importing; the error is on that node's terminal"

    @property
    def _exit_code(self) -> int:
        """The exit code after `close`; a negative one is a signal."""
        code = self._process.returncode if self._process is not None else None
        assert code is not None, "the zygote is closed first"
        return code
