"""Why a rank has ended: from its record, or from what is known of one that left none."""

import errno
import json
import re
import signal
import time
from dataclasses import asdict

import pytest

from lockstep import files
from lockstep.errors import OutOfStep
from lockstep.launch.failure import Failure, LauncherFailure, RankExit, pick_root
from lockstep.launch.ranks import oom_kills, post_mortem, rank_record
from lockstep.launch.ranks.local_ranks import LocalRank
from lockstep.launch.ranks.post_mortem import examine
from lockstep.runtime.heartbeat import Heartbeat

WHEN = time.mktime((2026, 11, 15, 12, 3, 10, 0, 0, -1))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT])
def test_only_a_sigkill_is_blamed_on_memory(local_rank, monkeypatch, number):
    monkeypatch.setattr(oom_kills, "so_far", lambda: 1)
    assert "memory (cgroup" not in examine(local_rank, -number, WHEN).failure.message


def test_half_a_record_is_none(local_rank):
    (local_rank.folder / "rank-1.json").write_text('{"rank": 1')
    assert examine(local_rank, 1, WHEN).failure.message == "ended with code 1"


@pytest.mark.parametrize("origin", ["nobody", 3, None])
def test_a_record_of_an_unknown_origin_is_not_valid(local_rank, origin):
    failure = {**asdict(Failure(1, "h", 0.0, "ValueError", "m")), "origin": origin}
    (local_rank.folder / "rank-1.json").write_text(json.dumps({"code": 1, "failure": failure}))
    assert examine(local_rank, 1, WHEN).failure.kind == LauncherFailure.EXIT


def test_a_rank_that_could_not_save_says_so(local_rank):
    rank_record.write(local_rank.folder, 1, RankExit.as_asked("failed", 900))
    assert examine(local_rank, 75, WHEN) == RankExit.as_asked("failed", 900)


@pytest.mark.parametrize("planned", [RankExit(0), RankExit.as_asked("saved", 7)])
def test_finished_and_preempted_are_no_failures(local_rank, planned):
    assert examine(local_rank, planned.code, WHEN).failure.kind == LauncherFailure.EXIT
    rank_record.write(local_rank.folder, 1, planned)
    assert examine(local_rank, planned.code, WHEN) == planned
    assert pick_root({1: planned}) is None


@pytest.mark.parametrize("planned", [RankExit(0), RankExit.as_asked("nothing")])
def test_a_full_disk_does_not_make_a_failure_of_an_end_as_planned(local_rank, monkeypatch, planned):
    """A file can be made there, and nothing written into it."""

    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write", full)
    rank_record.write(local_rank.folder, 1, planned)
    assert examine(local_rank, planned.code, WHEN) == planned


def test_the_code_of_a_preemption_after_an_end_as_planned_is_a_failure(local_rank):
    rank_record.write(local_rank.folder, 1, RankExit(0))
    assert not examine(local_rank, 75, WHEN).clean


def test_the_text_names_rank_step_phase_and_cause(local_rank):
    Heartbeat(local_rank.folder / "heartbeat-1").beat("all-reduce", 41)
    local_rank.log.write_text("\n".join(f"line {n}" for n in range(20)))
    text = examine(local_rank, -signal.SIGKILL, WHEN).failure.text().splitlines()
    assert text[0] == (
        "lockstep: rank 1 on node-a failed at step 41, phase all-reduce, 12:03:10: SIGKILL: "
        "killed, but not by the kernel's OOM killer"
    )
    assert text[1:] == [f"  line {n}" for n in range(10, 20)]


def test_a_rank_without_a_heartbeat(local_rank):
    head = examine(local_rank, 3, WHEN).failure.headline
    assert head == "lockstep: rank 1 on node-a failed at 12:03:10: exit: ended with code 3"


def test_old_lines_of_the_log_are_not_its_last_words(local_rank):
    local_rank.log.write_text("an earlier attempt\n")
    later = LocalRank(1, "node-a", local_rank.folder, local_rank.log, log_began=local_rank.log.stat().st_size)
    local_rank.log.open("a").write("my last words\n")
    assert examine(later, -9, WHEN).failure.log == "my last words"


def test_a_crash_comes_with_its_last_lines_too(local_rank):
    (local_rank.folder / "stacks-1").write_text('Fatal Python error\n  File "x.py", line 3 in f')
    local_rank.log.write_text("what native code wrote\n")
    text = examine(local_rank, -signal.SIGABRT, WHEN).failure.text()
    assert "at: x.py:3 f" in text
    assert text.endswith("\n  its last lines:\n    what native code wrote")


def test_warnings_of_torch_are_no_last_words(local_rank):
    local_rank.log.write_text("mine\n[W1116 09:30:00.1 socket.cpp:767] [c10d] The client socket has failed\n")
    assert examine(local_rank, -9, WHEN).failure.log == "mine"


def test_out_of_memory_is_distinguished_from_a_kill(local_rank, monkeypatch):
    monkeypatch.setattr(oom_kills, "so_far", lambda: 1)
    message = examine(local_rank, -signal.SIGKILL, WHEN).failure.message
    assert message == "out of host memory (cgroup oom_kill went from 0 to 1)"
    monkeypatch.setattr(oom_kills, "so_far", lambda: 0)
    assert examine(local_rank, -signal.SIGKILL, WHEN).failure.message == "killed, but not by the kernel's OOM killer"
    monkeypatch.setattr(oom_kills, "so_far", lambda: None)
    assert "cannot tell" in examine(local_rank, -signal.SIGKILL, WHEN).failure.message


def test_a_full_dev_shm_is_suspected(local_rank):
    assert re.search(r"/dev/shm has \d+ bytes free", examine(local_rank, -signal.SIGBUS, WHEN).failure.message)


def test_nothing_is_said_about_shared_memory_where_there_is_none(local_rank, tmp_path, monkeypatch):
    monkeypatch.setattr(post_mortem, "SHARED_MEMORY", tmp_path / "none")
    found = examine(local_rank, -signal.SIGBUS, WHEN).failure
    assert found.message == "a mapped file had no room or no data"


def test_a_crash_comes_with_its_stack(local_rank):
    (local_rank.folder / "stacks-1").write_text('Fatal Python error\n  File "x.py", line 3 in f')
    assert "at: x.py:3 f" in examine(local_rank, -signal.SIGSEGV, WHEN).failure.text()


def test_a_killed_rank_does_not_show_the_stack_of_an_earlier_suspicion(local_rank):
    (local_rank.folder / "stacks-1").write_text(
        'Current thread 0x1 (most recent call first):\n  File "x.py", line 3 in f'
    )
    assert examine(local_rank, -signal.SIGKILL, WHEN).failure.traceback == ""


def test_signals_without_a_name(local_rank):
    assert examine(local_rank, -40, WHEN).failure.kind == "SIG40"


def test_a_failure_of_another_rank_does_not_get_the_phase_of_the_rank_that_noticed_it(tmp_path, monkeypatch, recorded):
    monkeypatch.setenv("LOCKSTEP_ATTEMPT_FOLDER", str(tmp_path))
    Heartbeat.from_env(0).beat("all-reduce", 7)
    noticed = recorded(0, OutOfStep("the ranks are out of step", [1]))
    assert (noticed.rank, noticed.host, noticed.step, noticed.phase) == (1, "", None, None)
    own = recorded(0, ValueError("its own"))
    assert (own.rank, own.host, own.step, own.phase) == (0, "node-a", 7, "all-reduce")
