"""Finds the second view of each sample among those of the global batch.

lockstep train examples/projects/contrastive.py:Contrastive --nproc 2
"""

import torch
import torch.nn.functional as F
from pieces import mlp, two_views

from lockstep import Loss, Task


class Contrastive(Task):
    defaults = {"epochs": 4, "global_batch": 24, "lr.peak": 0.01, "checks.loss": "batch-coupled"}

    def model(self):
        return mlp(16, 8)

    def data(self):
        return two_views(240)

    def before_training(self, run):
        self.run = run

    def loss(self, model, batch):
        first, second = F.normalize(model(torch.cat(batch)), dim=1).chunk(2)
        scores = 10 * first @ self.run.all_gather(second).T
        labels = self.run.row_offset + torch.arange(len(first), device=first.device)
        return Loss(F.cross_entropy(scores, labels, reduction="sum"), weight=len(first))
