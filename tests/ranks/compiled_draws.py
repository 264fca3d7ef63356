"""Random runs that are trained twice, compiled and eagerly: what they have in common, and how the two are compared.

    python tests/ranks/compiled_draws.py 0 150                      the seeds 0 to 149
    python tests/ranks/compiled_draws.py 0 15 --backend inductor    with the compiler that users have

A seed says everything: the settings, what the model and the loss do, how many ranks there are, where the run is left
and resumed, and what compiles (`Draw.of`). Code that only torch's tracer has seen, or that autograd's has, is cheap,
and finds what is lost on the way; inductor is what rounds in another way.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if __name__ == "__main__":  # the folder of this package
    sys.path.insert(0, str(Path(__file__).parent.parent))

from lockstep import Sampled
from lockstep.config import resolve
from lockstep.engine import loop
from lockstep.engine.own_loop import OwnRun
from lockstep.engine.setup import open_run
from lockstep.observe.sinks import read_jsonl
from lockstep.parallel import apply
from lockstep.parallel.compiled import compiler, facts, payoff, targets
from lockstep.parallel.compiled.compilation import Compilation
from lockstep.runtime import context
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from ranks.support import QUIET, compile_events

WIDTH = 6
LIMIT = timedelta(seconds=150)  # for one run

# How far a compiled run may be from the eager one, relative to the norm of what is compared.
DOUBLE, SINGLE, HALF = 1e-8, 1e-3, 5e-2


# ---- what is drawn ----


@dataclass(frozen=True)
class Draw:
    """One random run."""

    seed: int
    backend: str
    ranks: int
    judged: bool  # as with compile=auto on a GPU
    keeps: bool  # compiled code stays, however slow it is
    by_hand: str  # own loop: "", "model" (the model alone is compiled), "function", or "passes"
    resume_at: int | None
    double: bool
    model: frozenset[str]  # what the model does
    loss: frozenset[str]  # what the loss does
    task: frozenset[str]  # what the hooks of the task do
    output: str
    depth: int
    ragged: bool
    dropout: float
    optimizer: str
    settings: dict[str, Any] = field(hash=False)

    @property
    def tolerance(self) -> float:
        if self.settings["precision"] != "fp32":
            return HALF
        return DOUBLE if self.double else SINGLE

    @classmethod
    def of(cls, seed: int, backend: str = "") -> Draw:
        """Return what a seed means. `backend`: the one to use; empty: a cheap one."""
        draw = random.Random(seed)
        maybe = lambda share: draw.random() < share
        density = draw.choice((0.3, 0.8, 1.4))  # much at once hides what is found first
        some = lambda traits, share: {trait for trait in traits if maybe(share * density)}

        # Always the same numbers are drawn, whatever backend was asked for.
        cheap = draw.choice(("eager", "aot_eager"))
        backend = backend or cheap
        ranks = draw.choice((1, 2))
        strategy = draw.choice(("ddp", "ddp", "ddp", "zero1", "fsdp", "fsdp-grads", "pp")) if ranks > 1 else "ddp"
        sharded = strategy not in ("ddp", "zero1")
        pipelined = strategy == "pp"
        by_hand = "" if pipelined or maybe(0.65) else draw.choice(("model", "function", "passes"))
        judged = not sharded and maybe(0.4)
        precision = draw.choice(("fp32", "fp32", "fp32", "bf16", "fp16"))
        dropout = 0.25 * (maybe(0.2) and backend == "eager" and not pipelined)
        ragged = maybe(0.35) and not pipelined
        steps = draw.randint(9, 12) if judged else draw.randint(3, 7)
        micro = draw.choice((2, 3, 4, 4, 8))
        settings: dict[str, Any] = {
            "strategy": strategy,
            "precision": precision,
            "steps": steps,
            "global_batch": draw.choice((8, 8, 12, 16)),
            "micro_batch": micro,
            "seed": draw.randrange(3),
            "log.every": draw.choice((1, 2, 5)),
            "tail": draw.choice(("short", "drop")),
            "checkpoint.every": draw.choice((2, 3)),
            "lr.schedule": draw.choice(("constant", "cosine")),
            "remat": "none" if pipelined else draw.choice(("none", "none", "full", "selective", "every-2")),
        }
        settings["micro_batch"] = min(micro, settings["global_batch"] // ranks)
        if maybe(0.4):
            settings |= draw.choice(({"clip.norm": 0.5}, {"clip.value": 0.1}, {"clip.adaptive": 0.05}))
        if maybe(0.3):
            settings["ema.decay"] = 0.7
        if maybe(0.6):
            settings |= {"evaluate.every": draw.choice((1, 2, 3)), "evaluate.batch": draw.choice((3, 4, 7))}
        if strategy == "ddp" and ranks > 1:
            options = ({}, {}, {"ddp.bucket_mb": 0.0001}, {"ddp.broadcast_buffers": True}, {"load_balance": [1, 2]})
            options += ({"ddp.find_unused_parameters": True},) * 2
            settings |= draw.choice(options)
        if maybe(0.15) and not pipelined and ragged:
            settings["data.balance"] = "length"

        # What the model, the loss and the hooks do.
        plain = pipelined or sharded
        model = some(
            ("batchnorm", "counter", "replaced", "calls", "aux", "offset", "plain"), 0.0 if pipelined else 0.15
        )
        model |= some(("hook", "prehook", "backward hook", "parameter hook", "tensor hook"), 0.12)
        model |= some(("checkpoint", "function", "frozen", "shared"), 0.0 if plain else 0.12)
        model |= some(("temperature", "options", "global", "random"), 0.1)
        loss = some(("break", "item", "branch", "calls", "keeps", "random", "in place", "weights"), 0.12)
        loss |= some(("twice", "no_grad", "adversarial"), 0.0 if pipelined else 0.1)
        loss |= some(("part",), 0.0 if plain else 0.15)
        loss |= some(("beta", "metrics", "scalar weight"), 0.3)
        loss |= some(("penalty",), 0.1 if judged and not sharded else 0.0)
        task = some(("temperature", "beta", "global", "options", "late hook", "removed hook", "eval block"), 0.15)
        task |= some(("clamp", "offset", "log", "before_backward", "before_batch", "unfreeze", "nan", "stop"), 0.12)
        task |= some(("calls the model", "added block hook", "forward", "modes"), 0.08)
        output = draw.choice(("tensor", "tensor", "dict", "tuple", "object", "loss"))
        output = "tensor" if pipelined else output
        if pipelined:
            model -= {"aux", "plain"}
            loss &= {"calls", "break", "item", "branch", "beta", "metrics", "scalar weight", "weights"}
            task -= {"forward", "calls the model", "clamp"}
        if sharded:
            # torch loses what a forward sets beside a hook on a tensor, and this code is not compared with eager.
            model -= {"tensor hook"}
        if by_hand:
            task -= {"unfreeze"}
        if sharded:
            task -= {"unfreeze"}
            model -= {"parameter hook"}
        if "unfreeze" in task:
            settings.pop("ddp.find_unused_parameters", None)
        if ranks > 1 and "part" in loss and strategy in ("ddp", "zero1"):
            settings.pop("load_balance", None)
            settings.pop("ddp.broadcast_buffers", None)
            settings.pop("ddp.bucket_mb", None)
            settings["ddp.find_unused_parameters"] = True
        resume_at = draw.randint(1, steps - 1) if maybe(0.25) else None
        # Code that only the tracer has seen keeps torch's own recomputation, which then draws other random numbers, and
        # cannot look up casts of autocast. No user's code is compiled in this way.
        if backend == "eager" and (precision != "fp32" or dropout):
            settings["remat"] = "none"
            model -= {"checkpoint"}
        if sharded or settings["remat"] != "none":
            settings["blocks"] = ["Block"]
        depth = draw.randint(1, 3)
        if pipelined or settings["remat"] == "every-2":
            depth = max(2, depth)
        if pipelined:
            settings.pop("ema.decay", None)
        if "load_balance" in settings:
            settings |= {"global_batch": 16, "micro_batch": min(2, settings["micro_batch"])}
        if "batchnorm" in model:
            settings["micro_batch"] = 2
        return cls(
            seed,
            backend,
            ranks,
            judged,
            maybe(0.6),
            by_hand,
            resume_at,
            precision == "fp32" and maybe(0.7),
            frozenset(model),
            frozenset(loss),
            frozenset(task),
            output,
            depth,
            ragged,
            dropout,
            draw.choice(("sgd", "momentum", "adamw")),
            settings,
        )

    def __str__(self) -> str:
        parts = [f"seed {self.seed}", self.backend, f"{self.ranks} rank(s)", "judged" if self.judged else "true"]
        parts += [f"by hand: {self.by_hand}"] * bool(self.by_hand) + [f"resumed at {self.resume_at}"] * bool(
            self.resume_at
        )
        parts += ["double"] * self.double + ["ragged"] * self.ragged + [f"dropout {self.dropout}"] * bool(self.dropout)
        parts += [f"model {sorted(self.model)}", f"loss {sorted(self.loss)}", f"hooks {sorted(self.task)}"]
        parts += [self.output, f"depth {self.depth}", self.optimizer]
        parts += [f"{key}={value}" for key, value in self.settings.items()]
        return ", ".join(parts)


# ---- the model ----

GLOBALS = {"scale": 1.0}
SCALE = 1.0
CALLS: list[str] = []  # what hooks have seen; without the calls of a trial


@dataclass
class Options:
    scale: float = 1.0


class Scaled(torch.autograd.Function):
    """A function whose gradient is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (1 + 0.1 * x.tanh())


@dataclass
class Output:
    prediction: Tensor
    hidden: Tensor


class Block(nn.Module):
    def __init__(self, dropout: float, index: int):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    """(batch, length, 5) -> a number for each row, in one of several containers."""

    def __init__(self, draw: Draw):
        super().__init__()
        self.traits, self.output = draw.model, draw.output
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block(draw.dropout, index) for index in range(draw.depth))
        self.norm = nn.BatchNorm1d(WIDTH) if "batchnorm" in draw.model else nn.Identity()
        self.out = nn.Linear(WIDTH, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("offset", torch.zeros(WIDTH), persistent=False)
        self.temperature = 1.0
        self.options = Options()
        self.average = torch.zeros(WIDTH)  # no buffer
        self.calls = 0
        self.aux: Any = None
        if "frozen" in draw.model:
            self.first.requires_grad_(False)
        if "shared" in draw.model and draw.depth > 1:
            self.blocks[-1].up.weight = self.blocks[0].up.weight

    def encode(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if "checkpoint" in self.traits:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        traits = self.traits
        if "counter" in traits and self.training:
            self.seen += len(x)
        if "calls" in traits:
            self.calls += 1
        hidden = self.encode(x).mean(1)
        if "function" in traits:
            hidden = Scaled.apply(hidden)
        if "replaced" in traits and self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0).to(self.mean.dtype)
        if "tensor hook" in traits and hidden.requires_grad:
            hidden.register_hook(lambda gradient: 1.25 * gradient)
        if "aux" in traits:
            self.aux = hidden.square().mean()
        if "offset" in traits:
            hidden = hidden + self.offset
        if "plain" in traits and self.training:
            self.average.mul_(0.9).add_(0.1 * hidden.detach().mean(0).float())
            hidden = hidden + 0.5 * self.average.to(hidden.dtype)
        if "temperature" in traits:
            hidden = hidden * self.temperature
        if "options" in traits:
            hidden = hidden * self.options.scale
        if "global" in traits:
            hidden = hidden * SCALE * GLOBALS["scale"]
        if "random" in traits and self.training:
            hidden = hidden * (1 + 0.1 * random.random())
        prediction = self.out(self.norm(hidden)).squeeze(-1)
        return self.packed(prediction, hidden, y)

    def packed(self, prediction: Tensor, hidden: Tensor, y: Tensor | None) -> Any:
        if self.output == "dict":
            return {"prediction": prediction, "hidden": hidden.detach(), "none": None}
        if self.output == "tuple":
            return prediction, (hidden, 3)
        if self.output == "object":
            return Output(prediction, hidden)
        if self.output == "loss" and y is not None:
            return (prediction - y).square().sum()
        return prediction


def prediction_of(output: Any) -> Tensor:
    if isinstance(output, dict):
        return output["prediction"]
    if isinstance(output, tuple):
        return output[0]
    return output.prediction if isinstance(output, Output) else output


# ---- the task ----


class Drawn(Task):
    """What a draw says, as a task."""

    def __init__(self, draw: Draw):
        self.draw = draw
        self.beta = 0.5
        self.calls = 0
        self.last: Any = None
        self.seen: list[Any] = []  # what the hooks of the run were given
        self.handles: list[Any] = []
        self.micros = 0

    # -- what is trained --

    def model(self) -> nn.Module:
        torch.manual_seed(11)
        self.net = net = Net(self.draw).to(torch.float64 if self.draw.double else torch.float32)
        traits = self.draw.model

        def count(module: nn.Module, args: Any, output: Any) -> None:
            CALLS.append("forward")

        def scale(module: nn.Module, args: Any) -> Any:
            return (1.1 * args[0], *args[1:])

        def backward(module: nn.Module, inputs: Any, outputs: Any) -> Any:
            CALLS.append("backward")
            return None if inputs[0] is None else (0.9 * inputs[0],)

        if "hook" in traits:
            net.out.register_forward_hook(count)
            net.blocks[0].register_forward_hook(lambda module, args, output: 1.05 * output)
        if "prehook" in traits:
            net.register_forward_pre_hook(scale)
        if "backward hook" in traits:
            net.blocks[-1].register_full_backward_hook(backward)
        if "parameter hook" in traits:
            net.out.weight.register_hook(lambda gradient: 0.5 * gradient)
        if "removed hook" in self.draw.task:
            self.handles.append(net.blocks[0].register_forward_hook(lambda module, args, output: 0.9 * output))
        return net

    def optimizer(self, model: nn.Module) -> Any:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.draw.optimizer == "adamw":
            # Large enough that the sign of a gradient that is nearly zero does not decide.
            return torch.optim.AdamW(parameters, lr=0.01, eps=1e-2)
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9 * (self.draw.optimizer == "momentum"))

    def samples(self, seed: int, count: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        dtype = torch.float64 if self.draw.double else torch.float32
        found = []
        for index in range(count):
            length = (3, 5, 2, 5, 4)[index // 3 % 5] if self.draw.ragged else 3
            x = torch.randn(length, 5, generator=generator, dtype=dtype)
            y = torch.randn((), generator=generator, dtype=dtype)
            if "nan" in self.draw.task and seed == 1 and index == 7:
                x[0, 0] = torch.nan
            found.append({"x": x, "y": y, "w": torch.tensor(index % 4 if "weights" in self.draw.loss else 1)})
        return found

    def data(self) -> Any:
        samples = Samples(self.samples(1, 42))
        return Sampled(samples, lengths=samples.lengths) if "data.balance" in self.draw.settings else samples

    def eval_data(self) -> Any:
        return Samples(self.samples(2, 10)) if "evaluate.every" in self.draw.settings else None

    def collate(self, samples: list[Any]) -> Any:
        x = nn.utils.rnn.pad_sequence([sample["x"] for sample in samples], batch_first=True)
        rest = {name: torch.stack([sample[name] for sample in samples]) for name in ("y", "w")}
        return {"x": x, **rest, "name": "a batch"}

    # -- the loss --

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        traits, net = self.draw.loss, self.net
        x, y, w = batch["x"], batch["y"], batch["w"]
        if "calls" in traits:
            self.calls += 1
        if "break" in traits:
            torch._dynamo.graph_break()
        if "in place" in traits:
            x.mul_(1.01)
        if "random" in traits:
            x = x * (1 + 0.1 * random.random() + 0.1 * np.random.rand())
        if "adversarial" in traits and torch.is_grad_enabled():
            x = self.moved(model, x)
        teacher = 0.0
        if "no_grad" in traits:
            with torch.no_grad():
                teacher = 0.1 * prediction_of(model(0.5 * x))

        if "part" in traits and bool(y[0] > 0):
            found = self.net.encode(x).sum((1, 2))
        elif self.draw.output == "loss" and not traits & {"weights", "keeps"}:
            total = model(x, y)
            return Loss(total, len(y), {"double": (2 * total.detach(), len(y))} if "metrics" in traits else {})
        else:
            found = prediction_of(model(x))

        errors = (found.to(y.dtype) - y - teacher).square() * w
        total = errors.sum()
        if "branch" in traits and (y > 1).any():
            total = 2 * total
        if "twice" in traits:
            total = total + 0.1 * prediction_of(model(x[:, :2] if self.draw.ragged else 2 * x)).square().sum()
        if "beta" in traits:
            total = total * self.beta
        if "aux" in self.draw.model and net.aux is not None and not ("part" in traits and bool(y[0] > 0)):
            total = total + net.aux
        if "penalty" in traits and torch.is_grad_enabled():
            inputs = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(prediction_of(model(inputs)).sum(), inputs, create_graph=True)
            total = total + gradient.square().sum()
        if "keeps" in traits:
            self.last = found.detach().mean()

        weight: Any = w.sum()
        if "item" in traits:
            weight = weight.item()
        elif "scalar weight" in traits and "weights" not in traits:
            weight = len(y)
        metrics: dict[str, Any] = {}
        if "metrics" in traits:
            metrics = {"close": (errors < 1).sum(), "mean": (found.detach().sum(), len(y)), "one": float(len(y))}
        return Loss(total, weight, metrics)

    def moved(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return inputs against which the model does worse."""
        inputs = x.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(prediction_of(model(inputs)).square().sum(), inputs)
        return x + 0.05 * gradient.sign()

    # -- the hooks --

    def hook_before_backward(self, run: Any, loss: Loss) -> Loss | None:
        self.seen.append(("loss", float(loss.total.detach()), float(loss.weight)))
        if "before_backward" in self.draw.task:
            return Loss(loss.total * 0.7, loss.weight, loss.metrics)
        return None

    def after_step(self, run: Any, result: Any) -> None:
        global SCALE
        traits, done, net = self.draw.task, run.steps_done, self.net
        self.seen.append(("step", done, result.loss, result.grad_norm, result.weight, result.applied, run.lr))
        if "log" in traits:
            run.log("beta", self.beta + done)
            if self.last is not None:
                run.log("last", self.last)
        with torch.no_grad():
            if "clamp" in traits:
                for parameter in net.parameters():
                    parameter.clamp_(-0.4, 0.4)
            if "offset" in traits:
                if done % 2:
                    net.offset.fill_(0.1 * done)
                else:
                    net.offset = torch.full_like(net.offset, 0.2 * done)
        if "temperature" in traits:
            net.temperature = 1 + 0.1 * done
        if "options" in traits:
            net.options.scale = 1 - 0.05 * done
        if "beta" in traits:
            self.beta = 0.5 + 0.1 * done
        if "global" in traits:
            SCALE = 1 + 0.1 * done
            GLOBALS["scale"] = 1 - 0.03 * done
        if done == 2:
            self.change(net)
        if "eval block" in traits:
            net.blocks[0].train(done % 3 != 1)
        if "modes" in traits:
            net.norm.eval() if done > 2 else net.norm.train()
        if "calls the model" in traits and self.draw.settings["strategy"] in ("ddp", "zero1"):
            rows = torch.ones(3, 3, 5, dtype=net.out.weight.dtype)
            self.seen.append(("called", float(prediction_of(net(rows)).sum().detach())))
        if "stop" in traits and done == self.draw.settings["steps"] - 1:
            run.stop("enough")

    def change(self, net: Net) -> None:
        """Change what the model calls, between two steps."""
        traits = self.draw.task
        for handle in self.handles:
            handle.remove()
        if "late hook" in traits:
            net.blocks[-1].register_forward_hook(lambda module, args, output: 1.2 * output)
        if "added block hook" in traits:
            net.register_forward_pre_hook(lambda module, args: (0.8 * args[0], *args[1:]))
        if "forward" in traits:
            block, inner = net.blocks[0], net.blocks[0].forward
            block.forward = lambda x: 0.95 * inner(x)  # pyrefly: ignore[bad-assignment]

    def after_eval(self, run: Any, metrics: Any) -> None:
        self.seen.append(("eval", run.steps_done, *(metrics[name] for name in sorted(metrics))))

    def state_dict(self) -> dict[str, Any]:
        return {"beta": self.beta, "calls": self.calls, "micros": self.micros}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.beta, self.calls, self.micros = state["beta"], state["calls"], state["micros"]


class Prepared(Drawn):
    """Hooks that pipelines do not allow, or micro-batches of balanced lengths."""

    def first_steps(self, names: Any) -> Any:
        return {name: 2 for name in names if name.startswith("first")} if "unfreeze" in self.draw.task else {}

    def before_backward(self, run: Any, loss: Loss) -> Loss | None:
        return self.hook_before_backward(run, loss)

    def before_batch(self, run: Any, micro: Any) -> None:
        self.micros += 1
        if "before_batch" in self.draw.task:
            micro.data = {**micro.data, "x": micro.data["x"] * 1.02}


class Samples:
    """A list, as most datasets are."""

    def __init__(self, rows: list[Any]):
        self.rows = rows
        self.lengths = np.array([len(row["x"]) for row in rows])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return {name: value.clone() for name, value in self.rows[index].items()}


def train_by_hand(run: OwnRun, task: Drawn) -> None:
    """The task in a loop of the user's."""
    draw = task.draw
    plain = task.model()
    model, _ = run.setup(plain, task.optimizer(plain))
    loss = run.compile(task.loss) if draw.by_hand == "function" else task.loss
    passes = 2 if draw.by_hand == "passes" else 1
    for step in run.steps(task.data(), task.collate, passes=passes):
        for number in range(passes):
            for batch in step:
                found = loss(model, batch)
                task.seen.append(("loss", float(found.total.detach()), float(found.weight)))
                step.backward(found.total, found.weight, **found.metrics)
            result = step.measure() if number + 1 < passes else step.apply()
        task.after_step(run, result)
        if step.number % draw.settings.get("evaluate.every", 1000) == 0:
            found = run.evaluate(Samples(task.samples(2, 10)), task.loss, task.collate)
            task.seen.append(("eval", step.number, *(found[name] for name in sorted(found))))


# ---- one run ----


def trained(world: World, store: Any, folder: str, draw: Draw, compiled: bool, steps: int) -> dict[str, Any]:
    """A job: train, and return what is compared."""
    global SCALE
    import lockstep.parallel.compiled.compilation  # noqa: F401

    SCALE, GLOBALS["scale"] = 1.0, 1.0
    CALLS.clear()
    values = {**QUIET, **draw.settings, "compile": compiled, "run_dir": folder, "checkpoint.keep": 50}
    values |= {"hang.first": 60, "threads": 1, "resume": "auto"}
    if draw.resume_at and steps == draw.resume_at:
        values["steps"] = steps
    if compiled and draw.judged:
        values["compile"] = "auto"
    resolved = resolve([("test", values)])
    torch._dynamo.reset()
    plain = draw.settings["strategy"] == "pp" or "data.balance" in draw.settings
    task = Drawn(draw) if plain else Prepared(draw)
    with ExitStack() as stack:
        for change in changes(draw, folder, task):
            stack.enter_context(change)
        runtime = stack.enter_context(context.start(world, resolved.config, store))
        builder = open_run(resolved, runtime, "test")
        events = compile_events(builder)
        if draw.by_hand:
            run = OwnRun(builder)
            train_by_hand(run, task)
            run.close()
        else:
            loop.fit(task, builder)
        buffers = {name: value.clone() for name, value in task.net.named_buffers()}

    return {
        "events": events,
        "seen": task.seen,
        "calls": list(CALLS),
        "counted": {"task": task.calls, "micro-batches": task.micros, "model": task.net.calls},
        "buffers": buffers,
        "modes": [module.training for module in task.net.modules()],
    }


def changes(draw: Draw, folder: str, task: Drawn) -> Iterator[Any]:
    """Yield what stands in for a GPU and for its compiler."""
    backend = torch._dynamo.lookup_backend(draw.backend)
    compile_module, try_to_compile = nn.Module.compile, Compilation.run

    def compile_with(module: nn.Module, *args: Any, **options: Any) -> None:
        compile_module(module, *args, **{"backend": backend, **options})

    def without_counting(self: Compilation, *args: Any) -> Any:
        """The trial of compiled code calls the model more often, which hooks see."""
        before, model_calls = len(CALLS), task.net.calls
        try:
            return try_to_compile(self, *args)
        finally:
            del CALLS[before:]
            assert task.net.calls == model_calls

    yield patch.object(targets, "BACKEND", draw.backend)
    yield patch.object(nn.Module, "compile", compile_with)
    yield patch.object(Compilation, "run", without_counting)
    yield patch.object(facts, "history_path", lambda: Path(folder).parent / f"{draw.seed}.json")
    if draw.keeps:
        yield patch.object(compiler, "SLOWER", 1e9)
    if draw.judged:
        wants = apply.wants_compile
        yield patch.object(
            apply, "wants_compile", lambda config, runtime: config.compile == "auto" or wants(config, runtime)
        )
        estimates = {"START_S": 0.0, "COLD_S": 0.0, "LAYER_S": 0.0, "BLOCK_S": 0.0, "OPERATION_S": 0.0}
        yield patch.multiple(payoff, **estimates, MOST_LOST=1e6)


# ---- two runs ----


@dataclass
class Found:
    """What a draw has shown."""

    draw: Draw
    differences: list[str]
    events: list[str]
    seconds: float
    refused: str = ""  # why the eager run failed: then there is nothing to compare

    @property
    def compiled(self) -> str:
        """What was compiled last."""
        return (self.events or ["nothing is decided"])[-1]


def try_draw(pool: Any, draw: Draw, folder: Path) -> Found:
    """Train eagerly and compiled, and compare."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        eager = run_of(pool, draw, folder / "eager", False)
    except Exception as error:
        return Found(draw, [], [], time.monotonic() - began, refused=f"{type(error).__name__}: {error}")
    try:
        found = run_of(pool, draw, folder / "compiled", True)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Found(draw, [f"the compiled run fails: {text}"], [], time.monotonic() - began)

    differences = compare(draw, eager, found, folder)
    return Found(draw, differences, found[0]["events"], time.monotonic() - began)


def run_of(pool: Any, draw: Draw, folder: Path, compiled: bool) -> list[dict[str, Any]]:
    """Train on all ranks, in one or two processes after another."""
    parts = [draw.resume_at] if draw.resume_at else []
    results: list[dict[str, Any]] = []
    for steps in [*parts, draw.settings["steps"]]:
        job = partial(trained, folder=str(folder), draw=draw, compiled=compiled, steps=steps)
        each = pool.run(job, world=draw.ranks, limit=LIMIT)
        if not results:
            results = each
        else:
            results = [
                {
                    **new,
                    "seen": [*old["seen"], *new["seen"]],
                    "calls": [*old["calls"], *new["calls"]],
                    "events": [*old["events"], *new["events"]],
                }
                for old, new in zip(results, each, strict=True)
            ]
    return results


def compare(draw: Draw, eager: list[dict[str, Any]], found: list[dict[str, Any]], folder: Path) -> list[str]:
    """Return every difference between the two runs."""
    problems = []
    for rank, (a, b) in enumerate(zip(eager, found, strict=True)):
        for name in ("calls", "counted", "modes"):
            if a[name] != b[name]:
                problems.append(f"rank {rank}: {name}: eager {brief(a[name])}, compiled {brief(b[name])}")
        problems += [f"rank {rank}: {text}" for text in numbers_apart(a["seen"], b["seen"], draw.tolerance)]
        problems += [
            f"rank {rank}: buffer {text}" for text in tensors_apart(a["buffers"], b["buffers"], draw.tolerance)
        ]

    files = [load_file(folder / name / "model.safetensors") for name in ("eager", "compiled")]
    problems += [f"weights: {text}" for text in tensors_apart(*files, draw.tolerance)]
    problems += records_apart(folder, draw.tolerance)
    return problems


def brief(value: Any) -> str:
    if isinstance(value, list):
        return str({str(item): value.count(item) for item in set(value)})
    return str(value)


def close(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, float | int) and isinstance(b, float | int):
        if a != a or b != b:
            return (a != a) == (b != b)
        return a == b or abs(a - b) <= tolerance * max(abs(a), abs(b), 0.1)
    return a == b


def numbers_apart(a: list[Any], b: list[Any], tolerance: float) -> list[str]:
    """Compare what the hooks were given. The first difference says enough."""
    if len(a) != len(b):
        return [f"the hooks were called {len(b)} times, and eagerly {len(a)} times"]
    for number, (first, second) in enumerate(zip(a, b, strict=True)):
        alike = len(first) == len(second) and all(close(x, y, tolerance) for x, y in zip(first, second, strict=True))
        if not alike:
            return [f"call {number} of the hooks: eager {first}, compiled {second}"]
    return []


def tensors_apart(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> list[str]:
    if a.keys() != b.keys():
        return [f"names: only eager {sorted(a.keys() - b.keys())}, only compiled {sorted(b.keys() - a.keys())}"]
    found = []
    for name, value in a.items():
        other = b[name]
        if value.shape != other.shape or value.dtype != other.dtype:
            found.append(f"{name}: eager {value.dtype} {[*value.shape]}, compiled {other.dtype} {[*other.shape]}")
            continue
        if not value.is_floating_point():
            if not torch.equal(value, other):
                found.append(f"{name}: eager {value}, compiled {other}")
            continue
        distance, size = float((value.double() - other.double()).norm()), max(float(value.double().norm()), 0.1)
        if torch.isnan(value).any() or torch.isnan(other).any():
            if not torch.equal(torch.isnan(value), torch.isnan(other)):
                found.append(f"{name}: NaN in one of them")
        elif distance > tolerance * size:
            found.append(f"{name}: off by {distance / size:.2g}")
    return found


def records_apart(folder: Path, tolerance: float) -> list[str]:
    """Compare the log lines: losses, metrics and what was logged."""
    lines = []
    for name in ("eager", "compiled"):
        records = [record for record in read_jsonl(folder / name / "metrics.jsonl") if "event" not in record]
        lines.append([flat(record) for record in records])
    if len(lines[0]) != len(lines[1]):
        return [f"{len(lines[1])} log lines, and eagerly {len(lines[0])}"]
    for a, b in zip(*lines, strict=True):
        if a.keys() != b.keys():
            return [f"log line: only eager {sorted(a.keys() - b.keys())}, only compiled {sorted(b.keys() - a.keys())}"]
        for name, value in a.items():
            if not close(value, b[name], tolerance):
                return [f"log line {a['step']}: {name}: eager {value}, compiled {b[name]}"]
    return []


# What depends on time and memory.
UNSTABLE = ("time", "seconds", "second", "memory", "per_", "wait", "share", "rank", "mfu", "host", "_s", "tflops")


def flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in record.items():
        name = prefix + key
        if prefix != "metrics." and any(part in name for part in UNSTABLE):
            continue
        if isinstance(value, dict):
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found


# ---- as a script ----


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare random compiled runs with eager ones.")
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int)
    parser.add_argument("--backend", default="", help="inductor, eager or aot_eager; without it a cheap one is drawn")
    parser.add_argument("--log", type=Path, help="append a line of JSON for each draw")
    options = parser.parse_args()

    from pool import COMPILER, Pool
    from ranks import compiled_draws as draws  # by its name, which the ranks can import

    pool = Pool()
    pool.preload(*COMPILER)
    failed, refused = [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.first, options.end):
            draw = draws.Draw.of(seed, options.backend)
            found = draws.try_draw(pool, draw, Path(folder) / str(seed))
            word = "refused" if found.refused else "DIFFERS" if found.differences else "same"
            print(f"{seed:5d} {word:8s} {found.seconds:5.1f} s  {found.compiled[:150]}", flush=True)
            for difference in found.differences:
                print("      ", difference, flush=True)
            if found.differences or found.refused:
                print("      ", draw, found.refused, flush=True)
            (failed if found.differences else refused if found.refused else []).append(seed)
            if options.log:
                record = {"seed": seed, "draw": str(draw), "found": word, "events": found.events}
                record |= {"differences": found.differences, "refused": found.refused}
                with options.log.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    pool.close()
    print(f"{options.end - options.first} draws: differ {failed}; nothing to compare {refused}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
