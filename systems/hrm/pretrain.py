"""Train HRM as its document does: torchrun --nproc-per-node 8 pretrain.py data_path=FOLDER lr=1e-4 ...

The names of the document can be imported from this file, for your own training loop.
"""

import sys

from lockstep.recipes.hrm.commands import PretrainConfig, generate_name, load_synced_config, pretrain_main
from lockstep.recipes.hrm.model import HierarchicalReasoningModel
from lockstep.recipes.hrm.optimizers import CastedSparseEmbeddingSignSGD_Distributed
from lockstep.recipes.hrm.own_loop import (
    PuzzleDataset,
    PuzzleDatasetConfig,
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
    pretrain_main(sys.argv[1:])
