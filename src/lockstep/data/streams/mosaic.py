"""mosaicml's StreamingDataset, read by index: in Lockstep's order, it resumes exactly on any number of ranks.

As a stream it would divide its samples among the ranks itself, and its state would not know which of them were trained.
But it can read any sample by its number, and downloads the shard that holds it.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from lockstep.errors import UserError

DESCRIPTION = "read by index; its own order and division among ranks (shuffle, batch_size) are not used"


class SamplesByIndex(Dataset):
    """A StreamingDataset as a dataset with `__getitem__`. Its own `len` counts the samples of one rank."""

    def __init__(self, streaming: Any):
        self.streaming = streaming

    def __len__(self) -> int:
        return int(self.streaming.size)

    def __getitem__(self, index: int) -> Any:
        return self.streaming[index]


def is_streaming_dataset(data: Any) -> bool:
    """Return whether `data` is mosaicml's, of which nothing is imported here."""
    names = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(data).__mro__]
    return ("streaming", "StreamingDataset") in names


def by_index(data: Any) -> Any:
    """Return a StreamingDataset as a dataset that is read by index, and other data as it is."""
    if not is_streaming_dataset(data):
        return data

    # Streams with a proportion, repeat or choose, and epoch_size, take samples several times or not at all.
    if data.epoch_size != data.size:
        raise UserError(
            f"the StreamingDataset has {data.size} samples and an epoch of {data.epoch_size}",
            "it is read by index, so every sample comes once in an epoch",
            "leave epoch_size, and the proportion, repeat and choose of its streams, out; for a mixture return "
            "lockstep.data.samplers.Mixture([(dataset, weight), ...])",
        )

    return SamplesByIndex(data)
