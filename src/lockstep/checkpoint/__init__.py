"""Checkpoints: tensors and plain state, committed as a whole or not at all, and verified before they are used.

    step-00000040/rank-00000.safetensors ...   one file for each rank that wrote
    step-00000040/manifest.json                the position of each tensor, the size and digest of each file
    latest                                     the name of the newest checkpoint, for people and the launcher

`manager` decides when to save and from what to resume; `resume` finds a checkpoint and loads it. `run_state` captures
and restores the state of a run, with `optimizer_state` for its optimizers; `reshard` chooses which rank writes and
reads which tensors. The other modules do not depend on models: those in `saving` write, `load` and `inspect` read,
`retention` deletes, and all of them go through the protocol `CheckpointStorage` (`storage`), never to the disk itself.
The shard of a tensor that a rank writes is a `LocalShard` in memory and a `Piece` in a file.
"""
