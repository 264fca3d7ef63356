"""`lockstep launch ray`: what the driver decides when nodes come and go, on a cluster that is played here.

tests/cluster/test_ray.py runs the same driver on a real Ray cluster.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from lockstep import api
from lockstep.cli import main
from lockstep.clusters import ray as platform
from lockstep.clusters.ray import actor as actors
from lockstep.clusters.ray import driver
from lockstep.clusters.ray.actor import ActorReport, NodeActor, TermWatch
from lockstep.clusters.ray.cluster import ActorLost, RayNode, RayUnavailable, state_of
from lockstep.clusters.ray.driver import RayDriver
from lockstep.clusters.request import JobRequest
from lockstep.errors import UserError, pip_install
from lockstep.launch import election
from lockstep.launch.agent import _environment_for
from lockstep.launch.job import RESUME_COMMAND, Bounds
from lockstep.launch.terminal import ONE_LOG
from lockstep.launch.wire.messages import JobEnd

NEED = {"CPU": 2.0}


@dataclass(eq=False)
class FakeActor:
    """An actor whose launcher says and does what the test tells it."""

    host: str
    words: Sequence[str] = ()
    lines: list[str] = field(default_factory=list)
    code: int | None = None
    lost: str = ""
    signals: list[str] = field(default_factory=list)
    killed: bool = False
    coordinates: bool = False
    port_taken: bool = False

    def address(self, host: str) -> str | None:
        if self.lost:
            raise ActorLost(self.lost)
        self.coordinates = True
        return f"{host}:29400"

    def start(self, words: Sequence[str]) -> None:
        self.words = words

    silent: bool = False

    def poll(self) -> ActorReport | None:
        if self.lost:
            raise ActorLost(self.lost)
        if self.silent:
            return None
        lines, self.lines = self.lines, []
        ended_job = self.coordinates and self.code is not None
        return ActorReport(lines, self.code, self.coordinates, ended_job, self.port_taken)

    def signal(self, name: str) -> None:
        self.signals.append(name)

    def kill(self) -> None:
        self.killed = True


@dataclass(eq=False)
class Group:
    need: dict[str, float]
    node: str | None
    placed: list[str]
    released: bool = False


class FakeCluster:
    """Ray, as the driver sees it: nodes with room for one bundle each. Time passes only in `sleep`."""

    address = "10.0.0.1:6379"
    uploaded_folder = False

    def __init__(self, count: int, script: Callable[[FakeCluster, int], None]):
        self.all = {f"n{number}": self.node(number) for number in range(1, count + 1)}
        self.groups: list[Group] = []
        self.actors: list[FakeActor] = []
        self._now = 0.0
        self._script = script  # called with the number of the second, once in each
        self._seconds = 0
        self.away = False  # the control service does not answer

    def node(self, number: int, cpus: float = 2.0) -> RayNode:
        return RayNode(f"n{number}", f"10.0.0.{number}", {"CPU": cpus}, {"CPU": cpus})

    # ---- what the test does ----

    def running(self) -> list[FakeActor]:
        return [actor for actor in self.actors if actor.code is None and not actor.lost and not actor.killed]

    def lose(self, host: str) -> None:
        (number,) = [node.id for node in self.all.values() if node.host == host]
        del self.all[number]
        for actor in self.running():
            if actor.host == host:
                actor.lost = "its node died"
        for group in self.groups:
            group.placed = ["" if node == number else node for node in group.placed]

    def drain(self, number: str) -> None:
        self.all[number] = replace(self.all[number], drained_at=time.time() + 60)

    def end(self, code: int) -> None:
        for actor in self.running():
            actor.code = code

    def held(self) -> set[str]:
        """The hosts of the nodes that the job has reserved."""
        placed = [node for group in self.groups if not group.released for node in group.placed if node]
        return {self.all[node].host for node in placed}

    # ---- what the driver asks ----

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        assert self._now < 1000, "the driver does not end"
        while self._seconds < int(self._now):
            self._seconds += 1
            self._script(self, self._seconds)

    def nodes(self) -> list[RayNode]:
        if self.away:
            raise RayUnavailable("connection refused")
        return self._free_nodes()

    def _free_nodes(self) -> list[RayNode]:
        taken = {node for group in self.groups if not group.released for node in group.placed}
        return [replace(node, free={"CPU": 0.0}) if node.id in taken else node for node in self.all.values()]

    def reserve(self, count: int, need, node: str | None = None) -> Group:
        if self.away:
            raise RayUnavailable("connection refused")
        self.groups.append(Group(dict(need), node, [""] * count))
        return self.groups[-1]

    def placed(self, group: Group) -> list[str]:
        if self.away:
            raise RayUnavailable("connection refused")
        free = [node.id for node in self._free_nodes() if node.has_free(group.need) and node.drained_at is None]
        free = [node for node in free if group.node in (None, node)]

        # At first all bundles or none; later Ray replaces those that are lost one by one.
        if any(group.placed) or len(free) >= len(group.placed):
            group.placed = [node or (free.pop() if free else "") for node in group.placed]
        return list(group.placed)

    def release(self, group: Group) -> None:
        group.released = True

    def make_actor(self, group: Group, bundle: int, need, arguments) -> FakeActor:
        self.arguments = arguments
        self.actors.append(FakeActor(self.all[group.placed[bundle]].host))
        return self.actors[-1]


@pytest.fixture
def run(tmp_path, capfd):
    """Run a driver on a cluster of so many nodes. Returns its exit code, the cluster, and what was printed."""

    def play(script, count=3, nnodes=(1, 3), signals: list[str] | None = None, wait: float | None = None):
        request = JobRequest("char_lm", ("steps=3",), (), (), tmp_path / "run", "2", Bounds(*nnodes))
        cluster = FakeCluster(count, script)
        signals = [] if signals is None else signals
        code = RayDriver(cluster, request, NEED, signals, wait, "type it again").run()
        assert all(group.released for group in cluster.groups)
        assert not cluster.running()
        captured = capfd.readouterr()
        return code, cluster, captured.out + captured.err

    return play


def test_each_node_gets_one_actor_and_all_meet_at_the_first(run):
    code, cluster, _ = run(lambda cluster, second: second == 5 and cluster.end(0))
    assert code == 0
    assert sorted(actor.host for actor in cluster.actors) == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert {tuple(actor.words) for actor in cluster.actors} == {tuple(cluster.actors[0].words)}
    words = list(cluster.actors[0].words)
    assert words[:3] == ["train", "char_lm", "steps=3"]
    assert words[words.index("--join") + 1] == f"{cluster.actors[0].host}:29400"
    assert words[words.index("--nnodes") + 1] == "1:3"
    assert words[words.index("--resume") + 1] == "auto"


def test_a_lost_actor_is_replaced_when_a_node_comes(run):
    def script(cluster, second):
        match second:
            case 5:
                cluster.lose("10.0.0.2")
            case 10:
                assert len(cluster.running()) == 2
                cluster.all["n4"] = cluster.node(4)
            case 15:
                assert sorted(actor.host for actor in cluster.running()) == ["10.0.0.1", "10.0.0.3", "10.0.0.4"]
                cluster.end(0)

    code, cluster, said = run(script)
    assert code == 0
    assert len(cluster.groups) == 1  # Ray has replaced the bundle
    assert "the actor on 10.0.0.2 is lost: its node died" in said


def test_a_job_grows_to_nodes_that_come_later_and_no_further_than_nnodes(run):
    def script(cluster, second):
        if second in (3, 6, 9):
            cluster.all[f"n{second}"] = cluster.node(second)
        if second == 15:
            assert len(cluster.running()) == 3
            cluster.end(0)

    code, cluster, _ = run(script, count=1)
    assert code == 0
    assert [group.node for group in cluster.groups] == [None, "n3", "n6"]
    assert len({actor.words[-1] for actor in cluster.actors}) == 1


def test_a_group_that_has_grown_shrinks_with_its_node(run):
    def script(cluster, second):
        match second:
            case 2:
                cluster.all["n2"] = cluster.node(2)
            case 6:
                cluster.lose("10.0.0.2")
            case 10:
                assert [actor.host for actor in cluster.running()] == ["10.0.0.1"]
                assert [group.released for group in cluster.groups] == [False, True]
                cluster.end(0)

    assert run(script, count=1)[0] == 0


def test_a_drained_node_is_left_after_a_save(run):
    def script(cluster, second):
        match second:
            case 3:
                cluster.drain("n2")
            case 6:
                assert all(actor.signals == ["SIGTERM"] for actor in cluster.running())
                cluster.end(75)
            case 10:
                assert sorted(actor.host for actor in cluster.running()) == ["10.0.0.1", "10.0.0.3"]
                cluster.end(0)

    code, _, said = run(script)
    assert code == 0
    assert "Ray takes the node 10.0.0.2 away, in 60 s: saving, to go on without it" in said


def test_after_a_drain_a_job_holds_no_more_nodes_than_it_uses(run):
    """Ray puts the bundle of the drained node elsewhere once the node is gone; by then the job has another one."""

    def script(cluster, second):
        match second:
            case 3 | 23:
                cluster.drain(min(node.id for node in cluster.all.values() if node.host in cluster.held()))
            case 6 | 26:
                cluster.end(75)
            case 12 | 32:
                assert len(cluster.running()) == 3
                cluster.lose(next(node.host for node in cluster.all.values() if node.drained_at))
            case 20 | 40:
                assert len(cluster.running()) == 3
                assert cluster.held() == {actor.host for actor in cluster.running()}
                if second == 40:
                    cluster.end(0)

    assert run(script, count=6)[0] == 0


def test_a_drained_node_on_which_no_actor_runs_is_not_replaced_twice(run):
    """Ray replaces its bundle itself, when the node is gone."""

    def script(cluster, second):
        match second:
            case 3:
                cluster.running()[1].code = 2
            case 4:
                host = cluster.actors[1].host
                cluster.drain(next(node.id for node in cluster.all.values() if node.host == host))
            case 30:
                assert len(cluster.running()) == 2
                cluster.lose(cluster.actors[1].host)
            case 40:
                assert len(cluster.running()) == 3
                assert cluster.held() == {actor.host for actor in cluster.running()}
                cluster.end(0)

    assert run(script, count=5)[0] == 0


def test_a_control_service_that_goes_away_before_the_first_actor_is_waited_for(run, monkeypatch):
    original = FakeCluster.make_actor

    def make_actor(cluster, *arguments):
        if cluster.now() < 5:
            raise RayUnavailable("connection refused")
        return original(cluster, *arguments)

    monkeypatch.setattr(FakeCluster, "make_actor", make_actor)
    code, cluster, said = run(lambda cluster, second: second == 60 and cluster.end(0))
    assert code == 0
    assert len(cluster.actors) == 3
    assert "no actor could be started: trying again" in said


def test_a_job_that_cannot_do_without_a_drained_node_keeps_the_others_until_it_can(run):
    def script(cluster, second):
        match second:
            case 3:
                cluster.drain("n2")
            case 6:
                cluster.end(75)
            case 15:
                assert not cluster.running()
                assert "10.0.0.1" in cluster.held()
                cluster.all["n3"] = cluster.node(3)
            case 20:
                assert sorted(actor.host for actor in cluster.running()) == ["10.0.0.1", "10.0.0.3"]
                cluster.end(0)

    assert run(script, count=2, nnodes=(2, 2))[0] == 0


def test_a_control_service_that_is_away_for_a_while_does_not_end_the_job(run):
    def script(cluster, second):
        if second in (5, 20):
            cluster.away = second == 5
        if second == 30:
            assert len(cluster.running()) == 3
            assert [actor.signals for actor in cluster.actors] == [[]] * 3
            cluster.end(0)

    code, _, said = run(script)
    assert code == 0
    assert said.count("Ray's control service does not answer (connection refused): going on as before") == 1


def test_a_job_saves_before_ray_gives_up_its_control_service_and_goes_on_when_it_is_back(run):
    def script(cluster, second):
        if second == 5:
            cluster.away = True
        if second == 5 + driver.SAVE_S + 2:
            assert [actor.signals for actor in cluster.running()] == [["SIGTERM"]] * 3
            cluster.end(75)
        if second == 60:
            assert not cluster.running()
            cluster.away = False
        if second == 70:
            assert len(cluster.running()) == 3
            cluster.end(0)

    code, _, said = run(script)
    assert code == 0
    assert "saving, to go on when it does" in said


def test_a_control_service_that_is_away_at_the_start_is_an_error_for_people(run, monkeypatch):
    monkeypatch.setattr(
        FakeCluster, "nodes", lambda cluster: (_ for _ in ()).throw(RayUnavailable("connection refused"))
    )
    with pytest.raises(UserError, match="does not say which nodes it has"):
        run(lambda cluster, second: None)


@pytest.mark.parametrize("searching", [1, 2])
def test_a_job_that_failed_is_not_started_again_for_a_launcher_that_was_still_searching(run, searching):
    """That one finds nobody for five minutes. What the coordinating launcher says, or several do, is the job's."""

    def script(cluster, second):
        if second == 3:
            for actor in cluster.running()[:-searching]:
                actor.code = 1
        for actor in cluster.running():
            if actor.signals:
                actor.code = 75

    code, cluster, _ = run(script)
    assert code == 1
    assert len(cluster.actors) == 3


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("code", [1, 2])
def test_a_failed_job_is_one_even_if_a_launcher_that_heard_nothing_asks_for_a_restart(run, code, lost):
    def script(cluster, second):
        if second == 3 and lost:
            cluster.lose(cluster.actors[2].host)
        if second == 5:
            cluster.end(75)
            cluster.actors[0].code = code

    result, cluster, _ = run(script)
    assert result == code
    assert len(cluster.actors) == 3


def test_a_launcher_that_failed_for_itself_does_not_speak_for_the_job(run):
    def script(cluster, second):
        if second == 3:
            cluster.running()[1].code = 1
        if second == 5:
            cluster.end(130)

    assert run(script)[0] == 130


def test_two_launchers_that_fail_while_another_coordinates_are_started_again(run):
    def script(cluster, second):
        if second == 3:
            for actor in cluster.running()[1:]:
                actor.code = 1
        if second == 40:
            assert len(cluster.running()) == 3
            cluster.end(0)

    assert run(script)[0] == 0


def test_a_port_that_another_program_has_taken_is_replaced_by_another_one(run):
    """The launchers refuse to talk to what listens there."""

    def script(cluster, second):
        if second == 3:
            cluster.actors[0].port_taken = True
            cluster.end(2)
        if second == 12:
            assert len(cluster.running()) == 3
            cluster.end(0)

    original = FakeActor.address

    def address(actor, host):
        join = original(actor, host)
        actor.coordinates = len(asked) > 0
        asked.append(actor)
        return join

    asked: list[FakeActor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeActor, "address", address)
        code, cluster, said = run(script)
    assert code == 0
    assert "another program has taken the port of 10.0.0." in said
    assert len(cluster.actors) == 6


def test_a_job_that_ends_for_want_of_a_node_waits_for_one_and_goes_on(run):
    def script(cluster, second):
        match second:
            case 3:
                cluster.lose("10.0.0.2")
                cluster.end(75)
            case 20:
                assert not cluster.running()
                cluster.all["n5"] = cluster.node(5)
            case 25:
                assert sorted(actor.host for actor in cluster.running()) == ["10.0.0.1", "10.0.0.5"]
                cluster.end(0)

    code, _, said = run(script, count=2, nnodes=(2, 2))
    assert code == 0
    assert "1 node is ready of 2 that are needed, with 2 CPU each. The cluster: 10.0.0.1: 2 CPU" in said


def test_a_job_that_gets_no_node_back_ends_with_restart_me(run):
    def script(cluster, second):
        if second == 3:
            cluster.lose("10.0.0.2")
            cluster.end(75)

    code, cluster, said = run(script, count=2, nnodes=(2, 2))
    assert code == 75
    assert "given up after 300 s" in said
    assert "to resume: type it again" in said
    assert 300 < cluster.now() < 310


@pytest.mark.parametrize("code", [1, 2, 75, 130])
def test_the_exit_code_is_that_of_the_job(run, code):
    assert run(lambda cluster, second: second == 3 and cluster.end(code))[0] == code


def test_a_sigterm_goes_to_all_launchers(run):
    signals: list[str] = []

    def script(cluster, second):
        if second == 3:
            signals.append("SIGTERM")
        if second == 6:
            assert [actor.signals for actor in cluster.running()] == [["SIGTERM"]] * 3
            cluster.end(75)

    assert run(script, signals=signals)[0] == 75


def test_a_ctrl_c_goes_to_the_launcher_that_coordinates_and_a_second_one_to_all(run):
    """Each launcher passes it on: from all of them it would look like several, and the job would end without a save."""
    signals: list[str] = []

    def script(cluster, second):
        first, *others = cluster.actors
        if second in (3, 8):
            signals.append("SIGINT")
        if second == 6:
            assert first.signals == ["SIGINT"]
            assert [actor.signals for actor in others] == [[], []]
        if second == 10:
            assert first.signals == ["SIGINT"] * 2
            assert [actor.signals for actor in others] == [["SIGINT"]] * 2
            cluster.end(130)

    assert run(script, signals=signals)[0] == 130


def test_a_ctrl_c_that_is_lost_with_its_launcher_goes_to_the_successor(run):
    signals: list[str] = []

    def script(cluster, second):
        first, second_actor, third = cluster.actors[:3]
        if second == 3:
            signals.append("SIGINT")
        if second == 4:
            cluster.lose(first.host)
        if second == 10:
            assert second_actor.signals == third.signals == []
            third.coordinates = True
        if second == 12:
            assert (second_actor.signals, third.signals) == ([], ["SIGINT"])
            cluster.end(130)

    assert run(script, signals=signals)[0] == 130


def test_a_ctrl_c_goes_to_all_launchers_if_none_takes_over(run):
    signals: list[str] = []

    def script(cluster, second):
        if second == 3:
            cluster.lose(cluster.actors[0].host)
            signals.append("SIGINT")
        if second == 3 + driver.TAKEOVER_S + 2:
            assert [actor.signals for actor in cluster.running()] == [["SIGINT"]] * 2
            cluster.end(130)

    assert run(script, signals=signals)[0] == 130


def test_a_ctrl_c_while_the_job_leaves_a_node_decides_the_exit_code(run):
    signals: list[str] = []

    def script(cluster, second):
        if second == 3:
            cluster.drain("n2")
        if second == 5:
            signals.append("SIGINT")
        if second == 7:
            cluster.end(75)

    assert run(script, signals=signals)[0] == 130


def test_a_signal_while_waiting_for_nodes_ends_the_driver(run):
    signals: list[str] = []

    def script(cluster, second):
        if second == 3:
            signals.append("SIGTERM")

    code, cluster, said = run(script, count=1, nnodes=(2, 2), signals=signals, wait=100.0)
    assert code == 75
    assert cluster.actors == []
    assert "SIGTERM: ended while no actor runs" in said


def test_a_launcher_that_fails_alone_is_started_again_and_the_job_goes_on(run):
    def script(cluster, second):
        if second == 3:
            cluster.running()[1].code = 2
        if second == 40:
            assert len(cluster.running()) == 3
            cluster.end(0)

    code, cluster, _ = run(script)
    assert code == 0
    assert len(cluster.actors) == 4


def test_a_launcher_that_does_not_end_with_the_job_is_asked_then_killed(run):
    def script(cluster, second):
        if second == 3:
            for actor in cluster.running()[1:]:
                actor.code = 0

    code, cluster, said = run(script)
    assert code == 0
    assert cluster.actors[0].signals == ["SIGTERM"]
    assert "did not end with the job: killed" in said


def test_an_actor_that_ray_believes_in_but_that_is_silent_is_waited_for_then_given_up(run):
    """The others have ended for want of it. The job must neither hang nor fail for good."""

    def script(cluster, second):
        if second == 3:
            cluster.running()[0].silent = True
            for actor in cluster.running()[1:]:
                actor.code = 75
        if second == 200:
            assert len(cluster.actors) == 4
            cluster.end(0)

    code, _, said = run(script, count=2, nnodes=(2, 2))
    assert code == 0
    assert "is lost: no answer for 120 s" in said


def test_a_launcher_that_was_killed_is_replaced_at_once(run):
    """As the kernel does where memory is short: the code of this launcher says nothing about the job."""

    def script(cluster, second):
        if second == 3:
            cluster.running()[1].code = -9
        if second == 12:
            assert len(cluster.running()) == 3
            cluster.end(0)

    code, cluster, said = run(script)
    assert code == 0
    assert len(cluster.actors) == 4
    assert "is lost: its launcher was ended by SIGKILL" in said


@pytest.mark.parametrize(("code", "second"), [(1, 4), (2, 4), (75, 600)])
def test_what_the_launchers_say_counts_after_a_loss_too(run, code, second):
    """A failure is one, and a signal long after a loss has nothing to do with it."""

    def script(cluster, now):
        if now == 3:
            cluster.lose("10.0.0.2")
        if now == second:
            cluster.end(code)

    assert run(script)[0] == code


def test_a_launcher_that_has_lost_the_others_comes_back(run):
    def script(cluster, second):
        if second == 3:
            cluster.running()[1].code = 75
        if second == 40:
            assert len(cluster.running()) == 3
            assert all(actor.signals == [] for actor in cluster.running())
            cluster.end(0)

    code, cluster, _ = run(script)
    assert code == 0
    assert len(cluster.actors) == 4


def test_a_first_actor_that_cannot_be_started_is_tried_elsewhere_and_not_for_ever(run):
    """With a pause before each try on the same node, and an end."""

    class Broken(FakeActor):
        def address(self, host: str) -> str | None:
            raise ActorLost("no module named lockstep")

    original = FakeCluster.make_actor

    def make_actor(cluster, *arguments):
        original(cluster, *arguments)
        cluster.actors[-1] = Broken(cluster.actors[-1].host)
        return cluster.actors[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeCluster, "make_actor", make_actor)
        code, cluster, said = run(lambda cluster, second: None)
    assert code == 75
    assert len(cluster.actors) == driver.MOST_ROUNDS + 1
    assert {actor.host for actor in cluster.actors} == {"10.0.0.1", "10.0.0.2", "10.0.0.3"}
    assert cluster.now() > 10
    assert "could not be started: no module named lockstep" in said


def test_a_job_begins_with_fewer_nodes_if_another_job_was_faster(run):
    def script(cluster, second):
        # The third node only seemed to be free.
        if second == 1:
            cluster.all["n3"] = cluster.node(3, cpus=0.0)
        if second == 20:
            assert sorted(actor.host for actor in cluster.running()) == ["10.0.0.1", "10.0.0.2"]
            cluster.end(0)

    class Slow(FakeCluster):
        def placed(self, group):
            return super().placed(group) if self.now() > 1 else list(group.placed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "FakeCluster", Slow)
        code, cluster, _ = run(script)
    assert code == 0
    assert [len(group.placed) for group in cluster.groups] == [3, 2]


def test_a_job_that_is_too_large_says_what_is_missing_at_once(run):
    with pytest.raises(UserError) as raised:
        run(lambda cluster, second: None, count=2, nnodes=(3, 4))
    assert "too small for this job: 3 nodes with 2 CPU each" in raised.value.problem
    assert "2 of its 2 nodes would do. 10.0.0.1: 2 CPU; 10.0.0.2: 2 CPU" in raised.value.found


def test_what_a_node_lacks_is_named_resource_by_resource():
    need = {"CPU": 4.0, "GPU": 8.0}
    busy = RayNode("n1", "10.0.0.1", {"CPU": 8.0, "GPU": 8.0}, {"CPU": 8.0, "GPU": 2.0})
    small = RayNode("n2", "10.0.0.2", {"CPU": 1.0}, {"CPU": 1.0})
    leaving = replace(busy, drained_at=1.0)
    assert state_of(busy, need) == "10.0.0.1: 8 CPU, 8 GPU (6 in use)"
    assert state_of(small, need) == "10.0.0.2: 1 CPU (3 missing), 0 GPU (8 missing)"
    assert state_of(leaving, need) == "10.0.0.1: being taken away"


def test_the_launchers_share_a_log_which_the_driver_prints(run):
    def script(cluster, second):
        if second == 3:
            cluster.actors[0].lines = ["step 1", "step 1"]
            cluster.actors[1].lines = ["from another node"]
        if second == 5:
            cluster.end(0)

    code, cluster, said = run(script)
    assert code == 0
    assert said.splitlines()[:3] == ["step 1", "step 1", "from another node"]
    _, variables, _, _ = cluster.arguments
    assert variables[ONE_LOG] == "1"


def test_the_driver_goes_on_if_nobody_reads_what_the_job_says(run, monkeypatch):
    """`ray job submit ... | tee log`: when tee died, the driver ended, and killed the job."""

    def script(cluster, second):
        if second in (3, 4):
            cluster.actors[0].lines = [f"step {second}"]
        if second == 5:
            cluster.end(0)

    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as broken:
        monkeypatch.setattr("sys.stdout", broken)
        assert run(script)[0] == 0


def test_actors_get_variables_of_the_driver_but_no_secret():
    given = {
        "LOCKSTEP_FAULTS": "[]",
        "NCCL_DEBUG": "INFO",
        "HOME": "/x",
        "LOCKSTEP_SECRET": "s",
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": "/code",
    }
    expected = {"LOCKSTEP_FAULTS": "[]", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}
    assert driver.environment(given, uploaded=False) == {**expected, "PYTHONPATH": "/code"}

    # To the copy of the folder that Ray has made, every node has its own path.
    assert driver.environment(given, uploaded=True) == expected


# ---- the command line -------------------------------------------------------------------------------------


def test_the_script_submits_the_same_job(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["launch", "ray", "char_lm", "steps=3", "--nproc", "2", "--nnodes", "1:4", "--gpus-per-node", "2"]
    assert main([*words, "run_dir=runs/a b"]) == 0
    script = capsys.readouterr().out
    assert subprocess.run(["sh", "-n"], input=script.encode()).returncode == 0
    command = shlex.split(script.replace("\\\n", " "), comments=True)
    assert command[: command.index("lockstep")] == ["exec", "ray", "job", "submit", "--working-dir", ".", "--"]
    assert f"run_dir={tmp_path}/runs/a b" in command
    assert command[-1] == "--submit"

    # What the script would type is understood, and asks for the same.
    monkeypatch.setattr(platform, "submit", lambda request, options, files: print(platform.needed(request, options)))
    assert main(command[command.index("lockstep") + 1 :]) == 0
    assert capsys.readouterr().out == "{'CPU': 2.0, 'GPU': 2.0}\n"


@pytest.mark.parametrize(
    ("nproc", "cpus", "gpus", "need"),
    [
        ("4", None, None, {"CPU": 4.0}),
        ("1..8", None, None, {"CPU": 8.0}),
        ("auto", None, 8, {"CPU": 8.0, "GPU": 8.0}),
        ("auto", None, None, {"CPU": 1.0}),
        ("2", 16, 2, {"CPU": 16.0, "GPU": 2.0}),
        ("2", 0, 2, {"GPU": 2.0}),
    ],
)
def test_what_a_node_needs(nproc, cpus, gpus, need):
    request = JobRequest("char_lm", (), (), (), Path("run"), nproc, Bounds(1, 1))
    assert platform.needed(request, argparse.Namespace(cpus_per_node=cpus, gpus_per_node=gpus)) == need


def test_a_node_that_needs_nothing_is_refused(capsys):
    assert main(["launch", "ray", "char_lm", "--cpus-per-node", "0"]) == 2
    assert "ask for a CPU or a GPU" in capsys.readouterr().err


def test_without_ray_the_driver_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["launch", "ray", "char_lm", f"run_dir={tmp_path}/run", "--submit"]) == 2
    assert pip_install("ray") in capsys.readouterr().err


def test_a_launcher_says_what_to_type_to_resume_the_whole_job(monkeypatch, tmp_path):
    jobs = []
    monkeypatch.setenv(RESUME_COMMAND, "lockstep launch ray char_lm --submit")
    monkeypatch.setattr(api, "_launch", lambda job: jobs.append(job) or (JobEnd(0), True))
    assert main(["train", "char_lm", "--nproc", "1", f"run_dir={tmp_path}/run"]) == 0
    assert jobs[0].resume_command == "lockstep launch ray char_lm --submit"

    # A rank that starts a job of its own must not say it.
    assert RESUME_COMMAND not in _environment_for(1)


# ---- the actor --------------------------------------------------------------------------------------------


@pytest.fixture
def actor(tmp_path):
    (tmp_path / "run" / "launch").mkdir(parents=True)
    marker = tmp_path / "run" / "launch" / "marker"
    marker.touch()
    made = NodeActor("s" * 32, {"LOCKSTEP_X": "1"}, str(tmp_path), str(marker))
    yield made
    if made._child is not None:
        made._child.kill()
        made._child.wait()


def ended(actor: NodeActor) -> ActorReport:
    lines: list[str] = []
    while (report := actor.poll()).code is None:
        lines += report.lines
        time.sleep(0.02)
    return replace(report, lines=lines + report.lines)


def test_an_actor_reports_what_the_launcher_says_and_its_exit_code(actor):
    actor.start(["train", "no_such_recipe"])
    report = ended(actor)
    assert report.code == 2
    assert "no_such_recipe" in "\n".join(report.lines)


def test_the_launcher_gets_the_secret_in_a_variable_and_ends_with_its_actor(tmp_path, actor):
    """The kernel kills the launcher when the process of the actor is killed."""
    code = f"""
import os, signal, time
from lockstep.clusters.ray import actor
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # as Ray does
made = actor.NodeActor("s" * 32, {{}}, {str(tmp_path)!r}, {str(actor._marker)!r})
made.start(["train", "char_lm", "--nproc", "1", "--nnodes", "2", "--join", "127.0.0.1:1", "run_dir=run"])
print(made._child.pid, flush=True)
time.sleep(600)
"""
    actor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert actor.stdout is not None
    child = int(actor.stdout.readline())
    try:
        deadline = time.monotonic() + 60
        while b"train" not in Path(f"/proc/{child}/cmdline").read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert b"ssss" not in Path(f"/proc/{child}/cmdline").read_bytes()
        assert b"LOCKSTEP_SECRET=ssss" in Path(f"/proc/{child}/environ").read_bytes()
        # It has begun to look for the others, so it is past the moment at which it binds itself to its parent.
        while not (tmp_path / "run" / "logs").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        # While it starts a process itself (vfork), Python blocks all signals for a moment.
        while "SigBlk:\t0000000000000000" not in Path(f"/proc/{child}/status").read_text():
            assert time.monotonic() < deadline, "the launcher cannot be interrupted"
            time.sleep(0.02)
    finally:
        os.kill(actor.pid, signal.SIGKILL)
        actor.wait()
    while _lives(child):
        assert time.monotonic() < deadline, "the launcher outlives its actor"
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_node_without_the_run_folder_is_refused_in_words(actor, tmp_path):
    actor._marker.unlink()
    with pytest.raises(UserError, match="is not shared with"):
        actor.start(["train", "char_lm"])


def test_a_node_without_the_working_folder_is_refused_in_words(tmp_path):
    made = NodeActor("s" * 32, {}, str(tmp_path / "gone"), str(tmp_path))
    with pytest.raises(UserError, match="is not on"):
        made.start(["train", "char_lm"])


# ---- which launcher coordinates ---------------------------------------------------------------------------


@pytest.fixture
def listening(tmp_path):
    """A process that listens, as a coordinating launcher does; its port."""
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
    process = subprocess.Popen([sys.executable, "-c", code + "time.sleep(600)"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.pid, int(process.stdout.readline())
    process.kill()
    process.wait()


def test_the_launcher_that_listens_where_the_term_file_says_coordinates(listening, tmp_path, monkeypatch):
    monkeypatch.setattr(actors, "TERM_S", 0.0)
    pid, port = listening
    own, other = TermWatch(tmp_path, pid), TermWatch(tmp_path, os.getpid())
    assert not own.coordinates()
    term = election.begin_term(tmp_path, None, "a", f"127.0.0.1:{port}")
    assert term is not None
    assert (own.coordinates(), other.coordinates()) == (True, False)

    # The file stays when a coordinator fails; it goes with the job.
    assert not own.ended_job()
    term.end()
    assert own.coordinates()
    assert (own.ended_job(), other.ended_job()) == (True, False)


def test_a_launcher_that_was_superseded_has_not_ended_the_job(listening, tmp_path, monkeypatch):
    monkeypatch.setattr(actors, "TERM_S", 0.0)
    pid, port = listening
    own = TermWatch(tmp_path, pid)
    assert election.begin_term(tmp_path, None, "a", f"127.0.0.1:{port}")
    assert own.coordinates()
    assert election.begin_term(tmp_path, 1, "b", "127.0.0.1:1")
    assert not own.ended_job()
    assert not own.coordinates()


def test_an_actor_says_that_another_program_has_taken_its_port(actor):
    join = actor.address("127.0.0.1")
    with socket.create_server(("127.0.0.1", int(join.rpartition(":")[2]))):
        actor.start(["train", "no_such_recipe"])
        assert ended(actor).port_taken
    assert not actor.poll().port_taken
