"""Finds a rank that hangs: the timeouts, the stacks of all ranks, and the collectives that they entered."""
