"""The main program of `train.py`: it trains a recipe on the ranks of a launcher, or on as many as the GPUs allow.

It starts the ranks itself unless a launcher already has, and passes its arguments on as settings of the recipe. Options
that contradict each other are refused before the first process starts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep import api
from lockstep.classic.elastic_gpu_config import ElasticGPUConfig, uneven
from lockstep.classic.process_group import check_announced
from lockstep.config import Layer, flatten, read_layers, resolve_for
from lockstep.errors import UserError, plural
from lockstep.runtime import environments
from lockstep.targets import load_class

# torch.distributed.launch adds one of these and sets the variable LOCAL_RANK as well.
LOCAL_RANK = ("--local-rank", "--local_rank")

# Settings that mean the same as a flag.
RIVALS = {
    "global_batch": "batch_size",
    "local_batch": "batch_size",
    "micro_batch": "batch_size",
    "checkpoint.every": "save_every",
    "resume": "auto_resume",
}


def main(target: str, arguments: Sequence[str] | None = None, readers: int = 0, ranks_need_flag: bool = True) -> int:
    """Train `target`, which has `readers` frozen models that may live on other GPUs. Return the exit code.

    With `ranks_need_flag` the ranks of a launcher are refused unless --distributed or --elastic_gpu was typed.
    """
    parser = _parser(target, readers)
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options, settings = parser.parse_known_args(arguments)

    try:
        check_processes(options.distributed, options.elastic_gpu or not ranks_need_flag)

        # Flags of a plan that is not made.
        for name, value in vars(options).items():
            if name.startswith("elastic_") and value != parser.get_default(name) and not options.elastic_gpu:
                raise UserError(f"--{name} has no effect without --elastic_gpu", "", "add --elastic_gpu")

        # Another launch brings its own LOCAL_RANK.
        typed = [word for word in arguments if word.partition("=")[0] not in LOCAL_RANK]
        return _train(target, options, settings, typed)
    except UserError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2


def _parser(target: str, readers: int) -> argparse.ArgumentParser:
    """Return the parser of `train.py`. `readers` is the number of frozen models that the recipe has."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description=f"Train the recipe {target}.",
        epilog="More settings are written key=value.",
    )

    add = parser.add_argument
    # The run and its batches.
    add("--config", action="append", default=[], metavar="F.yaml", help="a file of settings")
    add("--distributed", action="store_true", help="this process is a rank: RANK and WORLD_SIZE are set")
    add("--batch_size", type=int, help="samples per process and forward")
    add("--grad_accum_steps", type=int, default=1, help="forwards per optimizer step")

    add("--save_every", type=int, help="optimizer steps between checkpoints")
    add("--auto_resume", action="store_true", help="resume from the newest checkpoint in run_dir, if there is one")
    add(*LOCAL_RANK, type=int, help=argparse.SUPPRESS)

    # Processes and micro-batches by the memory of the GPUs.
    add("--elastic_gpu", action="store_true", help="processes and micro-batches by the GPUs of this machine")
    add("--elastic_target_util", type=float, default=0.75, help="how much of a GPU's memory to use (0.75)")
    add("--elastic_sample_gb", type=float, help="GiB that a sample takes; without it micro-batches are tried out")
    add("--elastic_trained_gb", type=float, default=0.5, help="GiB of what is trained, with its optimizer (0.5)")

    if readers:
        add("--elastic_reader_gb", type=float, nargs=readers, help="GiB of each frozen model (0.1)")

    parser.set_defaults(elastic_reader_gb=[0.1] * readers)
    return parser


def check_processes(distributed: bool, takes_any: bool) -> None:
    """Refuse flags that contradict the environment: ranks that each train alone would all write the result.

    `takes_any`: this process may be alone or a rank, as it comes.
    """
    if environments.launched():
        size = environments.detect().size
        if size > 1 and not distributed and not takes_any:
            raise UserError(f"WORLD_SIZE={size} is set, but --distributed was not given", "", "add --distributed")

        return

    check_announced()
    if distributed:
        raise UserError(
            "WORLD_SIZE not set: --distributed was given, but no launcher has started ranks",
            "",
            "use torchrun, or set RANK, WORLD_SIZE and LOCAL_RANK by hand; or leave --distributed out",
        )


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the flags say as settings of a run."""
    settings: dict[str, Any] = {}

    # The flag counts the samples of a forward, the setting those of an optimizer step.
    if options.batch_size is not None:
        settings["local_batch"] = options.batch_size * options.grad_accum_steps
        settings["micro_batch"] = options.batch_size
    elif options.grad_accum_steps != 1:
        raise UserError(
            "--grad_accum_steps needs --batch_size", "", "also use --batch_size N, the samples of one forward"
        )

    if options.save_every is not None:
        settings["checkpoint.every"] = options.save_every

    if options.auto_resume:
        settings["resume"] = "auto"

    return settings


def check_rivals(options: argparse.Namespace, typed: Mapping[str, Any]) -> None:
    """Refuse a flag and a typed setting that contradict each other. A flag may override a file."""
    settings = settings_of(options)
    for key, flag in RIVALS.items():
        # Equal values do not contradict each other.
        if getattr(options, flag) and key in typed and settings.get(key) != typed[key]:
            raise UserError(f"--{flag} and {key}={typed[key]} set the same thing twice", "", "use only one of them")


def _train(target: str, options: argparse.Namespace, settings: Sequence[str], typed: Sequence[str]) -> int:
    """Put the layers together and train."""
    layers = read_layers(options.config, settings)
    check_rivals(options, flatten(layers[-1][1]))

    # Flags are stronger than files and typed settings.
    layers.append(("command line", settings_of(options)))

    count = None
    if options.elastic_gpu:
        # The weakest layer: everything that was typed or written is stronger.
        count, elastic = _elastic(target, options, layers)
        layers.insert(0, elastic)

    return api.train(target, layers, api.make_resume_command(["python", sys.argv[0]], typed, ["--auto_resume"]), count)


def _elastic(target: str, options: argparse.Namespace, layers: list[Layer]) -> tuple[int | None, Layer]:
    """Return how many processes to start, None if this process trains itself, and the plan's settings."""
    kind = load_class(target)
    world = environments.detect()
    config = resolve_for(kind.defaults, kind.presets, layers).config

    # The plan is for this machine: its samples, and its processes.
    if config.local_batch is not None:
        batch = config.local_batch
    elif config.global_batch is None:
        raise UserError("--elastic_gpu needs a batch to divide among the processes", "", "set global_batch=64")
    elif config.global_batch % world.size:
        raise uneven(config.global_batch, world.size)
    else:
        # The share of this machine.
        batch = config.global_batch // world.size * world.local_size

    elastic = ElasticGPUConfig(
        base_batch_size=batch,
        per_gpu=config.local_batch is not None,
        trained_gb=options.elastic_trained_gb,
        reader_gb=options.elastic_reader_gb,
        sample_gb=options.elastic_sample_gb,
        target_util=options.elastic_target_util,
    )

    # If a launcher started the ranks, their number is fixed.
    plan = elastic.plan(world.local_size if environments.launched() else None)
    if world.rank == 0:
        print(f"train.py: {plural(len(elastic.gpus), 'GPU')} here; {plan}", flush=True)

    # Micro-batches are tried out by restarts, which another launcher would not do.
    settings = elastic.settings(plan)
    tries_sizes = settings.get("micro_batch") == "auto"
    if environments.launched() and tries_sizes:
        del settings["micro_batch"]

    start = not environments.launched() and (plan.processes > 1 or tries_sizes)
    return plan.processes if start else None, ("--elastic_gpu", settings)
