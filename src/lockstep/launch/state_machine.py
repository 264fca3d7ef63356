"""The decisions of a job: when ranks are started, with whom, and what follows when something happens.

Events go in, commands come out; time is an argument, and nothing here starts a process or waits. One round is one
attempt: a set of ranks that live and die together. After a failure all of them are stopped and a new round begins
from the newest checkpoint, unless there is a reason not to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from lockstep.launch.failure import LEFT, NODE, ZYGOTE, Exit, Failure, first
from lockstep.launch.job import Count, Job, divide
from lockstep.launch.protocol import (
    AskStacks,
    Beat,
    Broke,
    Command,
    Ending,
    Exited,
    Form,
    Leave,
    Log,
    Message,
    Prepare,
    Send,
    Stacks,
    Stop,
    Tell,
)
from lockstep.launch.restarts import Restarts, Settings, Situation
from lockstep.launch.watchdog import Vigil

GATHER_S = 300.0  # how long nodes may take to come
SETTLE_S = 3.0  # after a node came or went, others may follow
OTHERS_S = 1.0  # after an error, how long to wait for the one that caused it
NEWS_S = 45.0  # without a step, before the screen says something
TOGETHER_S = 20.0  # from the first rank that has left on request to the last
QUIET_S = 2.0  # nodes give a sign of life every second
STOP_S = 10.0
STACKS_S = 5.0


class Phase(Enum):
    GATHER = "waiting for nodes"
    RUN = "running"
    ASK = "asking for stacks"
    LEAVE = "leaving"
    STOP = "stopping"
    OVER = "over"


ACTIVE = (Phase.RUN, Phase.ASK, Phase.LEAVE)


@dataclass(frozen=True)
class Node:
    number: int  # the coordinator is 0
    host: str
    count: Count


class Rounds:
    """`committed` tells the newest checkpoint's step."""

    def __init__(self, job: Job, committed: Callable[[], int | None], now: float):
        self.job, self.committed = job, committed
        self.nodes: dict[int, Node] = {}
        self.wanted: dict[int, int] = {}  # ranks on each node
        self.settings, self.restarts = Settings(), Restarts()
        self.attempt = -1
        self.places: dict[int, tuple[int, int]] = {}  # rank -> node, rank on that node
        self.phase, self._deadline = Phase.GATHER, now + GATHER_S
        self._changed = now  # when a node last came or went
        self._began_at: int | None = None  # the newest checkpoint when the round began
        self._ended: dict[int, Exit] = {}
        self._heard: dict[int, float] = {}  # when nodes gave their last sign of life
        self._vigil = Vigil(self.settings.limits)
        self._silent: set[int] = set()  # nodes that still owe an answer
        self._asked: str | None = None  # the signal that told us to leave
        self._after_stop: Ending | None = None  # None: another round
        self._commands: list[Command] = []

    def take(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    # Nodes come and go

    @property
    def full(self) -> bool:
        return len(self.nodes) >= self.job.nnodes.most

    @property
    def _too_few(self) -> str | None:
        least = self.job.nnodes.least
        return f"{_number(len(self.nodes), 'node')} left, and {least} needed" if len(self.nodes) < least else None

    def joined(self, node: Node, now: float) -> None:
        self.nodes[node.number] = node
        self.wanted[node.number] = node.count.first
        self._changed = now
        if node.number:
            self._say(f"node {node.number} ({node.host}) is here, {_number(len(self.nodes), 'node')} now")
        if self.phase in (Phase.RUN, Phase.ASK):
            self._say("asking the ranks to save, to go on with the new node")
            self._ask_to_leave(now)

    def gone(self, number: int, why: str, now: float) -> None:
        node = self.nodes.pop(number, None)
        if node is None or self.phase is Phase.OVER:
            return
        self._changed = now
        self.wanted.pop(number)
        self._heard.pop(number, None)
        self._silent.discard(number)
        lost = [rank for rank, (where, _) in self.places.items() if where == number and rank not in self._ended]
        failure = Failure(min(lost, default=-1), node.host, time.time(), NODE, f"node {number} ({node.host}) {why}")
        if self.phase in ACTIVE and lost:
            self._fail(failure, now)
            return
        self._say(failure.message)
        if self._too_few and self.attempt >= 0:
            self._after_stop = self._after_stop or Ending(1, failure)
            if self.phase is Phase.GATHER:
                self._say(f"not restarted: {self._too_few}. To go on: {self.job.again}")
                self._end(self._after_stop)
        self._perhaps_stopped(now)

    def _perhaps_form(self, now: float) -> None:
        if self.full or (not self._too_few and now - self._changed >= SETTLE_S):
            self._form()

    def _gather(self, now: float) -> None:
        self.phase, self._deadline = Phase.GATHER, now + GATHER_S
        missing = self.job.nnodes.least - len(self.nodes)
        if missing > 0:
            self._say(f"waiting for {_number(missing, 'more node')} at {self.job.join}")
        self._perhaps_form(now)

    # A round

    def _form(self) -> None:
        self.attempt += 1
        self.phase, self._deadline = Phase.RUN, math.inf
        ranks = {number: self.wanted[number] for number in sorted(self.nodes)}
        places = [(number, local) for number, count in ranks.items() for local in range(count)]
        self.places = dict(enumerate(places))
        self._ended, self._vigil = {}, Vigil(self.settings.limits)
        self._began_at = self.committed()
        self._commands.append(Form(self.attempt, ranks))

    def exited(self, event: Exited, now: float) -> None:
        if event.attempt != self.attempt or self.phase not in ACTIVE:
            return
        failure = Failure.from_json(event.failure) if event.failure else None
        end = self._ended[event.rank] = Exit(event.code, event.seen, failure)
        if end.certain:
            self._fail(first(self._ended), now)
            return
        if not end.well:
            self.phase = Phase.LEAVE if self.phase is Phase.LEAVE else Phase.RUN
            self._deadline = min(self._deadline, now + OTHERS_S)  # the cause may be elsewhere
        elif end.code == LEFT:
            if self.phase is not Phase.LEAVE:
                self._asked = "SIGTERM"  # somebody asked the ranks themselves
                self._await_leaving(now)
            self._deadline = min(self._deadline, now + TOGETHER_S)  # ranks leave together, or one left before the rest
        if len(self._ended) == len(self.places):
            self._all_ended(now)

    def _all_ended(self, now: float) -> None:
        ends = self._ended.values()
        if not all(end.well for end in ends):
            self._fail(first(self._ended), now)
        elif all(end.code == 0 for end in ends):
            self._end(Ending(0))
        elif self._asked:
            self._end_asked()
        else:
            self._gather(now)

    def broke(self, node: int, event: Broke, now: float) -> None:
        """The process that starts the ranks is gone. Between two rounds that costs nothing."""
        ranks = [rank for rank, (where, _) in self.places.items() if where == node]
        failure = Failure(min(ranks, default=-1), self.nodes[node].host, time.time(), ZYGOTE, event.why)
        if event.hopeless and self.phase is not Phase.OVER:
            self._after_stop = Ending(1, failure)
            self._report(failure, "not restarted: it would end the same way")
            self._stop(now)
        elif event.attempt == self.attempt and self.phase in ACTIVE:
            self._fail(failure, now)

    # Signs of life

    def beat(self, node: int, beat: Beat, now: float) -> None:
        self._heard[node] = now
        self._vigil.see(node, beat.views)
        if beat.settings:
            self.settings = Settings.from_json(beat.settings)
            self._vigil.set_limits(self.settings.limits)

    def _quiet(self, now: float) -> bool:
        """Some node may be about to turn out lost."""
        return any(now - self._heard.get(node, now) > QUIET_S for node in self._in_round())

    def look(self, now: float) -> None:
        """About once a second: is anybody stuck?"""
        living = self.places.keys() - self._ended.keys()
        if self.phase is Phase.RUN and (news := self._vigil.news(NEWS_S)):
            self._say(news)
        if self.phase is Phase.RUN and self._vigil.suspicious(living, now):
            self.phase, self._deadline = Phase.ASK, now + STACKS_S
            self._silent = self._in_round()
            self._send_all(AskStacks(self.attempt))

    def stacks(self, node: int, event: Stacks, now: float) -> None:
        if event.attempt != self.attempt or self.phase is not Phase.ASK:
            return
        self._vigil.learn(event)
        self._silent.discard(node)
        if not self._silent:
            self._judge_stuck(now)

    def _judge_stuck(self, now: float) -> None:
        self.phase, self._deadline = Phase.RUN, math.inf
        if failure := self._vigil.verdict():
            self._fail(failure, now)

    # Requests

    def asked(self, signal: str, now: float) -> None:
        """Save and leave. A second Ctrl-C does not wait."""
        at_once = self._asked == signal == "SIGINT"
        self._asked = self._asked or signal
        if self.phase is Phase.GATHER:
            self._end_asked()
        elif self.phase in ACTIVE and at_once:
            self._say("stopped at once")
            self._after_stop = Ending(self._asked_code)
            self._stop(now)
        elif self.phase in (Phase.RUN, Phase.ASK):
            self._say(f"{signal}: asking {_number(len(self.places), 'rank')} to save and leave")
            self._ask_to_leave(now)

    def resize(self, ranks: int, now: float) -> None:
        counts = {number: node.count for number, node in sorted(self.nodes.items())}
        bounds = Count(sum(count.least for count in counts.values()), sum(count.most for count in counts.values()))
        if not bounds.least <= ranks <= bounds.most:
            self._say(f"not resized to {_number(ranks, 'rank')}: --nproc allows {bounds} in all")
            return
        before, self.wanted = sum(self.wanted.values()), divide(ranks, counts)
        if before == ranks:
            return
        self._say(f"from {before} to {_number(ranks, 'rank')}: asking the ranks to save")
        self._commands.append(Log({"event": "resize", "from": before, "to": ranks}))
        self._commands += [Send(number, Prepare(count)) for number, count in self.wanted.items()]
        if self.phase in (Phase.RUN, Phase.ASK):
            self._ask_to_leave(now)

    def _ask_to_leave(self, now: float) -> None:
        self._await_leaving(now)
        self._send_all(Leave(self.attempt))

    def _await_leaving(self, now: float) -> None:
        self.phase, self._deadline = Phase.LEAVE, now + self.settings.grace

    @property
    def _asked_code(self) -> int:
        return 130 if self._asked == "SIGINT" else LEFT

    def _end_asked(self) -> None:
        step = self.committed()
        saved = "left before anything was saved" if step is None else f"saved at step {step}"
        self._say(f"{saved}; to go on: {self.job.again}")
        self._commands.append(Log({"event": "preempted", "signal": self._asked, "step": step}))
        self._end(Ending(self._asked_code))

    # Time

    def tick(self, now: float) -> None:
        if self.phase is Phase.GATHER:
            self._perhaps_form(now)
        if now < self._deadline:
            return
        if self.phase is Phase.GATHER:
            found = f"only {_number(len(self.nodes), 'node')} came within {GATHER_S:.0f} s"
            self._say(f"{found}, and {self.job.nnodes.least} are needed. To go on: {self.job.again}")
            self._end(Ending(1, Failure(-1, "", time.time(), NODE, found)))
        elif self.phase is Phase.ASK:
            self._judge_stuck(now)
        elif self.phase is Phase.STOP:
            for number in sorted(self._silent):  # go on without it
                self.gone(number, f"vanished: its ranks did not end within {STOP_S:.0f} s", now)
        elif all(end.well for end in self._ended.values()):
            self._fail(self._overdue(), now)
        elif not self._quiet(now):
            self._fail(first(self._ended), now)

    def _overdue(self) -> Failure:
        late = self.places.keys() - self._ended.keys()
        text = f"{_number(len(late), 'rank')} had not left in time, and were killed"
        return Failure(min(late), self.nodes[self.places[min(late)][0]].host, time.time(), "SIGKILL", text)

    # Failures

    def _fail(self, failure: Failure | None, now: float) -> None:
        assert failure is not None
        saved = self.committed()
        left = any(end.code == LEFT for end in self._ended.values())
        if self._asked and (saved is not None or left) and not failure.for_user:
            self._report(failure, "the job was asked to leave: not restarted")
            self._stop(now)
            return
        situation = Situation(self._began_at, saved, self._asked, self._too_few)
        reason = self.restarts.refusal(failure, now, self.settings, situation)
        if reason:
            self._after_stop = Ending(failure.exit_code, failure)
            self._report(failure, f"not restarted: {reason}{self._what_to_type(failure, saved)}")
        else:
            if self.restarts.note(failure, self.places.get(failure.rank), saved, now):
                self._leave_out(self.places[failure.rank][0])
            ranks = sum(self.wanted.values())
            source = "the beginning" if saved is None else f"the checkpoint of step {saved}"
            count = self.restarts.count(failure, self.settings)
            self._report(failure, f"restarting {_number(ranks, 'rank')} from {source} ({count})")
            self._commands.append(Log({"event": "restart", "attempt": self.attempt + 1, "ranks": ranks, "step": saved}))
        self._stop(now)

    def _what_to_type(self, failure: Failure, saved: int | None) -> str:
        """Nothing, where the same program would come to the same error from its beginning."""
        if saved is None:
            return "" if failure.from_python else f". To begin again: {self.job.again}"
        return f". To go on: {self.job.again}"

    def _leave_out(self, number: int) -> None:
        if number in self.nodes and self.wanted[number] > self.nodes[number].count.least:
            self.wanted[number] -= 1

    def _report(self, failure: Failure, verdict: str) -> None:
        lines = [failure.text()]
        if not failure.for_user:
            others = len(self.places) - (failure.kind != ZYGOTE)
            victims = f"{_number(others, 'other rank')} stopped because of it." if others > 0 else ""
            log = f"Its log: {self.job.run_dir / 'logs' / f'rank-{failure.rank}.log'}" if failure.rank > 0 else ""
            lines += [f"  {text}" for text in (f"{victims} {log}".strip(), verdict) if text]
        self._commands.append(Tell("\n".join(lines)))
        event = {"event": "failure", "attempt": self.attempt, **failure.to_json()}
        self._commands.append(Log({key: value for key, value in event.items() if key != "log"}))

    def _stop(self, now: float) -> None:
        self.phase, self._deadline = Phase.STOP, now + STOP_S
        self._silent = self._in_round()
        self._send_all(Stop(self.attempt))
        self._perhaps_stopped(now)

    def stopped(self, node: int, attempt: int, now: float) -> None:
        if attempt == self.attempt and self.phase is Phase.STOP:
            self._silent.discard(node)
            self._perhaps_stopped(now)

    def _perhaps_stopped(self, now: float) -> None:
        if self.phase is not Phase.STOP or self._silent:
            return
        if self._after_stop is not None:
            self._end(self._after_stop)
        elif self._asked:
            self._end_asked()
        else:
            self._gather(now)

    def _end(self, ending: Ending) -> None:
        self.phase, self._deadline = Phase.OVER, math.inf
        self._commands.append(Ending(ending.code, ending.failure, self.restarts.total))

    # Small things

    def _in_round(self) -> set[int]:
        return {node for node, _ in self.places.values() if node in self.nodes}

    def _send_all(self, message: Message) -> None:
        self._commands += [Send(number, message) for number in sorted(self._in_round())]

    def _say(self, text: str) -> None:
        self._commands.append(Tell(f"lockstep: {text}"))


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
