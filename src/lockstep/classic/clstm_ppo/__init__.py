"""The trading agent by the names of its own document; the recipe clstm_ppo is what is trained.

trainer            DistributedCLSTMPPOTrainer, and what `train_distributed_clstm_ppo.py` runs
gpu_optimizations  the GPUs of a machine, processes on them, and what time and money a run takes
setup_check        what `check_gpu_setup.py` runs
"""
