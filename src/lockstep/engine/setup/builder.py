"""Set up a run in three stages:

    open_run      opens the run folder and its records, and seeds the generators for building the model
    setup_model   puts the model under its driver and makes its optimizers and guards
    setup_run     makes the plan, the data source, the stepper and the Run, and resumes if there is a checkpoint

A `RunBuilder` holds all parts made so far, so that a failure in any stage can be explained and cleaned up.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from lockstep.checkpoint.initial.weights import InitialWeights
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.checkpoint.resume import Resumed
from lockstep.checkpoint.run_state import Part, RunState
from lockstep.checkpoint.storage import delete_leftovers, open_storage
from lockstep.config import Resolved, RunConfig
from lockstep.data.dataset_source import DatasetSource
from lockstep.data.from_loader import Collate, is_stateful_stream, take_loader
from lockstep.data.mosaic import DESCRIPTION, by_index, is_streaming_dataset
from lockstep.data.samplers.torch_samplers import bind_sampler
from lockstep.data.sources import open_source
from lockstep.engine.checks.guards import LateHooks, TrainableGuard
from lockstep.engine.checks.model import (
    check_not_wrapped,
)
from lockstep.engine.checks.settings import (
    check_before_batch,
    check_same_config,
    check_sample_log,
    check_steps_left,
)
from lockstep.engine.determinism import Exactness
from lockstep.engine.evaluation.evaluations import Evaluations
from lockstep.engine.evaluation.evaluator import Evaluation, EvaluationSet, Evaluator
from lockstep.engine.evaluation.schedule import EvaluationSchedule
from lockstep.engine.hooks.calls import Hooks
from lockstep.engine.hooks.trained_parameters import TrainedParameters
from lockstep.engine.hooks.view import BuiltRunView
from lockstep.engine.load_balance import LoadBalancer, open_load_balancer
from lockstep.engine.log.banner import describe_resume, describe_run
from lockstep.engine.log.step_log import SampleLog, StepLog
from lockstep.engine.model_setup import ModelSetup
from lockstep.engine.profile.steps import ProfiledSteps
from lockstep.engine.requests import Requests
from lockstep.engine.run import Run
from lockstep.engine.setup.data import attach_source, plan_data, source_options
from lockstep.engine.setup.model import check_model, initial_weights, make_average, wrap_optimizers
from lockstep.engine.setup.resumed import continue_plan, last_log_line
from lockstep.engine.step import Stepper
from lockstep.errors import ConfigError, Preempted, UserError
from lockstep.launch import records
from lockstep.observe.recorder import Recorder
from lockstep.observe.report import write_report
from lockstep.observe.run_folder import RunFolder, open_run_dir, write_head
from lockstep.optim.optimizers import Optimizers, rebind
from lockstep.optim.user_scheduler import SchedulerRate, check_schedulers_passed, make_learning_rate
from lockstep.parallel.apply import apply
from lockstep.parallel.cudagraph.graphs import release_captures
from lockstep.parallel.driver import Driver, trainable
from lockstep.parallel.inner_gradients import stop_watching
from lockstep.plan.plan import Plan
from lockstep.precision import Precision, choose_precision, for_model
from lockstep.runtime.context import Runtime
from lockstep.runtime.environments.launcher import ATTEMPT_FOLDER, from_launcher
from lockstep.runtime.seeds import derive, preserve_rng, seed_everything, seed_torch
from lockstep.task import BatchSource

LAST_SAVE_S = 5.0  # seconds that a save in flight gets when the run fails


@dataclass(eq=False)
class RunBuilder:
    """The parts of a run that exist so far, before its first step."""

    # From `open_run`.
    resolved: Resolved
    runtime: Runtime
    name: str
    unit: str
    folder: RunFolder
    recorder: Recorder
    precision: Precision
    run_class: type[Run]
    started: float = field(default_factory=time.time)
    parts: dict[str, Part] = field(default_factory=dict)  # see `add_part`
    checkpoints_opened: bool = False  # from then on, `parts` does not change
    callbacks: list[Any] = field(default_factory=list)  # given to `fit`, or by `run.add_callback`
    hooks: Hooks | None = None  # see `use_hooks`
    reads_loss: bool = False  # whether the user's code reads the loss of each step

    # From `setup_model`. The driver is set first: if making the optimizers fails, the error message needs it.
    driver: Driver | None = None
    model_setup: ModelSetup | None = None
    evaluation: Evaluation | None = None  # made before the first step

    # From `setup_run`.
    run: Run | None = None

    # Callbacks of `fail`, which run in reverse order.
    _on_failure: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

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
    ) -> ModelSetup:
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

        check_not_wrapped(model)
        self.precision = for_model(self.precision, self.config.precision, model)
        check_model(model, self.precision, self.runtime)

        # Sharding replaces parameters. `rebind` gives the new ones, by name, to optimizers that were made before.
        parameters_before = dict(model.named_parameters())
        self.driver = apply(model, self.config, self.runtime, task, self.recorder.event, data)

        # Undone if the run fails.
        self._on_failure.callback(release_captures, self.driver.model)
        if self.driver.compiler:
            self._on_failure.callback(self.driver.compiler.release)
        self._on_failure.callback(stop_watching)  # a custom loop may fail while it is watched

        late_hooks = LateHooks(model, parameters_before)

        # Before the optimizers, which may copy the weights.
        if self.config.init_from:
            self.add_part("init_from", initial_weights(self.driver, self.config, self.runtime, self.folder))

        # Drivers may have state of their own, such as PowerSGD's errors.
        for name, part in self.driver.parts.items():
            self.add_part(name, part)

        # Make the optimizers after sharding, so that their state matches the shards.
        wrapped, user_schedulers = self._make_optimizers(model, optimizers, schedulers, parameters_before)

        # Exactness saves a description of the platform with every checkpoint: a resumed run must compute the same bits.
        exactness = None
        if self.config.exact:
            exactness = Exactness(model, wrapped, self.runtime, getattr(task, "changing_buffers", ()))
            self.add_part("exact", exactness)

        self.model_setup = ModelSetup(
            driver=self.driver,
            optimizers=wrapped,
            evaluator=Evaluator(self.config, self.precision, self.driver, self.runtime, self.recorder),
            guard=TrainableGuard(model, late_hooks),
            exactness=exactness,
            schedulers=user_schedulers,
            average=make_average(model, self.config, self.driver, self.runtime),
        )
        return self.model_setup

    def expect_unused_parameters(self, reason: str) -> None:
        """Set ddp.find_unused_parameters before `setup_model`, for losses that reach only a part of the model.

        It stays as it is where the user has set it, or an option of DDP that excludes it: an error will name the key.
        """
        config = self.config
        is_ddp = config.strategy_record.local_forward and not config.uses_axis("tp", "pp")
        if self.runtime.world.alone or not is_ddp:
            return

        key = "ddp.find_unused_parameters"
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
        user_optimizers = optimizers(self.driver.model)
        rebind(user_optimizers, parameters_before, dict(model.named_parameters()))
        wrapped = wrap_optimizers(user_optimizers, model, self.config, self.precision, self.runtime)
        if not self.driver.role.runs_whole_model:
            wrapped.refuse_coupled("a stage of a pipeline")

        self._on_failure.callback(wrapped.release)
        user_schedulers = schedulers(wrapped.all[0] if len(wrapped.all) == 1 else wrapped.all)
        check_schedulers_passed(user_optimizers, user_schedulers)
        return wrapped, user_schedulers

    def add_part(self, name: str, part: Part) -> None:
        """Save and restore `part` with every checkpoint. The name "data" is reserved for the data source."""
        if name in ("data", *self.parts):
            raise UserError(f"{name!r} cannot be saved with the run: the name is taken", "", "use another name")
        if not hasattr(part, "load_state_dict"):
            raise UserError(
                f"{name!r} cannot be saved with the run: it has state_dict() and no load_state_dict()",
                "a resumed run could not restore it",
                "add load_state_dict(state), or remove state_dict()",
            )
        if self.checkpoints_opened:
            raise UserError(
                f"{name!r} cannot be saved with the run: its checkpoints are already open",
                "it would be saved, but a resumed run would not restore it",
                "add it before the first step: call run.register before run.steps",
            )

        self.parts[name] = part

    def use_hooks(self, hooks: Hooks) -> None:
        """Call these hooks during the run, and save the state of the callbacks that have one."""
        self.hooks = hooks
        self.reads_loss |= hooks.follow_steps
        for name, callback in hooks.parts():
            self.add_part(name, callback)

    def setup_run(self, data: Any, collate: Callable[[list[Any]], Any]) -> Run:
        """Make everything that depends on the data, resume if there is a checkpoint, and print the banner."""
        setup = self.model_setup
        assert setup is not None, "setup_run() before setup_model()"

        # A DataLoader may set what the configuration leaves open, so it comes first.
        data, collate, loader_lines = self._take_loader(data, collate)
        config, runtime, driver = self.config, self.runtime, setup.driver
        for hook in self.hooks.batch_hooks if self.hooks else ():
            check_before_batch(config, driver.role, runtime.world.alone, hook)

        # The length of the data determines the plan: how a batch is split, and the number of steps.
        plan, source = self._plan_data(data, collate, driver)
        largest_input = source.largest_input if isinstance(source, DatasetSource) else lambda: None
        with preserve_rng(runtime.device):
            runtime.suit_threads(driver.model, plan.micro_batch, largest_input)

        attach_source(source, driver, plan, config, runtime)
        samples = self._open_sample_log()

        load_balancer = open_load_balancer(config.load_balance, plan, source, driver, runtime, self.recorder.event)
        stepper = self._make_stepper(setup, plan, load_balancer)
        # Resuming restores the state of all parts, so all of them must exist by now.
        checkpoints = self._open_checkpoints(setup, stepper, source, plan)
        resumed = checkpoints.resume()
        if resumed:
            plan = checkpoints.plan = continue_plan(resumed, plan, source, stepper, config)

        log = StepLog(config.log.every, plan, stepper, self.recorder, samples)
        facts = self._describe(setup, plan, source, stepper, loader_lines)
        if resumed:
            facts["resumed"] = self._continue_records(resumed, log, stepper, plan)
        facts |= self._describe_weights(setup, plan, source, resumed)
        self._write_start(facts, plan, driver)

        requests = Requests(stepper, checkpoints)
        run = self.run_class(
            config=config,
            runtime=runtime,
            name=self.name,
            started=self.started,
            folder=self.folder,
            recorder=self.recorder,
            model_setup=setup,
            plan=plan,
            source=source,
            stepper=stepper,
            load_balancer=load_balancer,
            checkpoints=checkpoints,
            resumed=resumed,
            requests=requests,
            log=log,
            evaluations=self._make_evaluations(plan, stepper, requests, resumed),
            hooks=self.hooks or Hooks(BuiltRunView(self)),
            _keep_alive=self,
        )

        if resumed:
            run.restore(resumed)
        elif setup.average:
            # A custom loop may have loaded weights since `run.setup`.
            setup.average.restart(setup.average.averages)

        checkpoints.ensure_rewind_checkpoint(run.save_checkpoint)
        if config.profile.count:
            run.profiled = ProfiledSteps(run)

        # Set last: while `self.run` is None, an error counts as a set-up error.
        self.run = run
        return run

    def evaluate(self, chosen: EvaluationSet) -> Evaluation:
        """Evaluate the model before the first step. No batch size is derived yet, so evaluate.batch must be set."""
        assert self.model_setup is not None, "evaluate() before setup_model()"
        batch = self.config.evaluate.batch
        if batch is None:
            raise UserError(
                "evaluate.batch is not set, and an evaluation before the first step needs it",
                "",
                "set evaluate.batch=64",
            )

        self.evaluation = self.model_setup.evaluator.evaluate(chosen, batch, step=0)
        assert self.evaluation is not None, "only an evaluation that may be preempted ends early"
        return self.evaluation

    def fail(self, error: BaseException) -> None:
        """Release all parts, and write the error and a report to the run folder. The caller raises the error again."""
        # Errors during the clean-up are dropped: they would hide the original one.
        with contextlib.suppress(Exception):
            self._on_failure.close()

        # Metrics that have arrived from the device.
        with contextlib.suppress(Exception):
            self.recorder.poll()

        with contextlib.suppress(Exception):
            # The parent process prints the error. A launcher prints only the first error of all ranks.
            self.recorder.hide()
            if not isinstance(error, Preempted):
                self.recorder.event("error", type=type(error).__name__, message=str(error))

            self.recorder.close()
            if self.runtime.is_main:
                write_report(self.folder.path)

        self.folder.release_lock()

    # ---- parts of setup_run ----

    def _take_loader(self, data: Any, collate: Collate) -> tuple[Any, Collate, dict[str, str]]:
        """Return (data, collate, banner lines). A DataLoader is replaced by its parts; most other data has no lines."""
        if is_streaming_dataset(data):
            return by_index(data), collate, {"StreamingDataset": DESCRIPTION}

        if not isinstance(data, DataLoader) or is_stateful_stream(data):
            return data, collate, {}

        taken = take_loader(data, collate)
        self.resolved = self.resolved.fill_in("DataLoader", taken.settings)
        check_same_config(self.config, self.runtime)
        used = {key for key in taken.settings if self.resolved.sources[key] == "DataLoader"}
        return taken.data, taken.collate, {"DataLoader": taken.describe(used)}

    def _plan_data(self, data: Any, collate: Callable[[list[Any]], Any], driver: Driver) -> tuple[Plan, BatchSource]:
        config = self.config
        data = bind_sampler(data, config.seed)
        plan = plan_data(data, driver, config, self.runtime, self.folder)
        source = open_source(
            data, collate, source_options(plan, driver.role, config, self.runtime, self.recorder.event)
        )
        self._on_failure.callback(source.close)

        # A user-defined source may compute its batches on the GPU, so the time in it does not count as data wait.
        self.recorder.watch_data = self.runtime.device.type == "cuda" and source is not data
        check_sample_log(config, source)
        return plan, source

    def _open_sample_log(self) -> SampleLog | None:
        if not self.config.log.samples:
            return None

        path = self.folder.path / "samples" / f"rank-{self.runtime.world.rank}.jsonl"
        samples = SampleLog(path, self.folder.attempt)
        self._on_failure.callback(samples.close)
        return samples

    def _make_stepper(self, setup: ModelSetup, plan: Plan, load_balancer: LoadBalancer | None) -> Stepper:
        rate = make_learning_rate(
            self.config.lr,
            self.resolved.sources,
            optimizers=setup.optimizers.all,
            schedulers=setup.schedulers,
            total_steps=plan.steps,
            global_batch=plan.global_batch,
        )
        self._on_failure.callback(rate.release)
        if isinstance(rate, SchedulerRate):
            self.add_part("scheduler", rate)

        stepper = Stepper(
            driver=setup.driver,
            optimizers=setup.optimizers,
            learning_rate=rate,
            precision=self.precision,
            config=self.config,
            runtime=self.runtime,
            global_batch=plan.global_batch,
            log_event=self.recorder.event,
            # Load balancing measures the time of a rank up to the start of its gradient all-reduce.
            before_all_reduce=load_balancer.mark if load_balancer else None,
            reads_loss=self.reads_loss,
        )
        callbacks = self.hooks.callbacks if self.hooks else []
        if delaying := [callback for callback in callbacks if hasattr(callback, "first_steps")]:
            stepper.trained_parameters = TrainedParameters(setup.driver, delaying)

        return stepper

    def _describe(
        self, setup: ModelSetup, plan: Plan, source: BatchSource, stepper: Stepper, loader_lines: dict[str, str]
    ) -> dict[str, str]:
        """Return the lines of the banner about the settings and the plan. Collective."""
        model = setup.driver.model
        facts = describe_run(model, self.config, plan, stepper.learning_rate, self.precision, self.runtime)

        # The driver, the optimizers and the source may add some.
        facts |= setup.driver.facts
        facts |= setup.optimizers.facts
        if source.about:
            facts["data"] = source.about

        return facts | loader_lines

    def _describe_weights(
        self, setup: ModelSetup, plan: Plan, source: BatchSource, resumed: Resumed | None
    ) -> dict[str, str]:
        """Return the lines of the banner about weights that were loaded, and about their exactness."""
        facts = {}
        initial = self.parts.get("init_from")
        if isinstance(initial, InitialWeights):
            facts["init_from"] = initial.describe(resumed is not None)

        if setup.exactness:
            facts["exact"] = setup.exactness.begin(source, plan, resumed.changed_settings if resumed else [])

        return facts

    def _make_evaluations(
        self, plan: Plan, stepper: Stepper, requests: Requests, resumed: Resumed | None
    ) -> Evaluations:
        seconds_before = resumed.loop.seconds if resumed else 0.0
        return Evaluations(
            config=self.config,
            schedule=EvaluationSchedule(self.config.evaluate, plan.steps_per_epoch, plan.ahead, seconds_before),
            requests=requests,
            checkpoints=requests.checkpoints,
            learning_rate=stepper.learning_rate,
            recorder=self.recorder,
            newest=self.evaluation,
        )

    def _open_checkpoints(
        self, setup: ModelSetup, stepper: Stepper, source: BatchSource, plan: Plan
    ) -> CheckpointManager:
        self.checkpoints_opened = True
        state = RunState(
            model=setup.driver.model,
            optimizers=setup.optimizers,
            stepper=stepper,
            source=source,
            parts=self.parts,
            keep_frozen=self.config.checkpoint.frozen,
            holders=setup.driver.role.holders,
            rank=self.runtime.world.rank,
            duplicates=setup.driver.role.duplicates,
            average=setup.average,
            on_any_rank=lambda value: any(self.runtime.collectives.gather_json(value)),
        )
        checkpoints = CheckpointManager(
            folder=self.folder,
            storage=open_storage(self.folder.path / "checkpoints"),
            state=state,
            config=self.config,
            plan=plan,
            runtime=self.runtime,
            log_event=self.recorder.event,
            before_next_update=stepper.update.run_before_next,
        )

        # Let a save in flight finish: it may be the only checkpoint of a run that fails.
        self._on_failure.callback(checkpoints.close, timeout=LAST_SAVE_S)

        # Free the space of what killed attempts left behind.
        if self.runtime.is_main:
            delete_leftovers(checkpoints.storage, self.folder.token)

        checkpoints.check_space()
        return checkpoints

    def _continue_records(self, resumed: Resumed, log: StepLog, stepper: Stepper, plan: Plan) -> str:
        """Continue the clock and the log of a resumed run. Return a line for the banner."""
        steps_done = stepper.counters.steps_done
        check_steps_left(plan.steps, steps_done)
        self.started -= resumed.loop.seconds
        log.restore(resumed.loop.interval)

        # If no step follows, no new log line will be written, but the summary needs the last one.
        may_be_stopped = resumed.loop.stop or (self.config.stop.patience and resumed.loop.early_stop)
        if steps_done == plan.steps or may_be_stopped:
            self.recorder.last = self.runtime.collectives.run_on_rank0(
                lambda: last_log_line(self.folder.path, steps_done)
            )

        return describe_resume(resumed, self.folder)

    def _write_start(self, facts: dict[str, str], plan: Plan, driver: Driver) -> None:
        if self.runtime.is_main:
            sharding = {name: facts[name] for name in ("strategy", "remat") if name in facts}
            write_head(self.folder.path, self.resolved, plan.as_record() | sharding)

        start = {
            "task": self.name,
            "world": self.runtime.world.size,
            "device": str(self.runtime.device),
            "precision": self.precision.name,
            "parameters": sum(p.numel() for p in driver.model.parameters()),
            "trainable": sum(p.numel() for p in trainable(driver.model)[1]),
            "unit": self.unit,
            "steps": plan.steps,
            "run_dir": self.folder.shown,
            "facts": facts,
        }
        self.recorder.open(self.config.log.progress, plan.steps, self.unit, start)


def open_run(
    resolved: Resolved, runtime: Runtime, name: str, unit: str = "sample", run_class: type[Run] = Run
) -> RunBuilder:
    """Open the run folder and its records, and seed the generators for building the model."""
    config = resolved.config

    # This check comes before any other collective: with different settings the ranks might deadlock there.
    check_same_config(config, runtime)

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
    )

    # Write the launcher's settings where it reads them: it has no access to the task's defaults.
    launcher_folder = from_launcher(ATTEMPT_FOLDER)
    if launcher_folder and os.environ.get("RANK") == "0":
        limits = {"hang": config.hang.model_dump(), "restart": config.restart.model_dump()}
        records.write(Path(launcher_folder) / "settings.json", json.dumps(limits))

    # Code that draws random numbers before the first step, such as model initialization, draws the same on every rank.
    runtime.heartbeat.beat("build")
    seed_everything(derive(config.seed, "init"))
    seed_torch(derive(config.seed, "init"), runtime.device)
    return builder
