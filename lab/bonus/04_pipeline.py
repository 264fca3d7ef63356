"""Bonus 4: pipeline parallelism by hand: GPipe, 1F1B and interleaved 1F1B, with the bubble measured.

    python lab/bonus/04_pipeline.py              # 4 stages, 8 micro-batches
    LAB_NPROC=2 python lab/bonus/04_pipeline.py
    torchrun --nproc-per-node 4 lab/bonus/04_pipeline.py

The model is cut into p stages, one for each rank. A batch is cut into m micro-batches, so that the stages can work at
the same time. While the pipeline fills and drains some stages wait: the bubble, (p-1)/(m+p-1) of the time.

docs/lab/bonus_04_pipeline.md walks through the code.
"""

import argparse
import itertools
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.lab import Checks, MarkovText, Question, ask, gpt, plots, reveal, run_ranks

QUESTIONS = [
    Question(
        "bubble", "Which part of the time does a stage wait, with 4 stages and 8 micro-batches?", "%", "(p-1)/(m+p-1)"
    ),
    Question(
        "stored", "How many micro-batches does the first of 4 stages keep under 1F1B, of 8?", "micro-batches", "p"
    ),
]


# ---- the model in stages ------------------------------------------------------------------------------------


class Embed(nn.Module):
    """The first layer of a GPT."""

    def __init__(self, model):
        super().__init__()
        self.embedding, self.position = model.embedding, model.position

    def forward(self, symbols):
        """Return [batch, length, width] for symbols [batch, length]."""
        return self.embedding(symbols) + self.position(torch.arange(symbols.shape[1]))


def layers_of(model):
    """Return the layers of a GPT in the order in which they run."""
    return [Embed(model), *model.blocks, nn.Sequential(model.norm, model.head)]


def costs_of(layers):
    """Return the multiplications per token of each layer: its weights, except those that are only looked up."""
    return [0 if isinstance(layer, Embed) else sum(p.numel() for p in layer.parameters()) for layer in layers]


def split(costs, stages):
    """Cut the layers into consecutive stages so that the most expensive stage is as cheap as possible.

    Return the first layer of each stage, and the end. Every stage gets a layer at least.
    """
    layers = len(costs)
    # best[s][l]: (most expensive of s stages that hold the first l layers, where the last one begins)
    best = [{0: (0, 0)}]
    for stage in range(1, stages + 1):
        best.append({})
        for end in range(stage, layers - (stages - stage) + 1):
            options = [
                (max(best[-2][cut][0], sum(costs[cut:end])), cut) for cut in range(stage - 1, end) if cut in best[-2]
            ]
            best[-1][end] = min(options)

    cuts = [layers]
    for stage in range(stages, 0, -1):
        cuts.append(best[stage][cuts[-1]][1])
    return cuts[::-1]


# ---- schedules: what each rank does, in which order -----------------------------------------------------------
# An action is (kind, micro-batch, chunk): kind "F" or "B"; a rank has several chunks of layers if it is interleaved.


def gpipe(rank, stages, micro_batches):
    """All forwards, then all backwards."""
    forwards = [("F", m, 0) for m in range(micro_batches)]
    return forwards + [("B", m, 0) for m in reversed(range(micro_batches))]


def one_f_one_b(rank, stages, micro_batches):
    """As many forwards as there are stages behind this one; then forward and backward in turns."""
    ahead = min(stages - rank - 1, micro_batches)
    forwards = [("F", m, 0) for m in range(micro_batches)]
    backwards = [("B", m, 0) for m in range(micro_batches)]
    return _in_turns(forwards, backwards, ahead)


def interleaved(rank, stages, micro_batches, chunks=2):
    """1F1B with several chunks of layers per rank: the bubble is as many times smaller as there are chunks.

    Micro-batches go in groups of `stages` through the first chunk of all ranks, then through the second, and so on.
    """
    assert micro_batches % stages == 0, "interleaving needs groups of as many micro-batches as there are stages"

    def action(kind, place):
        group, within = divmod(place, stages * chunks)
        chunk, offset = divmod(within, stages)
        return kind, group * stages + offset, chunk if kind == "F" else chunks - 1 - chunk

    total = micro_batches * chunks
    ahead = min((stages - rank - 1) * 2 + (chunks - 1) * stages, total)
    return _in_turns(
        [action("F", place) for place in range(total)], [action("B", place) for place in range(total)], ahead
    )


def _in_turns(forwards, backwards, ahead):
    middle = itertools.chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
    return forwards[:ahead] + list(middle) + backwards[len(forwards) - ahead :]


def simulate(schedule, stages, micro_batches, chunks=1):
    """Return the bubble of a schedule if a forward takes 1, a backward 2, and messages no time at all."""
    left = [schedule(rank, stages, micro_batches) for rank in range(stages)]
    clocks = [0.0] * stages
    done = {}  # (kind, micro-batch, stage) -> when it ended
    while any(left):
        for rank in range(stages):
            while left[rank]:
                kind, number, chunk = left[rank][0]
                stage = chunk * stages + rank

                # A forward waits for the stage before; a backward for the stage after, in the last stage for nothing.
                before = ("F", number, stage - 1) if kind == "F" else ("B", number, stage + 1)
                if before not in done and 0 <= before[2] < stages * chunks:
                    break
                clocks[rank] = max(clocks[rank], done.get(before, 0.0)) + (1 if kind == "F" else 2) / chunks
                done[kind, number, stage] = clocks[rank]
                left[rank].pop(0)
    return 1 - 3 * micro_batches / max(clocks)


# ---- the machine that carries a schedule out ------------------------------------------------------------------


class Pipeline:
    """This rank's chunks of the model. Activations go to the next rank, their gradients come back."""

    def __init__(self, layers, chunks=1, *, recompute=False, pad=0.0):
        self.rank, self.stages = dist.get_rank(), dist.get_world_size()
        self.chunks, self.recompute, self.pad = chunks, recompute, pad
        cuts = split(costs_of(layers), self.stages * chunks)
        # Chunk c of rank r is stage c p + r of the whole model.
        spans = [(cuts[c * self.stages + self.rank], cuts[c * self.stages + self.rank + 1]) for c in range(chunks)]
        self.parts = [nn.Sequential(*layers[first:last]) for first, last in spans]

    def train(self, schedule, text, micro_batches):
        """Carry out the schedule on a batch; afterwards the parameters have the gradients of the mean loss."""
        batches = text.chunk(micro_batches)
        self.losses, self.events, self.sends = [], [], []
        self.stored, self.most_stored, self.most_bytes = {}, 0, 0
        self.shape = (len(batches[0]), text.shape[1] - 1, self._width())
        dist.barrier()
        self.began = time.perf_counter()
        for kind, number, chunk in schedule(self.rank, self.stages, micro_batches):
            if kind == "F":
                self._forward(batches[number], number, chunk, micro_batches)
            else:
                self._backward(number, chunk)
        for work in self.sends:
            work.wait()
        self.took = time.perf_counter() - self.began
        return sum(self.losses)

    def _width(self):
        return next(p.shape[-1] for part in self.parts for p in part.parameters() if p.ndim == 2)

    def _forward(self, text, number, chunk, micro_batches):
        symbols, targets = text[:, :-1], text[:, 1:]
        stage = chunk * self.stages + self.rank
        first, last = stage == 0, stage == self.stages * self.chunks - 1
        inputs = symbols if first else self._receive(self.rank - 1, number, stage).requires_grad_()

        begin = time.perf_counter()
        saved = {}

        # Autograd hands over every tensor that the backward needs: count what is kept, each storage once.
        def keep(tensor):
            if not isinstance(tensor, nn.Parameter):
                saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().size()
            return tensor

        counting = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with counting if not self.pad else nullcontext():
            part = self.parts[chunk]
            outputs = checkpoint(part, inputs, use_reentrant=False) if self.recompute else part(inputs)
            if last:
                outputs = F.cross_entropy(outputs.flatten(0, 1), targets.flatten()) / micro_batches
                self.losses.append(outputs.detach())
        self.stored[number, chunk] = inputs, outputs, sum(saved.values())
        self.most_stored = max(self.most_stored, len(self.stored))
        self.most_bytes = max(self.most_bytes, sum(entry[2] for entry in self.stored.values()))
        self._end("F", number, chunk, begin, self.pad)
        if not last:
            self._send(outputs.detach(), self.rank + 1, number, stage + 1)

    def _backward(self, number, chunk):
        stage = chunk * self.stages + self.rank
        first, last = stage == 0, stage == self.stages * self.chunks - 1
        gradient = None if last else self._receive(self.rank + 1, number, -stage - 1)

        begin = time.perf_counter()
        inputs, outputs, _ = self.stored.pop((number, chunk))
        outputs.backward(gradient)
        self._end("B", number, chunk, begin, 2 * self.pad)
        if not first:
            self._send(inputs.grad, self.rank - 1, number, -stage)

    def _end(self, kind, number, chunk, begin, pad):
        """Write down when this rank worked. With padding all stages take the same time, a backward twice a forward."""
        time.sleep(max(0.0, begin + pad / self.chunks - time.perf_counter()))
        self.events.append((kind, number, chunk, begin - self.began, time.perf_counter() - self.began))

    # A send returns at once. The tag names what is sent: the micro-batch, and the stage that gets it.

    def _send(self, tensor, rank, number, what):
        self.sends.append(dist.isend(tensor.contiguous(), rank % self.stages, tag=self._tag(number, what)))

    def _receive(self, rank, number, what):
        tensor = torch.empty(self.shape)
        dist.recv(tensor, rank % self.stages, tag=self._tag(number, what))
        return tensor

    def _tag(self, number, what):
        return number * 1000 + what + 500

    def bubble(self):
        """Return the part of the time in which the ranks waited; on all ranks the same number."""
        worked = torch.tensor([sum(end - begin for *_, begin, end in self.events)])
        dist.all_reduce(worked)
        span = torch.tensor([max(end for *_, end in self.events)])
        dist.all_reduce(span, dist.ReduceOp.MAX)
        first = torch.tensor([min(begin for *_, begin, _ in self.events)])
        dist.all_reduce(first, dist.ReduceOp.MIN)
        return 1 - float(worked / self.stages / (span - first))


# ---- checks -------------------------------------------------------------------------------------------------


def make_model():
    """Return a GPT of 7 layers that is the same on all ranks."""
    torch.manual_seed(0)
    return gpt(7, width=32, length=16)


def whole(text):
    """Return the model after a backward of the mean loss, unsplit, and that loss."""
    model = make_model()
    logits = model(text[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    return model, loss.detach()


def check_split(checks):
    """Compare the split with all possible ones, on costs that are hard to balance."""
    costs = [0, 5, 1, 1, 9, 2, 3, 3, 4]
    for stages in (2, 3, 4):
        cuts = split(costs, stages)
        found = max(sum(costs[a:b]) for a, b in itertools.pairwise(cuts))
        every = itertools.combinations(range(1, len(costs)), stages - 1)
        best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *inner, len(costs)))) for inner in every)
        checks.equal(f"{stages} stages: the cost of the most expensive one is the least possible", found, best)


def check_gradients(checks, name, schedule, chunks, text, micro_batches, recompute=False):
    """Compare loss and gradients with the unsplit model; return the pipeline."""
    reference, expected = whole(text)
    model = make_model()
    pipeline = Pipeline(layers_of(model), chunks, recompute=recompute)
    loss = torch.as_tensor(pipeline.train(schedule, text, micro_batches), dtype=torch.float32)
    dist.broadcast(loss, pipeline.stages - 1)

    mine = {id(p) for part in pipeline.parts for p in part.parameters()}
    pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True) if id(a) in mine]
    off = max(float((a - b).abs().max()) for a, b in pairs)
    relative = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs if b.abs().max() > 1e-6)
    checks.less(f"{name}: largest difference of gradients from the unsplit model", off, 1e-6)
    checks.less(f"{name}: the same, relative to the largest gradient of its layer", relative, 1e-5)
    checks.less(f"{name}: difference of the loss", abs(float(loss - expected)), 1e-6)
    return pipeline


def check_stored(checks, pipelines, micro_batches):
    """Compare what each rank keeps for backwards to come: m micro-batches with GPipe, at most p with 1F1B."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    checks.equal("GPipe: micro-batches that a rank keeps, m", pipelines["GPipe"].most_stored, micro_batches)
    checks.equal(
        "1F1B: micro-batches that rank r keeps, p - r", pipelines["1F1B"].most_stored, min(stages - rank, micro_batches)
    )
    checks.less(
        "1F1B: bytes kept for the backward, relative to GPipe",
        pipelines["1F1B"].most_bytes / pipelines["GPipe"].most_bytes,
        (stages - rank + 0.01) / micro_batches,
    )
    checks.less(
        "recomputing: bytes kept, relative to GPipe",
        pipelines["recompute"].most_bytes / pipelines["GPipe"].most_bytes,
        0.3,
    )


def measure(schedule, chunks, text, micro_batches, pad):
    """Train with padded stages; return the pipeline with its bubble as `share`, and the padding.

    A machine that is busy with other things adds to the bubble. Then longer stages are tried: its share gets smaller.
    """
    expected = expected_bubble(chunks, micro_batches)
    while True:
        pipeline = Pipeline(layers_of(make_model()), chunks, pad=pad)
        pipeline.train(schedule, text, micro_batches)
        pipeline.share = pipeline.bubble()
        if abs(pipeline.share - expected) < 0.1 * chunks * expected or pad > 0.15:
            return pipeline
        pad *= 2


def expected_bubble(chunks, micro_batches):
    """Return (p-1)/(v m + p - 1), with v chunks per rank."""
    stages = dist.get_world_size()
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def data_parallel(text, micro_batches, pad):
    """Train the whole model on 1/p of the batch, padded alike. Return (s, bytes sent, error of the gradients)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_model()
    dist.barrier()
    begin = time.perf_counter()
    mine = text.chunk(micro_batches)[rank::world]
    for part in mine:
        start = time.perf_counter()
        logits = model(part[:, :-1])
        (F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / micro_batches).backward()
        time.sleep(max(0.0, start + 3 * pad * world - time.perf_counter()))
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    seconds = time.perf_counter() - begin

    reference, _ = whole(text)
    exact = torch.cat([p.grad.flatten() for p in reference.parameters()])
    return seconds, 2 * (world - 1) / world * 4 * len(flat), float((flat - exact).abs().max())


def main():
    """Check gradients and memory, then measure bubbles with padded stages."""
    dist.init_process_group("gloo")  # tags, and tensors in host memory
    rank, stages = dist.get_rank(), dist.get_world_size()
    micro_batches = 2 * stages
    data = MarkovText(2 * micro_batches, length=16)
    text = torch.stack([data[i] for i in range(len(data))])
    checks = Checks(f"Pipeline of {stages} stages, {micro_batches} micro-batches")
    check_split(checks)

    schedules = {"GPipe": (gpipe, 1), "1F1B": (one_f_one_b, 1), "interleaved": (interleaved, 2)}
    pipelines = {name: check_gradients(checks, name, *how, text, micro_batches) for name, how in schedules.items()}
    pipelines["recompute"] = check_gradients(
        checks, "GPipe, recomputing", gpipe, 1, text, micro_batches, recompute=True
    )
    check_stored(checks, pipelines, micro_batches)

    # Real stages are never quite equal, and these are tiny: sleep until each has taken its time.
    pad = 0.04 if OPTIONS.full else 0.02
    short = text[:, :5]
    measured = {name: measure(*how, short, micro_batches, pad) for name, how in schedules.items()}
    pad = max(pipeline.pad for pipeline in measured.values())
    for name, pipeline in measured.items():
        expected = expected_bubble(pipeline.chunks, micro_batches)
        ideal = simulate(schedules[name][0], stages, micro_batches, pipeline.chunks)
        checks.less(f"{name}: bubble of the schedule by itself, minus the formula", abs(ideal - expected), 1e-9)
        # Half as long pieces, and half the bubble: what the machine adds counts for four times as much.
        percent = 15 if pipeline.chunks == 1 else 40
        checks.near(f"{name}: bubble, with padded stages", pipeline.share, expected, percent=percent)
    seconds, sent, off = data_parallel(short, micro_batches, pad)
    checks.less("data parallelism: largest difference of gradients", off, 1e-6)

    events = {name: _gather(pipeline.events) for name, pipeline in measured.items()}
    numbers = sum(p.numel() for part in pipelines["GPipe"].parts for p in part.parameters())
    boundary = 4 * torch.Size(pipelines["GPipe"].shape).numel()
    most = torch.tensor([float(numbers), pipelines["GPipe"].most_bytes, pipelines["1F1B"].most_bytes])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        total = sum(p.numel() for p in make_model().parameters())
        print("\n  a unit is a forward and a backward of one stage; without any waiting a step takes m of them")
        heads = ("unit", "s/step", "units", "waiting", "parameters/rank", "KB sent/rank")
        print(f"  {'':14} {heads[0]:>9} {heads[1]:>7} {heads[2]:>6} {heads[3]:>8} {heads[4]:>16} {heads[5]:>13}")
        for name, pipeline in measured.items():
            links, unit = 2 * pipeline.chunks * micro_batches * boundary, 3 * pipeline.pad
            times = (
                f"{3e3 * pipeline.pad:6.0f} ms {pipeline.took:7.2f} {pipeline.took / unit:6.1f} {pipeline.share:8.1%}"
            )
            print(f"  {name:14} {times} {int(most[0]):16,} {links / 1e3:13.1f}")
        times = f"{3e3 * pad:6.0f} ms {seconds:7.2f} {seconds / pad / 3:6.1f} {0:8.1%}"
        print(f"  {'data parallel':14} {times} {total:16,} {sent / 1e3:13.1f}\n")
        if stages == 4:
            reveal("b4", QUESTIONS[0], computed=100 * 3 / 11, measured=100 * measured["GPipe"].share)
            reveal("b4", QUESTIONS[1], computed=4, measured=pipelines["1F1B"].most_stored)
        draw(events, measured, stages)
    checks.finish()


def _gather(events):
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, events)
    return everyones


def draw(events, measured, stages):
    """Draw when each rank worked on which micro-batch, as measured."""
    made = plots.figure(10, 0.6 + 1.6 * len(events))
    if made is None:
        return
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection

    picture, axes = made
    axes.remove()
    units = {name: 3 * pipeline.pad for name, pipeline in measured.items()}
    longest = max(event[-1] / units[name] for name in events for rank in events[name] for event in rank)
    for row, (name, ranks) in enumerate(events.items()):
        axes = picture.add_subplot(len(events), 1, row + 1)
        boxes, colours = [], []
        for rank, actions in enumerate(ranks):
            for kind, number, chunk, *times in actions:
                begin, end = (moment / units[name] for moment in times)
                low, high = rank - 0.42, rank + (0.42 if chunk == 0 else 0.1)
                boxes.append([(begin, low), (end, low), (end, high), (begin, high)])
                colours.append(colormaps["tab10"](number % 10, alpha=0.4 if kind == "F" else 0.9))
                if kind == "F":
                    axes.text((begin + end) / 2, rank, f"{number}", ha="center", va="center", fontsize=6)
        axes.add_collection(PolyCollection(boxes, facecolors=colours))
        axes.set_ylim(stages - 0.5, -0.5)
        axes.set_xlim(0, longest)
        axes.set_yticks(range(stages), [f"rank {rank}" for rank in range(stages)], fontsize=8)
        axes.tick_params(axis="x", labelsize=7)
        axes.set_title(f"{name}: the ranks wait {measured[name].share:.0%} of the time", fontsize=9, loc="left")
    axes.set_xlabel(
        "time, in forwards and backwards of a stage; pale: forward, dark: backward, thin: second chunk",
        fontsize=8,
    )
    plots.save(picture, "b4_pipeline")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="twice the padding, for a clearer picture")
    parser.add_argument("--local-rank", help=argparse.SUPPRESS)  # torch.distributed.launch passes it
    OPTIONS = parser.parse_args()
    ask("b4", QUESTIONS)
    run_ranks(main, nproc=4)
