"""DataParallel against DistributedDataParallel: the same gradients, but one process and one GPU in the middle.

python lab/demos/dp_vs_ddp.py

DataParallel needs at least two GPUs; with fewer this script says so, and compares what can be compared: the gradients,
the bytes that each rank sends and receives, and how many threads can run Python at the same time.
"""

import argparse
import time
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.lab import Checks, CountCollectives, mlp_wide, resnet50, run_ranks
from lockstep.lab.ranks import backend

WIDTH, BATCH = 256, 32


def data_parallel_by_hand(model: nn.Module, inputs: Tensor, replicas: int) -> dict[str, int]:
    """Do on the CPU what DataParallel does in one step on GPUs, and return the bytes that leave and reach GPU 0."""
    moved = {"weights out": 0, "inputs out": 0, "outputs in": 0, "gradients in": 0}
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())

    # 1. The batch is split, and the model copied to the other GPUs: in every step, since GPU 0 has new weights.
    shards = inputs.chunk(replicas)
    copies = [model, *(_copy(model) for _ in range(replicas - 1))]
    moved["weights out"] = (replicas - 1) * size
    moved["inputs out"] = sum(shard.numel() * shard.element_size() for shard in shards[1:])

    # 2. One thread for each GPU, all in this process: only one of them can run Python at any time.
    outputs: list[Tensor] = [torch.empty(0)] * replicas

    def forward(index: int) -> None:
        outputs[index] = copies[index](shards[index])

    threads = [Thread(target=forward, args=(index,)) for index in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    # 3. GPU 0 gathers all outputs, computes the loss, and adds up the gradients of the copies.
    moved["outputs in"] = sum(output.numel() * output.element_size() for output in outputs[1:])
    torch.cat(outputs).square().mean().backward()
    for copied in copies[1:]:
        for parameter, other in zip(model.parameters(), copied.parameters(), strict=True):
            assert parameter.grad is not None
            assert other.grad is not None
            parameter.grad += other.grad
    moved["gradients in"] = (replicas - 1) * size
    return moved


def _copy(model: nn.Module) -> nn.Module:
    copied = mlp_wide(WIDTH, 2)
    copied.load_state_dict(model.state_dict())
    return copied


def gradient(model: nn.Module) -> Tensor:
    """Return all gradients as one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def compare(checks: Checks) -> None:
    """Compare gradients and bytes on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain, inputs = mlp_wide(WIDTH, 2), torch.randn(BATCH, WIDTH)
    size = sum(parameter.numel() * parameter.element_size() for parameter in plain.parameters())
    plain(inputs).square().mean().backward()

    by_hand = _copy(plain)
    moved = data_parallel_by_hand(by_hand, inputs, world)
    replica = DistributedDataParallel(_copy(plain))
    with CountCollectives() as counted:
        replica(inputs.chunk(world)[rank]).square().mean().backward()

    expected = gradient(plain)
    checks.less(
        "DataParallel's gradient is that of the whole batch", (gradient(by_hand) - expected).abs().max().item(), 1e-6
    )
    checks.less("DDP's gradient is the same", (gradient(replica) - expected).abs().max().item(), 1e-6)

    # What goes through the busiest GPU in one step. A ring sends and receives 2 (N - 1) / N of the gradients.
    first = sum(moved.values())
    ring = 2 * 2 * (world - 1) / world * counted.bytes("all_reduce")
    checks.equal("DDP all-reduces every gradient once, and nothing else", counted.bytes(), size)
    if rank == 0:
        print(f"\n  bytes through the busiest of {world} ranks in a step, {size:,} bytes of weights:")
        print(f"    DataParallel, GPU 0: {first:,} ({', '.join(f'{name} {count:,}' for name, count in moved.items())})")
        print(f"    DDP, any rank:       {ring:,.0f} (a ring all-reduce: 2 (N - 1) / N sent, as much received)")
        print("  with N GPUs, GPU 0 of DataParallel moves 2 (N - 1) times the weights, a rank of DDP less than 4 times")

    # The same batch on 8 GPUs: GPU 0 serves seven others, a ring stays a ring.
    busiest = sum(data_parallel_by_hand(_copy(plain), inputs, 8).values())
    share = busiest / (2 * 2 * 7 / 8 * size)
    checks.true("on 8 GPUs the busiest one moves more with DataParallel", share > 3, f"{share:.1f} times as much")


def python_threads() -> tuple[float, float]:
    """Return the seconds of one thread of Python, and of two that do the same work each."""

    def work() -> None:
        total = 0
        for number in range(300_000):
            total += number

    seconds = []
    for count in (1, 2):
        threads = [Thread(target=work) for _ in range(count)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds.append(time.perf_counter() - begun)
    return seconds[0], seconds[1]


def on_gpus() -> None:
    """Time ResNet-50 under DataParallel on all GPUs, in this process."""
    model = nn.DataParallel(resnet50().cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gpus = torch.cuda.device_count()
    pictures = torch.randn(64 * gpus, 3, 224, 224, device="cuda")
    for step in range(12):
        if step == 2:
            torch.cuda.synchronize()
            begun = time.perf_counter()
        optimizer.zero_grad()
        model(pictures).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    print(f"  DataParallel on {gpus} GPUs: {64 * gpus * 10 / (time.perf_counter() - begun):.0f} pictures/s")
    used = [torch.cuda.max_memory_allocated(gpu) / 1e9 for gpu in range(gpus)]
    print(f"  memory by GPU: {', '.join(f'{gigabytes:.1f}' for gigabytes in used)} GB")


def main() -> None:
    """Compare on this rank."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if backend() == "nccl" else "gloo")
    checks = Checks("DataParallel against DistributedDataParallel")
    compare(checks)
    if dist.get_rank() == 0:
        one, two = python_threads()
        print(f"  Python in 1 thread takes {one * 1000:.0f} ms, twice the work in 2 threads {two * 1000:.0f} ms:")
        print("  threads of one process take turns (the GIL); the processes of DDP do not")
        gpus = torch.cuda.device_count()
        if gpus < 2:
            print(f"  DataParallel itself needs at least 2 GPUs, this machine has {gpus}: its speed is not measured")
        else:
            on_gpus()
    checks.finish()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    run_ranks(main)
