"""Runs a learner's file for the grader: calls its functions on several ranks, and puts what goes wrong into words.

The learner's code may raise, hang, or die. Each call gets fresh processes with a limit, the first error that explains
the others is reported, and a hang is reported with the line in which each rank waits.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # optimizers import it when they first step: seconds, which forked ranks need not spend again
import torch.distributed as dist

from lockstep.errors import UserError
from lockstep.lab.ranks import variables_of_rank
from lockstep.launch import lost_peer

LIMIT = timedelta(seconds=40)  # for one call on all ranks; only a hang reaches it


class LearnerFailed(Exception):
    """The learner's code raised an error or hung; the text says what, where and on which rank."""


@dataclass(frozen=True)
class _Result:
    rank: int
    value: Any = None
    error: str = ""
    lost_peer: bool = False  # the error only says that another rank is gone


class Learner:
    """The file of a learner. Every call gets fresh processes, so a mistake in one leaves nothing behind."""

    def __init__(self, path: Path, *, limit: timedelta = LIMIT):
        if not path.is_file():
            raise UserError(f"there is no file {path}", "", "name the file that you have edited")

        self.path = path
        self.limit = limit

    def run(self, function: Callable[..., Any], *arguments: Any, world: int = 2, group: bool = True) -> list[Any]:
        """Call `function(module, *arguments)` on each rank of a gloo group and return what each returned, by rank.

        `module` is the learner's file. With `group=False`, the group is left to the learner's code: RANK, WORLD_SIZE,
        LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set as by torchrun. Raises `LearnerFailed` if a rank raises an
        error, dies, or is not done after the limit.
        """
        # The store is served here, on a port that the system chose.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

        # Fork: torch is imported already, which takes seconds in a fresh process.
        context = get_context("fork")
        with tempfile.TemporaryDirectory() as folder:
            readers: list[Connection] = []
            processes: list[BaseProcess] = []
            sys.stdout.flush()  # or each rank would print again what is still in the buffer

            for rank in range(world):
                reader, writer = context.Pipe(duplex=False)
                variables = variables_of_rank(rank, world, store.port)
                started = (rank, variables, group, Path(folder) / f"{rank}", writer, function, arguments)
                process = context.Process(target=self._rank, args=started)
                process.start()

                # Only the rank holds the other end now, so that its death is seen here.
                writer.close()
                readers.append(reader)
                processes.append(process)

            # Ranks wait until they are killed, also those that are done.
            try:
                return self._collect(readers, processes, Path(folder))
            finally:
                for process in processes:
                    process.kill()
                    process.join()

    def _collect(self, readers: list[Connection], processes: list[BaseProcess], folder: Path) -> list[Any]:
        """Wait for the results of all ranks, and return them by rank.

        Raises `LearnerFailed` with the failure that explains the others.
        """
        # In the order in which they come: the first error is likely to be the cause of the others.
        results: dict[int, _Result] = {}
        end = time.monotonic() + self.limit.total_seconds()
        while len(results) < len(readers):
            waiting = [reader for rank, reader in enumerate(readers) if rank not in results]
            ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break

            for rank in [rank for rank, reader in enumerate(readers) if reader in ready]:
                results[rank] = self._receive(rank, readers[rank])

                # An error on one rank makes the others fail or wait: it is the one to report.
                if results[rank].error and not results[rank].lost_peer:
                    raise LearnerFailed(results[rank].error)

        # A call that does not return within the limit hangs.
        hung = [rank for rank in range(len(readers)) if rank not in results]
        if hung:
            raise LearnerFailed(self._explain_hang(hung, processes, folder))

        # No rank has an error of its own: they have lost each other.
        errors = [result.error for result in results.values() if result.error]
        if errors:
            raise LearnerFailed(errors[0])

        return [results[rank].value for rank in range(len(readers))]

    def _receive(self, rank: int, reader: Connection) -> _Result:
        """Return what a rank has sent. A process that was killed closes its end without a word."""
        try:
            return reader.recv()
        except EOFError:
            return _Result(rank, error=f"the process of rank {rank} died before the function returned")

    def _rank(
        self,
        rank: int,
        variables: dict[str, str],
        group: bool,
        stacks: Path,
        writer: Connection,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> None:
        """Be one rank: call the function, send its result, and stay until all are done."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the grader, which ends its ranks

        # A rank that hangs in a collective can still write where it is.
        faulthandler.register(signal.SIGUSR1, file=stacks.open("w"), all_threads=False)
        os.environ.update(variables)
        torch.set_num_threads(1)

        try:
            if group:
                dist.init_process_group("gloo", timeout=2 * self.limit)

            writer.send(_Result(rank, function(self.module(), *arguments)))
        except BaseException as error:  # also SystemExit: the grader must know how the rank ended
            explained = self._explain(rank, error)
            writer.send(_Result(rank, error=explained, lost_peer=lost_peer.reported_by(error)))

        sys.stdout.flush()
        writer.close()

        # A rank that is done stays until all are: its peers may still be in the last collective.
        time.sleep(2 * self.limit.total_seconds())

    def module(self) -> ModuleType:
        """Import the file, under a name of its own, without running its `main`."""
        spec = importlib.util.spec_from_file_location("learner", self.path)
        assert spec is not None
        assert spec.loader is not None

        module = importlib.util.module_from_spec(spec)
        sys.modules["learner"] = module
        spec.loader.exec_module(module)
        return module

    def _explain(self, rank: int, error: BaseException) -> str:
        """Return an error in words, with the line of the learner's file where it was raised."""
        # The innermost line of the learner's own file: the rest is torch's, or ours.
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == self.path]
        where = f", {self.path.name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""

        # A starter raises it where something is to be written.
        if isinstance(error, NotImplementedError):
            place = f" ({self.path.name}:{frames[-1].lineno})" if frames else ""
            task = re.sub(r"^TODO( \d+)?: ", "", str(error)) or "a function that raises NotImplementedError"
            return f"this is still to do: {task}{place}"

        return f"rank {rank} raised {type(error).__name__}: {error}{where}"

    def _explain_hang(self, hung: list[int], processes: list[BaseProcess], folder: Path) -> str:
        """Return where the ranks that hang are, by the stacks that they write when they are asked to."""
        # All are asked before the first is read: they write at the same time.
        for rank in hung:
            pid = processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)

        places = []
        for rank in hung:
            # A rank that hangs in C code writes as well; one whose disk is slow gets a few seconds.
            end = time.monotonic() + 5
            while not (stack := (folder / f"{rank}").read_text()) and time.monotonic() < end:
                time.sleep(0.1)

            # The stack begins with the innermost call.
            line = re.search(rf'File "{re.escape(str(self.path))}", line (\d+)', stack)
            places.append(f"rank {rank}" + (f" in {self.path.name}:{line[1]}" if line else ""))

        done = ", while the other ranks had ended" if len(hung) < len(processes) else ""
        return (
            f"{' and '.join(places)} did not end within {self.limit.total_seconds():.0f} s{done}: either a loop never "
            "ends, or a rank waits in a collective that another rank never calls"
        )
