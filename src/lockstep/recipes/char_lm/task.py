"""The task: predict the next character of Python source code.

The text is the source of Python's own standard library, so nothing is downloaded. It is the smallest complete recipe,
and a good one to read first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.recipes.char_lm.data import SYMBOLS, Windows, decode, encode, library_text, split
from lockstep.recipes.char_lm.model import GPT
from lockstep.recipes.options import check_options, uneven_heads
from lockstep.task import Loss, Task

# Long enough to set an indentation and a style; after a bare "def " a small model loses itself in spaces.
PROMPT = '''class Reader:
    """Read lines from a file."""

    def __init__(self, path):
        self.path = path

    def '''


# The smallest values of options that count something. `uneven_heads` checks the heads.
COUNTS = dict.fromkeys(("width", "layers", "context", "max_bytes", "eval_bytes"), 1)


class CharLM(Task):
    """A GPT on the characters of the standard library; its loss is in nats per character."""

    unit = "character"
    defaults = {
        "preset": "cpu",
        "clip": {"norm": 1.0},
        "lr": {"schedule": "cosine", "min_ratio": 0.05},
    }
    presets = {
        # Seconds, for tests: it learns that code is mostly spaces and lower case, no more.
        "tiny": {
            "steps": 40,
            "global_batch": 8,
            "lr": {"peak": 5e-3, "warmup": 4},
            "evaluate": {"every": 20, "batch": 16},
            "task": {
                "width": 32,
                "layers": 2,
                "heads": 2,
                "context": 32,
                "max_bytes": 200_000,
                "eval_bytes": 8192,
            },
        },
        # The demo: most of an epoch, in little more than a minute on two free CPU cores.
        "cpu": {
            "steps": 800,
            "global_batch": 16,
            "lr": {"peak": 3e-3, "warmup": 40},
            "evaluate": {"every": 200, "batch": 32},
            "task": {"width": 128, "layers": 3, "heads": 4, "context": 128, "max_bytes": 2_000_000},
        },
        # Sized for one large GPU: the whole text about fifteen times, hence the dropout.
        "gpu": {
            "steps": 2000,
            "global_batch": 128,
            # One batch shape, one compilation.
            "tail": "drop",
            "lr": {"peak": 1e-3, "warmup": 100},
            "evaluate": {"every": 200, "batch": 128},
            "precision": "bf16",
            "task": {
                "width": 512,
                "layers": 8,
                "heads": 8,
                "context": 512,
                "dropout": 0.2,
                "max_bytes": 9_000_000,
                "eval_bytes": 393_216,
            },
        },
    }

    def __init__(
        self,
        *,
        width: int = 128,
        layers: int = 3,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.0,
        max_bytes: int = 2_000_000,
        eval_bytes: int = 65_536,
    ):
        """Make the task. `max_bytes` caps the text that is read, `eval_bytes` the part that an evaluation looks at."""
        self.width = width
        self.layers = layers
        self.heads = heads
        self.context = context
        self.dropout = dropout
        self.max_bytes = max_bytes
        self.eval_bytes = eval_bytes

        # All problems are reported together.
        problems = [*uneven_heads(width, heads)]
        if not 0 <= dropout < 1:
            problems.append(UserError(f"task.dropout={dropout} is not in [0, 1)", "", "set task.dropout=0.1"))

        check_options(vars(self), problems, smallest=COUNTS)

    def model(self) -> GPT:
        return GPT(len(SYMBOLS), self.width, self.layers, self.heads, self.context, self.dropout)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW. Only matrices decay: a rare character's embedding would fade between its uses."""
        decay = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
        rest = [m.weight for m in model.modules() if isinstance(m, nn.RMSNorm | nn.Embedding)]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.99), fused=True)

    def data(self) -> Windows:
        training, _ = self._split()
        return Windows(training, self.context)

    def eval_data(self) -> Windows:
        _, validation = self._split()
        return Windows(validation, self.context, limit=max(1, self.eval_bytes // self.context))

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        total, weight, _, _ = self._cross_entropy(model, batch)
        return Loss(total, weight)

    def eval_loss(self, model: nn.Module, batch: Tensor) -> Loss:
        total, weight, logits, targets = self._cross_entropy(model, batch)
        return Loss(total, weight, {"accuracy": (logits.argmax(-1) == targets).sum()})

    def show(self, model: Any) -> str:
        """Return the prompt and what the model appends, always with the same random numbers.

        It appends 300 characters, or three times its context if that is less: a tiny model would take too long.
        """
        prompt = encode(PROMPT).long()[None].to(model.head.weight.device)
        generator, count = torch.Generator().manual_seed(1), min(300, 3 * self.context)
        return decode(model.generate(prompt, count=count, temperature=0.6, top_k=40, generator=generator)[0])

    def _cross_entropy(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int, Tensor, Tensor]:
        """Return the summed cross entropy of `batch` (B, T + 1), its weight, logits (B*T, V) and targets (B*T)."""
        # Batches travel to the device as uint8.
        ids = batch.long()
        targets = ids[:, 1:].flatten()

        # A sum over thousands of terms needs float32.
        logits = model(ids[:, :-1]).flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, targets, reduction="sum"), targets.numel(), logits, targets

    def _split(self) -> tuple[Tensor, Tensor]:
        training, validation = split(encode(library_text(self.max_bytes)))
        if len(validation) <= self.context:
            raise UserError(
                f"task.context={self.context} is too long for {len(validation)} characters of validation text",
                "a window takes one character more than the context",
                "set a larger task.max_bytes, or a smaller task.context",
            )

        return training, validation
