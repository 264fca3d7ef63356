"""Checkpoints: tensors and plain state, committed as a whole or not at all, and verified before they are used.

    step-00000040/rank-00000.safetensors ...   one file for each rank that wrote
    step-00000040/manifest.json                the position of each tensor, the size and digest of each file
    latest                                     the name of the newest checkpoint, for people and the launcher

`manager` is what a run sees of all this. `schedule` says when to save, `resume` finds a checkpoint and loads it, and
`state` captures and restores the state of a run. The other modules do not depend on models: those in `saving` write,
`load` and `inspect` read, `retention` deletes, and all of them go through the protocol `CheckpointStorage` (`storage`),
never to the disk itself. The shard of a tensor that a rank writes is a `LocalShard` in memory and a `Piece` in a file.
"""
