"""NCCL's collectives are in the flight recorder, in a world of one: there was never a machine with several GPUs."""

import subprocess
import sys

import pytest
import torch

from lockstep.launch.hangs import flight_recorder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: run it on one, see CONTRIBUTING.md")

RANK = """
import os, sys
from pathlib import Path
from lockstep.launch.hangs import flight_recorder
folder = Path(sys.argv[1])
os.environ.update(flight_recorder.environment(folder))
import torch, torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
numbers = torch.ones(4, device="cuda")
dist.all_reduce(numbers)
torch.cuda.synchronize()
flight_recorder.serve(folder, 0)
print("ready", flush=True)
sys.stdin.readline()
torch.cuda._sleep(20_000_000_000)  # the next one is handed out, and cannot begin
dist.all_reduce(numbers)
print("ready", flush=True)
sys.stdin.readline()
os._exit(0)
"""


def test_what_nccl_did_and_does(tmp_path):
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        try:
            assert rank.stdout.readline() == "ready\n"
            entries = flight_recorder.collect(tmp_path, [0], timeout=20.0)[0]
            assert [flight_recorder.Collective.from_entry(entry).op for entry in entries] == ["all_reduce"]
            rank.stdin.write("go on\n")
            rank.stdin.flush()
            assert rank.stdout.readline() == "ready\n"
            (line,) = flight_recorder.analyse(flight_recorder.collect(tmp_path, [0], timeout=20.0)).lines
            assert "collective 2, all_reduce of [4] Float" in line
        finally:
            rank.kill()
