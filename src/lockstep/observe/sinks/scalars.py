"""The numbers of a record by the names under which dashboards show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.observe.formats import flat

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
    prefix = ""
    if event == "eval":
        prefix = f"eval/{record['set']}/" if "set" in record else "eval/"

    # To Python, True is an int; on a curve it would be a 1.
    return {
        prefix + _name(key, record): float(value)
        for key, value in flat(record).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in NOT_SHOWN
    }


def _name(key: str, record: Mapping[str, Any]) -> str:
    """Return the name of a metric without its prefix, unless a number of the run has that name, as "lr" does."""
    short = key.removeprefix("metrics.")
    return key if short in record else short
