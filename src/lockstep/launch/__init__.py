"""The launcher: it starts the ranks of a job, watches them and restarts them. It imports no torch."""
