"""The command that stays while a job runs on several hosts: it logs in, prints what they say, and passes signals on."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from queue import Empty, Queue
from types import TracebackType
from typing import Any

from lockstep.clusters.hosts import Event, Host, Login, login_words
from lockstep.clusters.tether import SAVE_S, Training
from lockstep.errors import ExitCode, UserError, printable

# How long a host may take to answer before the job starts: a login, and an import.
ANSWER_S = 60.0

# How long the other hosts may take to end when one has ended, or when too few are left for the job.
END_S = 15.0

# The pause before another login to a host that was lost.
AGAIN_S = 3.0

# A third signal does not wait for anybody.
PATIENT_SIGNALS = 2


class Logins:
    """The logins to all hosts of a job, as a context: when it ends, no login is left."""

    def __init__(self, hosts: Sequence[Host], ssh: str, folder: str, python: str):
        self.hosts = list(hosts)
        self._ssh = ssh
        self._folder = folder
        self._python = python
        self._events: Queue[Event] = Queue()
        self._logins: list[Login] = []

    def __enter__(self) -> Logins:
        try:
            for place in range(len(self.hosts)):
                self._logins.append(self._log_in(place, 1))
        except BaseException:
            self._end()
            raise

        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _log_in(self, place: int, number: int) -> Login:
        host = self.hosts[place]
        words = login_words(host, self._ssh, self._folder, self._python)
        try:
            return Login(host, place, number, words, self._events)
        except OSError as error:
            raise UserError(
                f"{words[0]} cannot be started, to log in to {host.name}",
                error.strerror or str(error),
                'install it, or name another command with --ssh "COMMAND"',
            ) from None

    def _end(self) -> None:
        for login in self._logins:
            login.hang_up()

        # The other side saves and ends by itself. Ours is killed if the network keeps it from noticing.
        deadline = time.monotonic() + SAVE_S + 2.0
        for login in self._logins:
            while login.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            login.kill()

    # ---- before the start ----

    def ask(self, places: Iterable[int], request: dict[str, Any], key: str) -> list[dict[str, Any]]:
        """Send a request to hosts and return their answers, which have `key` or "problem". Raises a UserError."""
        waiting = list(places)
        answers: dict[int, dict[str, Any]] = {}
        for place in waiting:
            self._logins[place].send(request)

        deadline = time.monotonic() + ANSWER_S
        while missing := [place for place in waiting if place not in answers]:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                raise self._no_answer(missing[0], f"nothing within {ANSWER_S:.0f} s") from None

            if event.code is not None:
                raise self._no_answer(event.host, f"exit code {event.code}")
            if event.answer is not None and (key in event.answer or "problem" in event.answer):
                answers[event.host] = event.answer

        return [answers[place] for place in waiting]

    def _no_answer(self, place: int, what: str) -> UserError:
        host, login = self.hosts[place], self._logins[place]
        words = " ".join(login.last_errors) or what
        test = f"cd {shlex.quote(self._folder)} && {shlex.quote(self._python)} -m lockstep --version"
        if host.is_here():
            return UserError(f"the launcher of {host.name} does not start", words, f"try: {test}")

        return UserError(
            f"{host.name} cannot be logged in to, or has no Lockstep at the same path",
            words,
            f"try: {self._ssh} {host.login} {shlex.quote(test)}; --ssh and --python change what is run",
        )

    # ---- the job ----

    def train(self, jobs: Sequence[Training], least: int) -> int:
        """Start the job on all hosts and stay until it has ended. Returns its exit code."""
        from lockstep.launch.supervisor import collect_signals

        with collect_signals() as signals:
            return _Watch(self, jobs, least, signals).run()

    # For `_Watch`, which replaces logins that were lost.
    def log_in_again(self, place: int) -> None:
        login = self._logins[place]
        self._logins[place] = self._log_in(place, login.number + 1)

    def send(self, place: int, request: dict[str, Any]) -> None:
        self._logins[place].send(request)

    def hang_up(self) -> None:
        for login in self._logins:
            login.hang_up()

    def next_event(self, seconds: float) -> Event | None:
        """Return what came from a login that is still the host's newest one."""
        try:
            event = self._events.get(timeout=seconds)
        except Empty:
            return None

        return event if event.login == self._logins[event.host].number else None


class _Watch:
    """Watches the hosts of one job while it runs."""

    def __init__(self, logins: Logins, jobs: Sequence[Training], least: int, signals: list[str]):
        self._logins = logins
        self._jobs = jobs
        self._least = least
        self._signals = signals
        self._count_of_signals = 0

        # How each host ended: its launcher's exit code; None where the login was lost.
        self._ended: dict[int, int | None] = {}

        # When a lost host is tried again, and by when all hosts must have ended.
        self._again: dict[int, float] = {}
        self._deadline: float | None = None

    def run(self) -> int:
        for place, job in enumerate(self._jobs):
            self._logins.send(place, {"start": asdict(job)})

        while len(self._ended) < len(self._jobs):
            if event := self._logins.next_event(0.1):
                self._handle(event)

            while self._signals:
                self._pass_on(self._signals.pop(0))

            now = time.monotonic()
            self._try_again(now)
            if self._deadline is not None and now > self._deadline:
                self._logins.hang_up()
                self._deadline = None

        return self._code()

    def _handle(self, event: Event) -> None:
        place = event.host
        if event.line is not None:
            mark = "" if place == 0 else f"[{self._logins.hosts[place].name}] "
            # What a host is tried with again after a loss fails in the same words every time.
            if place not in self._again:
                print(f"{mark}{event.line}", file=sys.stderr if event.is_error else sys.stdout, flush=True)
        elif event.answer is not None and "ended" in event.answer:
            self._ended[place] = event.answer["ended"]
            self._expect_the_end()
        elif event.answer is not None and "facts" in event.answer:
            # A host that was lost is back.
            del self._again[place]
            self._ended.pop(place, None)
            self._say(f"{self._logins.hosts[place].name} is back")
            self._logins.send(place, {"start": asdict(self._jobs[place])})
        elif event.code is not None and place not in self._ended:
            self._lose(place, event.code)
        elif event.code is not None and place in self._again:
            self._again[place] = time.monotonic() + AGAIN_S

    def _lose(self, place: int, code: int) -> None:
        """Note that a login has ended before its launcher did: the host is lost, or the way to it."""
        self._ended[place] = None
        name = self._logins.hosts[place].name
        left = len(self._jobs) - len(self._ended)
        if left >= self._least and self._deadline is None:
            self._say(f"the login to {name} has ended (exit code {code}); trying again while the job runs")
            self._again[place] = time.monotonic() + AGAIN_S
        else:
            self._say(f"the login to {name} has ended (exit code {code})")
            self._expect_the_end()

    def _try_again(self, now: float) -> None:
        for place, when in self._again.items():
            if now >= when and self._deadline is None:
                self._again[place] = float("inf")  # until this login has ended, too
                self._logins.log_in_again(place)
                self._logins.send(place, {"look": {"target": self._jobs[place].target, "hosts": [], "files": []}})

    def _expect_the_end(self) -> None:
        """All launchers of a job end with it; one that cannot know that the job is over is asked to end."""
        if self._deadline is None:
            self._deadline = time.monotonic() + END_S

    def _pass_on(self, signal: str) -> None:
        """Pass a signal on to one host: its launcher asks the whole job to save and stop."""
        self._count_of_signals += 1
        if self._count_of_signals > PATIENT_SIGNALS:
            self._logins.hang_up()
            return

        first = next(place for place in range(len(self._jobs)) if place not in self._ended)
        self._logins.send(first, {"signal": signal})

    def _code(self) -> int:
        """Return the job's exit code: all launchers of a job have the same one, unless some never knew its end."""
        known = set(self._ended.values())
        first = (ExitCode.FINISHED, ExitCode.REFUSED, ExitCode.INTERRUPTED, ExitCode.RESTART)
        return next((code for code in first if code in known), ExitCode.FAILED)

    def _say(self, text: str) -> None:
        print(printable(f"lockstep: {text}"), file=sys.stderr, flush=True)
