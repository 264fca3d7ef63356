"""The model that a run trains, with what belongs to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from lockstep.checkpoint.init_from.weights import InitialWeights
from lockstep.engine.checks.guards import TrainableGuard
from lockstep.engine.determinism import Exactness
from lockstep.engine.evaluation.evaluator import Evaluator
from lockstep.optim.optimizers import Optimizers
from lockstep.optim.weight_average import WeightAverage
from lockstep.parallel.driver import Driver


@dataclass(frozen=True)
class TrainedModel:
    """The model under its driver, with its optimizers, evaluator and guards."""

    driver: Driver
    optimizers: Optimizers
    evaluator: Evaluator
    guard: TrainableGuard
    exactness: Exactness | None  # with `exact`
    schedulers: Any = None  # the user's, as `make_learning_rate` takes them
    average: WeightAverage | None = None  # with `ema.decay`
    initial: InitialWeights | None = None  # with `init_from`

    @contextmanager
    def optimizers_in_eval(self) -> Iterator[None]:
        """Return a context in which optimizers are in eval mode: a schedule-free one puts its average into the model.

        These are the weights to evaluate and save. Most optimizers have no modes, and train the same weights.
        """
        self.optimizers.switch("eval", self.driver.reshard)
        try:
            yield
        finally:
            self.optimizers.switch("train", self.driver.reshard)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the averages of `ema.decay`, if it is set, are the model's weights."""
        return self.average.swapped_in(self.driver.reshard) if self.average else nullcontext()
