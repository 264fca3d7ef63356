"""What a rank started by our launcher runs: do the job, or leave a failure record."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from lockstep.launch import failure
from lockstep.launch.local import FAILURES, LIFELINE


def main() -> None:
    _die_with_launcher(int(os.environ.pop(LIFELINE)))
    rank, failures = int(os.environ["RANK"]), Path(os.environ.pop(FAILURES))
    try:
        _work(json.loads(sys.argv[1]))
    except BaseException as error:
        failure.record(failures, rank, error)
        if rank != 0:  # rank 0 has the terminal, where the launcher prints the first failure
            traceback.print_exc()
        sys.stdout.flush()
        # At once: the usual way out would wait for threads and collectives that can no longer end.
        os._exit(1)


def _work(spec: dict[str, Any]) -> None:
    from lockstep import doors

    layers = [(source, values) for source, values in spec["layers"]]
    if "task" in spec:
        doors.fit_shipped(spec["task"], layers)
    else:
        sys.argv = [spec["target"]]
        doors.run_target(spec["target"], layers)


def _die_with_launcher(alive: int) -> None:
    """Nobody writes to this pipe; it ends when the launcher does, however it died."""

    def watch() -> None:
        os.read(alive, 1)
        os.killpg(os.getpid(), signal.SIGKILL)  # with loader processes: each rank leads its own group

    threading.Thread(target=watch, daemon=True, name="lockstep-lifeline").start()


if __name__ == "__main__":
    main()
