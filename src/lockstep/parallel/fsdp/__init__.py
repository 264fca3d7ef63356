"""Sharded parameters, gradients and optimizer state: torch's FSDP2, used for sums of gradients instead of means.

sharding.py shards a model in place, and driver.py runs it.
collective_check.py checks that all ranks use the same parameters, because torch does not.
forward_checks.py finds in the first pass what FSDP would lose of a forward, and gathers for what a block keeps.
torch_private.py has all that is used of torch's private FSDP2.
"""
