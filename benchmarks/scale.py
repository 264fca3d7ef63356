"""What a job of many nodes costs its coordinator, and what a checkpoint of many ranks costs rank 0. No torch, no GPU.

    python benchmarks/scale.py                            # 10, 100 and 1,000 nodes of 8 ranks; then 8,192 files
    python benchmarks/scale.py --nodes 1000 --ranks 8     # only this size
    python benchmarks/scale.py --parts 8192 --only checkpoint
    python benchmarks/scale.py --patience 60              # on a machine that is busy with other work

The coordinator, with its hub, acceptor and store, is a process of its own, and real; the nodes and the connections of
the ranks are simulated (`simulated_nodes.py`), over loopback. The table has the coordinator's CPU seconds in each
phase, and its memory after that phase, above what it had before the first node came.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import simulated_nodes
import torch
import xxhash
from simulated_nodes import SECRET, Nodes, StoreRanks, allow_files, make_coordinator, make_successor

from lockstep.checkpoint import command
from lockstep.checkpoint.manifest import File, Piece, TensorEntry
from lockstep.checkpoint.manifest_reader import read_manifest
from lockstep.checkpoint.rank_file import arrange
from lockstep.checkpoint.saving.draft import Confirmation, Draft, SaveContext
from lockstep.checkpoint.saving.outcome import Committed
from lockstep.checkpoint.saving.save import Save
from lockstep.checkpoint.saving.snapshot import SnapshotBuffer
from lockstep.checkpoint.state.reshard import RankContents
from lockstep.checkpoint.storage.folder import CheckpointStorage
from lockstep.checkpoint.storage.transitions import claim
from lockstep.config.sections import CheckpointConfig
from lockstep.launch.decisions import attempt_end, hang_check, next_attempt
from lockstep.launch.nodes.search import SEARCH_RETRY_S, JoinedTerm
from lockstep.launch.times import LOOP_S
from lockstep.launch.wire import connections
from lockstep.launch.wire.messages import Rendezvous, Start
from lockstep.launch.wire.sockets import wait_readable
from lockstep.launch.wire.store_server import StoreServer, store_secret
from lockstep.run_folder.checkpoint_names import file_name
from lockstep.runtime.shards import LocalShard

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
RUNNING_S = 5.0  # for how long the heartbeats of a running job are measured


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--parts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--only", choices=["job", "checkpoint"])
    parser.add_argument("--patience", type=float, metavar="S", help="on a busy machine: how late an answer may come")
    options = parser.parse_args()
    if options.patience:
        be_patient(options.patience)
    if options.only != "checkpoint":
        columns = {nodes: job_of(nodes, options.ranks) for nodes in options.nodes}
        print_table(f"nodes of {options.ranks} ranks", "CPU s (MB)", columns)
    if options.only != "job":
        print_table("files of a checkpoint", "s (CPU s)", {parts: checkpoint_of(parts) for parts in options.parts})


def be_patient(seconds: float) -> None:
    """Raise the limits for nodes that do not answer, and have them send fewer heartbeats.

    What a phase costs in CPU seconds does not depend on the limits. But a longer phase has more heartbeats in it, and
    the row for the heartbeats alone means nothing.
    """
    simulated_nodes.HEARTBEAT_S = seconds / 20
    connections.LOST_AFTER_S = seconds
    next_attempt.START_S = attempt_end.NODES_KILL_S = hang_check.LOST_AFTER_S = seconds


# ---- a job ----------------------------------------------------------------------------------------------


def job_of(nodes: int, ranks: int) -> dict[str, str]:
    """Return the coordinator's cost of each phase."""
    with tempfile.TemporaryDirectory() as folder, coordinating(Path(folder), nodes, ranks) as (address, control):
        costs: dict[str, str] = {}
        before = usage(control)

        def note(phase: str, seconds: float = 1.0) -> None:
            now = usage(control)
            costs[phase] = f"{(now['cpu'] - last['cpu']) / seconds:.2f} ({now['mb'] - before['mb']:.0f})"
            last.update(now)
            print(f"{nodes:,} nodes, {phase}: {costs[phase]}", file=sys.stderr, flush=True)

        last = dict(before)
        others = Nodes(address, Path(folder), nodes - 1, ranks)
        others.join(range(1, nodes))
        others.until(lambda: others.all_started(0))
        note("form: all nodes join, and start")

        ends = time.monotonic() + RUNNING_S
        others.until(lambda: time.monotonic() > ends)
        note("run: heartbeats and hang check, per second", RUNNING_S)

        others.lose()
        others.until(lambda: others.all_killed(0))
        note("lose a node: all ranks are killed")
        others.until(lambda: others.all_started(1))
        note("re-form: the others start again")

        control.send("hang")
        others.hang()
        others.until(lambda: others.messages["CollectStacks"] > 0)
        note("hang: some seconds of heartbeats, until it is noticed")
        others.until(lambda: others.all_started(2))
        note("stacks of all ranks are read and compared, then all start again")

        others.join([nodes])
        others.until(lambda: others.all_started(3))
        note("a node joins: all save, and start again")

        (Path(folder) / "resize").write_text(str(nodes * (ranks - 1)))
        others.until(lambda: others.all_started(4))
        note("resize: all save, and start again")

        control.send("finish")
        others.finish()
        others.until(lambda: not others.nodes)
        note("end: all ranks finish")
        costs["takeover: another node coordinates, and all start again"], look = takeover_of(nodes, ranks)
        costs["until then, for each node a second"] = look
        costs["all ranks meet in a store"] = store_of(nodes * ranks)
        costs["largest memory in all, MB"] = f"{usage(control)['peak']:.0f}"
        costs["bytes sent to a node"] = f"{sum(others.bytes.values()) / nodes:,.0f}"
        return costs


@contextlib.contextmanager
def coordinating(folder: Path, nodes: int, ranks: int) -> Iterator[tuple[str, Pipe]]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=coordinate, args=(folder, nodes, ranks, theirs))
    process.start()
    try:
        yield ours.recv(), ours
        ours.send("exit")
        process.join(30)
        assert process.exitcode == 0, process.exitcode
    finally:
        process.kill()


def coordinate(folder: Path, nodes: int, ranks: int, control: Pipe) -> None:
    """Coordinate a job until it ends, and answer what it has cost so far."""
    coordinator, agent, address = make_coordinator(folder, nodes, ranks)
    control.send(address)
    over = threading.Event()

    def answer() -> None:
        while (request := control.recv()) != "exit":
            if request == "finish":
                agent.finish()
            elif request == "hang":
                agent.hang()
            else:
                control.send(own_usage())
        over.set()

    threading.Thread(target=answer, daemon=True).start()
    with open(folder / "screen", "w") as screen, contextlib.redirect_stderr(screen):
        coordinator.run()
    over.wait(60)


def takeover_of(nodes: int, ranks: int) -> tuple[str, str]:
    """Return what it costs the next coordinator to take over, and what it costs each other node to wait for it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = multiprocessing.get_context("fork")
        ours, theirs = multiprocessing.Pipe()
        first = context.Process(target=coordinate, args=(folder, nodes, ranks, theirs))
        first.start()
        others = Nodes(ours.recv(), folder, nodes - 1, ranks)
        others.join(range(1, nodes))
        others.until(lambda: others.all_started(0))
        others.turn(2.0)
        first.kill()
        first.join()

        lowest = others.lose_coordinator()
        assert lowest.term is not None
        last = JoinedTerm(lowest.term, lowest.number or 0, lowest.state, "127.0.0.1")
        second = context.Process(target=succeed, args=(folder, nodes, ranks, last, theirs))
        second.start()
        try:
            before = ours.recv()
            look = others.find_successor()
            others.until(lambda: others.all_started(1))
            after = usage(ours)
            print(f"{nodes:,} nodes, takeover: {after['cpu'] - before['cpu']:.2f}", file=sys.stderr, flush=True)
            cost = f"{after['cpu'] - before['cpu']:.2f} ({after['mb'] - before['mb']:.0f})"
            return cost, f"{look / SEARCH_RETRY_S:.4f}"
        finally:
            second.kill()


def succeed(folder: Path, nodes: int, ranks: int, last: JoinedTerm, control: Pipe) -> None:
    """Take over from a coordinator that is lost, and answer what that has cost so far."""
    control.send(own_usage())
    threading.Thread(target=answer_usage, args=[control], daemon=True).start()
    with open(folder / "screen", "a") as screen, contextlib.redirect_stderr(screen):
        coordinator, _ = make_successor(folder, nodes, ranks, last)
        coordinator.run()


def answer_usage(control: Pipe) -> None:
    while control.recv():
        control.send(own_usage())


def store_of(ranks: int) -> str:
    """Return what the server of the ranks' store costs until all ranks have met there, without any node."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    address, port = listener.getsockname()
    start = Start(0, 0, ranks, ranks, 0, Rendezvous(address, port, port, "a store"))
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(listener, start, theirs))
    process.start()
    listener.close()
    try:
        store = StoreRanks(start)
        store.meet()
        cost = usage(ours)
        store.close()
        return f"{cost['cpu']:.2f} ({cost['mb'] - cost['mb before']:.0f})"
    finally:
        process.kill()


def serve(listener: socket.socket, start: Start, control: Pipe) -> None:
    """Serve a store until this process is killed, and answer once what it has cost."""
    before = own_usage()
    server = StoreServer(listener, store_secret(SECRET, start.rendezvous.store_nonce), start.world_size, print)
    while True:
        now = time.monotonic()
        wait_readable([control, *server.sockets(now)], LOOP_S)
        server.poll(now)
        if control.poll():
            control.recv()
            now_used = own_usage()
            control.send({**now_used, "cpu": now_used["cpu"] - before["cpu"], "mb before": before["mb"]})


def usage(control: Pipe) -> dict[str, float]:
    control.send("usage")
    return control.recv()


def own_usage() -> dict[str, float]:
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"cpu": time.process_time(), "mb": pages * PAGE_BYTES / 2**20, "peak": peak}


# ---- a checkpoint ---------------------------------------------------------------------------------------


def checkpoint_of(parts: int) -> dict[str, str]:
    """Return how long rank 0 takes for a checkpoint of this many ranks, whose files are there already."""
    seconds: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkpoints"
        save, buffer, contents = staged(root, parts)

        began = clocks()
        save.write(buffer.take(contents.shards, ()), contents.of_rank0)
        assert isinstance(save.outcome, Committed), save.outcome
        seconds["written: all confirmations read, the manifest committed"] = since(began)

        began = clocks()
        manifest = read_manifest(save.outcome.checkpoint)
        assert len(manifest.files) == parts
        seconds["the manifest alone, read and checked"] = since(began)

        began = clocks()
        text, code = command.verify(root)
        assert code == 0, text
        seconds["checked: lockstep ckpt verify"] = since(began)

        began = clocks()
        text, _ = command.ls(root)
        assert "not verified" in text, text
        seconds["listed: lockstep ckpt ls"] = since(began)
        size = (root / save.outcome.checkpoint.name / "manifest.json").stat().st_size
        seconds["the manifest, MB"] = f"{size / 1e6:.1f}"
    return seconds


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> str:
    wall, cpu = (now - then for now, then in zip(clocks(), began, strict=True))
    return f"{wall:.2f} ({cpu:.2f})"


def staged(root: Path, parts: int) -> tuple[Save, SnapshotBuffer, RankContents]:
    """Return the save of rank 0, after all other ranks have written and confirmed their small files."""
    names = [f"layer{number}.weight" for number in range(4)]
    storage = CheckpointStorage(root)
    claim(storage, "be7c4")

    # What rank 0 writes: its row of each tensor.
    contents = RankContents({name: LocalShard(torch.zeros(1, 16), (parts, 16), (0, 0)) for name in names})
    buffer = SnapshotBuffer(file_name(0))
    size = buffer.reserve(contents.shards).file_size
    context = SaveContext(storage, 0, parts, "be7c4", CheckpointConfig(timeout=600, asynchronous=False))
    save = Save(Draft(context, 1, 1), size, {})

    (root / save.draft.name).mkdir(parents=True)
    for rank in range(1, parts):
        pieces = {name: (Piece(file_name(rank), (rank, 0), (1, 16)),) for name in names}
        layout = arrange({name: TensorEntry("F32", (parts, 16), piece) for name, piece in pieces.items()})
        data = layout.header + bytes(layout.size)
        file = File(file_name(rank), layout.file_size, xxhash.xxh3_128(data).hexdigest())
        (root / save.draft.file_key(rank)).write_bytes(data)
        (root / save.draft.confirmation_key(rank)).write_bytes(Confirmation(file, layout.tensors).encode())

    return save, buffer, contents


def print_table(rows: str, unit: str, columns: dict[int, dict[str, Any]]) -> None:
    print(f"| {rows}: {unit} | {' | '.join(f'{size:,}' for size in columns)} |")
    print(f"|---|{'---|' * len(columns)}")
    for phase in next(iter(columns.values())):
        print(f"| {phase} | {' | '.join(str(costs[phase]) for costs in columns.values())} |")
    print(flush=True)


if __name__ == "__main__":
    allow_files()
    main()
