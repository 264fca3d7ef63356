"""The secret of a job: which node makes it, where others find it, and who may read it."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.launch.job import Bounds, Job
from lockstep.launch.wire import secret
from lockstep.launch.wire.secret import find_secret


@pytest.fixture(autouse=True)
def no_secret(monkeypatch):
    for name in (secret.SECRET, secret.SECRET_FILE):
        monkeypatch.delenv(name, raising=False)


def test_the_first_node_makes_the_secret_and_the_others_find_it(tmp_path):
    path = tmp_path / "run" / ".secret"
    made = [find_secret(path) for _ in range(3)]
    assert len({found.key for found in made}) == 1
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
    monkeypatch.setenv(secret.SECRET_FILE, str(named))
    assert find_secret(tmp_path / ".secret").key == b"a secret in a file"
    monkeypatch.setenv(secret.SECRET, "a secret in the environment")
    assert find_secret(tmp_path / ".secret").key == b"a secret in the environment"
    assert not (tmp_path / ".secret").exists()
    monkeypatch.setenv(secret.SECRET, "too short")
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


def test_the_secret_of_a_job_without_a_typed_folder_lies_beside_it():
    typed = Job({}, Path("runs/a"), Bounds(1, 1), join="[::1]:29400")
    chosen = Job({}, Path("runs/a-1"), Bounds(1, 1), join="[::1]:29400", run_dir_was_chosen=True)
    assert typed.secret_path == Path("runs/a/.secret")
    assert chosen.secret_path == Path("runs/.secret----1--29400")
