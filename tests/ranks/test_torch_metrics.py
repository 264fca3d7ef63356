"""torchmetrics in evaluations: the same number on any number of ranks, and that of torchmetrics on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.engine.evaluation.torch_metrics import MetricStates
from lockstep.errors import UserError
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.world import World
from lockstep.task import Loss
from pool import Pool
from ranks.support import fit
from ranks.test_evaluation import Scored

VALUES = {"global_batch": 8, "steps": 2, "micro_batch": 2, "evaluate.batch": 7, "evaluate.every": 1}
FSDP = {"strategy": "fsdp", "blocks": ["Linear"]}


def make_metrics() -> dict[str, Any]:
    # Not above: every worker of pytest imports every file, and this package takes more than a second.
    import torchmetrics
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
    from torchmetrics.wrappers import ClasswiseWrapper

    return {
        "macro": MulticlassAccuracy(3),  # counts
        "auroc": MulticlassAUROC(3),  # lists of scores
        "f1": ClasswiseWrapper(MulticlassF1Score(3, average=None)),  # a wrapper, several numbers
        "error": torchmetrics.MeanSquaredError(),  # a sum of floats
        "pearson": torchmetrics.PearsonCorrCoef(),  # means, which torchmetrics combines itself
        "smallest": torchmetrics.MinMetric(),
    }


class Measured(Scored):
    def __init__(self, count: int):
        super().__init__(count)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = super().model()

    def model(self) -> nn.Module:
        return self.net

    def eval_metrics(self) -> dict[str, Any]:
        return make_metrics()

    def eval_loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        _, x, label, _ = batch
        logits = model(x)
        classes, numbers = (logits.softmax(-1), label), (logits[:, 0], label.float())
        outputs = dict.fromkeys(("macro", "auroc", "f1"), classes) | dict.fromkeys(("error", "pearson"), numbers)
        return Loss(logits.sum(), len(label), outputs=outputs | {"smallest": (logits[:, 0],)})


def reference(task: Measured) -> dict[str, float]:
    """All samples in one batch, by torchmetrics alone."""
    metrics = make_metrics()
    with torch.no_grad():
        loss = task.eval_loss(task.net.eval(), task.held_out.tensors)
    found: dict[str, float] = {}
    for name, metric in metrics.items():
        metric.update(*loss.outputs[name])
        result = metric.compute()
        found |= (
            {f"{name}_{k}": float(v) for k, v in result.items()} if isinstance(result, dict) else {name: float(result)}
        )
    return found


# Of 15 batches, or of 2, some ranks of 3 have fewer; ranks of a sharded model repeat one, which must not count.
@pytest.mark.parametrize(
    ("count", "world", "more"),
    [(101, 2, {}), (12, 3, FSDP), pytest.param(101, 3, FSDP, marks=pytest.mark.long)],
)
def test_the_number_of_one_process(pool: Pool, count: int, world: int, more: dict[str, Any]) -> None:
    pool.preload("torchmetrics")
    task = Measured(count)
    (one,) = pool.run(fit, task, VALUES, world=1)
    found = one.summary["eval_metrics"]
    # float32. The terms of a correlation cancel, so its error does not shrink with it.
    assert found == pytest.approx(reference(task), rel=1e-5, abs=1e-6)
    for trace in pool.run(fit, task, VALUES | more, world=world):
        exact = {name: value for name, value in trace.summary["eval_metrics"].items() if name != "pearson"}
        assert exact == {name: value for name, value in found.items() if name != "pearson"}
        assert trace.summary["eval_metrics"]["pearson"] == pytest.approx(found["pearson"], abs=1e-6)


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="'one' is a Linear, not a torchmetrics"):
        MetricStates({"one": nn.Linear(1, 1)}, torch.device("cpu"))
    two = type(make_metrics()["error"])(num_outputs=2)
    states = MetricStates({"error": two}, torch.device("cpu"))
    with pytest.raises(UserError, match=r"returned no tuple of arguments(.|\n)*outputs is a NoneType"):
        states.update(None)
    states.update((torch.ones(3, 2), torch.zeros(3, 2)))
    with pytest.raises(UserError, match=r"must be one number; it has the shape \(2,\)"):
        states.compute(Collectives(World(), torch.device("cpu")))
