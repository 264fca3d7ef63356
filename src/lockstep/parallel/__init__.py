"""Parallelism: everything between a user's model and the gradients of a step.

apply.py puts a model under a Driver (driver.py), on a grid of ranks (mesh.py), in one fixed order of techniques. Each
technique is a package: ddp/, fsdp/, tensor/, pipeline/, exact/, cudagraph/. Modules in this folder serve several of
them: the blocks of a model, replaced layers, recomputation, meta initialisation, and the chain of wrappers around a
module's call.
"""
