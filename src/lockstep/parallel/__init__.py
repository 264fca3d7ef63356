"""Parallelism: everything between a user's model and the gradients of a step.

apply.py puts a model under a Driver (driver.py), on a grid of ranks (mesh.py), in one fixed order of techniques. Each
technique is a package: ddp/, fsdp/, tensor/, pipeline/, exact/, cudagraph/. Modules in this folder serve several of
them: the loop over micro-batches (micro_batches.py), sums of gradients (gradients.py), the parts of a step, the blocks
of a model, and activation checkpointing.
"""
