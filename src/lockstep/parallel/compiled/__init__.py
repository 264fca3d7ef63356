"""Compile what the user wrote, if that pays: time the first steps, decide, compile, compare with eager, time again.

A user types no key for it, and the loss is compiled together with the model. For transformers' GPT-2 124M on an H200
that is 1.23 times the speed of a hand-written loop with a compiled model, in 0.59 of its memory: docs/LOG.md,
"2026-11-18: what people really write, compiled". A run that is too short for it stays eager.

A run that may compile has a `Compiler` (`compiler.py`), under ddp and zero1, and on one rank. With `compile=auto` it
times the first steps, tries compiled code, and keeps it if that pays; with `compile=true` it compiles at once. It is
one of the parts of a step, and its `end_step` is collective in some steps, in which all ranks decide together. Only
calls between `before_forward` and the end of `finish_micro_batch` of a `MicroBatchDriver` run compiled code
(`Compiler.is_training`).

Where a forward waits for other ranks (fsdp, tp, SyncBatchNorm), there is no Compiler: `parallelize` calls
`model.compile()` instead, and the ranks compile together in the first step. Nothing is timed or compared with eager
there, and evaluations run the compiled model too. A pipeline compiles its stages.

Read the modules in this order:

compiler.py        the sequence, and the choice between compiled and eager code in every call
payoff.py          whether it pays: the rule
facts.py           the facts for the rule: the time of a step, the size of the model, earlier runs on this machine
kernel_times.py    what there is to gain, from the kernels of a step
cudnn_pause.py     keeps cuDNN from a plan for each new size of a batch, with and without compiled code
batch_sizes.py     which sizes of batches vary, and which calls fit compiled code
compilation.py     compiles a target on all ranks, compares it with eager, and gives up what takes too long
comparison.py      runs a call without side effects, and compares the results of two
deadline.py        looks at the clock while torch compiles
targets.py         what can be compiled, how it is put on the model, and how it is taken off again
side_effects.py    refuses a loss that must not be compiled
installed.py       the compiled code in use, and whether a compiled loss may be captured as a CUDA graph
"""
