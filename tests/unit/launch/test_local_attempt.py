"""The folder that the ranks of a node share with their launcher."""

import errno
import fcntl
import os
import shutil
import time

import pytest

from lockstep.errors import UserError
from lockstep.launch import local_attempt as module
from lockstep.launch.local_attempt import LocalAttempt
from lockstep.launch.wire.messages import Start

START = Start(
    attempt=0,
    first_rank=0,
    count=1,
    world_size=1,
    group_rank=0,
    address="127.0.0.1",
    port=1,
    store_port=0,
    store_nonce="",
)


def test_a_folder_whose_files_cannot_be_locked_is_refused_in_words(tmp_path, monkeypatch):
    module.check_locks(tmp_path)

    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(UserError, match=r"(?s)cannot be written and locked.*TMPDIR"):
        module.check_locks(tmp_path)


def test_the_files_of_a_long_attempt_stay_fresh(tmp_path):
    attempt = LocalAttempt(START, "host-a", tmp_path)
    try:
        store = attempt.folder / "store"
        store.touch()
        os.utime(store, (1.0, 1.0))
        attempt.touch()
        assert store.stat().st_mtime == 1.0
        attempt._touched -= module.TOUCH_S + 1
        attempt.touch()
        assert time.time() - store.stat().st_mtime < 3600

        # A cleaner of /tmp that removes the folder does not end the launcher.
        shutil.rmtree(attempt.folder)
        attempt._touched -= module.TOUCH_S + 1
        attempt.touch()
    finally:
        attempt.close()
