"""Grades lab 9: one order of additions, so that 1, 2 and 4 ranks give the same bits.

Bits are compared, not values: a gradient of thousands of random elements makes it impossible that a wrong order of
additions agrees by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.lab.counting import CountCollectives
from lockstep.lab.graders.verified import verify_task
from lockstep.lab.grading import Finding
from lockstep.lab.learner import Learner, LearnerFailed

FUNCTIONS = ("mine", "tree_sum", "add_up", "Small")
ERRORS: dict[str, str] = {}
WORLDS = (1, 2, 4)
PARTS = 8
SIZE = 4099  # elements of a gradient: many, so that a wrong order cannot agree by chance


def grade(learner: Learner) -> Iterator[Finding]:
    """Check who owns what, the tree alone, the exchange in three worlds, and the task by `lockstep verify`."""
    yield _shares(learner.run(_mine, world=1)[0])

    tree = learner.run(_tree, world=1)[0]
    yield Finding(
        "tree_sum adds neighbours, then neighbouring pairs",
        torch.equal(tree, _tree_of(_parts())),
        "" if torch.equal(tree, _tree_of(_parts())) else _describe(tree),
        "one after the other is a chain, ((a + b) + c) + d: its shape depends on how many terms a rank has. Add "
        "parts[0] + parts[1], parts[2] + parts[3], ..., and do the same with the results until one is left",
    )

    sums = {world: learner.run(_sum, world=world) for world in WORLDS}
    yield _right_value([total for ranks in sums.values() for total, _ in ranks])
    yield _same_on_all_ranks(sums)
    yield _same_in_all_worlds({world: ranks[0][0] for world, ranks in sums.items()})
    yield _in_a_group(learner)
    yield _traffic({world: ranks[0][1] for world, ranks in sums.items()})
    yield verify_task(learner.path, "Small", exact=True)


# ---- called on the ranks, with the learner's file -----------------------------------------------------------


def _mine(module: ModuleType) -> dict[int, list[list[int]]]:
    """Return the micro-batches of each rank, by number of ranks."""
    return {world: [list(module.mine(rank, world)) for rank in range(world)] for world in WORLDS}


def _tree(module: ModuleType) -> Tensor:
    return module.tree_sum(_parts())


def _sum(module: ModuleType) -> tuple[Tensor, int]:
    """Return the sum as this rank has it, and the bytes of the collectives."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = _parts()
    with CountCollectives() as counted:
        total = module.add_up([parts[index] for index in module.mine(rank, world)])

    return total, counted.bytes()


def _sum_alone(module: ModuleType) -> Tensor:
    """Return the sum over a group of this rank alone."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return module.add_up(_parts(), groups[dist.get_rank()])


# ---- judged here --------------------------------------------------------------------------------------------


def _parts() -> list[Tensor]:
    """Return the gradients of the micro-batches, the same on every rank."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(SIZE, generator=generator) for _ in range(PARTS)]


def _tree_of(parts: list[Tensor]) -> Tensor:
    """Add in the shape of a tree: the sum of the first half plus that of the second."""
    if len(parts) == 1:
        return parts[0]

    half = len(parts) // 2
    return _tree_of(parts[:half]) + _tree_of(parts[half:])


def _shares(shares: dict[int, list[list[int]]]) -> Finding:
    """Judge who owns which micro-batches."""
    statement = "mine gives each rank a whole subtree: consecutive micro-batches, as many as every other rank"
    for world, owned in shares.items():
        count = PARTS // world
        wanted = [list(range(rank * count, (rank + 1) * count)) for rank in range(world)]
        if owned != wanted:
            return Finding(
                statement,
                False,
                f"on {world} ranks: {owned}",
                "a rank can add up alone only what is next to each other in the tree. With every second micro-batch, "
                "or with unequal shares, no addition of the tree is one rank's own",
            )

    return Finding(statement, True)


def _right_value(totals: list[Tensor]) -> Finding:
    """Judge the value, against float64. Whether the bits are right is judged next."""
    right = torch.stack(_parts()).double().sum(0)
    off = max(float((total.double() - right).abs().max() / right.abs().max()) for total in totals)
    return Finding(
        "add_up returns the sum of all micro-batches of all ranks",
        off < 1e-6,
        f"error against float64 {off:.1e}",
        "a sum that lacks a rank, counts one twice or is divided too early is another gradient. Divide once, after all "
        "additions, by the number of samples of the step",
    )


def _same_on_all_ranks(sums: dict[int, list[tuple[Tensor, int]]]) -> Finding:
    """Judge that ranks agree."""
    apart = [world for world, ranks in sums.items() if any(not torch.equal(total, ranks[0][0]) for total, _ in ranks)]
    return Finding(
        "all ranks of a world have the same bits",
        not apart,
        f"not on {' and '.join(map(str, apart))} ranks" if apart else "",
        "each rank must add the roots in the order of the ranks, not its own first: replicas whose gradients differ in "
        "the last bit drift apart",
    )


def _in_a_group(learner: Learner) -> Finding:
    """Judge that a sum over a group is not one over all ranks."""
    statement = "add_up adds over the group that it is given"
    why = "pass group on to every call: get_world_size(group), all_gather(..., group=group)"
    try:
        totals = learner.run(_sum_alone)
    except LearnerFailed as failure:
        return Finding(statement, False, str(failure), why)

    right = all(torch.equal(total, _tree_of(_parts())) for total in totals)
    return Finding(statement, right, "" if right else "a rank alone in its group has another sum", why)


def _same_in_all_worlds(sums: dict[int, Tensor]) -> Finding:
    """Judge that the number of ranks does not change a bit."""
    apart = {world: int((total != sums[1]).sum()) for world, total in sums.items()}
    worst = max(apart, key=lambda world: apart[world])
    return Finding(
        "1, 2 and 4 ranks give the same bits",
        not apart[worst],
        f"{apart[worst]} of {SIZE} elements differ on {worst} ranks" if apart[worst] else "",
        "the brackets still depend on the number of ranks. An all-reduce adds in an order of its own: gather the roots "
        "instead, and add them with tree_sum; and add this rank's own parts with tree_sum, too",
    )


def _traffic(bytes_of: dict[int, int]) -> Finding:
    """Judge the bytes, in copies of a gradient."""
    copies = {world: bytes_of[world] / (4 * SIZE) for world in WORLDS}
    wasteful = [world for world in WORLDS if copies[world] > world]
    return Finding(
        "one tensor per rank is exchanged, the root of its subtree",
        not wasteful,
        ", ".join(f"{copies[world]:g} on {world} ranks" for world in WORLDS),
        "gathering every micro-batch is right to the bit, and costs MICRO_BATCHES times the gradient in bytes",
    )


def _describe(total: Tensor) -> str:
    """Return what is wrong with a sum that is not the tree's."""
    chain = _parts()[0].clone()

    # The most frequent mistake: one after the other.
    for part in _parts()[1:]:
        chain += part

    if torch.equal(total, chain):
        return "it adds one after the other"
    return f"{int((total != _tree_of(_parts())).sum())} of {SIZE} elements have other bits"
