"""Train the trading agent on all GPUs: python train_distributed_clstm_ppo.py --num_gpus 2 --num_episodes 1000"""

from lockstep.recipes.clstm_ppo.trainer import main

if __name__ == "__main__":
    raise SystemExit(main())
