"""What a rank started by our launcher runs: do the job, or leave a failure record."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import os
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lockstep.launch import failure, flight_recorder
from lockstep.launch.zygote import LIFELINE
from lockstep.runtime.heartbeat import FOLDER


def _leave(code: int) -> NoReturn:
    """End here and now. An ordinary exit tears the interpreter down while gloo's threads may still let go of
    tensors, which aborts the process now and then (pytorch#179291). What an exit does for the user is done by hand."""
    if code in (0, failure.LEFT):
        # Executors let their threads go; then all that are no daemons are waited for.
        threading._shutdown()  # pyrefly: ignore[missing-attribute]
        atexit._run_exitfuncs()
    for thing in gc.get_objects():
        if type(thing) in (io.TextIOWrapper, io.BufferedWriter):  # files that the user left open
            with contextlib.suppress(ValueError, OSError):
                thing.flush()
    os._exit(code)


def _show_stacks_when_asked(path: Path) -> None:
    """Also while the main thread hangs in C++ and holds everything: it needs no Python to run."""
    file = path.open("a")
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR2, file, all_threads=True, chain=False)


def _work(spec: dict[str, Any]) -> None:
    from lockstep import api

    api.work(spec)


def _die_with_launcher(alive: int) -> None:
    """Nobody writes to this pipe; it ends when the launcher does, however it died."""

    def watch() -> None:
        os.read(alive, 1)
        os.killpg(os.getpid(), signal.SIGKILL)  # with loader processes: each rank leads its own group

    threading.Thread(target=watch, daemon=True, name="lockstep-lifeline").start()


def main(spec: dict[str, Any], work: Callable[[dict[str, Any]], None] = _work) -> NoReturn:
    _die_with_launcher(int(os.environ.pop(LIFELINE)))
    rank, folder = int(os.environ["RANK"]), Path(os.environ[FOLDER])
    _show_stacks_when_asked(folder / f"stacks-{rank}")
    flight_recorder.serve(folder, rank)
    try:
        work(spec)
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if code in (None, 0, failure.LEFT):
            _leave(failure.LEFT if code else 0)
        failure.record(folder, rank, error)
        if rank != 0:  # rank 0 has the terminal, where the launcher prints the first failure
            traceback.print_exc()
        _leave(1)  # without waiting for threads: their collectives can no longer end
    _leave(0)
