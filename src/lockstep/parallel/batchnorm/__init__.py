"""Buffers on many ranks: BatchNorm's running statistics are combined, all others are rank 0's; and SyncBatchNorm."""
