"""CUDA graphs: capture a launch-bound model's forward and backward once and replay them.

graphs.py    decides for each variant of a call (shapes, modes, arguments) whether to capture, and when to replay
variants.py  one variant of a call, its first calls timed, and the attributes of modules that distinguish variants
checks.py    runs a call as a test before its capture, and compares a replay with an eager call after it
capture.py   one captured forward with its backwards, as a differentiable function
device.py    stream capture and timing on a GPU
"""
