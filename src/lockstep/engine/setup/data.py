"""The plan of a run, and the options of its data source, which `RunBuilder.setup_run` makes from the data."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lockstep.checkpoint.loading.resume import Resumed
from lockstep.checkpoint.state.encoding import pack, unpack
from lockstep.config import RunConfig
from lockstep.data.dataset_source import SourceOptions
from lockstep.data.windows import rank_share
from lockstep.engine.checks.model import check_equal_work, refuse_single_samples
from lockstep.engine.checks.settings import check_enough_micro_batches, check_epochs_countable
from lockstep.engine.diagnose import recorded_micro_batch
from lockstep.engine.load_balance import plan_by_speed
from lockstep.engine.step import Stepper
from lockstep.errors import UserError
from lockstep.parallel.driver import Driver, RankRole
from lockstep.plan.plan import Plan, make_plan
from lockstep.run_folder.opened import RunFolder
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.task import BatchSource, SourceContext


def plan_data(data: Any, driver: Driver, config: RunConfig, runtime: Runtime, folder: RunFolder) -> Plan:
    """Return the plan: how a batch is split over ranks and micro-batches, and the number of steps."""
    role = driver.role

    # A stream has no length. The largest micro-batch that fits is recorded when a run runs out of memory.
    length = _known_length(data)
    max_micro_batch = recorded_micro_batch(folder.path, runtime) if config.micro_batch == "auto" else None

    # Fixed speeds need more accumulation on fast ranks, which the checks below must see.
    plan = make_plan(config, role.data_world.size, length, max_micro_batch, role.pipeline_depth)
    plan = plan_by_speed(plan, config.load_balance)

    check_equal_work(driver.model, plan, config.tail)
    refuse_single_samples(driver.model, plan, config.tail)
    if not role.runs_whole_model:
        check_enough_micro_batches(plan)

    return plan


def continue_plan(resumed: Resumed, plan: Plan, source: BatchSource, stepper: Stepper, config: RunConfig) -> Plan:
    """Return the plan of a resumed run: its epochs are counted by the data, as its steps may have another size."""
    if source.step_order is None:
        check_epochs_countable(config, resumed.global_batch, plan.global_batch)
        return plan

    plan = plan.resumed(config, stepper.steps_done, source.step_order.steps_counted)

    # The schedule ends with the plan, whose number of steps may just have changed.
    stepper.change_total_steps(plan.steps)
    return plan


def source_options(
    plan: Plan, role: RankRole, config: RunConfig, runtime: Runtime, log_event: EventLogger
) -> SourceOptions:
    """Return the options of a source in this run."""
    return SourceOptions(
        global_batch=plan.global_batch,
        micro_batch_size=plan.micro_batch,
        tail=config.tail,
        config=config.data,
        seed=config.seed,
        # All ranks of a tp or pp group train on the same samples, so they count as one.
        data_world=role.data_world,
        device=runtime.device,
        round_robin=role.round_robin,
        collective_forwards=role.collective_forwards,
        exact=config.exact,
        watches_dataset=config.checks.first_batch,
        gather_states=partial(gather_state, runtime.collectives),
        log_event=log_event,
        beat=runtime.heartbeat.keep_alive,
        check_state=_check_stream_state,
    )


def gather_state(collectives: Collectives, state: Any) -> list[Any]:
    """Return the `state` of every rank, by rank: nested plain values, tensors and arrays. Collective; no pickle."""
    if collectives.world.alone:
        return [state]

    tensors: dict[str, Tensor] = {}
    packed = pack(state, "state", tensors)
    by_rank = collectives.all_gather_json([packed, list(tensors)])
    tensors_by_rank = collectives.all_gather_tensors(list(tensors.values()))

    states = []
    for (packed, names), received in zip(by_rank, tensors_by_rank, strict=True):
        # Received on the device of the collectives. `unpack` returns to the device what was not on the CPU.
        host = {name: tensor.cpu() for name, tensor in zip(names, received, strict=True)}
        states.append(unpack(packed, host.__getitem__, collectives.device))

    return states


def attach_source(source: BatchSource, driver: Driver, plan: Plan, config: RunConfig, runtime: Runtime) -> None:
    """Attach a source to the run: it may make its batches with the model."""
    role = driver.role
    calls_model = type(source).attach is not BatchSource.attach
    if calls_model and not role.runs_whole_model:
        raise UserError(
            f"{type(source).__name__} calls the model itself, which is not possible in a pipeline (mesh.pp)",
            "each rank holds only a part of the model",
            "set strategy=ddp or strategy=fsdp",
        )

    source.attach(
        SourceContext(
            model=driver.model,
            device=runtime.device,
            seed=config.seed,
            global_batch=plan.global_batch,
            micro_batch_size=plan.micro_batch,
            mine=rank_share(plan.global_num_micro_batches, role.data_world, role.round_robin),
            ranks=role.data_world.size,
            collective_forwards=role.collective_forwards,
            # Only one rank of each tp or pp group contributes, because all of them have the same values.
            all_reduce=lambda values: runtime.collectives.all_reduce_(values if role.reports_loss else values.zero_()),
        )
    )


def largest_input(source: BatchSource) -> Tensor | None:
    """Return the largest tensor of the first sample, or None if it cannot be read before the workers start."""
    leaves = tree_leaves(source.first_sample())
    try:
        tensors = [torch.as_tensor(leaf) for leaf in leaves if isinstance(leaf, Tensor | np.ndarray)]
    except TypeError:  # an array of text, say
        return None

    return max(tensors, key=Tensor.numel, default=None)


def _known_length(data: Any) -> int | None:
    """Return the number of samples, or None for a stream. A torch DataLoader has `__len__` for streams too."""
    try:
        return len(data)
    except TypeError:
        return None


def _check_stream_state(state: Any) -> None:
    """Raise if checkpoints cannot hold the state of a stream."""
    pack(state, "the state of the stream", {})
