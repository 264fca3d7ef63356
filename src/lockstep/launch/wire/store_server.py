"""The server of the ranks' store, in the coordinating launcher of several nodes. `GuardedStore` is the client.

Torch's TCPStore is not enough: any process that reaches its port can list, change and delete the keys, and the ranks
connect to whatever addresses they find there. So a client must prove to the `Acceptor` that it knows the key of this
attempt, which nodes derive from the job's secret. Nor could the launcher serve a TCPStore, because it does not import
torch; and one that rank 0 serves would end with rank 0, and needs a port that is still free when rank 0 has started.
"""

from __future__ import annotations

import json
import secrets
import socket
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.launch.wire.acceptor import MOST_PENDING, OTHER_FILES, Acceptor, Rejection, allow_files
from lockstep.launch.wire.connections import listen_at, unused_port
from lockstep.launch.wire.messages import Rendezvous
from lockstep.launch.wire.sockets import LineReader, ReadySockets
from lockstep.runtime.rendezvous.handshake import LineSigner, Secret, sign

# Why a peer that sent an invalid request on a rank's connection is reported.
FORGED = "changed a request of a rank to its store: the signature is wrong"

# The number of connections for each rank. All ranks come at once and some come again, so twice as many handshakes
# may be under way.
PER_RANK = 4


def store_secret(secret: Secret, nonce: str) -> Secret:
    """Return the key of one attempt's store. Ranks get this key, and never the job's secret."""
    return Secret(sign(secret.key, b"store", nonce.encode()), f"{secret.source}, for one attempt")


@dataclass
class PendingGet:
    """A request that is answered when the store has all `keys`, or at its deadline."""

    keys: list[str]
    deadline: float
    with_values: bool


class StoreClient:
    """The connection of one rank."""

    def __init__(self, connection: socket.socket, signer: LineSigner):
        self.connection = connection
        self.address = connection.getpeername()[0]
        self.waiting: PendingGet | None = None

        # A rank sends one request after the other, each in a line that it signs.
        self._signer = signer
        self._lines = LineReader(connection)

        # For sending an answer. A rank that has sent a request reads it, unless it is suspended.
        connection.settimeout(2.0)

    def fileno(self) -> int:
        return self.connection.fileno()

    def requests(self) -> list[dict[str, Any]]:
        """Return the requests that have arrived. Raises OSError if the rank is gone, ValueError if one is not valid."""
        lines = self._lines.read()
        if self._lines.ended:
            raise ConnectionResetError("the rank hung up")

        return [json.loads(self._signer.check(line)) for line in lines]

    def answer(self, answer: dict[str, Any]) -> None:
        """Send an answer. Raises OSError if the rank does not take it in time."""
        self.connection.sendall(self._signer.sign(json.dumps(answer).encode()) + b"\n")


class StoreServer:
    """The keys and values of one attempt, and the connections of its ranks. No method blocks for long.

    The launcher calls `poll` again and again, between its other duties. What a call costs depends on how many ranks
    have sent something, and hardly on how many there are.
    """

    def __init__(self, listener: socket.socket, secret: Secret, ranks: int, on_first: Callable[[Rejection], None]):
        # Every connection and every handshake that is under way is an open file.
        listener.setblocking(False)
        self._acceptor = Acceptor(listener, secret, on_first, max(MOST_PENDING, 2 * PER_RANK * ranks))
        allow_files(OTHER_FILES + 3 * PER_RANK * ranks)

        self._values: dict[str, bytes] = {}
        self._clients: dict[int, StoreClient] = {}  # by file descriptor
        self._ready = ReadySockets()

        # The clients that wait, by the first key that is missing, and those whose wait may be over in this turn.
        self._waiting: dict[str, set[StoreClient]] = {}
        self._to_check: dict[StoreClient, None] = {}
        self._next_look = 0.0

    def sockets(self, now: float) -> list[Any]:
        """Return what to wait for: new connections and handshakes, and all ranks as one."""
        return [*self._acceptor.sockets(now), self._ready]

    def poll(self, now: float) -> None:
        """Accept ranks, and answer the requests that can be answered."""
        # New connections have proven that they know the key.
        for connection, signer in self._acceptor.poll(now):
            try:
                self._clients[connection.fileno()] = StoreClient(connection, signer)
                self._ready.add(connection)
            except OSError:
                connection.close()  # the rank was killed just after its handshake

        # Requests of a rank are served in their order. What a rank waits for is checked at the end of the turn.
        for descriptor in self._ready.descriptors():
            client = self._clients[descriptor]
            try:
                for request in client.requests():
                    self._serve(client, request, now)
            # The rank is gone.
            except OSError:
                self._drop(client)
            except (ValueError, KeyError, TypeError):
                self._drop(client)
                self._acceptor.note_rejection(FORGED, client.address)

        # Deadlines are looked at ten times a second: ranks wait for seconds.
        if now >= self._next_look:
            self._next_look = now + 0.1
            late = [client for client in self._clients.values() if client.waiting and now >= client.waiting.deadline]
            self._to_check.update(dict.fromkeys(late))

        # Waits that may be over: their key was set, or their deadline has come.
        to_check, self._to_check = self._to_check, {}
        for client in to_check:
            try:
                self._end_wait(client, now)
            except OSError:
                self._drop(client)

    def _serve(self, client: StoreClient, request: dict[str, Any], now: float) -> None:
        """Answer a request now, or begin to wait for its keys."""
        what = request["what"]
        if what in ("wait", "get"):
            # Answered at the end of this poll, at the earliest.
            client.waiting = PendingGet(request["keys"], now + request["seconds"], with_values=what == "get")
            self._to_check[client] = None
        else:
            try:
                answer = {"answer": self._carry_out(what, request)}
                # The key may be the one that other ranks wait for.
                woken = self._waiting.pop(request.get("key", ""), ())
                self._to_check.update(dict.fromkeys(woken))
            except (ValueError, KeyError, TypeError) as error:
                # The signature is right, so this is a mistake of the rank, which gets the error as its answer.
                answer = {"refused": f"{what} of {request.get('key')!r}: {error}"}

            client.answer(answer)

    def _carry_out(self, what: str, request: dict[str, Any]) -> Any:
        """Carry out a request that can be answered at once, and return the answer. Values travel in base64."""
        values = self._values
        match what:
            case "set":
                values[request["key"]] = b64decode(request["value"])
                return None

            case "add":
                # A counter is kept as text, like in torch's stores, so that `get` of it returns the same bytes.
                total = int(values.get(request["key"], b"0")) + request["amount"]
                values[request["key"]] = b"%d" % total
                return total

            case "append":
                values[request["key"]] = values.get(request["key"], b"") + b64decode(request["value"])
                return None

            case "compare_set":
                # As torch's stores do: a missing key equals an empty value; if it differs, `expected` is returned.
                key, expected = request["key"], b64decode(request["expected"])
                if values.get(key, b"") == expected:
                    values[key] = b64decode(request["desired"])

                return _text(values.get(key, expected))

            case "check":
                return all(key in values for key in request["keys"])

            case "delete":
                return values.pop(request["key"], None) is not None

            case "count":
                return len(values)

            case _:
                raise ValueError(f"{what!r} is not a request")

    def _end_wait(self, client: StoreClient, now: float) -> None:
        """Answer a client that waits, if its keys are there or its time is up."""
        waiting = client.waiting
        if waiting is None:
            return

        missing = next((key for key in waiting.keys if key not in self._values), None)

        # A client that must go on waiting is listed under the first key that is missing: until that key is set, or the
        # deadline comes, no turn looks at it, however many ranks wait.
        if missing is None:
            # Forget the request first: the answer may fail, and the client is dropped then.
            values = [_text(self._values[key]) for key in waiting.keys] if waiting.with_values else None
            client.waiting = None
            client.answer({"answer": values})
        elif now >= waiting.deadline:
            client.waiting = None
            self._waiting.get(missing, set()).discard(client)
            client.answer({"timeout": True})
        else:
            self._waiting.setdefault(missing, set()).add(client)

    def _drop(self, client: StoreClient) -> None:
        """Close the connection of a rank."""
        # A client may be dropped twice in a turn: it was checked although its request was not valid.
        if self._clients.pop(client.fileno(), None) is not None:
            self._ready.remove(client)
            client.waiting = None
            client.connection.close()

    def close(self) -> None:
        """Close all connections, and forget the clients."""
        self._acceptor.close()
        for client in self._clients.values():
            client.connection.close()

        self._clients.clear()
        self._ready.close()


class AttemptStore:
    """Where the ranks of one attempt after another meet: in a new store each, with no addresses of an earlier attempt.

    On one node the store is a file (`rank_environment`). On several it is a server, bound at `address`, which listens
    before any rank starts.
    """

    def __init__(self, address: str, secret: Secret | None, on_first: Callable[[Rejection], None]):
        self._address = address
        self._secret = secret
        self._on_first = on_first

        # None while the ranks are on one node, or none run.
        self._server: StoreServer | None = None

    def open(self, nodes: int, ranks: int) -> Rendezvous:
        """Close the store of the last attempt, and return where the ranks of the next one meet."""
        self.close()
        if nodes == 1:
            return Rendezvous("127.0.0.1", unused_port("127.0.0.1"))

        # A key for this attempt only: ranks of an earlier attempt cannot reach the new store.
        assert self._secret is not None
        nonce = secrets.token_hex(16)

        listener = listen_at(self._address, 0)
        self._server = StoreServer(listener, store_secret(self._secret, nonce), ranks, self._on_first)

        return Rendezvous(self._address, unused_port(self._address), listener.getsockname()[1], nonce)

    def sockets(self, now: float) -> list[Any]:
        """Return what to wait for, if there is a server."""
        return self._server.sockets(now) if self._server is not None else []

    def poll(self, now: float) -> None:
        """Serve the ranks, if there is a server."""
        if self._server is not None:
            self._server.poll(now)

    def close(self) -> None:
        """Close the server of the last attempt, if it had one."""
        if self._server is not None:
            self._server.close()
            self._server = None


def _text(value: bytes) -> str:
    return b64encode(value).decode()
