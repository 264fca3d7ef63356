"""CUDA graphs: capture a launch-bound model's forward and backward once and replay them.

torch has two ways of its own, which were compared on four models on an H200 (docs/LOG.md, "2026-11-16: CUDA graphs,
ours against torch's own (H200)"). Either reached 90 % of the gain of these captures on one model only:

torch.compile(mode="reduce-overhead")    62, 79 and 103 %, after half a minute of compiling where a capture takes a
                                         second; it cannot trace the recurrent model
torch.cuda.make_graphed_callables        46, 75 and 99 %, with wrong gradients over several micro-batches as we drove
                                         it; an error on the fourth model

graphs.py    decides for each variant of a call (shapes, modes, arguments) whether to capture, and when to replay
variants.py  one variant of a call, its first calls timed, and the attributes of modules that distinguish variants
checks.py    runs a call as a test before its capture, and compares a replay with an eager call after it
capture.py   one captured forward with its backwards, as a differentiable function
device.py    stream capture and timing on a GPU
"""
