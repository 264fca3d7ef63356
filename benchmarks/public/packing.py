"""Packed rows against padded ones on a ragged Llama: tokens with a label per second, and the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.bench.intervals import estimate, ratio
from lockstep.bench.results import cell, table_lines
from lockstep.data.packing import packed_batch
from lockstep.hf import CausalLM, packed_inputs
from lockstep.runtime.context import Runtime
from public.bounded import Rows
from public.llama import Ragged, long_texts, short_texts
from public.loops import BLOCK, empty_cache, lockstep_loop, print_decisions, printed_rounds, started, warm_up

WARM_UP = 2  # turns that do not count
WARM_UP_AUTO = 6, 16  # and by default, at least and at most: calls of the frequent lengths are captured meanwhile

# With compile=false nothing but packing differs.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "packing-short": ("short", {"steps": 2000}, "width 128, 3 to 64 tokens"),
    "packing-short-eager": ("short", {"compile": False}, "width 128, 3 to 64 tokens, compile=false"),
    "packing-long-eager": ("long", {"compile": False}, "width 1024, 16 to 1,024 tokens, compile=false"),
}


def measure(name: str, rows: Rows, turns: int, tiny: bool) -> None:
    """Write rows of the gradient, one for padding, and one for packing."""
    kind, values, title = CASES[name]
    ragged = short_texts(2048, tiny) if kind == "short" else long_texts(512, tiny)
    with started() as (runtime, folder), empty_cache(folder):
        # First: it takes seconds, and the rest may take more than there are.
        gradients(name, ragged, runtime.device, rows)

        least, most = (WARM_UP, WARM_UP) if "compile" in values or tiny else WARM_UP_AUTO
        speed(name, title, ragged, values, runtime, folder, rows, turns, least, most)


def speed(
    name: str,
    title: str,
    ragged: Ragged,
    values: dict[str, Any],
    runtime: Runtime,
    folder: str,
    rows: Rows,
    turns: int,
    least: int,
    most: int,
) -> None:
    """Let padding and packing take turns, after at least and at most so many that do not count."""
    labels = sum(len(row["input_ids"]) - 1 for row in ragged.rows)
    packed = CausalLM(ragged.config, ragged.rows, row_length=ragged.longest)
    per_row = labels / len(packed.data())
    per_text = labels / len(ragged.rows)

    # As many labels in a step as without packing, in whole micro-batches, which hold as many tokens with padding.
    micro = ragged.micro_batch
    packed_rows = max(micro, round(ragged.batch * per_text / per_row / micro) * micro)
    settings = {"global_batch": ragged.batch, "micro_batch": micro, "epochs": None, **values}
    ways = {
        "padded": (CausalLM(ragged.config, ragged.rows), settings, ragged.batch * per_text),
        "packed": (packed, {**settings, "global_batch": packed_rows}, packed_rows * per_row),
    }

    loops = {name: lockstep_loop(task, runtime, folder, **given) for name, (task, given, _) in ways.items()}
    for way, loop in loops.items():
        last = warm_up(f"{title}, {way}", loop, least, most)[-1]
        rows.add(case=name, warm=way, warm_up_tokens_per_s=BLOCK * ways[way][2] / last.seconds)
        print_decisions(folder, most=6)

    rounds = printed_rounds(loops, turns)
    for loop in loops.values():
        loop.close()
    rates = {way: [BLOCK * ways[way][2] / each[way].seconds for each in rounds] for way in loops}
    for way, found in rates.items():
        against = ratio(found, rates["padded"])
        rows.add(case=name, title=title, way=way, tokens_per_s=estimate(found), against_padding=against)


def gradients(name: str, ragged: Ragged, device: torch.device, rows: Rows) -> None:
    """How far the gradient of packed rows is off, in bfloat16, where packed attention is torch's `varlen_attn`."""
    torch.manual_seed(0)
    samples = [torch.tensor(row["input_ids"]) for row in ragged.rows[:24]]
    task = CausalLM(ragged.config, ragged.rows, row_length=ragged.longest)
    model = task.model().to(device)
    documents = [{"labels": row[None], "input_ids": row[None]} for row in samples]
    batch = packed_batch(samples, ragged.longest)
    packed = [{"labels": batch["labels"], **packed_inputs(batch)}]

    truth = gradient(task, model, documents, device, low=False)
    found = {
        "packed, float32": gradient(task, model, packed, device, low=False),
        "alone, bfloat16": gradient(task, model, documents, device, low=True),
        "packed, bfloat16": gradient(task, model, packed, device, low=True),
    }
    for what, one in found.items():
        rows.add(case=name, gradient=what, off=float((one - truth).norm() / truth.norm()))


def gradient(task: CausalLM, model: nn.Module, batches: list[Any], device: torch.device, low: bool) -> Tensor:
    model.zero_grad()
    for batch in batches:
        moved = {name: tensor.to(device) for name, tensor in batch.items()}
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=low):
            task.loss(model, moved).total.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the tables of speed and of gradients."""
    speeds = [row for row in rows if "way" in row]
    body = [[row["title"], row["way"], cell(row["tokens_per_s"]), cell(row["against_padding"])] for row in speeds]
    heads = ("case", "way", "tokens/s", "against padding")
    off = [[row["case"], row["gradient"], f"{row['off']:.2e}"] for row in rows if "gradient" in row]
    found = table_lines(heads, body) if body else []
    return found + (table_lines(("case", "gradient", "off from float32, one by one"), off) if off else [])
