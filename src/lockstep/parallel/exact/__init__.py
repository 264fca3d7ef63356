"""Exact mode: gradients are added in one fixed order, so the bits do not depend on the number of ranks.

tree.py defines the order: a binary tree over the micro-batches of a step. A driver adds along it with a reducer, which
is one of the step's parts: it takes the gradients of each micro-batch, and the driver has it finish the sums after the
last one.

    SingleReducer     reducers.py     one process
    ReplicaReducer    reducers.py     replicas, reduced after the last backward
    BucketReducer     buckets.py      replicas, reduced by a hook in DDP's buckets
    ShardReducer      shards.py       shards, reduced by FSDP in every backward

norms.py has norms with the same bits for any sharding. block_inputs.py fixes the order inside a backward, and grid.py
the rounding of weights and losses, whose sums then do not depend on any order.
"""
