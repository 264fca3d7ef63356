"""Optimizers, learning-rate schedules and gradient clipping.

optimizers.py   the update at the end of a step: one factor, clipping, and the steps of the user's optimizers
capabilities.py what an optimizer can do, from the table of classes in registry.py; unknown/ is for all others
schedule.py     learning rates by the settings; schedulers/ is for the user's torch schedulers
zero1.py, bf16_masters.py, weight_average.py    sharded state, float32 masters, the moving average of the weights
"""
