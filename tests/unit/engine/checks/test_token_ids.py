"""An id that an embedding has no row for: the error names the sample, the id and the size of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset

import lockstep
from lockstep import Loss, Task
from lockstep.errors import UserError

WORDS, SAMPLES, BAD = 10, 24, 17
SETTINGS: dict[str, Any] = {"global_batch": 4, "steps": 12, "log": {"progress": "off"}, "device": "cpu"}


class Stream(IterableDataset):
    def __init__(self, samples: list[Any]):
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class Reader(Task):
    """A language model whose sample 17 has one wrong number."""

    def __init__(self, kind: str, value: int):
        self.kind = kind
        self.value = value

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS))

    def data(self) -> Any:
        tokens = torch.randint(WORDS, (SAMPLES, 6), generator=torch.Generator().manual_seed(0))
        labels = tokens.clone()
        (labels if self.kind == "label" else tokens)[BAD, 2] = self.value
        samples = [{"tokens": a, "labels": b} for a, b in zip(tokens, labels, strict=True)]
        return Stream(samples) if self.kind == "stream" else samples

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, labels = batch["tokens"], batch["labels"]
        if self.kind == "gpu":
            # What a GPU does: the kernel fails without a word about the id.
            if tokens.max() >= WORDS:
                raise RuntimeError("CUDA error: device-side assert triggered")
        elif self.kind == "made":
            tokens = tokens.clamp(max=WORDS - 1) * self.value

        return Loss(F.cross_entropy(model(tokens).mT, labels, reduction="sum"), labels.numel())


SAMPLE = "sample 17 in epoch 0"
CASES = [
    (
        "token",
        12,
        "token id 12 is out of range: 0.weight has 10 rows, from 0 to 9",
        SAMPLE,
        "tokenizer",
    ),
    ("token", -100, "token id -100 is out of range", SAMPLE, "ids below 0 are for labels only"),
    (
        "label",
        11,
        "label 11 is out of range: the loss has 10 classes, from 0 to 9",
        SAMPLE,
        "last layer",
    ),
    ("gpu", 12, "token id 12 is out of range: 0.weight has 10 rows, from 0 to 9", SAMPLE, "tokenizer"),
    ("stream", 12, "token id 12 is out of range", "not known here; IndexError", "tokenizer"),
    ("made", 90, "token id", "one of the samples", "tokenizer"),
]


@pytest.mark.parametrize(("kind", "value", "problem", "found", "fix"), CASES)
def test_the_sample_is_named(tmp_path: Path, kind: str, value: int, problem: str, found: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        lockstep.fit(Reader(kind, value), SETTINGS | {"run_dir": str(tmp_path)})
    assert problem in caught.value.problem
    assert found in caught.value.found
    assert fix in caught.value.fix


def test_labels_that_are_ignored_are_no_mistake(tmp_path: Path) -> None:
    lockstep.fit(Reader("label", -100), SETTINGS | {"run_dir": str(tmp_path)})


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    class Short(Reader):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            return Loss(model(batch["tokens"]).sum() * [1][len(batch)], 1)

    with pytest.raises(IndexError, match="list index out of range"):
        lockstep.fit(Short("token", 1), SETTINGS | {"run_dir": str(tmp_path)})
