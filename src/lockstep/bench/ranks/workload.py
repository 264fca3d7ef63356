"""The default workload, if no target is named: a GPT of 2M parameters (`gpt`) and a small MLP (`mlp`), on random data.

They are large enough to show communication and small enough for two CPU cores. `settings_of` makes the settings of a
run that trains and does nothing else: no checkpoints, no evaluations, no end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import targets
from lockstep.config import ONLY_TRAINING, Resolved, resolve_for
from lockstep.task import Loss, Task

MANY = 10**6  # steps: no loop ends by itself
OWN_BATCH = 32  # samples per step, for a target that names no batch


class Block(nn.Module):
    """Attention and an MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

        # Queries, keys and values come from one matrix.
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, time, width] to the same shape."""
        b, t, w = x.shape
        projected = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads)

        # Queries, keys and values: [batch, heads, time, width / heads] each.
        q, k, v = projected.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)

        # The heads side by side again: [batch, time, width].
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder with learned positions."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, context: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of every next token: [batch, time] ids -> [batch, time, vocabulary]."""
        # The positions [time, width] are added to every sample of the batch.
        embedded = self.token(ids) + self.position.weight[: ids.shape[1]]
        return self.head(self.blocks(embedded))


class GPTTask(Task):
    """A GPT on random tokens; about 2M parameters."""

    unit = "token"
    defaults = {"global_batch": 32}

    def __init__(self, width: int = 192, layers: int = 4, heads: int = 4, context: int = 64, samples: int = 4096):
        self.width = width
        self.layers = layers
        self.heads = heads
        self.context = context
        self.samples = samples

    def model(self) -> nn.Module:
        return GPT(256, self.width, self.layers, self.heads, self.context)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def data(self) -> TensorDataset:
        """Return inputs and targets, [samples, context] each: the target of a token is the next one."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 256, (self.samples, self.context + 1), generator=generator)
        return TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        """Return the cross-entropy of all targets.

        batch: inputs and targets, [batch, time] ids; of the MLP below, points [batch, 64] and labels [batch]
        """
        x, y = batch
        logits = model(x).flatten(0, -2)  # [targets, classes]
        return Loss(F.cross_entropy(logits, y.flatten(), reduction="sum"), y.numel())


class MLPTask(GPTTask):
    """An MLP that is so small that a step is mostly overhead."""

    unit = "sample"
    defaults = {"global_batch": 32}

    def __init__(self, width: int = 128, samples: int = 65536):
        self.width = width
        self.samples = samples

    def model(self) -> nn.Module:
        w = self.width
        return nn.Sequential(nn.Linear(64, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 10))

    def data(self) -> TensorDataset:
        # Ten classes of random points, [samples, 64]: there is nothing to learn.
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(0, 10, (self.samples,), generator=generator)
        return TensorDataset(torch.randn(self.samples, 64, generator=generator), labels)


BUILT_IN: dict[str, type[Task]] = {"gpt": GPTTask, "mlp": MLPTask}


def load(target: str) -> type[Task]:
    """Return the class of a target of `lockstep bench`."""
    return BUILT_IN.get(target) or targets.load_class(target)


def settings_of(kind: type[Task], layers: Sequence[Any], values: dict[str, Any]) -> Resolved:
    """Resolve the settings of a run that goes on for as long as it is asked to; `values` are the strongest layer.

    What was typed is kept if the benchmark has no need for another value.
    """
    # `...` as a value takes a setting out of this layer, so that the layers below decide.
    wanted = {**ONLY_TRAINING, "steps": MANY, "goals": [], **values}
    last = {key: value for key, value in wanted.items() if value is not ...}

    # Batches and lengths exclude each other: the benchmark's settings replace the task's.
    for one, other in (("steps", "epochs"), ("global_batch", "local_batch"), ("local_batch", "global_batch")):
        if one in last:
            last.setdefault(other, None)

    return resolve_for(kind.defaults, kind.presets, [*layers, ("bench", last)])


def batch_of(arguments: Mapping[str, Any]) -> int:
    """Return the samples per step that the user or else the target itself asks for on one rank."""
    if arguments["batch"]:
        return arguments["batch"]

    kind = load(arguments["target"])
    config = resolve_for(kind.defaults, kind.presets, arguments["layers"]).config
    return config.global_batch or config.local_batch or OWN_BATCH
