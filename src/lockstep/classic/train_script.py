"""What `train.py` runs: a recipe, on the processes that somebody has started, or on those that the GPUs ask for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from lockstep.classic.distributed_config import world_size_not_set
from lockstep.errors import UserError
from lockstep.machine import visible_gpus
from lockstep.runtime.world import World


def main(target: str, arguments: Sequence[str] | None = None) -> int:
    """The exit code. `target` is what is trained."""
    asked, settings = _parser(target).parse_known_args(arguments)
    try:
        check_processes(asked.distributed, asked.elastic_gpu)
        return _train(target, asked, settings)
    except UserError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2


def _parser(target: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py", description=f"Train the recipe {target}.", epilog="More settings are written key=value."
    )
    parser.add_argument("--config", action="append", default=[], metavar="F.yaml", help="a file of settings")
    parser.add_argument(
        "--distributed", action="store_true", help="this process is a rank: RANK and WORLD_SIZE are set"
    )
    parser.add_argument("--elastic_gpu", action="store_true", help="one process for each GPU of this machine")
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


def _train(target: str, asked: argparse.Namespace, settings: Sequence[str]) -> int:
    from lockstep.config import read_layers
    from lockstep.doors import Processes, train

    count = None
    if asked.elastic_gpu and not World.launched():
        gpus = visible_gpus()
        print(f"train.py: {gpus} GPU{'s' * (gpus != 1)} here, {max(1, gpus)} process{'es' * (gpus > 1)}", flush=True)
        count = gpus if gpus > 1 else None
    return train(target, read_layers(asked.config, settings), Processes(count))
