"""HRM by the names of its own document; the recipe hrm is what is trained.

pretrain_config  PretrainConfig: the keys of `pretrain.py`, and how all ranks get those of rank 0
puzzle_dataset   a rank's batches as a stream
train_loop       create_model, train_batch, evaluate and save_train_state, for a loop of plain PyTorch
pretrain         what `pretrain.py` runs
evaluation       what `evaluate.py` runs
messages         help and errors of these two
"""
