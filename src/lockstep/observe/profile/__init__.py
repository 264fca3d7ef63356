"""Where the time of a step goes: the breakdown of a trace, and one timeline of all ranks."""
