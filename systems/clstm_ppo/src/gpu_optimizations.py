# ruff: noqa: F401 (the names are imported so that they can be imported from here)
"""GPUs for a training script: which there are, how many processes to start, and what time and money it takes."""

from lockstep.classic.clstm_ppo.gpu_optimizations import (
    estimate_training_speedup,
    get_gpu_info,
    launch_distributed_training,
    price_per_hour,
    print_gpu_info,
    print_training_speedup_estimates,
    processes,
    speedup_table,
)
