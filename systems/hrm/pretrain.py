"""HRM, started as its document does: torchrun --nproc-per-node 8 pretrain.py data_path=FOLDER lr=1e-4 ...

The names of the document can be imported from here, for a loop of your own.
"""

import sys

from lockstep.recipes.hrm.iterable import PuzzleDataset, PuzzleDatasetConfig
from lockstep.recipes.hrm.model import HierarchicalReasoningModel
from lockstep.recipes.hrm.pretrain import PretrainConfig, generate_name, load_synced_config, main
from lockstep.recipes.hrm.sparse import CastedSparseEmbeddingSignSGD_Distributed
from lockstep.recipes.hrm.train_state import (
    TrainState,
    compute_metrics,
    create_model,
    evaluate,
    init_train_state,
    process_aggregated_metrics,
    save_train_state,
    train_batch,
)

__all__ = [
    "CastedSparseEmbeddingSignSGD_Distributed",
    "HierarchicalReasoningModel",
    "PretrainConfig",
    "PuzzleDataset",
    "PuzzleDatasetConfig",
    "TrainState",
    "compute_metrics",
    "create_model",
    "evaluate",
    "generate_name",
    "init_train_state",
    "load_synced_config",
    "process_aggregated_metrics",
    "save_train_state",
    "train_batch",
]

if __name__ == "__main__":
    main(sys.argv[1:])
