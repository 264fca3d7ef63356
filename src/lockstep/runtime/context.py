"""The running process: its device, its process group, its voice. Passed along, never global."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist

from lockstep import faults
from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.runtime.attention import attention
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.device_heartbeat import DeviceHeartbeat
from lockstep.runtime.heartbeat import Heartbeat
from lockstep.runtime.machine import available_cores
from lockstep.runtime.preemption import PreemptionNotice, heed_signals
from lockstep.runtime.world import World

START_TIMEOUT = timedelta(minutes=5)
_ASKED = count()  # how often ranks have asked each other for their devices
LEAST_PATIENCE = timedelta(minutes=30)  # of a collective; NCCL's own is less than compiling may take


@dataclass(frozen=True)
class Runtime:
    world: World
    device: torch.device
    backend: str  # "none" in a world of one
    collectives: Collectives
    threads: int
    heartbeat: Heartbeat
    notice: PreemptionNotice  # to save and leave

    @property
    def is_main(self) -> bool:
        return self.world.rank == 0

    def meet(self, place: str, patience: timedelta) -> bool:
        """Whether all ranks come to `place` in time. Over the store, so it works while others wait in a collective.
        A place may be met at again, also by the next run in a process group that outlives this one."""
        if self.world.alone:
            return True
        store = dist.distributed_c10d._get_default_store()
        time = store.add(f"{place}/times/{self.world.rank}", 1)
        store.set(f"{place}/{time}/{self.world.rank}", "here")
        try:
            store.wait([f"{place}/{time}/{rank}" for rank in range(self.world.size)], patience)
        except dist.DistStoreError:
            return False
        return True


@contextmanager
def start(world: World, config: RunConfig, store: dist.Store | None = None) -> Iterator[Runtime]:
    """Choose the device, join the process group, and leave it again. `store` replaces the usual meeting point."""
    device = choose_device(config.device, world)
    heartbeat = (DeviceHeartbeat if device.type == "cuda" else Heartbeat).from_env(world.rank)
    faults.install(heartbeat)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before anything touches CUDA, or every rank opens a context on GPU 0
    _set_numerics(config, device)
    # How a kernel adds depends on the number of threads: under `exact` it must not follow the number of ranks.
    threads = _set_threads(config.threads or (1 if config.exact else None), world, device)
    heartbeat.beat("join")
    joined = dist.is_initialized()  # by a script, which will leave it too
    if joined:
        _check_joined(world)
    # No collective gives up sooner than the launcher, which knows what a rank does.
    patience = max(LEAST_PATIENCE, timedelta(seconds=config.hang.first + 60))
    backend = dist.get_backend() if joined else join(world, device, store, timeout=patience)
    try:
        own = _own_stream(device) if device.type == "cuda" else nullcontext()
        limited, same_way = _limited_memory(config.gpu_memory, device), _same_attention(config.exact)
        with heed_signals() as notice, own, attention(config, device), limited, same_way:
            yield Runtime(world, device, backend, Collectives(world, device, heartbeat), threads, heartbeat, notice)
    finally:
        if config.deterministic or config.exact:
            torch.use_deterministic_algorithms(False)
        if backend != "none" and not joined:
            dist.destroy_process_group()


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """All of the run happens on one stream of its own: what the default stream does cannot be recorded (CUDA graphs),
    nor can backward be where torch's gradient accumulators belong to another stream than the work."""
    before, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    own.wait_stream(before)
    with torch.cuda.stream(own):
        yield
    before.wait_stream(own)


def choose_device(asked: str, world: World) -> torch.device:
    """LOCAL_RANK modulo the visible GPUs: several ranks may share one (then over gloo)."""
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise UserError("device=cuda", "torch sees no CUDA device here", "type device=cpu, or device=auto")
    if asked == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", world.local_rank % torch.cuda.device_count())


def join(
    world: World,
    device: torch.device,
    store: dist.Store | None = None,
    asked: str = "auto",
    timeout: timedelta | None = None,
) -> str:
    """Become a rank of the process group. The back-end: the one `asked` for by name, or what suits the devices."""
    if world.alone:
        return "none"
    if store is None:
        assert world.master_addr is not None
        assert world.master_port is not None
        store = dist.TCPStore(
            world.master_addr,
            world.master_port,
            world.size,
            is_master=world.rank == 0 and not _agent_hosts_store(),
            timeout=timeout or START_TIMEOUT,
            master_listen_fd=world.listen_fd,
        )
        store = dist.PrefixStore(f"lockstep/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = asked if asked != "auto" else _backend_for(world, device, store)
    # NCCL needs to know the device at once, or it guesses and every rank opens a context on GPU 0.
    device_id = device if backend == "nccl" else None
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, device_id=device_id, timeout=timeout
    )
    return backend


def _backend_for(world: World, device: torch.device, store: dist.Store) -> str:
    """NCCL refuses two ranks on one GPU; gloo carries CUDA tensors through host memory."""
    if device.type != "cuda":
        return "gloo"
    # More ranks than GPUs that this one sees: they share some, or each was given one of its own to see.
    doubtful = world.local_size > torch.cuda.device_count()
    return "gloo" if doubtful and share_devices(world, device_name(device), store) else "nccl"


def share_devices(world: World, name: str, store: dist.Store) -> bool:
    """Whether two ranks of the job have the same one. All of them ask, as often as each other."""
    store = dist.PrefixStore(f"devices/{next(_ASKED)}", store)
    if store.add(name, 1) > 1:
        store.add("shared", 1)
    if store.add("ranks", 1) == world.size:
        store.set("complete", "")
    store.wait(["complete"])
    return store.add("shared", 0) > 0


def device_name(device: torch.device) -> str:
    """The same for all processes that use it, and for no other one."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _check_joined(world: World) -> None:
    """Ranks that take the group for another one would train alone, or wait for ever."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (world.rank, world.size):
        raise UserError(
            "a run in the process group that the script has made",
            f"rank {rank} of {size} there, RANK={world.rank} of WORLD_SIZE={world.size} in the environment",
            "start the ranks with torchrun, or leave init_process_group() to Lockstep",
        )


def _agent_hosts_store() -> bool:
    """torchrun's agent already listens on MASTER_PORT and serves the store itself."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _set_threads(asked: int | None, world: World, device: torch.device) -> int:
    """Ranks on one CPU divide its cores, unless the user decided."""
    if asked is not None:
        torch.set_num_threads(asked)
    elif "OMP_NUM_THREADS" not in os.environ and not world.alone and device.type == "cpu":
        torch.set_num_threads(max(1, available_cores() // world.local_size))
    return torch.get_num_threads()


@contextmanager
def _same_attention(exact: bool) -> Iterator[None]:
    """torch's attention layers take a shorter way in evaluations, but not when their weights are cut: other kernels."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(before and not exact)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _limited_memory(gibibytes: float | None, device: torch.device) -> Iterator[None]:
    if gibibytes is None:
        yield
        return
    if device.type != "cuda":
        raise UserError(f"gpu_memory={gibibytes:g}", f"a run on {device.type}", "leave gpu_memory out")
    there = torch.cuda.get_device_properties(device).total_memory / 2**30
    if gibibytes > there:
        raise UserError(
            f"gpu_memory={gibibytes:g}", f"{there:.1f} GiB on the GPU", f"type gpu_memory={int(there)}, or leave it out"
        )
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(gibibytes / there, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def _set_numerics(config: RunConfig, device: torch.device) -> None:
    if device.type == "cuda":
        # fp32 stays fp32 when asked for by name; the faster modes also let stray fp32 matmuls use TF32.
        torch.set_float32_matmul_precision("highest" if config.precision == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = config.precision != "fp32"
        torch.backends.cudnn.benchmark = not (config.deterministic or config.exact)
    if config.deterministic or config.exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # It costs, and changes no result: only for whoever asks for it by name.
        torch.utils.deterministic.fill_uninitialized_memory = config.deterministic  # pyrefly: ignore[missing-attribute]
