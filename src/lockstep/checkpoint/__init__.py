"""Checkpoints: tensors and plain values, committed as a whole or not at all, and verified before they are used.

    step-00000040/rank-00000.safetensors ...   one file for each rank that wrote
    step-00000040/manifest.json                what is where, with the size and the digest of each file
    latest                                     the name of the newest checkpoint, for people and the launcher

`manager` decides when to save and how to resume; `run_state` knows what the state of a run is, and `reshard` which rank
writes and reads what. The modules below them know nothing about models: `saver` and `writer` write, `load` and
`inspect` read, and all of them reach the disk through the `Store` protocol of `storage`. What one rank writes of a
tensor is a slice in memory and a piece in a file.
"""
