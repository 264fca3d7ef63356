"""What a job costs grows with its nodes, and not with their square: counted in messages and bytes, never in seconds."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.config.sections import HangConfig
from lockstep.errors import listed_ranks
from lockstep.launch.decisions import job_nodes
from lockstep.launch.decisions.commands import LINES_PER_SECOND, Outbox
from lockstep.launch.hangs import flight_recorder, stacks
from lockstep.launch.hangs.flight_recorder import DEFAULT_GROUP, analyse
from lockstep.launch.hangs.suspicion import RankView, suspect
from lockstep.launch.wire.messages import CoordinatorState, Rendezvous, Stacks, Start, decode, encode, ranges

RANKS = 2


def counts_of_a_job(folder: Path, nodes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], Counter[str]]:
    """Run a real coordinator with simulated nodes: form, lose a node, form again, resize, end.

    Return how many messages of each kind all nodes got, and how many bytes.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    import simulated_nodes  # pyrefly: ignore[missing-import]

    folder.mkdir()
    coordinator, agent, address = simulated_nodes.make_coordinator(folder, nodes, RANKS)
    thread = threading.Thread(target=coordinator.run)
    thread.start()
    others = simulated_nodes.Nodes(address, folder, nodes - 1, RANKS)
    others.join(range(1, nodes))
    others.until(lambda: others.all_started(0))
    monkeypatch.setattr(job_nodes, "SETTLE_S", 0.3)  # not before: a pause between two nodes would start the job
    others.lose()
    others.until(lambda: others.all_started(1))
    (folder / "resize").write_text(str(nodes))
    others.until(lambda: others.all_started(2))
    agent.finish()
    others.finish()
    others.until(lambda: not others.nodes)
    thread.join()
    monkeypatch.undo()
    return others.messages, others.bytes


def test_what_a_node_gets_does_not_grow_with_the_number_of_nodes(tmp_path, monkeypatch):
    few, many = 10, 50
    sent = {nodes: counts_of_a_job(tmp_path / str(nodes), nodes, monkeypatch) for nodes in (few, many)}
    for nodes, (messages, _) in sent.items():
        # One of each to every node in every attempt, but for the node that was lost.
        assert messages["Welcome"] == nodes - 1
        assert messages["Start"] == 3 * nodes - 5
        assert messages["Kill"] == messages["SaveAndExit"] == messages["JobEnd"] == nodes - 2

    # How many heartbeats there are depends on time; their size does not.
    states = [sizes["CoordinatorState"] / messages["CoordinatorState"] for messages, sizes in sent.values()]
    assert states[1] < 1.1 * states[0]

    # Everything else together: the lines about single nodes are limited.
    rest = [(sizes.total() - sizes["CoordinatorState"]) / nodes for nodes, (_, sizes) in sent.items()]
    assert rest[1] < 2 * rest[0], sent


def test_the_state_of_many_nodes_is_as_long_as_that_of_few():
    numbers = [*range(500), *range(501, 1000), 2000]
    state = CoordinatorState(ranges(numbers))
    assert state.nodes == [[0, 499], [501, 999], [2000, 2000]]
    assert state.numbers == numbers
    assert len(encode(state)) < 300


def test_screens_name_a_few_nodes_of_many_and_count_the_others():
    outbox = Outbox(Path("logs"))
    news = outbox.node_news
    for number in range(100):
        news.announce("joined", f"host-{number}", f"node {number} joined", now=10.0)
    assert len(outbox.take()) == LINES_PER_SECOND
    news.sum_up(10.5, 100)
    assert outbox.take() == []
    news.sum_up(11.0, 100)
    [line] = outbox.take()
    assert line.text.startswith("lockstep: 92 more nodes joined (host-8, host-9, ")
    assert line.text.endswith("and 87 more); 100 nodes now")
    news.announce("lost", "host-3", "node 3 is lost", now=13.0)
    assert len(outbox.take()) == 1


class Counted(dict):
    """A dict that counts how often it is read."""

    reads = 0

    def get(self, *arguments):
        Counted.reads += 1
        return super().get(*arguments)

    def items(self):
        Counted.reads += 1
        return super().items()


def test_the_watchdog_looks_at_each_rank_a_few_times(monkeypatch):
    monkeypatch.setattr(Counted, "reads", 0)
    rest = {"host": "a", "pid": 1, "state": "S", "detail": "", "beats": 1, "age": 0.1, "step": 5, "steps_here": 4}
    views = [RankView(rank=rank, phase="compute", longest=Counted(compute=0.1), **rest) for rank in range(300)]
    assert suspect(views, HangConfig()) is None
    assert 0 < Counted.reads <= 4 * len(views)


def test_the_history_of_a_group_is_made_once(monkeypatch):
    entry = {"process_group": ["0", DEFAULT_GROUP], "collective_seq_id": 1, "profiling_name": "gloo:all_reduce"}
    sorts = []
    monkeypatch.setattr(
        "lockstep.launch.hangs.flight_recorder.sorted", lambda *a: sorts.append(a) or sorted(*a), raising=False
    )
    findings = analyse({rank: [entry] for rank in range(50)})
    assert "49 " in findings.lines[0] or findings.entered == dict.fromkeys(range(50), 1)
    assert len(sorts) < 10


def test_many_ranks_are_listed_as_ranges():
    assert listed_ranks([0, 2]) == "ranks 0, 2"
    assert listed_ranks([*range(8), *range(9, 8000), 9000]) == "ranks 0 to 7, 9 to 7999, 9000"
    assert listed_ranks(range(0, 8000, 2)).endswith("and 3984 more")


def test_what_ranks_of_a_node_have_in_common_is_sent_once(monkeypatch):
    """Everything about every rank was half a gigabyte on a thousand nodes, and took longer than the wait for it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    import simulated_nodes  # pyrefly: ignore[missing-import]

    start = Start(0, 0, 8, 8, 0, Rendezvous("", 1))
    message = simulated_nodes.Ranks("a").stacks(start, 1)
    sizes = {
        count: len(encode(simulated_nodes.Ranks("a").stacks(replace(start, count=count), 1))) for count in (7, 8, 64)
    }
    assert sizes[64] < 1.02 * sizes[8]
    assert sizes[7] < 60_000

    # Nothing is lost on the way.
    received = decode(encode(message))
    assert isinstance(received, Stacks)
    assert list(received.stack_of) == [0, 1, 2, 3, 4, 6, 7, 5]
    [line] = analyse(received.collectives_of).lines
    assert "ranks 0, 1, 2, 3, 4, 6, 7 wait in collective 10000" in line
    assert "rank 5 never entered it" in line


def test_equal_stacks_and_entries_of_two_processes_are_equal_texts():
    heads = [
        f"{word} 0x00007f1{number} (most recent call first):"
        for number, word in enumerate(("Thread", "Current thread"))
    ]
    stack = "".join(f'{head}\n  File "a.py", line {len(head)} in f\n\n' for head in heads)
    assert stacks.comparable(stack) == stacks.comparable(stack.replace("0x00007f", "0x0000aa"))
    assert stacks.main_thread(stacks.comparable(stack)) == stacks.main_thread(stack)
    entry = {"process_group": ["0", DEFAULT_GROUP], "collective_seq_id": 1, "profiling_name": "gloo:all_reduce"}
    assert flight_recorder.comparable([{**entry, "time_created_ns": 5}, "what"]) == [entry]
