"""Optimizers that Lockstep does not know: whether they may be used, and how they are stepped on sharded parameters."""
