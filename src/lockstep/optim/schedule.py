"""Learning-rate schedules: the rate of a step is a pure function of its number.

So a schedule has no state to save; the user's schedulers, which have one, are in schedulers/. A new schedule is one
function and one entry in SCHEDULES. This module does not import torch, so that a launcher can check the name of a
schedule quickly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.config import LrConfig
from lockstep.errors import UserError, unknown_name

if TYPE_CHECKING:
    import torch

# (configuration, optimizer step from 0, total steps) -> share of the peak rate. Not called during the warm-up.
Schedule = Callable[[LrConfig, int, int], float]


def constant(config: LrConfig, step: int, total: int) -> float:
    """Stay at the peak."""
    return 1.0


def linear(config: LrConfig, step: int, total: int) -> float:
    """Fall in a straight line from the peak to `min_ratio`."""
    return 1.0 - (1.0 - config.min_ratio) * _progress(config, step, total)


def cosine(config: LrConfig, step: int, total: int) -> float:
    """Fall along half a cosine from the peak to `min_ratio`."""
    done = _progress(config, step, total)
    return config.min_ratio + (1.0 - config.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))


def wsd(config: LrConfig, step: int, total: int) -> float:
    """Warm up, stay, and decay: fall in a straight line over the last share `decay` of the run."""
    if not config.decay:
        return 1.0

    # Both ends of the line are steps, so even the shortest decay has two: one at the peak, the last at `min_ratio`.
    # It does not begin before the warm-up has ended: the rate would jump there.
    begin = max(config.warmup, total - max(2, round(total * config.decay)))
    fallen = max(0, step - begin) / max(1, total - 1 - begin)
    return 1.0 - (1.0 - config.min_ratio) * min(1.0, fallen)


SCHEDULES: dict[str, Schedule] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "wsd": wsd,
}


def _progress(config: LrConfig, step: int, total: int) -> float:
    """Return the fraction of the run that is done, from 0 at the end of the warm-up to 1 at the last step."""
    return min(1.0, (step - config.warmup) / max(1, total - 1 - config.warmup))


def share_of_peak(config: LrConfig, step: int, total: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0) of `total`, as a share of the peak.

    The warm-up rises linearly and is above 0 at the first step; the last step of a decay reaches `min_ratio`.
    """
    if step < config.warmup:
        return (step + 1) / (config.warmup + 1)
    return SCHEDULES[config.schedule](config, step, total)


def batch_scaling(config: LrConfig, global_batch: int) -> float:
    """Return the factor that scales the peak with the global batch. It does not depend on the number of ranks."""
    if config.scaling == "none":
        return 1.0

    assert config.reference_batch is not None
    ratio = global_batch / config.reference_batch
    return ratio if config.scaling == "linear" else math.sqrt(ratio)


class LearningRate:
    """The base class of what sets the learning rates of all parameter groups.

    It raises if other code has set a rate, which the next step would silently overwrite.

    A schedule of the settings needs only the number of applied steps. The user's schedulers also follow the steps of
    each optimizer and the evaluations; the methods for these do nothing here.
    """

    advice = (
        "pass the scheduler to Lockstep: run.setup(model, optimizer, scheduler) in a custom loop, "
        "scheduler(optimizer) in a task; or use lr.schedule, lr.warmup and the other settings in docs/schedules.md"
    )
    needs_evaluations = False  # whether a rate depends on the results of evaluations
    evaluations = 0  # how many of them have set a rate

    def __init__(self, optimizers: list[torch.optim.Optimizer]):
        self.optimizers = optimizers
        self.remember_rates()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers. Not cached, because loading a state replaces them."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def remember_rates(self) -> None:
        """Remember the current rates as the expected ones."""
        self._expected = _identities(self.groups)

    def check(self) -> None:
        """Raise if a rate has changed since `remember_rates`."""
        groups = self.groups
        found = _identities(groups)
        if found == self._expected:
            return

        if len(found) != len(self._expected):
            raise group_added()

        for number, (group, rate, expected) in enumerate(zip(groups, found, self._expected, strict=True)):
            if rate != expected:
                before = "" if isinstance(expected, tuple) else f"; Lockstep set {expected:.6g}"
                raise UserError(
                    f"the learning rate of parameter group {number} was changed by something other than Lockstep",
                    f"it is {float(group['lr']):.6g}{before}: a scheduler that your code steps, or an assignment to "
                    'param_groups[...]["lr"]',
                    self.advice,
                )

    def at(self, steps_applied: int) -> Any:
        """Return the rate of the first group after this many applied steps."""
        raise NotImplementedError

    def set(self, steps_applied: int) -> Any:
        """Set the rate of every group for the step after `steps_applied` ones, and return the first group's."""
        raise NotImplementedError

    def banner(self) -> str:
        """Return a line for the banner."""
        raise NotImplementedError

    # ---- methods that do nothing unless a subclass needs them ----

    def look_ahead(self, steps: int, steps_per_epoch: int | None, may_end_early: bool) -> list[str]:
        """Compute the rates of the whole run as far as possible, and return warnings about them.

        Raise a UserError if the rate of a step cannot be set; return that as a warning if the run may end before.
        """
        return []

    def change_total_steps(self, steps: int) -> None:
        """Let the rates end with another number of steps: the plan has changed since the rates were made."""

    def count_step(self, optimizers: Sequence[int]) -> None:
        """Count a step of these optimizers."""

    def uncount_step(self, optimizers: Sequence[int]) -> None:
        """Undo the count of a step that the device skipped."""

    def observe(self, loss: float, steps_done: int) -> bool:
        """Pass an evaluation loss to the scheduler. Return False if there was one after this step already."""
        return True

    def release(self) -> None:
        """Allow the user to step the schedulers again."""


def group_added() -> UserError:
    """Return the error for a parameter group that was added to an optimizer after Lockstep had got it."""
    return UserError(
        "a parameter group was added to an optimizer after the model was wrapped",
        "the gradients of its parameters would never be divided, cleared or reduced over ranks",
        "call add_param_group before run.setup(...), or in optimizer(); to unfreeze parameters later, give them to the "
        "optimizer at once and set first_steps",
    )


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the rate of a group."""
    # A captured or compiled optimizer reads its rate from a tensor, which must stay the same object.
    current = group["lr"]
    if type(current) is not float and hasattr(current, "fill_"):
        current.fill_(rate)
    else:
        group["lr"] = rate


def _identities(groups: Sequence[dict[str, Any]]) -> list[Any]:
    """Return a value for each group that changes when its rate is set.

    A rate that is a tensor stands for itself by its identity and version, so that the host does not wait for its value.
    """
    rates = [group["lr"] for group in groups]

    # Almost always all rates are floats, which stand for themselves.
    for index, rate in enumerate(rates):
        if type(rate) is not float and hasattr(rate, "fill_"):
            rates[index] = (id(rate), rate._version)

    return rates


class ScheduleRate(LearningRate):
    """Sets the rate of every parameter group: its own peak x the batch rule x the schedule.

    `lr.peak` is the peak of the first group; the other groups keep their ratio to it.
    """

    def __init__(
        self,
        config: LrConfig,
        optimizers: list[torch.optim.Optimizer],
        total_steps: int,
        global_batch: int,
        function: Callable[[int], float] | None = None,
    ):
        """`function(step)` returns the share of the peak and replaces `lr.schedule` and `lr.warmup`."""
        super().__init__(optimizers)
        if config.schedule not in SCHEDULES:
            raise unknown_name("lr.schedule", config.schedule, SCHEDULES)

        self.config = config
        self.total_steps = total_steps
        self._function = function

        # The rates in the task's groups are their peaks, unless `lr.peak` is set.
        initial_rates = [float(group["lr"]) for group in self.groups]
        if config.peak is not None and initial_rates[0] == 0:
            raise UserError(
                f"lr.peak={config.peak} cannot be applied: the first parameter group of the optimizer has lr=0",
                "the other groups keep their ratio to the first one, which is unknown",
                "give that group a learning rate, or leave lr.peak out",
            )

        ratio = 1.0 if config.peak is None else config.peak / initial_rates[0]
        self.peaks = [lr * ratio * batch_scaling(config, global_batch) for lr in initial_rates]

    def at(self, steps_applied: int) -> float:
        return self.peaks[0] * self._share(steps_applied)

    def set(self, steps_applied: int) -> float:
        self.check()

        # All groups follow the same schedule, each with its own peak.
        share = self._share(steps_applied)
        for group, peak in zip(self.groups, self.peaks, strict=True):
            set_rate(group, peak * share)

        self.remember_rates()
        return self.peaks[0] * share

    def change_total_steps(self, steps: int) -> None:
        self.total_steps = steps

    def _share(self, steps_applied: int) -> float:
        if self._function is None:
            return share_of_peak(self.config, steps_applied, self.total_steps)

        share = float(self._function(steps_applied))
        if not 0 <= share < math.inf:
            raise UserError(
                f"the learning-rate function returned {share} for step {steps_applied} (only applied steps count)",
                "",
                "return a finite share of the peak, 0 or more; the peak is the rate that the optimizer was made with",
            )

        return share

    def landmarks(self) -> dict[str, float]:
        """Return the rate at a few points of the run: most mistakes in a schedule show there before the first step."""
        last = self.total_steps - 1
        points = {"start": 0, "warm-up end": min(self.config.warmup, last), "half": self.total_steps // 2, "end": last}
        if self._function:
            del points["warm-up end"]  # unknown: the function includes any warm-up
        return {name: self.at(steps) for name, steps in points.items()}

    def banner(self) -> str:
        return ", ".join(f"{name} {value:.3g}" for name, value in self.landmarks().items())
