"""CUDA graphs: capture a launch-bound model once and replay it."""
