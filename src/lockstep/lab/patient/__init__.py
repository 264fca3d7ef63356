"""The patient of lab 7: a task with planted faults, and a run of it that survives them."""
