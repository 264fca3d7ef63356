"""Starts the ranks of a lab script when it is run by plain `python`; under a launcher the script is a rank already."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch._dynamo  # optimizers import it when they first step: seconds, which forked ranks need not spend again
import torch.distributed as dist
from torch import multiprocessing

from lockstep.errors import UserError


def run_ranks(main: Callable[[], object], *, nproc: int = 2) -> None:
    """Call `main` on each rank, with torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) set.

    Under torchrun, `python -m torch.distributed.launch` or `lockstep train`, this process is one rank: it calls `main`.
    Otherwise `nproc` processes are forked, or as many as LAB_NPROC says: a number, or "gpu" for one on each GPU. If one
    fails, the others are ended, and so is the script, with exit code 1.

    The group is left after `main` has returned. By then its models are gone, and that matters in torch 2.13: freeing a
    DDP whose group was destroyed waits for a thread of gloo, which may be waiting for this one.
    """
    if "RANK" in os.environ:
        return _run_and_leave(main)

    nproc = _asked(os.environ.get("LAB_NPROC", str(nproc)))
    # The store is served here, on a port that the system chose, so two labs on one machine cannot collide.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sys.stdout.flush()
    try:
        multiprocessing.start_processes(_rank, (main, nproc, store.port), nprocs=nproc, start_method="fork")
    except multiprocessing.ProcessRaisedException as error:
        sys.exit(str(error))
    except multiprocessing.ProcessExitedException as error:
        sys.exit(error.exit_code if error.exit_code > 0 else str(error))


def _asked(text: str) -> int:
    """Return the number of ranks that LAB_NPROC asks for."""
    count = torch.cuda.device_count() if text == "gpu" else int(text) if text.isdecimal() else 0
    if count < 1:
        raise UserError(
            f"LAB_NPROC={text} is no number of ranks",
            "no GPU is visible here" if text == "gpu" else "",
            'set it to a number above 0, or to "gpu" for one rank on each GPU',
        )

    return count


def variables_of_rank(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank. Its parent serves the store, at this port."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    variables = {name: str(number) for name, number in numbers.items()}

    # Rank 0 serves no store of its own: it connects to its parent's.
    return variables | {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _rank(rank: int, main: Callable[[], object], world: int, port: int) -> None:
    os.environ.update(variables_of_rank(rank, world, port))
    torch.set_num_threads(1)
    _run_and_leave(main)


def _run_and_leave(main: Callable[[], object]) -> None:
    """Call `main`, and leave the group if it has not: a process that ends with its threads running may abort."""
    try:
        main()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold what `main` has made
        raise
    finally:
        if dist.is_initialized():
            # While the group exists: a DDP module over gloo that outlives it may hang when it is freed (torch 2.13). So
            # nothing is collected if `main` has left the group itself.
            gc.collect()
            dist.destroy_process_group()


def device() -> torch.device:
    """Return this rank's device. Ranks share GPUs if there are more ranks than GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def backend() -> str:
    """Return "nccl" if every rank of this machine has a GPU of its own, else "gloo"."""
    own = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "nccl" if own else "gloo"


LIMIT = timedelta(seconds=60)  # for one collective: a rank that waits longer has lost its peer
