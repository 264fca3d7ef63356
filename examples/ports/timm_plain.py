"""The logic of timm's train.py in plain PyTorch: python, or torchrun with several processes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from material import pictures, small_vit
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

BATCH, EPOCHS, PER_EPOCH = 16, 3, 8
RATE, LOWEST, DECAY, CLIP, AVERAGE = 5e-3, 2.5e-5, 0.05, 1.0, 0.9


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader, device: str, distributed: bool) -> dict[str, float]:
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for image, target in loader:
        image, target = image.to(device), target.to(device)
        output = model(image)
        loss = nn.functional.cross_entropy(output, target, reduction="sum")
        right = (output.argmax(1) == target).sum()
        sums += torch.stack([loss, right, torch.tensor(len(target), device=device)]).double()

    if distributed:
        dist.all_reduce(sums)
    return {"loss": (sums[0] / sums[2]).item(), "top1": (sums[1] / sums[2]).item()}


def train(model: nn.Module, order: list[list[int]] | None = None) -> list[float]:
    """Train and return the loss of every step, and that of the averaged weights at the end."""
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main = not distributed or dist.get_rank() == 0
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"

    training, validation = pictures(BATCH * PER_EPOCH, seed=0), pictures(64, seed=1)
    sampler = DistributedSampler(training) if distributed else None
    eval_loader = DataLoader(validation, BATCH)

    model = model.to(device)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=RATE, weight_decay=DECAY)
    ema = ModelEmaV3(model, decay=AVERAGE, use_warmup=False)
    wrapped = DistributedDataParallel(model) if distributed else model
    scheduler = CosineLRScheduler(optimizer, t_initial=EPOCHS * PER_EPOCH, lr_min=LOWEST, t_in_epochs=False)
    loss_fn = LabelSmoothingCrossEntropy(0.1)

    first, best = 0, 0.0
    if order is None and os.path.exists("last.pt"):
        state = torch.load("last.pt", map_location=device)
        model.load_state_dict(state["model"])
        ema.module.load_state_dict(state["ema"])
        optimizer.load_state_dict(state["optimizer"])
        first, best = state["epoch"] + 1, state["best"]

    losses: list[float] = []
    updates = first * PER_EPOCH
    found = {}
    for epoch in range(first, EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)

        loader = DataLoader(training, BATCH, sampler=sampler, shuffle=sampler is None, drop_last=True)
        if order is not None:
            loader = DataLoader(training, batch_sampler=order[epoch * PER_EPOCH : (epoch + 1) * PER_EPOCH])

        wrapped.train()
        for image, target in loader:
            loss = loss_fn(wrapped(image.to(device)), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            ema.update(model)
            updates += 1
            scheduler.step_update(updates)
            losses.append(loss.item())

        found = validate(ema.module, eval_loader, device, distributed)
        if main:
            print(f"epoch {epoch}: loss {found['loss']:.4f}, top1 {found['top1']:.3f}")
            best = max(best, found["top1"])
            state = {"model": model.state_dict(), "ema": ema.module.state_dict(), "optimizer": optimizer.state_dict()}
            if order is None:
                torch.save(state | {"epoch": epoch, "best": best}, "last.pt")
                if best == found["top1"]:
                    torch.save(state | {"epoch": epoch, "best": best}, "model_best.pt")

    if distributed:
        dist.destroy_process_group()
    return [*losses, found["loss"]]


if __name__ == "__main__":
    train(small_vit())
