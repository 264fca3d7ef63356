"""Exercise 6: profiling. Where a step's time goes, and how communication hides behind the backward.

python lab/solution/06_profiling.py
torchrun --nproc-per-node 2 lab/solution/06_profiling.py

On a GPU it also trains ResNet-50, and measures for which share of the time the GPU is busy.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, Dataset

import lockstep
from lockstep.lab import plots, predictions
from lockstep.lab.checks import Checks
from lockstep.lab.counting import CountCollectives
from lockstep.lab.predictions import Question
from lockstep.lab.ranks import backend, device, run_ranks
from lockstep.lab.workload.models import mlp_wide, resnet50

HIDDEN = Question(
    "hidden",
    "A backward makes 7 gradients of equal size, one bucket each. Which share of the bytes is sent before it ends?",
    "%",
    "(k - 1) / k of k buckets: the last bucket is full when the last gradient is there",
)
BUCKETS = Question(
    "buckets",
    "Six layers of 66,048 bytes and a head of 4,128: how many all-reduces with buckets of at least 64 KB?",
    "",
    "each layer fills a bucket, the head shares one",
)
QUESTIONS = [HIDDEN, BUCKETS]

Interval = tuple[float, float]  # begin and end


# ---- 1. Buckets -----------------------------------------------------------------------------------------------


def make_buckets(parameters: list[nn.Parameter], bucket_bytes: float) -> list[list[nn.Parameter]]:
    """Group parameters, in the order in which backward makes their gradients: the last layer comes first.

    A bucket is closed when it holds at least `bucket_bytes`.
    """
    buckets: list[list[nn.Parameter]] = [[]]
    for parameter in reversed(parameters):
        if bytes_of(buckets[-1]) >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def bytes_of(parameters: list[nn.Parameter]) -> int:
    """Return the bytes of these parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


@dataclass(frozen=True)
class Event:
    """Something that happened in a backward: a gradient is there ("gradient"), or its bucket is sent ("all_reduce")."""

    name: str
    bytes: int
    at: float = field(default_factory=time.perf_counter)


class BucketedDDP:
    """Averages gradients over the ranks, bucket by bucket, while the backward is still making others."""

    def __init__(self, model: nn.Module, bucket_bytes: float):
        self.buckets = make_buckets(list(model.parameters()), bucket_bytes)
        self.events: list[Event] = []
        self._missing = [len(bucket) for bucket in self.buckets]
        self._sent: list[tuple[int, Tensor, dist.Work]] = []
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self._ready, index))

    def _ready(self, index: int, parameter: Tensor) -> None:
        """Note that a gradient is there; send its bucket if it was the last one missing."""
        self.events.append(Event("gradient", parameter.numel() * parameter.element_size()))
        self._missing[index] -= 1
        if self._missing[index] == 0:
            # All ranks run the same model, so they fill, and send, their buckets in the same order.
            flat = torch.cat([parameter.grad.flatten() for parameter in self.buckets[index]])
            self.events.append(Event("all_reduce", flat.numel() * flat.element_size()))
            # It returns at once; other threads send while this one computes the next gradient.
            work = dist.all_reduce(flat, async_op=True)
            self._sent.append((index, flat, work))

    def finish(self) -> None:
        """Wait for all buckets, and put the averages into the gradients. Call it before optimizer.step()."""
        for index, flat, work in self._sent:
            work.wait()
            flat /= dist.get_world_size()
            offset = 0
            for parameter in self.buckets[index]:
                parameter.grad.copy_(flat[offset : offset + parameter.numel()].view_as(parameter))
                offset += parameter.numel()
        self._sent.clear()
        self._missing = [len(bucket) for bucket in self.buckets]


def overlap(events: list[Event]) -> float:
    """Return the share of bytes whose all-reduce began before the last gradient was there. Only the order counts."""
    last = max(place for place, event in enumerate(events) if event.name == "gradient")
    sent = [(place, event.bytes) for place, event in enumerate(events) if event.name == "all_reduce"]
    return sum(size for place, size in sent if place < last) / sum(size for _, size in sent)


# ---- 2. Where the time goes -----------------------------------------------------------------------------------


def covered(intervals: list[Interval]) -> list[Interval]:
    """Merge intervals that overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: list[Interval]) -> float:
    """Return how much time the intervals cover; time that two of them share counts once."""
    return sum(end - begin for begin, end in covered(intervals))


def communication_fraction(compute: list[Interval], communication: list[Interval], step: float) -> float:
    """Return the share of a step in which it communicates and does not compute: the exposed communication."""
    return (length(compute + communication) - length(compute)) / step


def advice(fraction: float) -> str:
    """Return a warning if more than 20 % of a step is exposed communication; otherwise nothing."""
    if fraction <= 0.20:
        return ""
    return (
        f"warning: {100 * fraction:.0f} % of the step is communication that nothing hides (more than 20 %). "
        "Use a larger batch per rank, overlap it with the backward (buckets), or compress gradients."
    )


def trace(model: nn.Module, sync: BucketedDDP, inputs: Tensor, steps: int = 3) -> dict[str, list[Interval]]:
    """Profile a few steps; write the trace for chrome://tracing; return the intervals of each kind, in microseconds."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            with record_function("step"):
                model(inputs).square().mean().backward()
                with record_function("wait"):
                    sync.finish()
                model.zero_grad()
    if dist.get_rank() == 0:
        path = predictions.folder() / "06_trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        say(f"  trace: {path} (open it in chrome://tracing or ui.perfetto.dev)")

    # gloo:all_reduce lasts from the call to its end, on another thread. Matrix products are nearly all of the compute.
    kinds: dict[str, list[Interval]] = {"step": [], "wait": [], "compute": [], "communication": []}
    for event in profiler.events():
        interval = (event.time_range.start, event.time_range.end)
        if event.name in ("step", "wait"):
            kinds[event.name].append(interval)
        elif event.name.startswith(("gloo:", "nccl:")):
            kinds["communication"].append(interval)
        elif event.name.startswith("aten::") and event.cpu_parent is not None and event.cpu_parent.name != "wait":
            kinds["compute"].append(interval)
    return kinds


# ---- 3. The loader --------------------------------------------------------------------------------------------


class SlowDisk(Dataset):
    """Samples that take 2 ms each to read. A sample is the time at which it was read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> float:
        time.sleep(0.002)
        return time.monotonic()


def read_ahead(workers: int, pin: bool) -> tuple[int, float]:
    """Return how many batches were read before the step that needs them began to wait, and the share of time waited."""
    prefetch = {"prefetch_factor": 2, "multiprocessing_context": "fork"} if workers else {}
    # float64: a time in float32 is rounded to minutes.
    collate = partial(torch.tensor, dtype=torch.float64)
    loader = DataLoader(SlowDisk(), batch_size=8, num_workers=workers, pin_memory=pin, collate_fn=collate, **prefetch)
    ahead, waited, begun = 0, 0.0, time.monotonic()
    batches = iter(loader)
    for _ in range(len(loader)):
        asked = time.monotonic()
        batch = next(batches)
        waited += time.monotonic() - asked
        ahead += bool((batch < asked).all())
        time.sleep(0.016)  # the step
    return ahead, waited / (time.monotonic() - begun)


# ---- 4. The checks --------------------------------------------------------------------------------------------


def buckets_and_overlap(checks: Checks) -> dict[str, list[Event]]:
    """Compare bucket sizes: number of all-reduces, overlap, and the same gradients in all of them."""
    torch.manual_seed(0)
    model = mlp_wide(128, 6).to(device())
    inputs = torch.randn(32, 128, generator=torch.Generator().manual_seed(dist.get_rank())).to(device())

    # What all of them must give: torch's DDP.
    replica = DistributedDataParallel(mlp_wide(128, 6).to(device()))
    replica.module.load_state_dict(model.state_dict())
    replica(inputs).square().mean().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in replica.parameters()])

    total = bytes_of(list(model.parameters()))
    say(f"\n  buckets of      number  sent before the backward ends  ms per step   ({total:,} bytes of gradients)")
    timelines = {}
    for name, size in {"one flat": math.inf, "256 KB": 2**18, "64 KB": 2**16, "each tensor": 1}.items():
        fresh = mlp_wide(128, 6).to(device())
        fresh.load_state_dict(model.state_dict())
        sync = BucketedDDP(fresh, size)
        with CountCollectives() as counted:
            fresh(inputs).square().mean().backward()
            sync.finish()
        found = torch.cat([parameter.grad.flatten() for parameter in fresh.parameters()])
        timelines[name], share = list(sync.events), overlap(sync.events)
        begun = time.perf_counter()
        for _ in range(5):
            fresh.zero_grad()
            fresh(inputs).square().mean().backward()
            sync.finish()
        spent = (time.perf_counter() - begun) / 5 * 1000
        say(f"  {name:<14}  {len(sync.buckets):<6}  {100 * share:<29.0f}  {spent:.1f}")

        checks.less(f"{name}: gradients are those of torch's DDP", (found - expected).abs().max().item(), 1e-6)
        checks.equal(f"{name}: one all-reduce for each bucket", counted.count("all_reduce"), len(sync.buckets))
        hidden = 1 - bytes_of(sync.buckets[-1]) / total
        checks.less(f"{name}: that is all but the last bucket", abs(share - hidden), 1e-9)
        if name == "one flat":
            checks.equal("one flat bucket: no overlap", share, 0.0)
        else:
            checks.true(f"{name}: overlap is above 0", share > 0, f"{100 * share:.0f} %")
        if name == "64 KB" and dist.get_rank() == 0:
            predictions.reveal("6", BUCKETS, computed=6, measured=len(sync.buckets))

    equal = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(7))).to(device())
    sync = BucketedDDP(equal, 1)
    equal(torch.ones(1, 16, device=device())).sum().backward()
    sync.finish()
    if dist.get_rank() == 0:
        predictions.reveal("6", HIDDEN, computed=100 * 6 / 7, measured=100 * overlap(sync.events))
    checks.near("7 equal buckets: 6 of 7 are hidden", overlap(sync.events), 6 / 7, percent=0.1)
    return timelines


def split(checks: Checks) -> dict[str, list[Interval]]:
    """Profile a model with little compute, and say whether communication is its bottleneck."""
    torch.manual_seed(0)
    model = mlp_wide(256, 4)
    sync = BucketedDDP(model, 2**18)
    kinds = trace(model, sync, torch.randn(16, 256))
    step = length(kinds["step"])
    fraction = communication_fraction(kinds["compute"], kinds["communication"], step)
    busy = length(kinds["compute"]) / step
    say(f"  compute {100 * busy:.0f} % of the steps, exposed communication {100 * fraction:.0f} %")
    say(f"  {advice(fraction) or 'communication is not the bottleneck (at most 20 %)'}")
    checks.equal(
        "the trace has one all-reduce for each bucket and step", len(kinds["communication"]), 3 * len(sync.buckets)
    )
    checks.true("the parts of a step are parts", 0 < busy <= 1 and 0 <= fraction < 1, f"{busy:.2f} and {fraction:.2f}")

    # The rule itself, on a step of 100 whose parts are known: 70 of compute, and 60 of communication, 35 of it hidden.
    known = communication_fraction([(0, 40), (35, 70)], [(35, 95)], 100)
    checks.near("25 of 100 are exposed", known, 0.25, percent=0.1)
    checks.true("that is more than 20 %: a warning", advice(known).startswith("warning"), advice(known)[:40])
    checks.equal("at 20 % there is none", advice(0.20), "")
    return kinds


def loading(checks: Checks) -> None:
    """Compare loaders: with workers, batches are read while the step before them runs."""
    pin = device().type == "cuda"
    say("\n  workers  batches of 8 that were ready  waited")
    ahead = {}
    for workers in (0, 1, 2):
        ahead[workers], waited = read_ahead(workers, pin)
        say(f"  {workers:<7}  {ahead[workers]:<28}  {100 * waited:.0f} %")
    say(f"  pinned memory: {'on' if pin else 'off, there is no GPU to copy to'}")
    checks.equal("without workers no batch is read ahead", ahead[0], 0)
    checks.true("with two workers batches are read ahead", ahead[2] > 0, f"{ahead[2]} of 8")


def resnet_busy(checks: Checks) -> float:
    """Train ResNet-50 on the GPU, and return the time of its kernels divided by the wall time.

    The host must always be ahead of the GPU: the batch is large, so that a kernel takes longer than its launch; nothing
    asks the GPU for a number inside of a step; and the batch is on the GPU before the step that needs it.
    """
    torch.backends.cudnn.benchmark = True  # the first steps choose the fastest convolutions
    batch, steps = 256, 20
    model = resnet50().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    pictures = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    classes = torch.randint(1000, (batch,), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(pictures), classes)
        loss.backward()
        optimizer.step()

    busy, wall = gpu_busy(step, steps)
    rate = batch * steps / wall
    say(f"  ResNet-50, batch {batch}, bf16: {1000 * wall / steps:.1f} ms per step, {rate:.0f} pictures/s")
    checks.true("the GPU is busy for at least 90 % of the time", busy >= 0.9, f"{100 * busy:.1f} %")
    return busy


def gpu_busy(step: Callable[[], None], steps: int) -> tuple[float, float]:
    """Return which share of the wall time kernels ran, and the wall time in seconds."""
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - begun
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return min(1.0, length(kernels) / 1e6 / wall), wall


def cpu_busy() -> float:
    """Return for which share of the time this process computes, in steps without communication."""
    model, inputs = mlp_wide(512, 2), torch.randn(256, 512)
    begun, used = time.perf_counter(), time.process_time()
    for _ in range(10):
        model(inputs).square().mean().backward()
    return min(1.0, (time.process_time() - used) / (time.perf_counter() - begun))


def with_lockstep(checks: Checks) -> None:
    """Let Lockstep do it: the bucket size is a setting, and its metrics say how long a step waits for data."""
    inputs, calls = torch.randn(192, 128, generator=torch.Generator().manual_seed(0)), {}
    for bucket_mb in (25.0, 0.0625):
        folder = predictions.folder() / f"06_buckets_{bucket_mb:g}_{os.environ['MASTER_PORT']}"
        with lockstep.start(
            global_batch=64,
            steps=3,
            compile=False,  # for three steps it would take longer than they do
            ddp={"bucket_mb": bucket_mb},
            run_dir=str(folder),
            log={"progress": "off", "every": 1},
            checkpoint={"at_end": False},
        ) as run:
            model = mlp_wide(128, 6)
            model, _ = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
            for step in run.steps(inputs):
                with CountCollectives() as counted:
                    for batch in step:
                        step.backward(model(batch).square().sum(), weight=len(batch))
                    step.apply()
        calls[bucket_mb] = counted.count("all_reduce")
        if dist.get_rank() == 0:
            last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
            times = (
                f"{1000 * last['step_s']:.1f} ms per step, {1000 * last['data_wait_s']:.1f} ms of it waiting for data"
            )
            say(f"  Lockstep, ddp.bucket_mb={bucket_mb:g}: {calls[bucket_mb]} all-reduces, {times}")
    if dist.get_world_size() == 1:
        say("  one rank has nothing to all-reduce: type LAB_NPROC=2 before the command to compare sizes of buckets")
        return
    checks.true("Lockstep: smaller buckets, more all-reduces", calls[0.0625] > calls[25.0], calls)


# ---- The script -----------------------------------------------------------------------------------------------


def draw(timelines: dict[str, list[Event]], kinds: dict[str, list[Interval]]) -> None:
    """Draw when gradients and buckets come, and how busy the rank is over the profiled steps."""
    drawn = plots.figure(8, 5)
    if drawn is None:
        return
    picture = drawn[0]
    picture.clear()
    upper, lower = picture.subplots(2, 1)
    for row, events in enumerate(timelines.values()):
        for place, event in enumerate(events):
            gradient = event.name == "gradient"
            upper.plot(place, row, "|" if gradient else "^", color="tab:blue" if gradient else "tab:red", markersize=9)
    upper.set_yticks(range(len(timelines)), timelines)
    upper.invert_yaxis()
    upper.set(xlabel="order", title="Gradients (|) and all-reduces (^) of one backward, in their order")

    first = min(begin for begin, _ in kinds["step"])
    for row, (kind, color) in enumerate({"compute": "tab:blue", "communication": "tab:red", "wait": "gray"}.items()):
        bars = [((begin - first) / 1000, (end - begin) / 1000) for begin, end in covered(kinds[kind])]
        lower.broken_barh(bars, (row - 0.4, 0.8), color=color)
    lower.set_yticks(range(3), ["compute", "communication", "wait"])
    lower.set(xlabel="milliseconds", title="Three profiled steps of rank 0")
    plots.save(picture, "06_profiling")


def remember_busy(where: str, busy: float) -> None:
    """Write down how busy the device was, for `lockstep lab ready`."""
    predictions.folder().mkdir(parents=True, exist_ok=True)
    (predictions.folder() / "busy.json").write_text(json.dumps({"device": where, "busy": busy}))


def say(line: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    """Run all parts on this rank."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if backend() == "nccl" else "gloo")
    checks = Checks("Exercise 6: profiling")
    timelines = buckets_and_overlap(checks)
    kinds = split(checks)
    loading(checks)
    busy = resnet_busy(checks) if device().type == "cuda" else cpu_busy()
    say(f"  the {device().type} computes for {100 * busy:.0f} % of the time")
    with_lockstep(checks)
    if dist.get_rank() == 0:
        draw(timelines, kinds)
        remember_busy(device().type, busy)
    checks.finish()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    predictions.ask("6", QUESTIONS)
    run_ranks(main)
