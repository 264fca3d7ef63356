"""Checkpoints: tensors and plain state, committed as a whole or not at all, and verified before they are used.

`step-N` holds the state after N steps. What faces the engine (`manager`, `schedule`, `pending`, `resume`) calls N
`steps_done`; files and their writers call it `step`.

    step-00000040/rank-00000.safetensors ...   one file for each rank that wrote
    step-00000040/manifest.json                the position of each tensor, the size and digest of each file
    step-00000050.tmp-TOKEN-NUMBER             one that is being written; the next start deletes what a kill leaves
    step-00000060.undone                       set aside: the run went back to an earlier step
    step-00000060.damaged                      set aside: its bytes have changed
    latest                                     the name of the newest checkpoint, for people and the launcher
    owner                                      the token of the attempt that may commit
    objects                                    exists if the contents of some files are in an object store

Only `lockstep ckpt prune --set-aside` deletes what was set aside.

`manager` is what a run sees of all this. `schedule` says when to save, `resume` finds a checkpoint and loads it, and
`state` captures and restores the state of a run, except that of the loop, which the engine gives as a `loop_state`;
`initial` starts a run from other weights. The other modules do not depend on models: those in `saving` write, `load`
and `inspect` read, and `retention` deletes. `format` lays out and reads a rank's file; `manifest` encodes
`manifest.json`, and `manifest_reader` reads it. All of them go through the protocol `CheckpointStorage` (`storage`),
never to the disk itself. The shard of a tensor that a rank writes is a `LocalShard` in memory and a `Piece` in a file.
"""
