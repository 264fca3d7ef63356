"""Exact mode: gradients are added in one fixed order, so the bits do not depend on the number of ranks.

tree.py defines the order, hook.py follows it under ddp, block_inputs.py fixes it inside a backward, and row_norms.py
computes norms with the same bits for any sharding.
"""
