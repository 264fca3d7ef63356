"""The folder that the ranks of a node share with their launcher."""

import os
import shutil
import signal
import time

import pytest

from lockstep.launch.ranks import local_ranks as module
from lockstep.launch.ranks import oom_kills
from lockstep.launch.ranks.local_ranks import LocalRanks
from lockstep.launch.wire.messages import Rendezvous, Start
from lockstep.runtime.environments.launcher import ATTEMPT_FOLDER
from lockstep.runtime.preemption import PreemptionNotice

START = Start(attempt=0, first_rank=0, count=1, world_size=1, group_rank=0, rendezvous=Rendezvous("127.0.0.1", 1))


def test_an_oom_kill_of_long_ago_is_not_the_cause_of_a_later_kill(tmp_path, monkeypatch):
    """The kernel may have killed a worker process, whose rank went on."""
    counts = iter([0, 1, 1])
    monkeypatch.setattr(oom_kills, "so_far", lambda: next(counts))
    local = LocalRanks(START, "host-a", tmp_path)
    try:
        seen = []
        local.do_housekeeping()
        for _ in range(2):
            local._oom_kills._counted -= oom_kills.COUNT_S
            local.do_housekeeping()
            local.do_housekeeping()  # too soon to count again
            seen.append(local.running[0].oom_kills.before)
        assert seen == [0, 1]
    finally:
        local.close()


def test_the_files_of_a_long_attempt_stay_fresh(tmp_path):
    local = LocalRanks(START, "host-a", tmp_path)
    try:
        store = local.folder / "store"
        store.touch()
        os.utime(store, (1.0, 1.0))
        local.do_housekeeping()
        assert store.stat().st_mtime == 1.0
        local._touched -= module.HOUR_S + 1
        local.do_housekeeping()
        assert time.time() - store.stat().st_mtime < 3600

        # A cleaner of /tmp that removes the folder does not end the launcher.
        shutil.rmtree(local.folder)
        local._touched -= module.HOUR_S + 1
        local.do_housekeeping()
    finally:
        local.close()


@pytest.mark.parametrize("asked", ["SIGINT", None])
def test_ranks_learn_which_signal_the_launcher_received(tmp_path, monkeypatch, asked):
    """They always get SIGTERM, and said after a Ctrl-C that SIGTERM had ended them."""
    local = LocalRanks(START, "host-a", tmp_path)
    monkeypatch.setenv(ATTEMPT_FOLDER, str(local.folder))
    notice = PreemptionNotice()
    try:
        notice.receive(signal.SIGUSR1, None)  # not from the launcher
        assert (notice.signal, notice.original) == ("SIGUSR1", "SIGUSR1")
        local.ask_to_save(asked)
        notice.receive(signal.SIGTERM, None)
        assert (notice.signal, notice.original) == ("SIGTERM", asked)
    finally:
        local.close()


def test_stacks_that_would_be_too_large_for_a_message_keep_the_main_thread(tmp_path, monkeypatch):
    """A message above the largest size would look like an attack, and its node would be lost."""
    monkeypatch.setattr(module, "STACKS_SIZE", 4000)
    texts = {rank: "x" * 9000 + f"the main thread of {rank}" for rank in range(2)}
    monkeypatch.setattr(module.stacks, "collect", lambda *arguments: texts)
    monkeypatch.setattr(module.flight_recorder, "collect", lambda *arguments: {0: [{"collective_seq_id": 1}]})
    local = LocalRanks(START, "host-a", tmp_path)
    try:
        found, collectives = local.stacks_and_collectives()
    finally:
        local.close()
    assert [len(text) for text in found.values()] == [2000, 2000]
    assert found[1].endswith("the main thread of 1")
    assert collectives == {0: [{"collective_seq_id": 1}]}


def test_a_folder_that_is_gone_does_not_end_the_launcher(tmp_path, monkeypatch):
    """TMPDIR may be full as well: then the request for collectives cannot be written."""
    monkeypatch.setattr(module.stacks, "collect", lambda *arguments: {0: "the main thread of 0"})
    local = LocalRanks(START, "host-a", tmp_path)
    shutil.rmtree(local.folder)
    try:
        assert local.stacks_and_collectives() == ({0: "the main thread of 0"}, {})
    finally:
        local.close()
