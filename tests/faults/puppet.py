"""A rank without torch, for tests of the launcher: it runs the lines in `spec["code"]` with a few words at hand."""

import os
import signal
import sys
import time
from pathlib import Path

from lockstep.errors import Preempted, UserError
from lockstep.runtime.heartbeat import Heartbeat

# Unless a test says otherwise, a node that has to wait for a core is not lost.
LOST_AFTER_S = 60.0

if "PUPPET_CANNOT_IMPORT" in os.environ and __name__ != "__main__":  # the launcher itself does not import it
    raise ImportError("a library is missing on this machine")

if "PUPPET_STOPS_AT_BIRTH" in os.environ:  # every rank is stopped before it has done anything
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGSTOP))


class Puppet:
    def __init__(self, run_dir: str):
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.attempt = int(os.environ["LOCKSTEP_ATTEMPT"])
        self.folder = Path(os.environ["LOCKSTEP_ATTEMPT_FOLDER"])
        self.run_dir = Path(run_dir)
        self.heartbeat = Heartbeat.from_env(self.rank)
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number, frame):
        self.asked = True

    def note(self, text: str = "here") -> None:
        """For the test to see: a file `attempt-rank`."""
        staged = self.run_dir / f".{self.rank}.tmp"
        staged.write_text(f"{os.getpid()} {text}")
        staged.rename(self.run_dir / f"{self.attempt}-{self.rank}")

    def meet(self) -> None:
        """Wait until all ranks of this attempt have noted that they are there."""
        while not all((self.run_dir / f"{self.attempt}-{rank}").exists() for rank in range(self.world)):
            time.sleep(0.01)

    def commit(self, step: int) -> None:
        (self.run_dir / "checkpoints" / f"step-{step:08}").mkdir(parents=True, exist_ok=True)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(os.getpid(), number)
        time.sleep(600)

    def train(self, seconds: float = 600.0) -> None:
        """Train until a stop request, then save and exit, as the engine does."""
        deadline = time.monotonic() + seconds
        step = 0
        while time.monotonic() < deadline:
            step += 1
            self.heartbeat.beat("compute", step)
            time.sleep(0.02)
            if self.asked:
                self.commit(7)
                raise Preempted(7, "SIGTERM", str(self.run_dir / "checkpoints" / "step-00000007"))


def play(spec):
    me = Puppet(spec["run_dir"])
    exec(spec["code"], {"me": me, "os": os, "sys": sys, "time": time, "UserError": UserError})


if __name__ == "__main__":  # a launcher of such ranks: its argument describes the job
    import json

    from lockstep.launch import folder_watch
    from lockstep.launch.job import Bounds, Job
    from lockstep.launch.nodes import search
    from lockstep.launch.supervisor import supervise
    from lockstep.launch.wire import connections

    described = json.loads(sys.argv[1])
    search.NO_ANSWER_S = described.pop("no_answer_s", search.NO_ANSWER_S)
    lost_after_s = described.pop("lost_after_s", LOST_AFTER_S)
    for module in (connections, search, folder_watch):
        module.LOST_AFTER_S = lost_after_s
    nproc, nnodes = Bounds(*described.pop("nproc")), Bounds(*described.pop("nnodes", (1, 1)))
    try:
        outcome = supervise(
            Job(
                {
                    "code": described["code"],
                    "run_dir": described["run_dir"],
                    "program": described.get("program", {}),
                },
                Path(described["run_dir"]),
                nproc,
                nnodes,
                described.get("join"),
                described.get("host"),
                entry="puppet:play",
                preload=(),
                resume_command="type it again",
            )
        )
    except UserError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(outcome.ending.code)
