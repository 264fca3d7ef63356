"""The base classes of sinks, which take the records of a run, and what several of them read."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from lockstep.observe.formats import flat
from lockstep.run_folder.names import CONFIG
from lockstep.run_folder.run_dir import stored


class Sink(ABC):
    """Receives the records of rank 0, on a thread of its own. A sink that raises is reported once and dropped."""

    # The package that it imports, if that is not installed with Lockstep. It is also the name of an extra.
    package: ClassVar[str | None] = None

    # Patterns of the files that it writes into the run folder: `lockstep rm` deletes them.
    files: ClassVar[tuple[str, ...]] = ()

    # Prints a line for the user. It is set before the first record, for a sink that wants to say more than it raises.
    report: Callable[[str], None]

    @abstractmethod
    def __init__(self, run_dir: Path):
        """Open the sink of a run. A resumed run opens it again."""

    @abstractmethod
    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record, without changing it."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections. No record follows. A killed run never calls this."""

    @classmethod
    def is_offered(cls) -> bool | None:
        """Return whether the platform offers this sink, which is then used without being named; None: only by name."""
        return None


class ServiceSink(Sink):
    """A sink whose package has a run of its own, with a `finish()`. The first record that needs it opens it."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._opened: Any = None

    @abstractmethod
    def _open(self) -> Any:
        """Import the package, which takes a while, and return its run. A resumed run continues there."""

    @property
    def _run(self) -> Any:
        if self._opened is None:
            self._opened = self._open()

        return self._opened

    def close(self) -> None:
        if self._opened is not None:
            self._opened.finish()


# ---- the numbers of a record ----

# These say when a record was written, not how training goes.
NOT_SHOWN = ("time", "step")


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a metrics record ("loss", "accuracy") or of an evaluation ("eval/loss", "eval/val/loss").

    The event `metrics` holds what was logged after the last metrics record. Other events have none. NaN and infinity
    are numbers here: a curve should show them.
    """
    event = record.get("event")
    if event not in (None, "eval", "metrics"):
        return {}

    # A task with several evaluation sets has one name for each: eval/val/loss.
    prefix = "eval/" if event == "eval" else ""
    if event == "eval" and "set" in record:
        prefix += f"{record['set']}/"

    return {
        prefix + _name(key, record): float(value)
        for key, value in flat(record).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in NOT_SHOWN
    }


def _name(key: str, record: Mapping[str, Any]) -> str:
    """Return the name of a metric without its prefix, unless a number of the run has that name, as "lr" does."""
    short = key.removeprefix("metrics.")
    return key if short in record else short


# ---- facts about the run, for services ----

# The file in the run folder that holds its `run_id`.
RUN_ID = ".sink-id"


def run_id(run_dir: Path) -> str:
    """Return a name for the run that is the same after every resume, and that no other run has."""
    # Drawn once, by the first run in this folder.
    path = run_dir / RUN_ID
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:16])

    return path.read_text()


def settings_of(run_dir: Path) -> dict[str, Any]:
    """Return the settings of the run, as its folder holds them."""
    return stored(run_dir, CONFIG)
