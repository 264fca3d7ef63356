"""A DataLoader as training data: what is taken, and which settings it replaces."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import lockstep
from lockstep.config import resolve
from lockstep.data.from_loader import take_loader
from lockstep.data.samplers import Sampled
from lockstep.errors import ConfigError, UserError
from lockstep.observe.sinks import read_jsonl

DATA = TensorDataset(torch.arange(20.0)[:, None])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(20))


def own_collate(samples):
    return default_collate(samples)


@pytest.mark.parametrize(
    ("loader", "settings"),
    [
        (DataLoader(DATA, batch_size=4), {"global_batch": 4, "data.shuffle": False}),
        (
            DataLoader(DATA, 4, shuffle=True, drop_last=True, pin_memory=True),
            {"global_batch": 4, "data.shuffle": True, "tail": "drop", "data.pin_memory": True},
        ),
        (
            DataLoader(DATA, 4, num_workers=2, prefetch_factor=3),
            {"global_batch": 4, "data.shuffle": False, "data.workers": 2, "data.prefetch": 3},
        ),
        (
            DataLoader(DATA, 4, sampler=DistributedSampler(DATA, num_replicas=2, rank=0)),
            {"local_batch": 4, "data.shuffle": True},
        ),
        (
            DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 5, drop_last=True)),
            {"global_batch": 5, "data.shuffle": True, "tail": "drop"},
        ),
        (
            DataLoader(DATA, batch_sampler=BatchSampler(DistributedSampler(DATA, num_replicas=2, rank=0), 5, False)),
            {"local_batch": 5, "data.shuffle": True},
        ),
        (DataLoader(Stream(), 4), {"global_batch": 4}),
    ],
)
def test_options_become_settings(loader, settings):
    taken = take_loader(loader, default_collate)
    assert taken.settings == settings
    assert taken.data is loader.dataset
    assert taken.collate is default_collate


def test_a_sampler_and_a_collate_are_taken():
    sampler = WeightedRandomSampler(torch.ones(20), 30)
    taken = take_loader(DataLoader(DATA, 4, sampler=sampler, collate_fn=own_collate), default_collate)
    assert isinstance(taken.data, Sampled)
    assert (taken.data.dataset, taken.data.sampler, taken.collate) == (DATA, sampler, own_collate)
    assert taken.settings == {"global_batch": 4}
    assert taken.banner({"global_batch"}, {"global_batch": 4}) == (
        "taken: the dataset (TensorDataset), the sampler (WeightedRandomSampler), collate_fn, global_batch=4"
    )
    assert taken.banner(set(), {"global_batch": 4}).endswith("collate_fn")


@pytest.mark.parametrize(
    ("options", "config", "dropped"),
    [
        ({}, {"global_batch": 16}, "batch_size=8 (the run has set global_batch=16)"),
        ({}, {"global_batch": None, "local_batch": 8}, "batch_size=8 (the run has set local_batch=8)"),
        (
            {"num_workers": 2, "drop_last": True},
            {"global_batch": 8, "data.workers": 0, "data.prefetch": 2, "tail": "pad"},
            "drop_last=True (the run has set tail=pad), num_workers=2 (the run has set data.workers=0)",
        ),
    ],
)
def test_what_the_run_has_set_otherwise_is_said(options, config, dropped):
    taken = take_loader(DataLoader(DATA, 8, **options), default_collate)
    assert taken.banner({"data.shuffle"}, config).endswith(f"data.shuffle=false; not taken: {dropped}")


def test_two_collates_are_one_too_many():
    with pytest.raises(UserError, match="the DataLoader has a collate_fn, and the run has a collate of its own"):
        take_loader(DataLoader(DATA, 4, collate_fn=own_collate), lambda samples: samples)


def test_settings_of_the_run_are_stronger():
    run = resolve([("command line", {"local_batch": 3, "data": {"shuffle": True}})])
    filled = run.fill_in("DataLoader", {"global_batch": 4, "data.shuffle": False, "data.workers": 2})
    assert (filled.config.global_batch, filled.config.local_batch) == (None, 3)
    assert (filled.config.data.shuffle, filled.config.data.workers) == (True, 2)
    assert filled.sources["data.workers"] == "DataLoader"
    assert filled.sources["data.shuffle"] == "command line"


def test_what_contradicts_the_run_is_refused():
    run = resolve([("command line", {"exact": True})])
    with pytest.raises(ConfigError, match=r"local_batch = 4 \(DataLoader\)"):
        run.fill_in("DataLoader", {"local_batch": 4})


class Fitted(lockstep.Task):
    def __init__(self, loader):
        self.loader = loader
        self.seen = []

    def model(self):
        return torch.nn.Linear(1, 1)

    def data(self):
        return self.loader

    def loss(self, model, batch):
        self.seen.append(batch[0].flatten().int().tolist())
        return lockstep.Loss(model(batch[0]).sum(), len(batch[0]))


def test_a_task_and_a_loop_of_ones_own_train_from_a_loader(tmp_path):
    loader = DataLoader(DATA, batch_size=6, drop_last=True)
    quiet = {"epochs": 1, "log": {"progress": "off"}, "checks": {"loss": "off"}}
    task = Fitted(loader)
    done = lockstep.fit(task, run_dir=tmp_path / "task", **quiet)
    expected = [list(range(0, 6)), list(range(6, 12)), list(range(12, 18))]
    assert task.seen == expected
    facts = next(event for event in read_jsonl(done.run_dir / "events.jsonl") if event["event"] == "start")["facts"]
    assert facts["DataLoader"] == "taken: the dataset (TensorDataset), global_batch=6, data.shuffle=false, tail=drop"

    seen = []
    with lockstep.start(run_dir=tmp_path / "loop", **quiet) as run:
        model = torch.nn.Linear(1, 1)
        model, _ = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(loader):
            for (x,) in step:
                seen.append(x.flatten().int().tolist())
                step.backward(model(x).sum(), weight=len(x))
            step.apply()
    assert seen == expected


def test_a_sampler_of_the_first_samples_is_no_order_of_all():
    taken = take_loader(DataLoader(DATA, 4, sampler=RandomSampler(range(5))), default_collate)
    assert taken.settings == {"global_batch": 4}
    assert isinstance(taken.data, Sampled)
