"""The banner that is printed before the first step. Each line of it (a "fact") is a derived value with its reason."""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.config import RunConfig
from lockstep.config.strategies import Strategy
from lockstep.engine.load_balance import describe_speeds
from lockstep.engine.log.rank_dependence import advise, has_dropout, takes_batch_statistics
from lockstep.errors import plural, shell_word
from lockstep.observe.notebook import kernel
from lockstep.optim.registry import describe as describe_optimizer
from lockstep.optim.schedule import LearningRate
from lockstep.parallel.activation_checkpointing import blocks_to_recompute
from lockstep.parallel.apply import wants_compile
from lockstep.parallel.blocks import class_name, find_blocks, suggest_block_class
from lockstep.parallel.compiled.compiler import compiler_of
from lockstep.parallel.cudagraph.graphs import wants_graph
from lockstep.parallel.ddp.hook_table import COMM_HOOKS
from lockstep.parallel.driver import Driver
from lockstep.parallel.fsdp.sharding import count_replicas
from lockstep.parallel.mesh import Mesh, is_sharded_along_tp, plan_mesh
from lockstep.plan.plan import Plan
from lockstep.precision import Precision
from lockstep.runtime.context import Runtime
from lockstep.runtime.world import World

if TYPE_CHECKING:
    from lockstep.checkpoint.loading.resume import Resumed
    from lockstep.run_folder.opened import RunFolder

MAX_PIDS = 16  # the banner lists at most this many


def describe_run(
    driver: Driver,
    config: RunConfig,
    plan: Plan,
    rate: LearningRate,
    precision: Precision,
    runtime: Runtime,
) -> dict[str, str]:
    """Return the lines of the banner, by name. Collective: every rank must call it."""
    mesh = plan_mesh(config, runtime.world)
    several = not runtime.world.alone
    model = driver.model
    captures = not driver.role.collective_forwards and wants_graph(config, runtime)

    # A line that is None is left out.
    facts = {
        "world": _world(runtime),
        "pids": _pids(runtime) if several else None,
        "parameters": _parameters(model),
        # All dtypes: stored, computed, reduced and in the optimizer. The setting names only one of them.
        "precision": f"{precision.name}: {precision.contract(next(model.parameters()).dtype)}",
        "batch": _batch(plan),
        "data": _data(plan, config),
        "learning rate": _learning_rate(rate, config, plan),
        # How the model is sharded. Plain replicas are the usual case and get no line.
        "strategy": _strategy(model, config, mesh, runtime.world),
        "remat": _remat(model, config) if config.remat != "none" else None,
        "mesh": None
        if mesh.is_data_parallel_only
        else f"{mesh}; {plural(mesh.data_size, 'group')} of ranks with samples of their own",
        "dropout": _dropout_of_stages(model, mesh),
        "micro-batches": _micro_batches(model, precision, config, plan, mesh),
        # Settings that change the cost of a step. Those that are off get no line.
        "speeds": describe_speeds(config.load_balance, plan) if several and config.load_balance != "none" else None,
        "compile": _compile(driver, mesh) if wants_compile(config, runtime) else None,
        "graph": _graph(config) if captures else None,
        "optimizer": describe_optimizer(config.optimizer) if config.optimizer != "task" else None,
        "exchange": COMM_HOOKS[config.ddp.hook].banner(config.ddp) if several and config.ddp.hook != "none" else None,
    }

    return {name: text for name, text in facts.items() if text}


def _world(runtime: Runtime) -> str:
    if runtime.world.alone:
        return f"1 process on {runtime.device}, {runtime.threads}"

    # Our own launcher is the usual case.
    launcher = runtime.world.launcher
    source = f" from {launcher}" if launcher not in ("", "lockstep") else ""
    where = f"this one on {runtime.device} with {runtime.threads}"

    # Either ranks share a GPU, which NCCL refuses, or each rank sees only its own.
    more_ranks = runtime.on_gpu and runtime.world.local_size > torch.cuda.device_count()
    if more_ranks and runtime.backend == "gloo":
        where += ", with more ranks than GPUs here"

    return f"{runtime.world.size} processes{source} over {runtime.backend}, {where}"


def _pids(runtime: Runtime) -> str:
    """List the process ids of all ranks, for attaching to one or killing it. Collective: every rank must call it."""
    processes = runtime.collectives.all_gather_json([socket.gethostname(), os.getpid()])

    # With several hosts a process id needs its host.
    several_hosts = len({host for host, _ in processes}) > 1
    entries = [
        f"rank {rank} {pid} on {host}" if several_hosts else f"rank {rank} {pid}"
        for rank, (host, pid) in enumerate(processes[:MAX_PIDS])
    ]

    if len(processes) > MAX_PIDS:
        entries.append(f"and {len(processes) - MAX_PIDS} more")

    return ", ".join(entries)


def _parameters(model: nn.Module) -> str:
    """`1,234 trainable, 567 frozen and not reduced`"""
    # numel() of a sharded parameter (a DTensor) counts the full tensor.
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)

    return f"{trained:,} trainable" + (f", {frozen:,} frozen and not reduced" if frozen else "")


def _batch(plan: Plan) -> str:
    """`global 64 (set) = 8 micro-batches of 8 (derived), at most 4 per rank`"""
    rest = plan.global_batch % plan.micro_batch
    last = f", the last one {rest}" if rest and plan.global_num_micro_batches > 1 else ""
    return (
        f"global {plan.global_batch} ({plan.reasons['global_batch']}) = "
        f"{plural(plan.global_num_micro_batches, 'micro-batch', 'micro-batches')} of {plan.micro_batch}{last} "
        f"({plan.reasons['micro_batch']}), at most {plan.accumulation} per rank"
    )


def _data(plan: Plan, config: RunConfig) -> str:
    """`1,000 samples, 16 steps an epoch; 100 steps = 6.25 epochs`"""
    # A source without a length has no number of steps per epoch. It may describe itself (`BatchSource.banner`).
    if plan.steps_per_epoch is None or plan.samples is None:
        return f"a batch source, {plural(plan.steps, 'step')}"

    # Samples at the end of an epoch that do not fill a step.
    rest = plan.samples % plan.global_batch
    tail = f", last one {config.tail}" if rest else ""

    # Every step is then a short one, and the batch that was asked for is never trained on.
    if plan.samples < plan.global_batch:
        tail = f", which has fewer samples than global_batch={plan.global_batch}"
    elif rest and config.tail == "drop":
        tail = f", the last {rest} samples of an epoch dropped"

    return (
        f"{plan.samples:,} samples, {plural(plan.steps_per_epoch, 'step')} an epoch{tail}; "
        f"{plan.steps} steps = {plan.epochs_after(plan.steps):.2f} epochs"
    )


def _learning_rate(rate: LearningRate, config: RunConfig, plan: Plan) -> str:
    """Return the rates at the landmarks of the schedule, and the rule by which they were scaled."""
    landmarks = rate.banner()
    if config.lr.scaling == "none":
        return landmarks

    # The landmarks are scaled rates, which differ from lr.peak, so name the rule.
    return f"{landmarks} ({config.lr.scaling} rule: batch {plan.global_batch} against {config.lr.reference_batch})"


def _compile(driver: Driver, mesh: Mesh) -> str:
    # The ranks then compile in the same forward, and none is timed.
    if driver.role.collective_forwards:
        what = "the stages" if mesh.sizes["pp"] > 1 else "the model"
        return f"{what}, in the first step: forwards are collective, so nothing is timed first"

    compiler = compiler_of(driver)
    return compiler.banner if compiler else "nothing more than the user's code has compiled already"


def _graph(config: RunConfig) -> str:
    condition = " if launch-bound, which is logged then" if config.graph == "auto" else ""
    return f"the model's calls are captured{condition}"


def _dropout_of_stages(model: nn.Module, mesh: Mesh) -> str | None:
    """Return a line if the dropout masks depend on the stages of a pipeline, else None."""
    # Each stage is seeded differently: only the first one draws the same numbers as a single process would.
    if mesh.sizes["pp"] > 1 and has_dropout(model):
        return "from the second stage on, its masks differ from those without a pipeline (mesh.pp)"

    return None


def _micro_batches(model: nn.Module, precision: Precision, config: RunConfig, plan: Plan, mesh: Mesh) -> str | None:
    """Return a line if the result depends on the number of ranks, because the micro-batches do, else None."""
    followers = []
    if has_dropout(model) and mesh.sizes["pp"] == 1:
        followers.append("dropout")

    if takes_batch_statistics(model, config):
        followers.append("BatchNorm")

    # The gradient of a weight is summed over a micro-batch in float16: a larger one overflows at a smaller loss scale.
    if precision.needs_scaler:
        followers.append("what overflows in fp16")

    if not followers or not plan.follows_ranks(config):
        return None

    verb = "follow" if len(followers) > 1 else "follows"
    return f"{' and '.join(followers)} {verb} them: {advise(plan)}"


def describe_own_loop(name: str, folder: RunFolder) -> str | None:
    """Return a line about the check that a custom loop does not have, in the first run of a script."""
    # Empty in a Python prompt; in a notebook it is the kernel's own file.
    script = sys.argv[0] if kernel.shell() is None else ""
    others = [other for other in folder.path.parent.glob(f"{name}-*") if other != folder.path]
    if not script.endswith(".py") or others:
        return None

    return f"the loss of this loop is not checked at its start: lockstep verify {shell_word(os.path.relpath(script))}"


def describe_resume(resumed: Resumed, folder: RunFolder) -> str:
    """`at step 40 from runs/first/checkpoints/step-00000040, written by 2 ranks; changed since: ...`"""
    ranks = plural(resumed.world_size, "rank")
    text = f"at step {resumed.step} from {folder.as_shown(resumed.location)}, written by {ranks}"

    # Settings, versions and the world size may change between two attempts of a run. Report all such changes.
    return f"{text}; changed since: {', '.join(resumed.changes)}" if resumed.changes else text


# ---- how the ranks share the model ----


def _strategy(model: nn.Module, config: RunConfig, mesh: Mesh, world: World) -> str | None:
    """`fsdp: 4 blocks of Layer, sharded over 2 ranks`, or None for plain replicas."""
    strategy = config.strategy_record
    if not strategy.shards_optimizer and strategy.axis is None and mesh.is_data_parallel_only:
        return None

    if world.alone:
        return f"{strategy.name}: one process, so nothing is sharded"

    # First the axes that shard the computation (pp, tp), then the sharding of state over data-parallel ranks.
    parts = _model_axes(model, config, mesh)

    if strategy.shards_parameters:
        parts.append(_fsdp_shards(model, config, strategy, mesh, world))
    elif strategy.shards_optimizer:
        parts.append(f"optimizer state sharded over {world.size} ranks")
    elif mesh.data_size > 1:
        parts.append(f"{mesh.data_size} replicas")

    return f"{strategy.name}: {'; '.join(parts)}"


def _model_axes(model: nn.Module, config: RunConfig, mesh: Mesh) -> list[str]:
    """Return the parts of the line about pipeline and tensor parallelism, in this order; [] without them."""
    parts = []
    pp_size, tp_size = mesh.sizes["pp"], mesh.sizes["tp"]
    if pp_size > 1:
        from lockstep.parallel.pipeline.schedules import SCHEDULES  # torch's pipelines are slow to import

        # With an interleaved schedule a rank holds several stages. Each schedule has a default number.
        stages = pp_size * (config.pp.stages_per_rank or SCHEDULES[config.pp.schedule][1])
        parts.append(f"{stages} stages over {pp_size} ranks")

    if tp_size > 1:
        # Only the layers on this rank are counted: another stage may have a different number.
        layers = sum(any(map(is_sharded_along_tp, module.parameters(recurse=False))) for module in model.modules())
        of_stage = " of the first stage" if pp_size > 1 else ""
        parts.append(f"{layers} layers{of_stage} sharded over {tp_size} ranks")

    return parts


def _fsdp_shards(model: nn.Module, config: RunConfig, strategy: Strategy, mesh: Mesh, world: World) -> str:
    """Return the part of the line about parameters that are sharded over data-parallel ranks."""
    replicas = count_replicas(config.fsdp, world) if strategy.replica_groups else 1
    ranks = mesh.data_size // replicas

    # One rank per shard group is legal but saves no memory: say so, and what to type.
    if ranks == 1 and replicas > 1:
        return f"{replicas} replicas on one rank each, so nothing is sharded (set strategy=ddp, or strategy=fsdp)"

    if ranks == 1:
        return "one group of ranks with samples of its own, so nothing more is sharded (mesh.dp is 1)"

    over = f"sharded over {ranks} ranks" + (f", {replicas} replicas" if replicas > 1 else "")

    # FSDP gathers one block at a time. Without blocks it gathers the full model.
    blocks = find_blocks(model, config.blocks)
    if blocks:
        return f"{_count_blocks(blocks)}, {over}"

    name = suggest_block_class(model)
    suggestion = f" (name some, such as blocks=[{name}])" if name else ""
    return f"no blocks, {over}: the full model is gathered at once, which saves little{suggestion}"


def _remat(model: nn.Module, config: RunConfig) -> str:
    """`full: 4 blocks of Layer`"""
    blocks = find_blocks(model, config.blocks)
    recomputed_blocks = blocks_to_recompute(blocks, config.remat)

    # remat=every-2 recomputes only some of the blocks.
    of_all = f" (of {len(blocks)})" if len(recomputed_blocks) < len(blocks) else ""
    return f"{config.remat}: {_count_blocks(recomputed_blocks)}{of_all}"


def _count_blocks(blocks: list[nn.Module]) -> str:
    """`4 blocks of Layer, 2 of Encoder`"""
    (first, number), *rest = Counter(class_name(block) for block in blocks).items()
    others = [f"{count} of {name}" for name, count in rest]
    return ", ".join([f"{plural(number, 'block')} of {first}", *others])
