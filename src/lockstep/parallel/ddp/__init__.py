"""Replicated parameters: torch's DistributedDataParallel, driven for sums instead of means.

hooks.py and powersgd.py compress gradients; compile_warmup.py compiles before the first all-reduce.
"""
