"""Three programs that everybody knows, at full speed: GPT-2 of transformers, nanoGPT's model, torchvision's ResNet-50.

GPT-2 has 124M parameters and no dropout; its tokens are random. nanoGPT is no package, so its model is written here,
with the shape and the settings of `train_shakespeare_char.py`: 6 layers of width 384, 64 windows of 256 characters,
dropout 0.2. The text is Python's own library. The pictures are random bytes, so that neither a disk nor a JPEG decoder
is measured; eight workers hand them over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep.bench.intervals import estimate, ratio
from lockstep.bench.results import cell, table_lines
from lockstep.recipes.char_lm.data import SYMBOLS, encode, library_text
from lockstep.task import Loss, Task
from public.bounded import Rows
from public.cases import per_token
from public.loops import (
    BLOCK,
    Batches,
    by_hand,
    empty_cache,
    load_compiler,
    lockstep_loop,
    print_decisions,
    printed_rounds,
    started,
    tensor_batches,
    warm_up,
)

# ---- GPT-2 of transformers ----


class GPT2(Task):
    """GPT-2 124M, 32 x 1024 tokens, with the loss that most people write around it."""

    unit = "token"
    steps = 5000
    block = BLOCK  # steps of a turn
    workers = 0
    ways = ("compiled",)  # an eager step takes as long as three compiled ones

    def __init__(self, tiny: bool = False):
        self.tiny = tiny
        self.context, self.batch, self.words = (16, 4, 100) if tiny else (1024, 32, 50_257)

    @property
    def units(self) -> int:
        """Tokens of a step."""
        return self.batch * self.context

    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        small = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}
        quiet = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**quiet, **(small if self.tiny else {})))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def data(self) -> TensorDataset:
        draw = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randint(self.words, (512, self.context + 1), generator=draw))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        (ids,) = batch
        return per_token(model(ids[:, :-1], use_cache=False).logits, ids[:, 1:])

    def batches(self, device: torch.device) -> Batches:
        return tensor_batches(self.data().tensors, self.batch)


# ---- nanoGPT's character model ----


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.drop1, self.drop2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        p = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.drop1(self.out(attended.transpose(1, 2).flatten(-2)))
        return x + self.drop2(self.down(F.gelu(self.up(self.norm2(x)))))


class CharGPT(nn.Module):
    """Maps character ids (batch, time) to logits (batch, time, symbols)."""

    def __init__(self, symbols: int, width: int, layers: int, heads: int, context: int, dropout: float):
        super().__init__()
        self.tokens, self.places = nn.Embedding(symbols, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, symbols, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(draw_weights)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids) + self.places.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def draw_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


class Windows(Dataset):
    """Every window of a text, and the same window one character later."""

    def __init__(self, ids: Tensor, context: int):
        self.ids = ids
        self.context = context

    def __len__(self) -> int:
        return len(self.ids) - self.context

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        window = self.ids[start : start + self.context + 1]
        return window[:-1], window[1:]


class NanoGPT(Task):
    """nanoGPT's smallest configuration."""

    unit = "token"
    steps = 5000
    block = BLOCK
    workers = 0
    ways = ("eager", "compiled")

    def __init__(self, tiny: bool = False):
        self.context, self.batch, self.width, self.layers = (16, 4, 24, 2) if tiny else (256, 64, 384, 6)
        self.text_bytes = 20_000 if tiny else 1_115_394  # as many as Shakespeare's works in nanoGPT

    @property
    def units(self) -> int:
        """Tokens of a step."""
        return self.batch * self.context

    def model(self) -> nn.Module:
        return CharGPT(len(SYMBOLS), self.width, self.layers, 6, self.context, dropout=0.2)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)

    @cached_property
    def ids(self) -> Tensor:
        return encode(library_text(self.text_bytes)).long()

    def data(self) -> Windows:
        return Windows(self.ids, self.context)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum"), y.numel())

    def batches(self, device: torch.device) -> Batches:
        """Yield random windows, stacked as nanoGPT does it."""
        while True:
            starts = torch.randint(len(self.ids) - self.context, (self.batch,)).tolist()
            x = torch.stack([self.ids[start : start + self.context] for start in starts])
            y = torch.stack([self.ids[start + 1 : start + 1 + self.context] for start in starts])
            yield [[x, y]]


# ---- ResNet-50 ----


class Pictures(Dataset):
    """Random pictures of bytes, (3, side, side), out of a few that are kept in memory."""

    def __init__(self, count: int, side: int):
        draw = torch.Generator().manual_seed(0)
        self.kept = torch.randint(256, (64, 3, side, side), dtype=torch.uint8, generator=draw)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.kept[index % len(self.kept)], index % 1000


class ResNet(Task):
    """torchvision's ResNet-50, pictures of 224 x 224, channels last."""

    unit = "picture"
    steps = 5000
    block = 2 * BLOCK  # its workers have read the first 16 batches of a turn before it begins
    ways = ("compiled",)

    def __init__(self, tiny: bool = False):
        self.tiny = tiny
        self.batch, self.side, self.workers = (4, 32, 1) if tiny else (256, 224, 8)
        if tiny:
            self.block = BLOCK

    @property
    def units(self) -> int:
        return self.batch

    def model(self) -> nn.Module:
        from torchvision.models import resnet18, resnet50

        model = resnet18() if self.tiny else resnet50()
        return model.to(memory_format=torch.channels_last)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def data(self) -> Pictures:
        return Pictures(512 if self.tiny else 1_281_167, self.side)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        pictures, labels = batch
        pictures = (pictures.float() / 127.5 - 1.0).to(memory_format=torch.channels_last)
        return Loss(F.cross_entropy(model(pictures), labels, reduction="sum"), len(labels))

    def batches(self, device: torch.device) -> Batches:
        pin = device.type == "cuda"
        options: dict[str, Any] = {"num_workers": self.workers, "pin_memory": pin, "drop_last": True}
        while True:
            for batch in DataLoader(self.data(), self.batch, shuffle=True, **options):
                yield [batch]


# ---- the measurement ----

PROGRAMS: dict[str, Callable[[bool], Any]] = {"gpt2": GPT2, "nanogpt": NanoGPT, "resnet": ResNet}


def measure(name: str, rows: Rows, turns: int, tiny: bool) -> None:
    """Let loops by hand, one of them compiled, and Lockstep take turns."""
    task = PROGRAMS[name](tiny)
    with started() as (runtime, folder):
        load_compiler(runtime.device)
        # Memory is enough for all of them, and each gets warm before any is timed.
        loops: dict[str, Iterator[Any]] = {}
        own_gb: dict[str, float] = {}
        settings = {"global_batch": task.batch, "steps": task.steps, "data.workers": task.workers}
        with empty_cache(folder):
            loops["lockstep"] = lockstep_loop(task, runtime, folder, task.block, **settings)
            own_gb["lockstep"] = warm("lockstep", loops["lockstep"], task, rows, name, turns=1 if tiny else 5)
            print_decisions(folder)

        for way in task.ways:
            compile_model = nn.Module.compile if way == "compiled" and not tiny else None
            with empty_cache(folder):
                batches = task.batches(runtime.device)
                loops[way] = by_hand(task, batches, runtime.device, compile_model, task.block)
                own_gb[way] = warm(way, loops[way], task, rows, name, turns=1 if tiny else 2)

        rounds = printed_rounds(loops, turns)
        base = [each["compiled"].seconds for each in rounds]
        for way in loops:
            seconds = [each[way].seconds for each in rounds]
            rows.add(
                case=name,
                way=way,
                per_s=estimate([task.block * task.units / second for second in seconds]),
                unit=task.unit,
                against_compiled=ratio(base, seconds),
                own_gb=own_gb[way],
                memory_against_compiled=own_gb[way] / own_gb["compiled"] if own_gb["compiled"] else None,
                peak_gb=max(each[way].peak_bytes for each in rounds) / 1e9,
            )


def warm(way: str, loop: Iterator[Any], task: Any, rows: Rows, name: str, turns: int) -> float:
    """Take turns that do not count, and return the GB at the peak of the last one, without what others hold.

    It is written down, in case that no others follow.
    """
    held = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    last = warm_up(f"{name}, {way}", loop, turns, turns)[-1]
    own_gb = max(0, last.peak_bytes - held) / 1e9
    rows.add(case=name, way=way, warm_up_per_s=task.block * task.units / last.seconds, own_gb=own_gb)
    return own_gb


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table."""
    keys = ("case", "way", "per_s", "unit", "against_compiled", "own_gb", "memory_against_compiled")
    body = [[cell(row[key]) for key in keys] for row in rows if "per_s" in row]
    heads = ("program", "loop", "per second", "unit", "against compiled by hand", "own peak GB", "of compiled by hand")
    return table_lines(heads, body) if body else []
