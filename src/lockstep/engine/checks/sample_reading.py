"""Reads samples without side effects: in this process, or in a process of its own that ends afterwards.

A dataset may open a connection, a file or threads when its first sample is read. Worker processes that are forked later
would inherit what this process has opened, and hang. So a run with worker processes reads in another process, too.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from lockstep.data.loader import BatchRequest, SampleReader
from lockstep.data.worker_process import open_files, start_worker
from lockstep.engine.checks.sketches import sketch
from lockstep.runtime.preemption import WORKER_NAME

START_S = 5.0  # seconds that the process gets to start
END_S = 1.0  # seconds that it gets to end


class Reading(Protocol):
    """Returns the sketch of a sample, or None if it cannot be read, or not within `timeout` seconds."""

    def __call__(self, name: str, index: int, timeout: float) -> dict[str, Any] | None: ...


@contextmanager
def reading_of(datasets: Mapping[str, Any], apart: bool) -> Iterator[Reading | None]:
    """Return a context that reads samples of these datasets, by name. None: they cannot be read.

    `apart`: in another process. Only there a read ends after its timeout.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the number of threads decides how a sum is rounded
    try:
        if not apart:
            yield lambda name, index, timeout: _read(datasets[name], index)
        elif multiprocessing.get_start_method() == "fork":
            with _other_process(datasets) as reading:
                yield reading
        else:
            # A new interpreter would import the user's program again, for a few samples.
            yield None
    finally:
        torch.set_num_threads(threads)


def _read(dataset: Any, index: int) -> dict[str, Any] | None:
    # The step that needs the sample will report an error.
    try:
        # Seeds that depend on nothing else, so that random transforms draw the same numbers in every run.
        reader = SampleReader(dataset, default_collate, seed=0)
        return sketch(reader.read_samples(BatchRequest(0, [index])))
    except Exception:  # the dataset, and the objects in its samples, are the user's code
        return None


@contextmanager
def _other_process(datasets: Mapping[str, Any]) -> Iterator[Reading | None]:
    here, there = multiprocessing.Pipe()
    arguments = (datasets, there, open_files())
    process = multiprocessing.Process(target=_answer, args=arguments, name=WORKER_NAME, daemon=True)
    process.start()
    there.close()

    def read(name: str, index: int, timeout: float) -> dict[str, Any] | None:
        # An answer that comes too late could be taken for the next one.
        if here.closed:
            return None

        try:
            here.send((name, index))
            if here.poll(max(timeout, 0.0)):
                return here.recv()
        except (EOFError, OSError):  # the process has died
            pass

        here.close()
        return None

    try:
        yield read if _has_started(here) else None
    finally:
        ends = not here.closed
        here.close()
        if ends:
            process.join(END_S)

        process.kill()
        process.join()


def _has_started(connection: Connection) -> bool:
    try:
        return connection.poll(START_S) and connection.recv()
    except (EOFError, OSError):
        return False


def _answer(datasets: Mapping[str, Any], connection: Connection, files: dict[int, int]) -> None:
    """Read the samples that the rank asks for, in the other process, until the rank closes the connection."""
    start_worker(files, 0)
    torch.set_num_threads(1)
    connection.send(True)
    while True:
        try:
            name, index = connection.recv()
        except (EOFError, OSError):
            return

        connection.send(_read(datasets[name], index))
