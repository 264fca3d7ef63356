"""Bonus 5: all-reduce from `send` and `recv` alone, in four ways.

    python lab/bonus/05_all_reduce.py                       # 4 ranks on this machine
    LAB_NPROC=8 python lab/bonus/05_all_reduce.py --full    # 8 ranks, 1 KB to 256 MB
    torchrun --nproc-per-node 4 lab/bonus/05_all_reduce.py

All ranks have a vector of D bytes; afterwards all have the sum of the N vectors. The ways differ in how many messages a
rank waits for one after the other (latency) and in how many bytes it sends (bandwidth):

    naive               everyone sends everything to everyone      1 round      (N-1) D
    ring                D/N to the next rank, again and again      2(N-1)       2 (N-1)/N D
    halving-doubling    half to a partner, then a quarter, ...     2 log2 N     2 (N-1)/N D
    tree                up to rank 0, and down again               2 log2 N     up to log2(N) D at rank 0

docs/lab/bonus_05_all_reduce.md walks through the code.
"""

import argparse
import os
import time
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from lockstep.lab import Checks, Question, ask, plots, reveal, run_ranks

QUESTIONS = [
    Question(
        "ring",
        "How many bytes does each of 4 ranks send in a ring all-reduce of 1,000,000 bytes?",
        "bytes",
        "2(N-1)/N D",
    ),
    Question("naive", "And if each rank sends its vector to every other rank?", "bytes", "(N-1) D"),
]
NAIVE_BYTES = 2**24  # longer vectors are not measured: a rank has to hold those of all others


# ---- the wire: nothing but isend and irecv ------------------------------------------------------------------


class Wire:
    """Sends and receives between the first `world` ranks; counts the bytes, and notes who sent what in which step."""

    def __init__(self, world):
        self.rank, self.world = dist.get_rank(), world
        self.sent = 0
        self.step = 0
        self.messages = []  # (step, from, to, first and last element)

    def isend(self, piece, to, span=(0, 0)):
        """Begin to send a piece of a vector."""
        self.sent += piece.numel() * piece.element_size()
        self.messages.append((self.step, self.rank, to, *span))
        return dist.isend(piece, to)

    def irecv(self, buffer, source):
        """Begin to receive into `buffer`."""
        return dist.irecv(buffer, source)

    def exchange(self, piece, to, buffer, source, span):
        """Send and receive at the same time. A blocking send on both sides could wait forever."""
        sending = self.isend(piece, to, span)
        self.irecv(buffer, source).wait()
        sending.wait()
        self.step += 1


def spans(size, parts):
    """Cut `size` elements into `parts` consecutive spans (first, last), as equal as they can be; some may be empty."""
    cuts = [size * part // parts for part in range(parts + 1)]
    return list(pairwise(cuts))


def accumulator(vector):
    """Return the tensor in which sums are made: 16-bit numbers are added in float32, and rounded once at the end."""
    return vector.float() if vector.dtype in (torch.float16, torch.bfloat16) else vector.clone()


# ---- four all-reduces. Each replaces `vector` (one dimension, any size and dtype) by the sum over the ranks ----


def naive(vector, wire):
    """Everyone sends its vector to everyone, and adds up what it gets."""
    others = [rank for rank in range(wire.world) if rank != wire.rank]
    received = {rank: torch.empty_like(vector) for rank in others}
    sending = [wire.isend(vector, rank, (0, len(vector))) for rank in others]
    for rank in others:
        wire.irecv(received[rank], rank).wait()
    for work in sending:
        work.wait()

    # In the order of the ranks, on all ranks: floating-point sums depend on the order.
    received[wire.rank] = vector.clone()
    total = accumulator(received[0])
    for rank in range(1, wire.world):
        total += received[rank]
    vector.copy_(total)


def ring(vector, wire, pieces=1):
    """Send one chunk to the next rank, N-1 times to add up, N-1 times to hand out the sums.

    With `pieces` > 1 a chunk travels in pieces, so that one piece is added while the next one is on its way.
    """
    rank, world = wire.rank, wire.world
    following, previous = (rank + 1) % world, (rank - 1) % world
    chunks = spans(len(vector), world)
    total = accumulator(vector)

    # Reduce-scatter: in step s rank r passes on chunk r-s. After N-1 steps it holds the whole sum of chunk r+1.
    for step in range(world - 1):
        _pass_on(
            total,
            chunks[(rank - step) % world],
            chunks[(rank - step - 1) % world],
            pieces,
            wire,
            following,
            previous,
            add=True,
        )

    # All-gather: the finished chunks go around the ring once more. Every rank gets the same bits, because each chunk
    # was added up along one path only.
    vector.copy_(total)
    for step in range(world - 1):
        _pass_on(
            vector,
            chunks[(rank + 1 - step) % world],
            chunks[(rank - step) % world],
            pieces,
            wire,
            following,
            previous,
            add=False,
        )


def _pass_on(vector, outgoing, incoming, pieces, wire, following, previous, *, add):
    """Send one span of `vector` to the next rank, and add or write the span that the previous rank sends."""
    first, last = incoming
    arriving = torch.empty_like(vector[first:last])
    receiving = [(span, wire.irecv(arriving[slice(*span)], previous)) for span in spans(last - first, pieces)]
    start = outgoing[0]
    sending = []
    for span in spans(outgoing[1] - start, pieces):
        absolute = start + span[0], start + span[1]
        sending.append(wire.isend(vector[slice(*absolute)], following, absolute))
    for span, work in receiving:
        work.wait()
        target = vector[first + span[0] : first + span[1]]
        if add:
            target += arriving[slice(*span)]
        else:
            target.copy_(arriving[slice(*span)])
    for work in sending:
        work.wait()
    wire.step += 1


def halving_doubling(vector, wire):
    """Exchange half of what is left with a partner at distance N/2, N/4, ..., 1; then the same way back.

    If N is no power of two, each of the N - 2^k surplus ranks gives its vector to a neighbour first, and gets the
    result at the end.
    """
    rank, world = wire.rank, wire.world
    power = 1 << (world.bit_length() - 1)
    surplus = world - power
    whole = (0, len(vector))
    total = accumulator(vector)

    # The first 2 * surplus ranks form pairs: the even one hands its vector to the odd one, and waits.
    if rank < 2 * surplus and rank % 2 == 0:
        wire.isend(total, rank + 1, whole).wait()
        wire.irecv(vector, rank + 1).wait()
        return
    if rank < 2 * surplus:
        given = torch.empty_like(total)
        wire.irecv(given, rank - 1).wait()
        total += given
    wire.step = 1 if surplus else 0

    # The power-of-two ranks that remain have numbers 0, 1, ... of their own.
    number = rank // 2 if rank < 2 * surplus else rank - surplus
    real = lambda number: 2 * number + 1 if number < surplus else number + surplus  # noqa: E731

    # Reduce-scatter by halving.
    first, last = whole
    path = []
    distance = power // 2
    while distance:
        middle = (first + last) // 2
        partner = real(number ^ distance)
        low = number & distance == 0
        keep, give = ((first, middle), (middle, last)) if low else ((middle, last), (first, middle))
        arriving = torch.empty_like(total[slice(*keep)])
        wire.exchange(total[slice(*give)], partner, arriving, partner, give)
        total[slice(*keep)] += arriving
        path.append((partner, keep, give))
        first, last = keep
        distance //= 2

    # All-gather by doubling: what was given away comes back as a sum.
    vector.copy_(total)
    for partner, keep, give in reversed(path):
        wire.exchange(vector[slice(*keep)], partner, vector[slice(*give)], partner, keep)

    if rank < 2 * surplus:
        wire.isend(vector, rank - 1, whole).wait()


def tree(vector, wire, pieces=1):
    """Add up towards rank 0 in a binomial tree, and send the result back down.

    With `pieces` > 1 the pieces follow each other through the tree: all levels work at the same time.
    """
    rank, world = wire.rank, wire.world
    total = accumulator(vector)

    # The lowest set bit of a rank's number says at which level it hands its sum to its parent.
    children = []
    level = 1
    while rank & level == 0 and level < world:
        if rank + level < world:
            children.append((rank + level, level))
        level *= 2
    parent = rank - level if rank else None

    # Up, and down. A send returns at once, so a rank goes on with the next piece.
    sending = []
    for span in spans(len(vector), pieces):
        piece = total[slice(*span)]
        for child, _ in children:
            arriving = torch.empty_like(piece)
            wire.irecv(arriving, child).wait()
            piece += arriving
        if parent is not None:
            wire.step = level.bit_length() - 1
            sending.append(wire.isend(piece, parent, span))

    depth = (world - 1).bit_length()
    for span in spans(len(vector), pieces):
        if parent is not None:
            wire.irecv(vector[slice(*span)], parent).wait()
        else:
            vector[slice(*span)] = total[slice(*span)]
        for child, level in reversed(children):
            wire.step = 2 * depth - level.bit_length()
            sending.append(wire.isend(vector[slice(*span)], child, span))
    for work in sending:
        work.wait()


WAYS = {
    "naive": naive,
    "ring": ring,
    "ring, 4 pieces": lambda vector, wire: ring(vector, wire, pieces=4),
    "halving-doubling": halving_doubling,
    "tree": tree,
    "tree, 4 pieces": lambda vector, wire: tree(vector, wire, pieces=4),
}


# ---- checks -------------------------------------------------------------------------------------------------


def inputs(world, size, dtype):
    """Return the vectors of all ranks; every rank can make them all, and so knows the right sum."""
    random = torch.Generator().manual_seed(1000 * world + size)
    if dtype.is_floating_point:
        return [torch.randn(size, generator=random).to(dtype) for _ in range(world)]
    return [torch.randint(-1000, 1000, (size,), generator=random, dtype=dtype) for _ in range(world)]


def check_sums(checks):
    """Compare every way with the right sum, in every world from 2 ranks to all, and for sizes that do not divide."""
    rank, most = dist.get_rank(), dist.get_world_size()
    for name, way in WAYS.items():
        wrong_ints, worst_float, worst_half, bits = [], 0.0, 0.0, []
        for world in range(2, most + 1):
            if rank >= world:
                continue
            for size in (0, 1, world - 1, 1003):
                vectors = inputs(world, size, torch.int64)
                mine = vectors[rank].clone()
                way(mine, Wire(world))
                if not torch.equal(mine, sum(vectors)):
                    wrong_ints.append((world, size))

            vectors = inputs(world, 1003, torch.float32)
            mine = vectors[rank].clone()
            way(mine, Wire(world))
            exact = torch.stack(vectors).double().sum(0)
            worst_float = max(worst_float, float((mine - exact).abs().max() / exact.abs().max()))
            bits.append(mine)

            # In float32, and rounded to float16 once: half a unit in the last place, and no more.
            vectors = inputs(world, 1003, torch.float16)
            mine = vectors[rank].clone()
            way(mine, Wire(world))
            exact = torch.stack(vectors).double().sum(0)
            unit = (2.0 ** (torch.frexp(exact)[1] - 11)).clamp(min=2.0**-24)
            worst_half = max(worst_half, float(((mine.double() - exact).abs() / unit).max()))
            bits.append(mine)

        checks.equal(f"{name}: integers are exact for 2 to {most} ranks and any size", wrong_ints, [])
        checks.less(f"{name}: relative error of float32", worst_float, 1e-6)
        checks.less(f"{name}: float16 is rounded once (units in the last place)", worst_half, 0.502)
        checks.true(f"{name}: all ranks have the same bits", _same_everywhere(bits), f"{len(bits)} vectors")


def _same_everywhere(vectors):
    """Say whether the ranks that took part in a world have equal results; the ranks of larger worlds have fewer."""
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, [vector.view(torch.uint8).numpy().tobytes() for vector in vectors])
    # Rank 0 took part in all worlds; the last vectors of each rank belong to the largest ones.
    return all(mine == everywhere[0][len(everywhere[0]) - len(mine) :] for mine in everywhere)


def check_bytes(checks, world, size=840_000):
    """Count what each rank sends. `size` in bytes is divisible by 4 bytes and by 2 to 8 ranks."""
    power_of_two = world & (world - 1) == 0
    sent, messages = {}, {}
    for name, way in WAYS.items():
        wire = Wire(world)
        way(torch.ones(size // 4), wire)
        counts = [None] * world
        dist.all_gather_object(counts, (wire.sent, wire.messages))
        sent[name] = [count for count, _ in counts]
        messages[name] = [message for _, rank_messages in counts for message in rank_messages]

    least = 2 * (world - 1) * size // world
    checks.equal("naive: bytes sent by each rank are (N-1) D", sent["naive"], [(world - 1) * size] * world)
    for name in ("ring", "ring, 4 pieces"):
        checks.equal(f"{name}: bytes sent by each rank are 2(N-1)/N D", sent[name], [least] * world)
    if power_of_two:
        checks.equal(
            "halving-doubling: bytes sent by each rank are 2(N-1)/N D", sent["halving-doubling"], [least] * world
        )
    checks.equal("tree: bytes of all ranks together are 2(N-1) D", sum(sent["tree"]), 2 * (world - 1) * size)
    checks.equal("ring: rounds are 2(N-1)", 1 + max(message[0] for message in messages["ring"]), 2 * (world - 1))
    return sent, messages


# ---- time ---------------------------------------------------------------------------------------------------


def fit_link(sizes, repeats):
    """Fit t = a + b n to a message of n bytes from rank 0 to rank 1 and back; return a in s and b in s per byte."""
    times = []
    for size in sizes:
        buffer = torch.zeros(size, dtype=torch.uint8)
        best = float("inf")
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            if dist.get_rank() == 0:
                dist.send(buffer, 1)
                dist.recv(buffer, 1)
            elif dist.get_rank() == 1:
                dist.recv(buffer, 0)
                dist.send(buffer, 0)
            best = min(best, (time.perf_counter() - start) / 2)
        times.append(best)

    # Relative errors count: otherwise the longest message alone would decide.
    weights = 1 / np.array(times)
    design = np.stack([np.ones(len(sizes)), np.array(sizes, dtype=float)], 1) * weights[:, None]
    a, b = np.linalg.lstsq(design, np.array(times) * weights, rcond=None)[0]
    fitted = torch.tensor([a, b], dtype=torch.float64)
    dist.broadcast(fitted, 0)
    return fitted.tolist()


def benchmark(sizes, repeats):
    """Return the best time of each way and size, and of torch's own all-reduce. Every rank needs to be ready first."""
    world = dist.get_world_size()
    ways = {**WAYS, "torch (gloo)": lambda vector, wire: dist.all_reduce(vector)}
    table = {name: [] for name in ways}
    for size in sizes:
        vector = torch.zeros(size // 4)
        for name, way in ways.items():
            if name == "naive" and size > NAIVE_BYTES:
                table[name].append(float("nan"))
                continue
            best = float("inf")
            for _ in range(repeats):
                dist.barrier()
                start = time.perf_counter()
                way(vector, Wire(world))
                dist.barrier()
                best = min(best, time.perf_counter() - start)
            table[name].append(best)
    return table


def print_times(table, sizes, a, b, world):
    """Print milliseconds by way and size, and what the model of one link says about the ring."""
    print(f"\n  milliseconds, best of several; one link: {a * 1e6:.0f} us + {1e-9 / b:.2f} GB/s")
    print(f"  {'':22}" + "".join(f"{_bytes(size):>10}" for size in sizes))
    for name, times in table.items():
        print(f"  {name:22}" + "".join(f"{1e3 * seconds:10.2f}" for seconds in times))
    ring_model = [2 * (world - 1) * (a + b * size / world) for size in sizes]
    print(f"  {'ring by 2(N-1)(a+bD/N)':22}" + "".join(f"{1e3 * seconds:10.2f}" for seconds in ring_model))


def _bytes(size):
    return f"{size // 2**20} MB" if size >= 2**20 else f"{size // 2**10} KB"


# ---- the picture --------------------------------------------------------------------------------------------


def draw(messages, sent, world, size):
    """Draw who sends which part of the vector in which step: rank by step, coloured by chunk."""
    names = ["naive", "ring", "halving-doubling", "tree"]
    made = plots.figure(10, 0.5 + 1.1 * len(names) + 0.16 * world * len(names))
    if made is None:
        return
    picture, axes = made
    axes.remove()
    steps = {name: 1 + max(message[0] for message in messages[name]) for name in names}
    for row, name in enumerate(names):
        axes = picture.add_subplot(len(names), 1, row + 1)
        cells = {}
        for step, source, target, first, last in messages[name]:
            cells.setdefault((step, source), []).append((target, first, last))
        for (step, source), sends in cells.items():
            _draw_cell(axes, step, source, sends, world, size)
        axes.set_xlim(0, max(steps.values()))
        axes.set_ylim(world, 0)
        axes.set_yticks([rank + 0.5 for rank in range(world)], [f"rank {rank}" for rank in range(world)], fontsize=8)
        axes.set_xticks(range(max(steps.values()) + 1), [])
        most = max(sent[name]) / size
        axes.set_title(
            f"{name}: in {steps[name]} step{'s' if steps[name] > 1 else ''}; a rank sends at most {most:.3g} D",
            fontsize=9,
            loc="left",
        )
    axes.set_xlabel(
        "step; the colour is the part of the vector that is sent, the number the rank that gets it", fontsize=8
    )
    plots.save(picture, "b5_all_reduce")


def _draw_cell(axes, step, source, sends, world, size):
    """Draw what one rank sends in one step: a bar for each receiver, with a colour for each of the N chunks in it."""
    from matplotlib import colormaps

    height = 0.9 / len(sends)
    for place, (target, first, last) in enumerate(sends):
        y = source + 0.05 + place * height
        for chunk, (start, stop) in enumerate(spans(size // 4, world)):
            left, right = max(first, start), min(last, stop)
            if left < right:
                x = step + 0.04 + 0.92 * (left - first) / (last - first)
                axes.barh(
                    y,
                    0.92 * (right - left) / (last - first),
                    height,
                    x,
                    align="edge",
                    color=colormaps["tab10"](chunk),
                    alpha=0.7,
                )
        axes.text(step + 0.5, y + height / 2, f"{target}", ha="center", va="center", fontsize=7)


# ---- main ---------------------------------------------------------------------------------------------------


def main():
    """Check, count, measure and draw."""
    # Gloo, in host memory: NCCL wants sends and receives in groups, or two ranks that send to each other wait forever.
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    checks = Checks(f"All-reduce from send and recv, {world} ranks")

    check_sums(checks)
    size = 840_000
    sent, messages = check_bytes(checks, world, size)

    top = 28 if OPTIONS.full else 20
    sizes = [2**power for power in range(10, top + 1, 3 if OPTIONS.full else 5)]
    a, b = fit_link([2**power for power in range(8, 23, 2)], repeats=8)
    checks.true("one link: longer messages take longer (the fitted b is positive)", b > 0, f"{1e-9 / b:.2f} GB/s")
    table = benchmark(sizes, repeats=3)

    if rank == 0:
        print_times(table, sizes, a, b, world)
        print()
        scale = 1_000_000 / size
        if world == 4:
            reveal("b5", QUESTIONS[0], computed=1_500_000, measured=sent["ring"][0] * scale)
            reveal("b5", QUESTIONS[1], computed=3_000_000, measured=sent["naive"][0] * scale)
        draw(messages, sent, world, size)
    checks.finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="measure 1 KB to 256 MB, for minutes")
    parser.add_argument("--local-rank", help=argparse.SUPPRESS)  # torch.distributed.launch passes it
    OPTIONS = parser.parse_args()
    ask("b5", QUESTIONS)
    run_ranks(main, nproc=int(os.environ.get("LAB_NPROC", 4)))
