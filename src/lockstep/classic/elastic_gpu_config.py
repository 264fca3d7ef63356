"""How many processes to start, and which model lives on which GPU, by the number of GPUs and their memory.

The names of GPUs decide nothing. Sizes are in GiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lockstep.errors import UserError, plural

# The share of a GPU's memory that may be filled where nothing can be moved to another GPU.
NEARLY_FULL = 0.95


class GPU(NamedTuple):
    name: str
    memory_gb: float


@dataclass(frozen=True)
class ElasticPlan:
    """What to start. `batch_size` x `processes` x `grad_accum` is the batch that was asked for, on any hardware."""

    # single; ddp: replicas; split: one process on two GPUs; hybrid: several processes, with GPUs for frozen models.
    strategy: str
    processes: int

    # Samples of one forward of one process, and forwards of a step.
    batch_size: int
    grad_accum: int
    reason: str

    # The device of the last frozen model, if it is not on its process's own GPU.
    last_reader: str | None = None

    @property
    def effective_batch(self) -> int:
        return self.batch_size * self.processes * self.grad_accum

    def __str__(self) -> str:
        return (
            f"{self.strategy}, {plural(self.processes, 'process', 'processes')}, {self.processes} x {self.batch_size} "
            f"x {self.grad_accum} = {self.effective_batch} samples a step: {self.reason}"
        )


@dataclass
class ElasticGPUConfig:
    """Replicas of everything where everything fits; otherwise the last frozen model moves to a second GPU.

    The defaults are two frozen language models of 8 and 7 billion parameters in bf16.
    """

    gpus: Sequence[GPU] = field(default_factory=lambda: detected())

    # Samples of all processes together, or with `per_gpu` of each of them.
    base_batch_size: int = 64
    per_gpu: bool = False

    # What is trained, with its optimizer; and every frozen model.
    trained_gb: float = 2.0
    reader_gb: Sequence[float] = (16.0, 14.0)

    # What one sample adds in a forward and backward; None if it is not known.
    sample_gb: float | None = 0.25

    # The share of a GPU's memory to use.
    target_util: float = 0.75

    def plan(self, processes: int | None = None) -> ElasticPlan:
        """Plan for the `processes` that a launcher started, or for as many as make sense."""
        if processes is not None and not self._divides(processes):
            raise uneven(self.base_batch_size, processes)

        # Processes must divide the batch: for 64 samples only two of three GPUs are used.
        count = len(self.gpus)
        ranks = processes or self._most(count)
        if not count:
            return self._plan(ranks, None, "no GPU here")

        # Processes that share a GPU each need room for all models there.
        sharing = -(-ranks // count)
        replica = self._all_models() + self._sample()
        third = count == 3 and processes in (None, 2) and self._divides(2) and self._fits_third()

        fits = sharing * replica <= self.target_util * self._memory()
        if third and (ranks == 2 or not fits):
            return self._shared_third()

        if fits:
            idle = f"; {count - ranks} of {count} GPUs idle" * (ranks < count)
            room = self._room(self._all_models(), self.target_util / sharing)
            return self._plan(ranks, room, "everything fits on each GPU" + idle)

        # Otherwise the last frozen model moves, unless there is no second GPU to move it to.
        if count > 1 or ranks > 1:
            return self._split(processes or self._most(count // 2))

        if replica > NEARLY_FULL * self._memory():
            raise self._too_large(self._all_models(), "use two GPUs, or smaller models")

        return self._plan(1, self._room(self._all_models(), NEARLY_FULL), "one GPU, nearly full")

    def settings(self, plan: ElasticPlan) -> dict[str, Any]:
        """Return the settings for a run of the recipe latent_wire, and of others where no model is moved."""
        settings: dict[str, Any] = {}
        if self.gpus:
            settings["micro_batch"] = "auto" if self.sample_gb is None else plan.batch_size

        if plan.last_reader is not None:
            settings["task.reader_homes"] = [*["cuda:+0"] * (len(self.reader_gb) - 1), plan.last_reader]

        return settings

    # ---- kinds of plans ----

    def _split(self, ranks: int) -> ElasticPlan:
        """Plan a second GPU for the last frozen model of every process: the one `ranks` after its own."""
        if not self.reader_gb:
            raise self._too_large(self._all_models(), "shard the model: strategy=fsdp")

        if 2 * ranks > len(self.gpus):
            fewer = plural(self._most(len(self.gpus) // 2), "process", "processes")
            raise self._too_large(self._all_models(), f"start {fewer}, with two GPUs each")

        # The fuller of the two GPUs decides.
        largest = max(self._own_models(), self.reader_gb[-1])
        if largest + self._sample() > self.target_util * self._memory():
            raise self._too_large(largest, "use GPUs with more memory, or smaller models")

        reason = f"the models do not fit on one GPU, so {'it has' if ranks == 1 else 'each has'} two"
        device = "cuda:1" if ranks == 1 else f"cuda:+{ranks}"
        return self._plan(ranks, self._room(largest, self.target_util), reason, device)

    def _shared_third(self) -> ElasticPlan:
        """Plan two processes on three GPUs: the third holds the last frozen model of both."""
        own = self._room(self._own_models(), self.target_util)
        third = self._room(2 * self.reader_gb[-1], self.target_util) // 2
        return self._plan(
            2, min(own, third), "two processes, and the last frozen model of both on the third GPU", "cuda:2"
        )

    def _plan(self, ranks: int, room: int | None, reason: str, last_reader: str | None = None) -> ElasticPlan:
        """Divide the batch into the largest forwards of at most `room` samples."""
        alone, moved = ("single", "split") if ranks == 1 else ("ddp", "hybrid")

        # A forward takes a divisor of the process's samples, so that all forwards are equal.
        samples = self.base_batch_size if self.per_gpu else self.base_batch_size // ranks
        most = samples if room is None else max(1, min(samples, room))
        batch = next(size for size in range(most, 0, -1) if samples % size == 0)
        return ElasticPlan(moved if last_reader else alone, ranks, batch, samples // batch, reason, last_reader)

    # ---- arithmetic ----

    def _memory(self) -> float:
        """Return the memory of the smallest GPU: processes do equal work."""
        return min(gpu.memory_gb for gpu in self.gpus)

    def _all_models(self) -> float:
        return self.trained_gb + sum(self.reader_gb)

    def _own_models(self) -> float:
        """Return the size of what stays with its process when the last frozen model moves."""
        return self.trained_gb + sum(self.reader_gb[:-1])

    def _sample(self) -> float:
        return self.sample_gb or 0.0

    def _fits_third(self) -> bool:
        """Return whether one GPU holds the last frozen model of two processes, and another the rest of one."""
        if not self.reader_gb:
            return False

        largest = max(2 * (self.reader_gb[-1] + self._sample()), self._own_models() + self._sample())
        return largest <= self.target_util * self._memory()

    def _divides(self, ranks: int) -> bool:
        return self.per_gpu or self.base_batch_size % ranks == 0

    def _most(self, limit: int) -> int:
        """Return the most processes, up to `limit`, that divide the batch."""
        return next(ranks for ranks in range(max(1, limit), 0, -1) if self._divides(ranks))

    def _room(self, held: float, util: float) -> int:
        """Return how many samples fit beside `held` GiB; more than the batch has, if their size is not known."""
        if not self.sample_gb:
            return 2 * self.base_batch_size

        return int((util * self._memory() - held) / self.sample_gb)

    def _too_large(self, needed: float, fix: str) -> UserError:
        return UserError(
            f"the model needs {needed:.1f} GiB and room for a sample, more than one GPU has",
            f"GPUs of {', '.join(f'{gpu.memory_gb:.0f}' for gpu in self.gpus)} GiB",
            fix,
        )


def uneven(batch: int, processes: int) -> UserError:
    return UserError(
        f"a batch of {batch} does not divide by {processes} processes",
        "",
        f"set global_batch={-(-batch // processes) * processes}",
    )


def detected() -> list[GPU]:
    """Return the GPUs that torch can use."""
    # If the driver is too old, torch counts GPUs that it cannot use.
    if not torch.cuda.is_available():
        return []

    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [GPU(gpu.name, gpu.total_memory / 2**30) for gpu in properties]
