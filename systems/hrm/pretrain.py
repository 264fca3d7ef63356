# ruff: noqa: F401 (the names are imported so that they can be imported from here)
"""Train HRM as its document does: torchrun --nproc-per-node 8 pretrain.py data_path=FOLDER lr=1e-4 ...

The names of the document can be imported from this file, for your own training loop.
"""

import sys

from lockstep.classic import (
    CastedSparseEmbeddingSignSGD_Distributed,
    HierarchicalReasoningModel,
    PretrainConfig,
    PuzzleDataset,
    PuzzleDatasetConfig,
    TrainState,
    compute_metrics,
    create_model,
    evaluate,
    generate_name,
    init_train_state,
    load_synced_config,
    process_aggregated_metrics,
    save_train_state,
    train_batch,
)
from lockstep.classic.hrm.pretrain import main

if __name__ == "__main__":
    main(sys.argv[1:])
