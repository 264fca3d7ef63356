"""mosaicml's StreamingDataset is read by index: every sample once in an epoch, also after a resume."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import lockstep
from lockstep import Loss, Task
from lockstep.data.streams.mosaic import SamplesByIndex, by_index
from lockstep.errors import UserError

SAMPLES = 20


class StreamingDataset(IterableDataset):
    """A stand-in: it has the names of mosaicml's, whose `len` counts the samples of one of two ranks."""

    __module__ = "streaming.base.dataset"

    def __init__(self, epoch_size: int = SAMPLES):
        self.size = SAMPLES
        self.epoch_size = epoch_size

    def __len__(self) -> int:
        return SAMPLES // 2

    def __iter__(self) -> Any:
        raise AssertionError("it is not read as a stream")

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "x": np.full(4, index, np.float32)}

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        raise AssertionError


class Streamed(Task):
    def __init__(self, dataset: Any):
        self.dataset = dataset
        self.trained: Counter[int] = Counter()

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def data(self) -> Any:
        return self.dataset

    def eval_data(self) -> Any:
        return self.dataset

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.trained.update(batch["id"].tolist() if model.training else [])
        return Loss(model(batch["x"]).square().sum(), len(batch["id"]))


def train_in_two_parts(dataset: Any, folder: Path) -> None:
    task = Streamed(dataset)
    settings: dict[str, Any] = {"global_batch": 8, "run_dir": str(folder), "log": {"progress": "off"}}
    settings |= {"checks": {"loss": "off"}, "resume": "auto"}
    lockstep.fit(task, steps=2, **settings)
    done = lockstep.fit(task, epochs=2, **settings)
    assert task.trained == dict.fromkeys(range(SAMPLES), 2)
    assert done.history[-1]["step"] == 6  # three of 8, 8 and 4 samples in an epoch


def test_every_sample_comes_once_in_an_epoch(tmp_path: Path) -> None:
    train_in_two_parts(StreamingDataset(), tmp_path)


def test_an_epoch_of_another_size_is_refused() -> None:
    with pytest.raises(UserError, match=r"has 20 samples and an epoch of 50(.|\n)*Mixture"):
        by_index(StreamingDataset(epoch_size=50))


def test_other_data_stays_as_it_is() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(3))
    assert by_index(data) is data
    assert isinstance(by_index(type("Mine", (StreamingDataset,), {})()), SamplesByIndex)


def test_the_real_one(tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming", exc_type=ImportError)
    with streaming.MDSWriter(out=str(tmp_path / "mds"), columns={"id": "int", "x": "ndarray:float32:4"}) as writer:
        for index in range(SAMPLES):
            writer.write({"id": index, "x": np.full(4, index, np.float32)})

    train_in_two_parts(streaming.StreamingDataset(local=str(tmp_path / "mds"), batch_size=4, shuffle=True), tmp_path)
    train_in_two_parts(streaming.LocalDataset(str(tmp_path / "mds")), tmp_path / "local")
