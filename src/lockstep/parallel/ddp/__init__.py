"""Replicated parameters: torch's DistributedDataParallel, driven for sums instead of means."""
