"""Set up a run in three stages:

    open_run      opens the run folder and its records, and seeds the generators for building the model
    setup_model   puts the model under its driver and makes its optimizers and guards (some of it: model.py)
    setup_run     makes the plan, the data source, the stepper and the Run; resumes if there is a checkpoint (run.py)

A `RunBuilder` holds all objects made so far, so that a failure in any stage can be explained and cleaned up.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from lockstep import files
from lockstep.checkpoint.manifest import EMA
from lockstep.checkpoint.state.stateful import RegisteredState
from lockstep.checkpoint.storage.stores import allow_store_of
from lockstep.config import Resolved, RunConfig
from lockstep.data.from_loader import Collate
from lockstep.engine.checks.guards import LateHooks, TrainableGuard
from lockstep.engine.checks.model import check_not_wrapped
from lockstep.engine.checks.settings import check_same_config
from lockstep.engine.clock import RunClock
from lockstep.engine.determinism import Exactness
from lockstep.engine.evaluation.evaluator import Evaluation, EvaluationSet, Evaluator
from lockstep.engine.hooks.calls import Hooks
from lockstep.engine.hooks.view import BuiltRunView
from lockstep.engine.run import Run
from lockstep.engine.setup.model import check_model, initial_weights, make_average, wrap_optimizers
from lockstep.engine.setup.run import make_run
from lockstep.engine.trained_model import TrainedModel
from lockstep.errors import ConfigError, Preempted, UserError
from lockstep.launch.lost_peer import text_of
from lockstep.observe.recorder import Recorder
from lockstep.observe.report import write_report
from lockstep.optim.optimizers import Optimizers, rebind
from lockstep.optim.schedulers.user_scheduler import check_schedulers_passed
from lockstep.parallel.apply import parallelize
from lockstep.parallel.cudagraph.graphs import release_captures
from lockstep.parallel.driver import Driver
from lockstep.parallel.micro_batches import runs_whole_model
from lockstep.precision import Precision, choose_precision, for_model
from lockstep.run_folder.opened import RunFolder, open_run_dir
from lockstep.runtime import attempt_folder
from lockstep.runtime.context import Runtime
from lockstep.runtime.seeds import derive, seed_everything, seed_torch


@dataclass(eq=False)
class RunBuilder:
    """The objects of a run that exist so far, before its first step."""

    # From `open_run`.
    resolved: Resolved
    runtime: Runtime
    name: str
    unit: str
    folder: RunFolder
    recorder: Recorder
    precision: Precision
    run_class: type[Run]
    init_from: Path | None  # the full path of `config.init_from`: the user's code may change the working folder
    clock: RunClock = field(default_factory=RunClock)
    registered: RegisteredState = field(default_factory=RegisteredState)  # what checkpoints hold besides the model
    callbacks: list[Any] = field(default_factory=list)  # given to `fit`, or by `run.add_callback`
    hooks: Hooks = field(init=False)  # none until `use_hooks`
    reads_loss: bool = False  # whether the user's code reads the loss of each step
    registers_own: bool = False  # whether a custom loop has called `run.register`
    passes: int = 1  # how often a custom loop goes over the batches of each step

    # From `setup_model`. The driver is set first: if making the optimizers fails, the error message needs it.
    task: Any = None  # None in a custom loop
    driver: Driver | None = None
    trained_model: TrainedModel | None = None
    evaluation: Evaluation | None = None  # made before the first step

    # From `setup_run`.
    run: Run | None = None

    # What `fail` calls, in reverse order.
    _on_failure: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.hooks = Hooks(BuiltRunView(self))

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    def setup_model(
        self,
        model: nn.Module,
        optimizers: Callable[[nn.Module], Any],
        task: Any = None,
        data: Callable[[], Any] | None = None,
        schedulers: Callable[[Any], Any] = lambda _: None,
    ) -> TrainedModel:
        """Put the model on its device and under its driver, and make its optimizers.

        Sharding may follow the plan of `task`, or samples of `data`. `schedulers` is called with the optimizer, or the
        list of optimizers, and returns schedulers; None leaves the rates to the settings under `lr`.
        """
        if self.driver is not None:
            raise UserError(
                "run.setup was called a second time with a model to train",
                "",
                "pass all models at once: first, second, optimizer = run.setup(first, second, optimizer); a frozen one "
                "may be passed alone: teacher = run.setup(teacher)",
            )

        self.task = task

        # Before anything is done to the model: a refused one is still the user's own.
        check_not_wrapped(model)
        self.precision = for_model(self.precision, self.config.precision, model)
        check_model(model, self.precision, self.runtime)

        # Sharding replaces parameters. `rebind` gives the new ones, by name, to optimizers that were made before.
        parameters_before = dict(model.named_parameters())
        driver = self._make_driver(model, task, data)
        late_hooks = LateHooks(model, parameters_before)

        # Before the optimizers, which may copy the weights.
        initial = None
        if self.init_from:
            initial = initial_weights(
                driver, self.init_from, self.config, self.runtime, self.folder, self.recorder.event
            )
            self.registered.add("init_from", initial)

        # Make the optimizers after sharding, so that their state matches the shards.
        wrapped, user_schedulers = self._make_optimizers(model, optimizers, schedulers, parameters_before)

        # Exactness saves a description of the platform with every checkpoint: a resumed run must compute the same bits.
        exactness = None
        if self.config.exact:
            exactness = Exactness(model, wrapped, self.runtime, getattr(task, "changing_buffers", ()))
            self.registered.add("exact", exactness)
            driver.parts.add(exactness)

        average = make_average(model, self.config, driver)
        if average:
            self.registered.add(EMA, average)

        self.trained_model = TrainedModel(
            driver=driver,
            optimizers=wrapped,
            evaluator=Evaluator(self.config, driver, self.runtime, self.recorder),
            guard=TrainableGuard(model, late_hooks, driver.reshard),
            exactness=exactness,
            schedulers=user_schedulers,
            average=average,
            initial=initial,
        )
        return self.trained_model

    def _make_driver(self, model: nn.Module, task: Any, data: Callable[[], Any] | None) -> Driver:
        """Put the model under its driver."""
        self.driver = driver = parallelize(
            model, self.config, self.runtime, self.precision, task, self.recorder.event, data, self.registered.add
        )

        # The model is the user's, and must be as it was if the run fails.
        self.on_failure(release_captures, driver.model)
        self.on_failure(driver.parts.close)
        if runs_whole_model(driver):
            self.on_failure(driver.inner_gradients.leave)

        return driver

    def expect_unused_parameters(self, reason: str) -> None:
        """Set ddp.find_unused_parameters before `setup_model`, for losses that reach only a part of the model.

        It stays as it is where the user has set it, or an option of DDP that excludes it: an error will name the key.
        """
        if self.runtime.world.alone or not self.config.uses_ddp:
            return

        key = "ddp.find_unused_parameters"

        # Where other settings exclude it, the error comes later, from the place that knows them.
        with contextlib.suppress(ConfigError):
            self.resolved = self.resolved.fill_in("run.setup", {key: True})

        if self.resolved.sources[key] == "run.setup":
            self.recorder.event("note", reason=f"{key}=true, because {reason}")

    def _make_optimizers(
        self,
        model: nn.Module,
        optimizers: Callable[[nn.Module], Any],
        schedulers: Callable[[Any], Any],
        parameters_before: dict[str, nn.Parameter],
    ) -> tuple[Optimizers, Any]:
        """Return the wrapped optimizers, and the user's schedulers or None."""
        assert self.driver is not None

        # The task makes its optimizers with the model as the driver has it. Those of a custom loop exist already.
        user_optimizers = optimizers(self.driver.model)
        rebind(user_optimizers, parameters_before, dict(model.named_parameters()))

        wrapped = wrap_optimizers(user_optimizers, model, self.config, self.precision, self.runtime)
        if not runs_whole_model(self.driver):
            wrapped.refuse_coupled("a stage of a pipeline")

        self.on_failure(wrapped.release)

        # The user's function gets one optimizer, or a list, as it would without Lockstep.
        user_schedulers = schedulers(wrapped.all[0] if len(wrapped.all) == 1 else wrapped.all)
        check_schedulers_passed(user_optimizers, user_schedulers)
        return wrapped, user_schedulers

    def use_hooks(self, hooks: Hooks) -> None:
        """Call these hooks during the run, and save the state of the callbacks that have one."""
        self.hooks = hooks
        # A hook that follows steps gets their results, and these include the loss.
        self.reads_loss |= hooks.has("after_step")
        hooks.register(self.registered)

    def setup_run(self, data: Any, collate: Collate) -> Run:
        """Make everything that depends on the data, resume if there is a checkpoint, and print the banner."""
        assert self.trained_model is not None, "setup_run() before setup_model()"

        # Set last: while `self.run` is None, an error counts as a set-up error.
        self.run = make_run(self, self.trained_model, data, collate)
        return self.run

    def evaluate(self, chosen: EvaluationSet) -> Evaluation:
        """Evaluate the model before the first step. No batch size is derived yet, so evaluate.batch must be set."""
        assert self.trained_model is not None, "evaluate() before setup_model()"
        batch = self.config.evaluate.batch
        if batch is None:
            raise UserError(
                "evaluate.batch is not set, and an evaluation before the first step needs it",
                "",
                "set evaluate.batch=64",
            )

        evaluations = self.trained_model.evaluator.evaluate([chosen], batch, steps_done=0)
        assert evaluations is not None, "only an evaluation that may be preempted ends early"
        self.evaluation = evaluations[0]
        return self.evaluation

    def on_failure(self, release: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call `release` if the run fails, before whatever was passed here earlier."""
        self._on_failure.callback(release, *args, **kwargs)

    def fail(self, error: BaseException) -> None:
        """Release everything, and write the error and a report to the run folder. The caller raises the error again."""
        # Errors during the clean-up are dropped: they would hide the original one.
        with contextlib.suppress(Exception):
            self._on_failure.close()

        # Metrics that have arrived from the device.
        with contextlib.suppress(Exception):
            self.recorder.poll()

        with contextlib.suppress(Exception):
            # The parent process prints the error. A launcher prints only the first error of all ranks.
            self.recorder.hide()
            left_alone = self.folder.is_left_alone(error)
            if not (left_alone or isinstance(error, Preempted)):
                self.recorder.event(
                    "error", type=type(error).__name__, message=text_of(error), **self._traceback(error)
                )

            self.recorder.close()
            if self.runtime.is_main and not left_alone:
                write_report(self.folder.path)

        self.folder.release_lock()

    def _traceback(self, error: BaseException) -> dict[str, str]:
        """Return the field of the event with the whole traceback, which a launcher records for its ranks."""
        if isinstance(error, UserError) or attempt_folder.current() is not None:
            return {}

        # Only rank 0 writes events; what shows the error names the file.
        if self.runtime.is_main:
            error.__dict__["lockstep_recorded"] = True

        return {"traceback": "".join(traceback.format_exception(error))}


def open_run(
    resolved: Resolved, runtime: Runtime, name: str, unit: str = "sample", run_class: type[Run] = Run
) -> RunBuilder:
    """Open the run folder and its records, and seed the generators for building the model."""
    config = resolved.config

    # This check comes before any other collective: with different settings the ranks might deadlock there.
    check_same_config(config, runtime)

    # Whatever reads or writes checkpoints in this process may use the store that the settings name.
    if config.checkpoint.store:
        allow_store_of(config.checkpoint.store)

    precision = choose_precision(config, runtime.device)
    precision.set_tf32()
    folder = open_run_dir(config, name, runtime)
    recorder = Recorder(folder.path, runtime, config.checks.slow_rank, config.log.sinks)
    builder = RunBuilder(
        resolved=resolved,
        runtime=runtime,
        name=name,
        unit=unit,
        folder=folder,
        recorder=recorder,
        precision=precision,
        run_class=run_class,
        init_from=Path(config.init_from).absolute() if config.init_from else None,
    )

    # Only here are the settings complete.
    tell_launcher(config)

    # Code that draws random numbers before the first step, such as model initialization, draws the same on every rank.
    runtime.heartbeat.beat("build")
    seed_everything(derive(config.seed, "init"))
    seed_torch(derive(config.seed, "init"), runtime.device)
    return builder


def tell_launcher(config: RunConfig) -> None:
    """Tell our launcher, if there is one, the settings that it follows. Rank 0 does it for all."""
    folder = attempt_folder.of_rank_0()
    if folder:
        limits = {"hang": config.hang.model_dump(), "restart": config.restart.model_dump()}
        files.write(attempt_folder.settings(folder), json.dumps(limits))
