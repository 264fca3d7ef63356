"""torchvision's reference for classification on Lockstep.

lockstep train examples/ports/torchvision_classification.py:Classification --nproc 2
"""

import math

import torch
import torch.nn.functional as F
from material import pictures, small_resnet
from torch import nn

from lockstep import Loss, Task


class Classification(Task):
    unit = "picture"
    defaults = {"epochs": 4, "global_batch": 16, "evaluate": {"epochs": 1}}

    def model(self):
        return small_resnet()

    def data(self):
        return pictures(256, seed=0)

    def eval_data(self):
        return pictures(64, seed=1)

    def optimizer(self, model):
        norms = [p for module in model.modules() if isinstance(module, nn.BatchNorm2d) for p in module.parameters()]
        others = [p for p in model.parameters() if not any(p is norm for norm in norms)]
        groups = [{"params": others, "weight_decay": 1e-4}, {"params": norms, "weight_decay": 0.0}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def scheduler(self, optimizer):
        def share(step):
            epoch = step // 16
            return 0.01 if epoch < 1 else (1 + math.cos(math.pi * (epoch - 1) / 3)) / 2

        return share

    def loss(self, model, batch):
        image, target = batch
        output = model(image)
        hits = output.topk(5, dim=1).indices == target[:, None]
        total = F.cross_entropy(output, target, label_smoothing=0.1, reduction="sum")
        return Loss(total, len(target), {"acc@1": hits[:, 0].sum(), "acc@5": hits.sum()})
