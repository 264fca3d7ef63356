"""Tensor parallelism: layers sharded over the ranks of a tp group."""
