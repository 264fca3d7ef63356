"""Grades exercise 6: buckets that are sent while the backward runs, and the arithmetic of exposed communication.

The calls of torch.distributed are watched while a learner's BucketedDDP runs: how many there are, when they are made,
and whether they are waited for. Times are not judged; they depend on the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.lab.grading import Finding
from lockstep.lab.learner import Learner

# Words by which a remedy is recognised; the first names it.
REMEDIES = (
    ("batch",),
    ("overlap", "bucket", "hide", "async"),
    ("compress", "powersgd", "fp16", "bf16", "half", "quanti"),
    ("accumulat", "no_sync", "less often"),
    ("network", "bandwidth", "nvlink", "infiniband", "interconnect", "link"),
    ("fewer ranks", "fewer gpus", "fewer nodes", "shard"),
)
FUNCTIONS = ("make_buckets", "BucketedDDP", "overlap", "Event", "communication_fraction", "advice")
ERRORS: dict[str, str] = {}


def grade(learner: Learner) -> Iterator[Finding]:
    """Look at the buckets, then at two ranks that use them, then at the arithmetic."""
    buckets = list(_buckets(learner.run(_made, world=1)[0]))
    yield from buckets
    if all(finding.passed for finding in buckets):
        synchronised = list(_synchronised(learner.run(_backward)))
        yield from synchronised

        # Several parameters to a bucket, of different shapes, and a number of ranks that is not 2.
        if synchronised[0].passed:
            yield _shared(learner.run(_in_shared_buckets, world=3))

    yield from _arithmetic(learner.run(_numbers, world=1)[0])


# ---- Buckets --------------------------------------------------------------------------------------------------


def _net() -> nn.Sequential:
    """Four layers of 64 x 64: 16,384 bytes each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))


def _made(module: Any) -> dict[str, Any]:
    """Return the places of the parameters in each bucket, for three sizes of buckets."""
    parameters = list(_net().parameters())
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    return {
        name: [[places[id(parameter)] for parameter in bucket] for bucket in module.make_buckets(parameters, size)]
        for name, size in {"one": 1e9, "two": 30_000, "four": 1}.items()
    }


def _buckets(found: dict[str, list[list[int]]]) -> Iterator[Finding]:
    """Judge the buckets: complete, of the right size, and in the order of the backward."""
    complete = all(sorted(p for bucket in made for p in bucket) == [0, 1, 2, 3] for made in found.values())
    yield Finding(
        "every parameter is in exactly one bucket",
        complete,
        "" if complete else f"of 4 parameters: {found}",
        "A gradient that is in no bucket is never averaged, and one in two buckets is averaged twice.",
    )

    counts = [len(made) for made in found.values()]
    yield Finding(
        "buckets of 1 GB, 30 KB and 1 byte: 1, 2 and 4 buckets for 4 layers of 16 KB",
        counts == [1, 2, 4],
        f"{counts}",
        "Close a bucket when it holds at least bucket_bytes, and begin another one.",
    )

    yield Finding(
        "the first bucket holds the last layers",
        3 in found["two"][0] and 0 not in found["two"][0],
        f"it holds layers {found['two'][0]} of 0 to 3",
        "Backward begins with the last layer. In the order of forward the first bucket is full only at the very end, "
        "and nothing can be sent before.",
    )


# ---- Two ranks ------------------------------------------------------------------------------------------------


class _Watched:
    """Stands in for the Work of an all-reduce, or for its future: notes when it was waited for."""

    def __init__(self, work: Any, watch: _AllReduceWatch, parent: _Watched | None = None):
        self.work, self.watch, self.parent = work, watch, parent
        self.waited = self.waited_in_backward = False

    def wait(self, *args: Any) -> Any:
        """Wait for the real one."""
        self._note(waited=True)
        return self.work.wait(*args)

    def is_completed(self) -> bool:
        """Ask the real one. A hook that asks until it is done waits as much as one that calls wait."""
        self._note(waited=False)
        return self.work.is_completed()

    def get_future(self) -> _Watched:
        """Return the future of the real one, which can be waited for as well."""
        return _Watched(self.work.get_future(), self.watch, parent=self)

    def _note(self, *, waited: bool) -> None:
        noted = self.parent or self
        noted.waited |= waited
        noted.waited_in_backward |= self.watch.in_backward
        self.watch.used_again |= self.watch.step_is_over

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


class _AllReduceWatch:
    """Stands in for `dist.all_reduce`: notes when it is called, and how."""

    def __init__(self, model: nn.Module):
        self.model, self.real = model, dist.all_reduce
        self.in_backward = False
        self.early = self.blocking = 0
        self.step_is_over = self.used_again = False
        self.works: list[_Watched] = []

    def all_reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the real one."""
        missing = any(parameter.grad is None for parameter in self.model.parameters())
        self.early += self.in_backward and missing
        if not kwargs.get("async_op"):
            self.blocking += 1
            return self.real(tensor, *args, **kwargs)

        self.works.append(_Watched(self.real(tensor, *args, **kwargs), self))
        return self.works[-1]


@contextmanager
def _watched(module: Any, watch: _AllReduceWatch) -> Iterator[None]:
    """Let the watch stand in for all_reduce, also where the file has imported it by name."""
    names = [name for name, value in vars(module).items() if value is watch.real]
    with ExitStack() as stack:
        stack.enter_context(mock.patch("torch.distributed.all_reduce", watch.all_reduce))
        for name in names:
            stack.enter_context(mock.patch.object(module, name, watch.all_reduce))

        yield


def _backward(module: Any) -> dict[str, Any]:
    """Do two steps, and watch the all-reduces of the second."""
    model = _net()
    sync = module.BucketedDDP(model, 1)
    inputs = torch.full((2, 64), 1.0 + dist.get_rank())
    ratios, watches = [], []
    for _ in range(2):
        model.zero_grad()
        watch = _AllReduceWatch(model)
        watches.append(watch)
        with _watched(module, watch):
            watch.in_backward = True
            model(inputs).sum().backward()
            watch.in_backward = False
            sync.finish()

        watch.step_is_over = True
        ratios.append(_ratio(model))

    return {
        "calls": len(watch.works) + watch.blocking,
        "early": watch.early,
        "blocks": watch.blocking or any(work.waited_in_backward for work in watch.works),
        "waited": all(work.waited for work in watch.works),
        "kept": watches[0].used_again,
        "ratios": ratios,
        "events": Counter(event.name for event in sync.events),
    }


def _uneven() -> nn.Sequential:
    """Six tensors of different shapes, 16,384, 256, 12,288, 192, 6,144 and 128 bytes: two buckets of 15,000."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48), nn.Linear(48, 32))


def _in_shared_buckets(module: Any) -> list[float]:
    """Do two steps with buckets that hold several parameters; return the ratios to the average."""
    model, ratios = _uneven(), []
    sync = module.BucketedDDP(model, 15_000)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((2, 64), 1.0 + dist.get_rank())).square().sum().backward()
        sync.finish()
        ratios.append(_ratio(model, _uneven(), lambda output: output.square().sum()))

    return ratios


def _shared(ranks: list[list[float]]) -> Finding:
    ratios = [ratio for rank in ranks for ratio in rank]
    why = (
        "Send a bucket when the last of its gradients is there, and move on by the size of each parameter when the "
        "flat tensor is taken apart again."
    )
    if all(abs(ratio - ratios[0]) < 1e-3 for ratio in ratios) and ratios[0]:
        why = f"On {len(ranks)} ranks they are {ratios[0]:.3g} times the average: divide by dist.get_world_size()."

    return Finding(
        f"and so they are on {len(ranks)} ranks, with several parameters of different shapes in a bucket",
        all(abs(ratio - 1) < 1e-3 for ratio in ratios),
        "",
        why,
    )


def _ratio(
    model: nn.Module, average: nn.Module | None = None, loss_of: Callable[[Tensor], Tensor] = torch.sum
) -> float:
    """Return how many times as large as the average these gradients are; 0 if they are no multiple of it."""
    average = average or _net()
    for rank in range(dist.get_world_size()):
        (loss_of(average(torch.full((2, 64), 1.0 + rank))) / dist.get_world_size()).backward()

    expected = torch.cat([parameter.grad.flatten() for parameter in average.parameters() if parameter.grad is not None])
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    ratio = (found.norm() / expected.norm()).item()
    return ratio if torch.allclose(found, expected * ratio, atol=1e-4) else 0.0


def _synchronised(ranks: list[dict[str, Any]]) -> Iterator[Finding]:
    """Judge two steps: the gradients, the calls and events, and what runs during the backward."""
    averaged = _averaged(ranks)
    yield averaged

    # The calls of the second step are judged: they say nothing if that step did not begin anew.
    if not averaged.passed and abs(ranks[0]["ratios"][0] - 1) < 1e-4:
        return

    yield from _recorded(ranks[0])
    yield from _overlapped(ranks[0])


def _averaged(ranks: list[dict[str, Any]]) -> Finding:
    world = len(ranks)
    ratios = [ratio for rank in ranks for ratio in rank["ratios"]]
    right = all(abs(ratio - 1) < 1e-4 for ratio in ratios)
    why = (
        "Gradients of the ranks must be averaged, bucket by bucket, and put back in the order in which they were taken."
    )
    if all(abs(ratio - world) < 1e-4 for ratio in ratios):
        why = f"The gradients are {world} times too large: summed over the ranks, but not divided by their number."
    elif abs(ratios[0] - 1) < 1e-4:
        why = "The first step is right, the second is not: begin each step with all gradients missing and nothing sent."

    return Finding("the gradients of two steps are the average over the ranks", right, "", why)


def _recorded(found: dict[str, Any]) -> Iterator[Finding]:
    yield Finding(
        "one all-reduce for each bucket",
        found["calls"] == 4,
        f"{found['calls']} for 4 buckets",
        "Each call costs its latency: one flat tensor for each bucket."
        if found["calls"]
        else "The grader saw no call: call it as dist.all_reduce.",
    )
    events = found["events"]
    yield Finding(
        "events name each gradient and each all-reduce",
        # Of the second step, or of both: events may be cleared between them.
        events["all_reduce"] in (4, 8) and events["gradient"] == events["all_reduce"],
        f"{events['gradient']} gradients and {events['all_reduce']} all-reduces",
        'overlap() reads the events: append Event("gradient", bytes) in the hook, and Event("all_reduce", bytes) where '
        "the bucket is sent.",
    )


def _overlapped(found: dict[str, Any]) -> Iterator[Finding]:
    yield Finding(
        "buckets are sent while the backward runs",
        found["early"] == 3,
        f"{found['early']} of 4 before the last gradient was there",
        "All but the last bucket can be sent early. Send a bucket in the hook of its last gradient, not in finish().",
    )
    yield Finding(
        "all_reduce does not block the backward",
        not found["blocks"],
        "",
        "Without async_op=True, or with wait() or a loop over is_completed() in the hook, the hook "
        "ends when the bucket has arrived; until then the "
        "backward stands still.",
    )
    yield Finding(
        "finish waits for every bucket",
        found["waited"],
        "",
        "A bucket that has not arrived may still be changing: optimizer.step() would use numbers of this rank alone.",
    )
    yield Finding(
        "the second step waits for its own buckets only",
        not found["kept"],
        "",
        "finish() still had the buckets of the first step: memory and time grow with every step. Clear the list of "
        "what was sent.",
    )


# ---- Arithmetic -----------------------------------------------------------------------------------------------


def _numbers(module: Any) -> dict[str, Any]:
    """Call the functions of the exercise with events and intervals whose answers are known."""
    event = module.Event
    layers = [event("gradient", 8), event("all_reduce", 8), event("gradient", 24), event("all_reduce", 24)]
    flat = [event("gradient", 8), event("gradient", 24), event("all_reduce", 32)]
    return {
        "overlaps": (module.overlap(layers), module.overlap(flat)),
        "fraction": module.communication_fraction([(0, 40), (35, 70)], [(35, 95), (60, 95)], 100),
        "gaps": module.communication_fraction([(0, 10), (50, 60)], [(5, 20), (30, 40), (55, 70)], 100),
        "advice": [bool(module.advice(fraction)) for fraction in (0.1, 0.19, 0.21, 0.5)],
        "words": str(module.advice(0.5)).lower(),
    }


def _arithmetic(found: dict[str, Any]) -> Iterator[Finding]:
    """Judge the arithmetic: overlap, exposed communication, and the advice."""
    layered, flat = found["overlaps"]
    yield Finding(
        "overlap: 25 % if 8 of 32 bytes are sent before the last gradient, 0 with one flat bucket",
        abs(layered - 0.25) < 1e-9 and flat == 0,
        f"{layered:.3g} and {flat:.3g}",
        "Count the bytes of the all-reduces that come before the last gradient in the list, and divide by all bytes.",
    )

    fraction = found["fraction"]
    why = "Time in which two all-reduces run counts once, and time that compute hides does not count."
    if abs(fraction - 0.6) < 1e-9:
        why = "This is all communication. Only the part that no compute hides makes the step longer."

    yield Finding("25 of 100 are exposed communication", abs(fraction - 0.25) < 1e-9, f"{100 * fraction:.0f}", why)

    gaps = found["gaps"]
    yield Finding(
        "with gaps between them, 30 of 100 are",
        abs(gaps - 0.3) < 1e-9,
        f"{100 * gaps:.0f}",
        "Communication may be exposed at several places of a step: add up all time in which something communicates and "
        "nothing computes.",
    )

    yield Finding(
        "advice warns above 20 %, and is silent below",
        found["advice"] == [False, False, True, True],
        f"at 10, 19, 21 and 50 %: {found['advice']}",
        "The rule of thumb of the course: more than 20 % of the step is a bottleneck.",
    )

    # A remedy counts if one of the words for it is there.
    named = [ways[0] for ways in REMEDIES if any(word in found["words"] for word in ways)]
    if found["advice"][3]:
        yield Finding(
            "and names three things to do",
            len(named) >= 3,
            f"it names {', '.join(named) or 'none'}",
            "A warning helps if it says what to change: for example a larger batch per rank, buckets that overlap with "
            "the backward, compressed gradients.",
        )
