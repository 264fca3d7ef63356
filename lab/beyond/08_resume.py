"""Lab 8, resume: kill a run, go on with another number of ranks, and train every sample exactly once.

    python lab/beyond/08_resume.py
    torchrun --nproc-per-node 3 lab/beyond/08_resume.py      parts 1 to 3
    lockstep lab check 8 lab/beyond/08_resume.py             grade this file

A checkpoint of a model is easy. What most checkpoints forget is the data: after a resume some samples are trained twice
in an epoch and others never, and no loss curve shows it. The cure is to compute which samples come next from one
number, the step, and never from what a rank has read so far.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, TensorDataset

from lockstep import Loss, Sampled, Task, fit
from lockstep.errors import RanksFailed
from lockstep.files.jsonl import read_jsonl
from lockstep.lab import plots, predictions
from lockstep.lab.checks import Checks
from lockstep.lab.predictions import Question
from lockstep.lab.ranks import LIMIT, run_ranks
from lockstep.testing import fail_at

SAMPLES = 96
BATCH = 12  # samples of a step, over all ranks: 8 steps an epoch
STEPS = 16  # two epochs
SAVE_EVERY = 2
KILLED_AT = 5  # the step at which the run dies: its last checkpoint is of step 4

QUESTIONS = [
    Question(
        "twice", "Of 96 samples, how many does the usual resume train twice in the epoch?", "samples", "steps done x 12"
    ),
    Question(
        "never",
        "And how many never, if it skips the batches that were done, but on 3 ranks instead of 2?",
        "samples",
        "steps done x 6 x (3 - 2)",
    ),
]


# ---- the model and its data -------------------------------------------------------------------------------


def make_data() -> TensorDataset:
    """Return 96 points in 8 dimensions, in four classes."""
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :4].argmax(1))


def make_model() -> nn.Module:
    """Return a small classifier, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum: the momentum is state, too."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# ---- part 1: what the usual checkpoint forgets --------------------------------------------------------------
#
# The checkpoint holds model, optimizer and step. Where the data was is known to the loader alone, and it dies with the
# process. There are two usual ways to go on: begin the epoch again, or skip as many batches as were done. The first
# trains samples twice. The second is right, until the number of ranks changes: `batch_size=6` is the batch of one rank,
# so a step of 3 ranks takes more samples than a step of 2, and "4 steps done" is another place in the epoch.

PER_RANK = 6


def dealt(rank: int, world: int) -> list[list[int]]:
    """Return the batches of one rank in epoch 0, as DistributedSampler and DataLoader(batch_size=6) make them."""
    sampler = DistributedSampler(range(SAMPLES), num_replicas=world, rank=rank, shuffle=True, seed=0)
    ids = list(sampler)
    return [ids[start : start + PER_RANK] for start in range(0, len(ids), PER_RANK)]


def usual_resume(done: int, before: int, after: int, *, skip: bool) -> Counter[int]:
    """Return how often each sample is trained in epoch 0: `done` steps on `before` ranks, the rest on `after` ranks."""
    first = [batch for rank in range(before) for batch in dealt(rank, before)[:done]]
    second = [batch for rank in range(after) for batch in dealt(rank, after)[done if skip else 0 :]]
    return Counter(index for batch in (*first, *second) for index in batch)


# ---- part 2: the order is a function of the position --------------------------------------------------------


class Order:
    """Every sample once per epoch. What is at a place of the epoch can be computed at any time, on any rank."""

    def __init__(self, samples: int, seed: int):
        self.samples, self.seed = samples, seed

    def __len__(self) -> int:
        return self.samples

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the samples at the places [start, stop) of an epoch: a pure function of its arguments."""
        order = np.random.default_rng((self.seed, epoch)).permutation(self.samples)
        return order[start:stop].astype(np.int64)


def my_ids(order: Order, step: int, rank: int, world: int) -> list[int]:
    """Return this rank's samples of a step. All ranks together have the same 12, whatever `world` is."""
    epoch, index = divmod(step, len(order) // BATCH)
    batch = order.ids(epoch, index * BATCH, (index + 1) * BATCH)

    # Cut the batch where the ranks meet. With 5 ranks the shares are 2, 2, 3, 2, 3: unequal, and complete.
    return batch[rank * BATCH // world : (rank + 1) * BATCH // world].tolist()


# ---- part 3: a loop that can die at any moment --------------------------------------------------------------


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint; a kill in the middle leaves the old one intact."""
    if dist.get_rank() == 0:
        new = path.with_suffix(".new")
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, new)
        new.replace(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read a checkpoint; return the number of steps that are done."""
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def train(path: Path, until: int, on_step: Callable[[int, list[int]], None]) -> list[Tensor]:
    """Train to step `until` on all ranks, from the checkpoint if there is one; return the weights.

    `on_step(step, ids)` is called before each step, with the samples of this rank.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    model, data, order = make_model(), make_data(), Order(SAMPLES, seed=0)
    optimizer = make_optimizer(model)
    begin = load(path, model, optimizer) if path.exists() else 0
    dist.barrier()  # or a fast rank would save before a slow one has looked

    for step in range(begin, until):
        ids = my_ids(order, step, rank, world)
        on_step(step, ids)

        # The SUM of this rank's losses. Shares may be unequal, so the ranks' gradients are added and divided once.
        x, y = data[ids]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= BATCH
        optimizer.step()

        if (step + 1) % SAVE_EVERY == 0:
            save(path, step + 1, model, optimizer)

    dist.barrier()  # no rank is done before the last checkpoint is: the next start must find it on every rank
    return [parameter.detach().clone() for parameter in model.parameters()]


# ---- what counts --------------------------------------------------------------------------------------------

# A line of the log: (attempt, step, ids of one rank).
Line = tuple[int, int, list[int]]


def history(logged: list[Line]) -> dict[int, list[int]]:
    """Return the samples of each step.

    A step that was done after the last checkpoint is lost with the kill, and done again. The last attempt at a step
    counts: it is the one that is in the weights.
    """
    last: dict[int, int] = {}
    for attempt, step, _ in logged:
        last[step] = max(attempt, last.get(step, 0))
    found: dict[int, list[int]] = {step: [] for step in sorted(last)}
    for attempt, step, ids in logged:
        if attempt == last[step]:
            found[step] += ids
    return found


def per_epoch(steps: dict[int, list[int]]) -> list[Counter[int]]:
    """Return how often each sample was trained, for each epoch."""
    size = SAMPLES // BATCH
    epochs: list[Counter[int]] = [Counter() for _ in range(STEPS // size)]
    for step, ids in steps.items():
        epochs[step // size].update(ids)
    return epochs


def exactly_once(counts: Counter[int]) -> bool:
    """Return whether each of the 96 samples was trained once."""
    return len(counts) == SAMPLES and set(counts.values()) == {1}


# ---- the run: 2 ranks until one is killed, then 3 ranks, then 1 ---------------------------------------------


def attempt(folder: Path, number: int, until: int, kill_at: int | None = None, name: str = "killed") -> None:
    """Train on all ranks of this job to step `until`, write down the samples, and die at step `kill_at`."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=LIMIT)

    def on_step(step: int, ids: list[int]) -> None:
        # Written at once: what a dying process still has in memory is lost.
        with (folder / f"{name}-{dist.get_rank()}.jsonl").open("a") as file:
            file.write(json.dumps([number, step, ids]) + "\n")
        if step == kill_at and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    weights = train(folder / f"{name}.pt", until, on_step)
    if dist.get_rank() == 0:
        torch.save(weights, folder / f"{name}-weights.pt")


def run(folder: Path) -> list[int]:
    """Train to the end over three attempts, and once without a break; return the number of ranks of each attempt."""
    if "RANK" in os.environ:
        # A launcher decides how many ranks there are, and a kill would end its job: here the run only stops.
        for number, until in enumerate((KILLED_AT, 10, STEPS)):
            attempt(folder, number, until)
        attempt(folder, 0, STEPS, name="straight")
        return [dist.get_world_size()] * 3

    try:
        run_ranks(partial(attempt, folder, 0, STEPS, KILLED_AT), nproc=2)
    except SystemExit:
        print(f"  a rank was killed at step {KILLED_AT}; going on with 3 ranks", flush=True)
    run_ranks(partial(attempt, folder, 1, 10), nproc=3)
    run_ranks(partial(attempt, folder, 2, STEPS), nproc=1)
    run_ranks(partial(attempt, folder, 0, STEPS, name="straight"), nproc=1)
    return [2, 3, 1]


def main(folder: Path) -> None:
    """Count what the usual resume trains, run, and compare samples and weights."""
    checks = Checks("Lab 8: resume")
    again = usual_resume(4, 2, 3, skip=False)
    skipping = usual_resume(4, 2, 3, skip=True)
    twice = sum(count > 1 for count in again.values())
    never = sum(skipping[index] == 0 for index in range(SAMPLES))
    checks.equal("epoch begun again: samples trained twice", twice, 4 * BATCH)
    checks.equal("batches skipped, 2 ranks become 3: samples never trained", never, 4 * PER_RANK * (3 - 2))
    checks.true("batches skipped, still 2 ranks: every sample once", exactly_once(usual_resume(4, 2, 2, skip=True)))

    ranks = run(folder)
    if dist.is_initialized():
        dist.barrier()
    lines = [json.loads(line) for path in folder.glob("killed-*.jsonl") for line in path.read_text().splitlines()]
    epochs = per_epoch(history([tuple(line) for line in lines]))
    checks.true(
        f"{ranks[0]}, {ranks[1]}, {ranks[2]} ranks: every sample once in both epochs", all(map(exactly_once, epochs))
    )
    ends = [torch.load(folder / f"{name}-weights.pt") for name in ("killed", "straight")]
    off = max(float((a - b).abs().max()) for a, b in zip(*ends, strict=True))
    checks.less("weights against a run without a break", off, 1e-5)

    if os.environ.get("RANK", "0") == "0":
        predictions.reveal("8", QUESTIONS[0], computed=4 * BATCH, measured=twice)
        predictions.reveal("8", QUESTIONS[1], computed=4 * PER_RANK, measured=never)
        draw({"epoch begun again": again, "batches skipped, 2 ranks become 3": skipping, "by position": epochs[0]})
    checks.finish()


def draw(found: dict[str, Counter[int]]) -> None:
    """Draw how often each sample was trained in the epoch of the kill."""
    made = plots.figure(9, 3)
    if made is None:
        return
    picture, axes = made
    rows = [[counts[index] for index in range(SAMPLES)] for counts in found.values()]
    from matplotlib.colors import ListedColormap

    shades = axes.imshow(
        rows, aspect="auto", cmap=ListedColormap(["#d1495b", "#e8e8e8", "#30638e"]), vmin=-0.5, vmax=2.5
    )
    bar = picture.colorbar(shades, ax=axes, ticks=[0, 1, 2])
    bar.ax.set_yticklabels(["never", "once", "twice"])
    axes.set_yticks(range(len(found)), list(found))
    axes.set_xlabel("sample")
    axes.set_title("How often each of 96 samples is trained in the epoch in which the run was killed")
    plots.save(picture, "08_resume")


# ---- part 4: the Lockstep form ------------------------------------------------------------------------------


class Points(Task):
    """The same data and the same order; which rank gets what, saving and resuming are Lockstep's."""

    defaults = {"steps": STEPS, "global_batch": BATCH, "micro_batch": 2, "checkpoint": {"every": SAVE_EVERY}}

    def model(self) -> nn.Module:
        """Return the small classifier."""
        return make_model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return make_optimizer(model)

    def data(self) -> Sampled:
        """Return the samples with our own order. A plain dataset would be shuffled by Lockstep, as exactly."""
        return Sampled(make_data(), Order(SAMPLES, seed=0))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        """Return a sum with a weight."""
        x, y = batch
        return Loss(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))


def prove_with_lockstep(ranks: int) -> None:
    """Kill a rank of a real run with SIGKILL, go on alone from its last checkpoint, and compare bits and samples."""
    checks = Checks(f"The same with Lockstep: {ranks} ranks, one is killed, then 1 rank; exact=true")
    with tempfile.TemporaryDirectory() as folder:
        settings = {"exact": True, "log": {"progress": "off", "samples": True}}
        straight = fit(Points(), run_dir=f"{folder}/straight", **settings)

        # restart.per_hour=0: the launcher would otherwise restart the ranks itself, within a fraction of a second.
        try:
            with fail_at(rank=1, step=KILLED_AT, how="kill"):
                fit(Points(), run_dir=f"{folder}/killed", nproc=ranks, restart={"per_hour": 0}, **settings)
        except RanksFailed as failure:
            print(f"  {failure.found}")
        resumed_at = time.time()
        resumed = fit(Points(), run_dir=f"{folder}/killed", resume="auto", **settings)

        epochs = per_epoch(history(logged_by_lockstep(resumed.run_dir, resumed_at)))
        checks.true("every sample once in both epochs", all(map(exactly_once, epochs)))
        same = [name for name, tensor in straight.weights.items() if torch.equal(tensor, resumed.weights[name])]
        checks.equal("tensors with the same bits as without the kill", len(same), len(straight.weights))
    checks.finish()


def logged_by_lockstep(run_dir: Path, resumed_at: float) -> list[Line]:
    """Return the lines of the sample logs of a run. The time tells which of the two commands wrote a line."""
    lines = []
    for path in sorted((run_dir / "samples").glob("rank-*.jsonl")):
        for record in read_jsonl(path):
            ids = [index for _, *micro_batch in record["epoch_and_ids"] for index in micro_batch]
            # A record has the number of steps done, and this lab counts steps from 0.
            lines.append((int(record["time"] > resumed_at), record["step"] - 1, ids))
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Kill a run, go on with another number of ranks, train each sample once."
    )
    parser.add_argument("--full", action="store_true", help="also kill a Lockstep run on 3 ranks")
    options = parser.parse_args()
    predictions.ask("8", QUESTIONS)
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=LIMIT)
        place = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(place)
        main(Path(place[0]))
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as place:
            main(Path(place))
        for count in (2, 3) if options.full else (2,):
            prove_with_lockstep(count)
