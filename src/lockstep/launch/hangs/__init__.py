"""Finds a rank that hangs: the limits, the stacks of all ranks, and the collectives that they entered."""
