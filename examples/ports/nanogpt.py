"""nanoGPT's train.py on Lockstep: lockstep train examples/ports/nanogpt.py:NanoGPT --nproc 2"""

import torch.nn.functional as F
from material import Crops, small_gpt, texts

from lockstep import Loss, Task


class NanoGPT(Task):
    unit = "token"
    defaults = {
        "steps": 40,
        "global_batch": 16,
        "micro_batch": 4,
        "lr": {"peak": 3e-3, "schedule": "cosine", "warmup": 5, "min_ratio": 0.1},
        "clip": {"norm": 1.0},
        "evaluate": {"every": 20},
        "checkpoint": {"best": "eval_loss"},
    }

    def model(self):
        return small_gpt()

    def data(self):
        return Crops(texts()[0])

    def eval_data(self):
        return Crops(texts()[1])

    def optimizer(self, model):
        optimizer = super().optimizer(model)  # weight decay on matrices only, as in nanoGPT
        for group in optimizer.param_groups:
            group["betas"] = (0.9, 0.95)
        return optimizer

    def loss(self, model, batch):
        x, y = batch
        logits = model(x)
        return Loss(F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), weight=y.numel())
