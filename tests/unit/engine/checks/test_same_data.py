"""A resumed run compares a few samples with those that the saved run has read, and warns of other data."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import lockstep
from lockstep.checkpoint.state.digests import digest
from lockstep.engine.checks import same_data
from lockstep.engine.checks.sample_reading import reading_of
from lockstep.engine.checks.sketches import is_same, sketch

SAMPLES = 40


class Image:
    """An image as PIL has them: an array behind an interface, and an address in its repr."""

    def __init__(self, pixels: np.ndarray):
        self.pixels = pixels

    @property
    def __array_interface__(self) -> Any:
        return self.pixels.__array_interface__

    def __repr__(self) -> str:
        return f"<Image mode=L at 0x{id(self):X}>"


class Unknown:
    __slots__ = ("value",)

    def __repr__(self) -> str:
        return f"<Unknown at 0x{random.getrandbits(40):x}>"


class Rows(Dataset):
    """Samples that a function of index and content makes."""

    def __init__(self, make: Callable[[int, float], Any], content: float = 0.0, length: int = SAMPLES):
        self.make, self.content, self.length = make, content, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.make(index, self.content)


class Rereads(Rows):
    """What is read depends on how often it was read."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return {"x": torch.full((2,), float(self.content + self.reads))}


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([{"x": torch.ones(2)}] * SAMPLES)


class Point(lockstep.Task):
    defaults = {"global_batch": 8, "steps": 3, "log.progress": "off", "checks.loss": "off"}

    def __init__(self, data: Any = None, evaluated: Any = None):
        self.made, self.evaluated = data, evaluated

    def model(self) -> Any:
        return nn.Linear(2, 1)

    def data(self) -> Any:
        return self.made

    def eval_data(self) -> Any:
        return self.evaluated

    def collate(self, samples: Any) -> Any:
        return torch.ones(len(samples), 2)

    def loss(self, model: Any, batch: Any) -> Any:
        return lockstep.Loss((model(batch) ** 2).sum(), len(batch))


def resumed(run: Path, first: Any, then: Any, evaluated: tuple[Any, Any] = (None, None), **values: Any) -> list[str]:
    """Train on one dataset, resume on another, and return the warnings of the second part."""
    lockstep.fit(Point(first, evaluated[0]), run_dir=str(run))
    lockstep.fit(Point(then, evaluated[1]), run_dir=str(run), resume="auto", steps=6, **values)
    records = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [record["reason"] for record in records if record["event"] == "warning"]


def noisy(index: int, content: float) -> Any:
    """A random transform, by all three generators."""
    return content + torch.rand(2) + random.random() + np.random.rand()


KINDS: dict[str, Callable[[int, float], Any]] = {
    "tensors": lambda index, content: (torch.full((2,), index + content), index),
    "arrays": lambda index, content: {"x": np.full(2, index + content), "path": "a"},
    "text": lambda index, content: [f"{index + content}", b"x"],
    "numbers": lambda index, content: index + content,
    "images": lambda index, content: (Image(np.full((2, 2), index + content, dtype=np.float32)), index),
    "random": noisy,
    "unknown objects": lambda index, content: (Unknown(), index + content),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_data_of_the_same_length_is_a_warning(tmp_path: Path, kind: str) -> None:
    make = KINDS[kind]
    assert resumed(tmp_path / "same", Rows(make), Rows(make)) == []
    (warning,) = resumed(tmp_path / "other", Rows(make), Rows(make, 1.0))
    assert warning.startswith("THE TRAINING DATA HAS CHANGED")
    assert "samples 0, 20, 39 differ" in warning
    assert "random_split(" in warning
    assert f"--resume {tmp_path / 'other' / 'checkpoints' / 'step-00000003'}" in warning


def test_one_sample_is_named(tmp_path: Path) -> None:
    (warning,) = resumed(tmp_path, Rows(KINDS["numbers"]), Rows(lambda index, _: 7.0 if index == 39 else float(index)))
    assert "sample 39 differs, of 0, 20, 39 that were compared" in warning


def test_another_seed_changes_no_transform(tmp_path: Path) -> None:
    """The order is fixed here, so that another seed may resume."""
    task = {"data": {"shuffle": False}}
    run = str(tmp_path)
    lockstep.fit(Point(Rows(noisy)), run_dir=run, **task)
    lockstep.fit(Point(Rows(noisy)), run_dir=run, resume="auto", steps=6, seed=5, **task)
    assert "HAS CHANGED" not in (tmp_path / "events.jsonl").read_text()


def test_what_cannot_be_judged_is_not_mentioned(tmp_path: Path) -> None:
    def broken(index: int, content: float) -> Any:
        return float(index)

    assert resumed(tmp_path / "reads", Rereads(broken), Rereads(broken, 5.0)) == []
    assert resumed(tmp_path / "objects", Rows(lambda *_: Unknown()), Rows(lambda *_: Unknown())) == []
    assert resumed(tmp_path / "stream", Stream(), Stream()) == []


def test_no_sample_is_read_for_it_without_the_check(tmp_path: Path) -> None:
    reads = []
    for checks in (True, False):
        data = Rereads(KINDS["numbers"])
        lockstep.fit(Point(data), run_dir=str(tmp_path / str(checks)), checks={"first_batch": checks, "loss": "off"})
        reads.append(data.reads)
    assert reads[0] == reads[1] + 3


def test_an_older_checkpoint_is_resumed_without_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(same_data.DataRecord, "state_dict", lambda self: {})
        lockstep.fit(Point(Rows(KINDS["numbers"])), run_dir=str(tmp_path))
    lockstep.fit(Point(Rows(KINDS["numbers"], 1.0)), run_dir=str(tmp_path), resume="auto", steps=6)
    lockstep.fit(Point(Rows(KINDS["numbers"], 2.0)), run_dir=str(tmp_path), resume="auto", steps=9)
    assert (tmp_path / "events.jsonl").read_text().count("HAS CHANGED") == 1


def test_the_evaluation_data_is_compared_too(tmp_path: Path) -> None:
    data, make = Rows(KINDS["numbers"]), KINDS["numbers"]
    values = {"evaluate": {"at_end": False}}
    found = resumed(tmp_path / "one", data, data, (Rows(make, 0.0, 8), Rows(make, 1.0, 8)), **values)
    assert [text.partition(" since")[0] for text in found] == ["THE EVALUATION DATA HAS CHANGED"]
    sets = {"a": Rows(make), "b": Rows(make, 0.0, 7)}, {"a": Rows(make), "b": Rows(make, 0.0, 6)}
    (warning,) = resumed(tmp_path / "two", data, data, sets, **values)
    assert warning.startswith("THE EVALUATION DATA (b) HAS CHANGED")
    assert "it has 6 samples, and had 7" in warning


def test_worker_processes_and_random_numbers_stay_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for compares in (True, False):
        if not compares:
            monkeypatch.setattr(same_data.DataRecord, "compare", lambda self: None)
        for workers in (0, 1):
            run = str(tmp_path / f"{compares}-{workers}")
            task = Point(Rows(noisy))
            task.collate = torch.utils.data.default_collate
            weights.append(lockstep.fit(task, run_dir=run, data={"workers": workers}).weights["weight"])
    assert all(torch.equal(weights[0], other) for other in weights)


def test_a_digest_is_of_the_contents() -> None:
    pixels = np.arange(4.0)
    assert digest([Image(pixels)]) == digest([Image(pixels.copy())])
    assert digest([Image(pixels)]) != digest([Image(pixels + 1)])
    assert digest((Unknown(), 1)) == digest((Unknown(), 1))
    assert digest((len, lambda: 0)) == digest((len, lambda: 1))
    assert digest("at 0x1f") != digest("at 0x2f")
    assert digest([TensorDataset]) != digest([Dataset])


class Opens(Rows):
    """A dataset that opens something when its first sample is read, in the process that reads it."""

    opened_by: int | None = None

    def __getitem__(self, index: int) -> Any:
        self.opened_by = self.opened_by or os.getpid()
        assert self.opened_by == os.getpid(), "another process has opened it"
        return super().__getitem__(index)


def test_a_run_with_workers_never_reads_in_its_own_process(tmp_path: Path) -> None:
    make, values = KINDS["numbers"], {"data": {"workers": 1}, "evaluate": {"every": 2}}
    first, other = (Opens(make), Opens(make)), (Opens(make, 1.0), Opens(make, 1.0))
    run = str(tmp_path)
    lockstep.fit(Point(*first), run_dir=run, **values)
    lockstep.fit(Point(*other), run_dir=run, resume="auto", steps=6, **values)
    assert [data.opened_by for data in (first[1], other[1])] == [None, None]
    events = (tmp_path / "events.jsonl").read_text()
    assert "THE TRAINING DATA HAS CHANGED" in events
    assert "THE EVALUATION DATA HAS CHANGED" in events


class Flips(Rows):
    """Augmentation with a generator of its own, which nobody seeds. `flips` decides whether a read flips."""

    reads = 0
    flips = staticmethod(lambda reads: False)

    def __getitem__(self, index: int) -> Any:
        sample = torch.arange(4.0) + index
        self.reads += 1
        return sample.flip(0) if self.flips(self.reads) else sample


def test_augmentation_that_is_not_seeded_is_no_change(tmp_path: Path) -> None:
    """The first reads of the resumed run are all flipped, and then some others."""
    then = Flips(lambda *_: None)
    then.flips = lambda reads: reads <= 6 or reads % 7 == 0
    assert resumed(tmp_path, Flips(lambda *_: None), then) == []


def test_other_rounding_is_no_change(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).normal(size=(3, 64, 64)).astype(np.float32)
    rounds = lambda index, content: {
        "x": torch.from_numpy(pixels) * (1 + content * 1e-6),
        "scale": 0.1 + content * 1e-9,
    }
    assert resumed(tmp_path, Rows(rounds), Rows(rounds, 1.0)) == []


def test_the_number_of_threads_does_not_count(tmp_path: Path) -> None:
    threads: list[int] = []
    make = lambda index, content: threads.append(torch.get_num_threads()) or float(index)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with reading_of({"training": Rows(make)}, apart=False) as reading:
            assert reading
            assert reading("training", 0, 1.0)
        assert threads == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_another_folder_is_no_change(tmp_path: Path) -> None:
    def where(index: int, content: float) -> Any:
        folder = Path("/tmp/job7" if content else "/home/me")
        return {"x": index, "path": str(folder / f"{index}.png"), "file": folder / "a"}

    assert resumed(tmp_path, Rows(where), Rows(where, 1.0)) == []


def test_a_registered_dataset_is_left_out(tmp_path: Path) -> None:
    class Curriculum(Rows):
        level = 0

        def __getitem__(self, index: int) -> Any:
            return torch.full((2,), float(self.level))

        def state_dict(self) -> dict[str, Any]:
            return {"level": self.level}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.level = state["level"]

    for steps in (2, 4):
        values = {"global_batch": 8, "steps": steps, "resume": "auto", "checks": {"loss": "off"}}
        with lockstep.start(run_dir=str(tmp_path), **values) as run:
            model = nn.Linear(2, 1)
            model, _ = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
            data = Curriculum(lambda *_: None)
            run.register("curriculum", data)
            for step in run.steps(torch.utils.data.Subset(data, range(SAMPLES))):
                for batch in step:
                    step.backward((model(batch) ** 2).sum(), weight=len(batch))
                step.apply()
                data.level += 1
    assert "HAS CHANGED" not in (tmp_path / "events.jsonl").read_text()


def test_no_sample_is_read_for_it_if_no_checkpoint_follows(tmp_path: Path) -> None:
    reads = []
    for saves in (True, False):
        data = Rereads(KINDS["numbers"])
        minutes = 10.0 if saves else None
        lockstep.fit(Point(data), run_dir=str(tmp_path / str(saves)), checkpoint={"minutes": minutes, "at_end": saves})
        reads.append(data.reads)
    assert reads[0] == reads[1] + 3


def test_slow_samples_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sample takes longer than all may, so the others are not read, and it is not read again."""
    monkeypatch.setattr(same_data, "READ_S", 0.05)
    read: list[int] = []
    counts = []
    compare = same_data.DataRecord.compare

    def slow(index: int, content: float) -> Any:
        read.append(index)
        time.sleep(0.2 if index == 0 else 0.0)
        return index + content

    def counted(record: same_data.DataRecord) -> None:
        read.clear()
        compare(record)
        counts.append(list(read))

    monkeypatch.setattr(same_data.DataRecord, "compare", counted)
    assert resumed(tmp_path, Rows(slow), Rows(slow, 1.0)) == []
    assert counts == [[0], [0]]


def test_a_read_in_another_process_ends_after_its_time() -> None:
    began = time.monotonic()
    with reading_of({"slow": Rows(lambda *_: time.sleep(60))}, apart=True) as reading:
        assert reading
        assert reading("slow", 0, 0.1) is None
        assert reading("slow", 1, 0.1) is None
    assert time.monotonic() - began < 10


def test_a_sketch_tells_samples_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(3, 32, 32, generator=generator)
    tokens = list(range(50_000))
    for one, other in [
        (image, torch.rand(3, 32, 32, generator=generator)),
        (image, image.half()),
        (image, image.flip(-1)),
        (tokens, [*tokens[:-1], 7]),
        ([1, 2], [1.0, 2.0]),
        ("a", "b"),
        ("/data/a", "/data/b"),
        ({"y": 1.0}, {"y": 1.01}),
        (np.array([1.0, np.nan]), np.array([1.0, 2.0])),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j])),
        (torch.empty(0), torch.empty(0, 2)),
        (True, 1),
    ]:
        first = json.loads(json.dumps(sketch(one)))
        assert is_same(first, sketch(one))
        assert not is_same(first, sketch(other))

    began = time.process_time()
    sketch(tokens * 20)
    assert time.process_time() - began < 2.0
