"""Small models of every kind that exact mode must carry, and a run whose bits can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.engine import loop
from lockstep.engine.run import Run
from lockstep.engine.setup import open_run
from lockstep.observe.sinks import read_jsonl
from lockstep.runtime import context
from lockstep.runtime.shards import full_tensor
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from ranks.support import configured

WORDS, WIDTH, LENGTH = 13, 12, 100


class Perceptron(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 17), nn.Tanh(), nn.Linear(17, WORDS))


class Transformer(nn.Module):
    """With dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 19, dropout=0.2, batch_first=True)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(9, WORDS)
        self.lstm = nn.LSTM(WIDTH, 9, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class Convolutional(nn.Module):
    """Over the sequence, with GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(6, WORDS)
        self.conv, self.norm = nn.Conv1d(WIDTH, 6, 3, padding=1), nn.GroupNorm(3, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.embed(tokens).transpose(1, 2))
        return self.head(F.relu(self.norm(x)).transpose(1, 2))


class TiedAndFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(torch.tanh(self.inner(x) + self.frozen(x)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Perceptron,
    "transformer": Transformer,
    "lstm": Recurrent,
    "conv": Convolutional,
    "tied": TiedAndFrozen,
}


@dataclass(frozen=True)
class Tokens(Task):
    """The next token, with ragged weights that are no whole numbers."""

    name: str
    kind: str = "adamw"
    network: Callable[[], nn.Module] | None = None

    def model(self) -> nn.Module:
        return (self.network or MODELS[self.name])()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.kind == "sgd":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=0.01, fused=True)

    def data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, WORDS, (LENGTH, 8), generator=generator)
        return TensorDataset(tokens, torch.rand(LENGTH, 7, generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, weights = batch
        logits = model(tokens[:, :-1]).float()
        each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        right = (logits.argmax(-1) == tokens[:, 1:]).sum()
        total = (each * weights.flatten()).sum()
        return Loss(total, weights.sum(), {"accuracy": (right, weights.numel()), "noise": torch.rand(()).item()})

    def eval_data(self) -> TensorDataset:
        return self.data()


def bits(world: World, store: Any, task: Task, values: dict[str, Any]) -> dict[str, Any]:
    """A job: digests of all that a run ended with, and of what it logged."""
    resolved = configured(
        {"steps": 30, "log.every": 3, "checkpoint.at_end": False, "checkpoint.minutes": None} | values
    )
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test")
        summary = loop.fit(task, builder)
        assert builder.run is not None
        told = {"eval": repr(summary["eval_loss"]), "skipped": summary["skipped"]}
        return digests(builder.run) | told


def digests(run: Run) -> dict[str, Any]:
    tensors = {name: found.tensor for name, found in run.checkpoints.state.capture().tensors.items()}
    if run.config.strategy == "zero1" and not run.runtime.world.alone:  # each rank has the moments of its own part
        tensors = {name: t for name, t in tensors.items() if name.startswith("model.")}
    held = {name: full_tensor(t).detach().cpu() for name, t in sorted(tensors.items())}
    lines = read_jsonl(run.folder.path / "metrics.jsonl") if run.runtime.is_main else []
    logged = [[line["step"], line["loss"], line["weight"], line["grad_norm"], line["metrics"]] for line in lines]
    return {
        "weights": _sha({n: t for n, t in held.items() if n.startswith("model.")}),
        "moments": _sha({n: t for n, t in held.items() if not n.startswith("model.")}),
        "logged": repr(logged),
        "each": {name: _sha({name: t}) for name, t in held.items()},
    }


def _sha(tensors: dict[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name, tensor in tensors.items():
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
