"""Grades exercise 5: samples, checkpoints and resuming on any number of ranks, and the fit of a link.

A run must train the same on one rank, on two, and with an interruption. Where that fails, the reason is one of the
parts that are judged before: which samples a step has, and what a checkpoint holds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.lab.graders.torn import half_of_a_save
from lockstep.lab.grading import Finding
from lockstep.lab.learner import Learner

FUNCTIONS = ("samples_of", "save", "load", "train", "fit_line")
ERRORS: dict[str, str] = {}
GLOBAL_BATCH = 12  # of the starter file


def grade(learner: Learner) -> Iterator[Finding]:
    """Look at samples, then at checkpoints, then at a run that is interrupted; stop where something is wrong."""
    samples = [*_samples(learner.run(_all_samples, world=1)[0]), *_fits(learner.run(_fitted, world=1)[0])]
    yield from samples
    if not all(finding.passed for finding in samples):
        return

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        checkpoints = list(_alone(learner.run(_checkpoints_alone, place / "alone", world=1)[0]))
        yield from checkpoints
        if not all(finding.passed for finding in checkpoints):
            return

        writes = _writes(learner.run(_counted_writes, place))
        yield writes
        if not writes.passed:
            return

        loads = _loads(learner.run(_loaded, place / "together"))
        yield loads
        if not loads.passed:
            return

        # The same six steps: on one rank, on two, on five with unequal shares, and on two with an interruption.
        one = learner.run(_trained, place / "one", [6], world=1)[0]
        two = learner.run(_trained, place / "two", [6])[0]
        five = learner.run(_trained, place / "five", [6], world=5)[0]
        resumed = learner.run(_trained, place / "resumed", [5, 6])[0]
        yield from _runs(one, two, five, resumed)


# ---- Samples --------------------------------------------------------------------------------------------------


def _all_samples(module: Any) -> dict[int, list[list[int]]]:
    """By number of ranks: the samples of all ranks in each of three steps."""
    found: dict[int, list[list[int]]] = {}
    for world in (1, 2, 3, 5):
        found[world] = []
        for step in range(3):
            found[world].append([index for rank in range(world) for index in module.samples_of(step, rank, world)])

    return found


def _samples(found: dict[int, list[list[int]]]) -> Iterator[Finding]:
    """Judge which samples a step has: how many, which, and on which rank."""
    counts = {world: len(steps[0]) for world, steps in found.items()}
    yield Finding(
        f"a step on one rank has GLOBAL_BATCH = {GLOBAL_BATCH} samples",
        counts[1] == GLOBAL_BATCH,
        f"{counts[1]}",
        "The learning rate was chosen for the global batch, and the loss is divided by it.",
    )

    again = sorted(set(found[1][0]) & set(found[1][1]) | set(found[1][1]) & set(found[1][2]))
    yield Finding(
        "the next step has other samples",
        not again,
        f"samples {again[:3]} come again" if again else "",
        "A run that trains the same few samples in every step never sees the others: begin at step * GLOBAL_BATCH.",
    )
    yield Finding(
        "a step has as many samples on 5 ranks as on 1",
        len(set(counts.values())) == 1,
        ", ".join(f"{count} on {world}" for world, count in counts.items()),
        "When a node is lost the batch must stay: the learning rate was chosen for it. Divide one global batch by the "
        "number of ranks, instead of giving every rank a batch of its own.",
    )

    twice = next((world for world, steps in found.items() if any(len(set(s)) < len(s) for s in steps)), None)
    yield Finding(
        "no two ranks have the same sample in a step",
        twice is None,
        "" if twice is None else f"on {twice} ranks",
        "A sample that two ranks train counts twice, and another one is left out.",
    )

    # The order within a step may differ: a sum does not depend on it, up to rounding.
    same = all([sorted(s) for s in steps] == [sorted(s) for s in found[1]] for steps in found.values())
    yield Finding(
        "each step has the same samples on any number of ranks",
        same,
        "",
        "A run that is resumed on fewer ranks must continue where the other stopped: the samples of a step may depend "
        "on the step, but not on the number of ranks.",
    )


# ---- Checkpoints ----------------------------------------------------------------------------------------------


def _net(seed: int) -> tuple[nn.Linear, torch.optim.SGD]:
    """Return a model and an optimizer with momentum, after one step; other seeds give other values."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    # A step fills the momentum, which a checkpoint must hold as well.
    (model(torch.ones(1, 4)).sum() * seed).backward()
    optimizer.step()
    return model, optimizer


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[Tensor]]:
    """Return copies of the weights and of the momentum."""
    momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
    return [parameter.detach().clone() for parameter in model.parameters()], [tensor.clone() for tensor in momentum]


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether two lists of tensors are equal, to the bit."""
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def _checkpoints_alone(module: Any, place: Path) -> dict[str, Any]:
    """Save on one rank; break the second save in the middle; load."""
    place.mkdir()
    model, optimizer = _net(1)
    module.save(place, 3, model, optimizer)
    found: dict[str, Any] = {"names": sorted(path.name for path in place.iterdir())}

    with mock.patch("torch.save", half_of_a_save):
        try:
            module.save(place, 6, model, optimizer)
        except KeyboardInterrupt:
            pass

    found["torn"] = [path.name for path in place.glob("*.pt") if not _readable(path)]

    # Now a torn file is there in any case, as an unlucky disk leaves it.
    good = next((path for path in sorted(place.glob("*.pt")) if _readable(path)), None)
    if good is not None:
        (place / "step-000009.pt").write_bytes(good.read_bytes()[:200])

    other, other_optimizer = _net(2)
    try:
        found["step"] = module.load(place, other, other_optimizer)
    except Exception as error:  # the learner's code
        found["step"] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"

    weights, momentum = _values(model, optimizer)
    loaded, loaded_momentum = _values(other, other_optimizer)
    found["weights"], found["momentum"] = _same(weights, loaded), _same(momentum, loaded_momentum)
    return found


def _readable(path: Path) -> bool:
    try:
        torch.load(path)
    except Exception:  # torch raises several kinds for a torn file
        return False

    return True


def _counted_writes(module: Any, place: Path) -> int:
    """Save on two ranks, each in a folder of its own, and count what this rank writes."""
    mine = place / f"rank-{dist.get_rank()}"
    mine.mkdir()
    with mock.patch("torch.save", side_effect=torch.save) as saved:
        module.save(mine, 3, *_net(1))

    return saved.call_count


def _loaded(module: Any, place: Path) -> tuple[int, bool]:
    """Save and load on two ranks; return the step, and whether this rank has the weights."""
    place.mkdir(exist_ok=True)
    model, optimizer = _net(1)
    module.save(place, 3, model, optimizer)

    dist.barrier()
    other, other_optimizer = _net(2 + dist.get_rank())
    step = module.load(place, other, other_optimizer)
    return step, _same(_values(other, other_optimizer)[0], _values(model, optimizer)[0])


def _alone(found: dict[str, Any]) -> Iterator[Finding]:
    """Judge the name of a checkpoint, a save that is interrupted, and a load that meets a torn file."""
    named = "step-000003.pt" in found["names"]
    yield Finding(
        "save writes step-000003.pt for step 3",
        named,
        "" if named else f"files: {', '.join(found['names']) or 'none'}",
        "The newest checkpoint is found by its name. Without leading zeros step-9 sorts after step-12, and a resumed "
        "run goes back.",
    )
    if not named:
        return

    yield Finding(
        "a save that is interrupted leaves no torn checkpoint behind",
        not found["torn"],
        f"torn: {', '.join(found['torn'])}" if found["torn"] else "",
        "Write to another name, flush and fsync, and rename at the end: the name appears only with the whole file.",
    )

    skipped = found["step"] == 3
    yield Finding(
        "load skips a checkpoint that cannot be read, and takes the one before it",
        skipped,
        "" if skipped else f"the last whole checkpoint is of step 3, and load gave {found['step']}",
        "Otherwise one bad file on the disk ends the job, though an older one would do.",
    )
    if not skipped:
        return

    yield Finding(
        "it loads the weights", found["weights"], "", "model.load_state_dict is missing, or loads the wrong file."
    )
    yield Finding(
        "and the momentum of the optimizer",
        found["momentum"],
        "",
        "Without the optimizer's state the first steps after a resume are others, and nothing says so.",
    )


def _writes(counts: list[int]) -> Finding:
    """Judge who writes. Ranks that all write tear each other's file."""
    return Finding(
        "one rank writes the checkpoint",
        sum(counts) == 1,
        f"writes by rank: {counts}",
        "Two ranks that write the same file at the same time tear it. All ranks have the same state: rank 0 is enough.",
    )


def _loads(found: list[tuple[int, bool]]) -> Finding:
    """Judge that a load restores every rank."""
    steps, right = zip(*found, strict=True)
    return Finding(
        "after load all ranks are at the same step, with the same weights",
        set(steps) == {3} and all(right),
        f"steps {list(steps)}",
        "Every rank must load: one that does not begins at step 0, with its first weights.",
    )


# ---- Runs -----------------------------------------------------------------------------------------------------


def _trained(module: Any, place: Path, stops: list[int]) -> Tensor:
    """Train up to each stop in turn, in a new process group but the same folder, and return the weights."""
    place.mkdir(exist_ok=True)
    weights = torch.empty(0)
    for stop in stops:
        weights = module.train(place, stop)

    return weights


def _runs(one: Tensor, two: Tensor, five: Tensor, resumed: Tensor) -> Iterator[Finding]:
    """Judge whole runs: one rank against two and five, and two against two with an interruption."""
    apart = (one - two).abs().max().item()
    yield Finding(
        "two ranks train what one rank trains",
        apart < 1e-6,
        f"weights differ by {apart:.2g}",
        "The gradient of the step is the sum over all samples of all ranks, divided once by the global batch. Check "
        "that gradients are summed over the ranks, and what the loss is divided by.",
    )

    # What is wrong on two ranks would only show again on five.
    if apart < 1e-6:
        apart = (one - five).abs().max().item()
        yield Finding(
            "and so do five ranks, which have 2 or 3 samples each",
            apart < 1e-6,
            f"weights differ by {apart:.2g}",
            "The mean of the ranks' means counts a sample of a small share more than others. Sum the losses of a rank "
            "(reduction='sum'), divide by GLOBAL_BATCH, and add up the gradients.",
        )

    apart = (two - resumed).abs().max().item()
    yield Finding(
        "a run that is resumed ends with the same bits",
        bool(torch.equal(two, resumed)),
        f"weights differ by {apart:.2g}",
        "The checkpoint must name the first step that is not in it yet, and hold all that the next step depends on. "
        "One step more or less trains some samples twice or never.",
    )


# ---- The link -------------------------------------------------------------------------------------------------


SIZES = [1024 * 4**power for power in range(7)]


def _fitted(module: Any) -> tuple[tuple[float, float], tuple[float, float]]:
    """Fit a line to the times of a link with 50 us of latency and 1 GB/s: exact ones, and ones that are 5 % off."""
    exact = [5e-5 + 1e-9 * size for size in SIZES]
    noisy = [seconds * (1.05 if index % 2 else 0.95) for index, seconds in enumerate(exact)]
    return module.fit_line(SIZES, exact), module.fit_line(SIZES, noisy)


def _fits(found: tuple[tuple[float, float], tuple[float, float]]) -> Iterator[Finding]:
    """Judge the fit. With absolute errors, the largest message would decide everything."""
    (a, b), (noisy_a, noisy_b) = found
    yield Finding(
        "fit_line finds 50 us and 1000 MB/s in exact data",
        abs(a / 5e-5 - 1) < 0.01 and abs(b / 1e-9 - 1) < 0.01,
        f"a = {a * 1e6:.3g} us, b = {b * 1e9:.3g} ns per byte",
        "t = a + b n: a is the time of an empty message, b the time of one more byte.",
    )
    yield Finding(
        "and about the same if each time is 5 % off",
        abs(noisy_a / 5e-5 - 1) < 0.25 and abs(noisy_b / 1e-9 - 1) < 0.25,
        f"a = {noisy_a * 1e6:.3g} us, b = {noisy_b * 1e9:.3g} ns per byte",
        "5 % of the largest time is more than the whole latency, so the largest message decides alone. Divide each "
        "equation by its time: then all sizes count the same.",
    )
