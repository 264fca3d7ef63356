"""One save, in the order of events.

`snapshot` copies, and `save` writes the file of a rank into the folder of `draft`, in a thread. On rank 0, `commit`
turns the folder into a checkpoint. `outcome` is how it ended, and `pending` lets all ranks agree. `context` has what
all saves of a run share.
"""
