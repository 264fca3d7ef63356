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
"""

from lockstep.classic.amp_config import AMPConfig
from lockstep.classic.amp_trainer import AMPTrainer
from lockstep.classic.ddp_manager import DDPManager, log_gpu_memory
from lockstep.classic.distributed_amp_trainer import DistributedAMPTrainer
from lockstep.classic.distributed_config import DistributedConfig
from lockstep.classic.dynamic_scaler import DynamicScaler
from lockstep.classic.elastic_gpu_config import ElasticGPUConfig

__all__ = [
    "AMPConfig",
    "AMPTrainer",
    "DDPManager",
    "DistributedAMPTrainer",
    "DistributedConfig",
    "DynamicScaler",
    "ElasticGPUConfig",
    "log_gpu_memory",
]
