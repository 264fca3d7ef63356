"""timm's train.py on Lockstep: lockstep train examples/ports/timm_train.py:TimmTrain --nproc 2"""

import math

import torch.nn.functional as F
from material import pictures, small_vit
from timm.optim import create_optimizer_v2

from lockstep import Loss, Task


class TimmTrain(Task):
    unit = "picture"
    defaults = {
        "epochs": 3,
        "global_batch": 16,
        "clip": {"norm": 1.0},
        "ema": {"decay": 0.9},
        "evaluate": {"epochs": 1},
        "checkpoint": {"best": "top1", "best_mode": "max"},
    }

    def model(self):
        return small_vit()

    def data(self):
        return pictures(128, seed=0)

    def eval_data(self):
        return pictures(64, seed=1)

    def optimizer(self, model):
        return create_optimizer_v2(model, opt="adamw", lr=5e-3, weight_decay=0.05)

    def scheduler(self, optimizer):
        return lambda step: 0.005 + 0.995 * (1 + math.cos(math.pi * step / 24)) / 2

    def loss(self, model, batch):
        image, target = batch
        return Loss(F.cross_entropy(model(image), target, label_smoothing=0.1, reduction="sum"), len(target))

    def eval_loss(self, model, batch):
        image, target = batch
        output = model(image)
        right = (output.argmax(1) == target).sum()
        return Loss(F.cross_entropy(output, target, reduction="sum"), len(target), {"top1": right})
