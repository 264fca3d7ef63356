"""The main function of a rank after the fork: it calls the job's function, records how that has ended, and exits.

The function itself comes from the layers above (see `Job.entry`). Everything here concerns the rank as a process: it
dies with its launcher, answers requests for stacks and collectives, and exits without tearing Python down.

No rank outlives its job. What kills it depends on what has died:

    the launcher        the lifeline pipe closes, and the rank kills itself (`_die_when_abandoned`). If it is suspended
                        or holds the GIL, the zygote kills it, because the zygote's socket closes as well
                        (`Zygote.clean_up`).
    the zygote          the kernel kills the rank: PR_SET_PDEATHSIG (`parent_death.die_with_parent`). The agent kills
                        its process group as well, with its worker processes (`Agent._replace_zygote`).
    another rank        the agent kills the rank's process group (`LocalRanks.begin_kill`)
    the rank itself     the zygote kills the worker processes that it leaves (`Zygote._reap`)

If a coordinator lives but was superseded, its rank 0 sees that the term file is gone and kills itself
(`_die_when_abandoned`). The coordinator sees the same and kills the other ranks (`Coordinator.run`). If the coordinator
is suspended, they fail in their next collective, because rank 0 is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lockstep.launch.election import TermFile
from lockstep.launch.failure import CLEAN, RankExit
from lockstep.launch.hangs import flight_recorder, stacks
from lockstep.launch.ranks import rank_record
from lockstep.launch.times import HEARTBEAT_S
from lockstep.launch.wire.sockets import wait_readable
from lockstep.runtime import attempt_folder
from lockstep.runtime.environments.launcher import ATTEMPT_FOLDER, TERM_FILE


def main(
    spec: dict[str, Any], work: Callable[[dict[str, Any]], None], lifeline: int, frozen_files: Sequence[io.IOBase] = ()
) -> NoReturn:
    """Run `work(spec)` as a rank and exit. `lifeline` is a pipe that closes when the launcher dies.

    frozen_files: the files that were open when the zygote froze its objects, see `exit_without_teardown`
    """
    threading.Thread(target=_die_when_abandoned, args=[lifeline], daemon=True, name="lockstep-lifeline").start()

    # From here on the launcher can ask this rank where it is.
    rank = int(os.environ["RANK"])
    folder = Path(os.environ[ATTEMPT_FOLDER])
    stacks.register(attempt_folder.stacks(folder, rank))
    _keep_sockets_in(folder)
    flight_recorder.serve(folder, rank)

    try:
        work(spec)
    except BaseException as error:
        # SystemExit and KeyboardInterrupt, too: the launcher must learn how the user's code has ended. The error
        # stays alive until the exit: freeing what its frames hold may wait for ranks that are gone.
        _end(folder, rank, rank_record.ended_by(error, rank), frozen_files)

    _end(folder, rank, RankExit(0), frozen_files)


def _end(folder: Path, rank: int, rank_exit: RankExit, frozen_files: Sequence[io.IOBase]) -> NoReturn:
    """Record how this rank ends, and exit. The exit code is not enough: a program may call `os._exit(0)` too early."""
    rank_record.write(folder, rank, rank_exit)

    # Rank 0 has the terminal, where the launcher prints the first failure.
    if rank_exit.failure is not None and rank != 0:
        print(rank_exit.failure.traceback, file=sys.stderr)

    exit_without_teardown(rank_exit.code, frozen_files)


def exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """End this rank on a signal that asks it to save and exit, because it has nothing to save yet."""
    rank_exit = RankExit.as_asked("nothing")
    rank_record.write(Path(os.environ[ATTEMPT_FOLDER]), int(os.environ["RANK"]), rank_exit)
    os._exit(rank_exit.code)


def _keep_sockets_in(folder: Path) -> None:
    """Have `multiprocessing` put the sockets of worker processes into this folder, which the launcher removes.

    By default each process makes a folder pymp-* for its sockets, which stays behind when the process is killed.
    """
    multiprocessing.current_process()._config["tempdir"] = str(folder)  # pyrefly: ignore[missing-attribute]


def _die_when_abandoned(lifeline: int) -> None:
    """Kill this rank when its launcher ends, or when another node has taken over the job. Runs in a thread."""
    # The pipe carries no data: it becomes readable when the launcher ends, whatever killed it. But the launcher may be
    # suspended, or cut off from the other nodes, so rank 0 on several nodes checks whether another node took over.
    term_file = TermFile(Path(os.environ[TERM_FILE])) if TERM_FILE in os.environ else None

    while True:
        if term_file and term_file.superseded():
            _print_with_timeout(b"lockstep: another node coordinates this job now: this rank ends\n")
            break

        # Without a term file there is nothing to look for in between.
        if wait_readable([lifeline], HEARTBEAT_S if term_file else None):
            break

    # This kills its worker processes too, because each rank leads its own process group.
    os.killpg(os.getpid(), signal.SIGKILL)


def _print_with_timeout(text: bytes) -> None:
    """Write a text to stderr, and go on if that takes too long: the next attempt relies on the end of this rank."""

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(2, text)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()

    # A write to a terminal that was stopped with Ctrl-S does not return.
    writer.join(0.1)


def open_files() -> list[Any]:
    """Return the files that are open for writing, `sys.stdout` among them. Only the garbage collector can list them."""
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    return [thing for thing in gc.get_objects() if type(thing) in kinds]


def exit_without_teardown(code: int, frozen_files: Sequence[io.IOBase] = ()) -> NoReturn:
    """End the process, after the parts of an ordinary exit that the user's code may rely on.

    frozen_files: files that `open_files` does not list, because `gc.freeze` has hidden them from the collector

    Works around pytorch/pytorch#179291: an ordinary exit finalizes the interpreter while gloo's threads may still
    release tensors. They need the GIL for that, so the process occasionally aborts.
    `tests/unit/launch/ranks/test_rank_process.py` fails when a torch release has a fix, and this function can go.
    """
    # After an error, other threads may be in collectives that can no longer end, so they are not waited for.
    if code in CLEAN:
        # This ends the threads of executors and waits for all threads that are not daemons.
        threading._shutdown()  # pyrefly: ignore[missing-attribute]
        atexit._run_exitfuncs()

    # Flush files that the user left open.
    for file in (*frozen_files, *open_files()):
        with contextlib.suppress(ValueError, OSError):
            file.flush()

    os._exit(code)
