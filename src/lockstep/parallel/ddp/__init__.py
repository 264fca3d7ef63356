"""Replicated parameters: torch's DistributedDataParallel, driven for sums instead of means.

hooks.py and powersgd.py compress gradients; compile_warmup.py compiles before the first all-reduce; unused.py serves
models that do not use every parameter on every rank.
"""
