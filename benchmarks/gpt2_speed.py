"""Tokens per second of GPT-2 124M, sequence 1024: Lockstep against a hand-written loop, in the same process.

    python benchmarks/gpt2_speed.py                          # the model as everybody writes it
    python benchmarks/gpt2_speed.py --form fast --batch 64   # residual stream in bf16, loss over chunks of tokens
    python benchmarks/gpt2_speed.py --tiny --turns 2         # on a CPU: does it run

Both loops train the same model on the same random tokens. The hand-written one does what its author would be proud of:
the loss inside the compiled model, bf16 autocast, cuDNN's attention, fused AdamW, clipping by norm, pinned batches
copied without blocking, no host synchronisation inside a turn. Turns of 20 steps alternate; every turn ends with a
synchronisation. The share is of the rate of a bf16 product of 8192 x 8192 matrices, measured first.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.bench.intervals import ratio
from lockstep.bench.ranks.turns import WARM_UP, Turn, by_lockstep, take, take_round
from lockstep.bench.ranks.workload import settings_of
from lockstep.bench.results import table_lines
from lockstep.config import Resolved, resolve_for
from lockstep.engine.run import Run
from lockstep.losses import linear_cross_entropy
from lockstep.precision import choose_precision
from lockstep.runtime import context
from lockstep.runtime.world import World
from lockstep.task import Loss, Task

BLOCK, LR, LR_WARM_UP = 20, 6e-4, 100


@dataclass(frozen=True)
class Size:
    words: int = 50304  # 50257 and padding
    length: int = 1024
    width: int = 768
    heads: int = 12
    layers: int = 12

    @property
    def flops(self) -> int:
        """Of one token, forward and backward; attention counted as if it saw the whole sequence."""
        products = 12 * self.layers * self.width**2 + self.words * self.width
        return 6 * products + 12 * self.layers * self.width * self.length


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Tied weights, learned positions, biases, no dropout. Returns the SUM of the loss."""

    def __init__(self, size: Size, fast: bool):
        super().__init__()
        self.fast = fast
        self.words, self.places = nn.Embedding(size.words, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for name, parameter in self.named_parameters():
            into_stream = name.endswith(("proj.weight", "down.weight"))
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * size.layers) if into_stream else 1.0))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        if self.fast and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # or the sum of all blocks is kept in float32
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.fast:
            return linear_cross_entropy(x, self.words.weight, targets)
        logits = F.linear(x, self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class Tokens(Task):
    unit = "token"

    def __init__(self, size: Size, fast: bool):
        self.size, self.fast = size, fast

    def model(self) -> GPT2:
        return GPT2(self.size, self.fast)

    def data(self) -> TensorDataset:
        draw = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randint(self.size.words, (1024, self.size.length + 1), generator=draw))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        (ids,) = batch
        return Loss(model(ids[:, :-1], ids[:, 1:]), weight=ids[:, 1:].numel())


def batches(tokens: Tensor, size: int) -> Iterator[Tensor]:
    while True:
        yield from (tokens[rows] for rows in torch.randperm(len(tokens)).split(size) if len(rows) == size)


def resolved(batch: int, run_dir: str) -> Resolved:
    values = {
        "run_dir": run_dir,
        "log.every": BLOCK,
        "global_batch": batch,
        "tail": "drop",
        "lr.peak": LR,
        "lr.warmup": LR_WARM_UP,
        "lr.schedule": "constant",
        "clip.norm": 1.0,
    }
    return settings_of(Tokens, [], values)


def by_hand(task: Tokens, batches: Iterator[Tensor], device: torch.device) -> Iterator[float]:
    """The loop that its author would be proud of; yields the loss of the last step of every turn."""
    torch.manual_seed(0)
    on_cuda = device.type == "cuda"
    model = task.model().to(device)
    if on_cuda:
        model.compile()
    optimizer = task.optimizer(model)

    for step, batch in enumerate(batches, start=1):
        if on_cuda:
            batch = batch.pin_memory().to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_cuda):
            loss = task.loss(model, [batch])
            mean = loss.total / loss.weight
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / (LR_WARM_UP + 1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % BLOCK == 0:
            yield mean.item()


def losses(loop: Iterator[Run]) -> Iterator[float]:
    """Yield the loss of the last step of every turn; the host waits for it, as that of the hand-written loop does."""
    for run in loop:
        run.recorder.poll(wait=True)
        yield run.recorder.last["loss"]


def matmul_rate(device: torch.device) -> float:
    """Operations per second, random numbers: zeros would be faster."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(5):
        begin.record()
        for _ in range(20):
            a @ b
        end.record()
        end.synchronize()
        found.append(20 * 2 * 8192**3 / begin.elapsed_time(end) * 1e3)
    return statistics.median(found[1:])


def warmed(loops: dict[str, Iterator[float]]) -> None:
    for number in range(1, WARM_UP + 1):
        for name, loop in loops.items():
            turn = take(loop)
            print(f"  {name}: warm-up turn {number}, {turn.seconds:.1f} s, loss {turn.value:.4f}", flush=True)


def choose_attention(kind: str) -> None:
    torch.backends.cuda.enable_cudnn_sdp(kind == "cudnn")
    torch.backends.cuda.enable_flash_sdp(kind == "flash")
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=("plain", "fast"), default="plain")
    parser.add_argument("--batch", type=int, default=32, help="sequences per step")
    parser.add_argument("--attention", choices=("cudnn", "flash", "torch"), default="cudnn", help="torch: its choice")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()

    on_cuda = torch.cuda.is_available()
    size = Size(words=512, length=32, width=32, heads=2, layers=2) if given.tiny else Size()
    task, tokens = Tokens(size, given.form == "fast"), given.batch * size.length
    config = resolve_for({}, {}, [("benchmark", {})]).config
    with context.start(World(), config) as runtime, tempfile.TemporaryDirectory() as folder:
        choose_precision(config, runtime.device).set_tf32()  # for the hand-written loop, too
        if on_cuda and given.attention != "torch":
            choose_attention(given.attention)
        rate = matmul_rate(runtime.device) if on_cuda else math.nan
        drawn = batches(task.data().tensors[0], given.batch)
        loops = {
            "hand-written": by_hand(task, drawn, runtime.device),
            "lockstep": losses(by_lockstep(task, resolved(given.batch, folder), runtime, BLOCK)),
        }
        warmed(loops)
        rounds = [take_round(loops, number) for number in range(given.turns)]

    found = {name: [each[name] for each in rounds] for name in loops}
    print(
        f"{runtime.device}, torch {torch.__version__}, {given.form}, batch {given.batch}, {given.attention} attention"
    )
    heads = ("loop", "tokens/s", "ms/step", f"of {rate / 1e12:.0f} TFLOP/s", "loss", "peak GiB with both models")
    rows = [row(name, turns, tokens, size.flops / rate) for name, turns in found.items()]
    print(*table_lines(heads, rows), sep="\n")
    theirs, ours = ([turn.seconds for turn in turns] for turns in found.values())
    speed = ratio(theirs, ours)
    print(f"ratio {speed['median']:.4f} ({speed['low']:.4f} to {speed['high']:.4f})")


def row(name: str, turns: list[Turn], tokens: int, share: float) -> list[str]:
    median = statistics.median(BLOCK * tokens / turn.seconds for turn in turns)
    return [
        name,
        f"{median:,.0f}",
        f"{tokens / median * 1e3:.2f}",
        f"{median * share:.1%}",
        f"{turns[-1].value:.4f}",
        f"{turns[-1].peak_bytes / 2**30:.1f}",
    ]


if __name__ == "__main__":
    main()
