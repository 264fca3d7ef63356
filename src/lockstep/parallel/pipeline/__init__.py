"""Pipeline parallelism: a model split into stages, one or more on each rank.

build.py makes the stages (stages.py), placement.py puts each on its rank, and pipeline.py runs micro-batches through
them with torch's schedules (schedules.py). auto_split.py is for models without a list of layers.
"""
