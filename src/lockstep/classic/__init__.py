"""The trainer, configuration and manager that multi-GPU scripts usually write for themselves, on Lockstep's step.

amp_config               what mixed precision should do
amp_trainer              one process: `training_step(batch)`
distributed_amp_trainer  the same on several ranks
distributed_config       ranks, nodes and devices; environment, YAML, JSON
ddp_manager              a process group, wrapped models and sharded batches for a loop of plain PyTorch
process_group            joining and leaving it, for the trainer and the manager
elastic_gpu_config       processes and devices by the GPUs that are there
dynamic_scaler           the fp16 loss scale for such a loop
checkpoints              a trainer's state in a folder
train_script             what `train.py` runs
clstm_ppo                the names of the trading agent's document
hrm                      the names of HRM's document

Every name that one of the four documents gives can be imported from here; the scripts in `systems/` do so too.
"""

from lockstep.classic.amp_config import AMPConfig
from lockstep.classic.amp_trainer import AMPTrainer
from lockstep.classic.clstm_ppo.gpu_optimizations import (
    estimate_training_speedup,
    get_gpu_info,
    launch_distributed_training,
    print_gpu_info,
    print_training_speedup_estimates,
)
from lockstep.classic.clstm_ppo.trainer import DistributedCLSTMPPOTrainer
from lockstep.classic.ddp_manager import DDPManager, log_gpu_memory
from lockstep.classic.distributed_amp_trainer import DistributedAMPTrainer
from lockstep.classic.distributed_config import DistributedConfig
from lockstep.classic.dynamic_scaler import DynamicScaler
from lockstep.classic.elastic_gpu_config import ElasticGPUConfig
from lockstep.classic.hrm.pretrain_config import PretrainConfig, generate_name, load_synced_config
from lockstep.classic.hrm.puzzle_dataset import PuzzleDataset, PuzzleDatasetConfig
from lockstep.classic.hrm.train_loop import (
    TrainState,
    compute_metrics,
    create_model,
    evaluate,
    init_train_state,
    process_aggregated_metrics,
    save_train_state,
    train_batch,
)
from lockstep.recipes.hrm.model import HierarchicalReasoningModel
from lockstep.recipes.hrm.optimizers import CastedSparseEmbeddingSignSGD_Distributed

__all__ = [
    "AMPConfig",
    "AMPTrainer",
    "CastedSparseEmbeddingSignSGD_Distributed",
    "DDPManager",
    "DistributedAMPTrainer",
    "DistributedCLSTMPPOTrainer",
    "DistributedConfig",
    "DynamicScaler",
    "ElasticGPUConfig",
    "HierarchicalReasoningModel",
    "PretrainConfig",
    "PuzzleDataset",
    "PuzzleDatasetConfig",
    "TrainState",
    "compute_metrics",
    "create_model",
    "estimate_training_speedup",
    "evaluate",
    "generate_name",
    "get_gpu_info",
    "init_train_state",
    "launch_distributed_training",
    "load_synced_config",
    "log_gpu_memory",
    "print_gpu_info",
    "print_training_speedup_estimates",
    "process_aggregated_metrics",
    "save_train_state",
    "train_batch",
]
