"""Replicated parameters: torch's DistributedDataParallel, used for sums of gradients instead of means.

hooks.py and powersgd.py compress gradients.
"""
