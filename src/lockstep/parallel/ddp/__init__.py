"""Replicated parameters: torch's DistributedDataParallel, used for sums of gradients instead of means.

comm_hooks.py and powersgd.py compress gradients.
torch_private.py has all that is used of torch's private DDP.
"""
