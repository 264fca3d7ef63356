"""Derived values: the plan of a run, and the memory that it needs."""
