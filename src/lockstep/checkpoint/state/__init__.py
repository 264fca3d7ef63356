"""The state of a run, as a checkpoint holds it.

`run_state` captures and restores it, with `model_state` for the model, `optimizer_state` for the optimizers and
`stateful` for all other objects with state. `reshard` chooses which rank writes and reads which tensors. `encoding`
encodes nested state as named tensors and JSON, and `digests` compares state without its values.
"""
