"""Exercise 2: a batch that does not fit into memory, as several micro-batches.

Gradients add up in `.grad` until `zero_grad` is called. So a batch of 128 can be computed as 4 micro-batches of 32, if
each loss is scaled, and if the ranks exchange their gradients once per update and not once per micro-batch.

    python lab/solution/02_gradient_accumulation.py
    torchrun --nproc-per-node 2 lab/solution/02_gradient_accumulation.py
"""

import argparse
import contextlib
import copy
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import lockstep
from lockstep.lab import (
    Checks,
    CountCollectives,
    Question,
    ShapeClass,
    ask,
    backend,
    device,
    plots,
    resnet50,
    resnet_tiny,
    reveal,
    run_ranks,
)

Batch = tuple[Tensor, Tensor]  # pictures [B, 3, H, W] and classes [B]

QUESTIONS = [
    Question(
        "collectives", "An update has 4 micro-batches. How often does a rank all-reduce?", "times", "1 with no_sync"
    ),
    Question("unscaled", "How many times too large is the gradient if no loss is scaled?", "x", "micro-batches"),
    Question("memory", "How many times the activations of 4 x 32 does 1 x 128 keep for backward?", "x", "128 / 32"),
]


# ---- 1. one update ----


def accumulated_step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: Sequence[Batch]) -> None:
    """Take one step on all micro-batches together."""
    samples = sum(len(labels) for _, labels in micro_batches)
    optimizer.zero_grad()
    for number, (pictures, labels) in enumerate(micro_batches):
        # Only the last backward exchanges gradients: the sums of all. The forward pass belongs into no_sync, too.
        last = number == len(micro_batches) - 1
        with contextlib.nullcontext() if last or not isinstance(model, DDP) else model.no_sync():
            loss = F.cross_entropy(model(pictures.to(device())), labels.to(device()))

            # cross_entropy is a mean over the micro-batch. Of the whole batch's mean this is the share of its samples;
            # for micro-batches of one size that is 1 / micro-batches.
            (loss * len(labels) / samples).backward()
    optimizer.step()


# ---- 2. one epoch ----


def train_epoch(
    model: nn.Module, micro_batches: Iterable[Batch], optimizer: torch.optim.Optimizer, accumulate: int
) -> int:
    """Update after every `accumulate` micro-batches, and after the rest at the end. Returns the number of updates."""
    updates, window = 0, []
    for batch in micro_batches:
        window.append(batch)
        if len(window) == accumulate:
            accumulated_step(model, optimizer, window)
            updates, window = updates + 1, []

    # `if (i + 1) % accumulate == 0` alone would lose these, or leave their gradients for the next epoch.
    if window:
        accumulated_step(model, optimizer, window)
        updates += 1
    return updates


def effective_batch(micro_batch: int, accumulate: int, ranks: int) -> int:
    """Return the number of samples of one update."""
    return micro_batch * accumulate * ranks


# ---- the comparison: 4 x 32 = 1 x 128 ----


def sgd(model: nn.Module, lr: float = 0.02) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def difference(first: nn.Module, second: nn.Module) -> float:
    """Return the largest difference between the parameters of two models."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)


def split(batch: Batch, parts: int) -> list[Batch]:
    """Return a batch as micro-batches of one size."""
    return list(zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True))


def mine(batch: Batch) -> Batch:
    """Return this rank's part of a batch."""
    return split(batch, dist.get_world_size())[dist.get_rank()]


def compare(checks: Checks) -> None:
    """Take one step on 128 samples in several ways, in float64, where rounding is below 1e-15."""
    pictures, labels = ShapeClass(128, pixels=8).batch(range(128))
    batch = pictures.double(), labels

    for norm in ("group", "batch"):
        model = resnet_tiny(norm=norm).double().to(device())
        whole, four = copy.deepcopy(model), copy.deepcopy(model)
        accumulated_step(whole, sgd(whole), [batch])
        accumulated_step(four, sgd(four), split(batch, 4))
        off = difference(whole, four)
        if norm == "group":
            checks.less("4 x 32 = 1 x 128 with GroupNorm", off, 1e-12)
            together = DDP(copy.deepcopy(model))
            accumulated_step(together, sgd(together), split(mine(batch), 4))
            ranks, micro = dist.get_world_size(), 128 // dist.get_world_size() // 4
            checks.less(f"{ranks} ranks x 4 x {micro} = 1 x 128 under DDP", difference(whole, together.module), 1e-12)
            checks.less(
                f"Lockstep with micro_batch={micro} = 1 x 128", difference(whole, with_lockstep(model, micro)), 1e-12
            )
        else:
            # BatchNorm takes mean and variance of a micro-batch, so it trains another model. Rather 32 samples than 128
            # may even be what you want; but it is not the batch of 128.
            checks.true("with BatchNorm it is not", off > 1e-5, f"off by {off:.2g}")


def with_lockstep(model: nn.Module, micro_batch: int) -> nn.Module:
    """Accumulate with Lockstep: `micro_batch` is a setting, and the loop stays as it is."""
    dataset = ShapeClass(128, pixels=8)
    settings = {"global_batch": 128, "micro_batch": micro_batch, "steps": 1, "data": {"shuffle": False}}
    with lockstep.start(**settings, compile=False, log={"progress": "off"}) as run:
        model = copy.deepcopy(model)
        model, _ = run.setup(model, sgd(model))
        for step in run.steps(dataset):
            for pictures, labels in step:
                loss = F.cross_entropy(model(pictures.double()), labels, reduction="sum")
                step.backward(loss, weight=len(labels))
            step.apply()
    return model


def count_collectives(checks: Checks) -> int:
    """Count the all-reduces of an update, with no_sync and without."""
    batch = mine(ShapeClass(32, pixels=8).batch(range(32)))
    model = DDP(resnet_tiny(norm="group").to(device()))
    optimizer = sgd(model)
    accumulated_step(model, optimizer, split(batch, 4))  # DDP arranges its buckets after the first backward

    with CountCollectives() as counted:
        accumulated_step(model, optimizer, split(batch, 4))
    checks.equal("all-reduces of an update with 4 micro-batches", counted.count("all_reduce"), 1)

    with CountCollectives() as careless:
        for pictures, labels in split(batch, 4):
            (F.cross_entropy(model(pictures.to(device())), labels.to(device())) / 4).backward()
    checks.equal("without no_sync", careless.count("all_reduce"), 4)
    return counted.count("all_reduce")


def forget_the_scale(checks: Checks) -> float:
    """Return how many times too large the gradient is if the losses are not scaled."""
    pictures, labels = ShapeClass(32, pixels=8).batch(range(32))
    model = resnet_tiny(norm="group").double()
    norms = []
    for scale in (1 / 4, 1.0):
        model.zero_grad()
        for part, classes in split((pictures.double(), labels), 4):
            (scale * F.cross_entropy(model(part), classes)).backward()
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item())
    checks.near("without the scale the gradient is 4 times too large", norms[1] / norms[0], 4, percent=1e-6)
    return norms[1] / norms[0]


def end_with_a_rest(checks: Checks) -> None:
    """Train on 10 micro-batches, the last one smaller, with 4 to an update: 4, 4 and 2."""
    pictures, labels = ShapeClass(38, pixels=8).batch(range(38))
    batches = list(zip(pictures.double().split(4), labels.split(4), strict=True))
    model = resnet_tiny(norm="group").double().to(device())
    trained, reference = copy.deepcopy(model), copy.deepcopy(model)
    updates = train_epoch(trained, batches, sgd(trained), 4)
    checks.equal("updates of 10 micro-batches, 4 to an update", updates, 3)

    optimizer = sgd(reference)
    for start in (0, 16, 32):
        accumulated_step(reference, optimizer, [(pictures[start : start + 16].double(), labels[start : start + 16])])
    checks.less("the rest counts by its samples", difference(trained, reference), 1e-12)


def kept_for_backward(model: nn.Module, pictures: Tensor) -> int:
    """Return the bytes of activations that a forward pass keeps for the backward pass."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(pictures)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    del output
    return sum(size for pointer, size in sizes.items() if pointer not in weights)


def measure_memory(checks: Checks) -> dict[int, float]:
    """Return the megabytes of activations by batch size."""
    model = resnet_tiny(norm="group")
    megabytes = {batch: kept_for_backward(model, torch.zeros(batch, 3, 16, 16)) / 1e6 for batch in (8, 16, 32, 64, 128)}
    checks.near("1 x 128 keeps 4 times the activations of 4 x 32", megabytes[128] / megabytes[32], 4, percent=2)
    return megabytes


def converge(checks: Checks, micro_batch: int = 8) -> dict[int, list[float]]:
    """Train on the same samples with 1, 2, 4 and 8 micro-batches to an update. Returns the losses along the way.

    The learning rate grows with the effective batch (Goyal et al., 2017), so that fewer updates lead as far.
    """
    generator = torch.Generator().manual_seed(0)
    samples = 16384 if OPTIONS.full else 2048
    labels = torch.arange(samples) % 8
    points = torch.randn(8, 32, generator=generator)[labels] + 2 * torch.randn(samples, 32, generator=generator)
    first = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(device())
    window = effective_batch(micro_batch, 8, dist.get_world_size())

    curves = {}
    for accumulate in (1, 2, 4, 8):
        model = DDP(copy.deepcopy(first))
        optimizer = sgd(model, lr=0.05 * effective_batch(micro_batch, accumulate, dist.get_world_size()) / 128)
        curve = []
        for start in range(0, samples - window + 1, window):
            with torch.no_grad():
                curve.append(F.cross_entropy(model.module(points.to(device())), labels.to(device())).item())
            part = mine((points[start : start + window], labels[start : start + window]))
            train_epoch(model, split(part, 8), optimizer, accumulate)
        curves[accumulate] = curve
    ends = ", ".join(f"{accumulate}: {curve[-1]:.2f}" for accumulate, curve in curves.items())
    checks.true(
        "the loss falls below 0.8 with 1, 2, 4, 8 to an update", all(c[-1] < 0.8 for c in curves.values()), ends
    )
    return curves


def measure_gpu(checks: Checks) -> dict[str, dict[int, float]]:
    """Return the peak memory of a step of ResNet-50 in GB, by batch size, as one batch and as micro-batches of 32."""
    model = resnet50(norm="group").to(device())
    optimizer = sgd(model)
    peaks: dict[str, dict[int, float]] = {"one batch": {}, "micro-batches of 32": {}}

    # cuDNN tries its kernels in the first step, with large workspaces that later steps do not need.
    accumulated_step(model, optimizer, [(torch.zeros(32, 3, 128, 128), torch.zeros(32, dtype=torch.long))])
    for batch in (32, 64, 128, 256, 512):
        for name, parts in (("one batch", 1), ("micro-batches of 32", batch // 32)):
            pictures = torch.zeros(batch, 3, 128, 128)
            torch.cuda.reset_peak_memory_stats()
            accumulated_step(model, optimizer, split((pictures, torch.zeros(batch, dtype=torch.long)), parts))
            peaks[name][batch] = torch.cuda.max_memory_allocated() / 1e9
    one, many = peaks["one batch"], peaks["micro-batches of 32"]
    checks.less("GB of 16 x 32, against 1 x 512", many[512], one[512] / 4)
    checks.near("GB of 16 x 32 = GB of 1 x 32", many[512], one[32], percent=10)
    return peaks


def draw(megabytes: dict[int, float], curves: dict[int, list[float]], peaks: dict[str, dict[int, float]]) -> None:
    """Draw memory against batch, and the loss against samples."""
    drawn = plots.figure(11, 4, columns=2)
    if drawn is None:
        return
    picture, (left, right) = drawn
    if peaks:
        for name, curve in peaks.items():
            left.plot(list(curve), list(curve.values()), "o-", label=name)
        left.set(xlabel="samples of an update", ylabel="peak memory, GB", title="ResNet-50 on a GPU")
    else:
        left.plot(list(megabytes), list(megabytes.values()), "o-", label="one batch")
        left.plot(
            list(megabytes), [megabytes[min(batch, 32)] for batch in megabytes], "o-", label="micro-batches of 32"
        )
        left.set(xlabel="samples of an update", ylabel="activations kept, MB", title="memory")
    left.legend()

    for accumulate, curve in curves.items():
        right.plot(range(1, len(curve) + 1), curve, "o-", label=f"{accumulate} to an update")
    right.set(
        xlabel="samples, in units of the largest batch", ylabel="loss", title="convergence, rate scaled with the batch"
    )
    right.legend()
    plots.save(picture, "02_gradient_accumulation")


def main() -> None:
    dist.init_process_group(backend())
    torch.manual_seed(0)
    checks = Checks("Exercise 2: gradient accumulation")
    compare(checks)
    collectives = count_collectives(checks)
    unscaled = forget_the_scale(checks)
    end_with_a_rest(checks)
    megabytes = measure_memory(checks)
    curves = converge(checks)
    checks.equal("effective batch of 4 ranks x 32 x 4", effective_batch(32, 4, 4), 512)
    peaks = measure_gpu(checks) if OPTIONS.full and device().type == "cuda" else {}
    if dist.get_rank() == 0:
        reveal("2", QUESTIONS[0], computed=1, measured=collectives)
        reveal("2", QUESTIONS[1], computed=4, measured=unscaled)
        reveal("2", QUESTIONS[2], computed=4, measured=megabytes[128] / megabytes[32])
        draw(megabytes, curves, peaks)
    checks.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="train longer; on a GPU, measure memory against batch size")
    parser.add_argument("--local-rank", help=argparse.SUPPRESS)  # torch.distributed.launch passes it
    OPTIONS = parser.parse_args()
    ask("2", QUESTIONS)
    run_ranks(main)
