"""How a run begins: the model under its driver, and its optimizers; then the plan, the data and the step, and the
checkpoint to go on from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.checkpoint.manager import CheckpointManager
from lockstep.checkpoint.run_state import RunState
from lockstep.config import RunConfig
from lockstep.data.shard import deal
from lockstep.data.sources import BatchShape, open_source
from lockstep.engine.banner import facts, resumed_text, start_record
from lockstep.engine.checks import (
    TrainableGuard,
    check_enough_work,
    check_even_work,
    check_logged,
    check_plain,
    check_replicas,
    check_something_left,
    check_supported,
)
from lockstep.engine.determinism import Exactness
from lockstep.engine.diagnose import noted_micro_batch
from lockstep.engine.load_balance import by_speed, open_dealer
from lockstep.engine.step import Stepper
from lockstep.errors import UserError
from lockstep.observe.run_folder import on_main, write_head
from lockstep.observe.sinks import read_jsonl
from lockstep.optim.bf16_masters import MasterWeights
from lockstep.optim.optimizers import Optimizers, rebind
from lockstep.optim.registry import chosen
from lockstep.optim.schedule import LearningRate
from lockstep.optim.zero1 import ShardedOptimizers
from lockstep.parallel.apply import apply
from lockstep.parallel.driver import Driver
from lockstep.plan.plan import Plan, make_plan
from lockstep.precision import check_statistics, check_storage
from lockstep.runtime.context import Runtime
from lockstep.runtime.world import World
from lockstep.task import BatchSource, SourceContext

if TYPE_CHECKING:
    from lockstep.engine.run import Run


def adopt(
    run: Run,
    model: nn.Module,
    optimizers: Callable[[nn.Module], Any],
    task: Any = None,
    data: Callable[[], Any] | None = None,
) -> Driver:
    """Put the model on its device and under its driver, and get its optimizers. `task` may know how to cut it; or
    samples of `data` show how."""
    if hasattr(run, "driver"):
        raise UserError(
            "a second model in one run",
            "one that was set up before; a run trains one module",
            "put both into one nn.Module, or pass a frozen one alone: teacher = run.setup(teacher)",
        )
    check_plain(model)
    if not run.precision.way:
        check_storage(model)
    else:
        check_statistics(model, run.precision)
    check_supported(model)
    check_replicas(model, run.runtime, only_frozen=True)  # nobody broadcasts them: they must be equal already
    before = dict(model.named_parameters())
    run.driver = apply(model, run.config, run.runtime, task, run.recorder.event, data)
    run.others.update(run.driver.kept)
    made = optimizers(run.driver.model)
    rebind(made, before, dict(model.named_parameters()))
    made = chosen(run.config, made)
    cut = run.config.strategy == "zero1" and not run.runtime.world.alone
    run.optimizers = ShardedOptimizers(made, model, run.runtime) if cut else Optimizers(made, model)
    if run.precision.way:
        run.optimizers.stand_in(MasterWeights(run.optimizers.all, model, run.precision.way, run.config.seed))
    run.guard = TrainableGuard(model)
    changing = getattr(task, "changing_buffers", ())
    run.exactness = Exactness(model, run.optimizers, run.runtime, changing) if run.config.exact else None
    if run.exactness:
        run.others["exact"] = run.exactness
    return run.driver


def open_data(run: Run, data: Any, collate: Callable[[list[Any]], Any]) -> None:
    """With the data known, everything that depends on its size is decided, written down and told."""
    about_data = _plan_data(run, data, collate)
    rate = _make_step(run)
    told = facts(run.driver.model, run.config, run.plan, rate, run.precision, run.runtime)
    told |= run.driver.facts
    told |= {"data": about_data} if about_data else {}
    told |= _go_on(run)
    run.opened = True
    if run.runtime.is_main:
        shared = {name: told[name] for name in ("strategy", "remat") if name in told}
        write_head(run.run_dir, run.resolved, run.plan.as_dict() | shared)
    run.recorder.open(run.config.log.progress, run.plan.steps, run.unit, start_record(run) | {"facts": told})
    run.checkpoints.begin()


def _plan_data(run: Run, data: Any, collate: Callable[[list[Any]], Any]) -> str | None:
    """How the batches are cut, and where they come from. A source's own line about itself."""
    config, runtime, driver = run.config, run.runtime, run.driver
    share = World(driver.data_rank, driver.data_size)  # ranks that share a layer share the samples too
    samples = len(data) if hasattr(data, "__len__") else None
    most = noted_micro_batch(run.run_dir, runtime) if config.micro_batch == "auto" else None
    depth = driver.pipeline.depth if driver.pipeline is not None else 1
    run.plan = plan = by_speed(make_plan(config, share.size, samples, most, depth), config.load_balance)
    check_even_work(driver.model, plan, config.tail)
    if driver.pipeline is not None:
        check_enough_work(plan)
    shape = BatchShape(plan.global_batch, plan.micro_batch, config.tail, driver.interleaved, even=driver.in_step)
    run.source = open_source(data, collate, shape, config.data, config.seed, share, runtime.device)
    # A source of the user's own may compute its batches on the GPU: there, a long time for data is no waiting.
    run.recorder.watch_data = runtime.device.type == "cuda" and run.source is not data
    check_logged(config, run.source)
    return attach(run.source, share, driver, plan, config, runtime)


def _make_step(run: Run) -> LearningRate:
    config, runtime, driver, plan = run.config, run.runtime, run.driver, run.plan
    rate = LearningRate(config.lr, run.optimizers.all, plan.steps, plan.global_batch)
    run.stepper = Stepper(driver, run.optimizers, rate, run.precision, config, runtime, plan.global_batch)
    run.load_balancer = open_dealer(config.load_balance, plan, run.source, driver, runtime, run.recorder.event)
    if run.load_balancer:
        run.stepper.before_exchange = run.load_balancer.mark
    return rate


def _last_line(run: Run) -> dict[str, Any]:
    """Of the log, up to the step that the run goes on from."""
    path = run.run_dir / "metrics.jsonl"
    lines = read_jsonl(path) if path.exists() else []
    return next((line for line in reversed(lines) if line["step"] <= run.stepper.counters.step), {})


def _go_on(run: Run) -> dict[str, str]:
    """From a checkpoint, if there is one to go on from; and what is to be told of that."""
    told = {}
    state = RunState(
        run.driver.model,
        run.optimizers,
        run.stepper,
        run.source,
        run.others,
        run.config.checkpoint.frozen,
        run.driver.holders,
        run.runtime.world.rank,
        run.driver.echoes,
    )
    run.checkpoints = CheckpointManager(run.folder, state, run.config, run.plan, run.runtime, run.recorder.event)
    run.checkpoints.check_space()
    run.resumed = run.checkpoints.resume()
    if run.resumed:
        check_something_left(run.plan.steps, run.stepper.counters.step)
        told["resumed"] = resumed_text(run.resumed, run.folder)
        run.started -= run.resumed.seconds
        run.recorder.carry_on(run.stepper.sums, run.resumed.interval)
        run.stepper.metrics_known = set(run.recorder.names)
        if run.stepper.counters.step == run.plan.steps:  # all that is left is to end it
            run.recorder.last = on_main(lambda: _last_line(run), run.runtime)
    if run.exactness:
        told["exact"] = run.exactness.begin(run.source, run.plan, run.resumed.settings if run.resumed else [])
    return told


# A BatchSource that makes its own batches, by calling the model, is told where it is.


def attach(
    source: BatchSource, share: World, driver: Driver, plan: Plan, config: RunConfig, runtime: Runtime
) -> str | None:
    """A source that makes its own batches (a rollout) learns where it is. What it says about them."""
    told: Callable[[SourceContext], str] | None = getattr(source, "attach", None)
    if told is None:
        return None
    if driver.pipeline is not None:
        raise UserError(
            f"{type(source).__name__}, which calls the model itself, in a pipeline (mesh.pp)",
            "ranks that hold a part of the model each",
            "type strategy=ddp or strategy=fsdp",
        )
    around = SourceContext(
        model=driver.model,
        device=runtime.device,
        seed=config.seed,
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        mine=deal(plan.micro_batches, share.rank, share.size),
        ranks=share.size,
        in_step=driver.in_step,
        add=lambda values: runtime.collectives.sum_(values if driver.speaks else values.zero_()),
    )
    return told(around)
