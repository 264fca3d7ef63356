"""The decisions of a job, without any process: it is told what happens, and issues commands."""

import signal
import time
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import pytest

from lockstep import api
from lockstep.config.sections import RestartConfig
from lockstep.errors import ExitCode, SmallerMicroBatch
from lockstep.launch.decisions import rank_exits, status
from lockstep.launch.decisions.attempt import Attempt
from lockstep.launch.decisions.commands import DismissNode, HangUp, RecordEvent, Send, StartAttempt
from lockstep.launch.decisions.job_nodes import Node, divide
from lockstep.launch.decisions.state_machine import JobStateMachine
from lockstep.launch.failure import (
    EXCEPTION_TRAITS,
    PROGRAM_ERROR,
    Failure,
    FailureTraits,
    LauncherFailure,
    RankExit,
    SaveOutcome,
)
from lockstep.launch.hangs.flight_recorder import DEFAULT_GROUP
from lockstep.launch.hangs.suspicion import RankView
from lockstep.launch.job import Bounds, Job, LauncherSettings
from lockstep.launch.times import FENCE_S, LOST_AFTER_S, NODES_KILL_S
from lockstep.launch.wire.messages import (
    NODE_FAILURES,
    Announce,
    CollectStacks,
    CoordinatorState,
    JobEnd,
    Kill,
    NodeFailed,
    NodeHeartbeat,
    Prepare,
    RankExited,
    SaveAndExit,
    SettingsRead,
    Stacks,
    decode,
    encode,
)
from lockstep.run_folder.checkpoint_facts import CheckpointFacts

ONE, TWO = Bounds(1, 1), Bounds(2, 2)

# The failure of a rank whose peer is gone, which gloo reports.
LOST = {"kind": "RuntimeError", "message": "Connection closed by peer [127.0.0.1]:1234", "lost_peer": "yes"}


def start_of(attempt: int, counts: dict[int, int]) -> StartAttempt:
    """The command that starts so many ranks on each node: they are numbered node by node."""
    ends = list(accumulate(counts.values()))
    return StartAttempt(attempt, {node: range(end - counts[node], end) for node, end in zip(counts, ends, strict=True)})


def counts_of(command: StartAttempt) -> dict[int, int]:
    return {node: len(ranks) for node, ranks in command.ranks_on.items()}


@dataclass
class Stage:
    """A job whose time and checkpoints the test decides."""

    nproc: Bounds = TWO
    nnodes: Bounds = ONE
    now: float = 1000.0
    saved: int | None = None
    committing: bool = False
    inherited: CoordinatorState | None = None
    commands: list = field(default_factory=list)
    restarts: int = 0  # that were logged

    def __post_init__(self):
        job = Job({}, Path("runs/x"), self.nproc, self.nnodes, resume_command="type it again")
        self._state_machine = JobStateMachine(job, CheckpointFacts(), self.now, self.inherited)
        self.join(0)

    @property
    def state_machine(self) -> JobStateMachine:
        """The state machine, which knows what the checkpoints show now."""
        self._state_machine.note_checkpoints(CheckpointFacts(self.saved, has_manifest=self.committing))
        return self._state_machine

    @property
    def state(self) -> JobStateMachine:
        """The state machine, to look at: it knows the checkpoints of the last event."""
        return self._state_machine

    @property
    def attempt(self) -> Attempt:
        assert self.state.attempts.newest is not None
        return self.state.attempts.newest

    def join(self, number: int, count: Bounds | None = None) -> None:
        self.state_machine.node_joined(Node(number, f"host-{number}", count or self.nproc), self.now)

    def tick(self, seconds: float = 0.0) -> list:
        """Return the commands since the last tick."""
        self.now += seconds
        self.state_machine.tick(self.now)
        self.commands = self.state_machine.take_commands()
        self.restarts += [log.event["event"] for log in self.of(RecordEvent)].count("restart")
        return self.commands

    def exit(self, rank: int, code: int, exit_line: str = "", save: SaveOutcome = "saved", **failure) -> None:
        kind = signal.Signals(-code).name if code < 0 else "ValueError"
        origin = "signal" if code < 0 else "exception"
        traits = FailureTraits() if code < 0 else PROGRAM_ERROR
        values = {"host": "host-0", "time": time.time(), "kind": kind, "message": "", "origin": origin}
        values |= {"traits": traits, **failure}
        failed = Failure(rank=rank, **values) if code not in (0, 75) else None
        rank_exit = RankExit.as_asked(save) if code == 75 else RankExit(code, failed, exit_line)
        self.state_machine.receive(0, RankExited(self.attempt.number, rank, rank_exit), self.now)

    def ranks_gone(self, *nodes: int) -> None:
        for node in nodes or (0,):
            self.state_machine.ranks_gone(node, self.attempt.number, self.now)

    def kill(self, rank: int = 1) -> list:
        """A rank is killed, and then all others."""
        self.exit(rank, -9)
        self.ranks_gone(*self.state.nodes.joined)
        return self.tick()

    def beat(self, *views: RankView, node: int = 0, **settings) -> None:
        if settings:
            self.state_machine.receive(node, SettingsRead(settings), self.now)
        beat = NodeHeartbeat(list(views), self.attempt.number)
        self.state_machine.heartbeat_received(node, beat, self.now)

    def sent(self, kind: type) -> list[int]:
        """The nodes that got an order of this kind; the coordinating one carries it out before it sends the next."""
        sent = [c.node for c in self.commands if isinstance(c, Send) and isinstance(c.order, kind)]
        assert 0 not in sent[:-1]
        return sorted(sent)

    def of(self, kind: type) -> list:
        return [command for command in self.commands if isinstance(command, kind)]

    @property
    def said(self) -> str:
        return "\n".join(announced.text for announced in self.of(Announce))


@pytest.fixture
def stage():
    made = Stage()
    assert made.tick() == [start_of(0, {0: 2})]
    return made


def test_all_done(stage):
    stage.exit(0, 0)
    assert stage.tick() == []
    stage.exit(1, 0)
    assert stage.tick() == [JobEnd(0)]


def test_a_kill_stops_all_and_starts_all_again(stage):
    stage.exit(1, -9, step=41, phase="all-reduce")
    stage.tick()
    assert stage.sent(Kill) == [0]
    assert not stage.of(StartAttempt)  # not before the last one is gone
    assert "restarting 2 ranks from the beginning (restart 1 of 10 in an hour)" in stage.said
    assert [log.event["event"] for log in stage.of(RecordEvent)] == ["failure"]
    stage.ranks_gone()
    restart = RecordEvent({"event": "restart", "attempt": 1, "ranks": 2, "step": None})
    assert stage.tick() == [restart, start_of(1, {0: 2})]


def test_a_restart_that_a_signal_prevents_is_not_logged(stage):
    stage.saved = 40
    stage.exit(1, -9)
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    stage.ranks_gone()
    stage.tick()
    assert [log.event["event"] for log in stage.of(RecordEvent)] == ["failure", "preempted"]


def test_messages_of_an_earlier_attempt_are_ignored(stage):
    stage.kill()
    stage.state_machine.heartbeat_received(0, NodeHeartbeat([view(1, 900.0, "data")], 0), stage.now)
    assert stage.attempt.watchdog.last_view(1) is None
    stage.state_machine.receive(0, RankExited(0, 0, RankExit(-9)), stage.now)
    stage.state_machine.ranks_gone(0, 0, stage.now)
    stage.state_machine.node_failed(0, NodeFailed(0, LauncherFailure.ZYGOTE, "died"), stage.now)
    assert stage.tick() == []


def test_an_error_waits_a_moment_for_its_cause(stage):
    stage.exit(0, 1, message="connection reset")
    assert stage.tick(0.5) == []
    stage.exit(1, -9)
    stage.tick()
    assert "rank 1 on host-0" in stage.said


def test_a_crash_waits_a_moment_for_the_error_that_led_to_it(stage):
    """A rank that has raised cleans up before it exits."""
    raised_at = time.time()
    stage.exit(1, -11, time=raised_at + 0.9)
    assert stage.tick(0.5) == []
    stage.exit(0, 1, message="the real one", time=raised_at)
    stage.tick(0.6)
    assert "the real one" in stage.said
    assert "not restarted: no checkpoint has been saved" in stage.said


def test_an_error_whose_cause_never_shows_is_the_cause(stage):
    stage.exit(0, 1, message="the real one")
    stage.tick(1.1)
    assert "rank 0 on host-0" in stage.said
    assert "not restarted: no checkpoint has been saved" in stage.said
    stage.ranks_gone()
    (ending,) = stage.tick()
    assert (ending.code, ending.failure.message) == (1, "the real one")


def test_an_error_after_progress_is_restarted_once(stage):
    for code in (1, 1):
        stage.saved = 5
        stage.exit(0, code)
        stage.tick(1.1)
        stage.ranks_gone()
        last = stage.tick()
    assert [type(command) for command in last] == [JobEnd]
    assert stage.restarts == 1


def test_a_checkpoint_that_all_ranks_have_written_is_committed_before_the_ranks_are_killed(stage):
    stage.committing = True
    stage.exit(1, 1)
    assert stage.tick(1.1) == []
    stage.saved, stage.committing = 5, False
    stage.tick(0.1)
    assert "from the checkpoint of step 5" in stage.said


def test_a_commit_that_does_not_end_is_not_waited_for(stage):
    stage.committing = True
    stage.exit(1, 1)
    assert stage.tick(1 + rank_exits.COMMIT_S - 0.1) == []
    stage.tick(0.2)
    assert "not restarted: no checkpoint has been saved" in stage.said


def test_a_checkpoint_that_all_ranks_have_written_is_committed_after_a_kill_too(stage):
    stage.committing = True
    stage.exit(1, -9)
    assert stage.tick() == []
    stage.saved, stage.committing = 5, False
    stage.tick(0.1)
    assert "rank 1 on host-0" in stage.said
    assert "from the checkpoint of step 5" in stage.said
    assert stage.sent(Kill) == [0]


def test_a_commit_that_does_not_end_after_a_kill_is_not_waited_for(stage):
    stage.committing = True
    stage.exit(1, -9)
    assert stage.tick(rank_exits.COMMIT_S - 0.1) == []
    stage.tick(0.2)
    assert stage.sent(Kill) == [0]


def test_a_dead_rank_0_commits_nothing(stage):
    stage.committing = True
    stage.exit(0, -9)
    stage.tick()
    assert stage.sent(Kill) == [0]


def test_a_kill_while_stacks_are_collected_waits_for_a_commit(stage):
    stage.committing = True
    stall(stage)
    stage.exit(1, -9)
    assert stage.tick() == []
    stage.committing = False
    stage.tick(0.1)
    assert "rank 1 on host-0" in stage.said


def test_going_back_to_an_earlier_checkpoint_is_no_progress():
    """Otherwise an error that repeats would be restarted once more than it should."""
    stage = Stage(saved=3)  # `latest` names it before the first attempt: see test_start_from.py
    stage.tick(3.1)
    stage.exit(0, 1)
    stage.tick(1.1)
    assert "not restarted: no checkpoint has been saved" in stage.said


@pytest.mark.parametrize(
    ("steps", "restarts"),
    [((500, 400), False), ((500, 400, 450), True), ((500, None), False), ((500, None, 100), True), ((None, 10), True)],
)
def test_a_checkpoint_that_is_lost_is_not_one_that_was_saved(steps, restarts):
    """The newest one was damaged and set aside: an error that repeats was restarted for that."""
    stage = Stage(saved=steps[0])
    stage.tick()
    for stage.saved in steps:
        stage.tick()

    stage.exit(0, 1)
    stage.tick(1.1)
    assert ("restarting 2 ranks" in stage.said) is restarts
    assert ("not restarted: no checkpoint has been saved" in stage.said) is not restarts


@pytest.mark.parametrize("then", ["signal", "resize", "join"])
def test_what_follows_an_error_does_not_delay_its_announcement(then):
    stage = Stage(Bounds(1, 2, 2), Bounds(1, 2))
    stage.tick(3.1)
    stage.exit(0, 1, message="the real one")
    stage.tick(0.5)
    match then:
        case "signal":
            stage.state_machine.preempt_requested("SIGTERM", stage.now)
        case "resize":
            stage.state_machine.resize_requested(1, stage.now)
        case "join":
            stage.join(1)
    stage.tick(0.6)
    assert "the real one" in stage.said


def test_a_user_error_is_never_restarted(stage):
    stage.saved = 5
    stage.exit(0, 1, for_user=True, message="asked\n  found: x\n  do: y")
    stage.exit(1, 1, for_user=True, message="asked\n  found: x\n  do: y")
    stage.tick()
    assert stage.said == "lockstep: asked\n  found: x\n  do: y"
    stage.ranks_gone()
    assert stage.tick()[0].code == 2


def kill_after_a_save(stage: Stage) -> list:
    stage.saved = (stage.saved or 0) + 5
    return stage.kill()


def test_the_budget_slides(stage):
    for _ in range(10):
        assert kill_after_a_save(stage)[-1] == start_of(stage.attempt.number, {0: 2})
    stage.now += 3601
    for _ in range(10):
        kill_after_a_save(stage)
        stage.now += 1
    last = kill_after_a_save(stage)
    assert isinstance(last[-1], JobEnd)
    assert stage.restarts == 20
    assert "not restarted: 10 restarts within the last hour" in stage.said


def test_the_budget_is_the_tasks_own(stage):
    stage.beat(restart={"per_hour": 0, "grace": 1})
    assert isinstance(stage.kill()[-1], JobEnd)


def test_a_dead_zygote_is_a_failure(stage):
    stage.state_machine.node_failed(
        0, NodeFailed(0, LauncherFailure.ZYGOTE, "the process that starts ranks died"), stage.now
    )
    stage.ranks_gone()
    assert stage.tick()[-1] == start_of(1, {0: 2})


def test_zygotes_that_are_killed_while_they_import_use_up_the_restarts(stage):
    for attempt in range(5):
        stage.state_machine.node_failed(0, NodeFailed(attempt, LauncherFailure.ZYGOTE, "was killed"), stage.now)
        stage.ranks_gone()
        assert stage.tick()[-1] == start_of(attempt + 1, {0: 2})

    stage.state_machine.node_failed(0, NodeFailed(5, LauncherFailure.ZYGOTE, "was killed"), stage.now)
    stage.ranks_gone()
    assert stage.tick()[-1].code == 1
    assert "5 restarts in a row without a new checkpoint, which is the limit" in stage.said


def test_a_zygote_that_cannot_import_ends_the_job(stage):
    stage.state_machine.node_failed(0, NodeFailed(0, LauncherFailure.IMPORT, "no torch"), stage.now)
    stage.ranks_gone()
    assert stage.tick()[-1].code == 1


def test_a_signal_while_the_ranks_of_a_failed_job_are_killed_does_not_change_its_exit_code(stage):
    stage.state_machine.node_failed(0, NodeFailed(0, LauncherFailure.IMPORT, "no torch"), stage.now)
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    stage.ranks_gone()
    assert stage.tick()[-1].code == ExitCode.FAILED


def test_a_newcomer_that_cannot_import_does_not_end_a_healthy_job():
    stage = nodes(1, 4, 1)
    stage.tick(3.1)
    stage.join(1)
    stage.state_machine.node_failed(1, NodeFailed(None, LauncherFailure.IMPORT, "exited while importing"), stage.now)
    stage.tick()
    assert "node 1 (host-1) is lost: exited while importing" in stage.said
    assert not stage.sent(Kill) + stage.of(JobEnd)

    # Its launcher ends: it would come back, and the ranks would save for it again. It hangs up by itself.
    (dismissed,) = stage.of(DismissNode)
    assert dismissed.node == 1
    assert (dismissed.ending.code, dismissed.ending.failure.kind) == (ExitCode.FAILED, LauncherFailure.IMPORT)
    assert not stage.of(HangUp)

    stage.exit(0, 75)
    stage.tick(3.1)
    assert stage.of(StartAttempt) == [start_of(1, {0: 1})]


def test_a_node_with_ranks_that_cannot_import_is_lost():
    stage = nodes(1, 2, 2)
    stage.tick()
    stage.state_machine.node_failed(1, NodeFailed(0, LauncherFailure.IMPORT, "exited while importing"), stage.now)
    stage.tick()
    assert stage.sent(Kill) == [0]
    assert "restarting 1 rank from the beginning" in stage.said
    stage.ranks_gone(0)
    stage.tick(3.1)
    assert stage.of(StartAttempt) == [start_of(1, {0: 1})]


def setup_failed(stage: Stage) -> None:
    stage.state_machine.node_failed(1, NodeFailed(0, LauncherFailure.SETUP, "no space left"), stage.now)
    stage.tick()


def test_a_node_that_cannot_set_up_its_ranks_is_dismissed_if_the_job_can_spare_it():
    stage = nodes(1, 2, 2)
    stage.tick()
    setup_failed(stage)
    assert [command.node for command in stage.of(DismissNode)] == [1]
    assert "node 1 (host-1) is lost: no space left" in stage.said
    assert stage.sent(Kill) == [0]


def test_a_host_that_was_dismissed_twice_may_not_join_for_an_hour():
    """Its platform starts it again and again: each time the ranks save, and an attempt fails."""
    stage = nodes(1, 2, 1)
    for number in (1, 2):
        assert not stage.state.nodes.dismissals.are_too_many(f"host-{number}", stage.now)
        stage.state_machine.node_joined(Node(number, "bad-host", ONE), stage.now)
        stage.state_machine.node_failed(
            number, NodeFailed(None, LauncherFailure.IMPORT, "exited while importing"), stage.now
        )
        assert stage.state.nodes.dismissals.are_too_many("bad-host", stage.now) is (number == 2)
        stage.tick(60.0)

    assert not stage.state.nodes.dismissals.are_too_many("host-0", stage.now)

    # A successor of the coordinator remembers it, too.
    new = Stage(inherited=decode(encode(stage.state_machine.coordinator_state(stage.now))), now=5.0)
    assert new.state.nodes.dismissals.are_too_many("bad-host", 5.0)
    assert not new.state.nodes.dismissals.are_too_many("bad-host", 3600.0)


def test_a_node_that_the_job_needs_and_that_cannot_set_up_its_ranks_ends_the_job():
    stage = nodes(2, 2, 2)
    stage.tick()
    setup_failed(stage)
    said = stage.said
    stage.ranks_gone(0, 1)
    stage.tick()
    assert "lockstep: no space left" in said
    assert [(end.code, end.failure.kind) for end in stage.of(JobEnd)] == [(1, "setup")]


@pytest.mark.parametrize("started", [True, False])
def test_a_node_that_the_job_needs_and_that_cannot_import_ends_the_job(started):
    """Another machine may have come, but the same program most likely fails there as well."""
    stage = nodes(2, 2 if started else 3, 2)
    stage.tick()
    attempt = 0 if started else None
    stage.state_machine.node_failed(1, NodeFailed(attempt, LauncherFailure.IMPORT, "exited while importing"), stage.now)
    said = [stage.tick(), stage.said][1]
    if started:
        stage.ranks_gone(0, 1)
        stage.tick()
    assert "not restarted: it would end the same way" in said
    assert [(end.code, end.failure.kind) for end in stage.of(JobEnd)] == [(1, "import")]


def test_a_smaller_micro_batch_is_asked_for_as_often_as_needed():
    """More often than restarts are allowed in an hour: a large batch is halved many times."""
    stage = Stage(nproc=Bounds(1, 2))
    stage.tick()
    for _ in range(20):
        stage.exit(1, 1, kind="SmallerMicroBatch", traits=EXCEPTION_TRAITS[SmallerMicroBatch])
        stage.tick(10.0)
        said = stage.said
        stage.ranks_gone()
        assert counts_of(stage.tick()[-1]) == {0: 2}
        assert "not counted as a restart" in said + stage.said

    # Another failure has restarts of its own.
    stage.kill()
    assert "restart 1 of 10 in an hour" in stage.said


def test_a_hang_that_repeats_without_a_checkpoint_ends_the_job(stage):
    """Each takes a quarter of an hour, so that there are never many within an hour."""
    for _ in range(5):
        stage.kill()
        assert not stage.of(JobEnd)
        stage.now += 900.0

    assert [type(command) for command in stage.kill()][-1] is JobEnd
    assert stage.restarts == 5
    assert "not restarted: 5 restarts in a row without a new checkpoint, which is the limit" in stage.said


def test_a_new_checkpoint_begins_a_new_row(stage):
    for saved in (None, None, None, 5, 5, 5, 10, 10, 10):
        stage.saved = saved
        stage.kill()
        stage.now += 900.0
    assert not stage.of(JobEnd)
    assert "restart 5 of 10 in an hour, 3 of 5 in a row without a new checkpoint" in stage.said


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_a_stop_request(stage, name, code):
    stage.state_machine.preempt_requested(name, stage.now)
    stage.tick()
    assert stage.sent(SaveAndExit) == [0]
    assert [command.order.signal for command in stage.of(Send) if isinstance(command.order, SaveAndExit)] == [name]
    stage.saved = 12
    stage.exit(0, 75)
    stage.state_machine.preempt_requested("SIGTERM", stage.now)  # schedulers send it more than once
    assert stage.tick() == []
    stage.exit(1, 75)
    stage.tick()
    assert stage.said == "lockstep: saved at step 12; to resume: type it again"
    assert stage.of(JobEnd) == [JobEnd(code)]
    assert stage.of(RecordEvent)[0].event == {"event": "preempted", "signal": name, "step": 12}


def test_a_stop_request_whose_save_fails_does_not_claim_to_have_saved():
    """The newest checkpoint is the one that the attempt started from."""
    stage = Stage(saved=100)
    stage.tick()
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    stage.exit(0, 1, message="No space left on device")
    stage.tick(1.1)
    said = stage.said
    stage.ranks_gone()
    stage.tick()
    assert "saved at step" not in said + stage.said
    assert "ended without another save; the newest checkpoint is of step 100; to resume: type it again" in stage.said
    assert stage.of(JobEnd)[0].code == 75


def test_a_checkpoint_from_before_a_stop_request_is_not_what_it_has_saved(stage):
    """Step 300 was saved when it was due. What was trained since then is lost."""
    stage.saved = 300
    stage.tick()
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    stage.exit(0, 1, message="No space left on device")
    stage.tick(1.1)
    said = stage.said
    stage.ranks_gone()
    stage.tick()
    assert "saved at step" not in said + stage.said
    assert "ended without another save; the newest checkpoint is of step 300; to resume: type it again" in stage.said


def exit_unsaved(stage: Stage, step: int) -> None:
    """Both ranks exit as they were asked to, but their save of this step failed."""
    for rank in range(2):
        message = RankExited(stage.attempt.number, rank, RankExit.as_asked("failed", step))
        stage.state_machine.receive(0, message, stage.now)
    stage.tick()


@pytest.mark.parametrize("started_from", [None, 500])
def test_ranks_that_exit_as_asked_after_a_failed_save_have_not_saved(started_from):
    """The checkpoint of step 500 is of this attempt or of an earlier one."""
    stage = Stage(saved=started_from)
    stage.tick()
    stage.saved = 500
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    exit_unsaved(stage, 900)
    assert "saved at step" not in stage.said
    assert "the save of step 900 failed; the job can only continue from the checkpoint of step 500" in stage.said
    assert "ended without another save; the newest checkpoint is of step 500; to resume: type it again" in stage.said
    assert stage.of(JobEnd) == [JobEnd(75)]


def test_a_job_whose_only_save_fails_has_failed(stage):
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    exit_unsaved(stage, 900)
    assert "the save of step 900 failed; the job can only continue from the beginning" in stage.said
    assert [end.code for end in stage.of(JobEnd)] == [1]


def test_a_resize_after_a_failed_save_says_what_is_lost():
    stage = Stage(Bounds(1, 8, 2), saved=500)
    stage.tick()
    stage.state_machine.resize_requested(3, stage.now)
    exit_unsaved(stage, 900)
    assert "the save of step 900 failed; the job can only continue from the checkpoint of step 500" in stage.said
    assert stage.of(StartAttempt) == [start_of(1, {0: 3})]


@pytest.mark.parametrize("save", ["saved", "nothing"])
def test_a_job_that_had_nothing_to_save_does_not_claim_to_have_saved(save):
    """It was resumed at step 100, and its ranks did not exist yet, or had not begun."""
    stage = Stage(saved=100)
    stage.tick()
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    for rank in range(2):
        stage.exit(rank, 75, save=save)
    stage.tick()
    assert ("saved at step 100" in stage.said) == (save == "saved")
    assert ("ended without another save; the newest checkpoint is of step 100" in stage.said) == (save == "nothing")
    assert stage.of(JobEnd) == [JobEnd(75)]


def test_a_stop_request_before_the_first_attempt_has_saved_nothing():
    stage = Stage(nnodes=TWO, saved=100)
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    stage.tick()
    assert "ended without another save; the newest checkpoint is of step 100" in stage.said


def test_a_stop_request_to_a_job_that_finishes_first(stage):
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    stage.exit(0, 0)
    stage.exit(1, 0)
    assert stage.tick()[-1] == JobEnd(0)


def exhaust_time(stage: Stage, seconds: float) -> None:
    """The ranks exhaust their time. Nothing is known of where they are, and no node sends stacks."""
    stage.tick(seconds)
    assert stage.sent(CollectStacks) == [0]
    assert not stage.sent(Kill)
    stage.tick(LOST_AFTER_S)
    assert stage.sent(Kill) == [0]


def test_ranks_that_do_not_stop_are_killed(stage):
    stage.beat(restart={"per_hour": 10, "grace": 30})
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    stage.tick(29)
    assert not stage.sent(CollectStacks)
    exhaust_time(stage, 2)
    assert "2 ranks did not exit within 30 s (restart.grace)" in stage.said
    stage.ranks_gone()
    assert stage.tick()[-1].code == 1


def test_when_one_rank_has_stopped_the_others_follow_soon_or_are_killed(stage):
    """Signalled while they were joining, one may have got the signal and the other be stuck in the rendezvous."""
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    stage.exit(0, 75, save="nothing")
    stage.tick(19)
    assert not stage.sent(CollectStacks)
    exhaust_time(stage, 2)
    stage.ranks_gone()
    assert stage.tick()[-1].code == 75


def test_one_interrupt_that_is_sent_to_all_nodes_is_one(stage):
    stage.state_machine.preempt_requested("SIGINT", stage.now, node=0)
    stage.state_machine.preempt_requested("SIGINT", stage.now + 0.01, node=1)
    stage.tick()
    assert not stage.sent(Kill)

    # The same node again, or another one much later: Ctrl-C was typed a second time.
    stage.state_machine.preempt_requested("SIGINT", stage.now, node=1)
    stage.tick()
    assert stage.sent(Kill) == [0]


def test_an_interrupt_at_another_node_later_is_the_second(stage):
    stage.state_machine.preempt_requested("SIGINT", stage.now, node=0)
    stage.tick(2)
    stage.state_machine.preempt_requested("SIGINT", stage.now, node=1)
    stage.tick()
    assert stage.sent(Kill) == [0]


def test_a_second_interrupt_stops_at_once(stage):
    stage.state_machine.preempt_requested("SIGINT", stage.now)
    stage.tick()
    stage.state_machine.preempt_requested("SIGINT", stage.now)
    stage.tick()
    assert stage.sent(Kill) == [0]
    stage.ranks_gone()
    assert stage.tick() == [JobEnd(130)]


@pytest.mark.parametrize(("saved", "code"), [(None, 1), (40, 75)])
@pytest.mark.parametrize("first", ["kill", "signal"])
def test_a_kill_and_a_stop_request_end_the_job_in_the_same_way_whichever_is_first(stage, first, saved, code):
    """Without a checkpoint the code was 75 after the kill, and 1 after the signal."""
    stage.saved = saved
    events = [lambda: stage.exit(1, -9), lambda: stage.state_machine.preempt_requested("SIGTERM", stage.now)]
    for event in events if first == "kill" else reversed(events):
        event()

    stage.ranks_gone()
    stage.tick()
    assert [ending.code for ending in stage.of(JobEnd)] == [code]
    assert not stage.of(StartAttempt)
    if saved is None:
        assert "not restarted: the job was asked to save and exit (SIGTERM). To resume from" in stage.said


def test_a_stop_request_after_ranks_that_had_nothing_to_save_were_killed_loses_nothing():
    stage = nodes(1, 2, 1)
    stage.tick(3.1)
    stage.beat(starting(0))
    stage.join(1)
    stage.state_machine.kill_if_nothing_to_save(stage.now)
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    stage.ranks_gone()
    assert stage.tick()[-1] == JobEnd(75)


def test_a_kill_after_a_stop_request_is_not_restarted(stage):
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    assert stage.kill()[-1].code == 1
    assert "the job was asked to save and exit (SIGTERM)" in stage.said
    assert "to save and exit (600 s, restart.grace; Ctrl-C twice: at once)" in stage.said


def test_ranks_that_were_signalled_directly(stage):
    stage.exit(0, 75)
    assert not stage.sent(Kill)
    stage.exit(1, 75)
    assert stage.tick()[-1] == JobEnd(75)


def test_resize():
    stage = Stage(Bounds(1, 8, 2))
    stage.tick()
    stage.state_machine.resize_requested(9, stage.now)
    assert "not resized to 9 ranks: --nproc allows 1..8" in [stage.tick(), stage.said][1]
    stage.state_machine.resize_requested(2, stage.now)
    assert stage.tick() == []
    stage.state_machine.resize_requested(3, stage.now)
    stage.tick()
    assert stage.sent(SaveAndExit) == stage.sent(Prepare) == [0]
    stage.exit(0, 75)
    stage.exit(1, 75)
    stage.tick()
    assert stage.of(StartAttempt) == [start_of(1, {0: 3})]
    assert stage.restarts == 0


@pytest.mark.parametrize("ending", ["signal", "failure"])
def test_a_job_that_is_ending_is_not_resized(ending):
    """It said that it asked the ranks to save, logged a resize, and started a process that imports torch."""
    stage = Stage(Bounds(1, 8, 2))
    stage.tick()
    if ending == "signal":
        stage.state_machine.preempt_requested("SIGTERM", stage.now)
    else:
        stage.exit(0, 1, for_user=True)
        stage.tick(1.1)
    stage.tick()
    stage.state_machine.resize_requested(3, stage.now)
    stage.tick()
    assert stage.said == "lockstep: not resized to 3 ranks: the job is ending"
    assert not stage.of(RecordEvent) + stage.of(Send)


def resized_to_3() -> Stage:
    stage = Stage(Bounds(1, 8, 2))
    stage.tick()
    stage.state_machine.resize_requested(3, stage.now)
    stage.saved = 7
    stage.exit(0, 75)
    stage.exit(1, 75)
    assert stage.tick()[-1] == start_of(1, {0: 3})
    return stage


def refuse(stage: Stage) -> None:
    stage.exit(1, 1, kind="UserError", message="the mesh does not fit 3 ranks", for_user=True)
    stage.tick(1.1)


def test_a_size_that_the_job_cannot_use_is_given_up():
    stage = resized_to_3()
    refuse(stage)
    assert "the mesh does not fit 3 ranks" in stage.said
    assert "not resized to 3 ranks: continuing with 2 ranks" in stage.said
    stage.ranks_gone()
    assert stage.tick() == [start_of(2, {0: 2})]
    assert stage.restarts == 0
    refuse(stage)  # and now it is a mistake like any other
    stage.ranks_gone()
    assert stage.tick()[-1].code == 2


def test_an_exception_right_after_a_resize_gives_the_size_up():
    """Out of memory on fewer ranks, say: the size before is known to work."""
    stage = resized_to_3()
    stage.exit(1, 1, kind="OutOfMemoryError", message="no room")
    stage.tick(2)
    assert "OutOfMemoryError: no room" in stage.said
    assert "not resized to 3 ranks: continuing with 2 ranks" in stage.said
    stage.ranks_gone()
    assert stage.tick() == [start_of(2, {0: 2})]


def test_a_mistake_long_after_a_resize_ends_the_job():
    stage = resized_to_3()
    stage.saved = 10
    refuse(stage)
    stage.ranks_gone()
    assert stage.tick()[-1].code == 2


def test_a_wish_between_two_attempts_is_granted():
    stage = Stage(Bounds(1, 8, 2))
    stage.tick()
    stage.exit(1, -9)
    stage.state_machine.resize_requested(3, stage.now)
    stage.ranks_gone()
    stage.tick()
    assert stage.of(StartAttempt) == [start_of(1, {0: 3})]


def test_a_rank_killed_while_resizing_is_an_ordinary_failure():
    stage = Stage(Bounds(1, 8, 2))
    stage.tick()
    stage.state_machine.resize_requested(3, stage.now)
    assert stage.kill()[-1] == start_of(1, {0: 3})
    assert stage.restarts == 1


def test_ranks_are_divided_evenly():
    assert divide(5, {0: Bounds(1, 4), 1: Bounds(1, 4)}) == {0: 3, 1: 2}
    assert divide(7, {0: Bounds(1, 2), 1: Bounds(1, 8), 2: Bounds(1, 8)}) == {0: 2, 1: 3, 2: 2}
    assert divide(2, {0: Bounds(1, 4), 1: Bounds(1, 4)}) == {0: 1, 1: 1}


# Several nodes


def nodes(least: int, most: int, come: int) -> Stage:
    stage = Stage(Bounds(1, 1), Bounds(least, most))
    for number in range(1, come):
        stage.join(number)
    return stage


def test_all_nodes_that_may_come_are_there():
    assert nodes(1, 3, 3).tick()[-1] == start_of(0, {0: 1, 1: 1, 2: 1})


def test_enough_nodes_wait_a_moment_for_more():
    stage = nodes(1, 3, 2)
    assert not [stage.tick(2.9), stage.of(StartAttempt)][1]
    stage.join(2)
    assert [stage.tick(), stage.of(StartAttempt)][1] == [start_of(0, {0: 1, 1: 1, 2: 1})]
    stage = nodes(1, 3, 2)
    assert [stage.tick(3.1), stage.of(StartAttempt)][1] == [start_of(0, {0: 1, 1: 1})]


def test_nodes_that_come_one_after_another_do_not_delay_the_start_for_ever():
    """The start waited for 3 s without a new node, and after 300 s the job ended: only 121 nodes, and 1 is needed."""
    stage = nodes(1, 500, 1)
    for number in range(1, 20):
        stage.tick(2.5)
        if stage.of(StartAttempt):
            break
        stage.join(number)
    assert stage.of(StartAttempt) == [start_of(0, dict.fromkeys(range(12), 1))]


def test_nodes_that_come_just_before_the_deadline_are_enough():
    stage = nodes(2, 500, 1)
    stage.tick(299)
    stage.join(1)
    assert stage.tick(1.1)[-1] == start_of(0, {0: 1, 1: 1})


def test_after_an_attempt_new_nodes_are_waited_for_again():
    stage = nodes(1, 4, 2)
    stage.tick(3.1)
    stage.now += 600
    stage.join(2)
    stage.exit(0, 75)
    stage.exit(1, 75)
    stage.tick(2.9)
    assert not stage.of(StartAttempt)
    stage.join(3)
    assert stage.tick()[-1] == start_of(1, dict.fromkeys(range(4), 1))


def test_too_few_nodes_do_not_wait_for_ever():
    stage = nodes(2, 2, 1)
    assert not [stage.tick(299), stage.of(JobEnd)][1]
    assert stage.tick(2)[-1].code == ExitCode.RESTART
    assert "only 1 node came within 300 s" in stage.said


def test_no_restarts_at_all_means_none_by_the_platform_either():
    stage = nodes(2, 2, 1)
    stage.state.facts.settings = LauncherSettings(restart=RestartConfig(per_hour=0))
    assert stage.tick(301)[-1].code == ExitCode.FAILED


def test_a_lost_node_stops_the_others_and_ends_what_needs_it():
    stage = nodes(2, 2, 2)
    stage.tick()
    stage.state_machine.node_lost(1, "no heartbeat for 5 s", stage.now)
    stage.tick()
    assert stage.sent(Kill) == [0]
    assert stage.said.startswith("lockstep: node 1 (host-1) is lost: no heartbeat for 5 s")
    stage.ranks_gone()
    (ending,) = stage.tick()
    assert (ending.code, ending.failure.kind) == (ExitCode.RESTART, "node")


@pytest.mark.parametrize("kind", NODE_FAILURES)
def test_of_a_node_that_fails_no_rank_is_named(kind):
    """Its first rank was named as the one that had failed, and its log, though that rank may never have existed."""
    stage = Stage(TWO, TWO)
    stage.join(1)
    stage.tick()
    stage.beat(restart={"per_hour": 0})
    stage.state_machine.node_failed(1, NodeFailed(0, kind, "no luck"), stage.now)
    stage.tick()
    assert stage.said.startswith("lockstep: no luck (")
    assert "2 other ranks ended because of it." in stage.said
    assert "Log of rank" not in stage.said
    (event,) = [log.event for log in stage.of(RecordEvent)]
    assert (event["rank"], event["node"], event["host"]) == (None, 1, "host-1")
    stage.ranks_gone(0, 1)
    (ending,) = [stage.tick(), stage.of(JobEnd)][1]
    assert api._describe_exit(ending) == f"exit code 1 (never restart): {kind}: no luck"


def test_of_a_node_that_is_lost_no_rank_is_named():
    stage = Stage(TWO, TWO)
    stage.join(1)
    stage.tick()
    stage.state_machine.node_lost(1, "no heartbeat for 5 s", stage.now)
    assert "Log of rank" not in [stage.tick(), stage.said][1]
    stage.ranks_gone(0)
    (ending,) = [stage.tick(), stage.of(JobEnd)][1]
    assert (ending.failure.rank, ending.failure.node) == (None, 1)
    assert api._describe_exit(ending) == "exit code 75 (restart): node: node 1 (host-1) is lost: no heartbeat for 5 s"


def test_a_node_that_returns_does_not_end_a_job_that_needs_all_its_nodes():
    stage = Stage(TWO, TWO)
    stage.join(1)
    assert stage.tick()[-1] == start_of(0, {0: 2, 1: 2})
    stage.state_machine.node_returned(1, Node(2, "host-1", TWO), stage.now)
    stage.tick()
    assert "node 1 (host-1) is lost: it has made a new connection" in stage.said
    assert "restarting 4 ranks" in stage.said
    assert not stage.sent(SaveAndExit)  # the ranks are killed: those of the node are lost
    assert stage.sent(Kill) == [0]
    stage.ranks_gone()
    assert stage.tick()[-1] == start_of(1, {0: 2, 2: 2})


def test_a_node_that_returns_between_two_attempts_is_not_missing():
    stage = Stage(TWO, Bounds(2, 3))
    stage.join(1)
    stage.tick(3.1)
    stage.exit(0, -9)
    stage.ranks_gone(0)  # and node 1 does not answer any more
    stage.state_machine.node_returned(1, Node(2, "host-1", TWO), stage.now)
    assert not [stage.tick(), stage.of(JobEnd)][1]
    assert stage.tick(3.1)[-1] == start_of(1, {0: 2, 2: 2})


def test_ranks_that_are_lost_with_a_failure_are_no_consequence_of_it():
    """The other ranks of a lost node, or of a node whose zygote died, are part of the failure."""
    stage = Stage(TWO, Bounds(1, 2))
    stage.join(1)
    stage.tick()
    stage.state_machine.node_lost(1, "no heartbeat for 5 s", stage.now)
    assert "2 other ranks ended because of it" in [stage.tick(), stage.said][1]
    stage = Stage(TWO, Bounds(1, 2))
    stage.join(1)
    stage.tick()
    stage.state_machine.node_failed(1, NodeFailed(0, LauncherFailure.ZYGOTE, "died"), stage.now)
    assert "2 other ranks ended because of it" in [stage.tick(), stage.said][1]
    stage = Stage(TWO)
    stage.tick()
    stage.state_machine.node_failed(0, NodeFailed(0, LauncherFailure.ZYGOTE, "died"), stage.now)
    assert "because of it" not in [stage.tick(), stage.said][1]


def test_ranks_that_finished_are_no_consequence_of_a_failure():
    """A rank that was done before is not counted; one that only lost its connection is."""
    stage = Stage(Bounds(4, 4))
    stage.tick()
    stage.exit(0, 0)
    stage.exit(1, 1, **LOST)
    stage.exit(2, -9)
    assert "2 other ranks ended because of it" in [stage.tick(), stage.said][1]


def test_a_job_continues_without_a_lost_node_where_allowed():
    stage = nodes(1, 2, 2)
    stage.tick()
    stage.state_machine.node_lost(1, "no heartbeat for 5 s", stage.now)
    stage.ranks_gone()
    assert not [stage.tick(2.9), stage.of(StartAttempt)][1]
    assert stage.tick(0.2)[-1] == start_of(1, {0: 1})


def test_an_error_may_come_of_a_node_that_is_about_to_turn_out_lost():
    stage = nodes(1, 2, 2)
    stage.tick()
    stage.beat(node=0)
    stage.beat(node=1)
    stage.exit(0, 1, message="connection reset by peer")
    stage.tick(3)
    stage.beat(node=0)
    assert stage.tick() == []
    stage.state_machine.node_lost(1, "no heartbeat for 5 s", stage.now)
    stage.tick()
    assert stage.said.startswith("lockstep: node 1 (host-1) is lost: no heartbeat for 5 s")
    assert "restarting 1 rank" in stage.said


def test_an_error_while_all_nodes_are_well_is_just_that():
    stage = nodes(1, 2, 2)
    stage.tick()
    stage.exit(0, 1, message="the real cause")
    for node in (0, 1):
        stage.beat(node=node)
    stage.tick(1.1)
    assert "rank 0 on host-0" in stage.said


def test_a_node_that_joins_as_the_ranks_fail_is_in_the_next_attempt():
    """The ranks were asked to save, which they could not do any more, and the screen said so."""
    stage = Stage(TWO, Bounds(1, 2))
    stage.tick(3.0)
    stage.exit(0, 1, **LOST)
    stage.join(1)
    stage.tick()
    assert "asking the ranks to save" not in stage.said
    assert stage.sent(SaveAndExit) == []
    stage.tick(5.0)
    assert stage.sent(Kill) == [0]
    stage.ranks_gone(0)
    assert start_of(1, {0: 2, 1: 2}) in stage.tick()


def test_a_node_lost_while_the_others_stop():
    stage = nodes(2, 3, 3)
    stage.tick()
    stage.exit(2, -9)
    stage.state_machine.node_lost(1, "no heartbeat for 5 s", stage.now)
    stage.ranks_gone(0, 2)
    assert [stage.tick(3.1), stage.of(StartAttempt)][1] == [start_of(1, {0: 1, 2: 1})]
    stage.exit(1, -9)
    stage.state_machine.node_lost(2, "no heartbeat for 5 s", stage.now)
    stage.ranks_gone(0)
    assert [stage.tick(), stage.of(JobEnd)][1][0].code == ExitCode.RESTART


def test_a_restart_that_a_lost_node_prevents_is_called_off_aloud():
    stage = nodes(2, 2, 2)
    stage.tick()
    stage.exit(1, -9)
    assert "restarting 2 ranks" in [stage.tick(), stage.said][1]
    stage.state_machine.node_lost(1, "no heartbeat for 5 s", stage.now)
    stage.ranks_gone(0)
    stage.tick()
    assert "not restarted: 1 node left, and 2 needed. To resume from the beginning: type it again" in stage.said
    (ending,) = stage.of(JobEnd)
    assert (ending.code, ending.failure.kind) == (ExitCode.RESTART, "node")


def test_a_node_that_returns_before_the_other_ranks_are_gone_is_not_missed():
    stage = nodes(3, 3, 3)
    stage.tick()
    stage.exit(1, -9)
    stage.state_machine.node_lost(1, "no heartbeat for 5 s", stage.now)
    stage.join(3)
    stage.ranks_gone(0, 2)
    stage.tick()
    assert stage.of(StartAttempt) == [start_of(1, {0: 1, 2: 1, 3: 1})]


def test_a_node_lost_after_its_ranks_saved_for_a_resize_is_missed():
    stage = Stage(Bounds(1, 2), TWO)
    stage.join(1)
    stage.tick()
    stage.state_machine.resize_requested(2, stage.now)
    for rank in (2, 3):
        stage.exit(rank, 75)
    stage.state_machine.node_lost(1, "no heartbeat for 5 s", stage.now)
    for rank in (0, 1):
        stage.exit(rank, 75)
    stage.tick()
    assert "not restarted: 1 node left, and 2 needed" in stage.said
    assert [ending.code for ending in stage.of(JobEnd)] == [ExitCode.RESTART]


def test_a_node_lost_while_the_job_waits_for_more():
    stage = nodes(2, 3, 3)
    stage.tick()
    stage.state_machine.node_lost(2, "no heartbeat for 5 s", stage.now)
    stage.ranks_gone(0, 1)
    stage.tick()
    stage.state_machine.node_lost(1, "no heartbeat for 5 s", stage.now)
    assert stage.tick()[-1].code == ExitCode.RESTART


def test_a_node_that_cannot_stop_its_ranks_is_left_behind():
    stage = nodes(1, 2, 2)
    stage.tick()
    stage.exit(1, -9)
    stage.ranks_gone(0)
    stage.tick(NODES_KILL_S - 1)
    assert not stage.of(StartAttempt)
    stage.tick(2)
    assert [stage.tick(3.1), stage.of(StartAttempt)][1] == [start_of(1, {0: 1})]


@pytest.mark.parametrize("others", [0, 2])
def test_a_coordinating_node_that_cannot_stop_its_ranks_ends_the_job(others):
    """Its rank still holds the run folder, so the other nodes must not go on."""
    stage = nodes(1, others + 1, others + 1)
    stage.tick()
    stage.exit(0, -9)
    for node in range(1, others + 1):
        stage.ranks_gone(node)
    stage.tick(NODES_KILL_S + 1)
    assert stage.of(StartAttempt) == stage.of(HangUp) == []
    assert (
        "not restarted: killed ranks on this machine did not end within 30 s. To resume from the beginning: type it"
        in stage.said
    )
    (ending,) = stage.of(JobEnd)
    assert ending.code == ExitCode.RESTART


def test_an_end_that_is_decided_stays_so_though_the_ranks_do_not_die(stage):
    stage.state_machine.preempt_requested("SIGINT", stage.now)
    stage.exit(1, -9)
    stage.tick()
    stage.tick(NODES_KILL_S + 1)
    assert [ending.code for ending in stage.of(JobEnd)] == [ExitCode.FAILED]


def test_the_zygote_of_a_node_that_was_dropped_does_not_matter():
    stage = nodes(1, 2, 2)
    stage.tick()
    stage.exit(0, -9)
    stage.state_machine.node_lost(1, "no heartbeat for 5 s", stage.now)
    stage.tick()
    stage.state_machine.node_failed(1, NodeFailed(0, LauncherFailure.ZYGOTE, "died"), stage.now)
    assert stage.tick() == []


def test_a_node_that_starts_nothing_is_named_and_lost():
    stage = nodes(1, 2, 2)
    stage.tick()
    stage.beat(node=0)
    stage.state_machine.heartbeat_received(1, NodeHeartbeat(), stage.now)  # it is alive, but does nothing
    stage.tick(9.9)
    assert not stage.of(HangUp)
    assert stage.state_machine.next_due > stage.now
    stage.now += 0.2
    assert stage.state_machine.next_due <= stage.now  # the coordinator looks at the checkpoints before the decision
    stage.tick()
    assert stage.state_machine.next_due > stage.now
    stage.ranks_gone(0)
    assert stage.of(HangUp) == [HangUp(1)]
    assert "node 1 (host-1) is lost: it did not start its ranks within 10 s" in stage.said
    stage.tick(3.1)
    assert stage.of(StartAttempt) == [start_of(1, {0: 1})]


def test_a_node_that_has_done_its_part_may_go():
    stage = nodes(2, 2, 2)
    stage.tick()
    stage.exit(1, 0)
    stage.state_machine.node_lost(1, "no heartbeat for 5 s", stage.now)
    stage.exit(0, 0)
    assert [stage.tick(), stage.of(JobEnd)][1] == [JobEnd(0)]


def test_a_node_that_comes_is_welcomed():
    stage = nodes(1, 2, 1)
    stage.tick(3.1)
    stage.join(1)
    stage.tick()
    assert stage.sent(SaveAndExit) == [0]
    stage.exit(0, 75)
    assert stage.tick() == [start_of(1, {0: 1, 1: 1})]
    assert stage.restarts == 0


def test_a_stop_request_while_a_node_is_being_welcomed():
    stage = nodes(1, 2, 1)
    stage.tick(3.1)
    stage.join(1)
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    stage.exit(0, 75)
    assert stage.tick()[-1] == JobEnd(75)


# A node takes over


def taken_over(stage: Stage, nnodes: Bounds = Bounds(1, 2)) -> Stage:
    """The coordinator of `stage` is lost; another node continues with what it had heard, an age later."""
    heard = decode(encode(stage.state_machine.coordinator_state(stage.now)))
    new = Stage(stage.nproc, nnodes, now=5.0, saved=stage.saved, inherited=heard)
    new.state_machine.took_over(
        Failure.by_launcher(LauncherFailure.NODE, "host-1 takes over from host-0", host="host-0"), new.now
    )
    return new


def test_a_job_that_has_failed_is_not_restarted_by_a_successor():
    """The coordinator was lost after it had said "not restarted", while ranks were still killed."""
    stage = nodes(1, 2, 2)
    stage.tick()
    stage.exit(1, 1, message="the same again")
    stage.tick(1.1)
    assert "not restarted: no checkpoint has been saved" in stage.said

    new = taken_over(stage)
    assert "not restarted: that was decided" in [new.tick(), new.said][1]
    new.join(1)
    assert not [new.tick(FENCE_S - 1), new.of(JobEnd)][1]
    assert [(end.code, end.failure.message) for end in [new.tick(2), new.of(JobEnd)][1]] == [(1, "the same again")]


def test_a_node_that_takes_over_continues_with_the_next_attempt():
    stage = nodes(1, 2, 2)
    stage.tick()
    stage.saved = 20
    stage.exit(1, -9)
    stage.ranks_gone(0, 1)
    stage.tick()
    new = taken_over(stage)
    new.tick()
    assert "host-1 takes over from host-0" in new.said
    assert "restarting the nodes that are left from the checkpoint of step 20 (restart 2 of 10 in an hour, " in new.said
    assert [log.event["event"] for log in new.of(RecordEvent)] == ["failure"]
    new.join(1)
    assert not [new.tick(2.9), new.of(StartAttempt)][1]  # the old ranks have time to see that they are superseded
    assert [new.tick(0.2), new.of(StartAttempt)][1] == [start_of(2, {0: 1, 1: 1})]
    (restart,) = new.of(RecordEvent)  # with the ranks of the nodes that have come
    assert restart.event == {"event": "restart", "attempt": 2, "ranks": 2, "step": 20}
    new.kill()
    assert [log.event["attempt"] for log in new.of(RecordEvent)] == [2, 3]  # a failure, and one restart


def test_the_budget_survives_the_coordinator(stage):
    for _ in range(10):
        kill_after_a_save(stage)
        stage.now += 300
    new = taken_over(stage)
    new.tick(3.1)
    assert (
        "10 restarts within the last hour, which is the limit. To resume from the checkpoint of step 50: type it"
        in new.said
    )
    assert new.of(JobEnd)[0].code == 1
    stage.now += 700  # the first one is more than an hour ago
    new = taken_over(stage)
    assert "(restart 10 of 10 in an hour" in [new.tick(), new.said][1]


def test_settings_survive_the_coordinator(stage):
    stage.beat(restart={"per_hour": 0, "grace": 1})
    new = taken_over(stage)
    new.tick(3.1)
    assert "not restarted: restart.per_hour is 0" in new.said
    assert new.of(JobEnd)[0].code == 1


def test_restarts_in_a_row_and_raised_limits_survive_the_coordinator(stage):
    hang(stage)
    for _ in range(4):
        stage.kill()
        stage.now += 900.0
    heard = decode(encode(stage.state_machine.coordinator_state(stage.now)))
    new = Stage(inherited=heard, now=5.0)
    new.tick(3.1)
    assert new.state.restarts.timeouts_reached == 1
    assert new.state.restarts.times == [moment - stage.now + 5.0 for moment in stage.state.restarts.times]
    assert isinstance(new.kill()[-1], JobEnd)  # the sixth in a row


def test_a_job_that_was_asked_to_stop_is_not_continued(stage):
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    stage.saved = 12
    new = taken_over(stage)
    assert not [new.tick(2.9), new.of(JobEnd)][1]  # the other nodes have time to come and hear it
    new.tick(0.2)
    assert "ended after a takeover; the newest checkpoint is of step 12; to resume: type it again" in new.said
    assert "saved at step 12" not in new.said  # it is not known whose that is
    assert new.of(JobEnd) == [JobEnd(75)]


def test_a_job_that_was_asked_to_stop_before_it_had_saved_ends_as_preempted_too(stage):
    """Its ranks are gone, and they had nothing to lose that the next start would not train again."""
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    new = taken_over(stage)
    assert "not restarted: the job was asked to save and exit" in [new.tick(2.9), new.said][1]
    assert "ended before anything was saved" in [new.tick(0.2), new.said][1]
    assert new.of(JobEnd) == [JobEnd(75)]


@pytest.mark.parametrize(("what", "code"), [("signal", 75), ("zygote", 1)])
def test_no_job_ends_while_the_old_rank_0_may_still_save(stage, what, code):
    new = taken_over(stage)
    new.tick(0.1)
    if what == "signal":
        new.state_machine.preempt_requested("SIGTERM", new.now)
    else:
        new.state_machine.node_failed(0, NodeFailed(None, LauncherFailure.IMPORT, "no torch"), new.now)
    assert not [new.tick(2.8), new.of(JobEnd)][1]
    assert [ending.code for ending in [new.tick(0.2), new.of(JobEnd)][1]] == [code]


def test_a_coordinator_lost_before_the_first_attempt():
    stage = nodes(2, 2, 1)
    new = taken_over(stage, Bounds(2, 2))
    new.join(1)
    assert [new.tick(3.1), new.of(StartAttempt)][1] == [start_of(0, {0: 1, 1: 1})]
    assert new.restarts == 0


def test_nodes_that_are_waited_for_are_counted_on_the_screen():
    stage = Stage(ONE, Bounds(3, 3))
    assert not [stage.tick(1), stage.said][1]  # they start together, and nobody waits yet
    said = "waiting for 2 more nodes at None (of 3; giving up after 5 minutes)"
    assert said in [stage.tick(2), stage.said][1]
    assert not [stage.tick(100), stage.said][1]
    stage.join(1)
    assert "waiting for 1 more node at None (of 3; giving up after 3 minutes)" in [stage.tick(3), stage.said][1]
    stage.join(2)
    assert "waiting" not in [stage.tick(3), stage.said][1]
    assert stage.of(StartAttempt)


def test_too_few_that_are_left_wait():
    stage = nodes(2, 2, 2)
    stage.tick()
    new = taken_over(stage, Bounds(2, 2))
    assert "waiting for 1 more node" in [new.tick(299), new.said][1]
    new.join(1)
    new.state_machine.node_lost(1, "no heartbeat for 5 s", new.now)
    assert not [new.tick(), new.of(JobEnd)][1]
    assert [new.tick(2), new.of(JobEnd)][1][0].code == ExitCode.RESTART


# Hangs


def view(rank: int, age: float, phase: str) -> RankView:
    heartbeat = {"beats": 9, "age": age, "step": 41, "steps_here": 40, "phase": phase, "longest": {phase: 0.1}}
    return RankView(rank=rank, host="host-0", pid=1, state="S", detail="", **heartbeat)


def stall(stage: Stage, **settings) -> None:
    """Rank 1 stays in its data while rank 0 waits, as seen once a second."""
    for second in range(0, 40, 2):
        stage.beat(view(0, float(second), "all-reduce"), view(1, float(second), "data"), **settings)
        stage.state_machine.check_for_hangs(stage.now)
        if CollectStacks in [type(command.order) for command in stage.tick(2) if isinstance(command, Send)]:
            return
    pytest.fail("nothing was noticed")


def test_a_node_that_is_lost_owes_no_stacks():
    """Its ranks had ended, so that the attempt goes on. The stacks of the others were judged 5 s later."""
    stage = nodes(1, 3, 2)
    stage.tick(3.1)
    stage.beat(node=1)
    stage.exit(1, 0)
    for second in range(0, 60, 2):
        stage.beat(view(0, float(second), "data"))
        stage.state_machine.check_for_hangs(stage.now)
        stage.tick(2)
        if stage.sent(CollectStacks):
            break
    assert stage.sent(CollectStacks) == [0, 1]
    stage.state_machine.receive(0, Stacks.of(0, 1, {0: ""}, {}), stage.now)
    assert stage.tick() == []
    stage.state_machine.node_lost(1, "no heartbeat for 5 s", stage.now)
    stage.tick()
    assert "no rank has advanced for" in stage.said


def test_a_hang_is_explained_and_restarted(stage):
    stall(stage)
    stack = 'Current thread 0x1 (most recent call first):\n  File "/x/data.py", line 7 in read\n'
    stage.state_machine.receive(0, Stacks.of(0, 1, {0: "", 1: stack}, {}), stage.now)
    stage.tick()
    assert "rank 1 on host-0 failed at step 41, phase data" in stage.said
    assert "data.py:7" in stage.said
    stage.ranks_gone()
    assert stage.tick()[-1] == start_of(1, {0: 2})


def test_stacks_of_an_earlier_request_say_nothing(stage):
    stall(stage)
    stage.beat(replace(view(0, 6.0, "all-reduce"), beats=10), view(1, 6.0, "data"))
    stage.tick(6)  # the stacks are late, and rank 0 has advanced: no hang
    assert stage.said == ""

    stall(stage)
    stage.state_machine.receive(0, Stacks.of(0, 1, {0: "", 1: ""}, {}), stage.now)
    assert stage.tick() == []
    stage.state_machine.receive(0, Stacks.of(0, 2, {0: "", 1: ""}, {}), stage.now)
    stage.tick()
    assert "hang" in stage.said


def test_an_error_while_stacks_are_collected_waits_for_its_cause(stage):
    stall(stage)
    stage.tick(2.9)  # the stacks have 0.1 s left
    stage.beat()  # the node is alive
    stage.exit(0, 1, **LOST)
    assert stage.tick(1.0) == []
    stage.exit(1, -9)
    stage.tick()
    assert "rank 1 on host-0" in stage.said


def hang(stage: Stage) -> None:
    """The ranks hang, and the next attempt starts."""
    stall(stage)
    stage.tick(6)
    stage.ranks_gone()
    stage.tick()


def test_after_a_hang_limits_are_higher_until_the_next_checkpoint(stage):
    stall(stage)
    stage.tick(6)
    assert "; hang timeouts are 4 times as long (hang.first at most) until the next checkpoint" in stage.said
    stage.ranks_gone()
    stage.tick()
    with pytest.raises(pytest.fail.Exception, match="nothing was noticed"):
        stall(stage)  # for 40 s

    stage.saved = 5
    stall(stage)


def starting(rank: int) -> RankView:
    """A rank that has ended no step, and compiles."""
    return replace(view(rank, 90.0, "compile"), steps_here=0)


def test_a_deadlock_raises_no_limit(stage):
    """More time would not help: the next attempt would only take longer to end at the same place."""
    stall(stage)
    stage.saved = 5
    entry = {"process_group": ["0", DEFAULT_GROUP], "collective_seq_id": 1, "profiling_name": "gloo:all_reduce"}
    entries = {0: [entry], 1: [entry | {"profiling_name": "gloo:barrier"}]}
    stage.state_machine.receive(0, Stacks.of(0, 1, {0: "", 1: ""}, entries), stage.now)
    stage.tick()
    assert "deadlock" in stage.said
    assert "restarting 2 ranks" in stage.said
    assert "hang timeouts" not in stage.said
    assert (stage.state.restarts.in_a_row, stage.state.restarts.timeouts_reached) == (1, 0)


@pytest.mark.parametrize("state", ["T", ""])
def test_a_rank_that_is_suspended_or_gone_raises_no_limit(stage, state):
    """Nothing was slow: the next attempt needs no more time than this one had."""
    for second in range(10):
        stage.beat(view(0, float(second), "all-reduce"), replace(view(1, float(second), "data"), state=state))
        stage.state_machine.check_for_hangs(stage.now)
        if CollectStacks in [type(command.order) for command in stage.tick(1) if isinstance(command, Send)]:
            break
    stage.state_machine.receive(0, Stacks.of(0, 1, {0: "", 1: ""}, {}), stage.now)
    stage.tick()
    assert "hang: 1 of 2 ranks is" in stage.said
    assert "restarting 2 ranks" in stage.said
    assert "hang timeouts" not in stage.said
    assert (stage.state.restarts.in_a_row, stage.state.restarts.timeouts_reached) == (1, 0)


def test_a_kill_raises_no_limit(stage):
    stage.kill()
    assert "hang timeouts" not in stage.said
    assert stage.state.restarts.timeouts_reached == 0


def test_ranks_that_stall_have_the_same_grace_as_others(stage):
    stage.beat(view(0, 30.0, "all-reduce"), view(1, 30.0, "user code"), restart={"grace": 30})
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    stage.tick(29)
    stage.state_machine.check_for_hangs(stage.now)
    assert not [stage.tick(), stage.sent(CollectStacks)][1]
    exhaust_time(stage, 2)


def ask(stage: Stage, reason: str) -> None:
    """Ask the ranks to save and exit."""
    match reason:
        case "signal":
            stage.state_machine.preempt_requested("SIGTERM", stage.now)
        case "resize":
            stage.state_machine.resize_requested(1, stage.now)
        case "join":
            stage.join(1)
    stage.tick()
    assert stage.sent(SaveAndExit) == [0]


@pytest.mark.parametrize("reason", ["signal", "resize", "join"])
def test_ranks_that_hang_when_they_are_asked_to_save_are_a_hang(reason):
    """They had the whole restart.grace, 600 s, and then the lowest rank was blamed."""
    stage = Stage(Bounds(1, 2, 2), Bounds(1, 2))
    stage.tick(3.1)
    stage.saved = 40
    ask(stage, reason)
    stall(stage)
    stack = 'Current thread 0x1 (most recent call first):\n  File "/x/data.py", line 7 in read\n'
    stage.state_machine.receive(0, Stacks.of(0, 1, {0: "", 1: stack}, {}), stage.now)
    stage.tick()
    assert "rank 1 on host-0 failed at step 41, phase data" in stage.said
    assert "data.py:7" in stage.said
    assert ("not restarted: the job was asked to save and exit" in stage.said) == (reason == "signal")
    assert stage.sent(Kill) == [0]


@pytest.mark.parametrize("phase", ["snapshot", "commit", "end"])
def test_a_slow_save_has_its_grace(stage, phase):
    ask(stage, "signal")
    for second in range(590):
        stage.beat(view(0, float(second), phase), view(1, float(second), "collective"))
        stage.state_machine.check_for_hangs(stage.now)
        for order in [command.order for command in stage.tick() if isinstance(command, Send)]:
            assert isinstance(order, CollectStacks)
            stage.state_machine.receive(0, Stacks.of(0, order.request, {0: "", 1: ""}, {}), stage.now)
        stage.tick(1)
        assert not stage.sent(Kill)
    exhaust_time(stage, 20)


def test_a_rank_that_has_failed_and_cleans_up_is_found_while_others_save(stage):
    """It left a record, for which the agents look when they are asked for stacks."""
    ask(stage, "signal")
    for second in range(60):
        stage.beat(view(0, float(second), "commit"), view(1, float(second), "user code"))
        stage.state_machine.check_for_hangs(stage.now)
        if stage.tick(1) and stage.sent(CollectStacks):
            break
    stage.exit(1, -9, kind="ValueError", message="the real one", origin="exception")
    stage.beat()
    stage.tick(1.1)
    assert "ValueError: the real one" in stage.said
    assert stage.sent(Kill) == [0]


def test_of_ranks_that_take_too_long_the_one_is_named_that_the_others_wait_for(stage):
    ask(stage, "signal")
    stage.beat(view(0, 2.0, "all-reduce"), view(1, 2.0, "data"))
    assert [stage.tick(601), stage.sent(CollectStacks)][1] == [0]
    stack = 'Current thread 0x1 (most recent call first):\n  File "/x/data.py", line 7 in read\n'
    stage.state_machine.receive(0, Stacks.of(0, 1, {0: "", 1: stack}, {}), stage.now)
    stage.tick()
    assert "rank 1 on host-0 failed at step 41, phase data" in stage.said
    assert "2 ranks did not exit within 600 s (restart.grace); the others are waiting for rank 1" in stage.said
    assert "data.py:7" in stage.said


def test_ranks_that_are_asked_to_save_before_their_first_step_has_ended_are_killed_and_have_not_failed(stage):
    """A scheduler runs a job with code 75 again: it was only preempted."""
    stage.beat(starting(0), starting(1))
    stage.state_machine.preempt_requested("SIGTERM", stage.now)
    stage.state_machine.kill_if_nothing_to_save(stage.now)
    stage.tick()
    assert stage.sent(Kill) == [0]
    assert "failed" not in stage.said
    stage.ranks_gone()
    stage.tick()
    assert [ending.code for ending in stage.of(JobEnd)] == [75]


def test_nodes_that_join_during_the_first_step_do_not_end_the_job():
    """However many come: to make room for them is no failure of the ranks that still compile."""
    stage = nodes(1, 16, 1)
    stage.tick(3.1)
    for number in range(1, 15):
        for node in stage.attempt.nodes:
            stage.beat(starting(stage.attempt.ranks_on(node)[0]), node=node)
        stage.join(number)
        stage.state_machine.kill_if_nothing_to_save(stage.now)
        stage.tick()
        assert stage.sent(Kill) == sorted(stage.attempt.nodes)
        assert "failed" not in stage.said
        assert not stage.of(RecordEvent)

        stage.ranks_gone(*stage.attempt.nodes)
        stage.tick(25.0)
        assert stage.of(StartAttempt)[0].ranks_on.keys() == set(range(number + 1))

    assert stage.state.restarts.recent(stage.now) == stage.restarts == 0


def test_ranks_that_save_too_slowly_for_a_resize_have_not_failed():
    stage = Stage(Bounds(1, 3, 2))
    stage.tick()
    stage.saved = 40
    for ranks in (1, 2, 1, 2):
        stage.state_machine.resize_requested(ranks, stage.now)
        exhaust_time(stage, 601)
        assert "did not exit within" in stage.said
        assert "continuing from the checkpoint of step 40" in stage.said
        assert "failed" not in stage.said
        stage.ranks_gone()
        assert counts_of(stage.tick()[-1]) == {0: ranks}

    assert stage.restarts == 0


def test_a_second_interrupt_works_after_a_sigterm_too(stage):
    for name in ("SIGTERM", "SIGINT", "SIGINT"):
        assert not stage.sent(Kill)
        stage.state_machine.preempt_requested(name, stage.now)
        stage.tick()
    assert stage.sent(Kill) == [0]


def test_a_hang_may_be_the_end(stage):
    stall(stage, hang={"action": "stop"})
    stage.tick(6)  # no rank could answer
    assert "not restarted: hang.action is stop" in stage.said


def test_a_job_of_which_a_rank_has_finished_is_not_restarted_for_a_hang(stage):
    stage.saved = 40
    stage.exit(0, 0)
    for second in range(0, 8, 2):
        stage.beat(view(1, float(second), "all-reduce"))
        stage.state_machine.check_for_hangs(stage.now)
        stage.tick(2)
    stage.tick(6)
    assert "not restarted: another rank has ended with code 0" in stage.said
    stage.ranks_gone()
    assert stage.tick()[-1].code == ExitCode.FAILED


def test_a_kill_is_a_better_reason_than_a_hang(stage):
    stall(stage)
    stage.exit(1, -9)
    stage.tick()
    assert "SIGKILL" in stage.said


def test_ranks_that_wait_for_a_cause_do_not_hang(stage):
    """Rank 0 has raised and the launcher waits for a cause: that rank 1 stalls meanwhile says nothing."""
    stalled = view(1, 70.0, "data")
    for _ in range(80):  # the watchdog has watched for long enough
        stage.beat(view(0, 0.1, "all-reduce"), view(1, 0.1, "data"))
        stage.state_machine.check_for_hangs(stage.now)
        stage.tick(1)
    stage.exit(0, 1, message="the real cause")
    stage.beat(stalled)
    stage.state_machine.check_for_hangs(stage.now)
    stage.tick(0.5)
    assert not stage.sent(CollectStacks)
    stage.tick(1)
    assert "the real cause" in stage.said


def test_a_complaint_waits_longer_for_its_cause_than_another_error(stage):
    """A large process takes seconds to die."""
    stage.exit(0, 1, **LOST)
    stage.tick(3)
    assert not stage.said
    stage.exit(1, -6)
    stage.beat()
    stage.tick(1.1)
    assert "rank 1 on host-0 failed" in stage.said


def test_a_rank_that_ends_before_the_others_is_named(stage):
    stage.exit(1, 0)
    stage.exit(0, 1, **LOST)
    stage.tick()
    assert "rank 1 on host-0 failed" in stage.said
    assert "ended with code 0 while other ranks were training" in stage.said


def test_a_rank_that_ends_before_rank_0_aborts_is_named(stage):
    """NCCL aborts a rank that has lost a peer; why rank 0 aborted is on the terminal, where nobody can look it up."""
    stage.exit(1, 0)
    stage.exit(0, -6, lost_peer="unread", phase="all-reduce")
    stage.tick()
    assert "rank 1 on host-0 failed" in stage.said
    assert "ended with code 0 while other ranks were training: rank 0 then aborted" in stage.said


def test_a_rank_that_ends_before_the_others_is_named_though_its_node_has_left():
    stage = Stage(ONE, TWO)
    stage.join(1)
    stage.tick()
    assert stage.of(StartAttempt) == [start_of(0, {0: 1, 1: 1})]
    stage.exit(1, 0)
    stage.state_machine.node_lost(1, "no heartbeat for 5 s", stage.now)
    stage.exit(0, 1, **LOST)
    stage.tick()
    assert "rank 1 on host-1 failed" in stage.said


def test_a_rank_that_ends_before_the_others_is_named_with_its_line(stage):
    stage.exit(1, 0, exit_line="task.py:12")
    stage.exit(0, 1, **LOST)
    stage.tick()
    assert "(sys.exit at task.py:12; if" in stage.said


def test_a_rank_that_others_blame_is_named_with_its_own_host_and_step():
    stage = nodes(2, 2, 2)
    stage.tick()
    stage.beat(replace(view(0, 0.1, "all-reduce"), step=7), node=0)
    stage.beat(replace(view(1, 0.1, "collective"), step=6), node=1)
    blamed = Failure(1, "", time.time(), "OutOfStep", "the ranks are out of step: rank 1 was in a collective")
    stage.state_machine.receive(0, RankExited(0, 0, RankExit(1, blamed)), stage.now)
    stage.tick(1.1)
    event = stage.of(RecordEvent)[0].event
    assert (event["rank"], event["host"], event["step"], event["phase"]) == (1, "host-1", 6, "collective")


def test_strange_records_of_collectives_do_no_harm(stage):
    stall(stage)
    stage.state_machine.receive(0, Stacks.of(0, 1, {0: "", 1: ""}, {0: [{"what": 1}]}), stage.now)
    stage.tick()
    assert "hang" in stage.said


def test_no_wait_is_without_a_limit():
    """In every phase but the run itself, which is watched by its heartbeats, there is a deadline."""
    stage = Stage(Bounds(1, 2, 1))
    assert stage.state.status.deadline < float("inf")
    stage.tick()
    stage.state_machine.resize_requested(2, stage.now)
    assert stage.state.status.current is status.JobStatus.SAVE_AND_EXIT
    assert stage.state.status.deadline < float("inf")
    stage.exit(0, -9)
    assert stage.state.status.current is status.JobStatus.KILL
    assert stage.state.status.deadline < float("inf")


def test_a_status_is_followed_only_by_one_that_the_table_allows(stage):
    with pytest.raises(AssertionError, match="JOIN cannot follow RUN"):
        stage.state.status.enter(status.JobStatus.JOIN)
    assert set(status.TRANSITIONS) == set(status.JobStatus)
    assert not status.TRANSITIONS[status.JobStatus.OVER]
