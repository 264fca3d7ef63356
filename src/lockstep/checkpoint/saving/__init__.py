"""One save, in the order of events.

`saver` starts it, `snapshot` copies, and `save` writes this rank's file into the folder of `draft`, in a thread. On
rank 0, `commit` turns the folder into a checkpoint. `outcome` is how it ended, and `pending` lets all ranks agree.
`space` checks the disk before the first step, and `context` has what all saves of a run share.
"""
