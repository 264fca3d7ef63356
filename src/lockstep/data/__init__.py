"""Which sample is trained when: order, windows, micro-batches, ranks; and how samples are read."""
