"""What the agent of a node gives its ranks: their environment, and the folder that they share with it."""

import errno
import fcntl
import os
import shutil
import time

import pytest

from lockstep.errors import UserError
from lockstep.launch import agent as module
from lockstep.launch.agent import LocalAttempt
from lockstep.runtime.environments.torchrun import OF_ONE_JOB


def test_a_launcher_inside_a_rank_of_another_job_starts_ranks_of_its_own(monkeypatch):
    """The store of the outer job would come first, and its ranks would wait for those of the inner job."""
    for name in (*OF_ONE_JOB, "LOCKSTEP_TERM_FILE", "LOCKSTEP_SECRET"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MY_OWN", "1")
    env = module._environment_for(1)
    assert "LOCKSTEP_STORE_FILE" in OF_ONE_JOB
    assert not {*OF_ONE_JOB, "LOCKSTEP_TERM_FILE", "LOCKSTEP_SECRET"} & env.keys()
    assert env["MY_OWN"] == "1"


def test_a_folder_whose_files_cannot_be_locked_is_refused_in_words(tmp_path, monkeypatch):
    module._check_locks(tmp_path)

    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(UserError, match=r"(?s)cannot be written and locked.*TMPDIR"):
        module._check_locks(tmp_path)


def test_the_files_of_a_long_attempt_stay_fresh(monkeypatch):
    attempt = LocalAttempt(0)
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
