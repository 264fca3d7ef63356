"""The third stage of the set-up: everything that depends on the data, from the plan to the Run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from lockstep.checkpoint.loading.resume import Resumed
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.checkpoint.state.run_state import RunState
from lockstep.config import flatten
from lockstep.data.from_loader import Collate, is_stateful_stream, take_loader
from lockstep.data.samplers.torch_samplers import bind_sampler
from lockstep.data.sources import check_is_data, open_source
from lockstep.data.streams.mosaic import DESCRIPTION, by_index, is_streaming_dataset
from lockstep.engine.checks.same_data import DataRecord
from lockstep.engine.checks.settings import check_before_batch, check_same_config, check_sample_log, check_steps_left
from lockstep.engine.evaluation.evaluations import Evaluations
from lockstep.engine.evaluation.schedule import EvaluationSchedule
from lockstep.engine.hooks.trained_parameters import TrainedParameters
from lockstep.engine.load_balance import balance_load
from lockstep.engine.log.banner import describe_own_loop, describe_resume, describe_run
from lockstep.engine.log.rank_dependence import FirstDraws
from lockstep.engine.log.step_log import SampleLog, StepLog
from lockstep.engine.profile.steps import add_profile
from lockstep.engine.requests import Requests
from lockstep.engine.run import Run
from lockstep.engine.setup.data import attach_source, continue_plan, largest_input, plan_data, source_options
from lockstep.engine.step import Stepper
from lockstep.engine.trained_model import TrainedModel
from lockstep.observe.head import write_head
from lockstep.observe.history import last_log_line
from lockstep.observe.metrics import ExactSums, Interval, MetricNames, Sums
from lockstep.optim.schedule import LearningRate
from lockstep.optim.schedulers.user_scheduler import SchedulerRate, make_learning_rate
from lockstep.parallel.driver import Driver
from lockstep.parallel.progress import StepContext
from lockstep.plan.plan import Plan
from lockstep.runtime.seeds import preserve_rng
from lockstep.task import BatchSource, Task

if TYPE_CHECKING:
    from lockstep.engine.setup.builder import RunBuilder  # which calls this stage

# Of a custom loop that is resumed, if it has registered nothing.
UNREGISTERED = "state of the script's own, such as averages or counters: run.register(name, object) saves it"

LAST_SAVE_S = 5.0  # seconds that a save in flight gets when the run fails


def make_run(builder: RunBuilder, trained: TrainedModel, data: Any, collate: Collate) -> Run:
    """Make a Run and all objects that it needs besides its model, each after those that it uses. Collective."""
    check_is_data(data)

    # A DataLoader may set keys that the configuration leaves open, so it comes first.
    data, collate, loader_lines = _take_loader(builder, data, collate)
    config, runtime, driver = builder.config, builder.runtime, trained.driver

    _check_unchanged(trained)
    for hook in builder.hooks.named("before_batch"):
        check_before_batch(config, driver.role, runtime.world.alone, hook)

    # The length of the data determines the plan: how a batch is split, and the number of steps.
    plan, source = _open_data(builder, driver, data, collate)
    balance_load(config.load_balance, plan, source, driver, runtime, builder.recorder.event)
    interval = Interval(ExactSums(runtime.collectives) if config.exact else Sums(), MetricNames())
    rate = _make_learning_rate(builder, trained, plan)
    stepper = _make_stepper(builder, trained, plan, rate, interval)

    # Resuming restores everything that is registered, so all of it must exist before.
    checkpoints = _open_checkpoints(builder, trained, stepper, source)
    resumed, plan = _resume(builder, checkpoints, plan, source, stepper, rate)

    # The loop continues where the checkpoint was written. Then the banner describes what was made.
    if config.log.samples:
        driver.parts.add(SampleLog(builder.folder, runtime.world.rank))

    log = StepLog(config.log.every, plan, stepper, interval, builder.recorder, runtime.collectives)
    requests = _make_requests(builder, plan, stepper, checkpoints, source, interval, resumed)
    # A rewind keeps the elapsed time and the requests.
    loop = checkpoints.state.loop
    loop.add_and_restore("clock", builder.clock, rewinds=False)
    evaluations = _make_evaluations(builder, plan, rate, checkpoints, requests)
    loop.add_and_restore("log", log)
    loop.add_and_restore("requests", requests, rewinds=False)
    loop.add_and_restore("evaluations", evaluations)
    data_record = _make_data_record(builder, source, resumed, checkpoints)
    loop.add_and_restore("data", data_record, rewinds=False)

    facts = _describe(builder, trained, plan, source, rate) | loader_lines
    facts |= _describe_beginning(builder, resumed, requests, plan)
    facts |= _describe_weights(trained, plan, source, resumed)
    _write_start(builder, facts, plan, driver)

    # The line of the banner about layers says the same. A pipeline has many micro-batches in flight.
    if plan.follows_ranks(config) and "micro-batches" not in facts and driver.role.runs_whole_model:
        driver.parts.add(FirstDraws(plan, runtime.device, builder.recorder.event))

    run = builder.run_class(
        config=config,
        runtime=runtime,
        name=builder.name,
        clock=builder.clock,
        folder=builder.folder,
        recorder=builder.recorder,
        trained_model=trained,
        plan=plan,
        source=source,
        learning_rate=rate,
        stepper=stepper,
        checkpoints=checkpoints,
        resumed=resumed,
        requests=requests,
        log=log,
        evaluations=evaluations,
        data_record=data_record,
        hooks=builder.hooks,
        passes=builder.passes,
    )

    _begin(run, builder)
    return run


def _check_unchanged(trained: TrainedModel) -> None:
    """Raise if a custom loop has changed the model or its optimizers since `run.setup`."""
    trained.guard.check()
    trained.guard.check_structure()
    trained.optimizers.check_groups(trained.guard.model)


def _resume(
    builder: RunBuilder,
    checkpoints: CheckpointManager,
    plan: Plan,
    source: BatchSource,
    stepper: Stepper,
    rate: LearningRate,
) -> tuple[Resumed | None, Plan]:
    """Restore the checkpoint that the run resumes from, if there is one, and return the plan that follows."""
    # A new run is refused before it claims its folder. One that may resume has its number of steps only afterwards.
    may_resume = builder.folder.start_from.will_load(has_checkpoint=True)
    foreseen = [] if may_resume else _look_ahead(builder, rate, plan)

    resumed = checkpoints.open()
    if resumed:
        plan = continue_plan(resumed, plan, source, stepper, builder.config)

    if may_resume:
        foreseen = _look_ahead(builder, rate, plan)

    for text in foreseen:
        builder.recorder.event("warning", reason=text)

    return resumed, plan


def _make_data_record(
    builder: RunBuilder, source: BatchSource, resumed: Resumed | None, checkpoints: CheckpointManager
) -> DataRecord:
    return DataRecord(
        source,
        builder.runtime,
        builder.recorder.event,
        builder.registered.values(),
        builder.folder.as_shown(resumed.location) if resumed else None,
        workers=builder.config.data.workers,
        reads=resumed is not None or checkpoints.decision.settings_ask,
    )


def _describe_beginning(builder: RunBuilder, resumed: Resumed | None, requests: Requests, plan: Plan) -> dict[str, str]:
    """Return a line of the banner about where the run begins, or about a custom loop that begins for the first time."""
    if resumed:
        line = {"resumed": _continue_records(builder, resumed, requests, plan)}
        forgets = builder.task is None and not builder.registers_own
        return line | ({"not restored": UNREGISTERED} if forgets else {})

    if builder.folder.start_from.newest:
        return {"resume": f"no checkpoint in {builder.folder.shown}, so the run starts from its beginning"}

    if builder.task is None and builder.config.checks.loss != "off":
        return _describe_own_loop(builder)

    return {}


def _begin(run: Run, builder: RunBuilder) -> None:
    """Prepare the first step, after the set-up. Collective."""
    # A custom loop may have loaded weights since `run.setup`.
    average = run.trained_model.average
    if average and not run.resumed:
        average.restart(average.parameter_tensors)

    # `rewind` needs a checkpoint to return to, even before the first one is due.
    run.checkpoints.rewinder.ensure_checkpoint(run.save_checkpoint)

    if run.config.profile.count:
        add_profile(run, builder.task.loss if builder.task else None)


# ---- the data ----


def _take_loader(builder: RunBuilder, data: Any, collate: Collate) -> tuple[Any, Collate, dict[str, str]]:
    """Return (data, collate, banner lines). A DataLoader is replaced by its parts; most other data has no lines."""
    if is_streaming_dataset(data):
        return by_index(data), collate, {"StreamingDataset": DESCRIPTION}

    if not isinstance(data, DataLoader) or is_stateful_stream(data):
        return data, collate, {}

    # The user's own settings win over the loader. The settings of the ranks may differ again after this.
    taken = take_loader(data, collate)
    builder.resolved = builder.resolved.fill_in("DataLoader", taken.settings)
    check_same_config(builder.config, builder.runtime)

    used = {key for key in taken.settings if builder.resolved.sources[key] == "DataLoader"}
    return taken.data, taken.collate, {"DataLoader": taken.banner(used, flatten(builder.config))}


def _open_data(builder: RunBuilder, driver: Driver, data: Any, collate: Collate) -> tuple[Plan, BatchSource]:
    """Return the plan and the source, which knows the model if it makes its batches with it."""
    config, runtime = builder.config, builder.runtime

    data = bind_sampler(data, config.seed)
    plan = plan_data(data, driver, config, runtime, builder.folder)
    options = source_options(plan, driver.role, config, runtime, builder.recorder.event)
    source = open_source(data, collate, options)
    # Workers must end if a later part of the set-up fails.
    builder.on_failure(source.close)

    # A user-defined source may compute its batches on the GPU, so the time in it does not count as data wait.
    builder.recorder.reports_late_data = runtime.on_gpu and source is not data
    check_sample_log(config, source)

    # The number of threads follows the sizes of the model and of a sample.
    with preserve_rng(runtime.device):
        runtime.suit_threads(driver.model, plan.micro_batch, partial(largest_input, source))

    attach_source(source, driver, plan, config, runtime)
    return plan, source


# ---- the step and its checkpoints ----


def _make_learning_rate(builder: RunBuilder, trained: TrainedModel, plan: Plan) -> LearningRate:
    """Make what sets the learning rate: the settings, or the user's scheduler."""
    rate = make_learning_rate(
        builder.config.lr,
        builder.resolved.sources,
        optimizers=trained.optimizers.all,
        schedulers=trained.schedulers,
        total_steps=plan.steps,
        global_batch=plan.global_batch,
    )
    builder.on_failure(rate.release)
    if isinstance(rate, SchedulerRate):
        builder.registered.add("scheduler", rate)

    return rate


def _make_stepper(
    builder: RunBuilder, trained: TrainedModel, plan: Plan, rate: LearningRate, interval: Interval
) -> Stepper:
    context = StepContext(
        builder.config,
        builder.runtime,
        builder.precision,
        plan.global_batch,
        reports_loss=trained.driver.role.reports_loss,
        reads_loss=builder.reads_loss,
        log_event=builder.recorder.event,
        metric_names=interval.metric_names,
    )

    # Only a hook that delays parameters makes the step ask which ones it trains.
    delaying = builder.hooks.named("first_steps")
    parameters = TrainedParameters(trained.driver, delaying) if delaying else None
    return Stepper(context, trained.driver, trained.optimizers, rate, interval, parameters)


def _look_ahead(builder: RunBuilder, rate: LearningRate, plan: Plan) -> list[str]:
    """Return warnings about the learning rates of the steps to come. Raise if one of them cannot be set."""
    # Each pass over a step may step a scheduler, and it is known only afterwards how many did.
    if builder.passes > 1:
        return []

    # A custom loop may end itself by `run.stop`.
    stop = builder.config.stop
    may_end_early = builder.task is None or stop.patience is not None or stop.max_minutes is not None

    # After a resume with another batch size, the steps are of two sizes, and do not tell the number of epochs.
    steps_per_epoch = None if plan.ahead else plan.steps_per_epoch
    return rate.look_ahead(plan.steps, steps_per_epoch, may_end_early)


def _make_requests(
    builder: RunBuilder,
    plan: Plan,
    stepper: Stepper,
    checkpoints: CheckpointManager,
    source: BatchSource,
    interval: Interval,
    resumed: Resumed | None,
) -> Requests:
    changed = {change.key for change in resumed.changed_settings} if resumed else set()
    collectives = builder.runtime.collectives
    steps_changed = bool(changed & {"steps", "epochs"})
    return Requests(stepper, checkpoints, source, interval.metric_names, collectives, plan.steps, steps_changed)


def _make_evaluations(
    builder: RunBuilder, plan: Plan, rate: LearningRate, checkpoints: CheckpointManager, requests: Requests
) -> Evaluations:
    """Make the object that decides when to evaluate, and acts on results. The clock must have been restored."""
    seconds = builder.clock.seconds
    return Evaluations(
        config=builder.config,
        schedule=EvaluationSchedule(builder.config.evaluate, plan.steps_per_epoch, plan.ahead, seconds),
        requests=requests,
        saves=checkpoints.decision,
        learning_rate=rate,
        recorder=builder.recorder,
        newest=builder.evaluation,
    )


def _open_checkpoints(
    builder: RunBuilder, trained: TrainedModel, stepper: Stepper, source: BatchSource
) -> CheckpointManager:
    """Return the checkpoint manager. Nothing can be registered after this."""
    builder.registered.close()
    state = RunState(
        model=trained.driver.model,
        optimizers=trained.optimizers,
        stepper=stepper,
        source=source,
        registered=builder.registered,
        keep_frozen=builder.config.checkpoint.frozen,
        frozen_advice=getattr(builder.task, "frozen_advice", Task.frozen_advice),
        holders=trained.driver.role.holders,
        on_any_rank=builder.runtime.collectives.any,
    )

    checkpoints = CheckpointManager(
        folder=builder.folder,
        state=state,
        config=builder.config,
        runtime=builder.runtime,
        log_event=builder.recorder.event,
        update=stepper.update,
        set_save_flag=lambda requested: stepper.set_flags(save=requested),
        fixed_settings=getattr(builder.task, "fixed_settings", ()),
    )

    # Let a save in flight finish: it may be the only checkpoint of a run that fails.
    builder.on_failure(checkpoints.close, timeout=LAST_SAVE_S)

    return checkpoints


# ---- the banner and the records ----


def _describe(
    builder: RunBuilder, trained: TrainedModel, plan: Plan, source: BatchSource, rate: LearningRate
) -> dict[str, str]:
    """Return the lines of the banner about the settings and the plan. Collective."""
    facts = describe_run(trained.driver, builder.config, plan, rate, builder.precision, builder.runtime)

    # The driver, the optimizers and the source may add some.
    facts |= trained.driver.role.banner
    facts |= trained.optimizers.banner
    if source.banner:
        facts["data"] = source.banner

    return facts


def _describe_own_loop(builder: RunBuilder) -> dict[str, str]:
    """Return the line of the banner about a custom loop, if there is one."""
    line = describe_own_loop(builder.name, builder.folder) if builder.runtime.is_main else None
    return {"verify": line} if line else {}


def _describe_weights(
    trained: TrainedModel, plan: Plan, source: BatchSource, resumed: Resumed | None
) -> dict[str, str]:
    """Return the lines of the banner about weights that were loaded, and about their exactness."""
    facts = {}
    if trained.initial:
        facts["init_from"] = trained.initial.describe(resumed is not None)

    if trained.exactness:
        facts["exact"] = trained.exactness.begin(source, plan, resumed.changed_settings if resumed else [])

    return facts


def _continue_records(builder: RunBuilder, resumed: Resumed, requests: Requests, plan: Plan) -> str:
    """Continue the log of a resumed run. Return a line for the banner."""
    steps_done = resumed.step
    check_steps_left(plan.steps, steps_done)

    # If no step follows, no new log line will be written, but the summary needs the last one.
    if steps_done == plan.steps or requests.stop_agreed:
        builder.recorder.last = builder.runtime.collectives.run_on_rank0(
            lambda: last_log_line(builder.folder.path, steps_done)
        )

    return describe_resume(resumed, builder.folder)


def _write_start(builder: RunBuilder, facts: dict[str, str], plan: Plan, driver: Driver) -> None:
    """Write the head of the run folder on rank 0, and open the records with the event `start`."""
    if builder.runtime.is_main:
        sharding = {name: facts[name] for name in ("strategy", "remat") if name in facts}
        write_head(builder.folder.path, builder.resolved, plan.as_record() | sharding)

    start = {
        "task": builder.name,
        "world": builder.runtime.world.size,
        "device": str(builder.runtime.device),
        "precision": builder.precision.name,
        "parameters": sum(p.numel() for p in driver.model.parameters()),
        "trainable": sum(p.numel() for p in driver.parameters.values()),
        "unit": builder.unit,
        "steps": plan.steps,
        "run_dir": builder.folder.shown,
        "facts": facts,
    }

    builder.recorder.open(builder.config.log.progress, plan.steps, builder.unit, start)
