"""The time of a step: traces of a few steps, their breakdown, and one timeline of all ranks."""
