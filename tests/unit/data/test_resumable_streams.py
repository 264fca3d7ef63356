"""Streams in virtual shards: the same steps at any number of ranks and workers, resumed anywhere."""

from __future__ import annotations

import copy
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from data_sources import source_options
from lockstep import Shards, read_jsonl, read_lines, read_tar
from lockstep.config import DataConfig
from lockstep.data.from_loader import is_stateful_stream
from lockstep.data.sources import open_source
from lockstep.data.streams import cursor
from lockstep.data.streams.resumable import ResumableStreamSource
from lockstep.data.streams.strided import StridedStreamSource
from lockstep.errors import UserError
from lockstep.runtime.world import World
from lockstep.task import StepResult

Step = list[tuple[int, Any]]  # (index, data) of the micro-batches of a step that count


def samples_of(batch: list[Any]) -> list[Any]:
    return batch


@dataclass
class Job:
    """The sources of all ranks of a job, in one process."""

    make: Callable[[], Any]  # returns the data
    ranks: int
    workers: int = 0
    resume: str = "state"
    global_batch: int = 8
    late: int = 0  # how many steps late results come, as on a GPU

    def __post_init__(self) -> None:
        self.events: list[str] = []
        self.steps_done = 0
        self.results: list[StepResult | None] = [None] * self.late
        self._sent: dict[int, Any] = {}
        self.sources = [self._open(rank) for rank in range(self.ranks)]

    def _open(self, rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self._sent[rank] = value
            return list(self._sent.values())

        return open_source(
            self.make(),
            samples_of,
            source_options(
                self.global_batch,
                2,
                config=DataConfig(workers=self.workers, resume=self.resume),  # pyrefly: ignore
                world=World(rank, self.ranks),
                gather_states=gather,
                beat=lambda: self.events.append("beat"),
                log_event=lambda event, **fields: self.events.append(f"{event}: {fields['reason']}"),
            ),
        )

    def train(self, steps: int) -> list[Step]:
        trained: list[Step] = []
        for step in range(self.steps_done, self.steps_done + steps):
            taken = [source.take() for source in self.sources]
            micros = [micro for batches in taken for micro in batches if not micro.padding]
            assert all(batches.num_micro_batches >= 1 for batches in taken), "every rank runs a micro-batch"
            trained.append(sorted([(micro.index, micro.data) for micro in micros], key=lambda pair: pair[0]))
            exhausted = all(batches.exhausted for batches in taken)
            self.results.append(StepResult(step, applied=True, weight=1.0, grad_norm=1.0, exhausted=exhausted))
            for source, batches in zip(self.sources, taken, strict=True):
                batches.step = step
                source.commit(batches, self.results[step])
        self.steps_done += steps
        return trained

    def state(self) -> dict[str, Any]:
        """Return what rank 0 would save, after all ranks have sent theirs."""
        return [source.state_dict() for source in self.sources][-1]

    def load(self, state: dict[str, Any]) -> None:
        for source in self.sources:
            source.load_state_dict(copy.deepcopy(state))

    def close(self) -> None:
        """End worker processes: this object is in a reference cycle, so they would live on."""
        for source in self.sources:
            source.close()

    @property
    def epochs(self) -> set[int]:
        return {source.epoch for source in self.sources}


def flat(steps: list[Step]) -> list[Any]:
    return [sample for step in steps for _, samples in step for sample in samples]


FILES = [list(range(100 * file, 100 * file + 5 + file % 3)) for file in range(7)]


def odd(number: int) -> bool:
    return number % 10 != 3


def shards() -> Shards:
    return Shards(FILES, shards=4).filter(odd)


# ---- the same steps everywhere ----


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (3, 0), (5, 0), (2, 2)])
def test_ranks_and_workers_do_not_change_the_steps(ranks: int, workers: int) -> None:
    one = Job(shards, 1)
    expected = one.train(11)
    assert one.epochs == {2}
    assert resumed(shards, [(ranks, workers, 11)]) == expected


def test_an_epoch_has_every_sample_once_and_its_own_order() -> None:
    job = Job(shards, 3)
    expected = sorted(filter(odd, (number for file in FILES for number in file)))
    orders = []
    for epoch in range(3):
        trained = []
        while job.epochs == {epoch}:
            trained += flat(job.train(1))
        assert sorted(trained) == expected
        orders.append(trained)
    assert orders[0] != orders[1] != orders[2]


def test_late_results_cost_one_empty_step_and_no_sample() -> None:
    steps = Job(shards, 2, late=1).train(13)
    assert len([step for step in steps if not step]) == 2  # two epochs have ended
    assert [step for step in steps if step] == Job(shards, 2).train(11)


def test_ids_are_numbers_of_the_samples_in_their_shards() -> None:
    (source,) = Job(lambda: Shards(FILES[:2], shards=2), 1).sources
    assert np.concatenate([micro.ids for micro in source.take()]).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


# ---- resumed ----

ROUTES = [[(1, 0, 3), (3, 0, 2), (2, 1, 6)], [(3, 2, 1), (1, 0, 1), (2, 0, 9)], [(5, 0, 4), (1, 1, 7)]]


def resumed(make: Callable[[], Any], route: list[tuple[int, int, int]], **options: Any) -> list[Step]:
    """Train `route`, a list of (ranks, workers, steps); each part resumes where the one before has ended."""
    state, trained = None, []
    for ranks, workers, steps in route:
        job = Job(make, ranks, workers, **options)
        if state is not None:
            job.load(state)
        trained += job.train(steps)
        state = job.state()
        job.close()
    return trained


@pytest.mark.parametrize("route", ROUTES)
def test_a_resume_with_other_ranks_and_workers_continues_exactly(route: list[tuple[int, int, int]]) -> None:
    assert resumed(shards, route) == Job(shards, 1).train(11)


def test_every_step_can_be_resumed() -> None:
    expected = Job(shards, 1).train(12)
    for cut in range(12):
        assert resumed(shards, [(1 + cut % 3, 0, cut), (3 - cut % 3, 0, 12 - cut)]) == expected, cut


def documents() -> Shards:
    files = [[[file] * length for length in range(1, 9)] for file in range(1, 5)]
    return Shards(files, shards=2).filter(lambda document: len(document) != 3)


@pytest.mark.parametrize("workers", [0, 1])
def test_chunks_keep_their_leftover(workers: int) -> None:
    def make() -> Shards:
        return documents().chunk(5, end=0, pad=9).map(lambda row: row.tolist())

    expected = Job(make, 1, global_batch=4).train(9)
    assert resumed(make, [(2, workers, 1), (1, 0, 1), (3, 0, 1), (1, workers, 6)], global_batch=4) == expected

    # In each shard the documents of its files are joined without a gap.
    (source,) = Job(make, 1, global_batch=4).sources
    rows: list[int] = []
    while source.epoch == 0:
        step = Job.train(_job_of(source), 1)[0]
        rows += [token for _, samples in step for sample in samples for token in sample]
    tokens = sorted(token for token in rows if token not in (0, 9))
    assert tokens == sorted(
        token for file in documents().files for document in file for token in document if len(document) != 3
    )


def _job_of(source: Any) -> Job:
    job = Job(shards, 1)
    job.sources = [source]
    return job


def test_packed_documents_keep_open_rows() -> None:
    def make() -> Shards:
        return documents().pack(10).map(lambda row: [document["input_ids"].tolist() for document in row.documents])

    expected = Job(make, 1, global_batch=2).train(8)
    assert resumed(make, [(2, 0, 2), (1, 1, 1), (1, 0, 5)], global_batch=2) == expected
    documents_seen = [document for row in flat(expected[:6]) for document in row]
    assert documents_seen
    assert all(sum(map(len, row)) <= 10 for row in flat(expected))


# ---- one stream ----


class Counter(IterableDataset):
    """A stream with a state: its position. It draws random numbers, too."""

    def __init__(self, length: int = 21):
        self.length = length
        self.position = 0
        self.starts: list[int] = []  # where iterators began

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.starts.append(self.position)
        for number in range(self.position, self.length):
            self.position = number + 1
            yield number, int(torch.randint(1000, ()))
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Plain(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(21))


def test_a_stream_with_a_state_continues_by_it() -> None:
    expected = Job(Counter, 1).train(7)
    assert [number for number, _ in flat(expected[:3])] == list(range(21))
    assert Job(Counter, 3).train(7) == expected
    assert resumed(Counter, [(1, 0, 2), (3, 0, 2), (2, 2, 3)]) == expected

    counter = Counter()
    job = Job(lambda: counter, 1)
    job.load(Job.state(_trained(Counter, 1)))
    job.train(1)
    assert counter.starts == [8], "nothing is read again"


def _trained(make: Callable[[], Any], steps: int) -> Job:
    job = Job(make, 1)
    job.train(steps)
    return job


def test_a_stream_without_a_state_is_read_again_if_asked() -> None:
    expected = Job(Plain, 1, resume="reread").train(5)
    assert flat(expected[:3]) == list(range(21))
    assert resumed(Plain, [(1, 0, 2), (3, 0, 3)], resume="reread") == expected

    job = Job(Plain, 1, resume="reread")
    job.load(_trained_again(2).state())
    job.train(1)
    assert [event for event in job.events if "16 samples in 0." in event], job.events


def _trained_again(steps: int) -> Job:
    job = Job(Plain, 1, resume="reread")
    job.train(steps)
    return job


def test_a_stream_without_a_state_stays_as_it_was() -> None:
    (source,) = Job(Plain, 1).sources
    assert isinstance(source, StridedStreamSource)
    with pytest.raises(UserError, match="this stream cannot continue there"):
        source.load_state_dict(_trained_again(1).state())


# ---- files ----


def test_files_of_lines_json_and_tar(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n\n{"x": 2}\n')
    write_tar(tmp_path / "a.tar", [0, 1])
    assert list(Shards([tmp_path / "a.txt"] * 2, read_lines)) == ["one", "two"] * 2
    assert list(Shards([tmp_path / "a.jsonl"], read_jsonl)) == [{"x": 1}, {"x": 2}]
    assert list(Shards([tmp_path / "a.tar"], read_tar))[1] == {"__key__": "in/1", "json": b"1", "seg.txt": b"one"}


def write_tar(path: Path, numbers: list[int]) -> None:
    with tarfile.open(path, "w") as archive:
        for number in numbers:
            for extension, content in (("json", json.dumps(number)), ("seg.txt", "one")):
                info = tarfile.TarInfo(f"in/{number}.{extension}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content.encode()))


# ---- libraries ----

ROUTE = [(1, 0, 2), (3, 0, 2), (2, 1, 4)]


@pytest.mark.long
def test_datasets_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")

    def whole() -> Any:
        table = datasets.Dataset.from_dict({"number": list(range(50))})
        return table.to_iterable_dataset(num_shards=4).map(lambda row: {"number": row["number"] + 0})

    def in_shards() -> Shards:
        dataset = whole()
        return Shards([dataset.shard(4, index) for index in range(4)], shards=4)

    for make in (whole, in_shards):
        expected = Job(make, 1).train(8)
        assert sorted(row["number"] for row in flat(expected[:7])) == list(range(50))
        assert resumed(make, ROUTE) == expected

    # Its state does not hold what a shuffle buffer holds.
    def shuffled() -> Any:
        return whole().shuffle(seed=1, buffer_size=10)

    for make in (shuffled, lambda: datasets.interleave_datasets([whole(), shuffled()])):
        with pytest.raises(UserError, match="shuffles in a buffer"):
            Job(make, 1).train(1)
    expected = Job(shuffled, 1, resume="reread").train(8)
    assert sorted(row["number"] for row in flat(expected[:7])) == list(range(50))
    assert resumed(shuffled, ROUTE, resume="reread") == expected


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_the_loader_of_torchdata() -> None:
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def make() -> Any:
        return loader(list(range(30)), batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(3))

    expected = Job(make, 1).train(4)
    assert sorted(flat(expected)) == list(range(30))
    assert resumed(make, [(1, 0, 2), (3, 0, 2)]) == expected
    assert is_stateful_stream(make())
    assert not is_stateful_stream(loader(list(range(30)), batch_size=2))


def test_webdataset(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    paths = [str(tmp_path / f"{number}.tar") for number in range(4)]
    for number, path in enumerate(paths):
        write_tar(Path(path), list(range(10 * number, 10 * number + 7)))

    def read(path: str) -> Any:
        return webdataset.WebDataset(path, shardshuffle=False, nodesplitter=None, workersplitter=None).decode()

    def make(read: Callable[[str], Any]) -> Shards:
        return Shards(paths, read, shards=2).map(lambda sample: int(sample["json"]))

    expected = Job(partial(make, read), 1).train(6)
    assert resumed(partial(make, read), [(1, 0, 1), (3, 1, 2), (2, 0, 3)]) == expected
    assert Job(partial(make, read_tar), 1).train(6) == expected


# ---- refused ----


def test_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 files cannot be dealt to 3 virtual shards"):
        Shards(FILES[:2], shards=3)
    with pytest.raises(UserError, match="global_batch=8 cannot be divided among 3 virtual shards"):
        Job(lambda: Shards(FILES, shards=3), 1)
    with pytest.raises(UserError, match="can be packed once"):
        documents().chunk(4).pack(4)
    with pytest.raises(UserError, match="the stream has no sample in epoch 0"):
        Job(lambda: Shards([[], []], shards=2), 1).train(1)

    state = _trained_again(1).state()
    with pytest.raises(UserError, match="the stream has 4 shards, and had 1"):
        Job(shards, 1).load(state)
    shorter = Job(lambda: Shards([list(range(4))]), 1)
    shorter.load(state)
    with pytest.raises(UserError, match="has fewer samples than when its position was saved"):
        shorter.train(1)


def test_the_banner_names_the_kind_of_resume() -> None:
    (source,) = Job(shards, 1, workers=2).sources
    assert isinstance(source, ResumableStreamSource)
    assert source.banner == "a stream in 4 virtual shards; a resumed run continues exactly"
    assert "there are 6 readers" in (Job(shards, 3, workers=2).sources[0].banner or "")
    assert "read again" in (Job(Plain, 1, resume="reread").sources[0].banner or "")


# ---- states and errors that surprise ----


class Live(Counter):
    """A stream whose state is the object that its next sample changes."""

    def __init__(self) -> None:
        self.state = {"position": 0}

    def __iter__(self) -> Iterator[Any]:
        while self.state["position"] < 21:
            self.state["position"] += 1
            yield self.state["position"]
        self.state["position"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_state_that_the_next_sample_changes() -> None:
    assert resumed(Live, [(1, 0, 1), (2, 0, 1), (1, 0, 3)]) == Job(Live, 1).train(5)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_of_torchdata_over_several_epochs() -> None:
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def make() -> Any:
        return loader(list(range(18)), batch_size=None, shuffle=True, generator=torch.Generator().manual_seed(3))

    # Every epoch has an order of its own, and a resume at its end or in its last, small step finds it again.
    expected = Job(make, 1).train(7)
    first, second = flat(expected[:3]), flat(expected[3:6])
    assert sorted(first) == sorted(second) == list(range(18))
    assert first != second
    for cut in (2, 3, 4):
        assert resumed(make, [(1, 0, cut), (2, 0, 7 - cut)]) == expected, cut

    with pytest.raises(UserError, match="would nest worker processes"):
        Job(lambda: loader(list(range(18)), batch_size=None, num_workers=1), 1, workers=1)


def test_a_state_that_needs_arguments_is_refused() -> None:
    class Told(Counter):
        def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:  # pyrefly: ignore
            return {"position": num_samples}

    with pytest.raises(UserError, match=r"state_dict\(\) of Told cannot be called without arguments"):
        Job(Told, 1).train(1)


def test_errors_name_the_file_and_the_sample(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": \n')

    def stream() -> Shards:
        return Shards([tmp_path / "a.jsonl"], read_jsonl)

    with pytest.raises(json.JSONDecodeError) as broken:
        Job(stream, 1).train(1)
    assert f"sample 1 of the file {tmp_path / 'a.jsonl'}, counted from 0, in epoch 0" in broken.value.__notes__[0]
    with pytest.raises(KeyError) as missing:
        Job(lambda: stream().map(lambda sample: sample["y"]), 1).train(1)
    assert f"sample 0 of the file {tmp_path / 'a.jsonl'}" in missing.value.__notes__[0]
    with pytest.raises(UserError, match=r"(?s)chunk\(\) needs token lists.*sample 0 of the file"):
        Job(lambda: stream().map(str).chunk(4), 1).train(1)
    with pytest.raises(TypeError) as nothing:
        Job(lambda: Shards([tmp_path / "a.jsonl"], lambda path: None), 1).train(1)  # pyrefly: ignore
    assert str(tmp_path) in nothing.value.__notes__[0]


def test_files_in_another_order_are_refused(tmp_path: Path) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        for name in "ab":
            (tmp_path / folder / name).write_text("\n".join(map(str, range(20))))

    def files(folder: str, names: str) -> Shards:
        return Shards([tmp_path / folder / name for name in names], read_lines, shards=2)

    before = Job(lambda: files("here", "ab"), 1)
    before.train(1)
    Job(lambda: files("there", "ab"), 1).load(before.state())
    with pytest.raises(UserError, match="other names, or another order"):
        Job(lambda: files("here", "ba"), 1).load(before.state())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Shards("corpus.jsonl", read_jsonl),
        lambda: Shards(path for path in ["a"]),  # pyrefly: ignore
        lambda: Job(lambda: Shards([Counter()] * 2, shards=2), 1),
        lambda: documents().chunk(0),
        lambda: documents().pack(0),
        lambda: Job(lambda: Shards([[[0.5, 1.5]]]).chunk(2), 1).train(1),
    ],
)
def test_arguments_that_would_train_on_something_else(make: Callable[[], Any]) -> None:
    with pytest.raises(UserError):
        make()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_long_reread_beats(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Worker processes are forked, so they have this clock, too: two samples take more than a second.
    clock = iter(range(10**6))
    monkeypatch.setattr(cursor.time, "perf_counter", lambda: 0.3 * next(clock))
    job = Job(Plain, 1, workers, resume="reread")
    job.load(_trained_again(2).state())
    assert flat(job.train(1)) == [16, 17, 18, 19, 20]
    job.close()
    assert job.events.count("beat") >= 4
    assert any(f"{16 * max(1, workers)} samples" in event for event in job.events), job.events
