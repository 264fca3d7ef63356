"""A DDP of ours can be freed after its process group; torch's own may hang before 2.14."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import preloaded

# Two ranks of gloo. Rank 0 frees a DDP whose group was destroyed, while a thread of gloo waits for the GIL in order to
# release the tensors of a collective that has just ended. In real runs this is a rare race. Here it happens always:
# rank 0 keeps the GIL from before the collective ends until half a second after. There are many tensors, because the
# GIL is given away for moments on the way, and the thread takes it anew for each tensor.
RANKS = """
import faulthandler, gc, mmap, os, sys, time
import torch, torch.distributed as dist
import torch.distributed.nn  # its default arguments would keep a group that exists when it is imported
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from lockstep.classic.ddp_manager import wrap_in_ddp
from lockstep.parallel.ddp.torch_private import FixedBucketsDDP

make = {"torch": DistributedDataParallel, "ours": FixedBucketsDDP, "classic": lambda m: wrap_in_ddp(m, *[False] * 3)}
kind, how, store = sys.argv[1:]
waits, ended = mmap.mmap(-1, 1), mmap.mmap(-1, 1)
rank = int(os.fork() == 0)
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
model = make[kind](nn.Linear(2, 2))
tensors = [torch.ones(1) for _ in range(50_000)]
dist.barrier()

if rank == 1:
    while not waits[0]:
        time.sleep(0.01)
    dist.group.WORLD.allreduce_coalesced(tensors).wait()
    ended[0] = 1
    os._exit(0)

sys.setswitchinterval(1000.0)
dist.group.WORLD.allreduce_coalesced(tensors)
waits[0] = 1
while not ended[0]:
    pass
deadline = time.monotonic() + 0.5
while time.monotonic() < deadline:
    pass

sys.setswitchinterval(1e-4)
dist.destroy_process_group()
faulthandler.dump_traceback_later(10 if kind == "torch" else 60, exit=True)
if how == "collected":
    model.itself = [model]
del model
gc.collect()
print("threads left:", [name for task in os.listdir("/proc/self/task")
    if "gloo" in (name := open(f"/proc/self/task/{task}/comm").read())])
"""


def free(folder: Path, kind: str, how: str) -> tuple[int, str]:
    done = preloaded.run_python("-c", RANKS, kind, how, str(folder / "store"), cwd=folder, env=os.environ)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how"), [("ours", "by count"), ("ours", "collected"), ("classic", "by count")])
def test_it_is_freed_after_its_group(kind: str, how: str, tmp_path: Path) -> None:
    code, text = free(tmp_path, kind, how)
    assert code == 0, text
    assert "threads left: []\n" in text  # the group itself was freed, too


@pytest.mark.slow
@pytest.mark.long
def test_torch_hangs(tmp_path: Path) -> None:
    """torch 2.14 has fixed pytorch/pytorch#56297 for the reducer. Without older ones, `free_group_last` can go."""
    code, text = free(tmp_path, "torch", "by count")

    if torch.__version__ >= (2, 14):
        assert code == 0, text
        assert "threads left: []\n" in text
    else:
        assert code == 1
        assert "Timeout (0:00:10)!" in text
