"""Bonus 3: elastic training by hand: ranks die, hang and come back, and the model is the same to the last bit.

    python lab/bonus/03_elastic.py                # an agent by hand, 1 to 3 ranks, three failures
    python lab/bonus/03_elastic.py --lockstep     # the same failures with Lockstep, in a few lines
    python lab/bonus/03_elastic.py --torchrun     # two torchrun agents, --nnodes 1:2; one is killed, and replaced

A run survives if four things are right:

    checkpoints     written whole or not at all, and checked before they are trusted
    data            which samples a step trains depends on the step alone, so every sample is trained exactly once
    sums            the gradients of a step are added in an order that does not depend on the number of ranks
    an agent        starts the ranks, notices who died or hangs, and starts all of them again

docs/lab/bonus_03_elastic.md walks through the code.
"""

import argparse
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # an optimizer needs it: import it once, not in every rank after it was forked
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lockstep.lab import Checks, Question, ask, plots, reveal
from lockstep.runtime.parent_death import die_with_parent

QUESTIONS = [
    Question(
        "redone",
        "24 steps, a checkpoint every 4, failures in steps 6, 11 and 15, the last with the newest checkpoint "
        "damaged: how many steps are run again?",
        "steps",
        "sum of (step of the failure - step of its checkpoint)",
    ),
]

STEPS, SAVE_EVERY = 24, 4
SLOTS, PER_SLOT = 12, 4  # a batch is 12 slots of 4 samples; ranks share the slots
BATCH = SLOTS * PER_SLOT
SAMPLES = STEPS * BATCH  # one epoch
REFORM = 75  # exit code of a rank that was asked to stop, and has saved
HANG_S = 2.0  # a rank that has begun to train must move at least this often
START_S = 60.0  # until its first step


# ---- checkpoints: whole or not at all ------------------------------------------------------------------------


def save(folder, state):
    """Write a checkpoint with its checksum, under its name only when all of it is on the disk."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    new = folder / "new"
    with new.open("wb") as file:
        file.write(hashlib.sha256(data).digest() + data)
        file.flush()
        os.fsync(file.fileno())
    new.rename(folder / f"step-{state['step']:04}.ckpt")


def load_newest(folder):
    """Return the newest checkpoint whose checksum is right, or None; and the names of those that were skipped."""
    skipped = []
    for path in sorted(folder.glob("step-*.ckpt"), reverse=True):
        data = path.read_bytes()
        if hashlib.sha256(data[32:]).digest() == data[:32]:
            return torch.load(io.BytesIO(data[32:])), skipped
        skipped.append(path.name)
    return None, skipped


def damage_newest(folder):
    """Change one byte of the newest checkpoint, as a bad disk would."""
    path = sorted(folder.glob("step-*.ckpt"))[-1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


# ---- a rank ---------------------------------------------------------------------------------------------------


def samples():
    """Return the data set, and the order in which it is trained: the same on every rank and in every attempt."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 16, generator=random)
    y = (x @ torch.randn(16, 4, generator=random)).argmax(1)
    return x, y, torch.randperm(SAMPLES, generator=random)


class Beat:
    """Where a rank is, in memory that the agent can read at any time: step, phase, seconds of computing by step."""

    def __init__(self, numbers, rank):
        self.numbers, self.rank = numbers, rank

    def __call__(self, step, phase):
        """Tell the agent that this rank has moved."""
        if self.numbers is not None:
            place = self.rank * WIDTH
            self.numbers[place : place + 3] = [step, PHASES.index(phase), time.monotonic()]

    def computed(self, step, seconds):
        """Note how long this rank itself worked in a step, without waiting for others."""
        if self.numbers is not None:
            self.numbers[self.rank * WIDTH + 3 + step] = seconds


PHASES = ("start", "compute", "exchange")
WIDTH = 3 + STEPS


def train(folder, attempt, beat, faults, stop=None, wait_at=STEPS):
    """Train from the newest checkpoint to the end. All ranks call it, with the process group ready."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, order = samples()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trained = torch.zeros(SAMPLES, dtype=torch.int)  # how often each sample was trained
    first = 0

    # Rank 0 chooses the checkpoint: all must resume from the same one.
    chosen = [load_newest(folder) if rank == 0 else None]
    dist.broadcast_object_list(chosen, 0)
    state, skipped = chosen[0]
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        trained, first = state["trained"], state["step"]
    if rank == 0:
        log(folder, event="start", attempt=attempt, world=world, step=first, skipped=skipped)

    for step in range(first, STEPS):
        if step >= wait_at:
            time.sleep(3 * START_S)  # until the agent ends this rank, because another node has come
        began = time.monotonic()
        beat(step, "compute")
        for number, fault in enumerate(faults):
            inject(number, fault, folder, step, rank)

        # One row for each of this rank's slots: gradients, loss, and whether this rank was asked to stop.
        rows = []
        for slot in range(rank, SLOTS, world):
            chosen = order[step * BATCH + slot * PER_SLOT :][:PER_SLOT]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[chosen]), y[chosen], reduction="sum")
            loss.backward()
            asked = torch.tensor([float(stop is not None and stop.value)])
            rows.append(torch.cat([p.grad.flatten() for p in model.parameters()] + [loss.detach()[None], asked]))
        beat.computed(step, time.monotonic() - began)

        # Every rank gets all rows and adds them in the order of the slots: the same bits with 1, 2, 3 or 4 ranks.
        beat(step, "exchange")
        everyones = [torch.empty(SLOTS // world, len(rows[0])) for _ in range(world)]
        dist.all_gather(everyones, torch.stack(rows))
        total = torch.zeros_like(rows[0])
        for slot in range(SLOTS):
            total += everyones[slot % world][slot // world]

        # The update.
        place = 0
        for parameter in model.parameters():
            parameter.grad = (total[place : place + parameter.numel()] / BATCH).view(parameter.shape)
            place += parameter.numel()
        optimizer.step()
        trained[order[step * BATCH : (step + 1) * BATCH]] += 1
        leaving = bool(total[-1] > 0)

        if rank == 0:
            log(
                folder,
                event="step",
                attempt=attempt,
                step=step,
                world=world,
                seconds=time.monotonic() - began,
                loss=float(total[-2] / BATCH),
            )
            if (step + 1) % SAVE_EVERY == 0 or leaving:
                save(
                    folder,
                    {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "trained": trained,
                        "step": step + 1,
                    },
                )
        if leaving and step + 1 < STEPS:
            return REFORM

    if rank == 0:
        with torch.no_grad():
            final = float(F.cross_entropy(model(x), y))
        torch.save({"loss": final, "trained": trained, "model": model.state_dict()}, folder / "final.pt")
    return 0


def log(folder, **entry):
    """Add a line to the log of the run."""
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps(entry | {"time": time.time()}) + "\n")


def inject(number, fault, folder, step, rank):
    """Let a planned fault happen, once: a file remembers it."""
    if (step, rank) != (fault["step"], fault["rank"]):
        return
    if fault["how"] == "slow":
        time.sleep(0.03)
        return
    mark = folder / f"fault-{number}"
    if mark.exists():
        return
    mark.touch()
    log(folder, event="fault", how=fault["how"], step=step, rank=rank)
    match fault["how"]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "damage and kill":
            damage_newest(folder)
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill the agent":
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


# ---- an agent by hand -----------------------------------------------------------------------------------------


class Agent:
    """Starts between `low` and `high` ranks, and starts them again: what torchrun does, in a hundred lines."""

    def __init__(self, folder, low, high, faults=(), back_at=None):
        self.folder, self.low, self.high = folder, low, high
        self.faults, self.back_at = list(faults), back_at
        self.world, self.attempt = high, 0
        self.causes = []  # why each attempt ended
        self.stragglers = set()

    def run(self):
        """Train to the end, whatever happens."""
        self.folder.mkdir(parents=True)
        log(self.folder, event="begin")
        while True:
            cause = self._attempt()
            if cause is None:
                log(self.folder, event="end")
                return
            self.causes.append(cause)
            log(self.folder, event="failure", cause=cause)
            assert len(self.causes) < 10, self.causes
            self.attempt += 1

    def _attempt(self):
        """Start all ranks, and watch them. Return why they had to be ended, or None if they have finished."""
        # A new store for each attempt, so that no rank finds addresses of dead ones.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("fork")
        self.beats = context.Array("d", [-1.0] * (WIDTH * self.world), lock=False)
        self.stop = context.Value("i", 0, lock=False)
        arguments = [(rank, self.world, store.port) for rank in range(self.world)]
        processes = [context.Process(target=self._rank, args=entry) for entry in arguments]
        sys.stdout.flush()
        for process in processes:
            process.start()
        try:
            return self._watch(processes)
        finally:
            for process in processes:
                process.kill()  # SIGKILL ends a stopped process too; SIGTERM would not
                process.join()

    def _rank(self, rank, world, port):
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        try:
            code = train(self.folder, self.attempt, Beat(self.beats, rank), self.faults, self.stop)
        except RuntimeError:
            code = 1  # the connection to another rank broke: the agent will say which
        dist.barrier() if code == 0 else None
        os._exit(code)

    def _watch(self, processes):
        started = time.monotonic()
        while True:
            time.sleep(0.02)
            self._find_stragglers()
            ended = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode is not None}
            if len(ended) == len(processes) and set(ended.values()) == {0}:
                return None
            if any(code not in (0, REFORM) for code in ended.values()):
                return self._who_died(processes)
            if ended and set(ended.values()) == {REFORM} and len(ended) == len(processes):
                self.world = self.high
                return f"a node is back: {self.high} ranks from now on"

            hang = self._who_hangs(started, ended)
            if hang:
                return hang

            # A lost node has come back: ask the ranks to save and stop.
            if self.back_at is not None and self.world < self.high and self.beats[0] >= self.back_at:
                self.stop.value = 1

    def _who_died(self, processes):
        """Return the cause: a rank that a signal killed, rather than ranks that only lost their connection to it."""
        time.sleep(0.2)
        codes = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}
        killed = [rank for rank, code in codes.items() if code < 0]
        rank = killed[0] if killed else min(codes)
        if killed and self.world > self.low and rank == self.world - 1:
            self.world -= 1  # its node is gone: go on without it
        how = signal.Signals(-codes[rank]).name if codes[rank] < 0 else f"exit code {codes[rank]}"
        return f"rank {rank} died: {how}"

    def _who_hangs(self, started, ended):
        """Return the cause if no rank has moved for too long: those that do not wait for others in an exchange."""
        now = time.monotonic()
        beats = {rank: self.beats[rank * WIDTH : rank * WIDTH + 3] for rank in range(self.world) if rank not in ended}
        if not beats or any(step < 0 for step, *_ in beats.values()):
            return "a rank did not start" if now - started > START_S else None
        if now - max(moved for *_, moved in beats.values()) < HANG_S:
            return None
        stuck = [rank for rank, (_, phase, _) in beats.items() if PHASES[int(phase)] != "exchange"]
        return f"rank {stuck[0] if stuck else '?'} hangs: no heartbeat for {HANG_S:.0f} s, the others wait for it"

    def _find_stragglers(self):
        """Compare how long the ranks compute. The time of a step would not show it: all wait for the slowest."""
        typical = []
        for rank in range(self.world):
            times = [seconds for seconds in self.beats[rank * WIDTH + 3 : (rank + 1) * WIDTH] if seconds >= 0]
            if len(times) < 4:
                return
            typical.append(min(times))  # a straggler is slow in every step, a busy machine in some
        for rank, seconds in enumerate(typical):
            if self.world > 2 and seconds > 2 * statistics.median(typical) and seconds > 0.02:
                self.stragglers.add(rank)


# ---- the report -----------------------------------------------------------------------------------------------


def read_log(folder):
    """Return the entries of a run's log."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def goodput(folder):
    """Return (useful seconds / all seconds, steps run, steps that were run again).

    Useful are the seconds of the steps that are in the final model: of a step that was run twice, the last time.
    """
    entries = read_log(folder)
    steps = [entry for entry in entries if entry["event"] == "step"]
    last = {entry["step"]: entry["seconds"] for entry in steps}
    total = max(entry["time"] for entry in entries) - min(entry["time"] for entry in entries)
    return sum(last.values()) / total, len(steps), len(steps) - len(last)


def print_report(folder):
    """Print what happened, second by second, and the goodput."""
    entries = read_log(folder)
    begin = entries[0]["time"]
    for entry in entries:
        match entry["event"]:
            case "start":
                damaged = f", {', '.join(entry['skipped'])} is damaged" if entry["skipped"] else ""
                what = f"{_ranks(entry['world'])} at step {entry['step']}{damaged}"
            case "fault":
                what = f"fault: {entry['how']}, rank {entry['rank']}, step {entry['step']}"
            case "failure":
                what = entry["cause"]
            case _:
                continue
        print(f"  {entry['time'] - begin:7.2f} s  {what}")
    share, run, again = goodput(folder)
    print(
        f"  {entries[-1]['time'] - begin:7.2f} s  the end: {run} steps run, {again} of them again; goodput {share:.0%}"
    )


def _ranks(world):
    return "1 rank starts" if world == 1 else f"{world} ranks start"


def compare(checks, name, calm, stormy):
    """Check that two runs have ended with the same model, and trained every sample once."""
    expected, found = torch.load(calm / "final.pt"), torch.load(stormy / "final.pt")
    checks.equal(f"{name}: final loss, equal to the run without failures", found["loss"], expected["loss"])
    same = all(torch.equal(found["model"][key], expected["model"][key]) for key in expected["model"])
    checks.true(f"{name}: the model has the same bits", same, "yes" if same else "no")
    counts = found["trained"].unique().tolist()
    checks.equal(f"{name}: how often the {SAMPLES} samples were trained", counts, [1])


def run_by_hand(folder, checks):
    """Train without and with failures under the agent above."""
    calm = Agent(folder / "calm", 1, 2)
    calm.run()
    faults = [
        {"step": 6, "rank": 2, "how": "kill"},
        {"step": 11, "rank": 1, "how": "stop"},
        {"step": 15, "rank": 0, "how": "damage and kill"},
        *({"step": step, "rank": 1, "how": "slow"} for step in range(16, STEPS)),
    ]
    stormy = Agent(folder / "stormy", 1, 3, faults, back_at=15)
    stormy.run()

    print_report(folder / "stormy")
    text = "; ".join(stormy.causes)
    checks.true("the killed rank is named", "rank 2 died: SIGKILL" in text, stormy.causes[0])
    checks.true("the stopped rank is found by its heartbeat", "rank 1 hangs" in text, "rank 1 hangs")
    entries = read_log(folder / "stormy")
    starts = [entry for entry in entries if entry["event"] == "start"]
    skipped = [name for entry in starts for name in entry["skipped"]]
    checks.true(
        "the damaged checkpoint is skipped",
        skipped == ["step-0012.ckpt"] and any(e["step"] == 8 and e["skipped"] for e in starts),
        skipped,
    )
    worlds = [entry["world"] for entry in starts]
    checks.true(
        "the number of ranks changes: 3, then 2, then 3 again",
        worlds[0] == 3 and 2 in worlds and worlds[-1] == 3,
        worlds,
    )
    checks.true("the straggler is named", 1 in stormy.stragglers, f"rank {', '.join(map(str, stormy.stragglers))}")
    share, _, again = goodput(folder / "stormy")
    checks.less(
        "the run without failures has the better goodput: the other's, relative to it",
        share / goodput(folder / "calm")[0],
        1,
    )
    compare(checks, "after 3 failures", folder / "calm", folder / "stormy")
    print()
    reveal("b3", QUESTIONS[0], computed=(6 - 4) + (11 - 8) + (15 - 8), measured=again)
    draw(entries)


def draw(entries):
    """Draw the steps over time, coloured by the number of ranks, with faults and restarts."""
    made = plots.figure(9, 4)
    if made is None:
        return
    picture, axes = made
    begin = entries[0]["time"]
    colours = {1: "tab:green", 2: "tab:orange", 3: "tab:blue"}
    seen = set()
    for entry in entries:
        moment = entry["time"] - begin
        if entry["event"] == "step":
            label = None if entry["world"] in seen else f"{entry['world']} ranks"
            seen.add(entry["world"])
            axes.plot(moment, entry["step"] + 1, ".", color=colours[entry["world"]], label=label)
        elif entry["event"] == "fault" and entry["how"] != "slow":
            axes.axvline(moment, color="tab:red", linewidth=0.8)
            axes.annotate(
                f"{entry['how']}, rank {entry['rank']}", (moment, STEPS), rotation=90, fontsize=7, va="top", ha="right"
            )
        elif entry["event"] == "start":
            axes.axvline(moment, color="grey", linewidth=0.6, linestyle="--")
    axes.set_xlabel("seconds; red: a fault, dashed: the ranks start again from a checkpoint")
    axes.set_ylabel("steps trained")
    axes.legend(fontsize=8, loc="lower right")
    plots.save(picture, "b3_elastic")


# ---- with torchrun --------------------------------------------------------------------------------------------


def run_torchrun(folder, checks):
    """Train under two agents of torchrun. A rank is killed, then an agent with its rank; later a new agent joins."""
    calm = Agent(folder / "calm", 1, 2)
    calm.run()
    stormy = folder / "torchrun"
    stormy.mkdir()
    log(stormy, event="begin")
    faults = [{"step": 6, "rank": 0, "how": "kill"}, {"step": 11, "rank": 1, "how": "kill the agent"}]

    # The store of the rendezvous is served here: with is_host=0 either agent may die. An agent counts as dead after
    # 15 s without a sign of life. With 2 s a busy machine ran two jobs at once: each agent believed itself alone.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    conf = "is_host=0,last_call_timeout=3,keep_alive_interval=3,keep_alive_max_attempt=5"
    rendezvous = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{store.port}",
        "--rdzv-id=lab",
        f"--rdzv-conf={conf}",
    ]
    words = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5", "--monitor-interval=0.1", *rendezvous]
    command = [sys.executable, "-m", "torch.distributed.run", *words, str(Path(__file__).resolve())]
    variables = {"ELASTIC_FOLDER": str(stormy), "ELASTIC_FAULTS": json.dumps(faults), "OMP_NUM_THREADS": "1"}
    # A new store for each group of ranks. By default an agent keeps the address of the store that it has seen first: if
    # the agents change places when a node joins, their ranks wait for each other at different stores (torch 2.13).
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    def agent(number):
        output = (folder / f"agent-{number}.txt").open("w")
        return subprocess.Popen(command, env=os.environ | variables, stdout=output, stderr=output)

    agents = [agent(0), agent(1)]
    try:
        # Wait until an agent is dead and the other one trains alone; then the node comes back.
        _wait(lambda: any(a.poll() == -signal.SIGKILL for a in agents), "an agent is killed", agents)
        alone = lambda: any(e["event"] == "step" and e["world"] == 1 for e in read_log(stormy))  # noqa: E731
        _wait(alone, "one rank trains on", agents)
        agents.append(agent(2))
        _wait(lambda: (stormy / "final.pt").exists(), "the end", agents)
        codes = [a.wait(60) for a in agents]
    finally:
        for process in agents:
            process.kill()
    log(stormy, event="end")

    print_report(stormy)
    worlds = [entry["world"] for entry in read_log(stormy) if entry["event"] == "start"]
    checks.equal("torchrun: exit codes of the agents: one was killed, the others finished", sorted(codes), [-9, 0, 0])
    checks.true(
        "torchrun: the number of ranks changes: 2, then 1, then 2 again",
        " 2 1 2" in " ".join(["", *map(str, worlds)]),
        worlds,
    )
    compare(checks, "torchrun", folder / "calm", stormy)


def _wait(happened, what, agents):
    end = time.monotonic() + 180
    while not happened():
        assert time.monotonic() < end, f"this did not happen: {what}"
        assert any(agent.poll() is None for agent in agents), f"all agents ended before: {what}"
        time.sleep(0.1)


def worker_of_torchrun():
    """What a rank runs under torchrun: the same training, without an agent's heartbeat."""
    die_with_parent(os.getppid())  # if its agent is killed; torchrun's ranks would live on
    dist.init_process_group("gloo")
    folder = Path(os.environ["ELASTIC_FOLDER"])
    faults = json.loads(os.environ["ELASTIC_FAULTS"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # A rank that is alone waits for the other node: at the beginning, and before step 14, when one has been lost.
    wait_at = STEPS if dist.get_world_size() > 1 else 14 if (folder / "fault-1").exists() else 0
    train(folder, attempt, Beat(None, 0), faults, wait_at=wait_at)
    dist.barrier()
    dist.destroy_process_group()


# ---- with Lockstep --------------------------------------------------------------------------------------------


def run_lockstep(folder, checks):
    """Train the same model with Lockstep, with the same failures: no agent, heartbeat or checkpoint by hand."""
    import lockstep
    from lockstep.testing import fail_at

    class Classify(lockstep.Task):
        defaults = {"epochs": 1, "global_batch": BATCH, "micro_batch": PER_SLOT, "lr": {"peak": 0.01}}

        def model(self):
            return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

        def data(self):
            x, y, _ = samples()
            return torch.utils.data.TensorDataset(x, y)

        def loss(self, model, batch):
            x, y = batch
            return lockstep.Loss(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))

    # Saves in the foreground: the checkpoint of step 12 is written, and damaged, before rank 0 dies at step 15.
    saves = {"every": SAVE_EVERY, "asynchronous": False}
    settings = {"exact": True, "checkpoint": saves, "log": {"progress": "off", "every": 1}}
    lockstep.fit(Classify(), nproc=1, run_dir=folder / "calm", **settings)
    with (
        fail_at(rank=1, step=6, how="kill"),
        fail_at(rank=1, step=11, how="stop"),
        fail_at(step=12, how="corrupt"),
        fail_at(rank=0, step=15, how="kill", phase="all-reduce"),
    ):
        lockstep.fit(Classify(), nproc=2, run_dir=folder / "stormy", **settings)

    # A step that was run again has two records: the last one counts.
    records = {}
    for name in ("calm", "stormy"):
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        records[name] = {record["step"]: record["loss"] for record in map(json.loads, lines)}
    events = [json.loads(line)["event"] for line in (folder / "stormy" / "events.jsonl").read_text().splitlines()]
    checks.equal("Lockstep: restarts", events.count("restart"), 3)
    checks.equal("Lockstep: steps", len(records["stormy"]), STEPS)
    same = records["calm"] == records["stormy"]
    checks.true(
        "Lockstep: all losses have the same bits as on one rank without failures", same, records["stormy"].get(STEPS)
    )


def main():
    """Run one of the three forms and check it."""
    checks = Checks(
        "Elastic training"
        + (" with torchrun" if OPTIONS.torchrun else " with Lockstep" if OPTIONS.lockstep else " by hand")
    )
    folder = Path(tempfile.mkdtemp(prefix="elastic-"))
    try:
        way = run_torchrun if OPTIONS.torchrun else run_lockstep if OPTIONS.lockstep else run_by_hand
        way(folder, checks)
    finally:
        shutil.rmtree(folder)
    checks.finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lockstep", action="store_true", help="the same failures with Lockstep")
    parser.add_argument("--torchrun", action="store_true", help="two agents of torchrun, one of which is killed")
    OPTIONS = parser.parse_args()
    if "ELASTIC_FOLDER" in os.environ:
        worker_of_torchrun()
    else:
        ask("b3", QUESTIONS)
        main()
