"""PowerSGD (Vogels et al., 2019): a gradient matrix is sent as the product of two thin matrices.

The mean M (n, m) of the gradients over ranks is approximated as P Q', with P (n, r) orthonormal. Each training step
runs one power iteration, which starts from the previous step's Q:

    P = M Q     summed over ranks, then orthonormalised
    Q = M' P    summed over ranks
    M ~ P Q'    r (n + m) numbers instead of n m

The error of a rank is its own gradient minus the part that P represents. With error feedback it is added to the next
step's gradient, so that it is delayed rather than lost. Gradients here are sums, so errors are stored per unit of
weight and loss scale: in a step with half the weight, they count half as much. Vectors, and matrices that would not get
smaller, are sent uncompressed. If no matrix would get smaller (with a large rank, say), the result has the same bits as
without a hook.

A step that is skipped for a NaN or an infinite gradient does not change the state of its matrices; a step that is
skipped as a spike does. All ranks must compute the same bits from the same sums, so all must have the same kind of
device.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lockstep.checkpoint.reader import CheckpointReader
from lockstep.config import DDPConfig
from lockstep.parallel.ddp.comm_hooks import Bucket, CommHook
from lockstep.runtime.control_word import ControlWord
from lockstep.runtime.seeds import derive

STATE_NAME = "ddp.hook"  # the name of the state in a checkpoint


@dataclass
class Matrix:
    """The state of a parameter whose gradient, a matrix M (n, m), is compressed to rank r = `ddp.powersgd_rank`."""

    query: Tensor  # (m, r), orthonormal: the previous Q, the same on all ranks
    error: Tensor | None  # (n, m): this rank's error


class PowerSGDHook(CommHook):
    """Reduces matrices as products of two thin matrices, from step `powersgd_start` on.

    The first steps are uncompressed, as is usual for PowerSGD: gradients change most at the beginning.
    """

    def __init__(
        self,
        word_parameter: nn.Parameter,
        group: dist.ProcessGroup,
        named: dict[str, nn.Parameter],
        config: DDPConfig,
        seed: int,
    ):
        super().__init__(word_parameter, group)
        self.first_step = config.powersgd_start
        self.steps = 0
        self.feedback = config.error_feedback
        self.names = {id(p): name for name, p in named.items()}

        # Vectors and small matrices are left out: they are sent uncompressed.
        self.matrices = {
            name: _initial_state(p, config.powersgd_rank, derive(seed, "powersgd", index), self.feedback)
            for index, (name, p) in enumerate(named.items())
            if is_worthwhile(p, config.powersgd_rank)
        }

        # `_unit` is the factor between gradient sums and means in this step: global weight x loss scale. Its all-reduce
        # runs during the backward.
        self._scale = torch.zeros((), dtype=torch.float64, device=word_parameter.device)
        self._unit = self._scale
        self._unit_work: dist.Work | None = None

        # The errors of all ranks are saved as one tensor with a row per rank.
        self._mesh: DeviceMesh | None = None
        if self.feedback and self.matrices:
            self._mesh = init_device_mesh(word_parameter.device.type, (self.ranks,), mesh_dim_names=("rank",))

    @property
    def compresses(self) -> bool:
        return self.steps >= self.first_step and bool(self.matrices)

    def prepare(self, grad_output: Tensor, control_word: ControlWord | None) -> None:
        """Start the all-reduce of `_unit`: global weight x loss scale.

        The reduction needs it before the control word is reduced, so it is sent separately.
        """
        if not (self.feedback and self.compresses):
            return

        # The maximum over micro-batches, to ignore padding, whose loss scale is 0.
        self._scale = torch.maximum(self._scale, grad_output.double())
        if control_word is not None:
            self._unit = self._scale * control_word.weight
            self._unit_work = self.start_reduce(self._unit)
            self._scale = torch.zeros_like(self._scale)

    def finish(self) -> None:
        self.steps += 1

    def reduce_bucket(self, bucket: Bucket) -> Iterator[None]:
        # The control word has no name and no matrix, so it ends up in `full`.
        pairs = [(self.matrices.get(self.names.get(id(p), "")), gradient) for p, gradient in bucket.gradients]
        compressed = [(matrix, gradient) for matrix, gradient in pairs if matrix is not None]
        full = [gradient for matrix, gradient in pairs if matrix is None]

        # A bucket without matrices, or before powersgd_start: an ordinary all-reduce.
        if not self.compresses or not compressed:
            yield from self.reduce(bucket.buffer.div_(self.ranks))
            return

        # P = M Q, in one collective with everything that is sent uncompressed, such as the control word.
        for matrix, gradient in compressed:
            self._add_error(matrix, gradient)

        firsts = [_as_matrix(gradient) @ matrix.query for matrix, gradient in compressed]
        summed = yield from self._mean([*firsts, *full])
        for gradient, mean in zip(full, summed[len(firsts) :], strict=True):
            gradient.copy_(mean)

        # Q = M' P, with the orthonormal P, which is the same on all ranks.
        bases = [torch.linalg.qr(first).Q for first in summed[: len(firsts)]]
        seconds = [_as_matrix(gradient).T @ basis for (_, gradient), basis in zip(compressed, bases, strict=True)]
        means = yield from self._mean(seconds)
        for (matrix, gradient), basis, own, mean in zip(compressed, bases, seconds, means, strict=True):
            self._update(matrix, gradient, basis, own, mean)

    def _mean(self, tensors: list[Tensor]) -> Generator[None, None, list[Tensor]]:
        """Return the means of all tensors over the ranks, in the dtype of the first tensor, with one collective."""
        flat = torch.cat([tensor.flatten().to(tensors[0].dtype) for tensor in tensors]).div_(self.ranks)
        yield from self.reduce(flat)

        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _add_error(self, matrix: Matrix, gradient: Tensor) -> None:
        if matrix.error is not None:
            # The first matrix of a step waits for the all-reduce that `prepare` started.
            if self._unit_work is not None:
                self._unit_work.wait()
                self._unit_work = None

            gradient.add_((matrix.error * self._unit.to(matrix.error.dtype)).view_as(gradient))

    def _update(self, matrix: Matrix, gradient: Tensor, basis: Tensor, own: Tensor, mean: Tensor) -> None:
        """Write the approximation into `gradient` and update the matrix.

        `basis` (n, r) is P; `own` (m, r) is this rank's Q, and `mean` (m, r) the mean of Q over ranks. Conditions are
        evaluated with torch.where, so that the host does not wait for the device.

        The error is this rank's own gradient minus its projection on the basis. Other implementations subtract the mean
        approximation of all ranks. The sum of the errors over ranks would be the same, but each error would also
        accumulate its rank's deviation from the mean in every step, and would grow without bound.
        """
        approximation = basis @ mean.T
        finite = torch.isfinite(approximation).all()

        # A step with inf or NaN will be skipped. Keep the old Q, since the new one would carry NaN into later steps.
        matrix.query.copy_(torch.where(finite, torch.linalg.qr(mean).Q, matrix.query))

        if matrix.error is not None:
            error = (_as_matrix(gradient) - basis @ own.T) / self._unit.to(own.dtype)
            matrix.error.copy_(torch.where(finite & (self._unit > 0), error, matrix.error))

        # The optimizer gets the approximation.
        gradient.copy_(approximation.view_as(gradient))

    # ---- checkpoint state ----

    @property
    def stateful(self) -> dict[str, Any]:
        return {STATE_NAME: self}

    def state_dict(self) -> dict[str, Any]:
        """Return the state. The errors of all ranks form one tensor (ranks, n, m), and each rank holds its own row."""
        return {
            "steps": self.steps,
            "queries": {name: matrix.query for name, matrix in self.matrices.items()},
            "errors": {name: self._row(m.error) for name, m in self.matrices.items() if m.error is not None},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state. A matrix that is missing in it, or had another `powersgd_rank`, keeps its random Q."""
        self.steps = state["steps"]
        for name, matrix in self.matrices.items():
            query = state["queries"].get(name)
            error = state["errors"].get(name)

            # The shapes differ if ddp.powersgd_rank was changed.
            if query is not None and query.shape == matrix.query.shape:
                matrix.query.copy_(query)
            if error is not None and matrix.error is not None:
                matrix.error.copy_(error)

    def read_shard(self, name: str, reader: CheckpointReader) -> Tensor:
        """Read this rank's row of the errors, or another saved tensor in full."""
        if not name.startswith(f"stateful.{STATE_NAME}.errors."):
            return reader.read(name)

        def read_row(row: int) -> Tensor:
            return reader.read_slice(name, (row, *(0 for _ in rest)), (1, *rest))[0]

        saved, *rest = reader.shape(name)
        if saved == self.ranks:
            return read_row(self.group.rank())

        # Saved by another number of ranks: only the sum of all errors matters, so every rank takes an equal part of it.
        first, *others = (read_row(row) for row in range(saved))
        return sum(others, first) / self.ranks

    def _row(self, error: Tensor) -> DTensor:
        """Return `error` (n, m) as this rank's row of a tensor (ranks, n, m)."""
        return DTensor.from_local(
            error[None],
            self._mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size((self.ranks, *error.shape)),
            stride=(error.numel(), *error.stride()),
        )


def is_worthwhile(parameter: Tensor, rank: int) -> bool:
    """Whether the two thin matrices have fewer elements than the gradient itself."""
    if parameter.dim() < 2:
        return False

    n, m = _as_matrix(parameter).shape
    return rank * (n + m) < n * m


def _initial_state(parameter: Tensor, rank: int, seed: int, feedback: bool) -> Matrix:
    """Return a state with a random Q, the same on all ranks, and no error yet."""
    gradient = _as_matrix(parameter)  # has the shape and dtype of the gradient
    random = torch.randn(gradient.shape[1], rank, generator=torch.Generator().manual_seed(seed), dtype=gradient.dtype)
    query = torch.linalg.qr(random).Q.contiguous().to(parameter.device)
    return Matrix(query, gradient.new_zeros(gradient.shape) if feedback else None)


def _as_matrix(tensor: Tensor) -> Tensor:
    """Return `tensor` as (n, m): its first dimension, and all others. At least float32, for accurate QR factors."""
    flat = tensor.detach().reshape(tensor.shape[0], -1)
    return flat if flat.dtype == torch.float64 else flat.float()
