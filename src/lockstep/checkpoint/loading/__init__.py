"""Loading a checkpoint: `search` finds the newest valid one, `resume` restores a run from it.

`rewind` takes a run back to its last checkpoint while it trains.
"""
