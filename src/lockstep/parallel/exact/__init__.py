"""Exact mode: gradients are added in one fixed order, so the bits do not depend on the number of ranks.

tree.py defines the order. A driver follows it through a part of its own, a reducer: those for full parameters are in
reducers.py (with hook.py for DDP's buckets, and with norms that have the same bits for any sharding), the one for FSDP
in shards.py. block_inputs.py fixes the order inside a backward.
"""
