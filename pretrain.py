"""HRM, started as its document does: torchrun --nproc-per-node 8 pretrain.py data_path=FOLDER lr=1e-4 ..."""

import sys

from lockstep.recipes.hrm.pretrain import main

if __name__ == "__main__":
    main(sys.argv[1:])
