"""Sharded parameters, gradients and optimizer state: torch's FSDP2, driven for sums."""
