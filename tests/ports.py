"""Ports for tests that must name one before anybody listens on it."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free_port() -> int:
    """One that the system gives to nobody by itself, as it does with those that `bind` to 0 finds: between the test's
    look and its use, some other connection on this machine could have that one."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    draw = random.SystemRandom()  # several sessions may run at once
    for _ in range(1000):
        port = draw.randrange(min(20_000, lowest - 1_000), lowest)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("no port is free")
