"""Which of several failures is to blame, and how a failure is told."""

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.errors import OutOfStep, SmallerMicroBatch, UserError
from lockstep.launch import lost_peer
from lockstep.launch.failure import (
    PROGRAM_ERROR,
    Failure,
    LauncherFailure,
    RankExit,
    left_early,
    pick_root,
)
from lockstep.launch.ranks import rank_record
from lockstep.launch.ranks.post_mortem import examine
from lockstep.runtime.heartbeat import Heartbeat

WHEN = time.mktime((2026, 11, 15, 12, 3, 10, 0, 0, -1))


# What gloo says, word for word, in a rank whose peer aborted.
RESET = (
    "[pair.cc:537] Read error [127.0.0.1]:50847: Connection reset by peer. This is typically caused by a remote worker"
)


def root_failure(exits: dict[int, RankExit]) -> Failure:
    root = pick_root(exits)
    assert root is not None
    failure = exits[root].failure
    assert failure is not None
    return failure


def test_a_rank_that_ends_without_a_word_is_the_cause_of_complaints_about_it(recorded):
    complaint = recorded(0, RuntimeError(RESET))
    silent = RankExit(
        3, Failure.by_launcher(LauncherFailure.EXIT, "ended with code 3", 1, "here", when=9e9)
    )  # noticed later
    assert root_failure({0: RankExit(1, complaint), 1: silent}).rank == 1


def test_the_earlier_of_two_errors_is_the_cause(recorded):
    ended = {rank: RankExit(1, recorded(rank, ValueError(str(rank)))) for rank in (1, 0)}
    assert root_failure(ended).rank == 1


def test_a_rank_that_records_late_is_still_the_cause(recorded):
    """Its peers may notice that it has left the process group, and record that, before it has recorded anything."""
    cause = ValueError("the real cause")
    rank_record.ended_by(cause, 1)  # before it leaves the process group
    ended = {0: RankExit(1, recorded(0, RuntimeError(RESET)))}
    ended[1] = RankExit(1, recorded(1, cause))
    assert root_failure(ended).rank == 1


def test_a_killed_rank_beats_the_complaints_of_others(local_rank, recorded):
    complaint = recorded(0, RuntimeError(RESET))
    killed = examine(local_rank, -signal.SIGKILL, time.time() + 1)
    assert root_failure({0: RankExit(1, complaint), 1: killed}).kind == "SIGKILL"


def test_a_rank_that_has_lost_a_peer_and_crashes_while_it_exits_is_not_to_blame(recorded):
    cause = RankExit(1, recorded(1, ValueError("the real cause")))
    crashed = RankExit(-signal.SIGSEGV, recorded(0, RuntimeError(RESET)))
    assert root_failure({0: crashed, 1: cause}).rank == 1


def test_an_abort_after_a_record_is_a_consequence(local_rank, recorded):
    cause = RankExit(1, recorded(0, ValueError("the real cause")))
    assert root_failure({0: cause, 1: examine(local_rank, -signal.SIGABRT, time.time() + 1)}).kind == "ValueError"
    assert root_failure({0: cause, 1: examine(local_rank, -signal.SIGABRT, time.time() - 60)}).kind == "SIGABRT"


def test_a_rank_that_aborts_beats_the_complaints_of_others(local_rank, recorded):
    """The complaint comes first: the kernel closes the connections of a process before its parent can reap it."""
    complaint = RankExit(1, recorded(0, RuntimeError(RESET)))
    local_rank.log.write_text("free(): invalid pointer\n")
    found = root_failure({0: complaint, 1: examine(local_rank, -signal.SIGABRT, time.time() + 1)})
    assert (found.rank, found.message) == (1, "native code aborted: free(): invalid pointer")


@pytest.mark.parametrize("code", [-signal.SIGSEGV, 1, 0])
def test_a_crash_or_an_exit_after_an_error_of_another_rank_is_a_consequence(local_rank, recorded, code):
    """The rank that crashed was named, and the job restarted, though its program had failed."""
    cause = RankExit(1, recorded(0, ValueError("the real cause")))
    found = root_failure({0: cause, 1: examine(local_rank, code, time.time() + 0.9)})
    assert (found.rank, found.likely_to_repeat) == (0, True)
    assert root_failure({0: cause, 1: examine(local_rank, code, time.time() - 60)}).rank == 1
    assert root_failure({0: cause, 1: examine(local_rank, -signal.SIGKILL, time.time() + 0.9)}).rank == 1


def test_a_crash_beats_an_earlier_complaint(local_rank, recorded):
    """The kernel closes the connections of a process before its parent can reap it."""
    complaint = RankExit(1, recorded(0, RuntimeError(RESET)))
    assert root_failure({0: complaint, 1: examine(local_rank, -signal.SIGSEGV, time.time() + 1)}).rank == 1


def test_a_class_of_the_program_is_not_one_of_ours_whatever_its_name(recorded):
    """It would ask for 99 restarts."""
    for name in ("SmallerMicroBatch", "OutOfStep"):
        assert recorded(0, type(name, (Exception,), {})("mine")).traits == PROGRAM_ERROR
    assert recorded(0, SmallerMicroBatch("too large")).traits.asks_for_smaller_micro_batch


def test_an_exception_of_its_own_beats_an_earlier_complaint(recorded):
    complaint = RankExit(1, recorded(0, RuntimeError(RESET)))
    own = RankExit(1, recorded(1, ConnectionResetError("Connection reset by peer")))  # its own server's
    assert root_failure({0: complaint, 1: own}).rank == 1


def test_an_abort_over_a_lost_peer_is_a_complaint(local_rank, recorded):
    local_rank.log.write_text(f"terminate called after throwing an instance of 'X'\n  what():  {RESET}\n")
    aborted = examine(local_rank, -signal.SIGABRT, time.time() - 60)
    assert root_failure({0: RankExit(1, recorded(0, ValueError("mine"))), 1: aborted}).kind == "ValueError"


# What torch says of NCCL, word for word but for the numbers.
TIMEOUT = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=880, OpType=BROADCAST, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=1800000) ran for 1800902 milliseconds before timing out."
)
ABORTED = "NCCL communicator was aborted on rank 1. "
CUDA_FAILED = "NCCL error: unhandled cuda error, ncclUnhandledCudaError: Call to CUDA function failed."


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        (TIMEOUT, True),
        (ABORTED, True),
        (f"{ABORTED} Original reason for failure was: {TIMEOUT}", True),
        (f"{ABORTED} Original reason for failure was: {CUDA_FAILED}", False),
        (CUDA_FAILED, False),
    ],
)
def test_a_timeout_of_nccl_is_a_complaint(message, lost, local_rank):
    assert lost_peer.reported_by_torch("DistBackendError", message) is lost

    what = f"[PG 0 Rank 1] Process group watchdog thread terminated with exception: {message}"
    local_rank.log.write_text(
        f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {what}\n"
    )
    assert examine(local_rank, -signal.SIGABRT, WHEN).failure.lost_peer == ("yes" if lost else "no")


def test_an_abort_of_rank_0_may_be_a_complaint_and_may_be_the_cause(local_rank, recorded):
    """Its reason is on the terminal, where the launcher cannot read it: NCCL aborts a rank that has lost a peer."""
    rank_0 = replace(local_rank, number=0, log=None)
    aborted = examine(rank_0, -signal.SIGABRT, time.time() - 60)
    assert "on the terminal" in aborted.failure.message
    assert root_failure({0: aborted, 1: RankExit(1, recorded(1, ValueError("mine")))}).kind == "ValueError"
    assert root_failure({0: aborted, 1: RankExit(1, recorded(1, RuntimeError(RESET)))}).kind == "SIGABRT"

    # A rank that has done its work waits for no peer.
    assert aborted.failure.lost_peer == "unread"
    Heartbeat(rank_0.folder / "heartbeat-0").beat("end", 41)
    assert examine(rank_0, -signal.SIGABRT, time.time()).failure.lost_peer == "no"


def test_a_rank_that_exits_with_0_in_the_middle_is_the_cause(local_rank, recorded):
    left = examine(local_rank, 0, time.time() + 1)
    assert not left.clean
    found = root_failure({0: RankExit(1, recorded(0, RuntimeError(RESET))), 1: left})
    assert (found.rank, found.kind) == (1, "exit")
    assert "ended with code 0 before its work was done" in found.message


def test_a_traceback_is_better_than_a_log(recorded):
    text = recorded(1, ValueError("x")).text()
    assert "Traceback" in text
    assert Failure(1, "h", WHEN, "k", "m", log="last line").text().endswith("\n  last line")


TRACEBACK = """Traceback (most recent call last):
  File "{package}/launch/ranks/rank_process.py", line 49, in main
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
    text = TRACEBACK.format(package=Path(lost_peer.__file__).parent.parent)
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
    ours = text.replace("/u/my_task.py", f"{Path(lost_peer.__file__).parent}/zygote.py")
    assert replace(found, traceback=ours).text().count("File ") == 5  # nothing of the user's: all is shown


def test_a_lost_node_has_no_rank_to_name():
    found = "node 1 (node-b) is lost: no heartbeat for 5 s"
    text = Failure.by_launcher(LauncherFailure.NODE, found, host="node-b", when=WHEN, node=1).text()
    assert text == "lockstep: node 1 (node-b) is lost: no heartbeat for 5 s (12:03:10)"


@pytest.mark.parametrize(
    ("found", "repeats"),
    [
        (Failure(0, "h", 0.0, "ValueError", "m", traits=PROGRAM_ERROR), True),
        (Failure.by_launcher(LauncherFailure.EXIT, "m", 0), True),
        (Failure(0, "h", 0.0, "SIGKILL", "m", origin="signal"), False),
        (Failure.by_launcher(LauncherFailure.NODE, "m", node=0), False),
    ],
)
def test_what_the_program_would_do_again(found, repeats):
    assert found.likely_to_repeat is repeats


def test_a_rank_whose_script_ended_is_not_said_to_have_called_exit():
    complaint = Failure(0, "host", 1.0, "RuntimeError", RESET)
    assert "sys.exit" not in left_early(1, "host", complaint, "").message
    assert "sys.exit at a.py:3" in left_early(1, "host", complaint, "a.py:3").message


@pytest.mark.parametrize("name", ["SIGKILL", "SIG42", "SIGABRT", "node", "hang", "exit"])
def test_an_exception_is_an_exception_whatever_its_name(name, recorded):
    """Names of signals and of kinds are no reserved words: they do not make a rank restart, or be at fault."""
    mine = recorded(0, type(name, (Exception,), {})("Connection closed by peer"))
    assert mine.origin == "exception"
    assert mine.likely_to_repeat
    assert not mine.from_outside
    assert mine.lost_peer == "no"
    assert mine.headline.startswith("lockstep: rank 0 on node-a failed")


def test_an_error_about_sockets_that_torch_did_not_raise_is_no_complaint(recorded):
    """A dataset that reads from a server fails in the same words; no other rank is to blame for that."""
    dataset = recorded(0, RuntimeError("shard 7: connection reset by peer"))
    assert dataset.lost_peer == "no"
    lost = {1: RankExit(1, recorded(1, RuntimeError(RESET))), 0: RankExit(1, dataset)}
    assert root_failure(lost).message == "shard 7: connection reset by peer"


class TrainError(Exception):
    """An error of the user's program."""


def test_a_lost_peer_is_recognised_behind_an_error_of_the_program(recorded):
    """The program caught torch's exception: it would be blamed instead of the rank that had died."""
    wrapped, in_handler = TrainError("step 3 failed"), TrainError("step 3 failed")
    wrapped.__cause__ = TrainError("the exchange failed")
    wrapped.__cause__.__context__ = in_handler.__context__ = RuntimeError(RESET)
    for error in (wrapped, in_handler):
        found = recorded(0, error)
        assert found.lost_peer == "yes"
        assert not found.likely_to_repeat
        assert found.kind == "TrainError"


def test_errors_that_are_linked_in_a_circle_are_no_complaint(recorded):
    error = TrainError("step 3 failed")
    error.__cause__ = ValueError("x")
    error.__cause__.__cause__ = error
    assert recorded(0, error).lost_peer == "no"


@pytest.mark.parametrize("error", [UserError("no", "", "x"), OutOfStep("no", [1]), SmallerMicroBatch("no")])
def test_an_error_of_lockstep_is_no_complaint_whatever_led_to_it(error):
    error.__cause__ = RuntimeError(RESET)
    assert not lost_peer.reported_by(error)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "RuntimeError",
            "[/pytorch/third_party/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:7",
        ),
        ("RuntimeError", "[enforce fail at unbound_buffer.cc:81] Timed out waiting 60000ms for recv operation"),
        ("RuntimeError", "Application timeout caused pair closure"),
        ("RuntimeError", "Gloo connectFullMesh failed with [device.cc:9] connect [::1]:7: Connection refused"),
        ("DistBackendError", "NCCL error: ncclRemoteError: A call failed possibly due to a network error"),
        ("DistNetworkError", "failed to recv, got 0 bytes"),
    ],
)
def test_what_torch_says_of_a_lost_peer(kind, message):
    assert lost_peer.reported_by_torch(kind, message)


def test_a_rank_that_was_never_forked_is_the_cause():
    refused = RankExit(1, Failure.by_launcher(LauncherFailure.FORK, "refused", 1, "h", when=9e9))
    lost = RankExit(1, Failure(0, "h", 0.0, "DistStoreError", "timed out", lost_peer="yes"))
    assert refused.failure.from_outside
    assert root_failure({0: lost, 1: refused}).kind == "fork"
    assert not refused.failure.likely_to_repeat  # other processes of the machine may end
