"""The agent of a node: what it gives its ranks, and what it says of a zygote that dies and of ranks that are killed."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.launch import agent as module
from lockstep.launch.agent import Agent
from lockstep.launch.failure import LauncherFailure, RankExit
from lockstep.launch.job import Bounds, Job
from lockstep.launch.ranks import local_ranks, rank_record, zygote_client
from lockstep.launch.ranks.post_mortem import examine
from lockstep.launch.ranks.zygote import RankChange
from lockstep.launch.wire.messages import (
    CollectStacks,
    Kill,
    Message,
    NodeFailed,
    Prepare,
    RankExited,
    RanksGone,
    Rendezvous,
    SaveAndExit,
    SettingsRead,
    Stacks,
    Start,
)
from lockstep.runtime.environments.launcher import ATTEMPT_FOLDER, OF_ONE_JOB
from lockstep.runtime.heartbeat import Heartbeat


def test_a_launcher_inside_a_rank_of_another_job_starts_ranks_of_its_own(monkeypatch):
    """The store of the outer job would come first, and its ranks would wait for those of the inner job."""
    for name in (*OF_ONE_JOB, "LOCKSTEP_SECRET"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MY_OWN", "1")
    env = module._environment_for(1)
    assert not [name for name in env if name.startswith(("LOCKSTEP_", "TORCHELASTIC_"))]
    assert not {*OF_ONE_JOB} & env.keys()
    assert env["MY_OWN"] == "1"


START = Start(attempt=0, first_rank=0, count=1, world_size=1, group_rank=0, rendezvous=Rendezvous("127.0.0.1", 1))


# ---- a zygote that dies while it imports ----


@pytest.fixture
def importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Agent]]:
    """Return a function that makes an agent whose zygote imports a module with this code."""
    agents = []

    def make(code: str) -> Agent:
        (tmp_path / "imported.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
        job = Job({}, tmp_path, Bounds(1, 1), entry="json:dumps", preload=("imported",))
        agents.append(Agent(job, "host-a"))
        return agents[-1]

    yield make
    for agent in agents:
        agent.close()


def first_messages(agent: Agent) -> list[Message]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if messages := agent.poll():
            return messages
        time.sleep(0.01)
    raise AssertionError("no message")


def test_a_zygote_that_is_killed_while_it_imports_is_replaced(importing):
    """The kernel may have killed it for lack of memory. The next one may well succeed."""
    agent = importing("import time; time.sleep(600)")
    first = agent._zygote.pid
    os.kill(first, signal.SIGKILL)
    (message,) = first_messages(agent)
    text = f"the process {first} that starts the ranks on host-a was killed by SIGKILL while importing"
    assert message == NodeFailed(None, LauncherFailure.ZYGOTE, text)
    assert agent._zygote.alive
    assert agent._zygote.pid != first


def test_a_zygote_whose_imports_fail_is_not_replaced(importing, capfd):
    agent = importing("raise ImportError('no such library')")
    first = agent._zygote.pid
    (message,) = first_messages(agent)
    assert message.what == "import"
    assert message.why.endswith("exited while importing; the error is on that node's terminal")
    assert agent._zygote.pid == first
    assert agent.poll() == []
    assert "no such library" in capfd.readouterr().err

    # A new coordinator starts an attempt on the same agent: it must learn of the failed imports, too.
    agent.carry_out(START)
    (again,) = first_messages(agent)
    assert again.what == "import"


def test_a_zygote_that_imports_for_too_long_is_not_replaced(importing, monkeypatch):
    """Ten restarts an hour would be no limit: each of them would take ten minutes."""
    monkeypatch.setattr(zygote_client, "READY_S", 0.0)
    agent = importing("import time; time.sleep(600)")
    agent.carry_out(START)
    (message,) = first_messages(agent)
    assert message.what == "import"
    assert message.why.endswith("did not finish its imports within 0 s")


@pytest.mark.parametrize("for_s", [0.01, 600.0])
def test_a_zygote_that_the_system_refuses_is_no_end_of_the_launcher(importing, monkeypatch, for_s):
    """The error came out of `poll`, and what the agent had to report was lost."""
    agent = importing("import time; time.sleep(600)")
    started = subprocess.Popen

    def refuse(*arguments, **options):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(module, "START_ZYGOTE_S", for_s)
    monkeypatch.setattr(zygote_client.subprocess, "Popen", refuse)
    monkeypatch.setattr(zygote_client, "START_RETRY_S", 0.0)
    first = agent._zygote.pid
    os.kill(first, signal.SIGKILL)
    (message,) = first_messages(agent)
    assert (message.what, message.why.split()[2]) == ("zygote", str(first))

    # The next attempt finds no zygote: its ranks wait for one, or the node cannot run them.
    agent.carry_out(START)
    if for_s > 1:
        assert agent.poll() == []
        monkeypatch.setattr(zygote_client.subprocess, "Popen", started)
        agent.poll()
        assert agent._zygote.pid is not None
        return

    (message,) = first_messages(agent)
    why = (
        "the process that starts the ranks on host-a could not be started within 0 s: Resource temporarily unavailable"
    )
    assert message == NodeFailed(0, LauncherFailure.SETUP, why)


def test_the_zygote_of_a_resize_is_tried_again_while_the_ranks_save(importing, monkeypatch):
    """It gave up at its first look, after the swap: the save had taken longer than the time that it had."""
    agent = importing("import time; time.sleep(600)")
    started = subprocess.Popen

    def refuse(*arguments, **options):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(module, "_environment_for", lambda count: {**os.environ, "OMP_NUM_THREADS": str(count)})
    monkeypatch.setattr(zygote_client.subprocess, "Popen", refuse)
    monkeypatch.setattr(zygote_client, "START_RETRY_S", 0.0)
    agent.carry_out(Prepare(7))
    assert agent._next_zygote.pid is None

    monkeypatch.setattr(zygote_client.subprocess, "Popen", started)
    assert agent.poll() == []
    assert agent._next_zygote.pid is not None


def test_ranks_that_do_not_exist_yet_have_nothing_to_save(importing):
    """A resumed job said that it had saved where it had begun."""
    agent = importing("import time; time.sleep(600)")
    agent.carry_out(START)
    agent.carry_out(SaveAndExit(0, "SIGTERM"))
    (message,) = first_messages(agent)
    assert message == RankExited(0, 0, RankExit.as_asked("nothing"))


# ---- ranks that cannot be set up ----


@pytest.fixture
def without_processes(tmp_path, monkeypatch):
    """An agent that has no zygote."""
    monkeypatch.setattr(module, "ZygoteClient", FakeZygote)
    agent = Agent(Job({}, tmp_path / "run", Bounds(2, 2)), "host-a")
    yield agent
    agent.close()


def test_a_node_without_room_for_its_ranks_reports_that_once(without_processes, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "removed"))
    without_processes.carry_out(replace(START, first_rank=2, count=2))
    (message,) = without_processes.poll()
    assert (message.attempt, message.what, message.for_user) == (0, "setup", False)
    assert message.why.startswith("host-a cannot set up its ranks: [Errno 2] No such file or directory")

    # Nothing is left to kill.
    without_processes.carry_out(Kill(0))
    assert without_processes.poll() == [RanksGone(0)]


@pytest.mark.parametrize("fails", ["log", "pipe"])
def test_a_set_up_that_fails_leaves_nothing_behind(without_processes, tmp_path, monkeypatch, fails):
    """Each try left a folder, and two descriptors."""
    stat = Path.stat

    def fail(path=None, **options):
        if path is None or path.name == "rank-1.log":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(path, **options)

    (tmp_path / "folders").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "folders"))
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(*((Path, "stat", fail) if fails == "log" else (os, "pipe", fail)))
        for _ in range(3):
            without_processes.carry_out(replace(START, count=2))

    assert [message.what for message in without_processes.poll()] == ["setup"] * 3
    assert not list((tmp_path / "folders").iterdir())
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_node_that_cannot_write_the_logs_says_what_to_type(without_processes, tmp_path):
    (tmp_path / "run").write_text("not a folder")
    without_processes.carry_out(START)
    (message,) = without_processes.poll()
    assert message.for_user
    assert "cannot be written to" in message.why
    assert "set run_dir=FOLDER" in message.why


# ---- ranks that are slow to die ----


class FakeZygote(SimpleNamespace):
    """A zygote that never reports anything."""

    pid = 1
    ready = True
    cannot_import = False
    refusal = None
    how_it_ended = "died"

    def __init__(self, entry, preload, env, patience):
        super().__init__(env=env, alive=True)

    def fork(self, *arguments):
        pass

    def drop_unsent(self):
        pass

    def poll(self):
        return []

    def kill_zygote(self, why):
        self.alive, self.how_it_ended = False, why

    def close(self):
        self.alive = False


@pytest.fixture
def slow_rank(tmp_path, monkeypatch):
    """An agent with one rank, and the process of that rank, which dies only when the test kills it."""
    monkeypatch.setattr(module, "ZygoteClient", FakeZygote)
    monkeypatch.setattr(local_ranks, "kill_process_group", lambda pid: None)
    agent = Agent(Job({}, tmp_path, Bounds(1, 1)), "host-a")
    agent.carry_out(START)
    process = subprocess.Popen(["sleep", "600"])
    agent._current.running[0].pid = process.pid
    yield agent, process
    process.kill()
    process.wait()
    agent.close()


def die(process: subprocess.Popen) -> None:
    """Kill a process, and leave it for its parent to reap."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_a_rank_that_is_slow_to_die_is_not_gone_and_its_zygote_is_not_to_blame(slow_rank):
    agent, process = slow_rank
    first = agent._zygote
    agent.carry_out(Kill(0))
    agent._current.killed_at -= module.RANKS_KILL_S + 1
    assert agent.poll() == []
    assert agent._zygote is first

    # Now the rank is dead, and the zygote does not say so.
    die(process)
    lost, gone = agent.poll()
    assert isinstance(lost, NodeFailed)
    assert lost.why.endswith("did not report within 5 s that its killed ranks had ended")
    assert gone == RanksGone(0)
    assert agent._zygote is not first


@pytest.mark.parametrize("killed", [True, False])
def test_nobody_asks_how_a_rank_ended_that_was_killed_here(slow_rank, monkeypatch, killed):
    """The agent looked for the reason in its log, and the next attempt waited for that disk."""
    agent, process = slow_rank
    examined = []
    monkeypatch.setattr(module, "examine", lambda *arguments: examined.append(arguments) or RankExit(0))
    if killed:
        agent.carry_out(Kill(0))
    die(process)
    exited = RankChange(0, 0, process.pid, -signal.SIGKILL)
    monkeypatch.setattr(agent._zygote, "poll", lambda: [exited], raising=False)
    messages = agent.poll()
    assert len(examined) == (0 if killed else 1)
    assert messages[-1] == (RanksGone(0) if killed else RankExited(0, 0, RankExit(0)))


def test_a_report_about_an_earlier_attempt_is_not_about_the_rank_of_the_same_number(slow_rank, monkeypatch):
    """A late start took the place of the rank's own process."""
    agent, process = slow_rank
    agent.carry_out(replace(START, attempt=1))
    late = [RankChange(0, 0, process.pid), RankChange(0, 0, process.pid, -signal.SIGKILL)]
    monkeypatch.setattr(agent._zygote, "poll", lambda: late, raising=False)
    assert agent.poll() == []
    assert agent._current.running[0].pid is None


def polled(agent: Agent) -> list[Message]:
    """What `poll` returns a second after the last time."""
    agent._housekeeping_due = 0.0
    return agent.poll()


def test_the_settings_are_sent_once_in_each_attempt(slow_rank):
    agent, _ = slow_rank
    for attempt in range(2):
        assert polled(agent) == []
        (agent._current.folder / "settings.json").write_text('{"hang": {"least": 5.0}}')
        assert agent.heartbeat().attempt == attempt
        assert agent.poll() == []  # a heartbeat sends nothing else
        assert polled(agent) == [SettingsRead({"hang": {"least": 5.0}})]
        assert polled(agent) == []
        agent.carry_out(replace(START, attempt=attempt + 1))


def test_a_rank_that_outlives_its_zygote_is_not_gone(slow_rank):
    agent, process = slow_rank
    agent._zygote.alive = False
    assert [type(message) for message in agent.poll()] == [NodeFailed]
    agent.carry_out(Kill(0))
    assert agent.poll() == []
    die(process)
    assert agent.poll() == [RanksGone(0)]


def test_a_rank_that_advances_while_stacks_are_collected_is_seen_before_they_are_judged(slow_rank, monkeypatch):
    """On one node no other heartbeat comes in between: the rank would be killed for a hang."""
    agent, _ = slow_rank
    rank = Heartbeat(agent._current.folder / "heartbeat-0")
    rank.beat("data", 1)
    (before,) = agent.heartbeat().views

    def collect():
        rank.beat("compute", 1)
        return {0: "stack"}, {}

    monkeypatch.setattr(agent._current, "stacks_and_collectives", collect)
    agent.carry_out(CollectStacks(0, 7))
    beat, stacks = agent.poll()
    assert [view.beats for view in beat.views] == [before.beats + 1]
    assert stacks == Stacks.of(0, 7, {0: "stack"}, {})


def test_a_rank_that_has_failed_and_cleans_up_is_ended_and_not_asked_for_its_stack(slow_rank, monkeypatch):
    """Its clean-up would be called a hang, and the error would never be shown."""
    agent, process = slow_rank
    killed = []
    monkeypatch.setattr(local_ranks, "kill_process_group", killed.append)
    with rank_record.recording_early(0) as record:
        record(ValueError("without a launcher nothing is recorded"))

    monkeypatch.setenv(ATTEMPT_FOLDER, str(agent._current.folder))
    with rank_record.recording_early(0) as record:
        record(ValueError("the cause"))
        agent.carry_out(CollectStacks(0, 7))
        assert killed == [process.pid]
        assert agent.poll() == []
        found = examine(agent._current.running[0], -signal.SIGKILL, time.time())
    assert (found.failure.kind, found.failure.message) == ("ValueError", "the cause")

    # The program has caught the error, and goes on.
    agent.carry_out(CollectStacks(0, 8))
    assert killed == [process.pid]
    assert isinstance(agent.poll()[-1], Stacks)
