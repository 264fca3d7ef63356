"""Failure records, and what is said about a rank that left none."""

import json
import re
import runpy
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lockstep.errors import OutOfStep
from lockstep.launch import failure, records
from lockstep.launch.failure import Failure, Kind, LocalRank, RankExit, examine, pick_root, record
from lockstep.runtime.heartbeat import Heartbeat

WHEN = time.mktime((2026, 11, 15, 12, 3, 10, 0, 0, -1))


@pytest.fixture
def local_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(failure, "oom_kills", lambda: 0)
    return LocalRank(1, "node-a", tmp_path, tmp_path / "rank-1.log", oom_kills_before=0)


def recorded(tmp_path, rank: int, error: Exception) -> Failure:
    try:
        raise error
    except Exception as caught:
        failure.record(tmp_path, rank, caught)
    return examine(LocalRank(rank, "node-a", tmp_path, None), 1, time.time()).failure


def test_a_rank_that_ends_without_a_word_is_the_cause_of_complaints_about_it(tmp_path):
    complaint = recorded(tmp_path, 0, RuntimeError("connection reset by peer"))
    silent = RankExit(3, Failure.noticed(Kind.EXIT, "ended with code 3", 1, "here", when=9e9))  # noticed later
    assert pick_root({0: RankExit(1, complaint), 1: silent}).rank == 1


def test_records_survive_the_round_trip(tmp_path):
    found = recorded(tmp_path, 1, KeyError("x"))
    assert (found.rank, found.kind, found.host) == (1, "KeyError", "node-a")
    assert "Traceback" in found.traceback
    assert records.parse(Failure, json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize("wrong", [{}, {"rank": "1"}, {"extra": 1}, {"time": None}, {"for_user": 1}])
def test_what_is_no_record_is_refused(wrong):
    good = asdict(Failure(1, "h", 0.0, "k", "m"))
    with pytest.raises(ValueError, match=r"not a valid Failure|instead of a value of type"):
        records.parse(Failure, {**good, **wrong} if wrong else {})


def test_a_record_without_the_later_fields_is_read(local_rank):
    record = {"rank": 1, "host": "h", "time": WHEN, "kind": "ValueError", "message": "text"}
    (local_rank.folder / "rank-1.json").write_text(json.dumps(record))
    assert examine(local_rank, 1, WHEN).failure.headline.endswith("ValueError: text")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT])
def test_only_a_sigkill_is_blamed_on_memory(local_rank, monkeypatch, number):
    monkeypatch.setattr(failure, "oom_kills", lambda: 1)
    assert "memory (cgroup" not in examine(local_rank, -number, WHEN).failure.message


def test_half_a_record_is_none(local_rank):
    (local_rank.folder / "rank-1.json").write_text('{"rank": 1')
    assert examine(local_rank, 1, WHEN).failure.message == "ended with code 1"


def test_the_earlier_of_two_errors_is_the_cause(tmp_path):
    ended = {rank: RankExit(1, recorded(tmp_path, rank, ValueError(str(rank)))) for rank in (1, 0)}
    assert pick_root(ended).rank == 1


def test_a_rank_that_records_late_is_still_the_cause(tmp_path):
    """Its peers may notice that it has left the process group, and record that, before it has recorded anything."""
    cause = ValueError("the real cause")
    failure.stamp(cause)
    ended = {0: RankExit(1, recorded(tmp_path, 0, RuntimeError("connection closed by peer")))}
    failure.stamp(cause)  # seen again on its way out: the first time counts
    ended[1] = RankExit(1, recorded(tmp_path, 1, cause))
    assert pick_root(ended).rank == 1


def test_a_killed_rank_beats_the_complaints_of_others(tmp_path, local_rank):
    complaint = recorded(tmp_path, 0, RuntimeError("connection reset by peer"))
    killed = examine(local_rank, -signal.SIGKILL, time.time() + 1)
    assert pick_root({0: RankExit(1, complaint), 1: killed}).kind == "SIGKILL"


def test_an_abort_after_a_record_is_a_consequence(tmp_path, local_rank):
    cause = RankExit(1, recorded(tmp_path, 0, ValueError("the real cause")))
    assert pick_root({0: cause, 1: examine(local_rank, -signal.SIGABRT, time.time() + 1)}).kind == "ValueError"
    assert pick_root({0: cause, 1: examine(local_rank, -signal.SIGABRT, time.time() - 60)}).kind == "SIGABRT"


# What gloo says, word for word, in a rank whose peer aborted.
RESET = (
    "[pair.cc:537] Read error [127.0.0.1]:50847: Connection reset by peer. This is typically caused by a remote worker"
)


def test_a_rank_that_aborts_beats_the_complaints_of_others(tmp_path, local_rank):
    """The complaint comes first: the kernel closes the connections of a process before its parent can reap it."""
    complaint = RankExit(1, recorded(tmp_path, 0, RuntimeError(RESET)))
    local_rank.log.write_text("free(): invalid pointer\n")
    found = pick_root({0: complaint, 1: examine(local_rank, -signal.SIGABRT, time.time() + 1)})
    assert (found.rank, found.message) == (1, "native code aborted: free(): invalid pointer")


def test_an_exception_of_its_own_beats_an_earlier_complaint(tmp_path):
    complaint = RankExit(1, recorded(tmp_path, 0, RuntimeError(RESET)))
    own = RankExit(1, recorded(tmp_path, 1, ConnectionResetError("Connection reset by peer")))  # its own server's
    assert pick_root({0: complaint, 1: own}).rank == 1


def test_an_abort_over_a_lost_peer_is_a_complaint(tmp_path, local_rank):
    local_rank.log.write_text(f"terminate called after throwing an instance of 'X'\n  what():  {RESET}\n")
    aborted = examine(local_rank, -signal.SIGABRT, time.time() - 60)
    assert pick_root({0: RankExit(1, recorded(tmp_path, 0, ValueError("mine"))), 1: aborted}).kind == "ValueError"


def test_a_crash_comes_with_its_last_lines_too(local_rank):
    (local_rank.folder / "stacks-1").write_text('Fatal Python error\n  File "x.py", line 3 in f')
    local_rank.log.write_text("what native code wrote\n")
    text = examine(local_rank, -signal.SIGABRT, WHEN).failure.text()
    assert "at: x.py:3 f" in text
    assert text.endswith("\n  its last lines:\n    what native code wrote")


def test_warnings_of_torch_are_no_last_words(local_rank):
    local_rank.log.write_text("mine\n[W1116 09:30:00.1 socket.cpp:767] [c10d] The client socket has failed\n")
    assert examine(local_rank, -9, WHEN).failure.log == "mine"


def test_a_rank_that_exits_with_0_in_the_middle_is_the_cause(tmp_path, local_rank):
    left = examine(local_rank, 0, time.time() + 1)
    assert not left.clean
    found = pick_root({0: RankExit(1, recorded(tmp_path, 0, RuntimeError(RESET))), 1: left})
    assert (found.rank, found.kind) == (1, "exit")
    assert "ended with code 0 before its work was done" in found.message


@pytest.mark.parametrize("code", [0, 75])
def test_finished_and_preempted_are_no_failures(local_rank, code):
    failure.note_end(local_rank.folder, 1)
    assert examine(local_rank, code, WHEN) == RankExit(code)
    assert pick_root({1: RankExit(code)}) is None


def test_the_text_names_rank_step_phase_and_cause(local_rank):
    Heartbeat(local_rank.folder / "heartbeat-1").beat("exchange", 41)
    local_rank.log.write_text("\n".join(f"line {n}" for n in range(20)))
    text = examine(local_rank, -signal.SIGKILL, WHEN).failure.text().splitlines()
    assert text[0] == (
        "lockstep: rank 1 on node-a failed at step 41, phase exchange, 12:03:10: SIGKILL: "
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


def test_a_traceback_is_better_than_a_log(tmp_path):
    text = recorded(tmp_path, 1, ValueError("x")).text()
    assert "Traceback" in text
    assert Failure(1, "h", WHEN, "k", "m", log="last line").text().endswith("\n  last line")


TRACEBACK = """Traceback (most recent call last):
  File "{package}/launch/rank_process.py", line 49, in main
    work(spec)
  File "{package}/engine/loop.py", line 55, in fit
    result = run.stepper.step(batches, task.loss)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/u/my_task.py", line 20, in loss
    return model(batch)
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1778, in _call_impl
    return forward_call(*args, **kwargs)
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)
RuntimeError: mat1 and mat2 shapes cannot be multiplied
"""


def test_the_users_frames_come_first_and_ours_are_folded():
    text = TRACEBACK.format(package=Path(failure.__file__).parent.parent)
    found = Failure(1, "h", WHEN, "RuntimeError", "m", traceback=text)
    assert found.text().splitlines()[1:] == [
        "  Traceback (most recent call last):",
        '    File "/u/my_task.py", line 20, in loss',
        "      return model(batch)",
        '    File "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 134, in forward',
        "      return F.linear(input, self.weight, self.bias)",
        "  RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        "  (without 3 frames of Lockstep and of libraries: see events.jsonl)",
    ]
    ours = text.replace("/u/my_task.py", f"{Path(failure.__file__).parent}/zygote.py")
    assert replace(found, traceback=ours).text().count("File ") == 5  # nothing of the user's: all is shown


def test_a_lost_node_has_no_rank_to_name():
    text = Failure.noticed(Kind.NODE, "node 1 (node-b) vanished: no heartbeat for 5 s", 3, "node-b", when=WHEN).text()
    assert text == "lockstep: node 1 (node-b) vanished: no heartbeat for 5 s (12:03:10)"


def test_out_of_memory_is_distinguished_from_a_kill(local_rank, monkeypatch):
    monkeypatch.setattr(failure, "oom_kills", lambda: 1)
    message = examine(local_rank, -signal.SIGKILL, WHEN).failure.message
    assert message == "out of host memory (cgroup oom_kill went from 0 to 1)"
    monkeypatch.setattr(failure, "oom_kills", lambda: 0)
    assert examine(local_rank, -signal.SIGKILL, WHEN).failure.message == "killed, but not by the kernel's OOM killer"
    monkeypatch.setattr(failure, "oom_kills", lambda: None)
    assert "cannot tell" in examine(local_rank, -signal.SIGKILL, WHEN).failure.message


@pytest.mark.parametrize(
    "text", ["low 0\nhigh 0\noom 2\noom_kill 7\n", "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"]
)
def test_both_kinds_of_control_groups_are_read(tmp_path, monkeypatch, text):
    (tmp_path / "events").write_text(text)
    monkeypatch.setattr(failure, "_memory_files", lambda: [tmp_path / "missing", tmp_path / "events"])
    assert failure.oom_kills() == 7


def test_a_full_dev_shm_is_suspected(local_rank):
    assert re.search(r"/dev/shm has \d+ bytes free", examine(local_rank, -signal.SIGBUS, WHEN).failure.message)


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


@pytest.mark.parametrize(
    ("found", "repeats"),
    [
        (Failure(0, "h", 0.0, "ValueError", "m"), True),
        (Failure.noticed(Kind.EXIT, "m", 0), True),
        (Failure(0, "h", 0.0, "SIGKILL", "m", origin="signal"), False),
        (Failure.noticed(Kind.NODE, "m", 0), False),
    ],
)
def test_what_the_program_would_do_again(found, repeats):
    assert found.likely_to_repeat is repeats


def test_a_rank_that_is_out_of_step_is_named_by_those_that_notice_it(tmp_path):
    try:
        raise OutOfStep("the ranks are out of step: rank 1 was in a collective that rank 0 never called", [1])
    except OutOfStep as error:
        record(tmp_path, 0, error)
    noticed = Failure.read(tmp_path / "rank-0.json")
    assert noticed.rank == 1
    assert not noticed.reports_lost_peer
    assert noticed.text().startswith("lockstep: the ranks are out of step: rank 1 was")
    assert "Traceback" not in noticed.text()


def test_a_failure_of_another_rank_does_not_get_the_phase_of_the_rank_that_noticed_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_ATTEMPT_FOLDER", str(tmp_path))
    Heartbeat.from_env(0).beat("exchange", 7)
    noticed = recorded(tmp_path, 0, OutOfStep("the ranks are out of step", [1]))
    assert (noticed.rank, noticed.host, noticed.step, noticed.phase) == (1, "", None, None)
    own = recorded(tmp_path, 0, ValueError("its own"))
    assert (own.rank, own.host, own.step, own.phase) == (0, "node-a", 7, "exchange")


def test_the_line_that_raised_is_named(tmp_path):
    script = tmp_path / "leaves.py"
    script.write_text("import sys\nfor step in range(3):\n    sys.exit(0)\n")
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script))
    assert failure.raising_line(left.value) == f"{script}:3"
    assert failure.raising_line(SystemExit(0)) == ""


def test_the_line_that_raised_is_the_users(tmp_path, monkeypatch):
    """A library may put a function of its own in place of sys.exit: wandb does."""
    library = tmp_path / "site-packages" / "library.py"
    library.parent.mkdir()
    library.write_text("def leave(code):\n    raise SystemExit(code)\n")
    monkeypatch.setattr(sys, "exit", runpy.run_path(str(library))["leave"])
    script = tmp_path / "leaves.py"
    script.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script))
    assert failure.raising_line(left.value) == f"{script}:2"


def test_a_rank_whose_script_ended_is_not_said_to_have_called_exit():
    complaint = failure.Failure(0, "host", 1.0, "RuntimeError", "Connection closed by peer")
    assert "sys.exit" not in failure.left_early(1, "host", complaint, "").message
    assert "sys.exit at a.py:3" in failure.left_early(1, "host", complaint, "a.py:3").message


@pytest.mark.parametrize("name", ["SIGKILL", "SIG42", "SIGABRT", "node", "hang", "exit"])
def test_an_exception_is_an_exception_whatever_its_name(tmp_path, name):
    """Names of signals and of kinds are no reserved words: they do not make a rank restart, or be at fault."""
    mine = recorded(tmp_path, 0, type(name, (Exception,), {})("Connection closed by peer"))
    assert mine.origin == "exception"
    assert mine.likely_to_repeat
    assert RankExit(1, mine).may_be_a_consequence
    assert not mine.reports_lost_peer
    assert mine.headline.startswith("lockstep: rank 0 on node-a failed")


def test_a_record_without_an_origin_is_that_of_an_exception(local_rank):
    """Only exceptions are recorded, and older ranks did not say so."""
    record = asdict(Failure(1, "h", 0.0, "ValueError", "m"))
    del record["origin"]
    (local_rank.folder / "rank-1.json").write_text(json.dumps(record))
    assert examine(local_rank, 1, WHEN).failure.origin == "exception"


@pytest.mark.parametrize("origin", ["nobody", 3, None])
def test_a_record_of_an_unknown_origin_is_not_valid(local_rank, origin):
    record = {**asdict(Failure(1, "h", 0.0, "ValueError", "m")), "origin": origin}
    (local_rank.folder / "rank-1.json").write_text(json.dumps(record))
    assert examine(local_rank, 1, WHEN).failure.kind == Kind.EXIT
