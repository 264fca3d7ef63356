"""The data of a run: which sample is trained when (order, windows, micro-batches, ranks), and how samples are read."""
