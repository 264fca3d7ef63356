"""Sharded parameters, gradients and optimizer state: torch's FSDP2, driven for sums.

uniform_use.py checks what torch does not: that all ranks use the same parameters.
"""
