"""torchmetrics in an evaluation: updated batch by batch on each rank, reduced once, the same result on any world size.

torchmetrics would synchronize each state by itself, some as a mean of means, and it would wait for ranks that evaluate
fewer batches. So the states of all metrics are exchanged here, in one message, and torchmetrics computes from the
reduced states as it does in one process. It is imported by the task, never by Lockstep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.runtime.collectives import Collectives

MEAN = "dim_zero_mean"


class MetricStates:
    """The metrics of an evaluation set, with the state that this rank has counted."""

    def __init__(self, metrics: Mapping[str, Any], device: torch.device):
        self.metrics = dict(metrics)
        for name, metric in self.metrics.items():
            _check_kind(name, metric)
            metric.to(device)

            # Before the reset, which sets the states to the new defaults.
            for part in _parts(metric):
                _prepare(part)

            metric.reset()

    def update(self, outputs: Any) -> None:
        """Update each metric with the outputs of a batch: its arguments, the same for all or by the metric's name."""
        for name, metric in self.metrics.items():
            # All metrics take the same outputs, unless the loss returns some by name.
            arguments = outputs.get(name) if isinstance(outputs, Mapping) else outputs
            if not isinstance(arguments, tuple):
                raise UserError(
                    f"the metric {name!r} cannot be updated: eval_loss() returned no tuple of arguments for it",
                    f"outputs is a {type(arguments).__name__}",
                    "return lockstep.Loss(total, weight, outputs=(predictions, targets)), or a dict of such tuples by "
                    "the names of the metrics",
                )

            metric.update(*arguments)

    def compute(self, collectives: Collectives) -> dict[str, float]:
        """Reduce the states over all ranks and return the results, the same on every rank. Collective."""
        parts = [part for metric in self.metrics.values() for part in _parts(metric)]
        if not collectives.world.alone:
            self._exchange(parts, collectives)

        return self.results()

    def results(self) -> dict[str, float]:
        """Return the results of the states that this rank has."""
        results: dict[str, float] = {}
        for name, metric in self.metrics.items():
            results |= _numbers(name, metric.compute())

        return results

    def _exchange(self, parts: list[Any], collectives: Collectives) -> None:
        """Replace the states of this rank by the combined states of all ranks."""
        # Lists of tensors, such as scores to sort, have different lengths on each rank. One tensor is a list of one.
        states = [(part, name) for part in parts for name in part._defaults]
        lists = [_as_list(getattr(part, name)) for part, name in states]
        lengths = [len(tensors) for tensors in lists]
        updates_here = [part._update_count for part in parts]

        # Two messages: the counts, by which the others can split, and then all tensors at once.
        counts = collectives.all_gather_json([updates_here, lengths])
        gathered = collectives.all_gather_tensors([tensor for tensors in lists for tensor in tensors])

        # By rank, then by state. Ranks are in the order of their batches, so lists are in the order of the samples.
        by_rank = [list(_split(tensors, lengths)) for tensors, (_, lengths) in zip(gathered, counts, strict=True)]
        updates = {id(part): [ranks[number] for ranks, _ in counts] for number, part in enumerate(parts)}

        for number, (part, name) in enumerate(states):
            # A rank without a batch has only defaults, which some metrics could not combine with anything.
            counted = [rank for rank, count in enumerate(updates[id(part)]) if count]
            if counted:
                found = [by_rank[rank][number] for rank in counted]
                weights = [updates[id(part)][rank] for rank in counted]
                setattr(part, name, _reduced(part, name, found, weights))

        # torchmetrics would return a result that it has cached, and warn of a metric that was never updated.
        for part in parts:
            part._update_count = sum(updates[id(part)])
            part._computed = None


def _check_kind(name: str, metric: Any) -> None:
    """Raise unless this looks like a torchmetrics.Metric, which Lockstep does not import to ask."""
    if not all(hasattr(metric, member) for member in ("update", "compute", "reset", "_reductions", "_defaults")):
        raise UserError(
            f"the metric {name!r} is a {type(metric).__name__}, not a torchmetrics.Metric",
            "",
            'return {"accuracy": torchmetrics.classification.MulticlassAccuracy(10)}; a plain sum belongs into '
            "Loss(total, weight, metrics)",
        )


def _parts(metric: Any) -> Iterator[Any]:
    """Yield the metric and the metrics inside it: a wrapper, or a sum of two, has its state there."""
    yield from (module for module in metric.modules() if hasattr(module, "_reductions"))


def _prepare(part: Any) -> None:
    """Keep float states in float64, in which sums of float32 hardly round, and let torchmetrics not synchronize."""
    part.distributed_available_fn = _never
    part._defaults = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in part._defaults.items()
    }


def _never() -> bool:
    """Tell torchmetrics that there is no process group to synchronize over."""
    return False


def _as_list(state: Any) -> list[Tensor]:
    """Return a state as a list of tensors: one tensor is a list of one."""
    return [state] if isinstance(state, Tensor) else list(state)


def _split(tensors: list[Tensor], lengths: list[int]) -> Iterator[list[Tensor]]:
    """Yield lists of these lengths, one after the other."""
    rest = iter(tensors)
    for length in lengths:
        yield [next(rest) for _ in range(length)]


def _reduced(part: Any, name: str, found: list[list[Tensor]], weights: list[int]) -> Any:
    """Return one state of all ranks that have counted something, as torchmetrics would reduce it."""
    reduction: Callable[[Tensor], Tensor] | None = part._reductions[name]

    # Lists, such as scores to sort, are joined in the order of the ranks.
    if isinstance(part._defaults[name], list):
        return [tensor for tensors in found for tensor in tensors]

    # One rank has counted everything, so there is nothing to reduce.
    if len(found) == 1:
        return found[0][0]

    # [ranks, ...]
    stacked = torch.stack([tensor for (tensor,) in found])

    if getattr(reduction, "__name__", "") == MEAN:
        # A mean over batches: ranks may have had different numbers of them.
        shares = torch.tensor(weights, dtype=torch.float64, device=stacked.device)
        return torch.tensordot(shares / shares.sum(), stacked.double(), dims=1).to(stacked.dtype)

    return stacked if reduction is None else reduction(stacked)


def _numbers(name: str, result: Any) -> dict[str, float]:
    """Return the result of a metric as numbers by name. A dictionary, as wrappers return it, has several."""
    if isinstance(result, Mapping):
        return {f"{name}_{key}": value for key, inner in result.items() for value in _numbers(name, inner).values()}

    if isinstance(result, Tensor) and result.numel() != 1:
        raise UserError(
            f"the metric {name!r} must be one number; it has the shape {tuple(result.shape)}",
            "",
            'let it average (average="macro"), or wrap it in torchmetrics.wrappers.ClasswiseWrapper',
        )

    # Sums in another order differ in the last bits of a float64. Those of a float32 are left.
    number = result.to(torch.float32) if isinstance(result, Tensor) else result
    return {name: float(number)}
