"""Models of public libraries, on one GPU, with Lockstep's defaults.

    python benchmarks/public_models.py ragged     # a Llama on padded batches of every length: 2 minutes
    python benchmarks/public_models.py models     # six models against a compiled loop by hand: 4 minutes
    python benchmarks/public_models.py packing    # a ragged Llama, padded and packed: 90 s
    python benchmarks/public_models.py rates      # GPT-2, nanoGPT's character model, torchvision's ResNet-50: 4 minutes
    python benchmarks/public_models.py verify     # lockstep verify with compile=true, six models at once: 3 minutes
    python benchmarks/public_models.py fp8        # precision=fp8 against bf16: 90 s; needs torchao
    python benchmarks/public_models.py models --tiny --only bert --turns 2    # on a CPU: does it run

ragged   The total time of 60 steps, as measured, and of 2,000, extrapolated from up to 300 and from turns in which
         Lockstep and an eager loop by hand alternate.
models   The total time of 20, 200 and 2,000 steps, from an empty compile cache, with building the model and compiling.
         The loop by hand compiles the model, uses bf16 autocast, fused AdamW and pinned batches. 20 and 200 steps are
         run. 2,000 are extrapolated: the first 200 (by hand) or 160 (Lockstep, with steps=2000) as measured, and for
         the rest the median of turns in which both alternate.
packing  Tokens with a label per second: `lockstep.hf.CausalLM` as it is, and with task.row_length; by default, and with
         compile=false, which shows what packing alone gains. And how far gradients are off, relative to float32,
         document by document.
rates    Tokens and pictures per second and memory, of loops by hand, eager and compiled, and of Lockstep, in turns.
verify   Whether small models of the six kinds train the same on one and two processes, compiled.
fp8      Tokens per second and memory of a Llama with and without precision=fp8.

Every case runs in a process of its own, which is killed after --limit seconds. No part takes longer than --seconds,
imports included. A row is printed, and written to --json, as soon as it is known.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from public import bounded, fp8, packing, ragged_llama, rates, totals, verified
from public.bounded import Bounded, Rows
from public.cases import CASES


@dataclass(frozen=True)
class Part:
    """What a part measures: its cases, how long each and all of them may take, and how its rows are printed."""

    cases: dict[str, Callable[..., None]]  # called with `rows`, `turns` and `tiny`
    lines: Callable[[list[dict[str, Any]]], list[str]]
    limit_s: float  # of a case
    seconds: float  # of the part
    modules: tuple[str, ...]  # to import once for all cases
    together: bool = False  # nothing is timed, and the GPU is used by other processes: cases may run side by side


def verifying(name: str) -> Callable[..., None]:
    # On a CPU compiling would only test the C++ compiler.
    return lambda rows, turns, tiny: verified.measure(name, rows, limit_s=100, compiled=not tiny)


LLAMA = ("transformers.models.llama.modeling_llama", "torch._inductor.compile_fx")
ALL = (
    *LLAMA,
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.whisper.modeling_whisper",
    "timm.models.vision_transformer",
    "peft",
)

PARTS = {
    "ragged": Part({"ragged": ragged_llama.totals}, ragged_llama.lines, limit_s=130, seconds=130, modules=LLAMA),
    "models": Part(
        {name: partial(totals.measure, name) for name in CASES}, totals.lines, limit_s=75, seconds=330, modules=ALL
    ),
    "packing": Part(
        {name: partial(packing.measure, name) for name in packing.CASES},
        packing.lines,
        limit_s=80,
        seconds=180,
        modules=LLAMA,
    ),
    "rates": Part(
        {name: partial(rates.measure, name) for name in rates.PROGRAMS},
        rates.lines,
        limit_s=150,
        seconds=350,
        modules=("torchvision", "transformers.models.gpt2.modeling_gpt2", "torch._inductor.compile_fx"),
    ),
    "verify": Part(
        {name: verifying(name) for name in CASES}, verified.lines, limit_s=220, seconds=225, modules=(), together=True
    ),
    "fp8": Part({"fp8": fp8.measure}, fp8.lines, limit_s=120, seconds=120, modules=LLAMA),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="of the part")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--limit", type=float, help="seconds of a case, after which it is killed")
    parser.add_argument("--seconds", type=float, help="of the whole part")
    parser.add_argument("--json", type=Path, help="a file for the rows, one in a line")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--inline", action="store_true", help="run the cases in this process, without limits")
    given = parser.parse_args()

    part = PARTS[given.part]
    unknown = set(given.only or ()) - set(part.cases)
    if unknown:
        parser.error(f"{given.part} has no case {', '.join(sorted(unknown))}: use some of {', '.join(part.cases)}")

    with tempfile.TemporaryDirectory() as folder:
        rows = Rows(given.json or Path(folder) / "rows.jsonl")
        before = len(rows.read())
        if given.inline:
            os.setpgrp()
            for name in given.only or part.cases:
                part.cases[name](rows=rows, turns=given.turns, tiny=given.tiny)
            return

        bounded.load(part.modules)
        options = {"rows": rows, "turns": given.turns, "tiny": given.tiny}
        limit_s = given.limit or part.limit_s
        names = given.only or part.cases
        cases = [Bounded(name, partial(part.cases[name], **options), limit_s, not part.together) for name in names]
        passed_s = time.time() - psutil.Process().create_time()  # importing torch takes many seconds
        bounded.run_all(cases, rows, (given.seconds or part.seconds) - passed_s, part.together)

        found = rows.read()[before:]
        print(*part.lines(found), sep="\n")
        print(*[f"  {row['case']}: {row['failed']}" for row in found if "failed" in row], sep="\n")


if __name__ == "__main__":
    main()
