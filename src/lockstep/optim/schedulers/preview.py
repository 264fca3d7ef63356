"""The rates that a torch scheduler will set, computed before the first step on a copy of it.

A scheduler that counts epochs, or one that ends before the run does, is found here and not in the middle of a run. The
copy has an optimizer without parameters. Only torch's own classes are copied, with a user's functions if they do no
more than arithmetic: any other code may have effects when it is called.
"""

from __future__ import annotations

import builtins
import copy
import dis
import functools
import inspect
import math
import types
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from lockstep.runtime.seeds import preserve_rng

# torch computes the rate of any step of these directly.
DIRECT = frozenset(
    (
        *(lr_scheduler.LambdaLR, lr_scheduler.StepLR, lr_scheduler.MultiStepLR, lr_scheduler.ConstantLR),
        *(lr_scheduler.LinearLR, lr_scheduler.ExponentialLR, lr_scheduler.PolynomialLR, lr_scheduler.OneCycleLR),
        *(lr_scheduler.CosineAnnealingLR, lr_scheduler.CosineAnnealingWarmRestarts, lr_scheduler.CyclicLR),
    )
)

# These must go through all steps, which takes about 20 us for each.
STEPWISE = frozenset((lr_scheduler.MultiplicativeLR, lr_scheduler.ChainedScheduler, SWALR))
MOST_STEPS = 1000

# A function that is called in advance may use numbers and these, and nothing that could change.
PLAIN = frozenset((bool, int, float, str, type(None)))
ARITHMETIC = (math, min, max, abs, pow, round, int, float)

HALVES = 16  # how many points are computed in each half of the run


class Failure(NamedTuple):
    """A scheduler raises an error before the run ends."""

    step: int  # the first index of a step whose rate it cannot set
    error: Exception


class Rates(NamedTuple):
    """The rates from the first step to the last one.

    The landmarks are those of the first parameter group. The halves are those of the group that keeps the largest share
    of its peak in the second half: a group may be frozen on purpose.
    """

    landmarks: dict[str, float]
    first_half: list[float]
    second_half: list[float]


class Preview:
    """Copies of the schedulers of an optimizer, as the user's code has made them."""

    def __init__(self, schedulers: Sequence[LRScheduler], optimizer: torch.optim.Optimizer):
        """Raise an exception of any kind if they cannot be copied. Ask `can_be_previewed` first."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._optimizer = types.SimpleNamespace(
            param_groups=copy.deepcopy(groups), defaults=dict(optimizer.defaults), step=None
        )
        self._schedulers = copy.deepcopy(list(schedulers), {id(optimizer): self._optimizer})

        # Two schedulers of one optimizer change its rate one after the other.
        self._is_direct = len(self._schedulers) == 1 and _is_direct(self._schedulers[0])

    def look(self, steps: int) -> Rates | Failure | None:
        """Return the rates of a run of `steps` steps. None if they cannot be computed in a few milliseconds."""
        last = steps - 1
        if last < 1 or not (self._is_direct or last <= MOST_STEPS):
            return None

        half = steps // 2
        landmarks = {"start": 0, "quarter": steps // 4, "half": half, "end": last}
        first_half = [half * point // HALVES for point in range(HALVES)]
        second_half = [half + (last - half) * point // HALVES for point in range(HALVES + 1)]
        wanted = sorted({*landmarks.values(), *first_half, *second_half})

        with preserve_rng(torch.device("cpu")), warnings.catch_warnings():
            # torch warns of a step without a step of the optimizer, and of steps by their number.
            warnings.simplefilter("ignore")
            found = self._rates(wanted)
            if isinstance(found, Failure):
                # A scheduler that cannot even make its first step needs something that the copy lacks.
                return None if isinstance(self._rates([0, 1]), Failure) else self._first(found)

        # The rates of each parameter group, in both halves of the run.
        halves = [
            ([found[step][group] for step in first_half], [found[step][group] for step in second_half])
            for group in range(len(found[0]))
        ]
        return Rates(
            {name: found[step][0] for name, step in landmarks.items()},
            *max(halves, key=lambda half: max(half[1]) / (max(*half[0], *half[1]) or 1.0)),
        )

    def _rates(self, wanted: Sequence[int]) -> dict[int, list[float]] | Failure:
        """Return the rates of all groups in these steps, in ascending order, by step."""
        optimizer, schedulers = copy.deepcopy((self._optimizer, self._schedulers))
        rates: dict[int, list[float]] = {}
        done = 0

        for step in wanted:
            # Stepwise, all steps up to this one; otherwise only this one.
            for number in range(step if self._is_direct and step else done + 1, step + 1):
                try:
                    for scheduler in schedulers:
                        self._step(scheduler, number)
                except Exception as error:  # of the user's function, or of a check in torch
                    return Failure(number, error)

            done = step
            rates[step] = [float(group["lr"]) for group in optimizer.param_groups]
        return rates

    def _step(self, scheduler: Any, number: int) -> None:
        """Bring a scheduler to step `number`: at once if it is direct, or else from the step before."""
        if self._is_direct:
            _step_to(scheduler, number)
        else:
            scheduler.step()

    def _first(self, failure: Failure) -> Failure:
        """Return the first step that fails. Stepwise, it is known already."""
        if not self._is_direct:
            return failure

        # By bisection: step 1 works, and every step after the first failure fails, too.
        steps = range(2, failure.step)
        found = self._rates([2 + bisect_left(steps, True, key=lambda step: isinstance(self._rates([step]), Failure))])
        return found if isinstance(found, Failure) else failure


def can_be_previewed(schedulers: Sequence[LRScheduler]) -> bool:
    """Return whether copies of these schedulers, which begin at step 0, can be stepped without an effect elsewhere."""
    known = DIRECT | STEPWISE | {lr_scheduler.SequentialLR}
    if not all(type(scheduler) in known for scheduler in _with_inner(schedulers)):
        return False

    begins = all(getattr(scheduler, "last_epoch", 0) == 0 for scheduler in schedulers)
    return begins and all(map(_is_arithmetic, _functions(schedulers)))


def _with_inner(schedulers: Sequence[Any]) -> Iterator[Any]:
    """Yield the schedulers, and those inside them."""
    for scheduler in schedulers:
        yield scheduler
        yield from _with_inner(getattr(scheduler, "_schedulers", ()))


def _functions(schedulers: Sequence[LRScheduler]) -> list[Any]:
    """Return the user's functions that the schedulers call."""
    found: list[Any] = []
    for scheduler in _with_inner(schedulers):
        found += [*getattr(scheduler, "lr_lambdas", ()), getattr(scheduler, "_scale_fn_custom", None)]

    return [function for function in found if function is not None]


def _is_arithmetic(function: Any) -> bool:
    """Return whether a user's function does nothing but arithmetic with what cannot change.

    An object with `__call__`, a method and the `__getitem__` of a list hold something that may change.
    """
    if type(function) is functools.partial:
        given = (*function.args, *function.keywords.values())
        return all(map(_is_constant, given)) and _is_arithmetic(function.func)

    if not isinstance(function, types.FunctionType):
        return _is_constant(function)

    code = function.__code__
    try:
        held = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a variable that has no value yet
        return False

    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    makes_functions = any(isinstance(constant, types.CodeType) for constant in code.co_consts)
    if makes_functions or code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return False

    names = vars(builtins) | function.__globals__
    return all(map(_is_constant, held)) and all(_is_harmless(part, names) for part in dis.get_instructions(code))


def _is_harmless(instruction: dis.Instruction, names: dict[str, Any]) -> bool:
    """Return whether an instruction reads no name but those of constants and of `math`, and changes none."""
    if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        return instruction.argval in names and _is_constant(names[instruction.argval])

    if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return instruction.argval in vars(math) and not instruction.argval.startswith("_")

    return instruction.opcode not in dis.hasname and instruction.opname not in ("STORE_DEREF", "DELETE_DEREF")


def _is_constant(value: Any) -> bool:
    """Return whether a value is a number or another constant, a tuple of them, `math`, or one of its functions."""
    if type(value) is tuple:
        return all(map(_is_constant, value))

    of_math = isinstance(value, types.BuiltinFunctionType) and getattr(math, value.__name__, None) is value
    return type(value) in PLAIN or of_math or any(value is allowed for allowed in ARITHMETIC)


def _is_direct(scheduler: Any) -> bool:
    if type(scheduler) is lr_scheduler.SequentialLR:
        return all(map(_is_direct, scheduler._schedulers))

    return type(scheduler) in DIRECT


def _step_to(scheduler: Any, step: int) -> None:
    """Set the rate that a scheduler has after this many steps."""
    if type(scheduler) is not lr_scheduler.SequentialLR:
        scheduler.step(step)
        return

    # The steps of the one that is in force count from where it began.
    number = bisect_right(scheduler._milestones, step)
    begin = scheduler._milestones[number - 1] if number else 0
    _step_to(scheduler._schedulers[number], step - begin)


# ---- what looks wrong ----

FALLEN = 1e-6  # of the peak: a rate that trains nothing any more

# The argument of a scheduler that says after how many steps it ends or repeats.
LENGTHS: dict[type, str] = {
    lr_scheduler.CosineAnnealingLR: "T_max",
    lr_scheduler.MultiStepLR: "milestones",
    lr_scheduler.PolynomialLR: "total_iters",
    lr_scheduler.StepLR: "step_size",
    SWALR: "anneal_epochs",
}

MANY = 4  # an epoch of at least this many steps is not mistaken for a step
MOST_EPOCHS = 300  # in a run of more epochs, a number of steps may well be smaller than theirs


def sign_of_epochs(
    schedulers: Sequence[LRScheduler], rates: Rates | None, steps: int, steps_per_epoch: int | None
) -> str:
    """Return what looks as if the schedulers counted epochs, and what to type; "" if nothing does.

    `rates` is None if they could not be computed.
    """
    many = steps_per_epoch or 0
    epochs = math.ceil(steps / many) if many >= MANY else 0
    peak = max(*rates.first_half, *rates.second_half) if rates else 0.0
    falls = rates is not None and max(rates.second_half) < FALLEN * peak
    for scheduler in _in_force(schedulers, steps // 2):
        name, key = type(scheduler).__name__, LENGTHS.get(type(scheduler), "")
        given = _length(scheduler, key)

        # A cosine rises again after T_max, so its rate goes up and down in all of the run. SWALR ends at a rate that is
        # still large, and torch calls its argument epochs.
        oscillates = key == "T_max" and given == [epochs]
        ends_early = (falls or key == "anneal_epochs") and bool(given) and max(given) <= epochs
        if 0 < epochs <= MOST_EPOCHS and (oscillates or ends_early):
            shown, counted = given, [number * many for number in given]
            if key != "milestones":
                (shown,), (counted,) = given, counted

            return (
                f"{name}({key}={shown}) looks as if it counted epochs, of which this run has {epochs}. Lockstep steps "
                f"it once for every optimizer step: {key}={counted} would be that many epochs of {many} steps"
            )

    if rates and falls:
        names = " and ".join(dict.fromkeys(type(scheduler).__name__ for scheduler in schedulers))
        begins = rates.second_half[0]
        an_epoch = f" (an epoch has {many})" if many else ""
        return (
            f"the learning rate falls from {peak:.3g} to {begins:.3g} in the first half of the run, and stays there: "
            f"{names} looks as if it counted epochs. Lockstep steps it once for every optimizer step, so let it count "
            f"steps{an_epoch}, or make it fall more slowly"
        )

    return ""


def _in_force(schedulers: Sequence[Any], step: int) -> Iterator[Any]:
    """Yield the schedulers that set the rate of this step and of all that follow."""
    for scheduler in schedulers:
        if type(scheduler) is lr_scheduler.SequentialLR:
            begin = max(scheduler._milestones, default=0)
            if begin <= step:
                yield from _in_force(scheduler._schedulers[-1:], step - begin)
        elif type(scheduler) is lr_scheduler.ChainedScheduler:
            yield from _in_force(scheduler._schedulers, step)
        else:
            yield scheduler


def _length(scheduler: Any, key: str) -> list[int]:
    """Return the numbers of steps after which something happens, by this argument of a scheduler."""
    value = getattr(scheduler, key, None) if key else None
    if key == "milestones" and value is not None:
        return sorted(int(step) for step in value)  # a Counter

    return [int(value)] if isinstance(value, int | float) and value else []
