"""Grades lab 8: a run that is killed and goes on with another number of ranks trains every sample exactly once.

A rank is killed in the middle of an epoch, and the run goes on with other numbers of ranks. Every step writes the ids
of its samples to a file, and the ids of all attempts together must be each epoch once.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.lab.graders.torn import half_of_a_save
from lockstep.lab.graders.verified import verify_task
from lockstep.lab.grading import Finding
from lockstep.lab.learner import Learner, LearnerFailed

FUNCTIONS = ("Order", "my_ids", "save", "load", "train", "Points")
ERRORS: dict[str, str] = {}
SAMPLES, BATCH, STEPS, KILLED_AT = 96, 12, 16, 5
EPOCH = SAMPLES // BATCH  # steps


def grade(learner: Learner) -> Iterator[Finding]:
    """Check the order, the shares of the ranks, a kill and a resume in three worlds, and the task by `verify`."""
    found = learner.run(_order, world=1)[0]
    order = list(_judge_order(found))
    yield from order

    # An order that depends on what was asked before gives every world other samples.
    if all(finding.passed for finding in order):
        yield from _judge_shares(learner.run(_shares, world=1)[0])

    with tempfile.TemporaryDirectory() as folder:
        # A run that is killed may leave a torn checkpoint as well: what comes next needs saves that are whole.
        whole = _whole(learner.run(_torn, Path(folder) / "torn", world=1)[0])
        yield whole
        if not whole.passed:
            return

        straight = learner.run(_train, Path(folder) / "straight", 0, STEPS, None)[0]
        kill(learner, Path(folder) / "same")
        again = learner.run(_train, Path(folder) / "same", 1, STEPS, None)[0]
        yield _same_bits(straight, again)

        kill(learner, Path(folder) / "other")
        learner.run(_train, Path(folder) / "other", 1, 10, None, world=5)
        other = learner.run(_train, Path(folder) / "other", 2, STEPS, None, world=1)[0]
        yield _exactly_once(Path(folder) / "other")
        yield _close(straight, other)

    yield verify_task(learner.path, "Points", exact=True)


def kill(learner: Learner, folder: Path) -> None:
    """Train on two ranks until one is killed."""
    try:
        learner.run(_train, folder, 0, STEPS, KILLED_AT)
    except LearnerFailed as failure:
        if "died" not in str(failure):
            raise


# ---- called on the ranks, with the learner's file -----------------------------------------------------------


def _order(module: ModuleType) -> dict[str, list[int]]:
    """Ask for an epoch as a whole, in pieces, twice, and for the next one."""
    order = module.Order(SAMPLES, seed=0)
    pieces = [index for start in range(0, SAMPLES, 7) for index in order.ids(0, start, min(start + 7, SAMPLES))]
    backwards = module.Order(SAMPLES, seed=0).ids(0, 50, SAMPLES)
    asked = {
        "whole": order.ids(0, 0, SAMPLES),
        "pieces": pieces,
        "end first": backwards,
        "next epoch": order.ids(1, 0, SAMPLES),
        "other seed": module.Order(SAMPLES, seed=1).ids(0, 0, SAMPLES),
    }
    return {name: [int(index) for index in ids] for name, ids in asked.items()}


def _shares(module: ModuleType) -> dict[int, list[list[list[int]]]]:
    """Return world -> step -> rank -> ids, for the first steps and one of the second epoch."""
    order = module.Order(SAMPLES, seed=0)
    return {
        world: [
            [[int(i) for i in module.my_ids(order, step, rank, world)] for rank in range(world)] for step in (0, 1, 9)
        ]
        for world in (1, 2, 3, 5)
    }


def _torn(module: ModuleType, folder: Path) -> str:
    """Save, and break a second save in the middle. Return what is wrong with the checkpoint then."""
    folder.mkdir()
    path = folder / "checkpoint.pt"
    model = module.make_model()
    optimizer = module.make_optimizer(model)
    module.save(path, 2, model, optimizer)
    with mock.patch("torch.save", half_of_a_save):
        try:
            module.save(path, 4, model, optimizer)
        except KeyboardInterrupt:
            pass

    try:
        step = module.load(path, model, optimizer)
    except Exception as error:  # the learner's code
        return f"{type(error).__name__} in load"

    return "" if step in (2, 4) else f"load gives step {step}"


def _train(module: ModuleType, folder: Path, attempt: int, until: int, kill_at: int | None) -> list[Tensor]:
    """Train up to a step, and note which samples each step gets. With `kill_at`, rank 1 kills itself in that step."""
    rank = dist.get_rank()
    folder.mkdir(exist_ok=True)

    def on_step(step: int, ids: list[int]) -> None:
        with (folder / f"ids-{rank}.jsonl").open("a") as file:
            file.write(json.dumps([attempt, step, [int(index) for index in ids]]) + "\n")

        if step == kill_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return [weight.detach() for weight in module.train(folder / "checkpoint.pt", until, on_step)]


# ---- judged here --------------------------------------------------------------------------------------------


def _judge_order(found: dict[str, list[int]]) -> Iterator[Finding]:
    """Judge the order of samples: complete, a pure function, and different in each epoch."""
    yield Finding(
        "an epoch has every sample once",
        sorted(found["whole"]) == list(range(SAMPLES)),
        f"{len(set(found['whole']))} different ids of {SAMPLES}",
        "with replacement (randint, choices) about a third of the samples never comes in an epoch",
    )

    pure = found["pieces"] == found["whole"] and found["end first"] == found["whole"][50:]
    yield Finding(
        "ids is a pure function: the same places give the same samples, in pieces and in any sequence",
        pure,
        "" if pure else "an epoch in pieces, or its end asked for first, has other samples",
        "a generator that is kept between calls knows what was asked before. A resumed process has asked nothing: make "
        "the generator anew from (seed, epoch) in every call",
    )

    yield Finding(
        "another epoch and another seed have another order",
        found["next epoch"] != found["whole"] and found["other seed"] != found["whole"],
        "",
        "the epoch belongs into the seed of the shuffle: otherwise every epoch shows the same batches (pitfall 1)",
    )


def _judge_shares(shares: dict[int, list[list[list[int]]]]) -> Iterator[Finding]:
    """Judge the shares: the ranks of a step together have the samples of one rank alone."""
    wanted = [sorted(index for ids in step for index in ids) for step in shares[1]]
    for world, steps in shares.items():
        for number, (step, right) in enumerate(zip(steps, wanted, strict=True)):
            together = sorted(index for ids in step for index in ids)
            if together != right or len(together) != BATCH:
                yield Finding(
                    "the ranks of a step have the same 12 samples together, on any number of ranks",
                    False,
                    f"{world} ranks have {_counted(together)} in step {number}",
                    "the batch of a step must not depend on the number of ranks. Take the 12 places of the step first, "
                    "then cut them: rank * 12 // world to (rank + 1) * 12 // world, which leaves no rest",
                )
                return

    yield Finding("the ranks of a step have the same 12 samples together, on any number of ranks", True)


def _counted(together: list[int]) -> str:
    """Return what is wrong with the samples of all ranks, in words."""
    if len(together) != BATCH:
        return f"{len(together)} samples"
    if len(set(together)) != BATCH:
        return f"{BATCH} samples, {len(set(together))} different,"
    return "other samples than 1 rank"


def _whole(problem: str) -> Finding:
    """Judge a save that dies in the middle."""
    return Finding(
        "a save that dies in the middle leaves the old checkpoint",
        not problem,
        problem,
        "torch.save began by emptying the only checkpoint. Write to another name, and rename at the end: path.replace "
        "puts the new file in its place at once, or not at all",
    )


def _same_bits(straight: list[Tensor], again: list[Tensor]) -> Finding:
    """Judge a resume on the same number of ranks, to the bit."""
    different = sum(not torch.equal(a, b) for a, b in zip(straight, again, strict=True))
    return Finding(
        "2 ranks, one killed, 2 ranks: the same bits as without the kill",
        not different,
        f"{different} of {len(straight)} tensors differ" if different else "",
        "something that the next step depends on is not in the checkpoint (the momentum of the optimizer?), or the "
        "step that was saved is not the number of steps done, so one step is repeated or left out",
    )


def _exactly_once(folder: Path) -> Finding:
    """Judge which samples were trained, on changing numbers of ranks."""
    lines = [json.loads(line) for path in folder.glob("ids-*.jsonl") for line in path.read_text().splitlines()]

    # A step that was repeated after the kill counts once, in its last attempt.
    last: dict[int, int] = {}
    for attempt, step, _ in lines:
        last[step] = max(attempt, last.get(step, 0))

    epochs = [Counter[int]() for _ in range(STEPS // EPOCH)]
    for attempt, step, ids in lines:
        if attempt == last[step]:
            epochs[step // EPOCH].update(ids)

    missing = sum(index not in counts for counts in epochs for index in range(SAMPLES))
    twice = sum(count > 1 for counts in epochs for count in counts.values())
    return Finding(
        "2 ranks, one killed, 5 ranks, 1 rank: every sample once in each epoch",
        not missing and not twice,
        f"{missing} missed, {twice} repeated" if missing or twice else f"{len(lines)} lines of ids compared",
        "where the run goes on must follow from the number of steps done, and nothing else",
    )


def _close(straight: list[Tensor], other: list[Tensor]) -> Finding:
    """Judge a resume on other numbers of ranks. Sums in another order round differently."""
    off = max(float((a - b).abs().max()) for a, b in zip(straight, other, strict=True))
    return Finding(
        "on other numbers of ranks the weights are the same up to rounding",
        off < 1e-5,
        f"largest difference {off:.1e}",
        "a gradient that is averaged over ranks with unequal shares is a mean of means: let every rank sum, all-reduce "
        "the sums, and divide once by the samples of the step",
    )
