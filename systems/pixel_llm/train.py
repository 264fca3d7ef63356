"""Train the captioning model: on one process, under torchrun, or as ranks that are started by hand.

python train.py --config config.yaml
torchrun --nproc_per_node=2 train.py --config config.yaml --distributed
WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 python train.py --distributed      (and RANK=1 LOCAL_RANK=1 for the second rank)
python train.py --elastic_gpu preset=gpu
"""

import sys

from lockstep.classic.train_script import main

if __name__ == "__main__":
    sys.exit(main("pixel_llm"))
