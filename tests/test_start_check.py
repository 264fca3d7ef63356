"""The check before the first step: it names people's mistakes, raises no false alarm, and leaves no trace."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

import lockstep
from lockstep.causes import CAUSES
from lockstep.config import KEYS, resolve
from lockstep.config.value_types import LossTrait
from lockstep.errors import UserError
from lockstep.recipes import char_lm, latent_wire, pixel_llm
from lockstep.start_check.check import MAX_SAMPLES, MIN_SAMPLES, NEVER_ACCEPTED
from lockstep.start_check.mistakes import Measurement, Tolerance, judge_halves
from lockstep.start_check.random_numbers import ConstantDraws
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import fit
from zoo import borrowed, broken, healthy, public
from zoo.base import Reader, Sentences, Sound, token_losses

QUIET = {"log": {"progress": "off"}, "checkpoint": {"at_end": False, "minutes": None}}
SMALL = {"global_batch": 8, "steps": 1, "checks.loss": "all"}

# One call on one process shows these.
ALONE = [
    broken.MeanOfMeans,
    broken.MeanForSum,
    broken.SamplesForTokens,
    broken.PaddedWeight,
    broken.WeightOne,
    broken.PenaltyPerMicroBatch,
    broken.InBatchNegatives,
    broken.HardExamples,
    broken.MixUp,
    broken.Standardised,
    broken.ConstantTotal,
    broken.BackwardInLoss,
    broken.WarmUpByCounting,
    broken.NumpyNoise,
    broken.MasksOfItsOwn,
    broken.BufferByHand,
    broken.SpectralNorm,
    broken.AverageInForward,
    broken.MomentumPerMicroBatch,
    broken.TeacherPerMicroBatch,
    broken.AveragePerMicroBatch,
    broken.CarriedMemory,
    broken.Unseeded,
]

# As people also write them. Not for verify, which finds the same by the same check.
MORE = {
    broken.MeanBesideSentences: "loss-weight",
    broken.HardestKept: "batch-coupled",
    broken.BalancedExperts: "batch-coupled",
    broken.SeedsInLoss: "randomness",
    broken.CoolsDown: "carried-state",
    broken.OlderSpectralNorm: "changed-in-forward",
}

# These show on two ranks. A sample that every rank reads alike, and differently from the others, is other data to it.
ON_TWO = {
    broken.FirstRankRegularises: "rank-in-loss",
    broken.DividedByRanks: "rank-in-loss",
    broken.DropoutByRank: "rank-in-loss",
    broken.OwnSampler: "data",
    broken.ShuffledByRank: "data",
    broken.UnevenByRank: "data",
    broken.AugmentedByProcess: "data",
}


def train(task: Task, tmp_path: Any, **values: Any) -> Any:
    return lockstep.fit(task, QUIET, run_dir=str(tmp_path / "run"), **({"steps": 1} | values))


def notes(result: Any) -> list[str]:
    lines = (result.run_dir / "events.jsonl").read_text().splitlines()
    return [line for line in lines if "not checked" in line or "looks like a mean" in line]


# ---- traps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [*ALONE, *MORE], ids=lambda task: task.__name__)
def test_a_mistake_is_named_before_the_first_step(task: type[Sound], tmp_path: Any) -> None:
    cause = CAUSES[MORE.get(task) or broken.FOUND[task]]
    with pytest.raises(UserError) as error:
        train(task(), tmp_path)
    assert error.value.problem == cause.title
    assert error.value.found
    meant = "" if cause.key in NEVER_ACCEPTED else f". If you mean it, set checks.loss={cause.key}"
    assert error.value.fix == f"{cause.fix}{meant}"
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not (tmp_path / "run" / "metrics.jsonl").read_text()

    # What the message says to type is what it takes.
    if meant:
        train(task(), tmp_path / "meant", checks={"loss": cause.key})


def test_enough_traps() -> None:
    assert len(ALONE) + len(MORE) + len(ON_TWO) >= 15
    assert {broken.FOUND[task] for task in ALONE} <= {*LossTrait.__args__, *NEVER_ACCEPTED}
    assert set(LossTrait.__args__) <= set(CAUSES)


@pytest.mark.parametrize("task", ON_TWO, ids=lambda task: task.__name__)
def test_what_differs_by_rank_is_named_on_every_rank(pool: Pool, task: type[Sound]) -> None:
    errors = pool.errors(_as_rank, task, world=2)
    assert [error.problem for error in errors] == [CAUSES[ON_TWO[task]].title] * 2
    assert len({error.found for error in errors}) == 1


def _as_rank(world: Any, store: Any, task: type[Sound]) -> Any:
    # The zoo reads its rank from the environment, as users do.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(world.rank))
        patch.setenv("WORLD_SIZE", str(world.size))
        return fit(world, store, task(), SMALL)


class LogsOnRankZero(Sound):
    """Its rank is read once, and rank 0 then collects from the others even where it is told to be alone."""

    @functools.cached_property
    def place(self) -> tuple[int, int]:
        return dist.get_rank(), dist.get_world_size()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        rank, size = self.place
        dist.gather_object(loss.total.item(), [None] * size if rank == 0 else None)
        return loss


class FailsOnRankOne(Sound):
    """Only on the few samples of the check."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if dist.get_rank() == 1 and len(batch[0]) < 4:
            raise ValueError("too few samples")
        return super().loss(model, batch)


class FlakyDisk:
    """The first reads fail, on rank 1 only: those of the check."""

    def __init__(self, rows: Any):
        self.rows, self.reads = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads == 1 and dist.is_initialized() and dist.get_rank() == 1:
            raise OSError("a file is not there yet")
        return self.rows[index]


class ReadsLate(Sound):
    def data(self) -> Any:
        return FlakyDisk(super().data())


@pytest.mark.parametrize("task", [LogsOnRankZero, FailsOnRankOne, ReadsLate], ids=lambda task: task.__name__)
def test_a_loss_that_fails_on_one_rank_leaves_none_waiting(pool: Pool, task: type[Sound]) -> None:
    pool.run(fit, task(), SMALL, world=2)


@pytest.mark.parametrize("strategy", ["fsdp", "tp"])
def test_gradients_of_sharded_models_are_compared(pool: Pool, strategy: str) -> None:
    """And what is sound trains on: the forwards of the check leave nothing gathered."""
    values = SMALL | {"strategy": strategy}
    for kind, cause in {"mean": "mean-for-sum", "constant total": "batch-coupled"}.items():
        errors = pool.errors(fit, MLP(kind), values, world=2)
        assert [error.problem for error in errors] == [CAUSES[cause].title] * 2
    pool.run(fit, MLP("sum"), values, world=2)


class MLP(Task):
    """Two layers that tensor parallelism can shard, with dropout."""

    def __init__(self, kind: str):
        self.kind = kind

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))

    def tensor_plan(self, model: nn.Module) -> dict[str, Any]:
        return {"0": "colwise", "3": "rowwise"}

    def data(self) -> Any:
        g = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(16, 4, generator=g), torch.randn(16, 1, generator=g))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        errors = (model(x) - y) ** 2
        if self.kind == "constant total":  # only gradients show that it depends on the batch
            scaled = errors / errors.mean().detach()
            return Loss((scaled - scaled.detach() + 1).sum(), len(x))
        return Loss(errors.mean() if self.kind == "mean" else errors.sum(), len(x))


class Metrics(MLP):
    """With dropout, and with metrics of every kind; `noisy` draws numbers of its own where nothing can be judged."""

    def __init__(self, noisy: bool = False):
        super().__init__("sum")
        self.noisy = noisy

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        errors = model(batch[0]).detach() - batch[1]
        noise = random.SystemRandom().random() if self.noisy else 0.0
        loss.metrics = {
            "mean": errors.abs().mean() + noise,
            "plain_mean": float(errors.abs().mean()) + noise,
            "largest": errors.abs().max() + noise,
            "sum": errors.abs().sum(),
            "signed": errors.sum(),
            "hits": (errors > 0).sum(),
            "none": (errors > 1e9).sum(),
            "pair": (errors.abs().mean(), 1),
            "tiny": (errors - errors).sum() + 1e-9,
            "lost": torch.tensor(float("nan")),
        }
        return loss


@pytest.mark.parametrize("world", [1, 2])
def test_a_metric_that_is_a_mean_is_warned_of(pool: Pool, tmp_path: Any, world: int) -> None:
    values = SMALL | {"global_batch": 16}
    for noisy, named in (False, {"mean", "plain_mean", "largest"}), (True, set()):
        run_dir = tmp_path / f"noisy-{noisy}"
        pool.run(fit, Metrics(noisy), values | {"run_dir": str(run_dir)}, world=world)
        events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
        warnings = [event["reason"] for event in events if event["event"] == "warning"]
        assert {warning.split("'")[1] for warning in warnings} == named
        assert all("give the sum, values.sum(), or a pair (sum, weight)" in warning for warning in warnings)


class OwnReturn(MLP):
    """Returns what training refuses."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        return loss.total if self.kind == "tensor" else Loss(loss.total.detach(), loss.weight)


@pytest.mark.parametrize("kind", ["tensor", "no gradient"])
def test_a_loss_that_training_refuses_is_named_once(tmp_path: Any, kind: str) -> None:
    with pytest.raises(UserError, match=r"it returned a Tensor|one number with a gradient"):
        train(OwnReturn(kind), tmp_path, global_batch=8)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert "note" not in [event["event"] for event in events]


# ---- no false alarms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [*healthy.TASKS, *borrowed.TASKS], ids=lambda task: task.__name__)
def test_a_healthy_task_is_checked_and_trains(task: type[Task], tmp_path: Any) -> None:
    assert not notes(train(task(), tmp_path))


@pytest.mark.parametrize("recipe", [char_lm, pixel_llm, latent_wire], ids=lambda recipe: recipe.__name__)
def test_recipes_are_checked_and_train(recipe: Any, tmp_path: Any) -> None:
    values = {"preset": "tiny", "steps": 1, "evaluate": {"every": None, "at_end": False}, "goals": []}
    result = lockstep.fit(recipe.TASK, QUIET, run_dir=str(tmp_path / "run"), **values)
    assert not notes(result)


ZOO = [*public.TASKS]
OFTEN = ("GPT2", "Mixtral", "ViT", "T5")  # in every run of the tests; the others take longer


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.long) for name in ZOO]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_public_models_raise_no_alarm(name: str, precision: str, tmp_path: Any) -> None:
    """With the dropout that they were published with, in single precision and under autocast."""
    public_task = public.TASKS[name]

    class Noisy(public_task):
        def model(self) -> nn.Module:
            model = public_task.build()
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.1
            return model

        def loss(self, model: nn.Module, batch: Any) -> Loss:
            def single(*inputs: Any, **named: Any) -> Any:
                return model(*map(_single, inputs), **{key: _single(value) for key, value in named.items()})

            return super().loss(single, batch)

    result = train(Noisy(), tmp_path, global_batch=16, precision=precision)
    assert not notes(result)


def _single(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


class Normed(Sound):
    """BatchNorm is known to depend on the micro-batch: it is not what the check looks for."""

    def model(self) -> nn.Module:
        model = broken.WithBatchNorm()
        model.extra = nn.BatchNorm1d(8, track_running_stats=False)
        return model


class Averaged(Sound):
    """The mean over tokens that a Hugging Face model returns, with the number of tokens; in float64."""

    def model(self) -> nn.Module:
        return Reader().double()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, mask = batch
        losses = token_losses(model(tokens[:, :-1]), tokens, mask)
        return Loss.mean(losses.mean(), mask.sum())


class Table(Reader):
    """The first forward makes a table that by chance has the shape of a weight."""

    table = None

    def read(self, tokens: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 64).view(8, 8)
        return super().read(tokens) @ self.table


class MadeInForward(Sound):
    def model(self) -> nn.Module:
        return Table()


class PerSampleNorm(Sound):
    """InstanceNorm that keeps running statistics, on one process."""

    def model(self) -> nn.Module:
        model = broken.WithBatchNorm()
        model.norm = nn.InstanceNorm1d(8, track_running_stats=True)
        return model


class Nested(Dataset):
    """Samples that a split of tensors would not know how to take apart."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        tokens, mask = Sentences()[index]
        return {"text": {"tokens": tokens.tolist()}, "masks": [mask], "name": f"sentence {index}"}


class NestedBatches(Sound):
    def data(self) -> Any:
        return Nested()

    def collate(self, samples: list[Any]) -> Any:
        tokens = torch.tensor([sample["text"]["tokens"] for sample in samples])
        return {"pair": (tokens, torch.stack([sample["masks"][0] for sample in samples])), "count": len(samples)}

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, batch.pop("pair"))  # a batch may be used up


class Recomputed(Task):
    """Weights that hooks compute before every forward; converted later than these were made, which leaves them out.

    Both have the values of a parameter: a norm over one number is that number, and nothing is pruned.
    """

    defaults = {"global_batch": 8, "steps": 1}

    def model(self) -> nn.Module:
        with pytest.warns(FutureWarning, match="weight_norm"):
            normed = nn.utils.weight_norm(nn.Linear(1, 8))
        return nn.Sequential(normed, nn.Tanh(), prune.identity(nn.Linear(8, 1), "weight")).double()

    def data(self) -> Any:
        return TensorDataset(torch.randn(16, 1, generator=torch.Generator().manual_seed(0)).double())

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch[0]).square().sum(), len(batch[0]))


UNUSUAL = [Normed, Averaged, NestedBatches, MadeInForward, PerSampleNorm, Recomputed]


@pytest.mark.parametrize("task", UNUSUAL, ids=lambda task: task.__name__)
def test_what_is_unusual_and_right(task: type[Sound], tmp_path: Any) -> None:
    assert not notes(train(task(), tmp_path))


class Streamed(IterableDataset):
    def __iter__(self) -> Any:
        yield from (Sentences()[index] for index in range(16))


@pytest.mark.parametrize("kind", [Sound, broken.MeanForSum, broken.HardExamples], ids=lambda kind: kind.__name__)
def test_a_stream_is_checked_with_its_first_samples_and_loses_none(kind: type[Sound], tmp_path: Any) -> None:
    class FromStream(kind):
        def data(self) -> Any:
            return (sample for sample in Streamed()) if kind is Sound else Streamed()

    if kind is not Sound:
        with pytest.raises(UserError) as error:
            train(FromStream(), tmp_path)
        assert error.value.problem == CAUSES[broken.FOUND[kind]].title
        return

    checked, unchecked = (
        train(FromStream(), tmp_path / check, steps=2, checks={"loss": check}) for check in ("all", "off")
    )
    assert not notes(checked)
    assert all(torch.equal(checked.weights[name], weight) for name, weight in unchecked.weights.items())


def test_an_error_of_a_stream_is_not_lost_by_looking_at_it(tmp_path: Any) -> None:
    class Broken(Sound):
        def data(self) -> Any:
            return (Sentences()[index] if index < 2 else 1 / 0 for index in range(16))

    with pytest.raises(ZeroDivisionError):
        train(Broken(), tmp_path)


def test_a_stream_whose_batches_hold_a_count_is_left_out_with_a_word(tmp_path: Any) -> None:
    class Counted(Sound):
        def data(self) -> Any:
            return Streamed()

        def collate(self, samples: list[Any]) -> Any:
            return default_collate(samples), sum(int(mask.sum()) for _, mask in samples)

        def loss(self, model: nn.Module, batch: Any) -> Loss:
            return Loss(super().loss(model, batch[0]).total, batch[1])

    (note,) = notes(train(Counted(), tmp_path))
    assert "cannot be split" in note


def test_a_loss_that_fails_on_a_half_is_left_out_with_a_word(tmp_path: Any) -> None:
    class NeedsFour(Sound):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            if len(batch[0]) < 4:
                raise ValueError("too few")
            return super().loss(model, batch)

    (note,) = notes(train(NeedsFour(), tmp_path, tail="drop"))
    assert "it raises ValueError: too few" in note


def test_a_micro_batch_of_one_sample_is_never_made_larger(tmp_path: Any) -> None:
    class OneByOne(Sound):
        def collate(self, samples: list[Any]) -> Any:
            (sample,) = samples
            return sample[0][None], sample[1][None]

    assert not notes(train(OneByOne(), tmp_path, micro_batch=1))


@pytest.mark.parametrize("micro_batch", [2, 3])
def test_small_micro_batches_raise_no_alarm(micro_batch: int, tmp_path: Any) -> None:
    assert not notes(train(Sound(), tmp_path, micro_batch=micro_batch))


def test_buffers_that_the_task_names_may_change(tmp_path: Any) -> None:
    class Named(broken.BufferByHand):
        changing_buffers = ("seen",)

    assert not notes(train(Named(), tmp_path))


def test_a_loss_that_is_not_a_number_is_left_to_the_first_step(tmp_path: Any) -> None:
    class NotANumber(Sound):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            made = super().loss(model, batch)
            return Loss(made.total * float("nan"), made.weight)

    with pytest.raises(UserError, match="none of the"):
        train(NotANumber(), tmp_path)


# ---- what it costs and leaves behind ----------------------------------------------------------------------


class Counting(Sound):
    """Keeps everything that a check could disturb, and notes what it was called with."""

    def __init__(self) -> None:
        self.calls = 0
        self.sizes: list[int] = []
        self.generator = np.random.default_rng(0)

    def model(self) -> nn.Module:
        return broken.WithBatchNorm()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        SEEN.append(len(batch[0]))
        self.sizes.append(len(batch[0]))
        self.calls += 1
        made = super().loss(model, batch)
        return Loss(made.total + 0.0 * F.dropout(model.out.weight).sum(), made.weight)


SEEN: list[int] = []


@pytest.mark.parametrize("micro_batch", [8, 24, 96])
def test_it_costs_at_most_a_micro_batch_and_leaves_nothing(micro_batch: int, tmp_path: Any) -> None:
    class Many(Counting):
        def data(self) -> Any:
            return Sentences(192)

    results = []
    for check in ("all", "off"):
        SEEN.clear()
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        task = Many()
        values = {"global_batch": 96, "micro_batch": micro_batch, "steps": 2, "checks": {"loss": check}}
        weights = train(task, tmp_path / check, **values).weights
        trained = 2 * 96
        assert sum(SEEN) - trained <= (max(micro_batch, 4 * MIN_SAMPLES) if check == "all" else 0)
        assert max(SEEN[: len(SEEN) - 2 * (96 // micro_batch)], default=0) <= MAX_SAMPLES
        results.append((weights, task.calls, task.sizes, random.random(), np.random.rand(), torch.rand(1).item()))

    checked, unchecked = results
    assert {name: w.numpy().tobytes() for name, w in checked[0].items()} == {
        name: w.numpy().tobytes() for name, w in unchecked[0].items()
    }
    assert checked[1:] == unchecked[1:]


def test_a_resumed_run_is_not_checked_again(tmp_path: Any) -> None:
    values = {"run_dir": str(tmp_path / "run"), "log": {"progress": "off"}}
    lockstep.fit(Sound(), values, steps=1)
    SEEN.clear()
    lockstep.fit(Sounding(), values, steps=2, resume="auto")
    assert SEEN == [8]


class Sounding(Sound):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        SEEN.append(len(batch[0]))
        return super().loss(model, batch)


# ---- a loop of one's own --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistake", "cause"),
    [("buffer", "changed-in-forward"), ("generator", "randomness"), ("backward", "left-gradient"), (None, None)],
)
def test_a_loop_of_ones_own(mistake: str | None, cause: str | None, tmp_path: Any) -> None:
    """There the loss cannot be called; its first forward is watched."""
    kinds = {"buffer": broken.CountedWords, "generator": broken.OwnGenerator, None: broken.WithBatchNorm}

    def loop() -> None:
        with lockstep.start(QUIET, run_dir=str(tmp_path / "run"), global_batch=8, steps=1) as run:
            model = kinds.get(mistake, Reader)()
            model, _ = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for step in run.steps(Sentences()):
                for tokens, mask in step:
                    losses = token_losses(model(tokens[:, :-1]), tokens, mask)
                    if mistake == "backward":
                        losses.sum().backward(retain_graph=True)
                    step.backward(losses.sum(), weight=len(losses))
                step.apply()

    if cause is None:
        loop()
        return
    with pytest.raises(UserError) as error:
        loop()
    if cause == "left-gradient":
        assert "the loss calls backward() itself" in error.value.problem
        assert "losses.sum().backward(retain_graph=True)" in error.value.found
        return
    assert error.value.problem == CAUSES[cause].title
    assert f"checks.loss={cause}" in error.value.fix


# ---- parts ----------------------------------------------------------------------------------------------


def test_several_causes_can_be_meant() -> None:
    config = resolve([("test", {"checks.loss": ["batch-coupled", "penalty"], "global_batch": 8, "steps": 1})]).config
    assert config.checks.loss == ["batch-coupled", "penalty"]
    assert "checks.loss" in KEYS
    with pytest.raises(UserError, match=r"checks\.loss"):
        resolve([("test", {"checks.loss": "batch-copled", "global_batch": 8, "steps": 1})])


def test_random_numbers_are_held_still() -> None:
    x = torch.ones(6, 4)
    with ConstantDraws() as mode:
        assert torch.equal(F.dropout(x, 0.3), x)
        assert torch.equal(torch.rand(3), torch.full((3,), 0.5))
        assert torch.equal(torch.randn_like(x), torch.zeros_like(x))
        assert torch.randperm(4).tolist() == [3, 2, 1, 0]
        assert torch.equal(torch.bernoulli(x / 4), x / 4)
        q = torch.rand(1, 2, 5, 4)
        attended = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        assert torch.allclose(attended, F.scaled_dot_product_attention(q, q, q))
    assert not mode.unsupported
    with ConstantDraws() as mode:
        torch.empty(3).cauchy_()
    assert mode.unsupported == {"cauchy_"}


def judged(whole: tuple[float, float], halves: list[tuple[float, float]], doubled: list[float]) -> str | None:
    tolerance = Tolerance.of(torch.finfo(torch.float32).eps)
    parts = [Measurement(*half) for half in halves]
    weight = 2 * halves[0][1] + halves[1][1]
    cause = judge_halves(Measurement(*whole), parts, lambda rest: Measurement(doubled[rest], weight), None, tolerance)
    return cause and cause.key


@pytest.mark.parametrize(
    ("whole", "halves", "doubled", "cause"),
    [
        ((10.0, 4), [(4.0, 2), (6.0, 2)], [8.0, 14.0], None),
        ((10.0001, 4), [(4.0, 2), (6.0, 2)], [8.0, 14.0], None),  # rounding
        ((1e-7, 400), [(3.0, 200), (-3.0, 200)], [6.0, 3.0], None),  # terms that cancel
        ((float("nan"), 4), [(4.0, 2), (6.0, 2)], [8.0, 14.0], None),  # the first step will say it
        ((0.0, 0), [(0.0, 0), (0.0, 0)], [0.0, 0.0], None),
        ((10.0, 1), [(4.0, 1), (6.0, 1)], [8.0, 14.0], "loss-weight"),
        ((5.0, 1), [(4.0, 1), (6.0, 1)], [4.0, 4.7], "mean-of-means"),
        ((5.5, 4), [(4.0, 1), (6.0, 3)], [4.0, 5.2], "mean-for-sum"),
        ((12.0, 4), [(6.0, 2), (8.0, 2)], [10.0, 16.0], "penalty"),
        # Means of 2 over 1 word and 3 over 4: the whole is 14/5 times its weight, with the first half twice 16/6.
        ((11.2, 4), [(4.0, 2), (6.0, 2)], [8.0, 16.0], "loss-weight"),
        ((11.2, 4), [(4.0, 2), (6.0, 2)], [8.0, 16.5], "batch-coupled"),
        ((14.0, 4), [(4.0, 2), (6.0, 2)], [9.0, 20.0], "batch-coupled"),
        # The same means, not multiplied by the weight.
        ((2.8, 4), [(2.0, 2), (3.0, 2)], [2.0, 8 / 3], "loss-weight"),
        ((2.8, 4), [(2.0, 2), (3.0, 2)], [2.0, 2.75], "batch-coupled"),
    ],
)
def test_totals_and_weights_alone(
    whole: tuple[float, float], halves: list[tuple[float, float]], doubled: list[float], cause: str | None
) -> None:
    assert judged(whole, halves, doubled) == cause


# ---- Loss and Loss.mean -------------------------------------------------------------------------------


def test_sums_and_means_by_name() -> None:
    terms = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64, requires_grad=True)
    for made in (Loss(terms.sum(), 3), Loss.mean(terms.mean(), 3), Loss.mean(terms.mean(), torch.tensor(3))):
        assert made.total.item() == pytest.approx(9.0, abs=1e-12)
        assert float(made.weight) == 3
        (gradient,) = torch.autograd.grad(made.total, terms, retain_graph=True)
        assert torch.allclose(gradient, torch.ones_like(terms), rtol=0, atol=1e-12)
    assert Loss.mean(terms.mean(), 3, {"right": 2}).metrics == {"right": 2}


@pytest.mark.parametrize("n", [0, torch.tensor(0)])
def test_the_mean_of_nothing_weighs_nothing(n: Any) -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    mean = F.cross_entropy(logits, torch.full((3,), -100))
    made = Loss.mean(mean, n)
    made.total.backward()
    assert mean.isnan()
    assert made.total.item() == 0.0
    assert isinstance(logits.grad, Tensor)
    assert not logits.grad.isnan().any()


@pytest.mark.parametrize("n", [0, 2, torch.tensor(0)])
def test_a_mean_that_is_a_plain_number_is_refused(n: Any) -> None:
    with pytest.raises(UserError, match=r"it is a float(.|\n)*return Loss\(\(pred \* 0\)\.sum\(\), weight=0\)"):
        Loss.mean(sum([], 0.0), n)  # pyrefly: ignore[bad-argument-type]


def test_the_mean_of_nothing_has_no_gradient_even_if_its_backward_divides_by_zero() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    mask = torch.zeros(2)
    made = Loss.mean((model(torch.ones(2, 3)).flatten() * mask).sum() / mask.sum(), 0)
    made.total.backward()
    assert made.total.item() == 0.0
    assert [p.grad.abs().sum().item() for p in model.parameters() if p.grad is not None] == [0.0] * 4

    # The next loss has its usual gradient.
    Loss.mean(model(torch.ones(2, 3)).mean(), 2).total.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_hugging_face_loss_is_right_in_any_split(tmp_path: Any) -> None:
    """`.loss` is a mean over tokens: with their number it trains what plain PyTorch does on the whole batch."""
    from transformers import BertConfig, BertForMaskedLM

    # Unlike the causal models, this one computes its loss in the format of its weights.
    config = BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip

    def labels(tokens: Tensor, mask: Tensor) -> Tensor:
        return tokens[:, 1:].where(mask, -100)

    class Borrowed(Sound):
        def model(self) -> nn.Module:
            return BertForMaskedLM(config).double()

        def optimizer(self, model: nn.Module) -> Any:
            return torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(self, model: nn.Module, batch: Any) -> Loss:
            target = labels(*batch)
            out = model(input_ids=batch[0][:, :-1], labels=target)
            return Loss.mean(out.loss, (target != -100).sum())

    result = train(Borrowed(), tmp_path, micro_batch=3, data={"shuffle": False}, seed=3)
    plain = BertForMaskedLM(config).double()
    start = train(Borrowed(), tmp_path / "start", lr={"peak": 0.0}, data={"shuffle": False}, seed=3).weights
    plain.load_state_dict(start, strict=False)
    plain.tie_weights()
    samples = [Sentences()[index] for index in range(8)]
    tokens, mask = (torch.stack(parts) for parts in zip(*samples, strict=True))
    plain(input_ids=tokens[:, :-1], labels=labels(tokens, mask)).loss.backward()
    for name, p in plain.named_parameters():
        assert p.grad is not None
        assert torch.allclose(result.weights[name], p.detach() - 0.1 * p.grad, rtol=0, atol=1e-12), name
