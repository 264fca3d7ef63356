"""The loss of a language model's head, forward and backward: milliseconds and memory, by the size of the vocabulary.

    python benchmarks/token_loss.py                 # on a GPU: about a minute
    python benchmarks/token_loss.py --tiny          # on a CPU: does it run
    python benchmarks/token_loss.py --tokens 1024 --widths 256 --words 50257 --calls 1 --turns 6    # on a CPU

Hidden states in bfloat16 and a weight in float32, under bf16 autocast, as in a training. The ways take turns; a turn is
ten calls with their backward. Memory is the peak beyond the hidden states, the weight and the targets.

plain        F.cross_entropy(F.linear(hidden, weight).float(), targets)
compiled     the same under torch.compile
torch        torch's own F.linear_cross_entropy, in chunks; torch 2.13 has it
lockstep     lockstep.linear_cross_entropy
unpadded     the same without padding the vocabulary to a multiple of 64 words
float8       the same with logits in float8
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep import losses
from lockstep.bench.intervals import estimate, ratio
from lockstep.bench.ranks.turns import take, take_round
from lockstep.bench.results import cell, figure, table_lines
from lockstep.losses import linear_cross_entropy

WIDTHS, WORDS = (768, 2048), (50_257, 32_000, 128_256, 151_936)

Inputs = tuple[Tensor, Tensor, Tensor]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def torchs_own(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from torch.nn import LinearCrossEntropyOptions  # pyrefly: ignore[missing-module-attribute]

    # Autocast does not reach it.
    low = weight.to(hidden.dtype)
    options = LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, low, targets, reduction="sum", options=options)


def unpadded(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    before, losses.WORDS_MULTIPLE = losses.WORDS_MULTIPLE, 1
    try:
        return linear_cross_entropy(hidden, weight, targets)
    finally:
        losses.WORDS_MULTIPLE = before


def float8(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, targets, float8=True)


def ways_for(words: int) -> dict[str, Callable[..., Tensor]]:
    ways = {"plain": plain, "compiled": torch.compile(plain, dynamic=False), "lockstep": linear_cross_entropy}
    if hasattr(F, "linear_cross_entropy"):
        ways["torch"] = torchs_own
    if words % losses.WORDS_MULTIPLE:
        ways["unpadded"] = unpadded
    return {**ways, "float8": float8}


def inputs(tokens: int, width: int, words: int, device: str) -> Inputs:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(words, width, device=device) / width**0.5).requires_grad_()
    return hidden, weight, torch.randint(words, (tokens,), device=device)


def loop(way: Callable[..., Tensor], given: Inputs, calls: int, device: str) -> Iterator[Tensor]:
    """Yield the loss after each turn."""
    hidden, weight, _ = given
    while True:
        for _ in range(calls):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = way(*given)
            loss.backward()
            hidden.grad = weight.grad = None
        yield loss.detach()


def measure(options: argparse.Namespace, width: int, words: int, device: str) -> list[dict[str, Any]]:
    """Return a row for each way. One that fails is reported, and left out."""
    torch.compiler.reset()  # or its limit of compilations is reached
    given = inputs(options.tokens, width, words, device)
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    loops = {}
    for name, way in ways_for(words).items():
        try:
            take(one := loop(way, given, options.calls, device))
            loops[name] = one
        except Exception:  # the other ways still count
            print(f"{name}, {words} words, width {width}:\n{traceback.format_exc(limit=-3)}", flush=True)
            given[0].grad = given[1].grad = None

    rounds = [take_round(loops, number) for number in range(options.turns)]
    base = [each["plain"].seconds for each in rounds]
    rows = []
    for name in loops:
        seconds = [each[name].seconds for each in rounds]
        rows.append(
            {
                "width": width,
                "words": words,
                "way": name,
                "ms": estimate([1e3 * second / options.calls for second in seconds]),
                "speedup": ratio(base, seconds),
                "peak_gib": (max(each[name].peak_bytes for each in rounds) - held) / 2**30,
                "loss": float(rounds[-1][name].value) / options.tokens,
            }
        )
    return rows


def lines(rows: list[dict[str, Any]]) -> list[str]:
    heads = ("width", "words", "way", "ms", "plain / this", "peak GiB", "loss")
    body = [
        [
            f"{row['width']:,}",
            f"{row['words']:,}",
            row["way"],
            cell(row["ms"]),
            figure(row["speedup"]["median"]),
            figure(max(0.0, row["peak_gib"])),
            f"{row['loss']:.4f}",
        ]
        for row in rows
    ]
    return table_lines(heads, body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--words", type=int, nargs="+", default=WORDS, help="sizes of the vocabulary")
    parser.add_argument("--calls", type=int, default=10, help="of a turn")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=2.0, help="no new case begins after this time")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    if given.tiny:
        given.tokens, given.widths, given.words = 64, (32,), (131, 192)
    print(f"{device}, torch {torch.__version__}, {given.tokens} tokens", flush=True)

    began, rows = time.monotonic(), []
    for width in given.widths:
        for words in given.words:
            if time.monotonic() - began > 60 * given.minutes:
                print(f"no time left for {words} words, width {width}")
                continue
            found = measure(given, width, words, device)
            rows += found
            print(*lines(found), sep="\n", flush=True)
            if given.json:
                given.json.write_text(json.dumps(rows, indent=1))

    print(*lines(rows), sep="\n")


if __name__ == "__main__":
    main()
