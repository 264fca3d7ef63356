"""Batches are sent one before their turn, and no more."""

import pytest

from lockstep.data.transfer import prefetch_to_device


class Notes:
    def __init__(self):
        self.done = []

    def send(self, batch):
        self.done.append(f"send {batch}")
        return batch

    def receive(self, sent):
        self.done.append(f"receive {sent}")
        return sent


def test_one_is_always_on_its_way():
    notes = Notes()
    for batch in prefetch_to_device(iter("abc"), notes):
        notes.done.append(f"use {batch}")
    assert notes.done == [
        *("send a", "send b", "receive a", "use a"),
        *("send c", "receive b", "use b"),
        *("receive c", "use c"),
    ]


def test_what_is_thrown_away_is_received_too():
    notes = Notes()
    batches = prefetch_to_device(iter("abc"), notes)
    next(batches)
    batches.close()
    assert notes.done == ["send a", "send b", "receive a", "receive b"]


def test_a_batch_that_cannot_be_read_is_reported_in_its_turn():
    def read():
        yield "a"
        yield "b"
        raise OSError("no such file")

    batches = prefetch_to_device(read(), Notes())
    assert [next(batches), next(batches)] == ["a", "b"]
    with pytest.raises(OSError, match="no such file"):
        next(batches)
