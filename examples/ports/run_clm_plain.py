"""The logic of transformers' example for causal language models in plain PyTorch: python, or torchrun."""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist
from material import blocks, gpt2_config, texts
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, default_data_collator, get_scheduler

BATCH, ACCUMULATION, EPOCHS = 4, 2, 2
RATE, WARMUP, DECAY = 1e-3, 4, 0.01


def parameter_groups(model: torch.nn.Module) -> list[dict]:
    no_decay = ["bias", "ln_1.weight", "ln_2.weight", "ln_f.weight"]
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not any(part in n for part in no_decay)], "weight_decay": DECAY},
        {"params": [p for n, p in named if any(part in n for part in no_decay)], "weight_decay": 0.0},
    ]


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: DataLoader, device: str, distributed: bool) -> float:
    model.eval()
    losses = []
    for batch in loader:
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        losses.append(loss.repeat(len(batch["input_ids"])))

    mean = torch.cat(losses).mean()
    if distributed:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    model.train()
    return mean.item()


def train(model: torch.nn.Module, order: list[list[int]] | None = None) -> list[float]:
    """Train and return the loss of every step. `order`: the samples of every micro-batch."""
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main = not distributed or dist.get_rank() == 0
    world_size = dist.get_world_size() if distributed else 1
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"

    training, validation = map(blocks, texts())
    sampler = DistributedSampler(training) if distributed else None
    loader = DataLoader(training, BATCH, sampler=sampler, shuffle=sampler is None, collate_fn=default_data_collator)
    if order is not None:
        loader = DataLoader(training, batch_sampler=order, collate_fn=default_data_collator)
    eval_loader = DataLoader(validation, BATCH, collate_fn=default_data_collator)

    model = model.to(device)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=RATE)
    per_epoch = len(training) // (BATCH * ACCUMULATION * world_size)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=WARMUP, num_training_steps=EPOCHS * per_epoch)
    wrapped = DistributedDataParallel(model) if distributed else model

    first = 0
    if order is None and os.path.exists("epoch.pt"):
        state = torch.load("epoch.pt", map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["epoch"] + 1

    losses: list[float] = []
    total = 0.0
    for epoch in range(first, 1 if order is not None else EPOCHS):
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)

        for number, batch in enumerate(loader):
            batch = {name: value.to(device) for name, value in batch.items()}
            last = (number + 1) % ACCUMULATION == 0
            if distributed:
                wrapped.require_backward_grad_sync = last

            loss = wrapped(**batch).loss / ACCUMULATION
            loss.backward()
            total += loss.item()
            if not last:
                continue

            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(total)
            total = 0.0

        found = evaluate(model, eval_loader, device, distributed)
        if main:
            print(f"epoch {epoch}: loss {found:.4f}, perplexity {math.exp(found):.2f}")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            if order is None:
                torch.save(state | {"scheduler": scheduler.state_dict()}, "epoch.pt")

    if main and order is None:
        model.save_pretrained("trained")
    if distributed:
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    train(AutoModelForCausalLM.from_config(gpt2_config()))
