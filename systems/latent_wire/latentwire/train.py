"""Train the wire between frozen language models on the GPUs of this machine. From systems/latent_wire:

python latentwire/train.py --elastic_gpu
torchrun --nproc_per_node=gpu latentwire/train.py --elastic_gpu
WORLD_SIZE=4 RANK=0 LOCAL_RANK=0 python latentwire/train.py      (and likewise for ranks 1 to 3)
"""

import sys

# The document defines these in this file, so they can be imported from it.
from lockstep.classic import DDPManager, ElasticGPUConfig, log_gpu_memory
from lockstep.classic.train_script import main

__all__ = ["DDPManager", "ElasticGPUConfig", "log_gpu_memory"]

if __name__ == "__main__":
    sys.exit(main("latent_wire", readers=2, ranks_need_flag=False))
