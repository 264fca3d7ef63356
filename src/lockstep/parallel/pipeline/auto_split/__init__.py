"""Automatic pipeline splits: run a model's own forward in stages, without a list of layers from the user.

This is used only if the task has no `stages(model)` and the model is not an nn.Sequential.

trace.py           finds the parameters that each block needs, and where a split is possible; the entry point
forward_stage.py   a stage that runs its part of the model's forward, and intercepts its blocks
"""
