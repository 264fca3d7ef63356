"""Train the trading agent on all GPUs: python train_distributed_clstm_ppo.py --num_gpus 2 --num_episodes 1000"""

from lockstep.classic.clstm_ppo.trainer import DistributedCLSTMPPOTrainer, main

__all__ = ["DistributedCLSTMPPOTrainer", "main"]

if __name__ == "__main__":
    raise SystemExit(main())
