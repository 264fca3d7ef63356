"""The time of a step: the breakdown of a trace, and one timeline of all ranks."""
