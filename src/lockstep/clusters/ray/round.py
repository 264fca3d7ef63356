"""A round of the driver: the launchers of a job, from their start until all have ended.

It only notes what was reported and answers questions about that; the driver acts. How a round has ended is not always
known from one launcher: those that lose the others exit with codes of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lockstep.clusters.ray.actor import ActorReport
from lockstep.errors import ExitCode

FAILURES = (ExitCode.FAILED, ExitCode.REFUSED)


@dataclass
class Round:
    """What the launchers have reported. The slot of its actor identifies each.

    `join` is the address at which the nodes meet. Times are those of the cluster's clock, in seconds.
    """

    join: str
    codes: list[int] = field(default_factory=list)
    ended_at: float | None = None  # when the first launcher ended
    asked_others: bool = False  # the job is over, and the launchers that go on were asked to end
    lost_at: float | None = None  # when an actor was last lost
    leaving: bool = False  # the job saves, to go on without a node that is drained
    port_taken: bool = False  # the nodes cannot meet at `join`

    # The launcher that coordinates, the exit code of the one that has ended the job, and whether there ever was one.
    coordinator: Any = None
    job_code: int | None = None
    begun: bool = False

    # The launcher that got the user's Ctrl-C, and since when one is pending.
    interrupted: Any = None
    interrupt_since: float | None = None

    def note(self, slot: Any, report: ActorReport, now: float) -> None:
        """Note what the launcher of a slot has reported."""
        if report.coordinates:
            self.begun = True
            self.coordinator = slot
        elif self.coordinator is slot:
            self.coordinator = None

        if report.code is None:
            return

        self.codes.append(report.code)
        self.ended_at = self.ended_at or now

        # The coordinator knows how the job has ended; the others only know how they have.
        if report.ended_job and self.job_code is None:
            self.job_code = report.code

        # Another program at the port matters only before the nodes have met there.
        self.port_taken |= report.port_taken and not self.begun
        self._forget(slot)

    def lose(self, slot: Any, now: float) -> None:
        """Note that an actor is lost. If it was to stop the job, another one must."""
        self.lost_at = now
        if self.interrupted is slot and self.job_code is None:
            self.interrupted = None
            self.interrupt_since = now

        self._forget(slot)

    def _forget(self, slot: Any) -> None:
        """Forget that a launcher coordinates: it has ended, or is lost."""
        if self.coordinator is slot:
            self.coordinator = None

    def restart(self) -> None:
        """Forget the codes of launchers that have failed alone, while the job goes on."""
        self.codes.clear()
        self.ended_at = None

    @property
    def code(self) -> int | None:
        """The exit code of the job. None if no launcher has lived to report one."""
        if ExitCode.FINISHED in self.codes:
            return ExitCode.FINISHED
        if self.job_code is not None:
            return self.job_code

        # If several launchers report the same failure, the coordinator told them before it was lost.
        return self._shared_failure or max(self.codes, default=None)

    @property
    def _shared_failure(self) -> int | None:
        """The failure that several launchers report, if there is one."""
        return next((code for code in FAILURES if self.codes.count(code) > 1), None)

    def over(self, asked_to_end: bool) -> bool:
        """Return whether the job has ended, and not only launchers of it. `asked_to_end`: it was asked to save."""
        # A launcher that has lost the others asks to be restarted, as all do once the job was asked to save and end.
        ends = {ExitCode.FINISHED, ExitCode.INTERRUPTED}
        if asked_to_end:
            ends |= {ExitCode.RESTART}

        if self.job_code is not None or not ends.isdisjoint(self.codes):
            return True

        # Two nodes may fail alone, because both have a full disk for example: then the coordinator goes on.
        return self.coordinator is None and self._shared_failure is not None
