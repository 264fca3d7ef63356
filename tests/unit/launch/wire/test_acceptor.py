"""The handshake of a connection, and what an unknown peer gets."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time

import pytest

from lockstep.errors import UserError
from lockstep.launch.wire import acceptor
from lockstep.launch.wire.acceptor import Acceptor
from lockstep.launch.wire.connections import bind_join_address, reach
from lockstep.runtime.rendezvous import handshake
from lockstep.runtime.rendezvous.handshake import HandshakeFailed, Secret
from ports import free_port

OURS, THEIRS = Secret(b"the secret of this job", "a test"), Secret(b"that of another job", "elsewhere")


class Meeting:
    """An acceptor on a thread of its own, and the connections that it has admitted."""

    def __init__(self):
        self.join = f"127.0.0.1:{free_port()}"
        self.acceptor = Acceptor(bind_join_address(self.join), OURS, lambda first: None)
        self.admitted = []
        self._open = True
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.join.partition(":")[2])

    def _serve(self):
        while self._open:
            self.admitted += self.acceptor.poll(time.monotonic())
            time.sleep(0.001)

    def end(self):
        self._open = False
        self._thread.join()
        self.acceptor.close()
        for connection, _ in self.admitted:
            connection.close()

    def wait_for(self, count: int) -> None:
        """Wait until this many were admitted: they have their answer a moment before that."""
        deadline = time.monotonic() + 60
        while len(self.admitted) < count:
            assert time.monotonic() < deadline, self.admitted
            time.sleep(0.001)
        assert len(self.admitted) == count

    def reasons(self, *expected: str) -> None:
        """Wait until peers were rejected for these reasons, and for no others."""
        deadline = time.monotonic() + 60
        while set(self.acceptor.rejected) != set(expected):
            assert time.monotonic() < deadline, self.acceptor.rejected
            time.sleep(0.01)


@pytest.fixture
def meeting():
    made = Meeting()
    yield made
    made.end()


def test_who_knows_the_secret_comes_in(meeting):
    reach(meeting.join, None, OURS).close()
    meeting.wait_for(1)
    meeting.reasons()


def test_who_does_not_says_what_to_do(meeting):
    with pytest.raises(UserError, match=r"the secret here is from elsewhere\n.*LOCKSTEP_SECRET"):
        reach(meeting.join, None, THEIRS)
    assert meeting.admitted == []
    meeting.reasons(handshake.WRONG_SECRET)


def test_an_unknown_peer_gets_a_random_number_and_a_no(meeting):
    heard = []
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", meeting.port)) as line:
            line.sendall(b"0" * 64 + b" " + b"0" * 64 + b"\n")
            said = b""
            while data := line.recv(4096):
                said += data
            heard.append(said)
    assert [len(said) for said in heard] == [130, 130]
    assert [said[65:] for said in heard] == [acceptor.NO_PROOF] * 2
    assert heard[0][:65] != heard[1][:65]


@pytest.mark.parametrize(
    ("challenge", "proof", "why"),
    [
        (b"0" * 64 + b"\n", b"1" * 64 + b"\n", "what listens there does not know the job's secret"),
        (b"220 mail.example.com ESMTP".ljust(65), b"", "what listens there sent something that is not an answer"),
    ],
)
def test_a_rogue_coordinator_is_not_believed(challenge, proof, why):
    def answer():
        with listener.accept()[0] as line:
            line.sendall(challenge)
            line.recv(130)
            line.sendall(proof)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UserError, match=why):
            reach(f"127.0.0.1:{listener.getsockname()[1]}", None, OURS)
        thread.join()


def test_a_coordinator_that_answers_digit_by_digit_gains_no_time(monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.3)
    ours, theirs = socket.socketpair()
    stop, digits = threading.Event(), []

    def drip():
        while not stop.wait(0.05):
            theirs.sendall(b"0")
            digits.append(b"0")

    with ours, theirs:
        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with pytest.raises(handshake.HandshakeUnanswered):
                handshake.authenticate(ours, OURS)
        finally:
            stop.set()
            thread.join()
        assert len(digits) < 65


# Unknown peers, one kind after the other; the time is the test's


@pytest.fixture
def polled_acceptor():
    """An acceptor that accepts when the test says so."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    firsts, lines = [], []
    made = Acceptor(listener, OURS, firsts.append)

    def connect(data: bytes = b"") -> socket.socket:
        lines.append(socket.create_connection(listener.getsockname()))
        lines[-1].sendall(data)
        return lines[-1]

    yield made, connect, firsts
    made.close()
    for line in lines:
        line.close()


def turn(polled: Acceptor, reason: str, now: float = 0.0) -> None:
    """Wait for the kernel, which may take a moment to deliver."""
    deadline = time.monotonic() + 60
    while reason not in polled.rejected:
        assert polled.poll(now) == []
        assert time.monotonic() < deadline, polled.rejected


@pytest.mark.parametrize("data", [b"GET / HTTP/1.0\r\n\r\n", b"\x00", b"0" * 2**20, b"0" * 129 + b"\n"])
def test_noise(polled_acceptor, data):
    polled, connect, _ = polled_acceptor
    line = connect()
    threading.Thread(target=_try_to_send, args=(line, data), daemon=True).start()
    turn(polled, handshake.NOT_AN_ANSWER)


def _try_to_send(line: socket.socket, data: bytes) -> None:
    try:
        line.sendall(data)
    except OSError:
        pass


def test_half_an_answer(polled_acceptor):
    polled, connect, _ = polled_acceptor
    connect(b"0" * 40).close()
    turn(polled, acceptor.HUNG_UP)


def test_a_look_at_the_port_is_not_worth_a_word(polled_acceptor):
    polled, connect, _ = polled_acceptor
    connect().close()
    for _ in range(5):
        assert polled.poll(0.0) == []
        time.sleep(0.02)
    assert len(polled.sockets(0.0)) == 1
    assert polled.rejected == {}


@pytest.mark.parametrize("data", [b"", b"0"])
def test_silence_has_an_end_even_if_digits_come_now_and_then(polled_acceptor, data):
    polled, connect, _ = polled_acceptor
    line = connect(data)
    for second in range(5):
        polled.poll(float(second))
        line.sendall(data)
    turn(polled, acceptor.SILENT, 5.1)


def test_a_crowd_makes_room_for_others(polled_acceptor, monkeypatch):
    polled, connect, firsts = polled_acceptor
    monkeypatch.setattr(polled, "_most", 8)
    for _ in range(30):
        connect()
    turn(polled, acceptor.TOO_MANY)
    assert len(polled.sockets(0.0)) <= 1 + 8
    assert [first.reason for first in firsts] == [acceptor.TOO_MANY]
    assert polled.rejected[acceptor.TOO_MANY] > 1


class Exhausted:
    """A listener in a process that may open no more files."""

    def accept(self):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def close(self):
        pass


def test_without_descriptors_nothing_is_accepted_for_a_moment(polled_acceptor):
    polled, connect, _ = polled_acceptor
    connect()
    while not polled.sockets(0.0)[1:]:
        polled.poll(0.0)
    listener, polled._listener = polled._listener, Exhausted()
    polled.poll(0.0)
    assert polled.sockets(0.1) == []  # nothing that would wake the coordinator again and again
    polled._listener = listener
    assert polled.sockets(1.5) == [listener]
    assert polled.rejected[acceptor.FEW_DESCRIPTORS] == 2


def test_a_proof_is_good_for_one_connection(polled_acceptor):
    polled, connect, _ = polled_acceptor
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pending = acceptor.Handshake(theirs, "here", 0.0)
        answers = []
        thread = threading.Thread(target=lambda: answers.append(handshake.authenticate(ours, OURS)))
        thread.start()
        while pending.poll(OURS, 0.0) is None:
            pass
        thread.join()
        recorded = pending._answer
    assert len(answers) == 1
    connect(recorded)
    turn(polled, handshake.WRONG_SECRET)


def test_a_proof_of_another_side_is_no_proof():
    """A challenge that is sent back would otherwise prove anything."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"0" * 64 + b"\n")
        thread = threading.Thread(target=lambda: theirs.sendall(theirs.recv(130)[65:]))
        thread.start()
        with pytest.raises(HandshakeFailed) as refusal:
            handshake.authenticate(ours, OURS)
        thread.join()
    assert str(refusal.value) == handshake.WRONG_SECRET
