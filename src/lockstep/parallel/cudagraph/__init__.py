"""CUDA graphs: capture a launch-bound model's forward and backward once and replay them.

graphs.py      decides per variant of a call (shapes, modes, arguments) whether to capture, and when to replay
checks.py      dry run before a capture, comparison with a plain call after it
capture.py     one captured forward with its backwards, as a differentiable function
attributes.py  what modules keep besides parameters, as part of what tells variants apart
device.py      stream capture and timing on a GPU
"""
