"""A wire between two network namespaces that holds every packet for a while: `tc netem` is not in every kernel.

    delaylink.py --ns1 A --ns2 B --delay-ms 20 --mbit 100 [--loss 0.01]

It makes the interfaces d1 (10.78.0.1) in A and d2 (10.78.0.2) in B, prints a line when they are up, and carries packets
between them until it is killed. The delay is that of one way. Needs root, /dev/net/tun and iproute2.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import secrets
import select
import struct
import subprocess
import time
from collections import deque

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
MTU = 9000
LARGEST_QUEUE = 8_000_000  # bytes; what comes on top is dropped, as by any router


class Way:
    """One direction of the wire: packets, and when each is due at the other end."""

    def __init__(self, delay_s: float, bytes_per_s: float, loss: float):
        self._delay_s, self._bytes_per_s, self._loss = delay_s, bytes_per_s, loss
        self._packets: deque[tuple[float, bytes]] = deque()
        self._queued = 0
        self._free_at = 0.0

    def put(self, packet: bytes, now: float) -> None:
        if self._queued > LARGEST_QUEUE or random.random() < self._loss:
            return
        self._free_at = max(now, self._free_at) + len(packet) / self._bytes_per_s
        self._packets.append((self._free_at + self._delay_s, packet))
        self._queued += len(packet)

    def due(self, now: float) -> list[bytes]:
        packets = []
        while self._packets and self._packets[0][0] <= now:
            packets.append(self._packets.popleft()[1])
            self._queued -= len(packets[-1])
        return packets

    @property
    def next_due(self) -> float:
        return self._packets[0][0] if self._packets else float("inf")


def make_interface(name: str, address: str, namespace: str) -> int:
    """Return the file of a new interface in this namespace: what is written there arrives there."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    unique = f"lk{secrets.token_hex(4)}"  # until it has moved: others may make wires at the same time
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", unique.encode(), IFF_TUN | IFF_NO_PI))
    for words in (
        ["ip", "link", "set", unique, "netns", namespace, "name", name],
        ["ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", name],
        ["ip", "-n", namespace, "link", "set", name, "mtu", str(MTU), "up"],
    ):
        subprocess.run(words, check=True)
    return fd


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ns1", required=True)
    parser.add_argument("--ns2", required=True)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--mbit", type=float, default=1e6)
    parser.add_argument("--loss", type=float, default=0.0)
    options = parser.parse_args()

    ends = [make_interface(f"d{n}", f"10.78.0.{n}", space) for n, space in ((1, options.ns1), (2, options.ns2))]
    ways = [Way(options.delay_ms / 1e3, options.mbit * 1e6 / 8, options.loss) for _ in ends]
    poll = select.epoll()
    for end in ends:
        poll.register(end, select.EPOLLIN)
    print("up", flush=True)

    while True:
        wait = min(way.next_due for way in ways) - time.monotonic()
        poll.poll(min(max(wait, 0.0), 1.0))
        for way, end, other in zip(ways, ends, reversed(ends), strict=True):
            try:
                while True:
                    way.put(os.read(end, 65536), time.monotonic())
            except BlockingIOError:
                pass
            for packet in way.due(time.monotonic()):
                try:
                    os.write(other, packet)
                except OSError:
                    pass  # lost, as on any wire


if __name__ == "__main__":
    main()
