"""Hooks: which functions of a task and of its callbacks a run calls, and the view of the run that they get."""
