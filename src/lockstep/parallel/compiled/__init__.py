"""Compile what the user wrote: watch the first steps, decide, compile, compare with eager, and measure what it gained.

compiler.py       the sequence, and the choice between compiled and eager code in every call
watch.py          times steps, and notes the sizes of their batches (shapes.py)
judge.py          gathers facts, also of earlier runs (history.py), for the pure rule in decision.py
compilation.py    compiles a target (targets.py) on all ranks and compares it with eager (isolated_call.py)
deadline.py       gives up a compilation that takes too long
side_effects.py   refuses a loss that must not be compiled
installed.py      the code in use; constants.py says whether a compiled loss may be captured as a CUDA graph
"""
