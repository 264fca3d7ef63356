"""Compile what the user wrote, if that pays: time the first steps, decide, compile, compare with eager, time again.

A user types no key for it, and the loss is compiled together with the model. For transformers' GPT-2 124M on an H200
that is 1.23 times the speed of a hand-written loop with a compiled model, in 0.59 of its memory: docs/LOG.md,
"2026-11-18: what people really write, compiled". A run that is too short for it stays eager.

Read the modules in this order:

compiler.py        the sequence, and the choice between compiled and eager code in every call
payoff.py          whether it pays: the rule
facts.py           the facts for the rule: the time of a step, the size of the model, earlier runs on this machine
kernel_times.py    what there is to gain, from the kernels of a step
cudnn_pause.py     keeps cuDNN from a plan for each new size of a batch, with and without compiled code
batch_sizes.py     which sizes of batches vary, and which calls fit compiled code
compilation.py     compiles a target on all ranks, compares it with eager, and gives up what takes too long
targets.py         what can be compiled, how it is put on the model, and how it is taken off again
side_effects.py    refuses a loss that must not be compiled
installed.py       the compiled code in use, and whether a compiled loss may be captured as a CUDA graph
"""
