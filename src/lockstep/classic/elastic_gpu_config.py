"""How many processes, and what lives on which GPU: by the number of GPUs and their memory, never by their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lockstep.errors import UserError

BRIM = 0.95  # of a GPU's memory: where nothing can be moved elsewhere, it may be filled so far


class GPU(NamedTuple):
    name: str
    memory_gb: float  # GiB


@dataclass(frozen=True)
class ElasticPlan:
    """What to start. `batch_size` x `processes` x `grad_accum` is the batch that was asked for, on any hardware."""

    strategy: str  # single, ddp: copies, split: one process on two GPUs, hybrid: several, with GPUs beside theirs
    processes: int
    batch_size: int  # of one forward of one process
    grad_accum: int
    reason: str
    last_reader: str | None = None  # where the last frozen model lives, if not with its process

    @property
    def effective_batch(self) -> int:
        return self.batch_size * self.processes * self.grad_accum

    def __str__(self) -> str:
        cut = f"{self.processes} x {self.batch_size} x {self.grad_accum} = {self.effective_batch} samples a step"
        return f"{self.strategy}, {_processes(self.processes)}, {cut}: {self.reason}"


@dataclass
class ElasticGPUConfig:
    """Copies of everything where everything fits; otherwise the last frozen model moves to a second GPU.

    Sizes are in GiB: `trained_gb` with its optimizer, each frozen model, and what one sample adds in a forward and
    backward (None: not known). The defaults are two language models of 8 and 7 billion parameters in bf16.
    """

    gpus: Sequence[GPU] = field(default_factory=lambda: detected())
    base_batch_size: int = 64
    per_gpu: bool = False  # whether `base_batch_size` counts a process's samples, not everybody's
    trained_gb: float = 2.0
    reader_gb: Sequence[float] = (16.0, 14.0)
    sample_gb: float | None = 0.25
    target_util: float = 0.75  # of a GPU's memory

    def plan(self, processes: int | None = None) -> ElasticPlan:
        """`processes`: how many a launcher has started already; nobody else is invented then, and nobody sent away.
        None: as many as make sense."""
        if processes is not None and not self._divides(processes):
            raise uneven(self.base_batch_size, processes)
        count = len(self.gpus)
        ranks = processes or self._most(count)  # processes must divide the batch: of three GPUs two can, for 64
        if not count:
            return self._made(ranks, None, "no GPU here")
        third = count == 3 and processes in (None, 2) and self._divides(2) and self._fit_third()
        if self._fit_copies(sharing := -(-ranks // count)):
            if third and ranks == 2:
                return self._shared_third()
            idle = f"; {count - ranks} of {count} GPUs idle" * (ranks < count)
            room = self._left(self._whole(), self.target_util / sharing)
            return self._made(ranks, room, "everything fits on each GPU" + idle)
        if count == ranks == 1:
            return self._brimful()
        if third:
            return self._shared_third()
        return self._split(processes or self._most(count // 2))

    def settings(self, plan: ElasticPlan) -> dict[str, Any]:
        """For a run of the recipe latent_wire, and of others where nothing is moved."""
        found: dict[str, Any] = {}
        if self.gpus:
            found["micro_batch"] = "auto" if self.sample_gb is None else plan.batch_size
        if plan.last_reader is not None:
            found["task.reader_homes"] = [*["cuda:+0"] * (len(self.reader_gb) - 1), plan.last_reader]
        return found

    # ---- the ways ----

    def _brimful(self) -> ElasticPlan:
        """There is no second GPU to move anything to."""
        if self._whole() + self._sample() > BRIM * self._memory():
            raise self._too_large(self._whole(), "use two GPUs, or smaller models")
        return self._made(1, self._left(self._whole(), BRIM), "one GPU, nearly full")

    def _split(self, ranks: int) -> ElasticPlan:
        """Every process has a second GPU, `ranks` further on, for its last frozen model."""
        if not self.reader_gb:
            raise self._too_large(self._whole(), "nothing can be moved elsewhere: cut the model, strategy=fsdp")
        if 2 * ranks > len(self.gpus):
            fewer = self._most(len(self.gpus) // 2)
            raise self._too_large(self._whole(), f"start {_processes(fewer)}, with two GPUs each")
        largest = max(self._own(), self.reader_gb[-1])
        if largest + self._sample() > self.target_util * self._memory():
            raise self._too_large(largest, "use GPUs with more memory, or smaller models")
        why = f"the models do not fit on one GPU, so {'it has' if ranks == 1 else 'each has'} two"
        home = "cuda:1" if ranks == 1 else f"cuda:+{ranks}"
        return self._made(ranks, self._left(largest, self.target_util), why, home)

    def _shared_third(self) -> ElasticPlan:
        room = min(self._left(self._own(), self.target_util), self._left(2 * self.reader_gb[-1], self.target_util) // 2)
        return self._made(2, room, "two processes, and the last frozen model of both on the third GPU", "cuda:2")

    def _made(self, ranks: int, room: int | None, why: str, home: str | None = None) -> ElasticPlan:
        kind = ("split" if home else "single") if ranks == 1 else ("hybrid" if home else "ddp")
        mine = self.base_batch_size if self.per_gpu else self.base_batch_size // ranks
        most = mine if room is None else max(1, min(mine, room))
        batch = next(size for size in range(most, 0, -1) if mine % size == 0)
        return ElasticPlan(kind, ranks, batch, mine // batch, why, home)

    # ---- arithmetic ----

    def _memory(self) -> float:
        """Of the smallest: processes do equal work."""
        return min(gpu.memory_gb for gpu in self.gpus)

    def _whole(self) -> float:
        return self.trained_gb + sum(self.reader_gb)

    def _own(self) -> float:
        """Without what can be moved."""
        return self.trained_gb + sum(self.reader_gb[:-1])

    def _sample(self) -> float:
        return self.sample_gb or 0.0

    def _fit_copies(self, sharing: int) -> bool:
        return sharing * (self._whole() + self._sample()) <= self.target_util * self._memory()

    def _fit_third(self) -> bool:
        """Whether one GPU holds the last frozen model of two processes, and another the rest of one."""
        if not self.reader_gb:
            return False
        largest = max(2 * (self.reader_gb[-1] + self._sample()), self._own() + self._sample())
        return largest <= self.target_util * self._memory()

    def _divides(self, ranks: int) -> bool:
        return self.per_gpu or self.base_batch_size % ranks == 0

    def _most(self, limit: int) -> int:
        return next(ranks for ranks in range(max(1, limit), 0, -1) if self._divides(ranks))

    def _left(self, held: float, util: float) -> int:
        """Samples that still fit; all, where nobody knows what one takes."""
        return int((util * self._memory() - held) / self.sample_gb) if self.sample_gb else 2 * self.base_batch_size

    def _too_large(self, needed: float, fix: str) -> UserError:
        have = ", ".join(f"{gpu.memory_gb:.0f}" for gpu in self.gpus)
        return UserError(f"{needed:.1f} GiB and a sample on one GPU", f"GPUs of {have} GiB", fix)


def uneven(batch: int, processes: int) -> UserError:
    return UserError(
        f"a batch of {batch} on {processes} processes",
        "shares of different size",
        f"type global_batch={-(-batch // processes) * processes}",
    )


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count > 1)}"


def detected() -> list[GPU]:
    """The GPUs that this process sees."""
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [GPU(each.name, each.total_memory / 2**30) for each in found]
