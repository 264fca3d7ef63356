"""An unknown peer at the join port: noise, half lines, lines without end, replays, crowds of connections, slow readers.

As a benchmark, with the large numbers, and as another user if it is started by root:

    python tests/faults/intruder.py --connections 2000 --megabytes 1000
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

HELLO = {"kind": "Hello", "host": "\x1b[2Jevil", "nproc": {"least": 1, "most": 1}, "identity": {}}
SIGNAL = {"kind": "SignalReceived", "signal": "SIGTERM\x1b]0;evil\x07"}


def noise(port: int, amount: int) -> None:
    """Things that are no answer: another protocol, messages without a proof, bytes."""
    for line in (b"GET / HTTP/1.0\r\n\r\n", json.dumps(HELLO).encode(), json.dumps(SIGNAL).encode(), b"\xff" * amount):
        _say(port, line + b"\n")


def half_lines(port: int, amount: int) -> None:
    """The beginning of an answer, and then the end of the connection."""
    for length in range(1, amount + 1):
        _say(port, b"0" * min(length, 100))


def endless_line(port: int, megabytes: int) -> None:
    """As many bytes as the other side takes, without a newline; and again, until this many were offered."""
    for _ in range(megabytes):
        _say(port, b"0" * 2**20)


def wrong_proofs(port: int, amount: int) -> None:
    """Answers of the right form, but guessed."""
    for _ in range(amount):
        _say(port, b"0" * 64 + b" " + b"1" * 64 + b"\n")


def replays(port: int, recorded: bytes) -> None:
    """All that a node has sent to the coordinator, once more: its answer, its Hello and its signals."""
    for _ in range(3):
        _say(port, recorded)


def visit_store(port: int) -> list[str]:
    """Use torch's own client on a port, and spoil all that is found in the store there. Returns what was possible."""
    import torch.distributed as dist

    done = []
    with suppress(RuntimeError):
        second = timedelta(seconds=1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=second)
        done.append("connect")
        for key in store.list_keys():
            done.append(f"list {key}")
            store.set(key, "evil")
            store.add(f"{key}/count", 1)
            store.delete_key(key)
        store.set("evil", "evil")
        done.append("set")
    return done


def crowd(port: int, amount: int) -> list[socket.socket]:
    """Connections that say nothing. The caller closes them."""
    waiting = []
    for _ in range(amount):
        with suppress(OSError):
            waiting.append(socket.create_connection(("127.0.0.1", port), 5.0))
    return waiting


def slow_readers(port: int, amount: int) -> list[socket.socket]:
    """Connections that read nothing and drop a digit now and then. The caller closes them."""
    waiting = []
    for _ in range(amount):
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        with suppress(OSError):
            line.connect(("127.0.0.1", port))
            line.sendall(b"0")
        waiting.append(line)
    return waiting


# For a connection and the first line of the other side, which may have to wait for a core.
PATIENCE_S = 60.0


def _say(port: int, data: bytes) -> bool:
    """Connect, say it and hang up. Returns whether all of it was taken."""
    try:
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as line:
            line.recv(65)
            line.sendall(data)
            line.settimeout(1.0)
            line.recv(65)
    except OSError:
        return False
    return True


class Tap:
    """A relay between a node and the coordinator which keeps what the node says, or changes what it hears."""

    def __init__(self, port: int, change: Callable[[bytes], bytes] = lambda data: data):
        self.recorded = b""
        self._target, self._change = port, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                node, _ = self._listener.accept()
                coordinator = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._copy, args=(node, coordinator, True), daemon=True).start()
                threading.Thread(target=self._copy, args=(coordinator, node, False), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, from_node: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if from_node:
                    self.recorded += data
                target.sendall(data if from_node else self._change(data))
        for line in (source, target):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


def everything(port: int, connections: int, megabytes: int) -> None:
    """All attacks, one after the other; the connections stay open until the end."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(connections + 200, hard), hard))
    with ExitStack() as stack:
        for line in (*slow_readers(port, 30), *crowd(port, connections)):
            stack.enter_context(line)
        noise(port, 100_000)
        half_lines(port, 20)
        wrong_proofs(port, 20)
        endless_line(port, megabytes)
        time.sleep(6.0)  # until those who say nothing have run out of time


# ---- the benchmark ----


def _train(folder: Path, ports: Sequence[int], words: list[str], during: Callable[[], None]) -> tuple[list[int], str]:
    """Train on two nodes, which meet at these ports: the second may be that of a relay to the first."""
    command = [sys.executable, "-m", "lockstep", "train", "char_lm", "--nproc", "1", "--nnodes", "2"]
    command += [f"run_dir={folder / 'run'}", *words]
    with (folder / "output").open("wb") as output:
        nodes = []
        try:
            for port in ports:
                join = ["--join", f"127.0.0.1:{port}"]
                nodes.append(subprocess.Popen([*command, *join], cwd=folder, stdout=output, stderr=output))
                while not _listens(ports[0]):
                    time.sleep(0.05)
            during()
            return [node.wait() for node in nodes], (folder / "output").read_text(errors="replace")
        finally:
            for node in nodes:
                node.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _attack(port: int, tap: Tap, connections: int, megabytes: int) -> None:
    while tap.recorded.count(b"\n") < 3:
        time.sleep(0.05)
    replays(port, tap.recorded)
    arguments = [sys.executable, __file__, "--at", str(port), str(connections), str(megabytes)]
    subprocess.run(arguments, check=True)


def main() -> None:
    from faults.torture import digests
    from lockstep.launch.wire import acceptor
    from lockstep.runtime.rendezvous import handshake
    from ports import free_port

    parser = argparse.ArgumentParser()
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=3000)  # the job must outlast the attack
    options = parser.parse_args()
    words = ["preset=tiny", f"steps={options.steps}", "evaluate.at_end=false"]

    with tempfile.TemporaryDirectory() as top:
        found = []
        counts: dict[str, int] = {}
        for name in ("undisturbed", "attacked"):
            folder, port = Path(top) / name, free_port()
            folder.mkdir()
            tap = Tap(port)
            attack = partial(_attack, port, tap, options.connections, options.megabytes)
            ports, during = ((port, tap.port), attack) if name == "attacked" else ((port, port), lambda: None)

            began = time.monotonic()
            codes, output = _train(folder, ports, words, during)
            found.append(digests(folder / "run"))
            print(f"{name}: exit codes {codes}, {time.monotonic() - began:.1f} s")
            print("\n".join(line for line in output.splitlines() if "unknown peer" in line))
            for line in (folder / "run" / "events.jsonl").read_text().splitlines():
                if '"unknown_peers"' in line:
                    counts |= json.loads(line)["counts"]

    print(json.dumps(counts, indent=2))
    print("the same hash of every tensor" if found[0] == found[1] else "ANOTHER RESULT")

    # An attack that came too late, or was never seen, proves nothing.
    unseen = {
        handshake.WRONG_SECRET,
        handshake.NOT_AN_ANSWER,
        acceptor.SILENT,
        acceptor.HUNG_UP,
        acceptor.TOO_MANY,
    } - counts.keys()
    if unseen:
        print(f"never seen, so try more --steps: {', '.join(sorted(unseen))}")
    sys.exit(bool(unseen) or found[0] != found[1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--at"]:
        if os.geteuid() == 0:
            "".encode("idna")  # nobody may not read our Python: what sockets import late is imported now
            os.setuid(65534)  # nobody
        everything(*map(int, sys.argv[2:]))
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        main()
