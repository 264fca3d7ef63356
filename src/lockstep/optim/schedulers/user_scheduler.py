"""Learning rates by the user's scheduler, a torch LRScheduler, including those of transformers.

Lockstep steps it once for every applied step of its optimizer, and saves its state in checkpoints. ReduceLROnPlateau is
stepped with the mean loss of the first evaluation after a step instead. If the user changes a scheduler in the code of
a resumed run (another number of steps, another rate), the run continues as if it had started with the new settings.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.config import LrConfig
from lockstep.config.settings import typed
from lockstep.errors import UserError, some_names
from lockstep.optim.optimizers import as_list
from lockstep.optim.schedule import LearningRate, ScheduleRate, set_rate
from lockstep.optim.schedulers.preview import Failure, Preview, Rates, can_be_previewed, sign_of_epochs
from lockstep.optim.schedulers.scheduler_state import InitialState, load, state_of

# Settings of the peak. A function of the step returns shares of the peak, so it does not conflict with them.
PEAK_KEYS = ("lr.peak", "lr.scaling", "lr.reference_batch")


def is_scheduler(value: Any) -> bool:
    """Return whether this is a torch scheduler or a function of the step."""
    others = torch.optim.Optimizer | nn.Module | type
    return isinstance(value, LRScheduler) or (callable(value) and not isinstance(value, others))


def make_learning_rate(
    config: LrConfig,
    sources: Mapping[str, str],
    optimizers: list[torch.optim.Optimizer],
    schedulers: Any,
    total_steps: int,
    global_batch: int,
) -> LearningRate:
    """Return the object that sets the rates, by the configured schedule or by the user's scheduler.

    `schedulers` is a scheduler, a list of them, a function of the step, or None. Raise if it conflicts with settings;
    `sources` names the origin of each setting.
    """
    given = [] if schedulers is None else as_list(schedulers)
    torch_schedulers = [scheduler for scheduler in given if isinstance(scheduler, LRScheduler)]
    for scheduler in given:
        _check_kind(scheduler, alone=len(given) == 1)

    if given:
        _check_settings(given[0], config, sources)

    if torch_schedulers:
        return SchedulerRate(torch_schedulers, optimizers)

    return ScheduleRate(config, optimizers, total_steps, global_batch, given[0] if given else None)


class _Entry(NamedTuple):
    """A scheduler and its optimizer."""

    scheduler: LRScheduler
    optimizer: int  # index among the optimizers
    by_evaluations: bool  # stepped by evaluations, not by optimizer steps


class SchedulerRate(LearningRate):
    """Lets the user's schedulers set the rates (and momenta, as OneCycleLR does).

    An optimizer without a scheduler keeps its rate.
    """

    def __init__(self, schedulers: list[LRScheduler], optimizers: list[torch.optim.Optimizer]):
        self._entries = [_make_entry(scheduler, optimizers) for scheduler in schedulers]
        self.needs_evaluations = any(entry.by_evaluations for entry in self._entries)
        self.evaluations = 0  # passed to the schedulers so far
        self._last_evaluated: int | None = None  # step of the newest evaluation among them

        # A scheduler is stepped only when the next rate is needed, so it is usually one step behind its optimizer. On a
        # GPU it may be one step ahead, if the device skipped the last step.
        self._optimizer_steps = [0] * len(optimizers)
        self._scheduler_steps = [0] * len(schedulers)
        super().__init__(optimizers)
        self._initial = InitialState(schedulers, self.groups)
        self._preview = _make_preview(schedulers, optimizers)
        self._rates: Rates | None = None  # of the whole run, once `look_ahead` has computed them
        for scheduler in schedulers:
            vars(scheduler)["step"] = _refuse_direct_step

    def at(self, steps_applied: int) -> Any:
        """Return the current rate of the first group. A scheduler cannot compute the rate of another step."""
        return self.groups[0]["lr"]

    def set(self, steps_applied: int) -> Any:
        """Step the schedulers that are behind their optimizers, and return the rate of the first group."""
        self.check()
        for number, (scheduler, optimizer, by_evaluations) in enumerate(self._entries):
            if not by_evaluations and self._scheduler_steps[number] < self._optimizer_steps[optimizer]:
                # Not `scheduler.step()`, which raises for the user.
                type(scheduler).step(scheduler)
                self._scheduler_steps[number] += 1

        self.remember_rates()
        return self.groups[0]["lr"]

    def count_step(self, optimizers: Sequence[int]) -> None:
        for optimizer in optimizers:
            self._optimizer_steps[optimizer] += 1

    def uncount_step(self, optimizers: Sequence[int]) -> None:
        for optimizer in optimizers:
            self._optimizer_steps[optimizer] -= 1

    def observe(self, loss: float, steps_done: int) -> bool:
        if not self.needs_evaluations:
            return True
        if self._last_evaluated == steps_done:
            return False

        self.check()
        self._last_evaluated = steps_done
        self.evaluations += 1
        for scheduler, _, by_evaluations in self._entries:
            if by_evaluations:
                type(scheduler).step(scheduler, loss)  # pyrefly: ignore[bad-argument-type]

        self.remember_rates()
        return True

    def release(self) -> None:
        for entry in self._entries:
            vars(entry.scheduler).pop("step", None)

    def look_ahead(self, steps: int, steps_per_epoch: int | None, may_end_early: bool) -> list[str]:
        found = self._preview.look(steps) if self._preview else None
        self._rates = found if isinstance(found, Rates) else None
        schedulers = [entry.scheduler for entry in self._entries]
        if isinstance(found, Failure):
            error = _ends_before_the_run(" and ".join(self._kinds()), found, steps, steps_per_epoch)
            if not may_end_early:
                raise error

            return [f"{error.problem}: {error.found}. If the run gets so far, it fails there; {error.fix}"]

        sign = sign_of_epochs(schedulers, self._rates, steps, steps_per_epoch)
        return [sign] if sign else []

    def banner(self) -> str:
        names = " and ".join(dict.fromkeys(self._kinds()))
        if self._rates is None:
            return f"start {float(self.groups[0]['lr']):.3g}, then by {names}"

        return ", ".join(f"{name} {value:.3g}" for name, value in self._rates.landmarks.items()) + f", by {names}"

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        return {
            "schedulers": [{"kind": type(e.scheduler).__name__, "state": state_of(e.scheduler)} for e in self._entries],
            "moves": list(self._optimizer_steps),
            "positions": list(self._scheduler_steps),
            # Most schedulers compute the next rate from the current one.
            "rates": [float(group["lr"]) for group in self.groups],
            "beginning": self._initial.record(),
            # An evaluation may come before the next step; it is then the second one of this step.
            "evaluations": self.evaluations,
            "observed": self._last_evaluated,
        }

    def changes_since(self, state: dict[str, Any]) -> list[str]:
        """Return the settings of schedulers that differ from those at the beginning of the saved run, as text."""
        if "beginning" not in state or self._kinds() != [saved["kind"] for saved in state["schedulers"]]:
            return []

        changes: list[str] = []
        for number, (scheduler, _, by_evaluations) in enumerate(self._entries):
            name = type(scheduler).__name__
            changes += self._initial.changes(number, name, state["beginning"], by_evaluations)

        return changes

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved_kinds = [saved["kind"] for saved in state["schedulers"]]
        current_kinds = self._kinds()
        if saved_kinds != current_kinds or len(state["rates"]) != len(self.groups):
            raise UserError(
                f"the checkpoint holds {', '.join(saved_kinds)} for {len(state['rates'])} parameter groups; "
                f"this run has {', '.join(current_kinds)} for {len(self.groups)}",
                "",
                "make the schedulers that the run began with, or start a new run from the exported weights",
            )

        self._optimizer_steps, self._scheduler_steps = list(state["moves"]), list(state["positions"])
        self.evaluations, self._last_evaluated = state.get("evaluations", 0), state.get("observed")

        # If the user has changed a scheduler's settings, its steps are replayed with the new ones.
        changes = self.changes_since(state)
        if changes:
            self._replay(changes, state["beginning"])
        else:
            for entry, saved in zip(self._entries, state["schedulers"], strict=True):
                load(entry.scheduler, saved["state"])

            for group, rate in zip(self.groups, state["rates"], strict=True):
                set_rate(group, rate)

        self.remember_rates()

    def _kinds(self) -> list[str]:
        return [type(entry.scheduler).__name__ for entry in self._entries]

    def _replay(self, changes: list[str], saved: dict[str, Any]) -> None:
        """Step changed schedulers from their initial state up to the current step."""
        schedulers = [entry.scheduler for entry in self._entries]
        if any(map(_follows_evaluations, schedulers)):
            raise UserError(
                f"a scheduler that follows evaluations was changed since the run began: {'; '.join(changes)}",
                "its current state cannot be computed: it depends on evaluations that were not made",
                "make it with the settings that the run began with, or start a new run from the exported weights",
            )

        for number, state in enumerate(saved["states"]):
            if self._initial.starts_at(number) != state.get("last_epoch"):
                raise UserError(
                    f"{self._kinds()[number]} starts at a different step, and with different settings, than when the "
                    f"run began: {'; '.join(changes)}",
                    f"last_epoch is {self._initial.starts_at(number)}, and was {state.get('last_epoch')}",
                    "leave last_epoch out: Lockstep steps the scheduler to the current step",
                )

        self._initial.restore(schedulers, self.groups)
        for position in range(max(self._scheduler_steps)):
            for number, scheduler in enumerate(schedulers):
                if position < self._scheduler_steps[number]:
                    with warnings.catch_warnings():
                        # torch warns that scheduler.step() comes before optimizer.step(), which ran before the resume.
                        warnings.simplefilter("ignore", UserWarning)
                        type(scheduler).step(scheduler)


def _make_preview(schedulers: list[LRScheduler], optimizers: list[torch.optim.Optimizer]) -> Preview | None:
    """Return copies of the schedulers that can be stepped in advance, or None if they cannot."""
    # With several optimizers, a loop may step one of them less often than the others.
    if len(optimizers) != 1 or not can_be_previewed(schedulers):
        return None

    try:
        return Preview(schedulers, optimizers[0])
    except Exception:  # an option of a parameter group may be anything
        return None


def _ends_before_the_run(name: str, failure: Failure, steps: int, steps_per_epoch: int | None) -> UserError:
    """Return the error for a scheduler that raises before the last step."""
    per_epoch = f", {steps_per_epoch} in an epoch" if steps_per_epoch else ""
    return UserError(
        f"{name} cannot set the learning rate of step {failure.step + 1}, and the run has {steps} steps",
        f"{type(failure.error).__name__}: {failure.error}. Lockstep steps a scheduler once for every optimizer step"
        f"{per_epoch}",
        f"make it for {steps} steps (OneCycleLR: total_steps={steps}), also where the run is extended; or set "
        f"steps={failure.step}",
    )


def _follows_evaluations(scheduler: Any) -> bool:
    """Return whether a scheduler, or one inside it, follows the loss of evaluations."""
    inner = [value for value in vars(scheduler).values() if isinstance(value, LRScheduler)]
    return isinstance(scheduler, ReduceLROnPlateau) or any(map(_follows_evaluations, inner))


def _refuse_direct_step(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse a step from the user's code, which would be one too many."""
    raise UserError(
        "scheduler.step() was called, and Lockstep steps this scheduler itself",
        "once for every applied step of its optimizer; ReduceLROnPlateau after the first evaluation of a step",
        "remove the call",
    )


def _make_entry(scheduler: LRScheduler, optimizers: list[torch.optim.Optimizer]) -> _Entry:
    """Find the optimizer of a scheduler, and whether evaluations step it. Raises a UserError."""
    number = next((i for i, optimizer in enumerate(optimizers) if optimizer is scheduler.optimizer), None)
    if number is None:
        raise UserError(
            f"{type(scheduler).__name__} sets the rates of an optimizer that this run does not have",
            "another optimizer was passed to Lockstep, or the setting optimizer=NAME has replaced it",
            "make the scheduler for the optimizer that you pass; with optimizer=NAME, return it from the task's "
            "scheduler(optimizer), or pass a function of the step",
        )

    # With mode="max" the scheduler would take a falling loss for a falling accuracy.
    by_evaluations = isinstance(scheduler, ReduceLROnPlateau)
    if by_evaluations and scheduler.mode != "min":
        raise UserError(
            f"{type(scheduler).__name__} has mode={scheduler.mode!r}, and Lockstep steps it with the mean loss of "
            "evaluations",
            "it would lower the rate while the loss improves",
            "leave mode out: it then waits for a loss that no longer falls",
        )

    return _Entry(scheduler, number, by_evaluations)


def _check_kind(scheduler: Any, alone: bool) -> None:
    """Refuse objects that are no scheduler, and a function together with other schedulers."""
    if not is_scheduler(scheduler):
        raise UserError(
            f"a {type(scheduler).__name__} is not a scheduler that Lockstep can step",
            "",
            "pass a torch.optim.lr_scheduler.LRScheduler, or a function of the step that returns a share of the peak",
        )

    if not (alone or isinstance(scheduler, LRScheduler)):
        raise UserError(
            "a function of the step sets the rates of all optimizers, and a second scheduler was passed with it",
            "",
            "pass one function and nothing else, or a torch scheduler for each optimizer",
        )


def _check_settings(scheduler: Any, config: LrConfig, sources: Mapping[str, str]) -> None:
    """Refuse settings of the rate that a scheduler would ignore."""
    # Default values are no conflict: the config.yaml of a run sets every key.
    defaults = LrConfig().model_dump()
    keys = [f"lr.{name}" for name, value in config.model_dump().items() if value != defaults[name]]
    is_function = not isinstance(scheduler, LRScheduler)
    conflicting = [key for key in keys if not (is_function and key in PEAK_KEYS)]
    if conflicting:
        # A task may inherit the setting from its base, so that leaving it out is no way to get rid of it.
        defaults_to_type = [f"{key}={typed(defaults[key.removeprefix('lr.')])}" for key in conflicting]
        name = "a function of the step" if is_function else type(scheduler).__name__
        raise UserError(
            f"{name} sets the learning rate, and so does {some_names(conflicting)}",
            ", ".join(f"{key}: {sources[key]}" for key in conflicting),
            f"leave the scheduler out, or set {' '.join(defaults_to_type)}",
        )


def check_schedulers_passed(optimizers: Any, schedulers: Any) -> None:
    """Refuse an optimizer that has a scheduler which was not passed to Lockstep."""
    with_scheduler = [scheduler.optimizer for scheduler in as_list(schedulers) if isinstance(scheduler, LRScheduler)]
    for optimizer in as_list(optimizers):
        # Schedulers write `initial_lr` into the groups of their optimizer.
        has_scheduler = any("initial_lr" in group for group in getattr(optimizer, "param_groups", ()))
        if has_scheduler and not any(optimizer is other for other in with_scheduler):
            raise UserError(
                f"this {type(optimizer).__name__} has a scheduler that was not passed to Lockstep",
                "its parameter groups have initial_lr: their rates are those of the scheduler's first step, not peaks",
                LearningRate.advice,
            )
