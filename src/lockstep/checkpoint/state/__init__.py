"""The state of a run, as a checkpoint holds it.

`run_state` captures and restores it, with `model_state` for the model and `optimizer_state` for the optimizers.
`contents` collects what one rank writes; `reshard` chooses which rank writes and reads which tensors.
`state_tree` encodes nested state as named tensors and JSON.
"""
