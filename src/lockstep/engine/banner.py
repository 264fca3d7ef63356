"""What is told of a run: before its first step what was asked, what was derived, and why; and how it ended."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from lockstep.config import RunConfig
from lockstep.engine.load_balance import about_speeds
from lockstep.optim.registry import KEEPS
from lockstep.optim.schedule import LearningRate
from lockstep.parallel.blocks import class_name, class_to_name, find_blocks
from lockstep.parallel.cudagraph.graphs import wants_graph
from lockstep.parallel.ddp.hooks import about
from lockstep.parallel.fsdp.driver import CUT, count_copies
from lockstep.parallel.mesh import Mesh, plan_mesh
from lockstep.parallel.remat import recomputed
from lockstep.parallel.tensor.driver import is_cut_along_tp
from lockstep.plan.plan import Plan
from lockstep.precision import Precision
from lockstep.runtime.context import Runtime
from lockstep.runtime.heartbeat import FOLDER
from lockstep.runtime.world import World

if TYPE_CHECKING:
    from lockstep.checkpoint.manager import Resumed
    from lockstep.engine.run import Run
    from lockstep.observe.run_folder import RunFolder

MOST_PIDS = 16


def tell_launcher(config: RunConfig) -> None:
    """The launcher does not know the task's own settings: rank 0 leaves those that concern it where it looks."""
    folder = os.environ.get(FOLDER)
    if folder and os.environ.get("RANK") == "0":
        settings = {"hang": config.hang.model_dump(), "restart": config.restart.model_dump()}
        staged = Path(folder) / "settings.json.tmp"
        staged.write_text(json.dumps(settings))
        staged.rename(Path(folder) / "settings.json")


def facts(
    model: nn.Module,
    config: RunConfig,
    plan: Plan,
    rate: LearningRate,
    precision: Precision,
    runtime: Runtime,
) -> dict[str, str]:
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    told = {
        "world": _world(runtime),
        **_pids(runtime),
        "parameters": f"{trainable:,} trainable" + (f", {frozen:,} frozen and not exchanged" if frozen else ""),
        "precision": f"{precision.name}: {precision.contract(next(model.parameters()).dtype)}",
        "batch": _batch(plan),
        "data": _data(plan, config),
        "learning rate": ", ".join(f"{name} {value:.3g}" for name, value in rate.landmarks().items())
        + _scaling(config, plan),
    }
    mesh = plan_mesh(config, runtime.world)
    if shared := about_strategy(model, config, mesh, runtime.world):
        told["strategy"] = shared
    if config.remat != "none":
        told["remat"] = about_remat(model, config)
    if not mesh.plain:
        told["mesh"] = f"{mesh}; {_count(mesh.data_size, 'group')} of ranks with samples of their own"
    if config.micro_batch in (None, "auto") and not config.exact and _drops(model):
        told["dropout"] = "its masks follow the micro-batches: set micro_batch for the same ones on any number of ranks"
    if (config.strategy == "pp" or (config.mesh.pp or 1) > 1) and _drops(model) and not runtime.world.alone:
        told["dropout"] = "from the second stage on, its masks are others than without a pipeline (mesh.pp)"
    if config.load_balance != "none" and not runtime.world.alone:
        told["speeds"] = about_speeds(config.load_balance, plan)
    if wants_graph(config, runtime):
        told["graph"] = "the model's calls are recorded" + " if launch-bound, which is told then" * (
            config.graph == "auto"
        )
    if config.optimizer != "task":
        told["optimizer"] = f"{config.optimizer} in place of the task's: {KEEPS[config.optimizer]}"
    if config.ddp.hook != "none" and not runtime.world.alone:
        told["exchange"] = about(config.ddp)
    return told


def _drops(model: nn.Module) -> bool:
    return any(isinstance(m, _DropoutNd) and m.p > 0 for m in model.modules())


def _world(runtime: Runtime) -> str:
    size = runtime.world.size
    if runtime.world.alone:
        return f"1 process on {runtime.device}, {_count(runtime.threads, 'CPU thread')}"
    threads = _count(runtime.threads, "CPU thread")
    return f"{size} processes over {runtime.backend}, this one on {runtime.device}, {threads} each"


def _pids(runtime: Runtime) -> dict[str, str]:
    """For whoever wants to look at a rank, or to kill it. Every rank must call this."""
    if runtime.world.alone:
        return {}
    everybody = runtime.collectives.gather_json([socket.gethostname(), os.getpid()])
    several = len({host for host, _ in everybody}) > 1
    words = [f"rank {rank} {pid}" + f" on {host}" * several for rank, (host, pid) in enumerate(everybody)]
    more = [f"and {len(words) - MOST_PIDS} more"] if len(words) > MOST_PIDS else []
    return {"pids": ", ".join(words[:MOST_PIDS] + more)}


def _batch(plan: Plan) -> str:
    return (
        f"global {plan.global_batch} ({plan.reasons['global_batch']}) = {_count(plan.micro_batches, 'micro-batch')} "
        f"of {plan.micro_batch} ({plan.reasons['micro_batch']}), at most {plan.accumulation} per rank"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("es" if noun.endswith("ch") else "s") * (number != 1)


def _data(plan: Plan, config: RunConfig) -> str:
    if plan.steps_per_epoch is None:
        return f"a stream, {plan.steps} steps; resuming it is approximate"
    tail = "" if plan.samples is None or plan.samples % plan.global_batch == 0 else f", last one {config.tail}"
    if tail.endswith("drop"):
        tail = f", the last {(plan.samples or 0) % plan.global_batch} samples of an epoch dropped"
    epochs = plan.steps / plan.steps_per_epoch
    per_epoch = f"{plan.samples:,} samples, {plan.steps_per_epoch} steps an epoch{tail}"
    return f"{per_epoch}; {plan.steps} steps = {epochs:.2f} epochs"


def _scaling(config: RunConfig, plan: Plan) -> str:
    if config.lr.scaling == "none":
        return ""
    return f" ({config.lr.scaling} rule: batch {plan.global_batch} against {config.lr.reference_batch})"


def resumed_text(resumed: Resumed, folder: RunFolder) -> str:
    ranks = f"{resumed.world} rank{'s' * (resumed.world != 1)}"
    text = f"at step {resumed.step} from {folder.as_shown(resumed.path)}, written by {ranks}"
    return "; changed since: ".join([text, *([", ".join(resumed.changes)] if resumed.changes else [])])


def start_record(run: Run) -> dict[str, Any]:
    model = run.driver.model
    return {
        "task": run.name,
        "world": run.runtime.world.size,
        "device": str(run.runtime.device),
        "precision": run.precision.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in run.driver.parameters),
        "unit": run.unit,
        "steps": run.plan.steps,
        "run_dir": run.folder.shown,
    }


def summary_of(run: Run) -> dict[str, Any]:
    counters = run.stepper.counters
    metrics = run.evaluation.metrics if run.evaluation else {}
    losses = {
        "loss": run.recorder.last.get("loss"),
        "eval_loss": run.evaluation.loss if run.evaluation else None,
    }
    goals = judge(run.config.goals, metrics | losses)
    summary = {
        "task": run.name,
        "step": counters.step,
        "applied": counters.applied,
        "skipped": run.stepper.skips.skipped,
        "seconds": time.time() - run.started,
        **losses,
        "eval_metrics": metrics,
        "world": run.runtime.world.size,
    }
    return summary | ({"goals": goals, "pass": all(goal["pass"] for goal in goals)} if goals else {})


# How the ranks share the model, in one line for the first screen.


def about_strategy(model: nn.Module, config: RunConfig, mesh: Mesh, world: World) -> str | None:
    """`fsdp: 4 blocks of Layer, cut over 2 ranks`. None: whole copies, about which there is nothing to tell."""
    if config.strategy == "ddp" and mesh.plain:
        return None
    if world.alone:
        return f"{config.strategy}: one process, so nothing is cut"
    words = _computation(model, config, mesh)
    if config.strategy in CUT:
        words.append(_cut(model, config, mesh, world))
    elif config.strategy == "zero1":
        words.append(f"optimizer state cut over {world.size} ranks")
    elif mesh.data_size > 1:
        words.append(f"{mesh.data_size} copies")
    return f"{config.strategy}: {'; '.join(words)}"


def about_remat(model: nn.Module, config: RunConfig) -> str:
    """`full: 4 blocks of Layer`"""
    blocks = find_blocks(model, config.blocks)
    again = recomputed(blocks, config.remat)
    of_all = f" (of {len(blocks)})" * (len(again) < len(blocks))
    return f"{config.remat}: {_in_words(again)}{of_all}"


def _computation(model: nn.Module, config: RunConfig, mesh: Mesh) -> list[str]:
    """What pp and tp cut."""
    words = []
    ranks, ways = mesh.sizes["pp"], mesh.sizes["tp"]
    if ranks > 1:
        from lockstep.parallel.pipeline.pipeline import SCHEDULES  # torch's pipelines take a moment to import

        stages = ranks * (config.pp.stages_per_rank or SCHEDULES[config.pp.schedule][1])
        words.append(f"{stages} stages over {ranks} ranks")
    if ways > 1:
        cut = sum(any(is_cut_along_tp(p) for p in module.parameters(recurse=False)) for module in model.modules())
        words.append(f"{cut} layers{' of the first stage' * (ranks > 1)} cut over {ways} ranks")
    return words


def _cut(model: nn.Module, config: RunConfig, mesh: Mesh, world: World) -> str:
    """What fsdp, fsdp-grads and hsdp cut."""
    copies = count_copies(config.fsdp, world) if config.strategy == "hsdp" else 1
    ranks = mesh.data_size // copies
    if ranks == 1:
        if copies > 1:
            return f"{copies} copies on one rank each, so nothing is cut (type strategy=ddp, or strategy=fsdp)"
        return "one group of ranks with samples of its own, so nothing more is cut (mesh.dp is 1)"
    over = f"cut over {ranks} ranks" + f", {copies} copies" * (copies > 1)
    if blocks := find_blocks(model, config.blocks):
        return f"{_in_words(blocks)}, {over}"
    part = class_to_name(model)
    named = f" (name some, such as blocks=[{part}])" if part else ""
    return f"no blocks, {over}: the whole model is gathered at once, which saves little{named}"


def _in_words(blocks: list[nn.Module]) -> str:
    """`4 blocks of Layer, 2 of Encoder`"""
    counts = Counter(class_name(block) for block in blocks)
    (first, number), *rest = counts.items()
    blocks_of_first = f"{number} block{'s' * (number > 1)} of {first}"
    return ", ".join([blocks_of_first, *(f"{count} of {name}" for name, count in rest)])


# What a run is meant to reach (`goals: ["accuracy >= 0.9"]`), and whether it has.


COMPARE = {">=": lambda value, bound: value >= bound, "<=": lambda value, bound: value <= bound}


def judge(goals: Sequence[str], values: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Each goal with the value that was found. A value that is missing, or not a number, reaches nothing."""
    return [_judge(goal, values) for goal in goals]


def _judge(goal: str, values: Mapping[str, float | None]) -> dict[str, Any]:
    name, sign, bound = goal.split()
    value = values.get(name)
    reached = value is not None and not math.isnan(value) and COMPARE[sign](value, float(bound))
    return {"target": goal, "value": value, "pass": reached}
