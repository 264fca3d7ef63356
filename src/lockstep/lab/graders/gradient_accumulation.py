"""Grades exercise 2: the scale of the loss, no_sync, the partial window at the end of an epoch.

Everything is compared with one large batch: equal micro-batches, unequal ones, the rest of an epoch, and several ranks.
Under DDP the bytes of all-reduces show whether gradients were exchanged once per update.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from lockstep.lab.counting import CountCollectives
from lockstep.lab.grading import Finding
from lockstep.lab.learner import Learner

FUNCTIONS = ("accumulated_step", "train_epoch", "effective_batch")
ERRORS = {
    "has no attribute 'no_sync'": "`model` may be a plain module, which has nothing to exchange: call no_sync() only "
    "if it is a DDP",
}
RANKS = 2
Batch = tuple[Tensor, Tensor]


def grade(learner: Learner) -> Iterator[Finding]:
    """Yield the findings, in the order in which the file is written."""
    # Under DDP a wrong scale would only show again.
    scaled = True
    for finding in _step(learner):
        scaled &= finding.passed
        yield finding

    yield from _collectives(learner, scaled)
    yield from _epoch(learner)
    yield from _arithmetic(learner)


# ---- accumulated_step ----


def _net() -> nn.Module:
    """Return the same small model every time, in float64: differences are mistakes, not rounding."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _batches(*sizes: int, seed: int = 0) -> list[Batch]:
    """Return batches of these sizes: [size, 4] random numbers, and labels of three classes."""
    generator = torch.Generator().manual_seed(seed)
    pictures = [torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in sizes]
    return [(x, torch.arange(len(x)) % 3) for x in pictures]


def _joined(batches: list[Batch]) -> Batch:
    """Return one batch that holds all samples of several."""
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def _moved(model: nn.Module, before: nn.Module) -> Tensor:
    """Return how far plain SGD with lr 1 has moved the weights: minus the gradient."""
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    return torch.cat([(a.detach() - b.detach()).flatten() for a, b in pairs])


def _step(learner: Learner) -> Iterator[Finding]:
    """Judge one update: with equal micro-batches, with unequal ones, and the second of two."""
    (equal, unequal, twice) = learner.run(_take_steps, world=1)[0]
    right, why = _same(*equal, parts=4, samples=32)
    yield Finding("4 micro-batches of 8 = one batch of 32", right, why[0], why[1])
    if not right:
        return

    # With micro-batches of different sizes, the mean of the means is not the mean.
    got, wanted, means = unequal
    weighted = torch.allclose(got, wanted, atol=1e-9)
    why_unequal = "each micro-batch counts by its samples: scale its mean loss by len(labels) / samples of the window"
    if torch.allclose(got, means, atol=1e-9):
        why_unequal = f"the loss was divided by the number of micro-batches; {why_unequal}"

    yield Finding(
        "micro-batches of 8, 8 and 4 = one batch of 20", weighted, "" if weighted else "it differs", why_unequal
    )

    # An update that forgets nothing is only seen in the second.
    got, wanted = twice
    yield Finding(
        "the second update has only its own gradients",
        torch.allclose(got, wanted, atol=1e-9),
        "",
        "gradients of the first update are still there: call optimizer.zero_grad() once per update, before the first "
        "micro-batch",
    )


def _same(got: Tensor, wanted: Tensor, parts: int, samples: int) -> tuple[bool, tuple[str, str]]:
    """Return whether two gradients agree; if not, what is wrong and why."""
    if torch.allclose(got, wanted, atol=1e-9):
        return True, ("", "")

    factor = (got.norm() / wanted.norm()).item()
    if torch.allclose(got, parts * wanted, atol=1e-9):
        return False, (
            f"the gradient is {factor:.3g} times too large",
            f"the gradients of {parts} means were added, as if the learning rate were {parts} times as large: scale "
            "each loss by its share of the samples",
        )

    if torch.allclose(got, samples * wanted, atol=1e-9):
        return False, (
            f"the gradient is {factor:.3g} times too large",
            f"the losses of {samples} samples were summed: divide each sum by the samples of the whole window",
        )

    if factor == 0:
        return False, ("the weights did not change", "call optimizer.step() after the last micro-batch")

    return False, (
        f"its gradient is {factor:.3g} times as long as the batch's",
        "add up the gradients of all micro-batches before optimizer.step(), with no zero_grad and no step in between",
    )


def _take_steps(module: ModuleType) -> list[tuple[Tensor, ...]]:
    """Return the weight changes of the learner's updates, each with what it should be."""
    net = _net()

    # Plain SGD with a learning rate of 1 moves the weights by minus the gradient.
    def learner(*windows: list[Batch]) -> Tensor:
        model = copy.deepcopy(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for window in windows:
            before = copy.deepcopy(model)
            module.accumulated_step(model, optimizer, window)

        return _moved(model, before)

    def plain(*losses: Any) -> Tensor:
        model = copy.deepcopy(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for loss in losses:
            before = copy.deepcopy(model)
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()

        return _moved(model, before)

    def whole(batches: list[Batch]) -> Any:
        x, y = _joined(batches)
        return lambda model: F.cross_entropy(model(x), y)

    equal, unequal, later = _batches(8, 8, 8, 8), _batches(8, 8, 4), _batches(8, 8, 8, 8, seed=1)
    mean_of_means = plain(lambda model: sum(F.cross_entropy(model(x), y) for x, y in unequal) / 3)
    return [
        (learner(equal), plain(whole(equal))),
        (learner(unequal), plain(whole(unequal)), mean_of_means),
        (learner(equal, later), plain(whole(equal), whole(later))),
    ]


# ---- under DDP ----


def _collectives(learner: Learner, scaled: bool) -> Iterator[Finding]:
    """Judge what is sent under DDP, and that several ranks give the gradient of one large batch."""
    # Bytes are counted, not calls: one call for each parameter is slower than DDP's buckets, but not wrong.
    found = learner.run(_under_ddp, world=RANKS)
    times = [copies for rank in found for copies in rank[0]]
    once = all(0.99 < copies < 1.5 for copies in times)
    why = "every micro-batch exchanged gradients, 4 times the traffic: run all but the last, forward and backward, in "
    if min(times) == 0:
        why = "no gradient was exchanged, so the replicas drift apart: leave the last micro-batch out of "
        if max(times) > 0:
            why = (
                "only some updates exchanged gradients; in the others the replicas drift apart: in every update, leave "
            )
            why += "the last micro-batch out of "

    yield Finding(
        "under DDP each of two updates of 4 micro-batches all-reduces every gradient once",
        once,
        ", ".join(f"update {number}: {copies:.3g} x" for number, copies in enumerate(found[0][0], start=1)),
        why + "no_sync()",
    )
    if not once or not scaled:
        return

    off = max(rank[1] for rank in found)
    yield Finding(
        f"{RANKS} ranks x 4 x 4 = one batch of 32", off < 1e-9, f"off by {off:.2g}", "scale by this rank's samples only"
    )


def _under_ddp(module: ModuleType) -> tuple[list[float], float]:
    """Return how often each of two updates all-reduced the gradients, and how far the first is from one batch."""
    # Every rank makes the micro-batches of all ranks, to compute what is right.
    net = _net()
    model = DDP(copy.deepcopy(net))
    everything = [_batches(4, 4, 4, 4, seed=rank) for rank in range(dist.get_world_size())]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    size = sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())

    times, after = [], []
    for _ in range(2):
        with CountCollectives() as counted:
            module.accumulated_step(model, optimizer, everything[dist.get_rank()])

        times.append(counted.bytes("all_reduce") / size)
        after.append(copy.deepcopy(model.module))

    # One process with all samples.
    x, y = _joined([batch for part in everything for batch in part])
    F.cross_entropy(net(x), y).backward()
    wanted = torch.cat([-p.grad.flatten() for p in net.parameters() if p.grad is not None])
    return times, (_moved(after[0], net) - wanted).abs().max().item()


# ---- train_epoch ----


def _epoch(learner: Learner) -> Iterator[Finding]:
    """Judge an epoch that does not divide evenly into updates."""
    updates, steps, off, lost, even = learner.run(_train, world=1)[0]
    yield Finding(
        "10 micro-batches, 4 to an update, are 3 updates",
        steps == 3,
        f"{steps} updates",
        "the last 2 micro-batches were lost: update once more for what is left at the end"
        if steps == 2
        else "update after every `accumulate` micro-batches, and after the rest",
    )
    if steps != 3:
        return

    yield Finding(
        "8 micro-batches, 4 to an update, are 2 updates",
        even == 2,
        f"{even} updates",
        "nothing was left, and the optimizer stepped once more, with an empty window: update for a rest only if there "
        "is one",
    )

    yield Finding("train_epoch returns the number of updates", updates == 3, f"{updates!r}", "return it")
    yield Finding(
        "the last window is scaled by what is in it",
        off < 1e-9,
        f"off by {off:.2g}",
        "2 micro-batches were divided by 4, so the last update is half as large as it should be"
        if lost < 1e-9
        else "the last window is a batch of its own: its loss is the mean over its samples",
    )


def _train(module: ModuleType) -> tuple[Any, int, float, float, int]:
    """Train for an epoch of 10 micro-batches, and compare with loops that scale the last update in two ways."""
    batches = _batches(*[4] * 10)
    net = _net()
    model = copy.deepcopy(net)

    # The optimizer itself counts its steps.
    steps = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    updates = module.train_epoch(model, iter(batches), optimizer, 4)

    def again(last_scale: float) -> float:
        copied = copy.deepcopy(net)
        again = torch.optim.SGD(copied.parameters(), lr=0.1)
        for start in (0, 4, 8):
            x, y = _joined(batches[start : start + 4])
            again.zero_grad()
            (F.cross_entropy(copied(x), y) * (last_scale if start == 8 else 1)).backward()
            again.step()

        return _moved(copied, model).abs().max().item()

    # An epoch without a rest.
    even: list[int] = []
    again_model = copy.deepcopy(net)
    optimizer = torch.optim.SGD(again_model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: even.append(1))
    if len(steps) == 3:
        module.train_epoch(again_model, iter(batches[:8]), optimizer, 4)
    return updates, len(steps), again(1.0), again(0.5), len(even)


def _arithmetic(learner: Learner) -> Iterator[Finding]:
    """Judge the formula of the effective batch."""
    found = learner.run(lambda module: [module.effective_batch(32, 4, ranks) for ranks in (4, 2)], world=1)[0]
    yield Finding(
        "32 x 4 micro-batches are 512 samples on 4 ranks, and 256 on 2",
        found == [512, 256],
        f"{found[0]} and {found[1]}",
        "multiply all three",
    )
