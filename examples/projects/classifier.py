"""Classifies pictures, with BatchNorm, early stopping, the best checkpoint and TensorBoard.

lockstep train examples/projects/classifier.py:Classifier --nproc 2
"""

import torch.nn.functional as F
from pieces import convnet, pictures

from lockstep import Loss, Task


class Classifier(Task):
    defaults = {
        **{"epochs": 12, "global_batch": 24, "micro_batch": 8, "lr.peak": 0.01, "log.sinks": ["tensorboard"]},
        **{"evaluate.epochs": 1, "stop.patience": 2, "checkpoint.best": "eval_loss", "checkpoint.final": "best"},
    }

    def model(self):
        return convnet()

    def data(self):
        return pictures(240, seed=0)

    def eval_data(self):
        return pictures(100, seed=1)

    def loss(self, model, batch):
        x, y = batch
        out = model(x)
        right = (out.argmax(dim=1) == y).sum()
        return Loss(F.cross_entropy(out, y, reduction="sum"), weight=len(y), metrics={"accuracy": right})
