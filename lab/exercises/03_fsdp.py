"""Exercise 3: a model that is too large for one rank.

DDP keeps all parameters, gradients and optimizer states on every rank. Fully sharded data parallelism (FSDP) keeps one
part of each on every rank, and gathers the parameters of one block at a time, just before that block needs them.

Fill in what says TODO. The code that is there holds three mistakes: find them. Then type

    lockstep lab check 3 lab/exercises/03_fsdp.py

docs/lab/03_fsdp.md explains the idea.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lockstep.lab import MarkovText, gpt, language_loss, run_ranks

# TODO 1: compute in bfloat16, and add up gradients in float32 (param_dtype, reduce_dtype).
BF16 = MixedPrecisionPolicy()


# ---- 1. shard ----


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Shard each block, then what is left: a block is what is gathered, used and freed at one time.

    `options` go to fully_shard: reshard_after_forward, mesh, mp_policy, offload_policy.
    """
    # TODO 2: this gathers the whole model at once. The blocks are model.blocks.
    return fully_shard(model, **options)


def build(model: nn.Module, lr: float, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the sharded model and its optimizer, AdamW."""
    # TODO 3: which parameters does this optimizer see?
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return shard(model, **options), optimizer


# ---- 2. count ----


def bytes_per_rank(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes that this rank holds of "parameters", "gradients" and "optimizer" (its state, except step)."""
    # TODO 4: a parameter is a DTensor, whose numel() is that of the whole tensor. to_local() is this rank's part.
    raise NotImplementedError("count the bytes of a rank")


# ---- 3. save and load ----


def save_full(model: nn.Module, path: Path) -> None:
    """Write one file with whole tensors, which any program can read."""
    # TODO 5: this waits forever. Gathering is a collective; writing is not.
    if dist.get_rank() == 0:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        torch.save(state, path)


def load_full(model: nn.Module, path: Path) -> None:
    """Read such a file on rank 0, and give each rank its part."""
    state = torch.load(path) if dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def save_sharded(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write the shards of all ranks: nothing is gathered, and every rank writes its own file."""
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)


def load_sharded(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read a checkpoint on any number of ranks: each reads the pieces of files that it needs."""
    # TODO 6: get_state_dict, dcp.load into what it returned, set_state_dict.
    raise NotImplementedError("load what save_sharded has written")


def main() -> None:
    dist.init_process_group("gloo")
    model, optimizer = build(gpt(2, width=64), lr=1e-2)
    text = MarkovText()
    for step in range(61):
        first = (step * dist.get_world_size() + dist.get_rank()) * 4
        optimizer.zero_grad()
        loss = language_loss(model, torch.stack([text[index] for index in range(first, first + 4)]))
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        print(f"this rank holds {bytes_per_rank(model, optimizer)} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_ranks(main)
