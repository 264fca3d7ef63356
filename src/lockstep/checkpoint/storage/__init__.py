"""Where checkpoints are kept: the folder RUN/checkpoints, the stores for their tensors, and the rules of a commit.

`folder.CheckpointStorage` is that folder: the rest of the package reads, writes, lists, renames and deletes checkpoints
only through it. Their tensors may be elsewhere: `stores` says what a store must do, and how it is found. `checkpoint`
is the handle of one checkpoint, and `rules` says how one is committed, set aside and deleted. With `retry` all ranks
try again, and give up together, if the folder is away. Nothing here imports torch, so that `lockstep ckpt ls` starts
fast.
"""
