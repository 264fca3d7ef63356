"""Freed memory of the host stays with the process, so that a step does not wait for fresh pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.runtime.host.memory import keep_freed_memory

# Eight blocks of 8 MB, made and freed in every step. Prints the page faults of ten steps.
STEPS = """
import os, resource, sys
from lockstep.runtime.host.memory import keep_freed_memory

def step():
    blocks = [bytearray(8 * 2**20) for _ in range(8)]

if "keep" in sys.argv:
    assert keep_freed_memory({})
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another C library")
def test_steps_find_their_memory_again() -> None:
    def faults(*words: str) -> int:
        done = subprocess.run([sys.executable, "-c", STEPS, *words], capture_output=True, text=True, check=True)
        return int(done.stdout)

    # 64 MB are 16,384 pages.
    assert faults() > 16_384
    assert faults("keep") < 1_000


def test_the_choice_of_the_user_stands() -> None:
    assert not keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert not keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"})


# Batches of 12 rows, padded to between 4 and 256 tokens. Prints the memory of the process, in MB, every 25 steps.
RAGGED = """
import json, sys
from pathlib import Path
import torch
import lockstep
from lockstep.bench.ranks.workload import GPT, GPTTask

def pad(rows):
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return [ids[:, :-1], ids[:, 1:]]

class Ragged(GPTTask):
    collate = staticmethod(pad)

    def model(self):
        return GPT(256, 64, 2, 2, 256)

    def data(self):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(4, 257, (2000,), generator=generator).tolist()
        return [torch.randint(1, 256, (length,), generator=generator) for length in lengths]

    def loss(self, model, batch):
        x, y = batch
        logits = model(x).flatten(0, 1)
        total = torch.nn.functional.cross_entropy(logits, y.flatten(), ignore_index=0, reduction="sum")
        return lockstep.Loss(total, y.count_nonzero())

folder = Path(sys.argv[1])
settings = {"steps": 500, "global_batch": 12, "log.every": 25, "log.progress": "off", "run_dir": str(folder)}
lockstep.fit(Ragged(), {**settings, "threads": 1, "device": "cpu"})
print(*[json.loads(line)["memory_mb"] for line in (folder / "metrics.jsonl").open()])
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="another C library")
def test_batches_of_every_length_do_not_make_a_run_grow(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RAGGED, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    memory = [float(word) for word in done.stdout.split()]
    assert len(memory) == 20

    # Blocks of many sizes leave gaps at first; in the second half they are used again.
    assert memory[-1] < 1.05 * memory[9], memory
