"""Torch's flight recorder: which collective each rank entered last, for hangs that stacks alone do not explain.

Torch keeps the last collectives of every process in memory. A thread of the rank writes them to a file when the
launcher asks, even while the main thread waits in a collective; the launcher compares the ranks. This module does not
import torch. It uses torch's JSON dumps, because the other format is a pickle.

It is tested with gloo, and with NCCL and a world size of 1 (tests/gpu), but not with several GPUs.
"""

from __future__ import annotations

import contextlib
import json
import operator
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import files
from lockstep.errors import listed_ranks
from lockstep.launch.times import REQUEST_POLL_S
from lockstep.runtime import attempt_folder

# How many ranks are described in a message about a hang.
MAX_RANKS_NAMED = 8

# Torch has a recorder for NCCL and a recorder for all other backends; a build without NCCL lacks the first.
RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")

# Torch's name for the group of all ranks.
DEFAULT_GROUP = "default_pg"

# The fields of a recorder's entry that are read.
FIELDS = (
    "process_group",
    "collective_seq_id",
    "is_p2p",
    "profiling_name",
    "input_sizes",
    "input_dtypes",
    "retired",
    "state",
)

# Collectives whose inputs must have equal sizes on all ranks.
EQUAL_SIZES = {"all_reduce", "allreduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base"}


def environment(logs: Path) -> dict[str, str]:
    """Return the variables that make torch record, and NCCL's watchdog dump into the run's `logs` after a timeout."""
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",  # collectives that each rank keeps
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # with the default the process ends before it has dumped
        "TORCH_FR_DUMP_TEMP_FILE": str(logs.absolute() / "nccl-flight-"),
    }


def serve(folder: Path, rank: int) -> None:
    """Answer the launcher's requests from now on, in a thread of this rank."""
    threading.Thread(target=_answer_requests, args=(folder, rank), daemon=True, name="lockstep-flight").start()


def _answer_requests(folder: Path, rank: int) -> None:
    """Write this rank's collectives to its file whenever there is a new request, until the attempt's folder is gone."""
    answered = ""
    while folder.exists():
        request = files.read(attempt_folder.collectives_request(folder))
        if request and request != answered:
            answered = request

            # A rank that cannot answer once, because the disk is full or a dump is bad, must answer the next request.
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                # The answer repeats the request: the launcher drops answers to older ones.
                answer = {"request": request, "entries": recorded()}
                files.write(attempt_folder.collectives(folder, rank), json.dumps(answer))

        time.sleep(REQUEST_POLL_S)


def recorded() -> list[dict[str, Any]]:
    """Return the last collectives of this process from all recorders; none if torch was not imported."""
    # Not an import statement: it would block if the main thread hangs in an import.
    module = sys.modules.get("torch._C._distributed_c10d")
    dumps = [getattr(module, name) for name in RECORDERS if hasattr(module, name)]

    entries = []
    for dump in dumps:
        entries += json.loads(dump()).get("entries", [])

    return entries


def collect(folder: Path, ranks: list[int], timeout: float) -> dict[int, list[dict[str, Any]]]:
    """Ask these ranks for their collectives. Ranks that do not answer in time are missing from the result."""
    # Every request has a new text, which the answers repeat, so that an old answer is not taken for a new one.
    request = str(time.time_ns())
    files.write(attempt_folder.collectives_request(folder), request)

    answers: dict[int, list[dict[str, Any]]] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(ranks) and time.monotonic() < deadline:
        time.sleep(REQUEST_POLL_S / 10)

        # A rank renames its answer into place, so it is complete.
        for rank in set(ranks) - answers.keys():
            answer = json.loads(files.read(attempt_folder.collectives(folder, rank)) or "{}")
            if answer.get("request") == request:
                answers[rank] = answer["entries"]

    return answers


def comparable(entries: list[Any]) -> list[Any]:
    """Return the entries with what `analyse` reads: times and threads differ between ranks that do the same."""
    return [{key: entry[key] for key in FIELDS if key in entry} for entry in entries if isinstance(entry, dict)]


@dataclass(frozen=True)
class Collective:
    """One collective that a rank has entered."""

    op: str
    sizes: str
    dtypes: str
    finished: bool

    @staticmethod
    def from_entry(entry: dict[str, Any]) -> Collective:
        """Return the collective of an entry. It has finished if torch has retired it, or calls it completed."""
        return Collective(
            op=entry["profiling_name"].rpartition(":")[2],
            sizes=" ".join(map(str, entry.get("input_sizes", []))),
            dtypes=" ".join(entry.get("input_dtypes", [])),
            finished=entry.get("retired", False) or entry.get("state") == "completed",
        )

    @property
    def signature(self) -> tuple[str, ...]:
        """The fields that must be equal on all ranks."""
        # Other collectives, such as an all-gather of lists, may have different sizes.
        return (self.op, self.sizes, self.dtypes) if self.op in EQUAL_SIZES else (self.op,)

    def __str__(self) -> str:
        return f"{self.op} of {self.sizes} {self.dtypes}".replace(" of  ", "").strip()


@dataclass(frozen=True)
class Findings:
    """What the ranks' collectives say about a hang."""

    lines: list[str] = field(default_factory=list)  # one line for each process group in which ranks disagree, or wait
    late: list[int] = field(default_factory=list)  # ranks that did not enter a collective in which other ranks wait
    deadlock: bool = False  # in the default group, a rank waits in a collective that differs from another rank's
    entered: dict[int, int] = field(default_factory=dict)  # rank -> collectives of the default group so far


def analyse(dumps: dict[int, list[dict[str, Any]]]) -> Findings:
    """Compare the collectives of the ranks. There are no lines if no rank waits in a collective."""
    groups = _by_group(dumps)
    lines: list[str] = []
    mismatches: set[str] = set()
    waits: list[_Wait] = []

    # Each process group contributes the first collective that differs, which explains more than the wait that follows
    # from it, or else the first one in which ranks wait.
    for name, history in sorted(groups.items()):
        text = _mismatch(history)
        if text:
            mismatches.add(name)
        else:
            waits.append(_Wait(history))
            text = waits[-1].text()

        # A group may have nothing to report.
        if text:
            lines.append(f"process group {name}: {text}")

    # A collective that differs is a deadlock if a rank waits in it, or in a later one.
    default = groups.get(DEFAULT_GROUP, {})
    is_waiting = any(not last.finished for last in _last_ones(default))

    return Findings(
        lines=lines,
        late=[] if mismatches else _late_ranks(waits),
        deadlock=DEFAULT_GROUP in mismatches and is_waiting,
        entered={rank: max(entered, default=0) for rank, entered in default.items()},
    )


def _late_ranks(waits: list[_Wait]) -> list[int]:
    """Return the ranks that did not enter a collective in which other ranks wait."""
    inside = {rank for wait in waits for rank in wait.inside}
    late = {rank for wait in waits if wait.inside for rank in wait.late}

    # A rank that is late in one group because it waits in another group is not at fault.
    return sorted(late - inside or late)


# Rank -> number -> the collective that the rank entered. Numbers count up in each process group and mean the same
# collective on all ranks unless something is wrong.
History = dict[int, dict[int, Collective]]


def _by_group(dumps: dict[int, list[dict[str, Any]]]) -> dict[str, History]:
    """Return the collectives of each process group. Ranks that share a list of entries share the result."""
    groups: dict[str, History] = {}
    made: dict[int, dict[str, dict[int, Collective]]] = {}

    # Ranks in the order of their numbers, so that the first one of a group stands for it.
    for rank, entries in sorted(dumps.items()):
        if id(entries) not in made:
            made[id(entries)] = _entered(entries)

        for name, entered in made[id(entries)].items():
            # Every rank belongs to the default group, including a rank that entered none of its collectives.
            if name not in groups:
                groups[name] = {member: {} for member in sorted(dumps)} if name == DEFAULT_GROUP else {}

            groups[name][rank] = entered

    return groups


def _entered(entries: list[dict[str, Any]]) -> dict[str, dict[int, Collective]]:
    """Return the collectives that a rank entered, by process group and number."""
    found: dict[str, dict[int, Collective]] = {}
    for entry in entries:
        short, description = entry["process_group"]
        name = description if description not in ("", "undefined") else short

        # Sends between two ranks have numbers of their own. Only whole numbers can be compared between ranks.
        if not entry.get("is_p2p"):
            number = operator.index(entry["collective_seq_id"])
            found.setdefault(name, {})[number] = Collective.from_entry(entry)

    return found


def _mismatch(history: History) -> str | None:
    """Describe the earliest collective that is not the same on all ranks; later differences follow from it."""
    # Ranks that share their collectives are looked at once.
    sharing: dict[int, list[int]] = {}
    for rank, entered in history.items():
        sharing.setdefault(id(entered), []).append(rank)

    different = [(history[ranks[0]], ranks) for ranks in sharing.values()]

    for number in sorted(set().union(*(entered for entered, _ in different))):
        seen: dict[tuple[str, ...], list[int]] = {}
        for entered, ranks in different:
            if number in entered:
                seen.setdefault(entered[number].signature, []).extend(ranks)

        if len(seen) > 1:
            parts = [f"{listed_ranks(sorted(ranks))} did {history[min(ranks)][number]}" for ranks in seen.values()]
            return f"collective {number} differs: {'; '.join(parts)}"

    return None


class _Wait:
    """The first collective in which ranks of a group wait. Either some ranks never entered it, or it does not end."""

    def __init__(self, history: History):
        self.history = history

        # Collectives of a group end in order, so the first one that does not is the one that hangs.
        unfinished = [number for entered in history.values() for number in entered if not entered[number].finished]
        self.first = min(unfinished, default=0)

        # Ranks that are past this collective do not wait; the source of a broadcast, for example, leaves early.
        waiting = (rank for rank, entered in history.items() if self.first in entered)
        self.inside = [rank for rank in waiting if not history[rank][self.first].finished]
        self.late = [rank for rank, entered in history.items() if max(entered, default=0) < self.first]

    def text(self) -> str | None:
        """Return who waits in which collective and who never entered it, or None if no rank waits."""
        if not self.inside:
            return None

        collective = f"collective {self.first}, {self.history[self.inside[0]][self.first]}"
        if not self.late:
            return f"all ranks have entered {collective}, and it does not end: suspect network or device"

        verb = "waits" if len(self.inside) == 1 else "wait"
        lasts = [
            f"{listed_ranks([rank])} never entered it ({_last(self.history[rank])})"
            for rank in self.late[:MAX_RANKS_NAMED]
        ]
        if len(self.late) > MAX_RANKS_NAMED:
            lasts.append(f"nor did {len(self.late) - MAX_RANKS_NAMED} more")

        return f"{listed_ranks(self.inside)} {verb} in {collective}; {'; '.join(lasts)}"


def _last_ones(history: History) -> list[Collective]:
    """Return the newest collective of each rank that has entered one."""
    return [entered[max(entered)] for entered in history.values() if entered]


def _last(entered: dict[int, Collective]) -> str:
    """Return text about the newest collective of a rank."""
    return f"its last was {max(entered)}, {entered[max(entered)]}" if entered else "it entered none"
