"""Lines that arrive on a socket in pieces."""

import socket

import pytest

from lockstep.launch.wire.sockets import LineReader


@pytest.fixture
def ends():
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@pytest.mark.parametrize("timeout", [None, 3.0, 0.0])
def test_lines_come_whole_and_nothing_is_waited_for(ends, timeout):
    here, there = ends
    here.settimeout(timeout)
    reader = LineReader(here)
    assert reader.read() == []
    there.sendall(b"one\ntw")
    assert reader.read() == [b"one"]
    there.sendall(b"o\n\n")
    assert reader.read() == [b"two", b""]
    assert not reader.ended


def test_the_last_lines_come_with_the_end(ends):
    here, there = ends
    reader = LineReader(here)
    there.sendall(b"last\nhalf")
    there.close()
    assert reader.read() == [b"last"]
    assert reader.ended
    assert reader.read() == []


def test_a_line_that_does_not_end_is_refused(ends):
    here, there = ends
    reader = LineReader(here, longest=10)
    there.sendall(b"short\n")
    assert reader.read() == [b"short"]
    there.sendall(b"x" * 11)
    with pytest.raises(ValueError, match="too long"):
        reader.read()


def test_the_last_lines_come_before_a_break(ends):
    """The other end is closed with bytes that it has not read, as a killed process does."""
    here, there = ends
    reader = LineReader(here)
    there.sendall(b"last\n")
    here.sendall(b"unread")
    there.close()
    assert reader.read() == [b"last"]
    assert reader.ended
    assert isinstance(reader.error, ConnectionResetError)
