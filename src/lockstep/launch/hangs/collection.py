"""What a node collects from its ranks when the job seems to hang: first their stacks, then their collectives."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.launch.hangs import flight_recorder, stacks
from lockstep.launch.times import COLLECTIVES_S, RANKS_STACKS_S

# How many characters the stacks of all ranks of a node may have: a message has a largest size. The main thread of a
# rank is at the end of its text.
STACKS_SIZE = 4 * 2**20

# How many of the last collectives of a rank are enough to compare it with others.
COLLECTIVES_SENT = 100


def collect(folder: Path, pids: dict[int, int]) -> tuple[dict[int, str], dict[int, list[Any]]]:
    """Return the stack of each rank, and the last collectives of those that answer. `pids` has the process of each.

    A rank that does not answer has an empty stack. If the folder is full or gone, the ranks are not asked for their
    collectives.
    """
    answers = stacks.collect(folder, pids, RANKS_STACKS_S)
    answering = [rank for rank, text in answers.items() if text]
    recorded: dict[int, list[Any]] = {}
    with suppress(OSError):
        recorded = flight_recorder.collect(folder, answering, COLLECTIVES_S)

    most = STACKS_SIZE // max(len(answers), 1)
    texts = {rank: stacks.comparable(text)[-most:] for rank, text in answers.items()}
    last = {rank: flight_recorder.comparable(entries[-COLLECTIVES_SENT:]) for rank, entries in recorded.items()}
    return texts, last
