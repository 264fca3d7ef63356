"""A Llama with two wide layers, whose matrices are large enough for float8, with and without precision=fp8."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from lockstep.bench.intervals import estimate, ratio
from lockstep.bench.results import cell, figure, table_lines
from lockstep.hf import CausalLM
from public.bounded import Rows
from public.llama import llama, texts
from public.loops import BLOCK, load_compiler, lockstep_loop, print_decisions, printed_rounds, started, warm_up

LENGTH, BATCH = 1024, 8
SIZES = {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32, "vocab_size": 32_000}


def measure(rows: Rows, turns: int, tiny: bool) -> None:
    """Let bf16 and fp8 take turns, both compiled."""
    if not tiny and find_spec("torchao") is None:
        rows.add(case="fp8", failed="torchao is not installed")
        return

    # float8 needs a GPU and torchao; two formats that a CPU has show that the script runs.
    sizes = {**SIZES, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2} if tiny else SIZES
    length = 16 if tiny else LENGTH
    formats = ("bf16", "fp32") if tiny else ("bf16", "fp8")
    sequences = texts(length, length, 32_000, 256)
    with started() as (runtime, folder):
        load_compiler(runtime.device)
        loops = {}
        for name in formats:
            task = CausalLM(llama(num_hidden_layers=2, **sizes), sequences)
            given = {"global_batch": BATCH, "epochs": None, "precision": name, "compile": not tiny}
            loops[name] = lockstep_loop(task, runtime, folder, **given)
            last = warm_up(name, loops[name], 2, 2)[-1]
            print_decisions(folder, most=4)
            memory_gb = last.peak_bytes / 1e9
            rows.add(case="fp8", precision=name, warm_up_tokens_per_s=rate(last.seconds, length), peak_gb=memory_gb)

        rounds = printed_rounds(loops, turns)
        base = [each["bf16"].seconds for each in rounds]
        for name in loops:
            seconds = [each[name].seconds for each in rounds]
            per_s = estimate([rate(second, length) for second in seconds])
            rows.add(case="fp8", precision=name, tokens_per_s=per_s, against_bf16=ratio(base, seconds))


def rate(seconds: float, length: int) -> float:
    """Return labels per second of one turn."""
    return BLOCK * BATCH * (length - 1) / seconds


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table. The memory of a format includes the models before it."""
    memory = {row["precision"]: row["peak_gb"] for row in rows if "peak_gb" in row}
    body = [
        [row["precision"], cell(row["tokens_per_s"]), cell(row["against_bf16"]), figure(memory[row["precision"]])]
        for row in rows
        if "tokens_per_s" in row
    ]
    return (
        table_lines(("precision", "tokens/s", "against bf16", "peak GB, with the model before"), body) if body else []
    )
