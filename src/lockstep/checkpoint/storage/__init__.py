"""Where checkpoints are kept: the folder RUN/checkpoints, the stores for their tensors, commits and deletions.

`folder.CheckpointStorage` is that folder: the rest of the package reads, writes, lists, renames and deletes checkpoints
only through it. Their tensors may be elsewhere: `stores` says what a store must do, and how it is found. `transitions`
commits drafts, sets checkpoints aside and deletes them. `durable` writes files that survive a power cut. With `retry`
all ranks try again, and give up together, if the folder cannot be reached. Nothing here imports torch, so that
`lockstep ckpt ls` starts fast.
"""
