"""The node that decides: it runs its own ranks, hears from the other nodes, and carries out what `rounds` decides."""

from __future__ import annotations

import select
import socket
import time
from functools import partial

from lockstep.launch import wire
from lockstep.launch.agent import Agent
from lockstep.launch.job import Count, Job, append_event
from lockstep.launch.protocol import (
    Asked,
    Beat,
    Broke,
    Command,
    End,
    Ending,
    Exited,
    Form,
    Hello,
    Log,
    Message,
    Refused,
    Say,
    Send,
    Stacks,
    Start,
    Stopped,
    Tell,
    Welcome,
)
from lockstep.launch.run_dir import latest_step
from lockstep.launch.signals import Signals
from lockstep.launch.state_machine import Node, Rounds
from lockstep.launch.terminal import say

POLL_S = 0.05
OURS = 0
MOST_RANKS = 4096  # on a node: nobody makes us count to a billion


class Coordinator:
    def __init__(self, job: Job, name: str, signals: Signals, hub: wire.Hub | None, address: str):
        self._job, self._signals, self._hub, self._address = job, signals, hub, address
        self._agent = Agent(job, name)
        now = time.monotonic()
        self._rounds = Rounds(job, partial(latest_step, job.run_dir / "checkpoints"), now)
        self._rounds.joined(Node(OURS, name, job.nproc), now)
        self._ending: Ending | None = None
        self._next_beat = now

    def run(self) -> Ending:
        try:
            while self._ending is None:
                self._turn()
            return self._ending
        finally:
            self._agent.close()
            if self._hub is not None:
                self._hub.close()

    def _turn(self) -> None:
        sockets = self._agent.sockets() + (self._hub.sockets() if self._hub else [])
        select.select(sockets, [], [], POLL_S)
        now = time.monotonic()
        for signal in self._signals.take():
            self._rounds.asked(signal, now)
        for message in self._agent.poll():
            self._handle(OURS, message, now)
        for number, message in self._hub.poll(now) if self._hub else []:
            self._hear(number, message, now)
        if now >= self._next_beat:
            self._next_beat = now + wire.BEAT_S
            self._beat(now)
        self._rounds.tick(now)
        for command in self._rounds.take():
            self._carry_out(command)

    def _beat(self, now: float) -> None:
        self._handle(OURS, self._agent.beat(), now)
        self._tell_nodes(Beat())
        self._rounds.look(now)
        wanted = self._job.run_dir / "resize"
        try:
            text = wanted.read_text().strip()
            wanted.unlink()
        except OSError:
            return
        if text.isascii() and text.isdigit():
            self._rounds.resize(int(text), now)
        else:
            say(f"lockstep: {wanted} held no number: {text[:80]!r}")

    def _hear(self, number: int, message: Message | wire.Lost, now: float) -> None:
        """From another node: whatever is wrong with what it says is its own end, not ours."""
        assert self._hub is not None
        if isinstance(message, wire.Lost):
            self._rounds.gone(number, f"vanished: {message}", now)
        elif isinstance(message, Hello):
            self._greet(number, message, now)
        elif number in self._rounds.nodes:
            try:
                self._handle(number, message, now)
            except (ValueError, TypeError, KeyError) as error:
                self._hub.drop(number)
                self._rounds.gone(number, f"was sent away: it sent what is no message of ours ({error!r})", now)

    def _greet(self, number: int, hello: Hello, now: float) -> None:
        assert self._hub is not None
        refused = None
        if different := wire.difference(hello, self._job.identity):
            refused = Refused(f"--join {self._job.join}", different, "run the same command on every node")
        elif self._rounds.full:
            found = f"the job has its {self._job.nnodes.most} nodes already"
            refused = Refused(f"--join {self._job.join}", found, "start the job with a larger --nnodes")
        elif not 1 <= hello.least <= hello.first <= hello.most <= MOST_RANKS:
            refused = Refused("--nproc", "an impossible number of ranks", "run the same command on every node")
        if refused:
            self._hub.send(number, refused)
            return
        self._hub.send(number, Welcome(str(self._job.run_dir), self._job.decided))
        count = Count(hello.least, hello.most, hello.first)
        self._rounds.joined(Node(number, hello.host, count), now)

    def _handle(self, number: int, message: Message, now: float) -> None:
        match message:
            case Exited():
                self._rounds.exited(message, now)
            case Stopped():
                self._rounds.stopped(number, message.attempt, now)
            case Broke():
                self._rounds.broke(number, message, now)
            case Stacks():
                self._rounds.stacks(number, message, now)
            case Beat():
                self._rounds.beat(number, message, now)
            case Asked():
                self._rounds.asked(message.signal, now)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Form():
                self._form(command)
            case Send():
                self._send(command.node, command.message)
            case Tell():
                say(command.text)
                self._tell_nodes(Say(command.text))
            case Log():
                append_event(self._job.run_dir, command.event)
            case Ending():
                told = command.failure.to_json() if command.failure else None
                self._tell_nodes(End(command.code, command.restarts, told))
                self._ending = command

    def _send(self, number: int, message: Message, listener: socket.socket | None = None) -> None:
        if number == OURS:
            self._agent.do(message, listener)
        elif self._hub:
            self._hub.send(number, message)

    def _tell_nodes(self, message: Message) -> None:
        for number in self._rounds.nodes if self._hub else []:
            if number != OURS:
                self._send(number, message)

    def _form(self, form: Form) -> None:
        """The meeting point is bound before any rank starts, anew for each round: nobody finds what a past one left."""
        with socket.create_server((self._address, 0), backlog=1024) as listener:
            base, world = 0, sum(form.ranks.values())
            for group, (number, count) in enumerate(form.ranks.items()):
                start = Start(form.attempt, base, count, world, group, self._address, listener.getsockname()[1])
                self._send(number, start, listener if number == OURS else None)
                base += count
