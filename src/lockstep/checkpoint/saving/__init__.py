"""One save: `snapshot` copies the tensors, `writer` writes and commits them, `saver` does both while training runs."""
