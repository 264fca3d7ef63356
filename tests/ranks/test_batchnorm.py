"""BatchNorm: the running statistics of many ranks are those of one process, and of plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from lockstep.data.samplers import make_sampler
from lockstep.data.windows import next_window
from lockstep.engine import loop
from lockstep.engine.checks.model import refuse_single_samples
from lockstep.engine.own_loop import OwnRun
from lockstep.parallel.batchnorm.sync import is_synchronised, synchronise_batchnorm
from lockstep.plan.plan import make_plan
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import assert_user_errors, configured, fit, open_watched
from zoo import SLOW_TO_IMPORT

# 22 samples: the last step of an epoch has three micro-batches of 2, so that of three or more ranks some run padding.
SAMPLES, STEPS = 22, 5
VALUES = {"global_batch": 8, "micro_batch": 2, "steps": STEPS, "evaluate.batch": 4}


def resnet() -> nn.Module:
    """timm's, with an output of 2 x 2: of two single values a variance may be all rounding."""
    from timm.models.resnet import BasicBlock, ResNet

    sizes = {"channels": (4, 4, 8, 8), "stem_width": 4, "output_stride": 8}
    return ResNet(BasicBlock, (1, 1, 1, 1), num_classes=3, **sizes)


def mobilenet() -> nn.Module:
    """Only its classifier learns, the rest takes statistics: with momentum 0.003, in one layer the mean of all."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    model = MobileNetV2ForImageClassification(
        MobileNetV2Config(depth_multiplier=0.1, num_labels=3, classifier_dropout_prob=0)
    )
    next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d)).momentum = None
    model.mobilenet_v2.requires_grad_(False)
    return model


class Pictures(Task):
    def __init__(self, network: Any):
        self.network = network

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return self.network().double()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)

    def data(self) -> Any:
        g = torch.Generator().manual_seed(1)
        size = 32 if self.network is mobilenet else 16
        return TensorDataset(
            torch.randn(SAMPLES, 3, size, size, generator=g, dtype=torch.float64) * 2 + 1,
            torch.randint(3, (SAMPLES,), generator=g),
        )

    def eval_data(self) -> Any:
        return self.data()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        found = model(x)
        logits = found if isinstance(found, Tensor) else found.logits
        return Loss(F.cross_entropy(logits, y, reduction="sum"), len(y))


@pytest.fixture(scope="module", autouse=True)
def public_models(pool: Pool) -> None:
    pool.preload(*SLOW_TO_IMPORT)


def trained(world: World, store: Any, network: Any, values: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    """A job: the buffers that a run saves, and the loss that it evaluates with them."""
    with open_watched(world, store, VALUES | values) as builder:
        loop.fit(Pictures(network), builder)
        assert builder.run is not None
        assert builder.run.evaluations.newest is not None
        return {
            name: b.cpu().clone() for name, b in builder.run.driver.model.named_buffers()
        }, builder.run.evaluations.newest.loss


def by_hand(
    network: Any, micro_batch: int = VALUES["micro_batch"], tail: str = "short"
) -> tuple[dict[str, Tensor], float]:
    """Plain PyTorch: micro-batch after micro-batch, in one process."""
    task = Pictures(network)
    model, data = task.model(), task.data()
    sampler = make_sampler(SAMPLES, seed=0)
    optimizer, position = task.optimizer(model), 0
    for _ in range(STEPS):
        window = next_window(position, SAMPLES, VALUES["global_batch"], tail)
        ids = torch.from_numpy(sampler.ids(window.epoch, window.start, window.stop))
        for piece in ids.split(micro_batch):
            task.loss(model, data[piece]).total.div(window.size).backward()
        optimizer.step()
        optimizer.zero_grad()
        position = window.epoch * SAMPLES + window.stop
    with torch.no_grad():
        loss = task.loss(model.eval(), data[:])
    return dict(model.named_buffers()), float(loss.total) / SAMPLES


WAYS = [
    (resnet, 3, {}),
    (resnet, 3, {"strategy": "fsdp"}),
    (resnet, 2, {"strategy": "zero1", "ddp.broadcast_buffers": True, "evaluate.every": 2}),
    (mobilenet, 2, {"ddp.find_unused_parameters": True, "evaluate.every": 2}),
]


@pytest.mark.parametrize(("network", "ranks", "values"), WAYS)
def test_many_ranks_have_the_running_statistics_of_plain_pytorch(
    pool: Pool, network: Any, ranks: int, values: dict[str, Any]
) -> None:
    expected, expected_loss = by_hand(network)
    for buffers, loss in [*pool.run(trained, network, values, world=ranks)]:
        assert buffers.keys() == expected.keys()
        for name, buffer in buffers.items():
            torch.testing.assert_close(buffer, expected[name], rtol=1e-12, atol=1e-12)
        assert loss == pytest.approx(expected_loss, abs=1e-12)


def test_a_resumed_run_continues_with_the_combined_statistics(pool: Pool, tmp_path: Path) -> None:
    """Three steps on three ranks and the rest on two: what was loaded counts, not what a rank saw before."""
    values = {"run_dir": str(tmp_path / "run"), "checkpoint.at_end": True}
    pool.run(trained, resnet, values | {"steps": 3, "lr.schedule": "constant"}, world=3)
    expected, _ = by_hand(resnet)
    resumed = values | {"resume": "auto", "lr.schedule": "constant"}
    for buffers, _ in pool.run(trained, resnet, resumed, world=2):
        torch.testing.assert_close(buffers, expected, rtol=1e-12, atol=1e-12)


class Twice(nn.Module):
    """A layer that runs twice for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(x).tanh())


class Layers(Task):
    """A plain sequence, which a pipeline can split."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(5, 4), Twice(), nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        ).double()

    def data(self) -> Any:
        return TensorDataset(torch.randn(22, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch[0]).square().sum(), len(batch[0]))


def statistics(world: World, store: Any, values: dict[str, Any]) -> dict[str, Tensor]:
    """A job: the buffers of the layers that this rank holds."""
    with open_watched(world, store, VALUES | values) as builder:
        loop.fit(Layers(), builder)
        assert builder.run is not None
        driver = builder.run.driver
        elsewhere = driver.role.holders.held_elsewhere
        return {n: b.clone() for n, b in driver.model.named_buffers() if n not in elsewhere}


def test_stages_of_a_pipeline_combine_theirs_with_their_replicas(pool: Pool) -> None:
    (one,) = pool.run(statistics, {}, world=1)
    held = pool.run(statistics, {"mesh.pp": 2}, world=4)
    for buffers in held:
        for name, buffer in buffers.items():
            torch.testing.assert_close(buffer, one[name], rtol=1e-11, atol=1e-11)
    assert {name for buffers in held for name in buffers} == set(one)


class Heads(nn.Module):
    """Two heads, of which a step trains one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
        self.heads = nn.ModuleList([nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)) for _ in range(2)])

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.heads[number](self.body(x))


def train_heads(world: World, store: Any, switches: bool) -> dict[str, Tensor]:
    """A job: heads in turn. With `switches` the body of the loop leaves the model in eval mode, as loops often do."""
    values = VALUES | {"ddp.find_unused_parameters": True}
    with open_watched(world, store, values) as builder:
        own = OwnRun(builder)
        torch.manual_seed(0)
        plain = Heads().double()
        model, _ = own.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        for step in own.steps(Layers().data()):
            for (x,) in step:
                plain.train()
                step.backward(model(x, step.index % 2).square().sum(), weight=len(x))
                plain.train(not switches)
            step.apply()
        own.close()
        return {name: buffer.clone() for name, buffer in plain.named_buffers()}


@pytest.mark.parametrize("switches", [False, True])
def test_layers_that_only_some_steps_run(pool: Pool, switches: bool) -> None:
    (one,) = pool.run(train_heads, False, world=1)
    for buffers in pool.run(train_heads, switches, world=3):
        torch.testing.assert_close(buffers, one, rtol=1e-12, atol=1e-12)


# ---- SyncBatchNorm --------------------------------------------------------------------------------------


def plain_over_the_whole_batch() -> tuple[dict[str, Tensor], float]:
    """Plain BatchNorm in one process over whole batches, which ddp.sync_batchnorm=true must equal."""
    return by_hand(resnet, micro_batch=VALUES["global_batch"], tail="drop")


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_sync_batchnorm_on_a_cpu_is_batchnorm_over_the_whole_batch(pool: Pool, strategy: str) -> None:
    expected, expected_loss = plain_over_the_whole_batch()
    values = {"strategy": strategy, "ddp.sync_batchnorm": True, "micro_batch": 4, "tail": "drop", "device": "cpu"}
    for buffers, loss in pool.run(trained, resnet, values, world=2):
        torch.testing.assert_close(buffers, expected, rtol=1e-12, atol=1e-12)
        assert loss == pytest.approx(expected_loss, abs=1e-12)


def normalised(world: World, store: Any, x: Tensor, upward: Tensor, layer: nn.Module) -> list[Tensor]:
    """A job: output, gradients and statistics of a SyncBatchNorm that gets an uneven part of `x`."""
    with open_watched(world, store, {"device": "cpu"}) as builder:
        holder = nn.Sequential(layer)
        synchronise_batchnorm(holder, builder.runtime)
        assert is_synchronised(layer)
        mine = slice(0, 5) if world.rank == 0 else slice(5, None)
        part = x[mine].clone().requires_grad_()
        output = holder(part)
        output.backward(upward[mine])
        builder.runtime.collectives.final_barrier()
        grads = [p.grad for p in layer.parameters()]
        return [output.detach(), part.grad, *grads, *(b.clone() for b in layer.buffers())]


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False, "track_running_stats": False}])
def test_sync_batchnorm_of_uneven_parts(pool: Pool, options: dict[str, Any]) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, 2, generator=g, dtype=torch.float64) * 3 + 100  # far from 0: plain squares would lose it
    upward = torch.randn(7, 3, 2, generator=g, dtype=torch.float64)
    layer = nn.BatchNorm1d(3, **options).double()
    first, second = pool.run(normalised, x, upward, layer, world=2)
    whole = x.clone().requires_grad_()
    output = layer(whole)
    output.backward(upward)
    affine = len(list(layer.parameters()))
    expected = [output.detach(), whole.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]
    found = [torch.cat(pair) for pair in zip(first[:2], second[:2], strict=True)]
    found += [a + b for a, b in zip(first[2 : 2 + affine], second[2 : 2 + affine], strict=True)] + first[2 + affine :]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def converted() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(resnet())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_that_was_converted_by_its_author(pool: Pool, strategy: str) -> None:
    expected, expected_loss = plain_over_the_whole_batch()
    values = {"strategy": strategy, "micro_batch": 4, "tail": "drop", "device": "cpu"}
    for buffers, loss in pool.run(trained, converted, values, world=2):
        torch.testing.assert_close(buffers, expected, rtol=1e-12, atol=1e-12)
        assert loss == pytest.approx(expected_loss, abs=1e-12)


class Rows(IterableDataset):
    """13 rows: of two ranks, the first gets one micro-batch of 2 more than the second."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(13, 5, generator=torch.Generator().manual_seed(0)))


class Streamed(Task):
    def __init__(self, norm: type[nn.Module]):
        self.norm = norm

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), self.norm(4), nn.Linear(4, 1))

    def data(self) -> Any:
        return Rows()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch).square().sum(), len(batch))


@pytest.mark.parametrize(("norm", "values"), [(nn.BatchNorm1d, {"ddp.sync_batchnorm": True}), (nn.SyncBatchNorm, {})])
def test_a_stream_that_ends_earlier_on_one_rank_does_not_hang(pool: Pool, norm: Any, values: dict[str, Any]) -> None:
    """The second step has two micro-batches on rank 0, and one on rank 1: its forward must run twice there, too."""
    values = {"global_batch": 8, "micro_batch": 2, "steps": 5, "device": "cpu"} | values
    traces = pool.run(fit, Streamed(norm), values, world=2, limit=timedelta(minutes=1))
    for notes in zip(*(trace.steps for trace in traces), strict=True):
        assert {len(note.pieces) for note in notes} == {2}
        assert all(note.result.applied for note in notes)
    assert [piece.padding for piece in traces[1].steps[1].pieces] == [False, True]
    assert [note.result.weight for note in traces[0].steps] == [8, 5, 8, 5, 8]


def test_a_graph_of_a_sync_batchnorm_is_refused(pool: Pool) -> None:
    values = {"global_batch": 8, "micro_batch": 2, "steps": 5, "device": "cpu", "graph": True}
    errors = pool.errors(fit, Streamed(nn.SyncBatchNorm), values, world=2)
    assert_user_errors(errors, "graph=true cannot be used with SyncBatchNorm", "set graph=auto")


class NormAct(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Small(Task):
    """Rows of five numbers, one value per sample and channel."""

    def __init__(self, norm: nn.Module, samples: int = 12):
        self.norm, self.samples = norm, samples

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), self.norm, nn.Linear(4, 1))

    def data(self) -> Any:
        return TensorDataset(torch.randn(self.samples, 5, generator=torch.Generator().manual_seed(0)))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch[0]).square().sum(), len(batch[0]))


class SharedNorm(Layers):
    def model(self) -> nn.Module:
        norm = nn.BatchNorm1d(4)
        return nn.Sequential(nn.Linear(5, 4), norm, nn.Linear(4, 4), nn.Linear(4, 4), norm, nn.Linear(4, 1)).double()


class InstanceStatistics(Layers):
    def model(self) -> nn.Module:
        norm = nn.InstanceNorm1d(4, track_running_stats=True)
        return nn.Sequential(nn.Linear(5, 4), nn.Unflatten(1, (4, 1)), norm, nn.Flatten(), nn.Linear(4, 1)).double()


def test_statistics_that_cannot_be_combined_are_refused(pool: Pool) -> None:
    errors = pool.errors(fit, SharedNorm(), VALUES | {"mesh.pp": 2}, world=2)
    assert_user_errors(errors, "'1' is a BatchNorm1d that 2 stages", "a separate BatchNorm")
    errors = pool.errors(fit, InstanceStatistics(), VALUES, world=2)
    assert_user_errors(errors, "'2' (InstanceNorm1d) has track_running_stats=True", "leave")


def test_sync_batchnorm_does_not_replace_a_forward_that_does_more(pool: Pool) -> None:
    values = {"global_batch": 8, "steps": 1, "ddp.sync_batchnorm": True, "tail": "drop"}
    assert_user_errors(pool.errors(fit, Small(NormAct(4)), values, world=2), "NormAct has its own forward")


def test_a_pipeline_has_no_sync_batchnorm(pool: Pool) -> None:
    values = {"global_batch": 8, "micro_batch": 2, "steps": 1, "strategy": "pp"}
    errors = pool.errors(fit, Small(nn.SyncBatchNorm(4)), values, world=2)
    assert_user_errors(errors, "'1' is a SyncBatchNorm, which cannot be used in a pipeline")


# ---- one sample -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "values", "words"),
    [
        (13, {"global_batch": 6, "steps": 3}, ("every epoch", "set tail=drop")),
        (12, {"global_batch": 5, "micro_batch": 2, "steps": 2}, ("every step", "set micro_batch=3")),
        (12, {"global_batch": 4, "micro_batch": 1, "steps": 1}, ("every micro-batch", "set micro_batch=2")),
    ],
)
def test_one_sample_alone_is_refused_before_the_first_update(
    pool: Pool, samples: int, values: dict[str, Any], words: tuple[str, ...]
) -> None:
    errors = pool.errors(fit, Small(nn.BatchNorm1d(4), samples), values, world=1)
    assert_user_errors(errors, "'1' is a BatchNorm1d", "no variance", *words)


def test_one_sample_is_enough_for_several_values() -> None:
    """A picture has many values per channel, and a run that ends before the single sample comes never sees it."""
    plan = make_plan(configured({"global_batch": 6, "steps": 2}).config, data_size=1, samples=13)
    model = nn.Sequential(nn.BatchNorm1d(3))
    refuse_single_samples(model, plan, "short")
    assert not model[0]._forward_pre_hooks, "the run ends before the short step"
    refuse_single_samples(model, replace(plan, steps=3), "short")
    model(torch.randn(2, 3, 4))
    assert not model[0]._forward_pre_hooks, "one look is enough"
