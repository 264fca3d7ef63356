"""Where the ranks of one machine meet."""

import errno
import fcntl
import os

import pytest

from lockstep.errors import UserError
from lockstep.launch.ranks.rank_environment import check_locks


def test_a_folder_whose_files_cannot_be_locked_is_refused_in_words(tmp_path, monkeypatch):
    check_locks(tmp_path)

    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(UserError, match=r"(?s)cannot be written and locked.*TMPDIR"):
        check_locks(tmp_path)
