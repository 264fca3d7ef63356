"""Checkpoints: tensors and plain state, committed as a whole or not at all, and verified before they are used.

`step-N` holds the state after N steps.

    step-00000040/rank-00000.safetensors ...   one file for each rank that wrote
    step-00000040/manifest.json                the position of each tensor, the size and digest of each file
    step-00000040/metrics.json                 the metrics of the step, if it was evaluated
    step-00000050.tmp-TOKEN-NUMBER             a draft: not committed; the next start deletes what a kill leaves
    step-00000060.rewound                      set aside: the run rewound, or went back, to an earlier step
    step-00000060.damaged                      set aside: its bytes have changed
    step-00000070.replaced                     an old checkpoint, while a classic trainer saves its step again
    latest                                     the name of the newest checkpoint, for people and their scripts
    owner                                      the token of the attempt that may commit

Only `lockstep ckpt prune --set-aside` deletes what was set aside. A run *rewinds* while it trains, and *goes back* at a
start (`--resume step-N`); later checkpoints of the same run are set aside as `.rewound` in both cases.

In torch's words (`torch.distributed.checkpoint`), a piece is what a ChunkStorageMetadata describes, the manifest is the
Metadata, and a `Stateful` is a Stateful. `saving.snapshot` does the work of an AsyncStager, `state.reshard` that of the
planners, and `storage` that of a StorageWriter and a StorageReader.

`manager` is the interface to a run. `preflight` checks before the first step that a save can succeed. `state` captures
and restores the state of a run. `saving` says when to save, and writes the state, `loading` finds the newest valid
checkpoint and loads it, and `init_from` starts a run from other weights.

The other modules do not depend on models. `integrity` compares bytes with digests, and `reader` reads tensors.
`metrics` has the results of evaluations, by which `retention` keeps the best. `choose` finds the checkpoint that a path
means, `export` reads its weights for other programs, and `command` is `lockstep ckpt`. `rank_file` lays out and reads
the file of a rank. `manifest` encodes `manifest.json`, and `manifest_reader` reads it. All go through
`storage.CheckpointStorage`, never to the disk itself.
"""
