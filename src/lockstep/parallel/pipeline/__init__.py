"""Pipeline parallelism: a model split into stages, one or more on each rank."""
