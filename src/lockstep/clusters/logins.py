"""The command that stays while a job runs on several hosts: it logs in, prints what they say, and passes signals on.

A job outlives a lost host if enough others are left: this command logs in to the host again while the job runs. If this
command is killed, or its machine is lost, the tethers break, and all hosts save and end by themselves. So no process is
ever left behind that nothing watches.
"""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from queue import Empty, Queue
from types import TracebackType
from typing import TypeVar

from lockstep.clusters.hosts import Event, Host, Login, login_words, split_ssh
from lockstep.clusters.tether import BEAT_S, SAVE_S
from lockstep.clusters.tether_messages import (
    Answer,
    Beat,
    Ended,
    HostFacts,
    HostProblem,
    Look,
    PassSignal,
    Request,
    StartTraining,
)
from lockstep.errors import ExitCode, Preempted, UserError, printable
from lockstep.launch.terminal import write

# How long a host may take to answer before the job starts: a login, and an import.
ANSWER_S = 60.0

# How long the other hosts may take to end when one has ended, or when too few are left for the job.
END_S = 15.0

# The pause before another login to a host that was lost.
RETRY_S = 3.0

# The longest wait for a host's last lines after its launcher has ended: a login ends at once, unless its link is cut.
LAST_LINES_S = 3.0

# After this many signals, another one does not wait for the hosts.
PATIENT_SIGNALS = 2


# A kind of answer.
Kind = TypeVar("Kind")


class Logins:
    """The logins to all hosts of a job, as a context: when it ends, no login is left.

    A host is named by its place in the list of hosts. `ssh` is the command of --ssh, `folder` the working folder and
    `python` the interpreter, both of them at the same path on every host.

    Threads of each login put what it says into one queue, and another thread sends beats. Everything else is done by
    the thread that has made this object.
    """

    def __init__(self, hosts: Sequence[Host], ssh: str, folder: str, python: str):
        split_ssh(ssh)  # raises a UserError now, before any login
        self.hosts = list(hosts)
        self._ssh = ssh
        self._folder = folder
        self._python = python

        # What comes from all logins, in one queue; and the newest login to each host.
        self._events: Queue[Event] = Queue()
        self._logins: list[Login] = []

        # The hosts that are logged in to. A thread sends this list to all of them every few seconds: a busy terminal or
        # job must not look like the loss of this machine.
        self._connected = set(range(len(self.hosts)))
        self._closed = threading.Event()

    def __enter__(self) -> Logins:
        # A login that fails must not leave the earlier ones behind.
        try:
            for place in range(len(self.hosts)):
                self._logins.append(self._log_in(place, 1))
        except BaseException:
            self._end()
            raise

        threading.Thread(target=self._keep_beating, daemon=True, name="lockstep-beats").start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _keep_beating(self) -> None:
        """Send beats until the context ends. Runs in a thread."""
        self._beat()
        while not self._closed.wait(BEAT_S):
            self._beat()

    def _beat(self) -> None:
        """Send every host a beat, with the list of hosts that are logged in to.

        A host that gets none for a while concludes that this machine is lost.
        """
        connected = sorted(self._connected)

        # The main thread may replace a login meanwhile.
        for login in list(self._logins):
            login.send(Beat(connected))

    def _log_in(self, place: int, number: int) -> Login:
        """Start a login, the host's `number`-th. Raises a UserError if the command of --ssh cannot be started."""
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
        """Hang up everywhere, and wait for the other sides to save."""
        self._closed.set()
        for login in self._logins:
            login.hang_up()

        # Each host saves and ends by itself, and then our ssh ends too. If the network keeps ssh from noticing that, we
        # kill it. The two seconds are for the way there and back. All hosts save at once, so they share one deadline.
        deadline = time.monotonic() + SAVE_S + 2.0
        for login in self._logins:
            while login.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)

            login.kill()

    # ---- before the start ----

    def ask(self, places: Iterable[int], request: Request, kind: type[Kind]) -> list[Kind | HostProblem]:
        """Send a request to hosts and return their answers, each of this kind or a problem. Raises a UserError."""
        # Send it to all before waiting for an answer, so that they work at the same time.
        waiting = list(places)
        answers: dict[int, Kind | HostProblem] = {}
        for place in waiting:
            self._logins[place].send(request)

        # A host may still be importing. One whose login has ended never answers.
        deadline = time.monotonic() + ANSWER_S
        while missing := [place for place in waiting if place not in answers]:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                raise self._no_answer(missing[0], f"nothing within {ANSWER_S:.0f} s") from None

            if event.code is not None:
                raise self._no_answer(event.host, f"exit code {event.code}")

            # What a login prints, such as a greeting, is passed over here.
            if isinstance(event.answer, (kind, HostProblem)):
                answers[event.host] = event.answer

        return [answers[place] for place in waiting]

    def _no_answer(self, place: int, what: str) -> UserError:
        """Return the error for a host that cannot be used: what its login has printed, and a command to try."""
        host = self.hosts[place]
        login = self._logins[place]
        words = " ".join(login.last_errors) or what
        test = f"cd {shlex.quote(self._folder)} && {shlex.quote(self._python)} -m lockstep --version"

        if host.is_here():
            return UserError(f"the launcher of {host.name} does not start", words, f"try: {test}")

        return UserError(
            f"{host.name} cannot be logged in to, or has no Lockstep at the same path",
            words,
            f"try: {self._ssh} {host.ssh_login} {shlex.quote(test)}; --ssh and --python change what is run",
        )

    # ---- the job ----

    def train(self, jobs: Sequence[StartTraining], least: int) -> int:
        """Start the job on all hosts and stay until it has ended. Return its exit code."""
        from lockstep.launch.supervisor import collect_signals

        with collect_signals() as signals:
            return _JobWatch(self, jobs, least, signals).run()

    # ---- for `_JobWatch` ----

    def log_in_again(self, place: int) -> None:
        """Replace the login to a host that was lost. Raises a UserError."""
        login = self._logins[place]
        self._logins[place] = self._log_in(place, login.number + 1)

    def note(self, place: int, connected: bool) -> None:
        """Let all hosts know that one of them is lost, or is back."""
        # Replaced, not changed: the other thread may be reading it.
        self._connected = self._connected | {place} if connected else self._connected - {place}
        self._beat()

    def send(self, place: int, request: Request) -> None:
        """Send a request to one host."""
        self._logins[place].send(request)

    def hang_up(self, *places: int) -> None:
        """End the tethers of these hosts, or of all: their launchers save and end."""
        for place in places or range(len(self._logins)):
            self._logins[place].hang_up()

    def next_event(self, seconds: float) -> Event | None:
        """Return what came from a login that is still the host's newest one."""
        # An older login may still report something, such as its own end, which says nothing about the host now.
        try:
            event = self._events.get(timeout=seconds)
        except Empty:
            return None

        return event if event.login == self._logins[event.host].number else None


class _JobWatch:
    """Watches the hosts of one job while it runs.

    `jobs` has what each host runs, by its place; `least` is the fewest hosts with which the job goes on; `signals` gets
    the names of the signals that this process receives.

    A host is in `_ended` once its launcher has ended, or once it is lost. A lost host to which we will log in again is
    in `_retry_at` as well; when it is back, it is in neither of them.
    """

    def __init__(self, logins: Logins, jobs: Sequence[StartTraining], least: int, signals: list[str]):
        self._logins = logins
        self._jobs = jobs
        self._least = least
        self._signals = signals

        # Signals that the user has sent so far: the first two ask the job to save, another one does not wait.
        self._signals_received = 0
        self._first_signal: str | None = None

        # The host that got the last signal. If it is lost before its launcher ends, another one gets it.
        self._signalled: int | None = None

        # Whether the job is about to end: then no host is logged in to again.
        self._ending = False

        # How each host ended: its launcher's exit code; None where the login was lost.
        self._ended: dict[int, int | None] = {}

        # Hosts whose login has ended: nothing comes from them any more. A launcher ends before its login does.
        self._closed: set[int] = set()

        # When to log in again to each lost host; by when all hosts must have ended, after which we hang up; and when we
        # give up waiting for them.
        self._retry_at: dict[int, float] = {}
        self._deadline: float | None = None
        self._give_up_at: float | None = None

    def run(self) -> int:
        """Run the job until every host has ended or is given up. Return the job's exit code."""
        # All at once: the launchers find each other, in whichever order they start.
        for place, job in enumerate(self._jobs):
            self._logins.send(place, job)

        # An iteration takes a tenth of a second if nothing comes.
        while len(self._ended) < len(self._jobs):
            if event := self._logins.next_event(0.1):
                self._handle(event)

            while self._signals:
                self._pass_on(self._signals.pop(0))

            now = time.monotonic()
            self._try_again(now)

            # First the hosts are given time to end by themselves, and then to notice that we have hung up.
            if self._deadline is not None and now > self._deadline:
                self._hang_up()
            if self._give_up_at is not None and now > self._give_up_at:
                break

        # After the third signal the last lines are not waited for either.
        if len(self._ended) == len(self._jobs):
            self._show_last_lines()

        return self._exit_code()

    def _show_last_lines(self) -> None:
        """Print what the hosts have said until the end of their logins, which is their last event.

        An answer and the lines of an error come through two pipes, so the answer may overtake lines printed before it.
        """
        deadline = time.monotonic() + LAST_LINES_S
        while len(self._closed) < len(self._jobs) and time.monotonic() < deadline:
            event = self._logins.next_event(0.1)
            if event is not None and event.line is not None:
                self._show(event.host, event.line, event.is_error)
            elif event is not None and event.code is not None:
                self._closed.add(event.host)

    def _handle(self, event: Event) -> None:
        """Act on what came from a host: a line to show, an answer, or the end of its login."""
        place = event.host
        if event.line is not None:
            self._show(place, event.line, event.is_error)
        elif event.answer is not None:
            self._handle_answer(place, event.answer)
        elif event.code is not None:
            self._closed.add(place)
            if place not in self._ended:
                self._lose(place, event.code)

            # We have logged in again to a lost host, and that login has ended too: try once more, later.
            elif place in self._retry_at:
                self._retry_at[place] = time.monotonic() + RETRY_S

    def _show(self, place: int, line: str, is_error: bool) -> None:
        """Print a line of a host after its name. The first host speaks for the job, so its lines have no prefix."""
        # Each new login to a lost host fails with the same words, which are shown once.
        if place in self._retry_at:
            return

        prefix = "" if place == 0 else f"[{self._logins.hosts[place].name}] "
        write(f"{prefix}{line}\n", sys.stderr if is_error else sys.stdout)

    def _handle_answer(self, place: int, answer: Answer) -> None:
        """Note that a launcher has ended, or start it again on a host that is back."""
        if isinstance(answer, Ended):
            self._ended[place] = answer.code
            self._expect_the_end()
            return

        # The host has a problem, or is back too late.
        if not isinstance(answer, HostFacts) or self._ending:
            self._logins.hang_up(place)
            return

        # A host that was lost is back. `again`: if its launcher cannot start yet, we try later, and the job goes on.
        del self._retry_at[place]
        self._ended.pop(place, None)
        self._closed.discard(place)
        self._say(f"{self._logins.hosts[place].name} is back")
        self._logins.note(place, connected=True)
        self._logins.send(place, replace(self._jobs[place], again=True))

    def _lose(self, place: int, code: int) -> None:
        """Note that a login has ended before its launcher did: the host is lost, or the way to it."""
        # The other side exits with 1 if it has crashed; any other code says that the connection is gone.
        self._ended[place] = ExitCode.FAILED if code == ExitCode.FAILED else None
        self._logins.note(place, connected=False)

        # The job goes on if enough hosts are left.
        enough = len(self._jobs) - len(self._ended) >= self._least
        goes_on = enough and not self._ending
        what_follows = "; trying again while the job runs" if goes_on else ""
        self._say(f"the login to {self._logins.hosts[place].name} has ended (exit code {code}){what_follows}")

        if goes_on:
            self._retry_at[place] = time.monotonic() + RETRY_S
        elif not enough:
            self._expect_the_end()

        # Perhaps the job received the signal before the host was lost. To such a job SIGTERM means nothing new, but a
        # second Ctrl-C would keep it from saving.
        if place == self._signalled:
            self._signal_first_host("SIGTERM")

    def _try_again(self, now: float) -> None:
        """Log in again to the hosts that are due. What a host answers to `look` shows whether it is back."""
        due = [place for place, when in self._retry_at.items() if now >= when]
        for place in due if not self._ending else ():
            try:
                self._logins.log_in_again(place)
            except UserError:
                # The command of --ssh cannot be started now, say because this machine has too many processes.
                self._retry_at[place] = now + RETRY_S
                continue

            # The next login begins only after this one has ended.
            self._retry_at[place] = float("inf")
            self._logins.send(place, Look(self._jobs[place].target))

    def _expect_the_end(self) -> None:
        """Set the deadline by which all hosts must have ended, because one has ended, or too few are left."""
        # The deadline counts from the first end. Later ends must not postpone it.
        self._ending = True
        if self._deadline is None and self._give_up_at is None:
            self._deadline = time.monotonic() + END_S

    def _hang_up(self) -> None:
        """End all tethers. The other sides save and end by themselves, if they notice it."""
        self._ending = True
        self._logins.hang_up()
        self._deadline = None
        self._give_up_at = time.monotonic() + SAVE_S + 2.0

    def _pass_on(self, signal: str) -> None:
        """Pass a signal on to one host: its launcher asks the whole job to save and exit."""
        self._ending = True
        self._first_signal = self._first_signal or signal
        self._signals_received += 1

        # The user does not want to wait any more.
        if self._signals_received > PATIENT_SIGNALS:
            self._hang_up()
            return

        self._signal_first_host(signal)

    def _signal_first_host(self, signal: str) -> None:
        """Send a signal to the first host that is left."""
        # Its launcher tells the others. If every host got the signal, the job would count several. No host is left if
        # the last one has just ended.
        self._signalled = next((place for place in range(len(self._jobs)) if place not in self._ended), None)
        if self._signalled is not None:
            self._logins.send(self._signalled, PassSignal(signal))

    def _exit_code(self) -> int:
        """Return the job's exit code: all launchers of a job have the same one, unless some never knew its end."""
        # The job's code is the first of these that any launcher reports. FAILED comes last, because a tether that has
        # crashed has the same code, and then the other launchers know better how the job ended.
        order = (ExitCode.FINISHED, ExitCode.REFUSED, ExitCode.INTERRUPTED, ExitCode.RESTART, ExitCode.FAILED)
        known = set(self._ended.values())
        for code in order:
            # A host that got a Ctrl-C after the first host was lost has received it as SIGTERM.
            if code in known:
                return Preempted.code_of(self._first_signal) if code == ExitCode.RESTART else code

        # No host could say how it ended: the machines or the network are lost, or the user did not wait for them.
        return Preempted.code_of(self._first_signal)

    def _say(self, text: str) -> None:
        """Print a line about the hosts, for the user."""
        write(f"{printable(f'lockstep: {text}')}\n", sys.stderr)
