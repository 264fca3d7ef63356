"""PowerSGD (Vogels et al., 2019): a gradient matrix travels as the product of two thin ones.

The mean M (n, m) over ranks of the gradients is approximated as P Q', with P (n, r) orthonormal. One step of a power
iteration finds them, from the last step's Q:

    P = M Q     summed over ranks, then orthonormalised
    Q = M' P    summed over ranks
    M ~ P Q'    r (n + m) numbers instead of n m

What this leaves out of a rank's own gradient is its error. With error feedback it is added to the next step's gradient,
so that nothing is lost, only late. Errors are kept per unit of weight and loss scale, since gradients here are sums: in
a step that weighs half as much they count half as much too. Vectors, and matrices that would not get smaller, travel as
they are; if all of them do, which a large rank makes sure of, the result has the bits of an exchange without a hook.

A step that is skipped for a NaN or an infinite gradient leaves the state of the matrices that saw it as it was. One
skipped as a spike has already changed it.
All ranks must compute the same bits from the same sums, so all must have the same kind of device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lockstep.checkpoint.load import CheckpointReader
from lockstep.config import DDPConfig
from lockstep.parallel.ddp.hooks import Bucket, Hook
from lockstep.runtime.control_word import ControlWord
from lockstep.runtime.seeds import derive

KEPT_AS = "ddp.hook"  # the part of a checkpoint


@dataclass
class Matrix:
    """A parameter whose gradient is compressed."""

    query: Tensor  # (m, r) orthonormal: the last Q, the same on all ranks
    error: Tensor | None  # (n, m), this rank's own


class PowerSGDHook(Hook):
    def __init__(
        self, word: nn.Parameter, group: dist.ProcessGroup, named: dict[str, nn.Parameter], config: DDPConfig, seed: int
    ):
        super().__init__(word, group)
        self.start, self.steps = config.powersgd_start, 0
        self.feedback = config.error_feedback
        self.names = {id(p): name for name, p in named.items()}
        self.matrices: dict[str, Matrix] = {}
        for number, (name, p) in enumerate(named.items()):
            if saves(p, config.powersgd_rank):
                self.matrices[name] = _fresh(p, config.powersgd_rank, derive(seed, "powersgd", number), self.feedback)
        self._scale = torch.zeros((), dtype=torch.float64, device=word.device)
        self._unit = self._scale
        self._unit_known: dist.Work | None = None
        self._mesh: DeviceMesh | None = None
        if self.feedback and self.matrices:
            self._mesh = init_device_mesh(word.device.type, (self.ranks,), mesh_dim_names=("rank",))

    @property
    def compresses(self) -> bool:
        return self.steps >= self.start and bool(self.matrices)

    def prepare(self, start: Tensor, word: ControlWord | None) -> None:
        """One unit of the mean gradient, in this step's sums: global weight x loss scale. The weight is needed before
        the word brings it, so it travels ahead."""
        if not (self.feedback and self.compresses):
            return
        self._scale = torch.maximum(self._scale, start.double())  # 0 for padding, which says nothing
        if word is not None:
            self._unit = self._scale * word.weight
            self._unit_known = self.start_sum(self._unit)
            self._scale = torch.zeros_like(self._scale)

    def finish(self) -> None:
        self.steps += 1

    def exchange(self, bucket: Bucket) -> Iterator[None]:
        pairs = list(zip(bucket.parameters, bucket.gradients, strict=True))
        known = [(self.matrices.get(self.names.get(id(p), "")), gradient) for p, gradient in pairs]
        thin = [(matrix, gradient) for matrix, gradient in known if matrix]
        whole = [gradient for matrix, gradient in known if not matrix]
        if not self.compresses or not thin:
            bucket.buffer.div_(self.ranks)
            work = self.start_sum(bucket.buffer)
            yield
            work.wait()
            return
        for matrix, gradient in thin:
            self._add_error(matrix, gradient)
        firsts = [_as_matrix(gradient) @ matrix.query for matrix, gradient in thin]
        parts = [*firsts, *whole]  # in one collective, the word among them
        flat = torch.cat([part.flatten().to(firsts[0].dtype) for part in parts]).div_(self.ranks)
        work = self.start_sum(flat)
        yield
        work.wait()
        summed = _cut(flat, parts)
        for gradient, mean in zip(whole, summed[len(firsts) :], strict=True):
            gradient.copy_(mean)
        bases = [torch.linalg.qr(first).Q for first in summed[: len(firsts)]]
        seconds = [_as_matrix(gradient).T @ basis for (_, gradient), basis in zip(thin, bases, strict=True)]
        flat = torch.cat([second.flatten() for second in seconds]).div_(self.ranks)
        work = self.start_sum(flat)
        yield
        work.wait()
        for (matrix, gradient), basis, mine, mean in zip(thin, bases, seconds, _cut(flat, seconds), strict=True):
            self._settle(matrix, gradient, basis, mine, mean)

    def _add_error(self, matrix: Matrix, gradient: Tensor) -> None:
        if matrix.error is not None:
            if self._unit_known is not None:
                self._unit_known.wait()
                self._unit_known = None
            gradient.add_((matrix.error * self._unit.to(matrix.error.dtype)).view_as(gradient))

    def _settle(self, matrix: Matrix, gradient: Tensor, basis: Tensor, mine: Tensor, mean: Tensor) -> None:
        """`mine` (m, r) is this rank's Q, `mean` that of all. No host synchronisation: the device decides what is kept.

        The error is what the basis leaves out of this rank's own gradient. Measured against the mean of all ranks, as
        is often done, errors have the same sum; but each would also hold how far its rank was from that mean in all
        steps so far, which only grows."""
        approximation = basis @ mean.T
        sound = torch.isfinite(approximation).all()
        matrix.query.copy_(torch.where(sound, torch.linalg.qr(mean).Q, matrix.query))
        if matrix.error is not None:
            left = (_as_matrix(gradient) - basis @ mine.T) / self._unit.to(mine.dtype)
            matrix.error.copy_(torch.where(sound & (self._unit > 0), left, matrix.error))
        gradient.copy_(approximation.view_as(gradient))

    # ---- what a checkpoint holds ----

    def state_dict(self) -> dict[str, Any]:
        """Every rank's error is its own: together they are one tensor (ranks, n, m), of which each rank holds a row."""
        queries = {name: matrix.query for name, matrix in self.matrices.items()}
        errors = {name: self._row(m.error) for name, m in self.matrices.items() if m.error is not None}
        return {"steps": self.steps, "queries": queries, "errors": errors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A matrix that was not compressed before, or to another rank, starts afresh."""
        self.steps = state["steps"]
        for name, matrix in self.matrices.items():
            query, error = state["queries"].get(name), state["errors"].get(name)
            if query is not None and query.shape == matrix.query.shape:
                matrix.query.copy_(query)
            if error is not None and matrix.error is not None:
                matrix.error.copy_(error)

    def read(self, name: str, reader: CheckpointReader) -> Tensor:
        """This rank's part of a saved tensor. Errors of more or fewer ranks are shared out: their sum counts."""
        if not name.startswith(f"part.{KEPT_AS}.errors."):
            return reader.read(name)
        saved, *rest = reader.shape(name)
        rows = [self.group.rank()] if saved == self.ranks else range(saved)
        mine, *others = (reader.read_block(name, (row, *(0 for _ in rest)), (1, *rest))[0] for row in rows)
        return mine if saved == self.ranks else sum(others, mine) / self.ranks

    def _row(self, error: Tensor) -> DTensor:
        assert self._mesh is not None
        shape = torch.Size((self.ranks, *error.shape))
        stride = (error.numel(), *error.stride())
        return DTensor.from_local(error[None], self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def saves(parameter: Tensor, rank: int) -> bool:
    """Whether two thin matrices are fewer numbers than the gradient itself."""
    if parameter.dim() < 2:
        return False
    n, m = _as_matrix(parameter).shape
    return rank * (n + m) < n * m


def _fresh(parameter: Tensor, rank: int, seed: int, feedback: bool) -> Matrix:
    n, m = _as_matrix(parameter).shape
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    random = torch.randn(m, rank, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    query = torch.linalg.qr(random).Q.contiguous().to(parameter.device)
    return Matrix(query, torch.zeros(n, m, dtype=dtype, device=parameter.device) if feedback else None)


def _as_matrix(tensor: Tensor) -> Tensor:
    """(n, m): the first dimension, and all the others. In float32 at least, or orthogonality is lost."""
    flat = tensor.detach().reshape(tensor.shape[0], -1)
    return flat if flat.dtype == torch.float64 else flat.float()


def _cut(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """A flat tensor as tensors of the shapes of `like`."""
    ends = list(itertools.accumulate(part.numel() for part in like))
    return [flat[end - part.numel() : end].view(part.shape) for part, end in zip(like, ends, strict=True)]
