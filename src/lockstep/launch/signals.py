"""Signals to a launcher: requests to leave, which its loop takes up."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self

HEEDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Signals:
    """While entered, signals are collected here. Only a process's main thread can do that."""

    def __init__(self) -> None:
        self._received: list[str] = []
        self._before: dict[signal.Signals, object] = {}

    def take(self) -> list[str]:
        received, self._received = self._received, []
        return received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number).name)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in HEEDED}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyrefly: ignore
