"""The data of a run: which sample is trained when, and how samples are read.

sources.py      opens a `BatchSource` over whatever `Task.data` returns
windows.py      divides an epoch into steps, micro-batches and ranks; samplers/ has the order of the samples
map_source.py   the source over a dataset with a length; streams/ has those over iterable datasets
loader.py       reads and collates samples, here or in worker processes (worker_process.py, worker_copies.py)
transfer.py     brings batches to the device
"""
