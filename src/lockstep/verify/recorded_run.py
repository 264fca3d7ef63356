"""One rank of a trial: it runs a few steps of the user's training and records everything.

The run is a real one, started as `lockstep train` starts it. Only `Run` and its builder are replaced in this process,
by subclasses that record every step. Tensors go to safetensors files (rank 0), numbers to JSON (every rank).
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from lockstep import api, files
from lockstep.checkpoint.manifest import float_from_json
from lockstep.checkpoint.state.digests import digest
from lockstep.checkpoint.state.encoding import pack
from lockstep.data.loader import BatchRequest, SampleReader
from lockstep.data.map_source import MapSource
from lockstep.engine.checks.start import as_checked
from lockstep.engine.run import Run
from lockstep.engine.setup import RunBuilder, builder
from lockstep.engine.trained_model import TrainedModel
from lockstep.errors import UserError
from lockstep.observe.metrics import metric_terms
from lockstep.parallel.batchnorm.statistics import RunningStatistics
from lockstep.parallel.parameter_hooks.hooks import hook_ids
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepPart
from lockstep.runtime.shards import full_tensor
from lockstep.runtime.world import World
from lockstep.start_check import check as start_check
from lockstep.task import Loss, MicroBatch, StepBatches, StepResult

SHORT = 16  # characters of a digest that are kept: enough to tell samples apart in a small record


def work(spec: dict[str, Any]) -> None:
    """Train the target of `spec` with a Run that records."""
    # `open_run` looks the class up when a run starts, so replacing it here affects fit and start alike.
    RecordedBuilder.orders = spec["orders"]
    builder.RunBuilder = RecordedBuilder  # pyrefly: ignore[bad-assignment]

    # The script finds its modules as in the parent process and sees its own arguments only.
    sys.path += [folder for folder in spec["path"] if folder not in sys.path]
    sys.argv = [spec["target"]]
    api.run_target(spec["target"], [(source, values) for source, values in spec["layers"]], spec["arguments"])


class RecordedBuilder(RunBuilder):
    """Builds a RecordedRun and records the structure of the model before and after it is wrapped.

    Wrapping a model may untie weights and take hooks off; what was there before is a fact that a diagnosis needs.
    """

    orders: dict[str, Any]  # a Trial as plain values, with `steps` and `folder`

    def setup_model(
        self,
        model: nn.Module,
        optimizers: Callable[[nn.Module], Any],
        task: Any = None,
        data: Any = None,
        schedulers: Callable[[Any], Any] = lambda _: None,
    ) -> TrainedModel:
        """Set up as usual, and note what wrapping might hide."""
        self._task = task
        tied = _tied(model)  # wrapping might untie them
        hooked = [name for name, p in model.named_parameters() if hook_ids(p)]  # and takes the hooks off
        wrapped = super().setup_model(model, optimizers, task, data, schedulers)

        self._facts = {
            "own_loop": task is None,
            "hooked": hooked,
            "tied": tied,
            "tied_after": _tied(model),
            # The BatchNorm modules that take statistics.
            "batchnorm": [name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training],
            # Parameter -> the class of the module that holds it.
            "owners": {
                name: type(model.get_submodule(name.rpartition(".")[0])).__name__
                for name, _ in model.named_parameters()
            },
        }
        return wrapped

    def setup_run(self, data: Any, collate: Callable[[list[Any]], Any]) -> Run:
        """Set up a run that records."""
        self.run_class = RecordedRun
        run: Any = super().setup_run(data, collate)
        run.begin(self.orders, self._task, self._facts)
        return run

    def fail(self, error: BaseException) -> None:
        """Record a failure, but not the SystemExit with which `step_batches` ends a trial."""
        if not isinstance(error, SystemExit) or error.code:
            super().fail(error)


class RecordedRun(Run):
    """A Run that records what every step reads and computes and that ends after a few steps.

    It trains as every other run does, through the same step. The recording sits around the parts of a step: the micro-
    batches that it takes, the loss, the gradients before the update, and the state after it.
    """

    def begin(self, orders: dict[str, Any], task: Any, facts: dict[str, Any]) -> None:
        """Collect the facts from which the trials are chosen and prepare to record the steps."""
        self.orders = orders
        self._folder = Path(orders["folder"])

        self._task = task
        # What was recorded so far, by step.
        self._steps: list[dict[str, Any]] = []
        self._snapshots: list[dict[str, Any]] = []

        source = self.source
        self._facts = facts | {
            "global_batch": self.plan.global_batch,
            "micro_batch_asked": None if self.config.micro_batch == "auto" else self.config.micro_batch,
            "follows_ranks": self.plan.follows_ranks(self.config),
            "samples": self.plan.samples,
            "stream": source.step_order is None,
            "strategy": self.config.strategy,
            "precision": self.precision.name,
            "device": self.runtime.device.type,
            "replicated": self.driver.role.replicated,
            "trainable": [*self.driver.parameters],
            "gathers": False,  # until the first step has ended
        }

        # Probes: only one rank's share of the samples, on one process; or every sample twice.
        if source.step_order is not None and orders["part"]:
            source.step_order.data_world = World(*orders["part"])

        if isinstance(source, MapSource) and orders["twice"]:
            source.reader = _TwiceReader(source.reader)  # pyrefly: ignore[bad-assignment]

        # Nothing calls it in a pipeline, whose losses are not recorded.
        self._losses = RecordedLosses()
        if self.driver.role.pipeline_depth == 1:
            self.driver.parts.add(self._losses)

        self._nudges = torch.Generator().manual_seed(orders["nudge"])

    def check_start(self, task: Any = None) -> None:
        """Record what the check at the start of a run finds, once, instead of refusing it."""
        self._facts["accepted"] = start_check.accepted_causes(self.config)
        if self.orders["finds"]:
            cause = start_check.find_cause(as_checked(self, task), task)
            self._facts["found"] = cause and [cause.key, cause.evidence]

    def step_batches(self) -> Iterator[StepBatches]:
        """Yield the first few steps; the schedule stays the one of the full run."""
        for number, batches in enumerate(super().step_batches()):
            self._snapshot(number)

            # A loop may call model.train() before each step, so eval mode is set each time.
            if self.orders["eval_mode"]:
                self.driver.model.eval()

            if self.orders["nudge"]:
                self._nudge()

            self._losses.begin()
            yield batches

            if number + 1 == self.orders["steps"]:
                break

        # Nothing more is compared, so there is no evaluation, no checkpoint and no sample at the end.
        self._snapshot(len(self._steps))
        self.runtime.collectives.final_barrier()
        raise SystemExit(0)

    def end_step(self, batches: StepBatches, result: StepResult | None) -> StepResult | None:
        """Record the gradients and settings of a step, before anything can change them."""
        result = result or self.stepper.read_late_outcome()  # on a GPU it may be late
        assert result is not None

        grads = {name: full_tensor(p.grad) for name, p in self.driver.model.named_parameters() if p.grad is not None}
        self._put(f"gradients-{len(self._steps)}", grads)

        settings = [
            _plain(group) for optimizer in self.trained_model.optimizers.all for group in optimizer.param_groups
        ]
        self._steps.append({"micros": self._losses.micros, "settings": settings})
        self._facts["gathers"] = self.gathering.used
        return super().end_step(batches, result)

    def maintain(self) -> None:
        self.trained_model.guard.check_structure()  # after every step, before a checkpoint fails for that reason
        super().maintain()

    def end_training(self) -> None:
        """Do nothing: a trial needs no weights."""

    def close(self, text: str | None = None) -> dict[str, Any]:
        """Return an empty summary: a trial writes none."""
        return {}

    # ---- around a micro-batch ----

    def _feed(self, micro_batches: Iterable[MicroBatch], count: int) -> Iterator[MicroBatch]:
        """Record the micro-batches as the source gives them, before a hook can change them."""
        return self._record_data(super()._feed(micro_batches, count))

    def _record_data(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches, each with a new note."""
        for micro in batches:
            self._losses.micros.append(
                {
                    "index": micro.index,
                    "padding": micro.padding,
                    "ids": [int(i) for i in micro.ids],
                    "rows": _rows(micro.data, micro.num_samples),
                    # Sums over the passes of a step.
                    "total": 0.0,
                    "weight": 0.0,
                    "metrics": {},
                    "drawn": [],
                }
            )
            yield micro

    # ---- between steps ----

    def _snapshot(self, step: int) -> None:
        """Write parameters, buffers and extra state as they are before step `step`."""
        # Full tensors, so that any two strategies can be compared. Collective, if they are sharded.
        parameters = {name: full_tensor(p.detach()) for name, p in self.driver.model.named_parameters()}
        self._put(f"parameters-{step}", parameters)
        # BatchNorm's running statistics are combined when a run needs them. Other buffers are compared as each rank has
        # them, since a difference between ranks is a mistake to find.
        for part in self.driver.parts:
            if isinstance(part, RunningStatistics):
                part.combine()

        self._put(f"buffers-{step}", dict(self.driver.model.named_buffers()))
        self._put(f"extra-{step}", {name: full_tensor(t) for name, t in self._extra().items()})
        self._snapshots.append({"digests": {name: digest(p)[:SHORT] for name, p in parameters.items()}})

        # A rank that is killed while it writes leaves the last complete record.
        path = self._folder / f"record-{self.runtime.world.rank}.json"
        files.write(path, json.dumps({"facts": self._facts, "steps": self._steps, "snapshots": self._snapshots}))

    def _extra(self) -> dict[str, Tensor]:
        """Return what the task or the script keeps besides the model: registered state and the task's attributes."""
        registered = self.checkpoints.state.registered
        own: dict[str, Any] = {f"state.{name}": stateful.state_dict() for name, stateful in registered.items()}

        # A moving average is often an attribute that no state_dict names, which is the mistake to find.
        for name, value in getattr(self._task, "__dict__", {}).items():
            state = value.state_dict() if isinstance(value, nn.Module) else value
            if value is not self.driver.model and isinstance(state, dict | Tensor | int | float):
                own[f"self.{name}"] = state

        tensors: dict[str, Tensor] = {}
        # More than this is a dataset in `self`, not state.
        most = 4 * sum(p.nbytes for p in self.driver.parameters.values()) + 2**20

        for name, value in own.items():
            packed: dict[str, Tensor] = {}
            try:
                plain = pack(value, name, packed)
            except UserError:  # more than tensors and plain values: it cannot be compared
                continue

            if sum(t.nbytes for t in packed.values()) <= most:
                tensors |= packed | dict(_numbers(plain, name))

        return tensors

    def _nudge(self) -> None:
        """Move every weight by up to one unit in the last place of the compute format."""
        with torch.no_grad():
            for p in self.driver.parameters.values():
                change = 2 * torch.rand(p.shape, generator=self._nudges, dtype=torch.float64) - 1
                p.mul_((1 + self.precision.eps(p.dtype) * change).to(p.device, torch.float64).to(p.dtype))

    def _put(self, name: str, tensors: dict[str, Tensor]) -> None:
        if self.runtime.is_main:
            save_file({key: _storable(t) for key, t in tensors.items()}, str(self._folder / f"{name}.safetensors"))


class RecordedLosses(StepPart):
    """Records the micro-batches of a step, with the loss of each and the generators that it draws from."""

    slot = "log"

    def begin(self) -> None:
        """Begin a step, before its batches are taken."""
        self.micros: list[dict[str, Any]] = []  # a note for each micro-batch that the source has given
        self._passes: Counter[int] = Counter()  # id of a note -> losses of its micro-batch so far

    def before_forward(self, micro: MicroBatch, progress: PassProgress) -> None:
        """Note the state of the generators after the engine seeds them and before the loss draws from them."""
        # The source may be ahead of the step, so the newest note need not belong to this micro-batch. In a later pass
        # of an own loop over the same batches, every note has losses already.
        notes = [note for note in self.micros if note["index"] == micro.index]
        self._note = min(notes, key=lambda note: self._passes[id(note)])
        self._passes[id(self._note)] += 1
        self._generators = _generators()

    def before_backward(self, loss: Loss, progress: PassProgress) -> None:
        """Add the loss to the note of its micro-batch."""
        note = self._note
        note["total"] += float(loss.total.detach())
        note["weight"] += float(loss.weight)

        for name, total, weight in metric_terms(loss) if loss.metrics else ():
            before = note["metrics"].get(name, [0.0, 0.0])
            note["metrics"][name] = [before[0] + float(total), before[1] + float(weight)]

        # A generator that has moved on was used by the loss.
        drawn = [name for name, state in _generators().items() if self._generators[name] != state]
        note["drawn"] = list(dict.fromkeys([*note["drawn"], *drawn]))


# ---- what is recorded ----


class _TwiceReader:
    """Reads every sample of a request twice."""

    def __init__(self, reader: SampleReader):
        self.dataset = reader.dataset
        self._reader = reader

    def __call__(self, request: BatchRequest) -> Any:
        return self._reader(request._replace(ids=[*request.ids, *request.ids]))


def _storable(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, in a format that numpy supports."""
    # numpy has no bfloat16; float32 holds every bfloat16 and float16 exactly.
    wide = tensor.detach().cpu()
    if wide.is_floating_point() and wide.element_size() < 4:
        wide = wide.float()

    return wide.clone(memory_format=torch.contiguous_format)


def _numbers(plain: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the counters and settings in a packed state, at any depth."""
    plain = float_from_json(plain)
    if isinstance(plain, int | float):
        yield name, torch.tensor(float(plain), dtype=torch.float64)
    elif isinstance(plain, dict | list):
        for key, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
            yield from _numbers(value, f"{name}.{key}")


def _tied(model: nn.Module) -> list[list[str]]:
    """Return the groups of names that share one parameter."""
    groups: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(p), []).append(name)

    return sorted(names for names in groups.values() if len(names) > 1)


def _generators() -> dict[str, Any]:
    """Return the state of each generator that a loss may draw from."""
    # Entries 1 and 2 are the words of numpy's generator, and the position in them.
    numpy_state: Any = np.random.get_state()
    states = {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "numpy": (numpy_state[1].tobytes(), numpy_state[2]),
        "random": hash(random.getstate()),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()

    return states


def _rows(data: Any, samples: int) -> list[str]:
    """Return a digest of every sample, or one of the full batch if not every tensor has a row for each sample."""
    tensors = [leaf for leaf in tree_leaves(data) if isinstance(leaf, Tensor)]
    if tensors and all(t.dim() and len(t) == samples for t in tensors):
        return [digest([t[i] for t in tensors])[:SHORT] for i in range(samples)]

    return [digest(data)[:SHORT]]


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group that may follow a schedule."""
    return {
        key: float(value) if isinstance(value, Tensor) else value
        for key, value in group.items()
        if isinstance(value, int | float | tuple | Tensor)
    }
