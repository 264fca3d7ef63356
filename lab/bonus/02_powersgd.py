"""Bonus 2: PowerSGD from scratch, and what else makes gradients small.

    python lab/bonus/02_powersgd.py              # a small classifier on 2 ranks, in seconds
    python lab/bonus/02_powersgd.py --full       # resnet_tiny on pictures of shapes: minutes on a CPU, or a GPU
    torchrun --nproc-per-node 2 lab/bonus/02_powersgd.py

A gradient matrix M (n x m) is replaced by P Q^T, where P (n x r) and Q (m x r) are thin: r(n + m) numbers are sent in
place of n m. All-reduce adds, and P and Q can be added: M Q is linear in M. So no rank has to receive the compressed
gradients of all others, which top-k and sign compression need.

docs/lab/bonus_02_powersgd.md walks through the code.
"""

import argparse
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lockstep.lab import (
    Checks,
    Question,
    ShapeClass,
    ask,
    backend,
    device,
    mlp_wide,
    plots,
    resnet_tiny,
    reveal,
    run_ranks,
)

QUESTIONS = [
    Question("ratio", "How many times fewer bytes has a 64 x 64 gradient at rank 2?", "times", "nm / (r(n+m))"),
]
START = (
    2  # steps with uncompressed gradients; torch's hook demands two, because DDP rebuilds its buckets after the first
)


# ---- the compressors. Each is the state of a DDP communication hook -----------------------------------------


class Compressor:
    """Averages a bucket of gradients over the ranks, and counts the bytes that this rank sends.

    The bytes are those of a ring: 2(N-1)/N of the tensor for an all-reduce, N-1 times the tensor for an all-gather.
    """

    start = 0

    def __init__(self):
        self.steps = 0
        self.bytes = 0.0

    def hook(self, _, bucket):
        """Reduce one bucket; torch wants a future of the result."""
        flat = bucket.buffer()
        if self.steps < self.start:
            self.mean(flat)
        else:
            self.reduce(bucket.index(), flat, bucket.gradients())
        if bucket.is_last():
            self.steps += 1
        future = torch.futures.Future()
        future.set_result(flat)
        return future

    def mean(self, tensor):
        """Average a tensor over the ranks, in place."""
        world = dist.get_world_size()
        self.bytes += 2 * (world - 1) / world * tensor.numel() * tensor.element_size()
        dist.all_reduce(tensor)
        tensor /= world

    def gather(self, tensor):
        """Return the tensors of all ranks."""
        world = dist.get_world_size()
        self.bytes += (world - 1) * tensor.numel() * tensor.element_size()
        everyones = [torch.empty_like(tensor) for _ in range(world)]
        dist.all_gather(everyones, tensor)
        return everyones

    def reduce(self, index, flat, gradients):
        """Average the bucket; `gradients` are views of `flat`, one for each parameter."""
        self.mean(flat)


class PowerSGD(Compressor):
    """Rank-r approximation by one step of the power method, warm-started, with error feedback."""

    def __init__(self, rank, *, start=START, error_feedback=True, warm_start=True):
        super().__init__()
        self.rank, self.start = rank, start
        self.error_feedback, self.warm_start = error_feedback, warm_start
        self.errors = {}  # bucket -> what the last steps have not sent
        self.qs = {}  # bucket -> the matrices Q of the last step
        self.random = np.random.RandomState(0)

    def reduce(self, index, flat, gradients):
        """Compress the matrices of the bucket; average its vectors as they are."""
        # What was left out before is not lost: it is added to the next gradient.
        if self.error_feedback:
            flat += self.errors.get(index, 0)
            wanted = flat.clone()

        # A convolution's kernel is a matrix too: a row for each output channel.
        matrices = [g.view(len(g), -1) for g in gradients if g.ndim > 1 and self._shrinks(g.view(len(g), -1))]
        compressed = {matrix.data_ptr() for matrix in matrices}
        vectors = [g for g in gradients if g.data_ptr() not in compressed]

        # One all-reduce for all vectors, one for all P, one for all Q.
        self._mean_all(vectors)
        qs = self._first_qs(index, matrices)
        ps = [matrix @ q for matrix, q in zip(matrices, qs, strict=True)]
        self._mean_all(ps)
        ps = [orthogonal(p) for p in ps]
        qs = [matrix.T @ p for matrix, p in zip(matrices, ps, strict=True)]
        self._mean_all(qs)
        for matrix, p, q in zip(matrices, ps, qs, strict=True):
            matrix.copy_(p @ q.T)

        if self.warm_start:
            self.qs[index] = qs
        if self.error_feedback:
            self.errors[index] = wanted - flat

    def _shrinks(self, matrix):
        """Say whether P and Q have fewer numbers than the matrix, or are wanted anyway because the rank is full."""
        rows, columns = matrix.shape
        return self.rank * (rows + columns) < rows * columns or self.rank >= min(rows, columns)

    def _first_qs(self, index, matrices):
        """Return the Q of the last step, or random ones that are the same on all ranks."""
        if index in self.qs:
            return self.qs[index]
        # Drawn as in torch's hook: matrices of one shape after the other.
        shapes = list(dict.fromkeys(matrix.shape for matrix in matrices))
        order = sorted(range(len(matrices)), key=lambda place: shapes.index(matrices[place].shape))
        seed = torch.Generator().manual_seed(self.random.randint(1_000_000_000))
        drawn = {}
        for place in order:
            rows, columns = matrices[place].shape
            drawn[place] = torch.randn(columns, min(self.rank, rows, columns), generator=seed).to(
                matrices[place].device
            )
        return [drawn[place] for place in range(len(matrices))]

    def _mean_all(self, tensors):
        """Average several tensors over the ranks with one all-reduce."""
        if not tensors:
            return
        together = torch.cat([tensor.flatten() for tensor in tensors])
        self.mean(together)
        for tensor, part in zip(tensors, together.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def orthogonal(matrix):
    """Return an orthonormal basis of the columns. P P^T M is then the best approximation of M in that space."""
    return torch.linalg.qr(matrix).Q


class Half(Compressor):
    """Sends float16: half the bytes."""

    def reduce(self, index, flat, gradients):
        half = flat.half() / dist.get_world_size()  # before the sum, which could overflow
        self.mean(half)
        flat.copy_(half).mul_(dist.get_world_size())


class TopK(Compressor):
    """Sends the largest numbers with their places, and keeps the rest for later. Not a sum: all ranks send to all."""

    def __init__(self, share):
        super().__init__()
        self.share, self.errors = share, {}

    def reduce(self, index, flat, gradients):
        flat += self.errors.get(index, 0)
        places = flat.abs().topk(max(1, int(self.share * len(flat)))).indices
        values = flat[places]
        self.errors[index] = flat.index_fill(0, places, 0.0)

        all_places, all_values = self.gather(places.int()), self.gather(values)
        flat.zero_()
        for places, values in zip(all_places, all_values, strict=True):
            flat.index_add_(0, places.long(), values / len(all_places))


class Sign(Compressor):
    """Sends one bit per number and one scale per tensor, and keeps the difference for later."""

    def __init__(self):
        super().__init__()
        self.errors = {}

    def reduce(self, index, flat, gradients):
        flat += self.errors.get(index, 0)
        sizes = [g.numel() for g in gradients]
        scales = torch.stack([g.abs().mean() for g in gradients])
        spread = lambda numbers: numbers.repeat_interleave(torch.tensor(sizes, device=flat.device))  # noqa: E731
        positive = flat >= 0
        self.errors[index] = flat - spread(scales) * (2.0 * positive - 1)

        packed = torch.from_numpy(np.packbits(positive.cpu().numpy())).to(flat.device)
        total = torch.zeros_like(flat)
        for bits, their_scales in zip(self.gather(packed), self.gather(scales), strict=True):
            signs = torch.from_numpy(np.unpackbits(bits.cpu().numpy())[: len(flat)]).to(flat.device)
            total += spread(their_scales) * (2.0 * signs - 1)
        flat.copy_(total / dist.get_world_size())


# ---- two tasks ----------------------------------------------------------------------------------------------


class Small:
    """Tells 8 classes apart, each of them three clouds of points in 96 dimensions."""

    steps, lr, batch = 90, 0.1, 64

    def __init__(self, place):
        self.place = place
        random = torch.Generator().manual_seed(1)
        centres = torch.randn(24, 96, generator=random)
        cloud = torch.randint(24, (6144,), generator=random)
        self.x = (centres[cloud] + torch.randn(6144, 96, generator=random)).to(place)
        self.y = (cloud % 8).to(place)

    def model(self):
        """Return a classifier with three hidden layers of 96."""
        return mlp_wide(width=96, layers=3, classes=8).to(self.place)

    def samples(self, step, rank, world):
        """Return this rank's part of the batch of a step."""
        first = (step * world + rank) * self.batch % 5120
        return self.x[first : first + self.batch], self.y[first : first + self.batch]

    def test(self):
        """Return the test set."""
        return self.x[5120:], self.y[5120:]


class Shapes:
    """Tells the 8 classes of `ShapeClass` apart, as the exercises do."""

    steps, lr = 470, 0.05

    def __init__(self, place):
        self.place, self.batch = place, 64
        self.x, self.y = (part.to(place) for part in ShapeClass(10_000).batch(range(10_000)))
        self.test_x, self.test_y = (part.to(place) for part in ShapeClass(2_000, seed=1).batch(range(2_000)))

    def model(self):
        """Return resnet_tiny."""
        return resnet_tiny().to(self.place)

    def samples(self, step, rank, world):
        """Return this rank's part of the batch of a step; the order is another one in each epoch."""
        per_epoch = 10_000 // (self.batch * world)
        order = torch.randperm(10_000, generator=torch.Generator().manual_seed(step // per_epoch))
        first = (step % per_epoch * world + rank) * self.batch
        chosen = order[first : first + self.batch].to(self.place)
        return self.x[chosen], self.y[chosen]

    def test(self):
        """Return the test set."""
        return self.test_x, self.test_y


def train(task, compressor=None, *, torch_state=None, seed=0):
    """Train under DDP with a communication hook. Return (train loss of the last steps, test accuracy, s, gradients)."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(task.model())
    if compressor is not None:
        model.register_comm_hook(None, compressor.hook)
    elif torch_state is not None:
        model.register_comm_hook(torch_state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.lr, total_steps=task.steps, cycle_momentum=False)

    losses = []
    start = time.perf_counter()
    for step in range(task.steps):
        x, y = task.samples(step, dist.get_rank(), dist.get_world_size())
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    seconds = time.perf_counter() - start

    # The mean of all ranks, over the last eighth of the steps.
    last = torch.stack(losses[-task.steps // 8 :]).mean()
    dist.all_reduce(last)
    model.eval()
    with torch.no_grad():
        x, y = task.test()
        right = (model.module(x).argmax(1) == y).float().mean()
    return float(last) / dist.get_world_size(), float(right), seconds, model


# ---- checks -------------------------------------------------------------------------------------------------


class Bucket:
    """What a hook sees of one bucket: all gradients in one flat tensor, and a view for each of them."""

    def __init__(self, tensors):
        self.flat = torch.cat([tensor.flatten() for tensor in tensors])
        parts = self.flat.split([tensor.numel() for tensor in tensors])
        self.views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    buffer = lambda self: self.flat  # noqa: E731
    gradients = lambda self: self.views  # noqa: E731
    index = lambda self: 0  # noqa: E731
    is_last = lambda self: True  # noqa: E731


def check_full_rank(checks):
    """At full rank nothing is lost: the result is the mean of the gradients."""
    random = torch.Generator().manual_seed(dist.get_rank())
    mine = [torch.randn(shape, generator=random) for shape in ((20, 30), (30,), (8, 3, 3, 3))]
    exact = Bucket(mine)
    dist.all_reduce(exact.flat)
    exact.flat /= dist.get_world_size()

    full = Bucket(mine)
    PowerSGD(30, start=0).hook(None, full)
    checks.less("full rank: largest difference from the exact mean", float((full.flat - exact.flat).abs().max()), 1e-5)

    # The error of one rank-2 step, and of the tenth with the same gradients: a warm start finds the best directions.
    def distance(compressor, steps):
        for _ in range(steps):
            bucket = Bucket(mine)
            compressor.hook(None, bucket)
        return float((bucket.views[0] - exact.views[0]).norm())

    singular = torch.linalg.svdvals(exact.views[0])
    best = float(singular[2:].square().sum().sqrt())
    once = distance(PowerSGD(2, start=0, error_feedback=False), 1)
    warm = distance(PowerSGD(2, start=0, error_feedback=False), 10)
    cold = distance(PowerSGD(2, start=0, error_feedback=False, warm_start=False), 10)
    checks.less("rank 2: error of the tenth warm step, relative to the first step", warm / once, 1.0)
    checks.less("rank 2: the same, relative to ten cold steps", warm / cold, 1.0)
    checks.near("rank 2: error of the tenth warm step, against the best by SVD", warm, best, percent=5)


def check_torch(checks, task):
    """Train the same model with torch's hook and with ours: the same bytes, and the same parameters."""
    short = Short(task)
    ours = PowerSGD(2)
    *_, mine = train(short, ours)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=START, min_compression_rate=1, random_seed=0
    )
    *_, theirs = train(short, torch_state=state)
    with torch.no_grad():
        off = max(float((a - b).abs().max()) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))
    checks.less(f"torch's hook: largest difference of parameters after {short.steps} steps", off, 1e-5)

    # Torch counts the numbers of the compressed steps.
    whole = sum(parameter.numel() for parameter in mine.parameters())
    ring = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
    numbers = ours.bytes / 4 / ring - START * whole
    checks.equal("torch's hook: it sends as many numbers", round(numbers), state.total_numel_after_compression)


class Short:
    """The first steps of a task."""

    def __init__(self, task):
        self.task, self.steps = task, 12

    def __getattr__(self, name):
        return getattr(self.task, name)


def compare(task):
    """Train with every compressor; return rows (name, bytes per step, train loss, test accuracy, s)."""
    ways = {
        "no compression": Compressor(),
        "float16": Half(),
        "PowerSGD rank 4": PowerSGD(4),
        "PowerSGD rank 2": PowerSGD(2),
        "PowerSGD rank 1": PowerSGD(1),
        "rank 2, no error feedback": PowerSGD(2, error_feedback=False),
        "rank 2, no warm start": PowerSGD(2, warm_start=False),
        "top 2 %": TopK(0.02),
        "sign": Sign(),
    }
    rows = {}
    for name, compressor in ways.items():
        loss, accuracy, seconds, _ = train(task, compressor)
        rows[name] = (compressor.bytes / task.steps, loss, accuracy, seconds)
    return rows


def print_rows(rows):
    """Print the table, with bytes relative to no compression."""
    plain = rows["no compression"][0]
    print(f"\n  {'':26} {'KB/step':>8} {'fewer':>7} {'loss':>7} {'accuracy':>9} {'s':>6}")
    for name, (sent, loss, accuracy, seconds) in rows.items():
        print(f"  {name:26} {sent / 1e3:8.1f} {plain / sent:6.1f}x {loss:7.3f} {accuracy:9.3f} {seconds:6.1f}")


def draw(rows):
    """Draw accuracy against bytes."""
    made = plots.figure(8, 4)
    if made is None:
        return
    picture, axes = made
    plain = rows["no compression"][0]
    for name, (sent, _, accuracy, _) in rows.items():
        axes.plot(plain / sent, 100 * accuracy, "o", color="tab:red" if "no error" in name else "tab:blue")
        axes.annotate(name, (plain / sent, 100 * accuracy), textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.axhline(100 * rows["no compression"][2] - 1, color="grey", linewidth=0.8, linestyle="--")
    axes.text(1, 100 * rows["no compression"][2] - 1, "one point below no compression ", fontsize=7, va="top")
    axes.set_xscale("log")
    axes.set_xlabel("times fewer bytes")
    axes.set_ylabel("test accuracy, %")
    plots.save(picture, "b2_powersgd")


def main():
    """Check PowerSGD by itself, against torch's hook, and in training."""
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    # The checks of single buckets use tensors in host memory, on any machine.
    dist.init_process_group("cpu:gloo,cuda:nccl" if backend() == "nccl" else "gloo")
    checks = Checks("PowerSGD" + (", resnet_tiny on shapes" if OPTIONS.full else ", a small classifier"))
    check_full_rank(checks)
    small = Small(device())
    check_torch(checks, small)

    task = Shapes(device()) if OPTIONS.full else small
    rows = compare(task)
    plain, two = rows["no compression"], rows["PowerSGD rank 2"]
    without = rows["rank 2, no error feedback"]
    checks.true("rank 2 sends at least 10 times fewer bytes", plain[0] / two[0] >= 10, f"{plain[0] / two[0]:.1f} times")
    points = 100 * (plain[2] - two[2])
    checks.less("rank 2 loses less than a point of accuracy", points, 1.0)
    checks.true(
        "without error feedback the loss is at least a fifth higher",
        without[1] > 1.2 * two[1],
        f"{without[1]:.3f} against {two[1]:.3f}",
    )

    if dist.get_rank() == 0:
        print_rows(rows)
        print()
        counter = Compressor()
        single = PowerSGD(2, start=0)
        ratio = _bytes_alone(counter) / _bytes_alone(single)
        reveal("b2", QUESTIONS[0], computed=64 * 64 / (2 * 128), measured=ratio)
        draw(rows)
    else:
        _bytes_alone(Compressor())
        _bytes_alone(PowerSGD(2, start=0))
    checks.finish()


def _bytes_alone(compressor):
    """Return the bytes for a single gradient of 64 x 64."""
    compressor.hook(None, Bucket([torch.randn(64, 64)]))
    return compressor.bytes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="train resnet_tiny on 10,000 pictures with each compressor")
    parser.add_argument("--local-rank", help=argparse.SUPPRESS)  # torch.distributed.launch passes it
    OPTIONS = parser.parse_args()
    ask("b2", QUESTIONS)
    run_ranks(main, nproc=2)
