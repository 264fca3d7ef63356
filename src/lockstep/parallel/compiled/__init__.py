"""Compile what the user wrote: watch the first steps, decide, compile, compare with eager, and measure what it gained.

`compiler.py` owns the sequence. It calls the pure rule in `decision.py`, which reads what was measured here before
(`history.py`) and which sizes vary (`shapes.py`). `attempt.py` compiles a target (`targets.py`) on all ranks and
compares it with eager (`trial.py`); `constants.py` says whether a compiled loss may be captured as a CUDA graph.
"""
