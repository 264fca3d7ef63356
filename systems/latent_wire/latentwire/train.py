"""Train the wire between frozen language models, on the GPUs that are there:

python latentwire/train.py --elastic_gpu
torchrun --nproc_per_node=gpu latentwire/train.py --elastic_gpu
WORLD_SIZE=4 RANK=0 LOCAL_RANK=0 python latentwire/train.py --distributed      (and the other three beside it)
"""

import sys

from lockstep.classic import DDPManager, ElasticGPUConfig
from lockstep.classic.train_script import main

__all__ = ["DDPManager", "ElasticGPUConfig"]

if __name__ == "__main__":
    sys.exit(main("latent_wire", readers=2))
