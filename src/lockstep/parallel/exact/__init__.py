"""Exact mode: gradients are added in one fixed order, so the bits do not depend on the number of ranks.

tree.py defines the order. A driver follows it through one of the step's parts, a reducer: those for full parameters are
in reducers.py, which also has norms with the same bits for any sharding, and in hook.py, for DDP's buckets. The one for
FSDP is in shards.py. block_inputs.py fixes the order inside a backward.
"""
