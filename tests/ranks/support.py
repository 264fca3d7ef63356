"""What the tests of this folder share: a run that notes every step, tasks with a known reference, and the check."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lockstep.config import Resolved, resolve, resolve_for
from lockstep.data.samplers import make_sampler
from lockstep.data.windows import next_window
from lockstep.engine import loop
from lockstep.engine.own_loop import OwnRun
from lockstep.engine.own_step import OwnStep
from lockstep.engine.run import Run
from lockstep.engine.setup import RunBuilder, open_run
from lockstep.errors import UserError
from lockstep.runtime import context
from lockstep.runtime.world import World
from lockstep.targets import make_task
from lockstep.task import Loss, MicroBatch, StepBatches, StepResult, Task

# Every combination, in `make test-long`; otherwise those that prove something new.
ALL_PAIRS = "LOCKSTEP_ALL_PAIRS" in os.environ

# The same tests on a GPU, all ranks sharing it: LOCKSTEP_TEST_DEVICE=cuda pytest tests/ranks
DEVICE = os.environ.get("LOCKSTEP_TEST_DEVICE", "cpu")
NEEDS_NCCL = "on GPUs cannot run over gloo"  # the refusal of pipelines, which send tensors from rank to rank
QUIET = {"device": DEVICE, "precision": "fp32", "compile": False, "log.progress": "off", "log.every": 1000}
# Many losses of these tests do on purpose what the check at the start refuses: they count calls, read their rank or
# look at one sample only. tests/test_start_check.py turns it on.
QUIET |= {"checks.loss": "off"}


# ---- runs -----------------------------------------------------------------------------------------------


@dataclass
class TrainedBatch:
    """One micro-batch that a rank was given."""

    index: int
    epoch: int
    ids: list[int]
    padding: bool


@dataclass
class StepNote:
    """What one step left behind on one rank."""

    result: StepResult
    pieces: list[TrainedBatch]
    lr: float
    scale: float | None
    grads: dict[str, Tensor | None]  # as the optimizer left them
    weights: dict[str, Tensor]  # after the step
    optimizer_lrs: list[float]

    @property
    def ids(self) -> list[int]:
        return [i for piece in self.pieces if not piece.padding for i in piece.ids]


@dataclass
class Trace:
    """A whole run of one rank."""

    initial: dict[str, Tensor]
    steps: list[StepNote] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    def before(self, step: int) -> dict[str, Tensor]:
        return self.steps[step - 1].weights if step else self.initial


@dataclass
class NotedBatches:
    """Notes the micro-batches of a step, in each pass over them."""

    batches: Iterable[MicroBatch]
    pieces: list[TrainedBatch]

    def __iter__(self) -> Iterator[MicroBatch]:
        for micro in self.batches:
            ids = [int(i) for i in micro.ids]
            self.pieces.append(TrainedBatch(micro.index, micro.epoch, ids, micro.padding))
            yield micro


class WatchedRun(Run):
    """A Run that keeps a Trace."""

    trace: Trace

    def step_batches(self) -> Iterator[StepBatches]:
        self.trace = Trace(self._weights())
        for batches in super().step_batches():
            self._pieces: list[TrainedBatch] = []
            batches.micro_batches = NotedBatches(batches.micro_batches, self._pieces)
            yield batches

    def end_step(self, batches: StepBatches, result: StepResult | None) -> StepResult | None:
        result = result or self.stepper.read_late_outcome()  # on a GPU it may be late
        assert result is not None
        grads = {name: p.grad for name, p in self.driver.model.named_parameters() if p.requires_grad}
        groups = [group for optimizer in self.trained_model.optimizers.all for group in optimizer.param_groups]
        note = StepNote(
            result,
            self._pieces,
            self.stepper.lr,
            self.stepper.scaler.value if self.stepper.scaler else None,
            {name: None if grad is None else grad.cpu().clone() for name, grad in grads.items()},
            self._weights(),
            [float(group["lr"]) for group in groups],
        )
        self.trace.steps.append(note)
        return super().end_step(batches, result)

    def _weights(self) -> dict[str, Tensor]:
        return {name: p.detach().cpu().clone() for name, p in self.driver.model.named_parameters()}


def configured(values: dict[str, Any]) -> Resolved:
    return resolve([("test", QUIET | {"run_dir": f"run-{uuid.uuid4().hex}"} | values)])


@contextmanager
def open_watched(world: World, store: Any, values: dict[str, Any]) -> Iterator[RunBuilder]:
    resolved = configured(values)
    with context.start(world, resolved.config, store=store) as runtime:
        yield open_run(resolved, runtime, "test", run_class=WatchedRun)


def preempted_run(runtime: context.Runtime, leave_at: int | None) -> type[Run]:
    """Return a Run that leaves after `leave_at` steps, because rank 0 gets SIGTERM in the step before; None: never."""

    class PreemptedRun(Run):
        def end_step(self, batches: Any, result: Any) -> StepResult | None:
            if leave_at is not None and self.steps_done == leave_at - 1 and runtime.is_main:
                runtime.notice.signal = "SIGTERM"
            return super().end_step(batches, result)

    return PreemptedRun


def trace_of(builder: RunBuilder) -> Trace:
    assert isinstance(builder.run, WatchedRun)
    return builder.run.trace


def fit(world: World, store: Any, task: Task, values: dict[str, Any]) -> Trace:
    """A job: what `lockstep.fit` does, in this worker."""
    with open_watched(world, store, values) as builder:
        summary = loop.fit(task, builder)
        trace = trace_of(builder)
        trace.summary = summary
        return trace


def train(world: World, store: Any, task: type[Task], values: dict[str, Any]) -> None:
    """A job: what `lockstep train` does with a recipe and its presets, in this worker. What it leaves is on disk."""
    resolved = resolve_for(task.defaults, task.presets, [("test", QUIET | values)])
    with context.start(world, resolved.config, store=store) as runtime:
        loop.fit(make_task(task, resolved.config.task), open_run(resolved, runtime, "test"))


def own_loop(world: World, store: Any, task: Task, values: dict[str, Any]) -> Trace:
    """A job: the same training as a custom loop."""
    with open_watched(world, store, values) as builder:
        own = OwnRun(builder)
        train_by_hand(own, task)
        own.close()
        return trace_of(builder)


def train_by_hand(own: OwnRun, task: Task) -> None:
    """What a user's script does between `lockstep.start` and the end."""
    for step in backward_by_hand(own, task):
        step.apply()


def backward_by_hand(own: OwnRun, task: Task) -> Iterator[OwnStep]:
    """Run forward and backward of every step, and yield it: the caller applies it."""
    plain = task.model()
    model, _ = own.setup(plain, task.optimizer(plain))
    for step in own.steps(task.data(), task.collate):
        for batch in step:
            loss = task.loss(model, batch)
            step.backward(loss.total, loss.weight, **loss.metrics)
        yield step


class _Late:
    """Work that is done when somebody waits for it."""

    def __init__(self, collective: Callable[[], Any]):
        self._collective: Callable[[], Any] | None = collective

    def wait(self) -> None:
        if self._collective is not None:
            collective, self._collective = self._collective, None
            collective()


def delay_collectives() -> None:
    """Let asynchronous collectives of this process run when they are waited for, as late as they ever may.

    They then read what was written to their memory in the meantime, and nobody finds a result there too early.
    """
    all_reduce, all_gather, transfer = dist.all_reduce, dist.all_gather, dist.batch_isend_irecv

    def delayed(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            run = partial(collective, *args, **kwargs)
            return _Late(run) if async_op else run()

        return call

    def transfer_late(operations: list[dist.P2POp]) -> list[Any]:
        def run() -> None:
            for work in transfer(operations):
                work.wait()

        return [_Late(run)]

    dist.all_reduce, dist.all_gather = delayed(all_reduce), delayed(all_gather)
    dist.batch_isend_irecv = transfer_late  # pyrefly: ignore[bad-assignment]


def assert_user_errors(errors: Sequence[BaseException | None], *words: str) -> None:
    """Every rank stopped with a UserError that says all of `words`."""
    for rank, error in enumerate(errors):
        # With those of the others: what this rank says may only follow from theirs.
        assert isinstance(error, UserError), f"rank {rank} raised no UserError; all of them: {errors!r}"
        if DEVICE == "cuda" and NEEDS_NCCL in str(error):
            raise error  # which leaves the test out, in conftest.py
        for word in words:
            assert word in str(error), f"rank {rank} does not say {word!r}:\n{error}"


# ---- tasks with a reference -----------------------------------------------------------------------------


class Rows(Dataset):
    """Samples one by one, as most datasets give them."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(5, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x))).squeeze(-1)


class Regression(Task):
    """A plain task whose loss and model tests replace."""

    def __init__(
        self,
        predict: Callable[[Regression, nn.Module, Tensor], Tensor] = lambda task, model, x: model(x),
        network: Callable[[], nn.Module] = Perceptron,
        before_loss: Callable[[Regression, int], None] = lambda task, call: None,
    ):
        self.predict, self.network, self.before_loss = predict, network, before_loss
        self.calls = 0

    def model(self) -> nn.Module:
        self.net = self.network()
        return self.net

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def data(self) -> Any:
        g = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(40, 5, generator=g), torch.randn(40, generator=g))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.before_loss(self, self.calls)
        self.calls += 1
        x, y = batch
        return Loss(((self.predict(self, model, x) - y) ** 2).sum(), len(x))


class NextToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(13, 4), nn.Linear(4, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embedding(tokens)))


class ReferenceTask(Task):
    """A task whose loss over any set of samples can be computed by plain autograd."""

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32):
        self.tensors, self.dtype = list(tensors), dtype
        self.indexed = False  # hand out a TensorDataset
        self.optimizer_kind = "sgd"
        self.mean_of_means = False  # the classic mistake

    def network(self) -> nn.Module:
        raise NotImplementedError

    def terms(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The loss's sum and weight over a batch, in the batch's number format."""
        raise NotImplementedError

    def model(self) -> nn.Module:
        return self.network().to(self.dtype)

    def data(self) -> Any:
        tensors = _cast(self.tensors, self.dtype)
        return TensorDataset(*tensors) if self.indexed else Rows(tensors)

    def optimizer(self, model: nn.Module) -> Any:
        if self.optimizer_kind == "fused":
            return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        # Small steps: near a minimum the gradient is almost nothing, and errors relative to it are large.
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Loss:
        total, weight = self.terms(model, batch)
        if self.mean_of_means:
            return Loss(total / weight.clamp(min=1), 1)
        return Loss(total, weight)

    def weight_of(self, ids: Sequence[int]) -> int:
        return int(self.tensors[-1][list(ids)].sum())

    def reference(self, weights: dict[str, Tensor], ids: Sequence[int]) -> dict[str, Tensor]:
        """The gradient of the weighted mean over `ids`: one process, one batch, float64."""
        model = self.network().double()
        model.load_state_dict(weights)
        rows = [tensor[list(ids)] for tensor in self.tensors]
        total, weight = self.terms(model, _cast(rows, torch.float64))
        (total / weight).backward()
        return {name: or_zeros(p.grad, p) for name, p in model.named_parameters() if p.requires_grad}


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors]


class ResidualBlocks(nn.Module):
    """Blocks that strategies can shard and split, and a number for each sample: (samples, 6) -> (samples,)."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ResidualBlock() for _ in range(depth)])
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x).squeeze(-1)


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class WeightedRegression(ReferenceTask):
    """Every sample has a whole-number weight, possibly 0."""

    def network(self) -> nn.Module:
        return Perceptron()

    def terms(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        x, y, weight = batch
        return (weight * (model(x) - y) ** 2).sum(), weight.sum()


class MaskedTokens(ReferenceTask):
    """A ragged number of tokens counts in every sample, possibly none."""

    unit = "token"

    def network(self) -> nn.Module:
        return NextToken()

    def terms(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        tokens, mask = batch
        logits = model(tokens[:, :-1])
        each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return (each * mask.flatten()).sum(), mask.sum()


def weighted_regression(length: int, seed: int, zeros: float = 0.3, **options: Any) -> WeightedRegression:
    """`zeros` is the share of samples with weight 0."""
    g = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, 10, (length,), generator=g) * (torch.rand(length, generator=g) >= zeros)
    # Targets far on one side: sample gradients point one way, so that errors are not relative to almost nothing.
    return WeightedRegression(
        [torch.randn(length, 5, generator=g), 2 + torch.rand(length, generator=g), weights], **options
    )


def masked_tokens(length: int, seed: int, zeros: float = 0.3, **options: Any) -> MaskedTokens:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 13, (length, 8), generator=g)
    counted = torch.randint(1, 8, (length,), generator=g) * (torch.rand(length, generator=g) >= zeros)
    return MaskedTokens([tokens, (torch.arange(7) < counted[:, None]).long()], **options)


# ---- the check ------------------------------------------------------------------------------------------

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}  # relative to the length of the reference gradient


def windows(length: int, global_batch: int, tail: str, steps: int, seed: int = 0) -> list[list[int]]:
    """The sample ids of every global step."""
    order, position, found = make_sampler(length, seed), 0, []
    for _ in range(steps):
        window = next_window(position, length, global_batch, tail)
        found.append(order.ids(window.epoch, window.start, window.stop).tolist())
        position = window.epoch * length + window.stop
    return found


def steps_past_an_epoch(length: int, global_batch: int, tail: str) -> int:
    return (length // global_batch if tail == "drop" else -(-length // global_batch)) + 1


def or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


def assert_exact(task: ReferenceTask, traces: list[Trace], samples: Sequence[Sequence[int]]) -> float:
    """In every step every rank held the gradient of the mean over `samples` of that step. Returns the worst error."""
    worst = 0.0
    assert [len(trace.steps) for trace in traces] == [len(samples)] * len(traces)
    for number, ids in enumerate(samples):
        notes = [trace.steps[number] for trace in traces]
        if task.weight_of(ids) == 0:
            _assert_nothing_happened(traces, number)
            continue
        expected = flat(task.reference(traces[0].before(number), ids))
        for rank, note in enumerate(notes):
            grads = {name: or_zeros(grad, note.weights[name]) for name, grad in note.grads.items()}
            error = float((flat(grads) - expected).norm() / expected.norm())
            assert error <= TOLERANCE[task.dtype], f"gradient of step {number}, rank {rank}: off by {error:.1e}"
            worst = max(worst, error)
            assert note.result.applied, f"step {number}, rank {rank}: not applied"
            assert note.result.weight == task.weight_of(ids), f"step {number}, rank {rank}"
            torch.testing.assert_close(note.result.grad_norm, float(expected.norm()), rtol=1e-5, atol=0)
            assert torch.equal(flat(note.weights), flat(notes[0].weights)), f"step {number}: replicas differ"
    return worst


def _assert_nothing_happened(traces: list[Trace], number: int) -> None:
    for rank, trace in enumerate(traces):
        note = trace.steps[number]
        assert not note.result.applied, f"step {number} weighs nothing, and rank {rank} applied it"
        assert note.result.weight == 0
        assert torch.equal(flat(note.weights), flat(trace.before(number))), f"step {number}, rank {rank}"


Job = Callable[[World, Any, Task, dict[str, Any]], Trace]
JOBS: dict[str, Job] = {"fit": fit, "own loop": own_loop}


def compile_events(builder: RunBuilder) -> list[str]:
    """Return a list that gets the reasons of the events `compile` of a run, but for the one of its beginning."""
    reasons: list[str] = []
    record = builder.recorder.event

    def note(event: str, **fields: Any) -> None:
        if event == "compile" and not fields["reason"].startswith("begins with"):
            reasons.append(fields["reason"])
        record(event, **fields)

    builder.recorder.event = note  # type: ignore[method-assign]
    return reasons
