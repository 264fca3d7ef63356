"""The decisions of the coordinator: when an attempt starts, and what follows. Nothing here starts, waits or reads."""
