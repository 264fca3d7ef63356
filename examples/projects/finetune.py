"""Fine-tunes a Llama with LoRA on sentences of different lengths, and logs to W&B.

lockstep train examples/projects/finetune.py:Finetune --nproc 2 run_dir=runs/tuned
lockstep ckpt export runs/tuned --format hf --out adapters
"""

from pieces import base_model, sentences

from lockstep.hf import CausalLM


class Finetune(CausalLM):
    defaults = {"epochs": 2, "global_batch": 12, "micro_batch": 4, "lr.peak": 0.02, "log.sinks": ["wandb"]}

    def __init__(self):
        lora = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
        super().__init__(base_model(), sentences(96, seed=0), sentences(24, seed=1), lora=lora)
