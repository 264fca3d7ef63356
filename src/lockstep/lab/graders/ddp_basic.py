"""Grades exercise 1: the group, OwnDDP, the samples of each rank, the loop, and the proof that replicas are equal.

Each part of the file is called on its own, on two ranks or three, with a small model in float64. A wrong gradient is
compared with the results of the usual mistakes, so that the answer names the mistake instead of a number.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.lab.grading import Finding
from lockstep.lab.learner import Learner

FUNCTIONS = ("setup", "OwnDDP", "make_loader", "train", "replica_difference")
ERRORS = {
    "mutually exclusive with shuffle": "a sampler decides the order, and DistributedSampler shuffles by default: leave "
    "shuffle out of the loader",
}
RANKS = 2
SAMPLES = 24


def grade(learner: Learner) -> Iterator[Finding]:
    """Yield the findings, in the order in which the file is written."""
    yield from _group(learner)
    yield from _replicas(learner)

    # Gradients, and what a rank reads, must be right before its loop can be compared with another one.
    right = True
    for finding in chain(_gradients(learner), _samples(learner)):
        right &= finding.passed
        yield finding

    if right:
        yield from _loop(learner)

    yield from _proof(learner)


# ---- setup ----


def _group(learner: Learner) -> Iterator[Finding]:
    """Judge `setup`: every process must have become one rank of the launcher's group."""
    found = learner.run(_join, world=RANKS, group=False)
    expected = [(rank, RANKS) for rank in range(RANKS)]
    if None in found:
        yield Finding("setup() joins the process group", False, "there is no group", "call dist.init_process_group")
        return

    yield Finding(
        "setup() joins the group of the launcher",
        found == expected,
        ", ".join(f"rank {rank} of {world}" for rank, world in found),
        "a process that takes itself for the only one trains alone: read RANK and WORLD_SIZE, which init_process_group "
        "does by itself",
    )


def _join(module: ModuleType) -> tuple[int, int] | None:
    """Call `setup` on a rank that is in no group yet; return (rank, ranks), or None if there still is no group."""
    module.setup()
    if not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


# ---- OwnDDP ----


class _Net(nn.Module):
    """A small model with a buffer. It writes down the samples that it sees, by the first number of each."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.register_buffer("mean", torch.full((3,), float(seed), dtype=torch.float64))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += _ids(x)
        return self.body(x)


def _replicas(learner: Learner) -> Iterator[Finding]:
    """Judge the constructor: replicas that were built with different seeds must be equal afterwards."""
    states = learner.run(_begin, world=RANKS)
    first = states[0]
    differing = [name for name in first if any(not torch.equal(first[name], state[name]) for state in states)]

    # A missing broadcast of buffers is another mistake than one of weights.
    weights = [name for name in differing if name != "mean"]
    yield Finding(
        "all replicas begin with the same weights",
        not weights,
        f"{weights[0]} differs between ranks" if weights else "",
        "equal steps from different beginnings stay different: broadcast every parameter from rank 0",
    )
    yield Finding(
        "and with the same buffers",
        "mean" not in differing,
        "",
        "parameters() leaves out buffers, such as the running mean of BatchNorm: broadcast those of state_dict(), too",
    )


def _begin(module: ModuleType) -> dict[str, Tensor]:
    """Build OwnDDP around a model that differs on each rank, in its weights and in its buffer."""
    net = _Net(seed=dist.get_rank())
    module.OwnDDP(net)
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def _gradients(learner: Learner) -> Iterator[Finding]:
    """Judge the gradients of two steps: a mistake may only show in the second."""
    # Three ranks: a gradient that is divided by 2 would be right on two.
    found = learner.run(_backward, world=3)
    for number, name in enumerate(("the first step", "the second step")):
        # What each rank found by itself, and what it should have got from all.
        local = [steps[number][0] for steps in found]
        mean = torch.stack(local).mean(0)
        got = [steps[number][1] for steps in found]
        right = all(torch.allclose(tensor, mean, atol=1e-9) for tensor in got)
        yield Finding(
            f"gradients of {name} are the mean over ranks",
            right,
            "" if right else _name_gradient(got, local),
            "" if right else _explain_gradient(got, local),
        )
        if not right:
            return


def _backward(module: ModuleType) -> list[tuple[Tensor, Tensor]]:
    """Return, for two steps, this rank's own gradient and the one that OwnDDP has made of it."""
    net = _Net(seed=0)
    model = module.OwnDDP(copy.deepcopy(net))
    found = []

    # Each rank has another batch, so that the mean of the ranks is no rank's own gradient.
    for step in range(2):
        x = torch.arange(8.0, dtype=torch.float64).view(2, 4) / 8 + dist.get_rank() + step

        net.zero_grad()
        model.zero_grad()
        (net(x) ** 2).mean().backward()
        (model(x) ** 2).mean().backward()
        found.append((_flat(net), _flat(model)))

    return found


def _flat(model: nn.Module) -> Tensor:
    """Return all gradients as one vector; a parameter without one counts as 0."""
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients])


def _name_gradient(got: list[Tensor], local: list[Tensor]) -> str:
    """Return what the gradients are, in words, by comparing them with the usual mistakes."""
    if all(torch.allclose(a, b) for a, b in zip(got, local, strict=True)):
        return "each rank has its own gradient"
    if all(torch.allclose(tensor, torch.stack(local).sum(0)) for tensor in got):
        return f"they are the sum: {len(local)} times too large"

    # Divided by something else than the number of ranks.
    mean = torch.stack(local).mean(0)
    factor = (got[0].norm() / mean.norm()).item()
    if factor and all(torch.allclose(tensor, factor * mean) for tensor in got):
        return f"they are {factor:.3g} times the mean of {len(local)} ranks"

    # Parameter by parameter: a hook that was not waited for leaves some of them different.
    parts = [not torch.allclose(a, b) for a, b in zip(got[0].split(8), got[1].split(8), strict=False)]
    return "some differ between ranks" if any(parts) else "they are the same on all ranks, but not the mean"


def _explain_gradient(got: list[Tensor], local: list[Tensor]) -> str:
    """Return what to do about gradients that are not the mean."""
    name = _name_gradient(got, local)
    if name.startswith("each rank"):
        return "without an all-reduce each rank trains a model of its own: register a hook for every parameter"
    if name.startswith("they are the sum"):
        return "all_reduce adds: with N ranks the learning rate is in effect N times as large; divide by the world size"
    if name.endswith("ranks") and "times the mean" in name:
        return "the sum is divided by another number than that of the ranks: divide by dist.get_world_size()"
    if name.startswith("some"):
        return "a gradient was used before its all-reduce had ended, or was left out: wait for every one of them"
    return "every gradient is added up once and divided once, in every step"


# ---- make_loader ----


class _Numbered(Dataset[tuple[Tensor, int]]):
    """Samples that can be told apart by their first number, also after a worker process has read them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < SAMPLES:
            raise IndexError(index)
        return torch.tensor([index, 1.0, -index, 0.5], dtype=torch.float64) / SAMPLES, index % 3


def _ids(batch: Tensor) -> list[int]:
    """Return the numbers of the samples of a batch."""
    return [round(float(first) * SAMPLES) for first in batch[:, 0]]


def _samples(learner: Learner) -> Iterator[Finding]:
    """Judge the loader: the ranks share out the samples, and each batch has the size that was asked for."""
    read = learner.run(_load, world=RANKS)
    together = sorted(index for rank in read for index in rank[0])

    # All ranks may read everything, or each of them a wrong part: the remedy is not the same.
    orders = [rank[0] for rank in read]
    same = all(set(order) == set(orders[0]) for order in orders)
    yield Finding(
        "each sample of an epoch is read by one rank",
        together == list(range(SAMPLES)),
        f"{len(set(together))} of {SAMPLES} samples, read {len(together)} times",
        "all ranks read the same samples, so N ranks do the work of one: give the loader a DistributedSampler"
        if same
        else "give each rank its own part: DistributedSampler(dataset, num_replicas=world size, rank=this rank)",
    )

    sizes = {size for rank in read for size in rank[1]}
    yield Finding(
        "`batch` is the batch of one rank",
        sizes == {4},
        f"batches of {', '.join(map(str, sorted(sizes)))} for batch=4",
        "the effective batch is ranks x batch; the loader's batch_size is the part of one rank",
    )


def _load(module: ModuleType) -> tuple[list[int], list[int]]:
    """Return the ids that this rank reads in an epoch, and the size of each batch."""
    batches = [(_ids(x), len(labels)) for x, labels in module.make_loader(_Numbered(), 4)]
    return [index for ids, _ in batches for index in ids], [size for _, size in batches]


# ---- train ----


def _loop(learner: Learner) -> Iterator[Finding]:
    """Judge the loop: its epochs, their order, and its steps against a loop that is right."""
    found = learner.run(_train, world=RANKS)
    orders = found[0]["orders"]
    yield Finding(
        "train() takes as many epochs as it is told",
        len(orders) == 2,
        f"{len(found[0]['read'])} samples read in 2 epochs of 12",
        "go over the loader once per epoch",
    )
    if len(orders) != 2:
        return

    yield Finding(
        "the order of the samples changes with the epoch",
        orders[0] != orders[1],
        f"both epochs begin with {orders[0][:4]}" if orders[0] == orders[1] else "",
        "DistributedSampler shuffles by seed + epoch, and the epoch is 0 until you say otherwise: call "
        "loader.sampler.set_epoch(epoch) before each epoch",
    )

    # Epochs that are shuffled differently on each rank overlap.
    read = [sorted(index for rank in found for index in rank["orders"][epoch]) for epoch in range(2)]
    whole = all(epoch == list(range(SAMPLES)) for epoch in read)
    yield Finding(
        "in each epoch the ranks together read every sample once",
        whole,
        "" if whole else f"{', '.join(str(len(set(epoch))) for epoch in read)} of {SAMPLES} samples",
        "the ranks shuffled differently, so some samples were read twice and others never: set_epoch must get the same "
        "number on all ranks",
    )

    # The weights are compared with those of a correct loop, and with those of the most frequent mistake.
    right, stale, still, steps = (found[0][name] for name in ("difference", "stale", "still", "steps"))
    why = "each step: zero_grad, forward, cross_entropy, backward, optimizer.step"
    if still and steps:
        why = "optimizer.step() found no gradients: call zero_grad() before backward(), and step() after it"
    elif still:
        why = "the weights did not change: call optimizer.step() after backward()"
    elif stale < 1e-9:
        why = "the gradients of earlier steps were added to this one: call optimizer.zero_grad() in every step"

    yield Finding("a step is zero_grad, backward, optimizer.step", right < 1e-9, f"off by {right:.2g}", why)
    yield Finding(
        "the trained replicas are equal",
        all(torch.equal(found[0]["weights"], rank["weights"]) for rank in found),
        "",
        "the ranks took different steps",
    )


def _train(module: ModuleType) -> dict[str, Any]:
    """Train for two epochs, and compare the weights with those of two loops on one process."""
    dataset = _Numbered()
    net = _Net(seed=0)
    trained = copy.deepcopy(net)
    model = module.OwnDDP(trained)
    start = _weights(model)
    loader = module.make_loader(dataset, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    module.train(model, loader, optimizer, 2)

    # 12 samples on each rank are an epoch.
    read = list(trained.seen)
    orders = [read[start : start + 12] for start in range(0, len(read), 12)]

    # The same samples again, by a loop that is right, and by one that never forgets a gradient.
    everywhere: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, read)

    def again(forget: bool) -> float:
        copied = copy.deepcopy(net)
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        for position in range(0, len(read), 4):
            batch = [index for part in everywhere for index in part[position : position + 4]]
            x, y = zip(*(dataset[index] for index in batch), strict=True)

            if forget:
                optimizer.zero_grad()

            F.cross_entropy(copied(torch.stack(x)), torch.tensor(y)).backward()

            optimizer.step()

        return (_weights(copied) - _weights(model)).abs().max().item()

    return {
        "orders": orders,
        "read": read,
        "difference": again(forget=True),
        "stale": again(forget=False),
        "still": torch.equal(start, _weights(model)),
        "steps": len(steps),
        "weights": _weights(model),
    }


def _weights(model: nn.Module) -> Tensor:
    """Return all weights as one vector, a copy."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# ---- replica_difference ----


def _proof(learner: Learner) -> Iterator[Finding]:
    """Judge the function that compares replicas: for equal ones, and for ones of which one weight differs."""
    found = learner.run(_compare, world=RANKS)
    if not all(isinstance(value, (int, float)) for rank in found for value in rank["values"]):
        value = found[0]["values"][0]
        yield Finding("replica_difference returns a number", False, f"{value!r}", "return a float on every rank")
        return

    equal = [rank["values"][0] for rank in found]
    yield Finding("replica_difference is 0 for equal replicas", equal == [0.0] * RANKS, f"{equal}", "")

    # The first and the last parameter of rank 1, below and above those of rank 0.
    differing = list(zip(*(rank["values"][1:] for rank in found), strict=True))
    right = all(abs(value - 0.25) < 1e-6 for values in differing for value in values)
    wrong = next((values for values in differing if any(abs(value - 0.25) >= 1e-6 for value in values)), differing[0])
    why = "compare all parameters, and take the absolute value: a difference may have either sign"
    if any(abs(value - 0.25) < 1e-6 for value in wrong):
        why = "rank 0 compares with itself and finds 0: take the largest difference of all ranks (ReduceOp.MAX)"

    yield Finding(
        "it is the same number on every rank when one differs",
        right,
        f"{list(wrong)}, expected {[0.25] * RANKS}",
        why,
    )
    yield Finding(
        "it only compares, and changes no weight",
        not any(rank["changed"] for rank in found),
        "",
        "broadcast into a copy: a comparison that copies rank 0's weights to the others hides the mistake it looks for",
    )


def _compare(module: ModuleType) -> dict[str, Any]:
    """Compare equal replicas, and three pairs in which rank 1 has one other weight, lower or higher."""
    values, changed = [_as_number(module.replica_difference(_Net(seed=0)))], False
    for place, by in ((0, -0.25), (-1, -0.25), (-1, 0.25)):
        net = _Net(seed=0)
        if dist.get_rank() == 1:
            with torch.no_grad():
                list(net.parameters())[place].view(-1)[0] += by

        before = _weights(net)
        values.append(_as_number(module.replica_difference(net)))
        changed |= not torch.equal(before, _weights(net))

    return {"values": values, "changed": changed}


def _as_number(value: Any) -> Any:
    """Return a tensor of one number as that number."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
