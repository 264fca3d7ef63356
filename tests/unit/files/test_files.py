"""Files and JSON of other processes, whole or not at all."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from lockstep import files
from lockstep.files import typed_json


@dataclass(frozen=True)
class Part:
    size: float
    name: str | None = None
    side: Literal["left", "right"] | None = None


@dataclass(frozen=True)
class Whole:
    number: int
    parts: list[Part]
    texts: dict[int, str]
    anything: dict


def test_only_one_of_many_creates_a_file(tmp_path):
    path = tmp_path / "owner"
    with ThreadPoolExecutor(8) as pool:
        texts = [f"number {number}\n" * 1000 for number in range(40)]
        created = list(pool.map(lambda text: files.create_once(path, text.encode(), mode=0o600), texts))

    assert created.count(True) == 1
    assert path.read_text() == texts[created.index(True)]
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]  # no draft is left


def test_a_file_replaces_the_one_before_and_leaves_nothing_else(tmp_path):
    for text in ("first, and longer", "second"):
        files.write(tmp_path / "record", text)
    assert files.read(tmp_path / "record") == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["record"]


def test_a_file_is_read_from_a_position_and_not_beyond_its_last_bytes(tmp_path):
    (tmp_path / "log").write_bytes(b"0123456789\xff")
    assert files.read(tmp_path / "log", 8) == "89\ufffd"
    assert files.read(tmp_path / "log", 2, most=4) == "789\ufffd"
    assert files.read(tmp_path / "log", 9, most=100) == "9\ufffd"


def test_what_cannot_be_read_is_empty(tmp_path):
    assert files.read(tmp_path / "missing") == ""
    assert files.read(tmp_path) == ""
    os.mkfifo(tmp_path / "pipe")
    assert files.read(tmp_path / "pipe") == ""
    assert files.read(Path("/dev/zero")) == ""
    assert files.read(Path("/proc/self/cgroup")) == Path("/proc/self/cgroup").read_text()


def test_what_is_read_whole_has_a_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert files.read_bytes(tmp_path / "file", most=5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        files.read_bytes(tmp_path / "file", most=4)


def test_two_writers_of_one_file_do_not_share_a_temporary_file(tmp_path):
    """They may be two threads of one process, or two processes with one number on two machines."""
    record = tmp_path / "record"
    with files.replacing(record) as first:
        first.write_text("first")
        with files.replacing(record) as second:
            second.write_text("second")
        assert record.read_text() == "second"
    assert record.read_text() == "first"
    assert list(tmp_path.iterdir()) == [record]


def test_temporary_files_of_writers_that_were_killed_are_deleted(tmp_path):
    names = [".a[1].0a1b2c3d.tmp", ".a[1].live.tmp", ".a1.0a1b2c3d.tmp"]
    for name in names:
        (tmp_path / name).touch()
    hour_ago = time.time() - 3600
    for name in (names[0], names[2]):
        os.utime(tmp_path / name, (hour_ago, hour_ago))

    files.delete_old_temporaries(tmp_path / "a[1]")
    assert {path.name for path in tmp_path.iterdir()} == set(names[1:])


GOOD = {
    "number": 1,
    "parts": [{"size": 2, "name": None, "side": "left"}],
    "texts": {"3": "x"},
    "anything": {"a": [1, None]},
}


def test_json_becomes_objects():
    assert typed_json.parse(Whole, GOOD) == Whole(1, [Part(2, side="left")], {3: "x"}, {"a": [1, None]})


def test_fields_with_a_default_may_be_missing():
    assert typed_json.parse(Part, {"size": 2}) == Part(2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"number": 1.5},
        {"number": True},
        {"number": None},
        {"parts": {}},
        {"parts": [{"name": None}]},
        {"parts": [[]]},
        {"parts": ["size"]},
        {"parts": [{"size": "2", "name": None}]},
        {"parts": [{"size": True, "name": None}]},
        {"parts": [{"size": 2, "side": "up"}]},
        {"texts": {"x": "x"}},
        {"texts": {"3": 3}},
        {"more": 1},
    ],
)
def test_json_of_another_shape_is_refused(wrong):
    with pytest.raises(ValueError, match=r"not a valid|instead of (a value|one of)|invalid literal"):
        typed_json.parse(Whole, GOOD | wrong)
