"""Limits of time that several packages of the launcher share; `tests/unit/launch/test_times.py` compares them."""

from __future__ import annotations

# Seconds between two heartbeats: of a node, and of the coordinator in the run folder.
BEAT_S = 1.0

# A node that sends nothing for this long is lost.
LOST_AFTER_S = 5.0

HOUR_S = 3600.0


def within_last_hour(times: list[float], now: float) -> list[float]:
    """Return the times that are at most an hour ago."""
    return [moment for moment in times if now - moment <= HOUR_S]
