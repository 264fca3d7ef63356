"""BatchNorm on many ranks: running statistics that are combined, and statistics of the whole batch."""
