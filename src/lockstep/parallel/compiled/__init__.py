"""Compile what the user wrote, if that pays: time the first steps, decide, compile, compare with eager, time again.

A user types no key for it, and the loss is compiled together with the model. For transformers' GPT-2 124M on an H200
that is 1.23 times the speed of a hand-written loop with a compiled model, in 0.59 of its memory: docs/LOG.md,
"2026-11-18: what people really write, compiled". A run that is too short for it stays eager.

Read the modules in this order:

compiler.py        the sequence, and the choice between compiled and eager code in every call
payoff.py          whether it pays: the rule, the records of earlier runs, the time of a step
batch_sizes.py     which sizes of batches vary, and which calls fit compiled code
compilation.py     compiles one target after another, on all ranks, until one works and computes the same as eager
targets.py         what can be compiled, how it is put on the model, and how it is taken off again
side_effects.py    refuses a loss that must not be compiled
isolated_call.py   runs a call without side effects, and measures how far compiled results are from eager ones
deadline.py        gives up a compilation that takes too long
installed.py       the compiled code in use
constants.py       whether a compiled loss may be captured as a CUDA graph
"""
