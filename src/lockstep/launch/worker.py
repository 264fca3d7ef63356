"""What a rank runs after it was forked: call the job's function, leave a failure record if it raises, and exit.

The function itself comes from the layers above (see `Job.entry`). Everything here concerns the rank as a process: it
dies with its launcher, answers requests for stacks and collectives and exits without tearing Python down.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lockstep.launch import failure, records
from lockstep.launch.hangs import flight_recorder, stacks
from lockstep.launch.meeting import RECORD, Watch
from lockstep.runtime.heartbeat import FOLDER

# How often rank 0 of a job on several machines looks whether its coordinator has been superseded.
LOOK_S = 1.0


def main(spec: dict[str, Any], work: Callable[[dict[str, Any]], None], lifeline: int) -> NoReturn:
    """Run `work(spec)` as a rank and exit. `lifeline` is a pipe that closes when the launcher dies."""
    threading.Thread(target=_die_with_launcher, args=[lifeline], daemon=True, name="lockstep-lifeline").start()

    rank = int(os.environ["RANK"])
    folder = Path(os.environ[FOLDER])
    stacks.register(folder / f"stacks-{rank}")
    _keep_sockets_in(folder)
    flight_recorder.serve(folder, rank)

    try:
        work(spec)
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if code in (None, *failure.CLEAN):
            failure.note_end(folder, rank, failure.place_of(error))
            exit_without_teardown(failure.PREEMPTED if code else 0)

        failure.record(folder, rank, error)

        # Rank 0 has the terminal, where the launcher prints the first failure.
        if rank != 0:
            traceback.print_exc()

        exit_without_teardown(1)

    failure.note_end(folder, rank)
    exit_without_teardown(0)


def _keep_sockets_in(folder: Path) -> None:
    """Have `multiprocessing` put the sockets of loader processes into this folder, which the launcher removes.

    By default each process makes a folder pymp-* for them, and one that is killed leaves it behind.
    """
    multiprocessing.current_process()._config["tempdir"] = str(folder)  # pyrefly: ignore[missing-attribute]


def _die_with_launcher(lifeline: int) -> None:
    # The pipe carries no data: it can be read when the launcher ends, whatever killed it. The launcher itself may be
    # suspended, or cut off from the other nodes: rank 0 of several machines looks whether another one took over.
    watch = Watch(Path(os.environ[RECORD])) if RECORD in os.environ else None
    while True:
        if watch and watch.superseded():
            os.write(2, b"lockstep: another node coordinates this job now: this rank ends\n")
            break
        if records.wait_readable([lifeline], LOOK_S if watch else None):
            break

    # With its loader processes: each rank leads its own process group.
    os.killpg(os.getpid(), signal.SIGKILL)


def exit_without_teardown(code: int) -> NoReturn:
    """End the process and do by hand what an ordinary exit does for the user.

    Works around pytorch/pytorch#179291: an ordinary exit finalizes the interpreter while gloo's threads may still
    release tensors. They need the GIL for that, so the process occasionally aborts.
    `tests/unit/launch/test_worker.py` fails when a torch release has a fix, and this function can go.
    """
    # After an error there is no waiting: the collectives of other threads can no longer end.
    if code in failure.CLEAN:
        # Executors let their threads go; then all threads that are not daemons are waited for.
        threading._shutdown()  # pyrefly: ignore[missing-attribute]
        atexit._run_exitfuncs()

    # Flush files that the user left open. Only the garbage collector has a list of them.
    for thing in gc.get_objects():
        if type(thing) in (io.TextIOWrapper, io.BufferedWriter):
            with contextlib.suppress(ValueError, OSError):
                thing.flush()

    os._exit(code)
