"""What the coordinator decides: when an attempt starts, and what follows. Nothing starts a process, waits or reads."""
