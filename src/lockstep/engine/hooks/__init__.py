"""The hooks of a run: the functions of a task and of its callbacks that it calls, and the view of it that they get."""
