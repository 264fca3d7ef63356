"""Evaluations: their sums over all ranks, and the decisions that follow from them."""
