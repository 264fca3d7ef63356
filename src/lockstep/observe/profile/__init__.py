"""Where the time of a step goes: traces of a few steps, their breakdown, and one timeline of all ranks."""
