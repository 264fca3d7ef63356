"""`lockstep launch PLATFORM`: one job, rendered for the platform that places its nodes, and submitted there.

A platform places and replaces machines. What runs on each machine is the same everywhere: one `lockstep train` with
`--nnodes` and `--join`, the launcher of that node.
"""
