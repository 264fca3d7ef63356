"""Bytes on their way to the disk: in chunks, directly where that can be done, and never a part of a file."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from checkpoints import commit, load, same
from hypothesis import given
from hypothesis import strategies as st

from lockstep.checkpoint import durable
from lockstep.checkpoint.durable import CHUNK, PAGE, cut, free_bytes, replace_file, spoken


@given(st.integers(0, 5 * PAGE) | st.integers(2 * CHUNK - PAGE, 2 * CHUNK + PAGE) | st.integers(0, 3 * CHUNK))
def test_chunks_make_up_the_whole_and_end_at_pages(size):
    data = memoryview(bytes(size))
    lengths = [len(chunk) for chunk in cut(data)]
    assert sum(lengths) == size
    assert all(0 < length <= CHUNK for length in lengths)
    assert len(lengths) >= min(size, 2)
    if size > 2 * PAGE:
        assert all(length % PAGE == 0 for length in lengths[:-1])
        assert lengths[-1] % PAGE == 0 or lengths[-1] < PAGE


LARGE = {
    "a": torch.randn(900_001),
    "b": torch.arange(700_003, dtype=torch.int16),
    "c": torch.ones(11, dtype=torch.bool),
}


def test_large_files_are_written_directly_and_are_the_same(tmp_path, monkeypatch):
    direct, written = [], durable._write_directly
    monkeypatch.setattr(durable, "_write_directly", lambda *call: direct.append(written(*call)) or direct[-1])
    commit(tmp_path, 1, tensors=LARGE)
    assert direct  # it was tried; whether it can be done depends on the disk
    assert same(load(tmp_path)[1], LARGE)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EFAULT])
def test_a_disk_that_cannot_write_directly_gets_the_same_file(tmp_path, monkeypatch, number):
    real = os.pwrite

    def pwrite(handle: int, data: memoryview, position: int) -> int:
        if len(data) >= 1 << 20 and position > 0 and not refused:
            refused.append(real(handle, data[:PAGE], position))  # some of it may even have been written
            raise OSError(number, os.strerror(number))
        return real(handle, data, position)

    refused: list[int] = []
    monkeypatch.setattr(os, "pwrite", pwrite)
    commit(tmp_path, 1, tensors=LARGE)
    assert refused
    assert same(load(tmp_path)[1], LARGE)


def test_a_replacement_that_fails_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    replace_file(tmp_path / "latest", b"old")

    def broken(handle: int) -> None:
        raise OSError(errno.EIO, "the disk coughed")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="coughed"):
        replace_file(tmp_path / "latest", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"latest": b"old"}


def test_free_bytes_of_a_folder_that_is_not_there_yet(tmp_path):
    assert free_bytes(tmp_path / "a" / "b") == pytest.approx(free_bytes(tmp_path), rel=0.5)


def test_sizes_in_words():
    assert [spoken(size) for size in (0, 999, 1000, 1_234_567, 5e9, 3e12, 4e15)] == [
        *("0 bytes", "999 bytes", "1.0 kB", "1.2 MB", "5.0 GB", "3.0 TB", "4000.0 TB"),
    ]
