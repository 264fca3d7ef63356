"""Start processes. Nothing here imports torch."""
