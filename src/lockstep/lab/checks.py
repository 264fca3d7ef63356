"""What a lab script has shown: each statement with its value and its bound, and an exit code that says if all hold.

A script calls the same checks on all ranks and then `finish`, which gathers them: a check that fails on one rank fails
the script on all ranks, so a launcher sees one exit code.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Check:
    """One statement, and whether it holds on this rank."""

    statement: str
    found: str
    holds: bool


class Checks:
    """Collects the checks of a script. Call the same checks on all ranks: one that fails anywhere has failed."""

    def __init__(self, title: str):
        self.title = title
        self.results: list[Check] = []

    def true(self, statement: str, holds: bool, found: object = "") -> None:
        """Check that something holds; `found` is what was measured."""
        self.results.append(Check(statement, str(found), bool(holds)))

    def less(self, statement: str, value: float, bound: float) -> None:
        """Check that `value` is below `bound`."""
        sign = "<" if value < bound else "is not <"
        self.true(statement, value < bound, f"{value:.3g} {sign} {bound:.3g}")

    def near(self, statement: str, value: float, expected: float, *, percent: float) -> None:
        """Check that `value` is within `percent` of what was expected."""
        off = abs(value - expected) / abs(expected) * 100
        found = f"{value:.4g}, expected {expected:.4g} (off by {off:.1f} %, at most {percent:g} %)"
        self.true(statement, off <= percent, found)

    def equal(self, statement: str, value: object, expected: object) -> None:
        """Check that two values are the same."""
        same = value == expected
        self.true(statement, same, f"{value}" if same else f"{value}, expected {expected}")

    def finish(self) -> None:
        """Print the results of all ranks on rank 0; exit with code 1 on every rank if one check failed on any rank."""
        everywhere = self._gather()
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._print(everywhere)

        # All ranks have all results, so all of them exit alike.
        if any(not check.holds for results in everywhere for check in results):
            sys.exit(1)

    def _gather(self) -> list[list[Check]]:
        """Return the checks of all ranks, by rank. Collective."""
        if not dist.is_initialized():
            return [self.results]

        everywhere: list[list[Check]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, self.results)
        return everywhere

    def _print(self, everywhere: list[list[Check]]) -> None:
        """Print a line for each check: of rank 0, or of the first rank on which it failed."""
        print(f"\n{self.title}")
        for position, check in enumerate(everywhere[0]):
            failed = [rank for rank, results in enumerate(everywhere) if not results[position].holds]
            shown = everywhere[failed[0]][position] if failed else check

            # With a single rank, its number says nothing.
            where = f" (rank {failed[0]})" if failed and len(everywhere) > 1 else ""
            print(f"  {'FAIL' if failed else 'ok  '} {shown.statement}: {shown.found}{where}")

        sys.stdout.flush()
