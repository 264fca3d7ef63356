"""The logic of nanoGPT's train.py in plain PyTorch, as people write it: python, or torchrun with several processes."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from material import Crops, small_gpt, texts
from torch.nn.parallel import DistributedDataParallel

BATCH, ACCUMULATION = 4, 4  # sequences of a micro-batch, and micro-batches of a step, on all processes together
LAST_STEP, WARMUP = 39, 5
PEAK, LOWEST = 3e-3, 3e-4
EVALUATE_EVERY = 20


def learning_rate(step: int) -> float:
    if step < WARMUP:
        return PEAK * (step + 1) / (WARMUP + 1)
    if step > LAST_STEP:
        return LOWEST
    ratio = (step - WARMUP) / (LAST_STEP - WARMUP)
    return LOWEST + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (PEAK - LOWEST)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=PEAK, betas=(0.9, 0.95))


@torch.no_grad()
def estimate_loss(model: torch.nn.Module, crops: Crops) -> float:
    model.eval()
    losses = []
    for start in range(0, len(crops), BATCH):
        x, y = map(torch.stack, zip(*[crops[n] for n in range(start, min(start + BATCH, len(crops)))], strict=True))
        losses.append(F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item())
    model.train()
    return sum(losses) / len(losses)


def draw(crops: Crops, rank: int) -> list[list[int]]:
    """Return the sequences of every micro-batch of a run: at random, with another seed in every process."""
    generator = torch.Generator().manual_seed(1337 + rank)
    return (
        torch.randint(len(crops), (1 + LAST_STEP) * ACCUMULATION * BATCH, generator=generator).view(-1, BATCH).tolist()
    )


def train(model: torch.nn.Module, drawn: list[list[int]] | None = None) -> list[float]:
    """Train and return the loss of every step. `drawn`: the sequences of every micro-batch."""
    distributed = "RANK" in os.environ
    rank, world_size = 0, 1
    if distributed:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
        assert ACCUMULATION % world_size == 0
        torch.manual_seed(1337 + rank)

    accumulation = ACCUMULATION // world_size
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    context = torch.autocast("cuda", dtype=torch.bfloat16) if torch.cuda.is_available() else nullcontext()
    training, validation = map(Crops, texts())
    model = model.to(device)
    optimizer = make_optimizer(model)
    wrapped = DistributedDataParallel(model) if distributed else model

    best, first = float("inf"), 0
    if drawn is None and os.path.exists("out/ckpt.pt"):
        saved = torch.load("out/ckpt.pt", map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        best, first = saved["best"], saved["step"]

    losses = []
    batches = iter(drawn or draw(training, rank))
    for step in range(first, LAST_STEP + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)

        if step and step % EVALUATE_EVERY == 0 and rank == 0:
            found = estimate_loss(model, validation)
            if found < best and drawn is None:
                best = found
                os.makedirs("out", exist_ok=True)
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "best": best, "step": step}
                torch.save(state, "out/ckpt.pt")

        total = 0.0
        for micro_step in range(accumulation):
            x, y = map(torch.stack, zip(*[training[n] for n in next(batches)], strict=True))
            if distributed:
                wrapped.require_backward_grad_sync = micro_step == accumulation - 1
            with context:
                logits = wrapped(x.to(device))
                loss = F.cross_entropy(logits.flatten(0, 1), y.to(device).flatten()) / accumulation
            loss.backward()
            total += loss.item()

        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {total:.4f}")

    if distributed:
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    torch.manual_seed(1337)
    train(small_gpt())
