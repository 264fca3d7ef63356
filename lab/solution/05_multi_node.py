"""Exercise 5: several nodes. Two agents on this machine, one of which dies; a checkpoint that survives; a slow network.

python lab/solution/05_multi_node.py

starts two agents of torchrun, as on two machines: each has an address of its own, 127.0.0.2 and 127.0.0.3. By hand, in
two terminals (N is 2 in one and 3 in the other; on real machines, use their addresses and leave --local-addr out):

torchrun --nnodes 1:2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id lab --rdzv-endpoint 127.0.0.2:29500 \\
    --local-addr 127.0.0.N lab/solution/05_multi_node.py
"""

import argparse
import json
import logging
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import lockstep
from lockstep.lab import plots, predictions
from lockstep.lab.checks import Checks
from lockstep.lab.counting import CountCollectives
from lockstep.lab.predictions import Question
from lockstep.lab.ranks import LIMIT, backend, device
from lockstep.lab.workload.data import ShapeClass

LOST = Question(
    "lost_steps",
    "A checkpoint every 4 steps, and a node dies in step 7, before its update. How many finished steps are lost?",
    "steps",
    "the remainder of 6 / 4",
)
SEPARATE = Question(
    "separate",
    "How many times as long do 64 all-reduces of 4 KB take as one of 256 KB?",
    "times",
    "(64 a + b n) / (a + b n), with a and b from the table",
)
QUESTIONS = [LOST, SEPARATE]

GLOBAL_BATCH, EVERY, STEPS, DIES_IN = 12, 4, 10, 6  # steps count from 0


# ---- 1. Samples that do not depend on the number of ranks -----------------------------------------------------


def samples_of(step: int, rank: int, world: int) -> range:
    """Return the samples of this rank in this step. All ranks together have the same samples on any number of ranks."""
    first = step * GLOBAL_BATCH
    return range(first + rank, first + GLOBAL_BATCH, world)


# ---- 2. A checkpoint that is there or not, but never half there -----------------------------------------------


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write all that the steps from `step` on depend on. Call it on every rank."""
    if dist.get_rank() == 0:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        new = folder / f"step-{step:06}.pt.new"
        with new.open("wb") as file:
            torch.save(state, file)
            # Once the file has its name, its bytes must be on the disk.
            file.flush()
            os.fsync(file.fileno())
        # The name appears at once, with the whole file behind it.
        new.rename(folder / f"step-{step:06}.pt")
    # No rank begins a step that the checkpoint might still lose.
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint that can be read, on all ranks, and return the step to begin with."""
    found: list[dict | None] = [None]
    if dist.get_rank() == 0:
        for path in sorted(folder.glob("step-*.pt"), reverse=True):
            try:
                found[0] = torch.load(path, map_location="cpu", weights_only=True)
                break
            except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
                print(f"  {path.name} cannot be read ({type(error).__name__}): trying the one before it", flush=True)

    # Rank 0 decides for all: a file that only some ranks can read would start them at different steps.
    dist.broadcast_object_list(found)
    state = found[0]
    if state is None:
        return 0
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


# ---- 3. Training ----------------------------------------------------------------------------------------------


def train(folder: Path, steps: int = STEPS, dies_in: int | None = None) -> Tensor:
    """Train to step `steps`, from the newest checkpoint in `folder`. Returns all weights as one vector."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 8)).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = ShapeClass(GLOBAL_BATCH * steps, pixels=8)

    rank, world = dist.get_rank(), dist.get_world_size()
    first = load(folder, model, optimizer)
    if rank == 0:
        with (folder / "attempts").open("a") as log:
            log.write(json.dumps({"world": world, "first": first}) + "\n")

    for step in range(first, steps):
        if step == dies_in and rank == world - 1 > 0:
            lose_power()
        mine = samples_of(step, rank, world)
        pictures, classes = data.batch(mine)
        optimizer.zero_grad()

        # A sum, divided by the batch of all ranks: right for any number of ranks, even where shares differ by one.
        loss = F.cross_entropy(model(pictures.to(device())), classes.to(device()), reduction="sum") / GLOBAL_BATCH
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if (step + 1) % EVERY == 0:
            save(folder, step + 1, model, optimizer)
    return torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])


def train_with_lockstep(folder: Path) -> Tensor:
    """Train the same with Lockstep, stopped after 6 steps and begun again: samples and checkpoints are its affair."""
    data = ShapeClass(GLOBAL_BATCH * STEPS, pixels=8)
    settings = {"global_batch": GLOBAL_BATCH, "data": {"shuffle": False}, "checkpoint": {"every": EVERY}}
    settings |= {"run_dir": str(folder / "lockstep"), "resume": "auto", "log": {"progress": "off"}}
    for stop in (DIES_IN, STEPS):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 8))
        with lockstep.start(**settings, steps=stop) as run:
            model, _ = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            for step in run.steps(data):
                for pictures, classes in step:
                    loss = F.cross_entropy(model(pictures), classes, reduction="sum")
                    step.backward(loss, weight=len(classes))
                step.apply()
    return torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])


def lose_power() -> None:
    """Kill this node: its agent, which is the parent of this process, and this process. Neither says goodbye."""
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


# ---- 4. The network: latency and bandwidth --------------------------------------------------------------------


def fit_line(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Fit seconds = a + b * size and return (a, b): the latency, and the seconds per byte.

    Errors count relative to the seconds: otherwise the largest message alone would decide, and a would mean nothing.
    """
    n = torch.tensor(sizes, dtype=torch.float64)
    t = torch.tensor(seconds, dtype=torch.float64)
    weights = 1 / t
    columns = torch.stack([weights, weights * n], dim=1)
    a, b = torch.linalg.lstsq(columns, (weights * t)[:, None]).solution.flatten().tolist()
    return a, b


def link() -> list[tuple[int, float]]:
    """Send messages of growing size to the other node and back; return (bytes, seconds for one way)."""
    table = []
    here = device() if dist.get_backend() == "nccl" else torch.device("cpu")  # gloo sends from the memory of the host
    for size in [1024 * 4**power for power in range(7)]:
        message = torch.zeros(size, dtype=torch.uint8, device=here)
        best = float("inf")
        for _ in range(8):
            dist.barrier()
            begun = time.perf_counter()
            if dist.get_rank() == 0:
                dist.send(message, 1)
                dist.recv(message, 1)
            elif dist.get_rank() == 1:
                dist.recv(message, 0)
                dist.send(message, 0)
            best = min(best, (time.perf_counter() - begun) / 2)
        table.append((size, best))
    return table


def many_or_one() -> dict[str, float]:
    """All-reduce 64 tensors of 4 KB one by one, and then as one tensor; return seconds and the number of calls."""
    tensors = [torch.zeros(1024, device=device()) for _ in range(64)]
    seconds = {"many": float("inf"), "one": float("inf")}
    for _ in range(5):
        for name, group in {"many": tensors, "one": [torch.cat(tensors)]}.items():
            dist.barrier()
            begun = time.perf_counter()
            for tensor in group:
                dist.all_reduce(tensor)
            seconds[name] = min(seconds[name], time.perf_counter() - begun)
    with CountCollectives() as counted:
        for tensor in tensors:
            dist.all_reduce(tensor)
        many = counted.count("all_reduce")
        dist.all_reduce(torch.cat(tensors))
    return seconds | {"many calls": many, "one call": counted.count("all_reduce") - many}


# ---- 5. What a rank does --------------------------------------------------------------------------------------


def work(folder: str, dies_in: int | None, measure: bool, backend: str = "gloo") -> None:
    """Train and, if asked, measure the network: the program of every rank on every node."""
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=LIMIT)
    weights = train(Path(folder), dies_in=dies_in)
    found = {"address": os.environ["MASTER_ADDR"], "world": dist.get_world_size()}
    if measure:
        found |= {"link": link(), "sends": many_or_one(), "lockstep": train_with_lockstep(Path(folder)).tolist()}
    if dist.get_rank() == 0:
        torch.save(weights, Path(folder) / "weights")
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# ---- 6. Two nodes on one machine ------------------------------------------------------------------------------


def agent(node: int, port: int, folder: Path, dies_in: int | None, measure: bool) -> None:
    """Be the agent of one node: what the command `torchrun` does, with its rank forked from this process."""
    log = (folder / f"node-{node}.log").open("w")
    os.dup2(log.fileno(), 2)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.WARNING)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=2,
        nproc_per_node=1,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.2:{port}",
        local_addr=f"127.0.0.{2 + node}",
        # Node 0 serves the store at which the nodes meet. A node that is silent for 5 seconds is dead, and 3 seconds
        # later the others begin without it. (The defaults, 15 and 30 seconds, are for real networks.)
        rdzv_configs={
            "is_host": node == 0,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 5,
            "last_call_timeout": 30 if dies_in is None else 3,
        },
        max_restarts=3,
        start_method="fork",
    )
    elastic_launch(launch, work)(str(folder), dies_in, measure)


def run_nodes(folder: Path, *, dies_in: int | None = None, measure: bool = False) -> list[int | None]:
    """Start the agents of two nodes, wait for them, and return their exit codes: negative for a signal."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        port = free.getsockname()[1]
    sys.stdout.flush()
    agents = [
        get_context("fork").Process(target=agent, args=(node, port, folder, dies_in, measure)) for node in range(2)
    ]
    for process in agents:
        process.start()
    for process in agents:
        process.join()
    return [process.exitcode for process in agents]


def attempts_in(folder: Path) -> list[dict[str, int]]:
    """Return number of ranks and first step of each attempt to train in this folder."""
    return [json.loads(line) for line in (folder / "attempts").read_text().splitlines()]


def two_nodes(checks: Checks, place: Path) -> dict:
    """Train without a failure, through a failure, and from a checkpoint; compare the weights."""
    codes = run_nodes(place / "whole", measure=True)
    whole = torch.load(place / "whole" / "weights")
    found = json.loads((place / "whole" / "found.json").read_text())
    checks.equal("both agents end well", codes, [0, 0])
    checks.equal(
        "two nodes form one world, at the address of the first", (found["world"], found["address"]), (2, "127.0.0.2")
    )

    # The same samples on a single process, without any launcher.
    alone = torch.tensor(_in_new_process(place / "alone"))
    checks.less("two nodes train what one process trains", (whole - alone).abs().max().item(), 1e-6)

    by_lockstep = torch.tensor(found["lockstep"])
    apart = (by_lockstep - alone).abs().max().item()
    checks.less("so does Lockstep on two nodes, stopped and resumed on the way", apart, 1e-6)

    # Node 1 loses power. Agent 0 notices, forms a world of 1, and its rank begins with the newest checkpoint.
    codes = run_nodes(place / "broken", dies_in=DIES_IN)
    broken = torch.load(place / "broken" / "weights")
    attempts = attempts_in(place / "broken")
    checks.equal("node 1 was killed, node 0 went on", codes, [0, -signal.SIGKILL])
    checks.equal("worlds of the last two attempts", [attempt["world"] for attempt in attempts[-2:]], [2, 1])
    checks.equal("the second attempt begins at the checkpoint", attempts[-1]["first"], DIES_IN // EVERY * EVERY)
    checks.less("it ends with the weights of the run without a failure", (whole - broken).abs().max().item(), 1e-6)
    predictions.reveal("5", LOST, computed=DIES_IN % EVERY, measured=DIES_IN - attempts[-1]["first"])

    # On the same number of ranks even the bits are the same. The newest checkpoint is torn here, and must be skipped.
    resumed = place / "resumed"
    resumed.mkdir()
    shutil.copy(place / "whole" / f"step-{EVERY:06}.pt", resumed)
    torn = (place / "whole" / f"step-{EVERY:06}.pt").read_bytes()
    (resumed / f"step-{2 * EVERY:06}.pt").write_bytes(torn[: len(torn) // 2])
    run_nodes(resumed)
    checks.equal("a torn checkpoint is skipped", attempts_in(resumed)[0]["first"], EVERY)
    same = torch.equal(whole, torch.load(resumed / "weights"))
    checks.true("resumed on two nodes, the weights have the same bits", same, "same bits" if same else "other bits")
    return found


def _in_new_process(folder: Path) -> list[float]:
    """Train on one rank, in a forked process: a group can be made only once in each."""
    folder.mkdir()
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(variables)
    process = get_context("fork").Process(target=work, args=(str(folder), None, False))
    process.start()
    process.join()
    for name in variables:
        del os.environ[name]
    return torch.load(folder / "weights").tolist()


def network(checks: Checks, found: dict) -> None:
    """Print the table of the link, and what the fit says about many small messages."""
    sizes, seconds = [size for size, _ in found["link"]], [spent for _, spent in found["link"]]
    a, b = fit_line(sizes, seconds)
    print("\n  bytes        one way      bandwidth    a + b n")
    for size, spent in zip(sizes, seconds, strict=True):
        print(f"  {size:<11,}  {spent * 1e6:7.0f} us  {size / spent / 1e6:7.0f} MB/s  {(a + b * size) * 1e6:8.0f} us")
    print(f"  fit: latency a = {a * 1e6:.0f} us, bandwidth 1 / b = {1e-6 / b:.0f} MB/s")
    print(f"  half of the bandwidth is reached with messages of a / b = {a / b / 1024:.0f} KB\n")
    checks.true("the link has a bandwidth", b > 0, f"{1e-6 / b:.0f} MB/s")
    exact = fit_line([1000, 10_000, 100_000], [2e-4 + 1e-9 * size for size in (1000, 10_000, 100_000)])
    checks.near("the fit finds the latency of a made-up link", exact[0], 2e-4, percent=0.1)
    checks.near("and its bandwidth", 1 / exact[1], 1e9, percent=0.1)

    sends, n = found["sends"], 64 * 4096
    checks.equal("64 small all-reduces, or one large", (sends["many calls"], sends["one call"]), (64, 1))
    measured = sends["many"] / sends["one"]
    predictions.reveal("5", SEPARATE, computed=(64 * a + b * n) / (a + b * n), measured=measured)
    draw(sizes, seconds, a, b)


def draw(sizes: list[int], seconds: list[float], a: float, b: float) -> None:
    """Draw the measured times over the line a + b n."""
    drawn = plots.figure(7, 3.5)
    if drawn is None:
        return
    picture, axes = drawn
    axes.loglog(sizes, [spent * 1e6 for spent in seconds], "o", label="measured")
    axes.loglog(sizes, [(a + b * size) * 1e6 for size in sizes], label=f"{a * 1e6:.0f} us + n / ({1e-6 / b:.0f} MB/s)")
    axes.axvline(a / b, color="gray", linestyle=":", label="half of the bandwidth")
    axes.set(xlabel="bytes of the message", ylabel="microseconds, one way", title="A link is latency and bandwidth")
    axes.legend()
    plots.save(picture, "05_multi_node")


def by_hand() -> None:
    """Be one rank that torchrun has started: train, and say what happened."""
    folder = predictions.folder() / "05_multi_node"
    folder.mkdir(parents=True, exist_ok=True)
    work(str(folder), None, False, backend())
    if os.environ["RANK"] == "0":
        last = attempts_in(folder)[-1]
        print(f"trained from step {last['first']} to {STEPS} on {last['world']} ranks; checkpoints in {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if "RANK" in os.environ:
        by_hand()
    else:
        predictions.ask("5", QUESTIONS)
        checks = Checks("Exercise 5: several nodes")
        with tempfile.TemporaryDirectory() as place:
            found = two_nodes(checks, Path(place))
        network(checks, found)
        checks.finish()
