"""Learning rates by the user's scheduler: torch's LRScheduler, of which transformers' schedules are examples.

Lockstep steps it, once for every applied step of its optimizer, and saves its state with the run. ReduceLROnPlateau is
stepped by evaluations instead, with the mean loss of the first in each step. What the code of a resumed run has changed
in a scheduler (another number of steps, another rate) is followed as if it had always been so.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.config import LrConfig
from lockstep.errors import UserError, some_names
from lockstep.optim.optimizers import as_list
from lockstep.optim.schedule import GuardedRates, LearningRate, set_rate
from lockstep.optim.scheduler_state import Beginning, load, state_of

# Settings of the peak, which a function of the step leaves alone: it returns shares of the peak.
PEAK_KEYS = ("lr.peak", "lr.scaling", "lr.reference_batch")


def is_scheduler(value: Any) -> bool:
    """Whether this is a torch scheduler or a function of the step, and not an optimizer, a module or a class."""
    others = torch.optim.Optimizer | nn.Module | type
    return isinstance(value, LRScheduler) or (callable(value) and not isinstance(value, others))


def make_learning_rate(
    config: LrConfig,
    sources: Mapping[str, str],
    optimizers: list[torch.optim.Optimizer],
    schedulers: Any,
    total_steps: int,
    global_batch: int,
) -> LearningRate | SchedulerRate:
    """Return what sets the rates: the configured schedule, or the user's scheduler.

    Raises if the settings conflict with the user's scheduler. `sources`: where each setting comes from. `schedulers`:
    one scheduler, a list of them, a function, or None.
    """
    own = [] if schedulers is None else as_list(schedulers)
    torch_schedulers = [scheduler for scheduler in own if isinstance(scheduler, LRScheduler)]
    for scheduler in own:
        _check_kind(scheduler, alone=len(own) == 1)
    if own:
        _check_settings(own[0], config, sources)

    if torch_schedulers:
        return SchedulerRate(torch_schedulers, optimizers)
    return LearningRate(config, optimizers, total_steps, global_batch, own[0] if own else None)


class _Stepped(NamedTuple):
    """A scheduler, and which of the optimizers it sets."""

    scheduler: LRScheduler
    optimizer: int
    by_evaluations: bool


class SchedulerRate(GuardedRates):
    """Lets the user's schedulers set the rates (and momenta, as OneCycleLR does).

    An optimizer without a scheduler keeps its rate.
    """

    def __init__(self, schedulers: list[LRScheduler], optimizers: list[torch.optim.Optimizer]):
        self._stepped = [_stepped(scheduler, optimizers) for scheduler in schedulers]
        self.needs_evaluations = any(stepped.by_evaluations for stepped in self._stepped)
        self.evaluations = 0  # that the schedulers learned of
        self._observed: int | None = None  # the step of the newest of them

        # A scheduler has made as many steps as its optimizer, or one less: its next one is made when the next rate is
        # needed. On a GPU it may be one more, if the device skipped the last step.
        self._moves = [0] * len(optimizers)
        self._positions = [0] * len(schedulers)
        super().__init__(optimizers)
        self._beginning = Beginning(schedulers, self.groups)
        for scheduler in schedulers:
            vars(scheduler)["step"] = _refuse_direct_step

    def at(self, step: int) -> Any:
        """Return the rate of the first group as it is now: only the scheduler knows the others."""
        return self.groups[0]["lr"]

    def set(self, step: int) -> Any:
        """Step the schedulers whose optimizers have moved since, and return the rate of the first group."""
        self.check()
        for number, (scheduler, optimizer, by_evaluations) in enumerate(self._stepped):
            if not by_evaluations and self._positions[number] < self._moves[optimizer]:
                type(scheduler).step(scheduler)
                self._positions[number] += 1

        self.note()
        return self.groups[0]["lr"]

    def count(self, moved: Sequence[int], change: int) -> None:
        for optimizer in moved:
            self._moves[optimizer] += change

    def observe(self, loss: float, step: int) -> bool:
        if not self.needs_evaluations:
            return True
        if self._observed == step:
            return False

        self.check()
        self._observed = step
        self.evaluations += 1
        for scheduler, _, by_evaluations in self._stepped:
            if by_evaluations:
                type(scheduler).step(scheduler, loss)  # pyrefly: ignore[bad-argument-type]
        self.note()
        return True

    def release(self) -> None:
        for stepped in self._stepped:
            vars(stepped.scheduler).pop("step", None)

    def describe(self) -> str:
        names = " and ".join(dict.fromkeys(type(stepped.scheduler).__name__ for stepped in self._stepped))
        return f"start {float(self.groups[0]['lr']):.3g}, then by {names}"

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        return {
            "schedulers": [{"kind": type(s.scheduler).__name__, "state": state_of(s.scheduler)} for s in self._stepped],
            "moves": list(self._moves),
            "positions": list(self._positions),
            # Most schedulers compute the next rate from the present one.
            "rates": [float(group["lr"]) for group in self.groups],
            "beginning": self._beginning.record(),
            # An evaluation may come before the next step, and is then the second of this one.
            "evaluations": self.evaluations,
            "observed": self._observed,
        }

    def changes_since(self, state: dict[str, Any]) -> list[str]:
        """Return as text what the schedulers are made with now, and were not when the run of this state began."""
        if "beginning" not in state or self._kinds() != [saved["kind"] for saved in state["schedulers"]]:
            return []
        return [
            change
            for number, (scheduler, _, by_evaluations) in enumerate(self._stepped)
            for change in self._beginning.changes(number, type(scheduler).__name__, state["beginning"], by_evaluations)
        ]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        there = [saved["kind"] for saved in state["schedulers"]]
        here = self._kinds()
        if there != here or len(state["rates"]) != len(self.groups):
            raise UserError(
                f"the checkpoint holds the state of {', '.join(there)} for {len(state['rates'])} parameter groups; "
                f"here it is {', '.join(here)} for {len(self.groups)}",
                "",
                "make the schedulers that the run began with, or start a new run from the exported weights",
            )

        self._moves, self._positions = list(state["moves"]), list(state["positions"])
        self.evaluations, self._observed = state.get("evaluations", 0), state.get("observed")
        if changes := self.changes_since(state):
            self._begin_again(changes, state["beginning"])
        else:
            for stepped, saved in zip(self._stepped, state["schedulers"], strict=True):
                load(stepped.scheduler, saved["state"])
            for group, rate in zip(self.groups, state["rates"], strict=True):
                set_rate(group, rate)
        self.note()

    def _kinds(self) -> list[str]:
        return [type(stepped.scheduler).__name__ for stepped in self._stepped]

    def _begin_again(self, changes: list[str], saved: dict[str, Any]) -> None:
        """Bring schedulers that the user has changed to where they would be now, had they always been so."""
        schedulers = [stepped.scheduler for stepped in self._stepped]
        if any(map(_follows_evaluations, schedulers)):
            raise UserError(
                f"a scheduler that follows evaluations was changed since the run began: {'; '.join(changes)}",
                "where it would be now cannot be known: that depends on evaluations that were not made",
                "make it with the settings that the run began with, or start a new run from the exported weights",
            )

        for number, state in enumerate(saved["states"]):
            if self._beginning.starts_at(number) != state.get("last_epoch"):
                raise UserError(
                    f"{self._kinds()[number]} was made to start at another step, and with other settings, than when "
                    f"the run began: {'; '.join(changes)}",
                    f"last_epoch is {self._beginning.starts_at(number)}, and was {state.get('last_epoch')}",
                    "leave last_epoch out: Lockstep brings the scheduler to where the run is",
                )

        self._beginning.restore(schedulers, self.groups)
        for position in range(max(self._positions)):
            for number, scheduler in enumerate(schedulers):
                if position < self._positions[number]:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", UserWarning)  # "before optimizer.step()": those came earlier
                        type(scheduler).step(scheduler)


def _follows_evaluations(scheduler: Any) -> bool:
    """Whether a scheduler, or one that it holds, follows the loss of evaluations."""
    held = [value for value in vars(scheduler).values() if isinstance(value, LRScheduler)]
    return isinstance(scheduler, ReduceLROnPlateau) or any(map(_follows_evaluations, held))


def _refuse_direct_step(*args: Any, **kwargs: Any) -> NoReturn:
    raise UserError(
        "scheduler.step() was called, and Lockstep steps this scheduler itself",
        "once for every applied step of its optimizer; ReduceLROnPlateau after the first evaluation of a step",
        "remove the call",
    )


def _stepped(scheduler: LRScheduler, optimizers: list[torch.optim.Optimizer]) -> _Stepped:
    number = next((i for i, optimizer in enumerate(optimizers) if optimizer is scheduler.optimizer), None)
    if number is None:
        raise UserError(
            f"{type(scheduler).__name__} sets the rates of an optimizer that this run does not have",
            "another optimizer was passed to Lockstep, or the setting optimizer=NAME has replaced it",
            "make the scheduler for the optimizer that you pass; with optimizer=NAME, return it from the task's "
            "scheduler(optimizer), or pass a function of the step",
        )

    # A loss that falls would be taken for an accuracy that falls.
    by_evaluations = isinstance(scheduler, ReduceLROnPlateau)
    if by_evaluations and scheduler.mode != "min":
        raise UserError(
            f"{type(scheduler).__name__} has mode={scheduler.mode!r}, and Lockstep steps it with the mean loss of "
            "evaluations",
            "it would lower the rate while the loss improves",
            "leave mode out: it then waits for a loss that no longer falls",
        )
    return _Stepped(scheduler, number, by_evaluations)


def _check_kind(scheduler: Any, alone: bool) -> None:
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
    # A value that is the default contradicts nothing: the config.yaml of a run sets every key.
    defaults = LrConfig().model_dump()
    keys = [f"lr.{name}" for name, value in config.model_dump().items() if value != defaults[name]]
    is_function = not isinstance(scheduler, LRScheduler)
    contradicting = [key for key in keys if not (is_function and key in PEAK_KEYS)]
    if contradicting:
        name = "a function of the step" if is_function else type(scheduler).__name__
        raise UserError(
            f"{name} sets the learning rate, and so does {some_names(contradicting)}",
            ", ".join(f"{key}: {sources[key]}" for key in contradicting),
            f"leave {', '.join(contradicting)} out, or the scheduler",
        )


def check_none_left_out(optimizers: Any, schedulers: Any) -> None:
    """Refuse an optimizer that a scheduler has marked, if Lockstep was not given a scheduler for it."""
    served = [scheduler.optimizer for scheduler in as_list(schedulers) if isinstance(scheduler, LRScheduler)]
    for optimizer in as_list(optimizers):
        marked = any("initial_lr" in group for group in getattr(optimizer, "param_groups", ()))
        if marked and not any(optimizer is other for other in served):
            raise UserError(
                f"a scheduler was made for this {type(optimizer).__name__}, and Lockstep does not have it",
                "its parameter groups have initial_lr: their rates are those of the scheduler's first step, not peaks",
                GuardedRates.advice,
            )
