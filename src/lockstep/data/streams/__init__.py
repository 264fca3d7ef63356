"""Streams: iterable datasets, which can only be read in order.

epochs.py     what all stream sources share: a step is read whole, and an epoch ends when it has ended on all ranks
strided.py    a stream without a state: every rank keeps every k-th sample, and a resumed run repeats the epoch
resumable.py  a stream with a state, or in virtual shards: the same steps on any number of ranks, and an exact resume
shards.py     virtual shards, and what is done to their samples before these are dealt to ranks
mosaic.py     mosaicml's StreamingDataset, which is read by index and so is no stream here
cursor.py     reads one virtual shard, from its beginning or from a saved state
"""
