"""Lab 9, determinism: why 1, 2 and 4 ranks give different bits, and how a tree of additions gives the same.

    python lab/beyond/09_determinism.py                              4 ranks, forked
    torchrun --nproc-per-node 4 lab/beyond/09_determinism.py         the same under torchrun (without part 4)
    lockstep lab check 9 lab/beyond/09_determinism.py                grade this file

All ranks hold the same model, the global batch is the same, and still the weights of 1, 2 and 4 ranks differ after the
first step. Nothing is broken: a sum of floating-point numbers depends on the order in which they are added, and the
number of ranks sets that order. The cure is to fix the order once, for any number of ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import Loss, Task, fit
from lockstep.lab import plots, predictions
from lockstep.lab.checks import Checks
from lockstep.lab.counting import CountCollectives
from lockstep.lab.predictions import Question
from lockstep.lab.ranks import LIMIT, run_ranks

MICRO_BATCHES = 8  # of every step, on any number of ranks
SAMPLES = 4  # in a micro-batch
STEPS = 6
LR = 0.2

QUESTIONS = [
    Question(
        "orders",
        "How many different results can 8 gradients have, added on 1, 2 and 4 ranks?",
        "results",
        "one per order",
    ),
    Question("bytes", "How many copies of the gradient must each of 4 ranks get from the others?", "copies", "N - 1"),
]


# ---- the model and its data -------------------------------------------------------------------------------


def make_model() -> nn.Module:
    """Return a small classifier, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def make_data(step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """Return one micro-batch. It depends on its place in the run, and never on the rank that computes it."""
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    x = torch.randn(SAMPLES, 16, generator=generator)
    return x, x[:, :4].argmax(1)


def gradient(model: nn.Module, step: int, micro_batch: int) -> Tensor:
    """Return the gradient of the SUM of the losses of one micro-batch, as one flat tensor."""
    x, y = make_data(step, micro_batch)
    loss = F.cross_entropy(model(x), y, reduction="sum")
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


# ---- part 1: the usual way --------------------------------------------------------------------------------
#
# Each rank adds the gradients of its micro-batches one after the other, then the ranks' sums are all-reduced:
#
#   1 rank     ((((((g0 + g1) + g2) + g3) + g4) + g5) + g6) + g7
#   2 ranks    (((g0 + g1) + g2) + g3)  +  (((g4 + g5) + g6) + g7)
#   4 ranks    (g0 + g1) + (g2 + g3) + (g4 + g5) + (g6 + g7), in an order that the all-reduce chooses
#
# Every + rounds to 24 bits, so three placements of the brackets are three results.


def add_as_usual(parts: list[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over all ranks of a group, as accumulation and an all-reduce compute it."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    dist.all_reduce(total, group=group)
    return total


# ---- part 2: a tree ---------------------------------------------------------------------------------------
#
# Fix the brackets once, as a binary tree over the micro-batches of the step:
#
#   ((g0 + g1) + (g2 + g3)) + ((g4 + g5) + (g6 + g7))
#
# A rank that owns a whole subtree can add it alone. One tensor per rank is left, the root of its subtree; the ranks
# exchange these, and each adds them in the order of the tree.


def mine(rank: int, world: int) -> range:
    """Return this rank's micro-batches: a whole subtree, so consecutive ones, the same number on each rank."""
    count = MICRO_BATCHES // world
    return range(rank * count, (rank + 1) * count)


def tree_sum(parts: list[Tensor]) -> Tensor:
    """Add 1, 2, 4, 8, ... tensors: neighbours first, then neighbouring pairs, and so on."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def add_up(parts: list[Tensor], group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of all micro-batches of all ranks, with the same bits on 1, 2, 4 or 8 ranks."""
    root = tree_sum(parts)

    # No all-reduce: its order of additions is its own affair. Gathering adds nothing, and we add afterwards.
    roots = [torch.empty_like(root) for _ in range(dist.get_world_size(group))]
    dist.all_gather(roots, root, group=group)
    return tree_sum(roots)


# ---- part 3: train on 1, 2 and 4 ranks of one job, both ways ------------------------------------------------


def train(add, group: dist.ProcessGroup | None) -> tuple[str, list[str]]:
    """Train on the ranks of a group; return a digest of the final weights, and one of the gradient of each step."""
    model = make_model()
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    seen = []
    for step in range(STEPS):
        total = add([gradient(model, step, index) for index in mine(rank, world)], group)
        seen.append(digest(total))

        # Divide once, by the number of samples of the whole step, and update.
        mean = total / (MICRO_BATCHES * SAMPLES)
        with torch.no_grad():
            for parameter, part in zip(
                model.parameters(), mean.split([p.numel() for p in model.parameters()]), strict=True
            ):
                parameter -= LR * part.view_as(parameter)
    return digest(torch.cat([p.detach().flatten() for p in model.parameters()])), seen


def digest(tensor: Tensor) -> str:
    """Return eight letters that change if one bit changes."""
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:8]


def main() -> None:
    """Train in every world that fits into this job, compare the bits, and draw."""
    dist.init_process_group("gloo", timeout=LIMIT)
    rank, world = dist.get_rank(), dist.get_world_size()
    worlds = [size for size in (1, 2, 4, 8) if size <= world]

    # A world of n is the first n ranks. Every rank must take part in making a group; those outside then wait.
    usual, in_a_tree = {}, {}
    for size in worlds:
        group = dist.new_group(range(size))
        if rank < size:
            usual[size], in_a_tree[size] = train(add_as_usual, group), train(add_up, group)
        dist.barrier()

    # What the exchange costs: one gradient comes from each of the other ranks.
    first = gradient_of_step_0()
    with CountCollectives() as counted:
        add_up([first[index] for index in mine(rank, world)])
    copies = counted.bytes("all_gather") / (first[0].numel() * first[0].element_size()) - 1

    # Rank 0 took part in every world: its digests are compared.
    found = [usual, in_a_tree]
    dist.broadcast_object_list(found)
    usual, in_a_tree = found

    checks = Checks("Lab 9: determinism")
    checks.equal("added as usual: different final weights", len({bits for bits, _ in usual.values()}), len(worlds))
    checks.equal("added in a tree: different final weights", len({bits for bits, _ in in_a_tree.values()}), 1)
    checks.less("the tree is accurate: error against float64", error(tree_sum(first), first), 1e-6)
    checks.equal("copies of the gradient that a rank receives", copies, world - 1)
    if rank == 0:
        show(usual, in_a_tree)
        predictions.reveal("9", QUESTIONS[0], computed=len(worlds), measured=len({b for b, _ in usual.values()}))
        predictions.reveal("9", QUESTIONS[1], computed=world - 1, measured=copies)
        draw(usual, in_a_tree)
    checks.finish()


def gradient_of_step_0() -> list[Tensor]:
    """Return the gradients of the eight micro-batches of the first step."""
    return [gradient(make_model(), 0, index) for index in range(MICRO_BATCHES)]


def error(total: Tensor, parts: list[Tensor]) -> float:
    """Return how far a sum is from the one in float64, relative to its largest element."""
    right = torch.stack(parts).double().sum(0)
    return float((total.double() - right).abs().max() / right.abs().max())


def show(usual: dict, in_a_tree: dict) -> None:
    """Print the digests of the gradients, step by step, and of the weights at the end."""
    for name, found in (("added as usual", usual), ("added in a tree", in_a_tree)):
        print(f"\n{name}: digests of the gradient of each step, and of the weights at the end")
        for size, (weights, steps) in found.items():
            print(f"  {size} rank{'s' if size > 1 else ' '}  {' '.join(steps)}  weights {weights}")


# An order of additions: the number of a micro-batch, or two orders whose results are added.
Order = int | tuple["Order", "Order"]


def chain(items: list[Order]) -> Order:
    """Return ((a + b) + c) + d ..."""
    total = items[0]
    for item in items[1:]:
        total = (total, item)
    return total


def tree(items: list[Order]) -> Order:
    """Return (a + b) + (c + d) ..."""
    while len(items) > 1:
        items = list(zip(items[::2], items[1::2], strict=True))
    return items[0]


def draw(usual: dict, in_a_tree: dict) -> None:
    """Draw who adds what on 1, 2 and 4 ranks, in both ways, with the digest of the first step's gradient."""
    made = plots.figure(10, 4.8)
    if made is None:
        return
    picture, axes = made
    for row, (name, found) in enumerate({"as usual": usual, "in a tree": in_a_tree}.items()):
        for column, (size, (_, digests)) in enumerate(found.items()):
            shares = [list(mine(rank, size)) for rank in range(size)]
            order = chain([chain(share) for share in shares]) if row == 0 else tree(list(range(MICRO_BATCHES)))
            place(axes, order, size, 10.5 * column, -6.5 * row)
            title = f"{size} rank{'s' if size > 1 else ''}, {name}: {digests[0]}"
            axes.text(10.5 * column + 3.5, -6.5 * row - 1.4, title, ha="center", fontsize=9, family="monospace")
    axes.set_axis_off()
    axes.set_title(
        "Eight gradients, added. Colour: the rank that adds; grey: after the exchange. Below: a digest of the bits",
        fontsize=10,
    )
    plots.save(picture, "09_determinism")


def place(axes, order: Order, world: int, x: float, y: float) -> tuple[float, float, set[int]]:
    """Draw an order of additions; return where its result is, and the ranks that it came from."""
    if isinstance(order, int):
        owner = order * world // MICRO_BATCHES
        axes.plot(x + order, y, "s", color=f"C{owner}", markersize=6)
        return x + order, y, {owner}

    ends = [place(axes, part, world, x, y) for part in order]
    ranks = ends[0][2] | ends[1][2]
    at = sum(end[0] for end in ends) / 2, max(end[1] for end in ends) + 1
    colour = f"C{min(ranks)}" if len(ranks) == 1 else "0.5"
    for end in ends:
        axes.plot([end[0], at[0]], [end[1], at[1]], color=colour, linewidth=1.2)
    axes.plot(*at, "o", color=colour, markersize=5)
    return *at, ranks


# ---- part 4: the Lockstep form ------------------------------------------------------------------------------
#
# One setting: exact=true. It also fixes what an exercise can leave out: any number of ranks (three, too), FSDP, random
# numbers, the clipping norm, threads, kernels, and it refuses what cannot be exact (docs/exactness.md).


class Small(Task):
    """The same kind of training as a task."""

    defaults = {"steps": STEPS, "global_batch": 32, "micro_batch": SAMPLES, "lr": {"peak": 0.01}}

    def model(self) -> nn.Module:
        """Return the small classifier; Lockstep makes its weights the same on all ranks."""
        return make_model()

    def data(self) -> TensorDataset:
        """Return all samples; Lockstep shards them."""
        x, y = zip(*(make_data(0, index) for index in range(64)), strict=True)
        return TensorDataset(torch.cat(x), torch.cat(y))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        """Return a sum with a weight: Lockstep divides once."""
        x, y = batch
        # Noise from torch's own generator, which Lockstep seeds by step and micro-batch. A generator that is seeded by
        # the rank would give each number of ranks a noise of its own.
        x = x + 0.1 * torch.randn(x.shape)
        return Loss(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))


def prove_with_lockstep(ranks: int) -> None:
    """Train the task with exact=true on one process and on several, and compare the weights bit by bit."""
    checks = Checks("The same with Lockstep: exact=true")
    with tempfile.TemporaryDirectory() as folder:
        settings = {"exact": True, "log": {"progress": "off"}}
        alone = fit(Small(), run_dir=f"{folder}/alone", **settings).weights
        several = fit(Small(), run_dir=f"{folder}/several", nproc=ranks, **settings).weights
    same = [name for name, tensor in alone.items() if torch.equal(tensor, several[name])]
    checks.equal(f"tensors with the same bits on 1 and {ranks} ranks", len(same), len(alone))
    checks.finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Why bits differ between 1, 2 and 4 ranks, and how to make them equal."
    )
    parser.add_argument("--full", action="store_true", help="also train the Lockstep task on 3 and 4 ranks")
    options = parser.parse_args()
    launched = "RANK" in os.environ
    predictions.ask("9", QUESTIONS)
    run_ranks(main, nproc=4)
    if not launched:
        for count in (2, 3, 4) if options.full else (2,):
            prove_with_lockstep(count)
