"""transformers' example for causal language models: lockstep train examples/ports/run_clm.py:RunClm --nproc 2"""

import torch
from material import blocks, gpt2_config, texts
from transformers import get_scheduler

from lockstep.hf import CausalLM


class RunClm(CausalLM):
    defaults = {
        **{"steps": 24, "global_batch": 8, "micro_batch": 4, "evaluate.every": 12},
        **{"lr.schedule": "constant", "clip.norm": None},  # the scheduler below, and no clipping
    }

    def __init__(self):
        training, validation = map(blocks, texts())
        super().__init__(gpt2_config(), training, validation)

    def optimizer(self, model):
        named = list(model.named_parameters())
        decayed = [p for name, p in named if p.dim() >= 2]
        others = [p for name, p in named if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3)

    def scheduler(self, optimizer):
        return get_scheduler("linear", optimizer, num_warmup_steps=4, num_training_steps=24)
