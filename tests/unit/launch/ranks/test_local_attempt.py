"""The folder that the ranks of a node share with their launcher."""

import os
import shutil
import signal
import time

import pytest

from lockstep.launch.ranks import local_attempt as module
from lockstep.launch.ranks.local_attempt import LocalAttempt
from lockstep.launch.wire.messages import Rendezvous, Start
from lockstep.runtime.environments.launcher import ATTEMPT_FOLDER
from lockstep.runtime.preemption import PreemptionNotice

START = Start(attempt=0, first_rank=0, count=1, world_size=1, group_rank=0, rendezvous=Rendezvous("127.0.0.1", 1))


def test_an_oom_kill_of_long_ago_is_not_the_cause_of_a_later_kill(tmp_path, monkeypatch):
    """The kernel may have killed a worker process, whose rank went on."""
    counts = iter([0, 1, 1])
    monkeypatch.setattr(module.post_mortem, "oom_kills", lambda: next(counts))
    attempt = LocalAttempt(START, "host-a", tmp_path)
    try:
        seen = []
        attempt.beat()
        for _ in range(2):
            attempt._oom_kills_counted -= module.COUNT_OOM_KILLS_S
            attempt.beat()
            attempt.beat()  # too soon to count again
            seen.append(attempt.ranks[0].oom_kills_before)
        assert seen == [0, 1]
    finally:
        attempt.close()


def test_the_files_of_a_long_attempt_stay_fresh(tmp_path):
    attempt = LocalAttempt(START, "host-a", tmp_path)
    try:
        store = attempt.folder / "store"
        store.touch()
        os.utime(store, (1.0, 1.0))
        attempt._touch_files()
        assert store.stat().st_mtime == 1.0
        attempt._touched -= module.TOUCH_S + 1
        attempt._touch_files()
        assert time.time() - store.stat().st_mtime < 3600

        # A cleaner of /tmp that removes the folder does not end the launcher.
        shutil.rmtree(attempt.folder)
        attempt._touched -= module.TOUCH_S + 1
        attempt._touch_files()
    finally:
        attempt.close()


@pytest.mark.parametrize("asked", ["SIGINT", None])
def test_ranks_learn_which_signal_the_launcher_received(tmp_path, monkeypatch, asked):
    """They always get SIGTERM, and said after a Ctrl-C that SIGTERM had ended them."""
    attempt = LocalAttempt(START, "host-a", tmp_path)
    monkeypatch.setenv(ATTEMPT_FOLDER, str(attempt.folder))
    notice = PreemptionNotice()
    try:
        notice.receive(signal.SIGUSR1, None)  # not from the launcher
        assert (notice.signal, notice.original) == ("SIGUSR1", "SIGUSR1")
        attempt.preempt(asked)
        notice.receive(signal.SIGTERM, None)
        assert (notice.signal, notice.original) == ("SIGTERM", asked)
    finally:
        attempt.close()


def test_stacks_that_would_be_too_large_for_a_message_keep_the_main_thread(tmp_path, monkeypatch):
    """A message above the largest size would look like an attack, and its node would be dropped."""
    monkeypatch.setattr(module, "STACKS_SIZE", 4000)
    texts = {rank: "x" * 9000 + f"the main thread of {rank}" for rank in range(2)}
    monkeypatch.setattr(module.stacks, "collect", lambda *arguments: texts)
    monkeypatch.setattr(module.flight_recorder, "collect", lambda *arguments: {0: [{"collective_seq_id": 1}]})
    attempt = LocalAttempt(START, "host-a", tmp_path)
    try:
        found = attempt.collect_stacks()
    finally:
        attempt.close()
    assert [len(text) for text in found.stack_of.values()] == [2000, 2000]
    assert found.stack_of[1].endswith("the main thread of 1")
    assert found.collectives_of == {0: [{"collective_seq_id": 1}]}
