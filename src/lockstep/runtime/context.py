"""The runtime of a process: its device, its process group, its heartbeat. It is an argument, never global.

`start` makes it from the settings and the environment, joins the process group, and leaves everything in order at the
end. It is passed to whatever needs it: two runtimes may exist one after the other in a process, as in tests and
notebooks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import faults
from lockstep.config import RunConfig
from lockstep.errors import UserError, plural
from lockstep.runtime import attempt_folder
from lockstep.runtime.attention import attention
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.device_heartbeat import DeviceHeartbeat
from lockstep.runtime.heartbeat import Heartbeat
from lockstep.runtime.host.memory import keep_freed_memory
from lockstep.runtime.host.network import check_interfaces
from lockstep.runtime.host.threads import Threads
from lockstep.runtime.preemption import PreemptionNotice, handle_signals
from lockstep.runtime.rendezvous.store import open_store, wait_for
from lockstep.runtime.world import World

EventLogger = Callable[..., None]  # (event, **fields), as `Recorder.event` takes them


def log_nothing(event: str, **fields: object) -> None:
    """Take the place of an EventLogger where there is no log."""


BARRIER_CHECK = timedelta(seconds=1)  # how often a store barrier checks whether to give up
_DEVICE_CHECKS = count()  # gives each comparison of the ranks' devices a new prefix in the store


@dataclass(frozen=True)
class Runtime:
    """This process: its rank, its device, and its collectives."""

    world: World
    device: torch.device
    backend: str  # "none" if the world size is 1
    collectives: Collectives
    threads: Threads
    heartbeat: Heartbeat
    notice: PreemptionNotice  # whether a signal asked this rank to save and exit

    @property
    def is_main(self) -> bool:
        return self.world.rank == 0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def suit_threads(self, model: nn.Module, samples: int, sample: Callable[[], Tensor | None]) -> None:
        """Choose how many CPU threads compute `model` with micro-batches of this many samples.

        `sample` returns the largest input of one sample, or None if it is not known. It is called only if the number of
        threads depends on it.
        """
        if self.threads.share is None:
            return

        # A sharded parameter (a DTensor) has the shape of the full tensor, with which a rank computes.
        matrices = [p for p in model.parameters() if p.dim() > 1]
        positions = None
        one = sample() if matrices and self.threads.share > 1 else None
        if one is not None:
            # Each token id is a position. In other inputs a position is what the first matrix takes at a time: all
            # features of a vector, or a patch of a picture.
            part = matrices[0][0].numel() if one.is_floating_point() else 1
            positions = samples * max(1, one.numel() // part)

        self.threads.suit([p.numel() for p in matrices], positions if matrices else samples)
        torch.set_num_threads(self.threads.count)

    def store_barrier(self, name: str, timeout: timedelta, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait for all ranks through the store; return False on timeout, or once `give_up()` returns True.

        It works while other ranks wait in a collective. A name can be used again, even by a later run in the same
        process group.
        """
        if self.world.alone:
            return True

        # Each rank counts its own visits: its n-th visit waits for the n-th visit of all other ranks.
        store = dist.distributed_c10d._get_default_store()
        visit = store.add(f"{name}/times/{self.world.rank}", 1)
        store.set(f"{name}/{visit}/{self.world.rank}", "here")

        deadline = time.monotonic() + timeout.total_seconds()
        keys = [f"{name}/{visit}/{rank}" for rank in range(self.world.size)]

        while not wait_for(store, keys, min(timeout, BARRIER_CHECK)):
            if give_up() or time.monotonic() > deadline:
                return False

        return True

    def ranks_that_report(self, name: str, seconds: float) -> list[int]:
        """Set a key of this name in the store, and return the ranks that do the same within this time.

        It works while other ranks wait in a collective. All ranks are returned if the store does not answer.
        """
        all_ranks = list(range(self.world.size))
        if self.world.alone:
            return all_ranks

        store = dist.distributed_c10d._get_default_store()
        deadline = time.monotonic() + seconds

        try:
            store.set(f"{name}/{self.world.rank}", "here")
            while True:
                reported = [rank for rank in all_ranks if store.check([f"{name}/{rank}"])]
                if reported == all_ranks or time.monotonic() > deadline:
                    return reported

                time.sleep(0.05)
        except RuntimeError:  # the process that holds the store is gone
            return all_ranks


@contextmanager
def start(
    world: World,
    config: RunConfig,
    store: dist.Store | None = None,
    on_error: Callable[[BaseException], None] | None = None,
) -> Iterator[Runtime]:
    """Choose the device, join the process group and leave it at the end. `store` replaces the usual rendezvous.

    `on_error` is called with an error before the process group is left, which may hang.
    """
    device = choose_device(config.device, world)
    heartbeat = (DeviceHeartbeat if device.type == "cuda" else Heartbeat).from_env(world.rank)
    faults.install(heartbeat)

    # Before anything touches CUDA, or every rank opens a context on GPU 0.
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()

    _set_numerics(config, device)

    heartbeat.beat("join")

    # A script that made the process group itself also destroys it.
    joined = dist.is_initialized()
    if joined:
        _check_joined(world)
        backend = dist.get_backend()
    else:
        # The launcher should notice a hang before a collective times out, because it can say what each rank does. A
        # compilation may take longer than NCCL's default timeout.
        timeout = max(timedelta(minutes=30), timedelta(seconds=config.hang.first + 60))
        backend = join(world, device, store, config.backend, timeout)

    collectives = Collectives(world, device, heartbeat)
    try:
        with ExitStack() as stack:
            # Contexts end in the opposite order: signals are handled until everything else is restored.
            notice = stack.enter_context(handle_signals())
            threads = _set_threads(config, world, device, stack)
            if device.type == "cuda":
                stack.enter_context(_new_stream(device))

            stack.enter_context(attention(config, device))

            if config.gpu_memory is not None:
                _limit_memory(config.gpu_memory, device, stack)

            if config.exact:
                _avoid_fast_path(stack)

            yield Runtime(world, device, backend, collectives, threads, heartbeat, notice)
    except BaseException as error:
        if on_error is not None:
            on_error(error)

        raise
    finally:
        collectives.pause()

        # The process may train again, with other settings.
        if config.deterministic or config.exact:
            torch.use_deterministic_algorithms(False)
        if backend != "none" and not joined:
            dist.destroy_process_group()

    # After an error, or a preemption, the run is not complete: the launcher must still notice if this rank hangs.
    heartbeat.beat("after run")


# ---- the process group ----


def join(
    world: World,
    device: torch.device,
    store: dist.Store | None = None,
    asked: str = "auto",
    timeout: timedelta | None = None,
) -> str:
    """Join the process group. Return the backend: `asked`, or with "auto" the backend for these devices."""
    if world.alone:
        return "none"

    # Our launcher has checked its own environment before it started ranks.
    if attempt_folder.current() is None:
        check_interfaces(os.environ)

    # Before the ranks meet: all of them have the same setting.
    check_backend(asked, device)

    if store is None:
        store = open_store(world, timeout)

    backend = _backend_for(world, device, store, asked)
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.size,
        # Without a device NCCL would guess one, and every rank would open a context on GPU 0.
        device_id=device if "nccl" in backend else None,
        timeout=timeout,
    )

    return backend


def check_backend(asked: str, device: torch.device) -> None:
    """Refuse a backend that this build of torch, or this rank's device, does not have."""
    built = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    available = [name for name, is_built in built.items() if is_built and (name != "nccl" or device.type == "cuda")]

    # "cpu:gloo,cuda:nccl" names one for each kind of device.
    names = [part.rpartition(":")[2] for part in asked.split(",")] if asked != "auto" else []
    if missing := [name for name in names if name not in available]:
        why = "this rank has no GPU" if built.get(missing[0]) else f"torch {torch.__version__} was built without it"
        raise UserError(
            f"backend={asked} cannot be used here: {missing[0]} is not available, {why}",
            f"available: {', '.join(available)}",
            "set backend=auto, or leave it out",
        )


def _backend_for(world: World, device: torch.device, store: dist.Store, asked: str) -> str:
    if asked in ("gloo", "mpi") or device.type != "cuda":
        return "gloo" if asked == "auto" else asked

    # NCCL refuses two ranks on one GPU; gloo carries CUDA tensors through host memory. If this rank sees fewer GPUs
    # than this machine has ranks, then either ranks share a GPU, or each rank sees only its own.
    may_share = world.local_size > torch.cuda.device_count()
    shared = may_share and share_devices(world, device_name(device), store)
    if asked == "auto":
        return "gloo" if shared else "nccl"

    if shared:
        raise UserError(
            f"backend={asked} needs a GPU for each rank: NCCL refuses ranks that share one",
            f"{world.local_size} ranks and {plural(torch.cuda.device_count(), 'GPU')} on this machine",
            f"start {plural(torch.cuda.device_count(), 'rank')} here, or set backend=gloo to share the GPUs",
        )

    return asked


def share_devices(world: World, name: str, store: dist.Store) -> bool:
    """Return whether two ranks share a device. Collective: every rank must call it."""
    store = dist.PrefixStore(f"devices/{next(_DEVICE_CHECKS)}", store)

    # The second rank on a device reports it; the last rank to call this lets all ranks read the result.
    if store.add(name, 1) > 1:
        store.add("shared", 1)
    if store.add("ranks", 1) == world.size:
        store.set("complete", "")

    store.wait(["complete"])

    return store.add("shared", 0) > 0


def _check_joined(world: World) -> None:
    # If the group and the environment disagreed, ranks would train alone or wait forever.
    if (dist.get_rank(), dist.get_world_size()) != (world.rank, world.size):
        raise UserError(
            "the process group that the script has made disagrees with the environment",
            f"rank {dist.get_rank()} of {dist.get_world_size()} there, RANK={world.rank} of WORLD_SIZE={world.size} in "
            "the environment",
            "start the ranks with torchrun, or leave init_process_group() to Lockstep",
        )


# ---- the device ----


def choose_device(asked: str, world: World) -> torch.device:
    """Return the CPU, or GPU number LOCAL_RANK modulo the visible GPUs: several ranks may share one, over gloo."""
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise UserError("device=cuda needs a GPU", "torch sees no CUDA device here", "set device=cpu, or device=auto")

    if asked == "cpu" or not available:
        return torch.device("cpu")

    return torch.device("cuda", world.local_rank % torch.cuda.device_count())


def device_name(device: torch.device) -> str:
    """Return a name that all processes have in common for this GPU, and that no other GPU has."""
    return str(torch.cuda.get_device_properties(device).uuid)


@contextmanager
def _new_stream(device: torch.device) -> Iterator[None]:
    """Run everything on a new stream.

    CUDA graphs cannot capture the default stream, nor a backward whose gradient accumulators belong to another stream
    than the work.
    """
    # At the beginning and at the end one stream waits for the other, so that work stays in order.
    before = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield

    before.wait_stream(stream)


def _avoid_fast_path(stack: ExitStack) -> None:
    """Switch off the kernels that torch's attention layers use in evaluations (the fast path), until `stack` ends.

    Layers with sharded weights never use them, and `exact` needs the same kernels everywhere.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    stack.callback(torch.backends.mha.set_fastpath_enabled, before)
    torch.backends.mha.set_fastpath_enabled(False)


def _limit_memory(gibibytes: float, device: torch.device, stack: ExitStack) -> None:
    """Limit this process to this many GiB of GPU memory (`gpu_memory`), until `stack` ends."""
    if device.type != "cuda":
        raise UserError(f"gpu_memory={gibibytes:g} needs a GPU", f"a run on {device.type}", "leave gpu_memory out")

    total = torch.cuda.get_device_properties(device).total_memory / 2**30
    if gibibytes > total:
        raise UserError(
            f"gpu_memory={gibibytes:g} is more than the GPU has",
            f"{total:.1f} GiB on the GPU",
            f"set gpu_memory={int(total)}, or leave it out",
        )

    before = torch.cuda.get_per_process_memory_fraction(device)
    stack.callback(torch.cuda.set_per_process_memory_fraction, before, device)
    torch.cuda.set_per_process_memory_fraction(gibibytes / total, device)


# ---- numerics ----


def _set_threads(config: RunConfig, world: World, device: torch.device, stack: ExitStack) -> Threads:
    """Set the number of CPU threads until `stack` ends. Then the former number is restored."""
    usual = torch.get_num_threads()
    stack.callback(torch.set_num_threads, usual)

    threads = Threads.choose(config.threads, config.exact, world.local_size, device.type == "cpu", usual)
    torch.set_num_threads(threads.count)
    return threads


def _set_numerics(config: RunConfig, device: torch.device) -> None:
    same_bits = config.deterministic or config.exact
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = not same_bits

    if same_bits:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

        # Filling memory takes time and changes no result of correct code, so only `deterministic` does it.
        torch.utils.deterministic.fill_uninitialized_memory = config.deterministic  # pyrefly: ignore[missing-attribute]
