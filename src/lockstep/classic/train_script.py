"""What `train.py` runs: a recipe, on the processes that somebody has started, or on those that the GPUs ask for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.classic.distributed_config import world_size_not_set
from lockstep.config import Layer
from lockstep.errors import UserError
from lockstep.runtime.world import World

LOCAL_RANK = ("--local-rank", "--local_rank")
RIVALS = {  # of a flag: settings for the same thing
    "batch_size": ("global_batch", "local_batch", "micro_batch"),
    "save_every": ("checkpoint.every",),
    "auto_resume": ("resume",),
}


def main(target: str, arguments: Sequence[str] | None = None, readers: int = 0) -> int:
    """The exit code. `target` is what is trained, with so many frozen models that may live on GPUs of their own."""
    parser = _parser(target, readers)
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    asked, settings = parser.parse_known_args(arguments)
    try:
        check_processes(asked.distributed, asked.elastic_gpu)
        changed = [name for name, value in vars(asked).items() if value != parser.get_default(name)]
        if (idle := [name for name in changed if name.startswith("elastic_")]) and not asked.elastic_gpu:
            raise UserError(f"--{idle[0]}", "no --elastic_gpu, for which it is", "add --elastic_gpu")
        typed = [word for word in arguments if word.partition("=")[0] not in LOCAL_RANK]
        return _train(target, asked, settings, typed)
    except UserError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2


def _parser(target: str, readers: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py", description=f"Train the recipe {target}.", epilog="More settings are written key=value."
    )
    add = parser.add_argument
    add("--config", action="append", default=[], metavar="F.yaml", help="a file of settings")
    add("--distributed", action="store_true", help="this process is a rank: RANK and WORLD_SIZE are set")
    add("--elastic_gpu", action="store_true", help="processes and micro-batches by the GPUs of this machine")
    add("--elastic_target_util", type=float, default=0.75, help="how much of a GPU's memory to use (0.75)")
    add("--elastic_sample_gb", type=float, help="GiB that a sample takes; without it micro-batches are tried out")
    add("--elastic_trained_gb", type=float, default=0.5, help="GiB of what is trained, with its optimizer (0.5)")
    if readers:
        add("--elastic_reader_gb", type=float, nargs=readers, help="GiB of each frozen model (0.1)")
    parser.set_defaults(elastic_reader_gb=[0.1] * readers)
    add("--batch_size", type=int, help="samples per process and forward")
    add("--grad_accum_steps", type=int, default=1, help="forwards per optimizer step")
    add("--save_every", type=int, help="optimizer steps between checkpoints")
    add("--auto_resume", action="store_true", help="go on from the newest checkpoint in run_dir, if there is one")
    add(*LOCAL_RANK, type=int, help=argparse.SUPPRESS)  # torch.distributed.launch adds it, and sets LOCAL_RANK too
    return parser


def check_processes(distributed: bool, elastic_gpu: bool) -> None:
    """Ranks that train alone would each write the whole result: what was announced and what was asked must agree."""
    if World.launched():
        if not (distributed or elastic_gpu) and World.from_env().size > 1:
            raise UserError(
                "one process", f"WORLD_SIZE={World.from_env().size} in the environment", "add --distributed"
            )
    elif {"RANK", "LOCAL_RANK"} & os.environ.keys():
        raise world_size_not_set(os.environ)
    elif distributed:
        raise UserError(
            "--distributed",
            "WORLD_SIZE not set: nobody has started ranks",
            "use torchrun, or set RANK, WORLD_SIZE and LOCAL_RANK by hand; or leave --distributed out",
        )


def settings_of(asked: argparse.Namespace) -> dict[str, Any]:
    """What the flags say, as settings of a run."""
    found: dict[str, Any] = {}
    if asked.batch_size is not None:
        found |= {"local_batch": asked.batch_size * asked.grad_accum_steps, "micro_batch": asked.batch_size}
    elif asked.grad_accum_steps != 1:
        raise UserError("--grad_accum_steps", "no --batch_size", "type --batch_size N too, the samples of one forward")
    if asked.save_every is not None:
        found["checkpoint.every"] = asked.save_every
    if asked.auto_resume:
        found["resume"] = "auto"
    return found


def check_rivals(asked: argparse.Namespace, words: Mapping[str, Any]) -> None:
    """One would win, and nobody would notice that the other one did not count. A flag may override a file."""
    given = settings_of(asked)
    for flag, keys in RIVALS.items():
        for key in (key for key in keys if key in words and getattr(asked, flag)):
            if given.get(key) != words[key]:
                raise UserError(f"--{flag} and {key}={words[key]}", "two values for one thing", "type only one of them")


def _train(target: str, asked: argparse.Namespace, settings: Sequence[str], typed: Sequence[str]) -> int:
    from lockstep.api import Processes, resume_command, train
    from lockstep.config import flatten, read_layers

    layers = read_layers(asked.config, settings)
    check_rivals(asked, flatten(layers[-1][1]))
    layers.append(("command line", settings_of(asked)))
    count = None
    if asked.elastic_gpu:
        count, elastic = _elastic(target, asked, layers)
        layers.insert(0, elastic)
    return train(target, layers, Processes(count), resume_command(["python", sys.argv[0]], typed, ["--auto_resume"]))


def _elastic(target: str, asked: argparse.Namespace, layers: list[Layer]) -> tuple[int | None, Layer]:
    """How many processes to start, None if that is not for us to do, and settings, weaker than those typed."""
    from lockstep.classic.elastic_gpu_config import ElasticGPUConfig, uneven
    from lockstep.config import resolve_for
    from lockstep.targets import load_class

    kind, world = load_class(target), World.from_env()
    config = resolve_for(kind.defaults, kind.presets, layers).config
    batch = config.local_batch or config.global_batch
    if batch is None:
        raise UserError("--elastic_gpu", "no batch to deal to the processes", "type global_batch=64")
    if config.local_batch is None and batch % world.size:
        raise uneven(batch, world.size)
    elastic = ElasticGPUConfig(
        base_batch_size=batch if config.local_batch else batch // world.size * world.local_size,  # of this machine
        per_gpu=config.local_batch is not None,
        trained_gb=asked.elastic_trained_gb,
        reader_gb=asked.elastic_reader_gb,
        sample_gb=asked.elastic_sample_gb,
        target_util=asked.elastic_target_util,
    )
    plan = elastic.plan(world.local_size if World.launched() else None)
    if world.rank == 0:
        print(f"train.py: {len(elastic.gpus)} GPU{'s' * (len(elastic.gpus) != 1)} here; {plan}", flush=True)
    settings = elastic.settings(plan)
    tried_out = settings.get("micro_batch") == "auto"  # which takes somebody who starts again when memory runs out
    if tried_out and World.launched():
        del settings["micro_batch"]
    ours = not World.launched() and (plan.processes > 1 or tried_out)
    return plan.processes if ours else None, ("--elastic_gpu", settings)
