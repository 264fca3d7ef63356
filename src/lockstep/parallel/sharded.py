"""The base class of drivers whose ranks hold shards of the parameters, and run every forward together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.errors import UserError
from lockstep.parallel.driver import DriverSetup, RankRole
from lockstep.parallel.gradients import no_gradient, sum_with_word
from lockstep.parallel.inner_gradients import InnerGradient, asked_for
from lockstep.parallel.micro_batches import MicroBatchDriver
from lockstep.parallel.parameter_hooks.hooks import ParameterHooks, change_sums
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.control_word import ControlWord
from lockstep.runtime.shards import squared_norms


class RanksDiffer(Exception):
    """The ranks run different forwards inside `many_forwards`."""


class ShardedDriver(MicroBatchDriver):
    """The base class of drivers with sharded parameters. A subclass shards the model, and then calls `__init__`.

    Forward and backward run as in a single process. Gradients are summed over ranks and never divided, and the squared
    norms of the shards are summed over ranks.
    """

    def __init__(
        self, model: nn.Module, setup: DriverSetup, role: RankRole, hooks_on_sums: Mapping[str, ParameterHooks]
    ):
        """`hooks_on_sums`: the user's parameter hooks that are called with the gradient sums of a pass."""
        super().__init__(model, setup, replace(role, replicated=False))
        self._hooks_on_sums = hooks_on_sums

    @contextmanager
    def many_forwards(self) -> Iterator[str | None]:
        # A forward is collective. So before each one, the ranks compare what they are about to do.
        ranks = self.runtime.collectives
        with self.model.register_forward_pre_hook(lambda *_: check_same_action("another forward", ranks), prepend=True):
            try:
                yield None
            except RanksDiffer:
                # All ranks raise this together, so no rank waits for this one.
                raise
            except Exception as error:
                # The other ranks may be about to run another forward; then this raises RanksDiffer on all ranks.
                check_same_action(f"{type(error).__name__}: {error}", ranks)
                raise  # the same error on all ranks

            check_same_action("the end", ranks)

    def before_inner_gradient(self, inner: InnerGradient) -> None:
        super().before_inner_gradient(inner)
        sharded = asked_for(inner, {id(p): name for name, p in self.parameters.items() if isinstance(p, DTensor)})
        if sharded:
            raise UserError(
                f"the loss computes the gradient of {sharded!r}, which is sharded: no rank holds it in full",
                inner.call_site,
                "set strategy=ddp or strategy=zero1, which keep full parameters on every rank",
            )

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        squared = self.runtime.collectives.all_reduce_(squared_norms(tensors).to(self.runtime.device))
        return list(squared.sqrt().unbind())

    def finish_reduction(self, control_word: ControlWord) -> tuple[Tensor, Tensor]:
        self._reduce_gradients()

        # The user's hooks get the gathered sums.
        change_sums(self._hooks_on_sums, self.parameters)

        # The norms of the shards, and the control word, in one collective.
        squared = squared_norms([p.grad for p in self.parameters.values() if p.grad is not None])
        packed, squared = sum_with_word(self.codec.pack(control_word), squared, self.runtime.collectives)

        # After the collective, in which the other ranks wait.
        if not len(squared):
            raise no_gradient()

        return packed, squared.sqrt()

    def _reduce_gradients(self) -> None:
        """Complete the gradient sums over all ranks, for subclasses whose backward does not."""


def check_same_action(action: str, collectives: Collectives) -> None:
    """Raise RanksDiffer on all ranks unless all of them do the same `action` next. Collective."""
    actions = collectives.all_gather_json(action)
    if len(set(actions)) > 1:
        raise RanksDiffer("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(actions)))
