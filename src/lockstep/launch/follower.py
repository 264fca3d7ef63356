"""A node that does what the coordinating node says, until that one ends the job or is gone."""

from __future__ import annotations

import select
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.launch import wire
from lockstep.launch.agent import Agent
from lockstep.launch.failure import NODE, Failure
from lockstep.launch.job import FROM_LAUNCHER, Job
from lockstep.launch.protocol import Asked, Beat, End, Ending, Hello, Message, Refused, Say, Welcome
from lockstep.launch.signals import Signals
from lockstep.launch.terminal import say

POLL_S = 0.05


def follow(job: Job, name: str, signals: Signals) -> Ending:
    assert job.join is not None
    line = wire.connect(job.join, job.host, say)
    try:
        adopted, orders = _introduce(job, name, line)
        agent = Agent(adopted, name)
        try:
            return _obey(agent, line, signals, orders)
        finally:
            agent.close()
    except wire.Lost as lost:
        text = f"the coordinating node ({job.join}) is gone: {lost}; the ranks here were stopped"
        say(f"lockstep: {text}. To go on, on every node: {job.again}")
        return Ending(1, Failure(-1, name, time.time(), NODE, text))
    finally:
        line.close()


def _introduce(job: Job, name: str, line: wire.Line) -> tuple[Job, list[Message]]:
    """The run's folder is the coordinating node's choice; everything else must already be equal.

    Also returns the first orders, which may come together with the welcome.
    """
    count = job.nproc
    line.send(Hello(name, count.least, count.most, count.first, job.identity))
    adopted: Job | None = None
    orders: list[Message] = []
    while adopted is None:
        for message in _received(line):
            if isinstance(message, Refused):
                raise UserError(message.asked, message.found, message.fix)
            if isinstance(message, Welcome):
                adopted = replace(job, run_dir=Path(message.run_dir), spec=_adopt(job.spec, message.decided))
            else:
                orders.append(message)
    return adopted, orders


def _adopt(spec: dict[str, Any], decided: list[Any]) -> dict[str, Any]:
    if "layers" not in spec:
        return spec
    return {**spec, "layers": [layer for layer in spec["layers"] if layer[0] != FROM_LAUNCHER] + decided}


def _obey(agent: Agent, line: wire.Line, signals: Signals, orders: list[Message]) -> Ending:
    next_beat = 0.0
    while True:
        for message in orders:
            if isinstance(message, End):
                failure = Failure.from_json(message.failure) if message.failure else None
                return Ending(message.code, failure, message.restarts)
            if isinstance(message, Say):
                say(message.text)
            else:
                agent.do(message)
        for signal in signals.take():
            line.send(Asked(signal))
        for event in agent.poll():
            line.send(event)
        if time.monotonic() >= next_beat:
            next_beat = time.monotonic() + wire.BEAT_S
            line.send(agent.beat())
        orders = _received(line, *agent.sockets())


def _received(line: wire.Line, *others: Any) -> list[Message]:
    select.select([line, *others], [], [], POLL_S)
    line.flush()
    return [message for message in line.receive(time.monotonic()) if not isinstance(message, Beat)]
