"""The secret of a job, the proof that a node knows it, and the room for those who do not."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.launch.wire import door
from lockstep.launch.wire.connections import bind_join_address, reach
from lockstep.launch.wire.door import Door, find_secret
from lockstep.runtime.rendezvous import proof
from lockstep.runtime.rendezvous.proof import NotProven, Secret
from ports import free_port

OURS, THEIRS = Secret(b"the secret of this job", "a test"), Secret(b"that of another job", "elsewhere")


# The secret


@pytest.fixture(autouse=True)
def no_secret(monkeypatch):
    for name in (door.SECRET, door.SECRET_FILE):
        monkeypatch.delenv(name, raising=False)


def test_the_first_node_makes_the_secret_and_the_others_find_it(tmp_path):
    path = tmp_path / "run" / ".secret"
    made = [find_secret(path) for _ in range(3)]
    assert len({secret.key for secret in made}) == 1
    assert len(made[0].key) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [".secret"]
    assert made[0].key.decode() not in repr(made[0])


def test_nodes_that_start_at_once_agree(tmp_path):
    found = []
    threads = [threading.Thread(target=lambda: found.append(find_secret(tmp_path / ".secret").key)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_the_environment_hands_over_a_secret_or_a_file(tmp_path, monkeypatch):
    named = tmp_path / "named"
    named.write_text("a secret in a file\n")
    named.chmod(0o600)
    monkeypatch.setenv(door.SECRET_FILE, str(named))
    assert find_secret(tmp_path / ".secret").key == b"a secret in a file"
    monkeypatch.setenv(door.SECRET, "a secret in the environment")
    assert find_secret(tmp_path / ".secret").key == b"a secret in the environment"
    assert not (tmp_path / ".secret").exists()
    monkeypatch.setenv(door.SECRET, "too short")
    with pytest.raises(UserError, match="openssl rand -hex 32"):
        find_secret(tmp_path / ".secret")


@pytest.mark.parametrize("how", ["for all to read", "a link", "a pipe"])
def test_a_secret_that_others_may_know_is_refused(tmp_path, how):
    path = tmp_path / ".secret"
    match how:
        case "for all to read":
            path.write_text("0" * 64)
            path.chmod(0o644)
        case "a link":
            (tmp_path / "elsewhere").write_text("0" * 64)
            path.symlink_to(tmp_path / "elsewhere")
        case _:
            os.mkfifo(path, 0o644)
    with pytest.raises(UserError, match="secret"):
        find_secret(path)


# Proofs


class Meeting:
    """A door that somebody opens all the time, and those who passed it."""

    def __init__(self):
        self.join = f"127.0.0.1:{free_port()}"
        self.door = Door(bind_join_address(self.join), OURS)
        self.admitted = []
        self._open = True
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.join.partition(":")[2])

    def _serve(self):
        while self._open:
            self.admitted += self.door.poll(time.monotonic())
            time.sleep(0.001)

    def end(self):
        self._open = False
        self._thread.join()
        self.door.close()
        for connection, _ in self.admitted:
            connection.close()

    def wait_for(self, count: int) -> None:
        """Wait until this many have passed the door: they have their answer a moment before that."""
        deadline = time.monotonic() + 60
        while len(self.admitted) < count:
            assert time.monotonic() < deadline, self.admitted
            time.sleep(0.001)
        assert len(self.admitted) == count

    def kinds(self, *expected: str) -> None:
        """Wait until these kinds of strangers were turned away, and no others."""
        deadline = time.monotonic() + 60
        while set(self.door.turned_away) != set(expected):
            assert time.monotonic() < deadline, self.door.turned_away
            time.sleep(0.01)


@pytest.fixture
def meeting():
    made = Meeting()
    yield made
    made.end()


def test_who_knows_the_secret_comes_in(meeting):
    reach(meeting.join, None, OURS).close()
    meeting.wait_for(1)
    meeting.kinds()


def test_who_does_not_says_what_to_do(meeting):
    with pytest.raises(UserError, match=r"the secret here is from elsewhere\n.*LOCKSTEP_SECRET"):
        reach(meeting.join, None, THEIRS)
    assert meeting.admitted == []
    meeting.kinds(proof.WRONG)


def test_a_stranger_gets_a_random_number_and_a_no(meeting):
    heard = []
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", meeting.port)) as line:
            line.sendall(b"0" * 64 + b" " + b"0" * 64 + b"\n")
            said = b""
            while data := line.recv(4096):
                said += data
            heard.append(said)
    assert [len(said) for said in heard] == [130, 130]
    assert [said[65:] for said in heard] == [door.NO_PROOF] * 2
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
    monkeypatch.setattr(proof, "PROOF_S", 0.3)
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def drip():
        while not stop.wait(0.05):
            theirs.sendall(b"0")

    with ours, theirs:
        thread = threading.Thread(target=drip)
        thread.start()
        began = time.monotonic()
        try:
            with pytest.raises(proof.TurnedAway):
                proof.prove(ours, OURS)
        finally:
            stop.set()
            thread.join()
        assert time.monotonic() - began < 65 * 0.05


# Strangers, one kind after the other; the time is the test's


@pytest.fixture
def quiet_door():
    """A door that opens when the test says so."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    made = Door(listener, OURS)
    lines = []

    def knock(data: bytes = b"") -> socket.socket:
        lines.append(socket.create_connection(listener.getsockname()))
        lines[-1].sendall(data)
        return lines[-1]

    yield made, knock
    made.close()
    for line in lines:
        line.close()


def turn(opened: Door, kind: str, now: float = 0.0) -> None:
    """Wait for the kernel, which may take a moment to deliver."""
    deadline = time.monotonic() + 60
    while kind not in opened.turned_away:
        assert opened.poll(now) == []
        assert time.monotonic() < deadline, opened.turned_away


@pytest.mark.parametrize("data", [b"GET / HTTP/1.0\r\n\r\n", b"\x00", b"0" * 2**20, b"0" * 129 + b"\n"])
def test_noise(quiet_door, data):
    opened, knock = quiet_door
    line = knock()
    threading.Thread(target=_try_to_send, args=(line, data), daemon=True).start()
    turn(opened, proof.NOISE)


def _try_to_send(line: socket.socket, data: bytes) -> None:
    try:
        line.sendall(data)
    except OSError:
        pass


def test_half_an_answer(quiet_door):
    opened, knock = quiet_door
    knock(b"0" * 40).close()
    turn(opened, door.HUNG_UP)


def test_a_look_at_the_port_is_not_worth_a_word(quiet_door):
    opened, knock = quiet_door
    knock().close()
    for _ in range(5):
        assert opened.poll(0.0) == []
        time.sleep(0.02)
    assert len(opened.sockets(0.0)) == 1
    assert opened.turned_away == {}


@pytest.mark.parametrize("data", [b"", b"0"])
def test_silence_has_an_end_even_if_digits_come_now_and_then(quiet_door, data):
    opened, knock = quiet_door
    line = knock(data)
    for second in range(5):
        opened.poll(float(second))
        line.sendall(data)
    turn(opened, door.SILENT, 5.1)


def test_a_crowd_makes_room_for_others(quiet_door, monkeypatch):
    opened, knock = quiet_door
    monkeypatch.setattr(opened, "_most", 8)
    for _ in range(30):
        knock()
    turn(opened, door.CROWD)
    assert len(opened.sockets(0.0)) <= 1 + 8
    assert len(opened.take_sightings()) == 1
    assert opened.take_sightings() == []


class Exhausted:
    """A listener in a process that may open no more files."""

    def accept(self):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def close(self):
        pass


def test_without_descriptors_the_door_closes_for_a_moment(quiet_door):
    opened, knock = quiet_door
    knock()
    while not opened.sockets(0.0)[1:]:
        opened.poll(0.0)
    listener, opened._listener = opened._listener, Exhausted()
    opened.poll(0.0)
    assert opened.sockets(0.1) == []  # nothing that would wake the coordinator again and again
    opened._listener = listener
    assert opened.sockets(1.5) == [listener]
    assert opened.turned_away[door.EXHAUSTED] == 2


def test_a_proof_is_good_for_one_connection(quiet_door):
    opened, knock = quiet_door
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stranger = door.Stranger(theirs, "here", 0.0)
        answers = []
        thread = threading.Thread(target=lambda: answers.append(proof.prove(ours, OURS)))
        thread.start()
        while stranger.poll(OURS, 0.0) is None:
            pass
        thread.join()
        recorded = stranger._answer
    assert len(answers) == 1
    knock(recorded)
    turn(opened, proof.WRONG)


def test_a_proof_of_another_side_is_no_proof():
    """A challenge that is sent back would otherwise prove anything."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"0" * 64 + b"\n")
        thread = threading.Thread(target=lambda: theirs.sendall(theirs.recv(130)[65:]))
        thread.start()
        with pytest.raises(NotProven) as refusal:
            proof.prove(ours, OURS)
        thread.join()
    assert str(refusal.value) == proof.WRONG


def test_the_secret_of_a_job_without_a_typed_folder_lies_beside_it():
    from lockstep.launch.job import Bounds, Job

    typed = Job({}, Path("runs/a"), Bounds(1, 1), join="[::1]:29400")
    chosen = Job(
        {"layers": [("launcher", {"run_dir": "runs/a-1"})]}, Path("runs/a-1"), Bounds(1, 1), join="[::1]:29400"
    )
    assert typed.secret_path == Path("runs/a/.secret")
    assert chosen.secret_path == Path("runs/.secret----1--29400")
