"""Exercise 1: data parallelism by hand, beside torch's DDP and Lockstep.

Every rank has a copy of the model and its own part of each batch. After the backward pass the ranks average their
gradients with an all-reduce, so all copies take the same step. This script shows that the result is the model that one
process would have trained on the whole batch.

    python lab/solution/01_ddp_basic.py
    torchrun --nproc-per-node 2 lab/solution/01_ddp_basic.py
    python -m torch.distributed.launch --nproc-per-node 2 lab/solution/01_ddp_basic.py
"""

import argparse
import copy
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

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

QUESTIONS = [
    Question(
        "megabytes",
        "resnet_tiny has 175,128 parameters in float32. How much does a rank all-reduce in one step?",
        "MB",
        "4 bytes x parameters",
    ),
    Question(
        "speedup", "How many times as fast as one process are two ranks, on this machine?", "x", "number of ranks"
    ),
]


# ---- 1. the process group ----


def setup() -> torch.device:
    """Join the group that the launcher has announced in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    dist.init_process_group(backend())  # nccl if each rank has a GPU of its own, else gloo

    # The device follows from LOCAL_RANK. The global rank would name a GPU that a second machine does not have.
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    return device()


def cleanup() -> None:
    """Leave the group."""
    dist.destroy_process_group()


# ---- 2. DDP from scratch ----


class OwnDDP(nn.Module):
    """Averages the gradients of all ranks while the backward pass is still running."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.pending: list[tuple[dist.Work | None, Tensor, float]] = []
        self.times: list[
            tuple[float, float]
        ] = []  # when each gradient was ready and when its mean was, for the picture

        # All copies begin with the weights and buffers of rank 0.
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)

        # Autograd calls the hook as soon as a parameter's gradient is complete: the last layer's comes first.
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self._gradient_is_ready)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.module(*inputs)

    def _gradient_is_ready(self, parameter: Tensor) -> None:
        # Asynchronous: autograd continues with the layer before, while the gradient is on the wire.
        assert parameter.grad is not None
        ready = time.perf_counter()
        self.pending.append((dist.all_reduce(parameter.grad, async_op=True), parameter.grad, ready))

        # With the last gradient the backward pass ends; by then all sums must have arrived. (A parameter that the
        # forward pass did not use would never become ready: torch's DDP has find_unused_parameters for that.)
        if len(self.pending) == len(self.trained):
            self.times.clear()
            for work, gradient, ready in self.pending:
                assert work is not None
                work.wait()
                gradient /= dist.get_world_size()  # all_reduce adds; the gradient of the whole batch is the mean
                self.times.append((ready, time.perf_counter()))
            self.pending.clear()


# ---- 3. each rank's part of the data ----


def make_loader(dataset: Dataset, batch: int) -> DataLoader:
    """Return a loader over this rank's samples: of each epoch's order, rank r of N takes r, r + N, r + 2N, ..."""
    sampler = DistributedSampler(
        dataset, num_replicas=dist.get_world_size(), rank=dist.get_rank(), shuffle=True, seed=0
    )
    return DataLoader(dataset, batch_size=batch, sampler=sampler)


# ---- 4. the loop ----


def train(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Train as on one process: the gradients are averaged inside of `backward`."""
    for epoch in range(epochs):
        # Without this line every epoch has the order of the first.
        loader.sampler.set_epoch(epoch)

        for pictures, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(pictures.to(device())), labels.to(device()))
            loss.backward()
            optimizer.step()


# ---- 5. the proof ----


def replica_difference(model: nn.Module) -> float:
    """Return how far any parameter of any rank is from rank 0's. All ranks call it, and all get the same number."""
    largest = torch.zeros((), device=device())
    for parameter in model.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, src=0)
        largest = torch.maximum(largest, (parameter.detach() - first).abs().max().to(largest))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


# ---- the comparison: own DDP = torch's DDP = Lockstep = one process ----

EPOCHS, STEPS, BATCH = 2, 5, 4  # steps of an epoch, samples of a rank in a step
LR = 0.02


class InDouble(Dataset[tuple[Tensor, int]]):
    """The pictures in float64: rounding errors are below 1e-15, so a larger difference is a mistake."""

    def __init__(self, pictures: ShapeClass):
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture, label = self.pictures[index]
        return picture.double(), label


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=5e-4)


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer, dataset: Dataset, indices: list[int]) -> None:
    """Take the step of one process on a whole batch."""
    pictures, labels = next(iter(DataLoader(dataset, batch_size=len(indices), sampler=indices)))
    optimizer.zero_grad()
    F.cross_entropy(model(pictures.to(device())), labels.to(device())).backward()
    optimizer.step()


def train_alone(model: nn.Module, dataset: Dataset, *, epochs: int = EPOCHS, shuffle: bool = True) -> nn.Module:
    """Train on the batches of all ranks together, as one process would."""
    ranks, optimizer = dist.get_world_size(), sgd(model)
    for epoch in range(epochs):
        orders = []
        for rank in range(ranks):
            sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=shuffle, seed=0)
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        for start in range(0, len(orders[0]), BATCH):
            step_alone(model, optimizer, dataset, [i for order in orders for i in order[start : start + BATCH]])
    return model


def train_with_lockstep(model: nn.Module, dataset: Dataset) -> nn.Module:
    """Train the same with Lockstep: no sampler, no set_epoch and no wrapper; the loss is a sum with its weight."""
    settings = {"global_batch": BATCH * dist.get_world_size(), "epochs": 1, "data": {"shuffle": False}}
    # Not compiled on a GPU either: that would take a minute, for five steps.
    with lockstep.start(**settings, compile=False, log={"progress": "off"}) as run:
        model, _ = run.setup(model, sgd(model))
        for step in run.steps(dataset):
            for pictures, labels in step:
                loss = F.cross_entropy(model(pictures), labels, reduction="sum")
                step.backward(loss, weight=len(labels))
            step.apply()
    return model


def difference(first: nn.Module, second: nn.Module) -> float:
    """Return the largest difference between the parameters of two models."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)


def compare(checks: Checks, model: nn.Module) -> list[float]:
    """Train copies of one model in five ways. Returns how far replicas without DDP are apart, step by step."""
    pixels = 32 if device().type == "cuda" else 16
    dataset = InDouble(ShapeClass(STEPS * BATCH * dist.get_world_size(), pixels=pixels))
    model = model.double().to(device())

    alone = train_alone(copy.deepcopy(model), dataset)
    own = OwnDDP(copy.deepcopy(model))
    train(own, make_loader(dataset, BATCH), sgd(own), EPOCHS)
    theirs = DDP(copy.deepcopy(model))
    train(theirs, make_loader(dataset, BATCH), sgd(theirs), EPOCHS)

    steps = EPOCHS * STEPS
    checks.less(f"own DDP = torch's DDP after {steps} steps", difference(own.module, theirs.module), 1e-6)
    checks.less(f"own DDP = one process after {steps} steps", difference(own.module, alone), 1e-6)
    checks.less("all replicas are the same", replica_difference(own), 1e-12)

    # Lockstep deals out the samples in another way; in the order of the dataset each batch has the same samples.
    ours = train_with_lockstep(copy.deepcopy(model), dataset)
    in_order = train_alone(copy.deepcopy(model), dataset, epochs=1, shuffle=False)
    checks.less(f"Lockstep = one process after {STEPS} steps", difference(ours, in_order), 1e-6)

    # Without DDP each rank trains its own model, and no error says so.
    apart = []
    replica = copy.deepcopy(model)
    optimizer = sgd(replica)
    for pictures, labels in make_loader(dataset, BATCH):
        optimizer.zero_grad()
        F.cross_entropy(replica(pictures.to(device())), labels.to(device())).backward()
        optimizer.step()
        apart.append(replica_difference(replica))
    checks.true("without it the replicas differ", apart[-1] > 1e-4, f"by {apart[-1]:.2g}")
    return apart


def compare_orders(checks: Checks) -> None:
    """Show what set_epoch does, and what becomes of a number of samples that the ranks cannot share evenly."""
    loader = make_loader(ShapeClass(64), BATCH)
    sampler = loader.sampler
    assert isinstance(sampler, DistributedSampler)
    forgotten = [list(sampler) for _ in range(2)]
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    checks.true("without set_epoch the order of the samples repeats", forgotten[0] == forgotten[1], forgotten[0][:5])
    checks.true("with set_epoch it changes", orders[0] != orders[1], f"{orders[0][:5]}, then {orders[1][:5]}")

    # Every rank gets the same number of samples: the sampler repeats some.
    ranks = dist.get_world_size()
    samples = 10 * ranks + 1
    counts = [len(DistributedSampler(range(samples), ranks, rank)) for rank in range(ranks)]
    checks.equal(f"of {samples} samples the sampler makes", sum(counts), 11 * ranks)


def measure(checks: Checks) -> list[tuple[float, float]]:
    """Count the bytes and take the time of steps in float32. Returns when gradients were ready, and when reduced."""
    ranks, steps = dist.get_world_size(), 4
    dataset = ShapeClass(steps * 16 * ranks, pixels=16)
    dataset.batch(range(len(dataset)))  # drawn before the clock starts
    model = resnet_tiny(norm="group").to(device())
    own, optimizer = OwnDDP(model), sgd(model)
    loader = make_loader(dataset, 16)

    with CountCollectives() as counted:
        train(own, make_loader(Subset(dataset, range(16 * ranks)), 16), optimizer, 1)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    megabytes = counted.bytes("all_reduce") / 1e6
    checks.equal("bytes of a step's all-reduces", counted.bytes("all_reduce"), 4 * parameters)

    began = time.perf_counter()
    train(own, loader, optimizer, 1)
    together = time.perf_counter() - began

    # The same batches on one process, while the other ranks wait.
    dist.barrier()
    if dist.get_rank() == 0:
        alone = resnet_tiny(norm="group").to(device())
        optimizer = sgd(alone)
        step_alone(alone, optimizer, dataset, list(range(16 * ranks)))  # the first step is slower than the others
        began = time.perf_counter()
        for start in range(0, len(dataset), 16 * ranks):
            step_alone(alone, optimizer, dataset, list(range(start, start + 16 * ranks)))
        speedup = (time.perf_counter() - began) / together
        reveal("1", QUESTIONS[0], computed=4 * parameters / 1e6, measured=megabytes)
        reveal("1", QUESTIONS[1], computed=ranks, measured=speedup)
        efficiency = 100 * speedup / ranks
        print(f"  scaling_efficiency: {speedup:.2f} / {ranks} = {efficiency:.0f} % (lockstep bench strong repeats it)")
    dist.barrier()
    return own.times


def train_to_the_end(checks: Checks, *, big: bool) -> None:
    """Train a few epochs of 10,000 pictures in batches of 128 under torch's DDP, and test.

    Three epochs of 8 classes with `resnet_tiny`; or, `big`, 20 of 100 classes at 128 x 128 with a ResNet-50.
    """
    batch, ranks = 128, dist.get_world_size()
    epochs, aim = (20, 0.95) if big else (3, 0.85)
    kind = {"classes": 100, "pixels": 128} if big else {}
    dataset, test = ShapeClass(10_000, **kind), ShapeClass(2_000, seed=1, **kind)
    model = DDP((resnet50(100) if big else resnet_tiny()).to(device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    loader = make_loader(dataset, batch // ranks)
    total = epochs * len(loader)
    warmup = max(1, total // 20)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, total_iters=warmup),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - warmup),
        ],
        [warmup],
    )
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    train(model, loader, optimizer, epochs)

    # Each rank tests a part; sums and counts travel together, and are divided once.
    model.eval()
    right = torch.zeros(2, device=device())
    with torch.no_grad():
        for start in range(dist.get_rank() * 100, len(test), ranks * 100):
            pictures, labels = test.batch(range(start, start + 100))
            found = model.module(pictures.to(device())).argmax(1).cpu()
            right += torch.tensor([(found == labels).sum(), len(labels)], device=device())
    dist.all_reduce(right)
    accuracy = (right[0] / right[1]).item()
    checks.true(f"test accuracy after {epochs} epochs is at least {aim}", accuracy >= aim, f"{accuracy:.3f}")


def draw(times: list[tuple[float, float]], apart: list[float]) -> None:
    """Draw each gradient's way in one step, and how replicas drift apart."""
    drawn = plots.figure(11, 4, columns=2)
    if drawn is None:
        return
    picture, (left, right) = drawn
    began = times[0][0]
    for position, (ready, reduced) in enumerate(times):
        left.barh(position, (reduced - ready) * 1e3, left=(ready - began) * 1e3, height=0.8, color="tab:blue")
    left.plot([(ready - began) * 1e3 for ready, _ in times], range(len(times)), ".", color="black", label="ready")
    left.set(
        xlabel="ms since the first gradient",
        ylabel="gradient, last layer first",
        title="each gradient: ready, then averaged",
    )
    left.legend(loc="lower right")

    right.plot(range(1, len(apart) + 1), apart, "o-", color="tab:red", label="no all-reduce")
    right.axhline(0, color="tab:blue", label="own DDP: 0")
    right.set(xlabel="step", ylabel="largest difference", title="difference between replicas")
    right.legend()
    plots.save(picture, "01_ddp_basic")


def main() -> None:
    setup()
    torch.manual_seed(0)
    checks = Checks("Exercise 1: DDP by hand")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks on {device().type}, backend {dist.get_backend()}")
    big = OPTIONS.full and device().type == "cuda"
    apart = compare(checks, resnet50(8, norm="group") if big else resnet_tiny(norm="group"))
    compare_orders(checks)
    times = measure(checks)
    if OPTIONS.full:
        train_to_the_end(checks, big=big)
    if dist.get_rank() == 0:
        draw(times, apart)
    checks.finish()
    cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--full", action="store_true", help="also train to 85 %% accuracy; on a GPU, a ResNet-50 to 95 %%"
    )
    parser.add_argument("--local-rank", help=argparse.SUPPRESS)  # torch.distributed.launch passes it
    OPTIONS = parser.parse_args()
    ask("1", QUESTIONS)
    run_ranks(main)
