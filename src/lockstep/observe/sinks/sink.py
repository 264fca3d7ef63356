"""The base class of sinks, which take the records of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar


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
