"""The logic of torchvision's reference for classification in plain PyTorch: python, or torchrun."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from material import pictures, small_resnet
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

BATCH, EPOCHS, WARMUP_EPOCHS = 16, 4, 1
RATE, DECAY, SMOOTHING = 0.1, 1e-4, 0.1


def parameter_groups(model: nn.Module) -> list[dict]:
    """Weight decay is for everything but norms."""
    norms = [p for module in model.modules() if isinstance(module, nn.BatchNorm2d) for p in module.parameters()]
    others = [p for p in model.parameters() if not any(p is norm for norm in norms)]
    return [{"params": others, "weight_decay": DECAY}, {"params": norms, "weight_decay": 0.0}]


def sum_over_ranks(values: list[float], distributed: bool, device: str) -> list[float]:
    if not distributed:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


@torch.inference_mode()
def evaluate(model: nn.Module, loader: DataLoader, loss_fn: nn.Module, distributed: bool, device: str) -> list[float]:
    model.eval()
    loss, right, right_5, count = 0.0, 0.0, 0.0, 0.0
    for image, target in loader:
        image, target = image.to(device), target.to(device)
        output = model(image)
        _, best = output.topk(5, dim=1)
        hits = best == target[:, None]
        loss += loss_fn(output, target).item() * len(target)
        right += hits[:, :1].sum().item()
        right_5 += hits.sum().item()
        count += len(target)

    # DistributedSampler repeats samples so that all processes have as many; they are counted twice here.
    loss, right, right_5, count = sum_over_ranks([loss, right, right_5, count], distributed, device)
    return [loss / count, right / count, right_5 / count]


def train(model: nn.Module, order: list[list[int]] | None = None) -> list[float]:
    """Train and return the loss of every step. `order`: the samples of every batch."""
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main = not distributed or dist.get_rank() == 0
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"

    training, validation = pictures(256, seed=0), pictures(64, seed=1)
    sampler = DistributedSampler(training) if distributed else RandomSampler(training)
    test_sampler = DistributedSampler(validation, shuffle=False) if distributed else SequentialSampler(validation)
    test_loader = DataLoader(validation, BATCH, sampler=test_sampler)

    model = model.to(device)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if distributed and torch.cuda.is_available() else model
    loss_fn = nn.CrossEntropyLoss(label_smoothing=SMOOTHING)
    optimizer = torch.optim.SGD(parameter_groups(model), lr=RATE, momentum=0.9)
    warmup = LinearLR(optimizer, start_factor=0.01, total_iters=WARMUP_EPOCHS)
    main_part = CosineAnnealingLR(optimizer, T_max=EPOCHS - WARMUP_EPOCHS)
    scheduler = SequentialLR(optimizer, [warmup, main_part], milestones=[WARMUP_EPOCHS])
    wrapped = DistributedDataParallel(model) if distributed else model

    first = 0
    if order is None and os.path.exists("checkpoint.pth"):
        checkpoint = torch.load("checkpoint.pth", map_location="cpu")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        first = checkpoint["epoch"] + 1

    losses: list[float] = []
    per_epoch = len(training) // BATCH
    for epoch in range(first, EPOCHS):
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)

        loader = DataLoader(training, BATCH, sampler=sampler)
        if order is not None:
            loader = DataLoader(training, batch_sampler=order[epoch * per_epoch : (epoch + 1) * per_epoch])

        wrapped.train()
        for image, target in loader:
            loss = loss_fn(wrapped(image.to(device)), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        scheduler.step()
        found = evaluate(model, test_loader, loss_fn, distributed, device)
        if main:
            print(f"epoch {epoch}: loss {found[0]:.4f}, acc@1 {found[1]:.3f}, acc@5 {found[2]:.3f}")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            if order is None:
                torch.save(state | {"scheduler": scheduler.state_dict()}, "checkpoint.pth")

    if distributed:
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    train(small_resnet())
