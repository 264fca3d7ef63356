"""Counts the processes that the kernel has killed for lack of memory: an exit code shows only SIGKILL."""

from __future__ import annotations

import re
import time
from pathlib import Path

from lockstep import files

# How often they are counted.
COUNT_S = 30.0


class OomKills:
    """Counts every half minute, while the ranks run, how many processes the kernel has killed for lack of memory.

    If a rank has died of SIGKILL and the count has grown, the kernel killed it. Freeing its memory takes a while, so
    the last count may include it already: the count after its end is compared with `before`, the last count but one.
    """

    def __init__(self) -> None:
        self.before = self._last = so_far()
        self._counted = time.monotonic()

    def count(self) -> None:
        """Count again, if that is due: a kill of long ago is not the cause of a later SIGKILL."""
        if time.monotonic() - self._counted > COUNT_S:
            self.before, self._last = self._last, so_far()
            self._counted = time.monotonic()


def so_far() -> int | None:
    """Return how many processes of this cgroup the kernel has killed for lack of memory; None if that is not known."""
    # The first file that has a count.
    counts = (re.search(r"\boom_kill (\d+)", files.read(path)) for path in _memory_files())
    return next((int(count[1]) for count in counts if count), None)


def _memory_files() -> list[Path]:
    """Return the files that may hold the count: the cgroup's own file, or the file at the top, as in a container."""
    root = Path("/sys/fs/cgroup")
    paths = []
    for line in files.read(Path("/proc/self/cgroup")).splitlines():
        # cgroup v2 has one group for all controllers, v1 has one group for each.
        _, controllers, group = line.split(":", 2)
        if not controllers:
            paths += [root / group.strip("/") / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            paths += [root / "memory" / folder / "memory.oom_control" for folder in (group.strip("/"), "")]

    return paths
