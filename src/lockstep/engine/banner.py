"""What is told of a run: before its first step what was asked, what was derived, and why; and how it ended."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from lockstep.config import RunConfig
from lockstep.engine.goals import judge
from lockstep.engine.lean import KEEPS
from lockstep.engine.optim import LearningRate
from lockstep.engine.speeds import about_speeds
from lockstep.parallel.graphs import wants_graph
from lockstep.parallel.hooks import about
from lockstep.parallel.mesh import plan_mesh
from lockstep.parallel.shares import about_remat, about_strategy
from lockstep.plan.plan import Plan
from lockstep.precision import Precision
from lockstep.pulse import FOLDER
from lockstep.runtime.context import Runtime

if TYPE_CHECKING:
    from lockstep.engine.folder import RunFolder
    from lockstep.engine.keeper import Resumed
    from lockstep.engine.run import Run

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
    if config.speed_weights != "none" and not runtime.world.alone:
        told["speeds"] = about_speeds(config.speed_weights, plan)
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
