"""One rank of `bench checkpoint`: ways to save and to load a state, while the rank computes.

All ways save the same state: torch.save as most scripts use it, with and without fsync, DCP, DCP in the background, and
Lockstep's saver. They take turns, and every turn changes the state first, so that none can skip what has not changed.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lockstep.bench.ranks.turns import in_turn
from lockstep.checkpoint.loading.search import VerifyingRanks, newest_valid
from lockstep.checkpoint.saving.draft import SaveContext
from lockstep.checkpoint.saving.outcome import SaveFailed
from lockstep.checkpoint.saving.save import Saver
from lockstep.checkpoint.state.reshard import Rank0Contents, RankContents
from lockstep.checkpoint.storage.folder import CheckpointStorage
from lockstep.checkpoint.storage.transitions import claim
from lockstep.config import resolve
from lockstep.config.sections import CheckpointConfig
from lockstep.runtime import context, environments
from lockstep.runtime.context import Runtime
from lockstep.runtime.shards import LocalShard, shard_of

TOKEN = "be7c4"  # stands for the run to which the checkpoints belong
STEPS = 20  # steps of computing between two saves

State = dict[str, torch.Tensor]
Times = tuple[float, float]  # the seconds that training waits, and the seconds until the save is durable
KINDS = ("model", "exp_avg", "exp_avg_sq")  # the tensors of a parameter under AdamW


def make_state(megabytes: int) -> State:
    """Return the tensors of a transformer of this size with AdamW: a third each for weights and the two moments."""
    # Shapes of a block's parameters; the names are only labels.
    width = 512
    block = {
        "attention": (3 * width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
        "norm": (width,),
    }

    # The state has as many layers as give at least this size, in float32.
    per_layer = len(KINDS) * sum(4 * math.prod(shape) for shape in block.values())
    layers = math.ceil(megabytes * 1_000_000 / per_layer)

    # Random, since a file system that compresses would write less of a state of zeros than of a trained one.
    state: State = {}
    for layer in range(layers):
        for name, shape in block.items():
            for kind in KINDS:
                state[f"{kind}.{layer}.{name}"] = torch.randn(shape)

    return state


class BusyWork:
    """Something for the cores to do; a step takes some milliseconds."""

    def __init__(self) -> None:
        # Two matrices [400, 400]; tanh keeps the product bounded, however often it is repeated.
        self.a, self.b = torch.randn(2, 400, 400)

    def until(self, done: Callable[[], bool]) -> None:
        """Compute for as long as something is not done."""
        while not done():
            self.steps(1)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.a = torch.tanh(self.a @ self.b)


class Ways:
    """The ways to save and to load one state. All ranks share the folder `root`.

    save   by name: saves the state as of a step. Returns the seconds for which training waits, and those until the
           save is durable.
    load   by name: loads the state of a step into the same tensors.
    """

    def __init__(self, root: Path, runtime: Runtime, megabytes: int):
        self.root = root
        self.runtime = runtime
        self.rank = runtime.world.rank
        self.world = runtime.world.size

        # Every rank holds the whole state, like a replica.
        self.state = make_state(megabytes)
        self.training = BusyWork()

        # Each rank writes its share of the tensors, as ddp does: all ranks hold the same, so one copy is enough.
        share = list(self.state.items())[self.rank :: self.world]
        self.mine: dict[str, LocalShard] = {name: shard_of(tensor) for name, tensor in share}

        self.storage = CheckpointStorage.of_run(root)
        self.saver = self._open_saver()

        # The two tables of the class docstring. Each format is loaded once: fsync and async write the same formats.
        self.save: dict[str, Callable[[int], Times]] = {
            "torch.save": lambda step: self._with_torch(self._file("plain", step), durable=False),
            "torch.save + fsync": lambda step: self._with_torch(self._file("durable", step), durable=True),
            "DCP": self._with_dcp,
            "DCP async": self._with_dcp_async,
            "Lockstep": self._with_lockstep,
        }
        self.load: dict[str, Callable[[int], None]] = {
            "torch.save": lambda step: self._load_with_torch(self._file("plain", step)),
            "DCP": self._load_with_dcp,
            "Lockstep": self._load_with_lockstep,
        }

    def _open_saver(self) -> Saver:
        """Open a saver of this rank's shards. Its buffers are allocated now, as at the start of a run."""
        # A run claims its folder, too, so that the files of another run are not touched.
        if self.runtime.is_main:
            claim(self.storage, TOKEN)

        # The last checkpoint only, since the other ways delete theirs, too (`forget`).
        saver = Saver(SaveContext(self.storage, self.rank, self.world, TOKEN, CheckpointConfig(keep=1)))
        saver.reserve(self.mine)
        return saver

    def barrier(self) -> None:
        if not self.runtime.world.alone:
            dist.barrier()

    def forget(self, step: int) -> None:
        """Delete the files of an earlier step: all ways write new files and keep the last good ones until then."""
        if self.rank == 0:
            for kind in ("plain", "durable"):
                self._file(kind, step).unlink(missing_ok=True)

            # DCP writes a folder with one file per rank.
            for kind in ("dcp", "dcp-async"):
                shutil.rmtree(self.root / f"{kind}-{step}", ignore_errors=True)

            # Otherwise the next way would have to wait for data that an earlier one has left in the page cache.
            os.sync()

        self.barrier()

    def _file(self, kind: str, step: int) -> Path:
        return self.root / f"{kind}-{step}.pt"

    def _with_torch(self, path: Path, durable: bool) -> Times:
        """Let rank 0 write the whole state, as most scripts do."""
        # Without fsync the data is only in the page cache when `torch.save` returns, and a machine that crashes loses
        # it. That is what most scripts do, so both are measured.
        began = time.perf_counter()
        if self.rank == 0:
            with path.open("wb") as file:
                torch.save(self.state, file)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())

        # No rank goes on before the file is written.
        self.barrier()
        spent = time.perf_counter() - began
        return spent, spent

    def _with_dcp(self, step: int) -> Times:
        """Save with torch.distributed.checkpoint, which returns when all ranks have written."""
        # Collective: rank 0 plans which rank writes which tensors, and each rank writes its part.
        began = time.perf_counter()
        dcp.save(self.state, checkpoint_id=self.root / f"dcp-{step}")
        spent = time.perf_counter() - began
        return spent, spent

    def _with_dcp_async(self, step: int) -> Times:
        """Save with torch.distributed.checkpoint, which copies the state and writes it while training goes on."""
        # It returns when the state is copied to host memory, which is all that training waits for.
        began = time.perf_counter()
        future: Any = dcp.async_save(self.state, checkpoint_id=self.root / f"dcp-async-{step}")
        stall = time.perf_counter() - began

        self.training.until(future.done)
        future.result()  # raises the error of the save
        return stall, time.perf_counter() - began

    def _with_lockstep(self, step: int) -> Times:
        """Save as a run does: copies are made while the next step computes, and must be done before its update."""
        # Nothing but the update changes the moments, so they can be copied while the next step computes.
        began = time.perf_counter()
        moments = {name for name in self.mine if "exp_avg" in name}
        save = self.saver.copy_and_write(step, RankContents(self.mine, Rank0Contents(values={"step": step}), moments))
        stall = time.perf_counter() - began

        # Forward and backward of the next step; its update waits for the copies.
        self.training.steps(STEPS)
        waited = time.perf_counter()
        save.wait_for_copy()
        stall += time.perf_counter() - waited

        # Train on until the save has ended, as a run does: it asks after every step.
        self.training.until(lambda: save.wait(0))

        assert not isinstance(save.outcome, SaveFailed), save.outcome
        return stall, time.perf_counter() - began

    def _load_with_torch(self, path: Path) -> None:
        """Let every rank read the whole file, as most scripts do."""
        # Into the tensors that exist, as `load_state_dict` does: a model keeps its storage.
        loaded = torch.load(path)
        for name, tensor in self.state.items():
            tensor.copy_(loaded[name])

    def _load_with_dcp(self, step: int) -> None:
        dcp.load(self.state, checkpoint_id=self.root / f"dcp-{step}")

    def _load_with_lockstep(self, step: int) -> None:
        """Read with every digest checked, as a resumed run does."""
        # The search is a part of it: the ranks first agree on a checkpoint that all of them can read.
        found = newest_valid(self.storage, VerifyingRanks.of(self.runtime))
        assert found is not None, "nothing was saved"

        for name, tensor in self.state.items():
            tensor.copy_(found.reader.read(name))


def measure(arguments: dict[str, Any]) -> Generator[Any, str, None]:
    """Yield the size of the state; then for each "turn" the seconds of every way to save and to load."""
    # DCP warns about details that have nothing to do with the measurement.
    warnings.filterwarnings("ignore")

    # On the CPU: the disk is measured, and the copies that training waits for.
    config = resolve([("bench", {"device": "cpu", "threads": arguments["threads"]})]).config
    with context.start(environments.detect(), config) as runtime:
        ways = Ways(Path(arguments["root"]), runtime, arguments["megabytes"])
        try:
            size = sum(tensor.nbytes for tensor in ways.state.values())
            yield {"bytes": size, "torch": torch.__version__}

            # The parent decides how many turns it asks for, and closes this generator.
            for turn in itertools.count(1):
                yield _turn(ways, turn)
        finally:
            ways.saver.close()


def _turn(ways: Ways, turn: int) -> dict[str, Any]:
    """Save in every way, and load again; return the seconds of each, by name."""
    saves = {}
    for name in in_turn(ways.save, turn):
        # Each way starts clean: nothing waits for the disk, and the cores are busy as in training.
        ways.forget(turn - 1)
        ways.training.steps(STEPS)

        # An update, of one row of each tensor: no way may find that nothing has changed.
        for tensor in ways.state.values():
            tensor[0] += 1

        saves[name] = ways.save[name](turn)
        ways.barrier()

    # All ranks load at once, as after a restart.
    loads = {}
    for name, load in ways.load.items():
        ways.barrier()
        began = time.perf_counter()
        load(turn)
        loads[name] = time.perf_counter() - began

    return {"save": saves, "load": loads}
