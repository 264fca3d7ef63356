"""One save, in the order of events.

`decision` says when it is due. `snapshot` copies, and `save` writes the file of a rank into the folder of `draft`, in a
thread. On rank 0, `commit` turns the folder into a checkpoint, and deletes old ones. `outcome` is how it ended, and
`pending` lets all ranks agree.
"""
