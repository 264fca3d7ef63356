"""Automatic pipeline splits: run a model's own forward in stages, without a list of layers from the user.

Used only where the task has no `stages(model)` and the model is no nn.Sequential.

trace.py           the entry: which parameters each block needs, and where a split is possible
forward_stage.py   a stage that runs its part of the model's forward, and the interception of its blocks
"""
