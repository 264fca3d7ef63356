"""Bonus 1: ZeRO stages 1, 2 and 3 from scratch, against Adam on one rank and against FSDP2.

    python lab/bonus/01_zero.py                  # 2 ranks, a small GPT
    LAB_NPROC=4 python lab/bonus/01_zero.py --full
    torchrun --nproc-per-node 2 lab/bonus/01_zero.py

N ranks that train with DDP hold everything N times: parameters, gradients and the optimizer's state. ZeRO gives each
rank 1/N of it, and fetches the rest when it is needed:

    stage 1    the optimizer's state is sharded
    stage 2    and the gradients
    stage 3    and the parameters: each layer is gathered before it runs, and freed after it

docs/lab/bonus_01_zero.md walks through the code.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lockstep.lab import (
    Checks,
    CountCollectives,
    MarkovText,
    Question,
    ask,
    backend,
    device,
    gpt,
    language_loss,
    plots,
    reveal,
    run_ranks,
)

QUESTIONS = [
    Question(
        "state", "Bytes per parameter that a rank of 64 keeps under stage 3, in mixed precision?", "bytes", "16/N"
    ),
    Question("volume", "How many times the volume of DDP does stage 3 move in a step?", "times", "3D / 2D"),
]

LR, BETAS, EPS = 1e-3, (0.9, 0.95), 1e-6

# On one tensor each. Torch 2.13 renamed them.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# ---- ZeRO ---------------------------------------------------------------------------------------------------


class Unit:
    """The parameters of one module (a layer, say) in one flat buffer, of which each rank owns 1/N.

    All parameters of the module become views of the flat buffer, and their gradients views of another one. Freeing a
    buffer means giving its storage the size 0; the views stay, and are right again when the storage is filled again.
    """

    def __init__(self, module, stage, dtype, gathered):
        self.stage = stage
        self.gathered, self.most_gathered = gathered, 0  # the units that are gathered now, all of them
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.parameters = list(module.parameters())
        size = sum(parameter.numel() for parameter in self.parameters)
        self.shard_size = -(-size // self.world)  # rounded up: the last rank's shard may be padded

        # Copy the parameters into the flat buffer, and make them views of it.
        place = self.parameters[0].device
        self.flat = torch.zeros(self.shard_size * self.world, dtype=dtype, device=place)
        self.flat[:size] = torch.cat([parameter.data.flatten() for parameter in self.parameters])
        self.grads = None
        self._each_view(self.flat, lambda parameter, view: setattr(parameter, "data", view))

        # The optimizer's state is sharded in every stage. In mixed precision it includes the parameters in float32.
        own = self.flat[self._own()]
        self.mixed = dtype != torch.float32
        self.shard = own.clone() if stage == 3 else own  # a part of the flat buffer, unless that will be freed
        self.master = own.float() if self.mixed else self.shard
        self.first, self.second = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.grad_shard = None

        # A gradient is complete when it has been accumulated into its parameter.
        self.missing = len(self.parameters)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._one_gradient_is_there)

        if stage == 3:
            self.free()
            module.register_forward_pre_hook(lambda *_: self.gather())
            module.register_forward_hook(self._after_forward)

    def _own(self):
        return slice(self.rank * self.shard_size, (self.rank + 1) * self.shard_size)

    def _each_view(self, flat, use):
        start = 0
        for parameter in self.parameters:
            use(parameter, flat[start : start + parameter.numel()].view(parameter.shape))
            start += parameter.numel()

    # Stage 3: parameters come and go.

    def gather(self):
        """All-gather the parameters of this unit from the shards of all ranks."""
        if self.flat.untyped_storage().size() == 0:
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
            all_gather(self.flat, self.shard)
            self.gathered.append(self)
            self.most_gathered = max(self.most_gathered, len(self.gathered))

    def free(self):
        """Give the memory of the gathered parameters back."""
        self.flat.untyped_storage().resize_(0)
        if self in self.gathered:
            self.gathered.remove(self)

    def _after_forward(self, module, inputs, output):
        # The layer's backward begins when the gradient of its output is there.
        self.free()
        output.register_hook(lambda _: self.gather())

    # Gradients.

    def _one_gradient_is_there(self, parameter):
        self.missing -= 1
        if self.missing:
            return
        self.missing = len(self.parameters)

        # Put the gradients into one buffer, whose padding is zero.
        self.grads = torch.zeros_like(self.flat) if self.grads is None else self.grads
        self._each_view(self.grads, self._move_gradient)

        # From stage 2 on only this rank's shard is kept: it is reduced as soon as the layer's backward is done.
        if self.stage >= 2:
            self.reduce()
            self._each_view(self.grads, lambda parameter, view: setattr(parameter, "grad", None))
            self.grads = None
        if self.stage == 3:
            self.free()

    def _move_gradient(self, parameter, view):
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view

    def reduce(self):
        """Reduce-scatter: each rank gets the mean of its own shard."""
        self.grad_shard = torch.empty_like(self.grads[self._own()])
        reduce_scatter(self.grad_shard, self.grads / self.world)

    # The optimizer.

    def step(self, number):
        """Apply Adam to this rank's shard, and give the new parameters to all ranks."""
        if self.stage == 1:
            self.reduce()
        adam(self.master, self.grad_shard.float(), self.first, self.second, number)
        if self.mixed:
            self.shard.copy_(self.master)
        if self.stage < 3:
            all_gather(self.flat, self.shard.clone())
        self.grad_shard = None

    def zero_grad(self):
        """Drop the gradients of stage 1, which are kept whole; later stages have freed theirs."""
        if self.grads is not None:
            self.grads.zero_()
            self._each_view(self.grads, lambda parameter, view: setattr(parameter, "grad", None))

    def bytes_kept(self):
        """Return the bytes of parameters, gradients and optimizer state that this rank holds now."""
        tensors = [self.flat, self.grads, self.shard, self.master, self.first, self.second]
        if self.stage >= 2:
            tensors.append(self.grad_shard)  # in stage 1 only a temporary
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().size() for t in tensors if t is not None}
        return sum(storages.values())


def adam(parameter, gradient, first, second, number):
    """One step of Adam on flat tensors; it is elementwise, which is why any shard can be updated alone."""
    first.lerp_(gradient, 1 - BETAS[0])
    second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
    corrected = second.sqrt() / (1 - BETAS[1] ** number) ** 0.5 + EPS
    parameter.addcdiv_(first, corrected, value=-LR / (1 - BETAS[0] ** number))


class Zero:
    """A GPT under ZeRO: a unit for each block, and one for each of the other layers."""

    def __init__(self, model, stage, dtype=torch.float32):
        model.to(dtype)
        layers = [model.embedding, model.position, *model.blocks, model.norm, model.head]
        gathered = []
        self.units = [Unit(layer, stage, dtype, gathered) for layer in layers]
        self.model, self.number, self.kept = model, 0, 0

    def train_step(self, text):
        """Train one step on this rank's samples; return the loss."""
        loss = language_loss(self.model, text)
        loss.backward()
        self.kept = sum(unit.bytes_kept() for unit in self.units)  # now everything that a rank keeps is there
        self.number += 1
        for unit in self.units:
            unit.step(self.number)
            unit.zero_grad()
        return loss.detach()

    def full_parameters(self):
        """Return all parameters, gathered layer by layer."""
        copies = {}
        for unit in self.units:
            unit.gather()
            copies |= {parameter: parameter.detach().float().clone() for parameter in unit.parameters}
            if unit.stage == 3:
                unit.free()
        return [copies[parameter] for parameter in self.model.parameters()]


# ---- formulas -----------------------------------------------------------------------------------------------


def bytes_per_parameter(stage, world, mixed=True):
    """Return the bytes that a rank keeps for each parameter: parameters + gradients + optimizer, what is sharded / N.

    In mixed precision 2 + 2 + 12: parameters and gradients in bf16; parameters and two moments in float32. In float32
    4 + 4 + 8.
    """
    parts = (2, 2, 12) if mixed else (4, 4, 8)
    first_sharded = {0: 3, 1: 2, 2: 1, 3: 0}[stage]
    return sum(size / world if place >= first_sharded else size for place, size in enumerate(parts))


def check_paper(checks):
    """The example of the ZeRO paper (arXiv 1910.02054): 7.5 billion parameters on 64 GPUs."""
    for stage, published in {0: 120, 1: 31.4, 2: 16.6, 3: 1.9}.items():
        found = 7.5 * bytes_per_parameter(stage, 64)
        checks.near(
            f"7.5B parameters on 64 GPUs, stage {stage}: GB by formula, against the paper", found, published, percent=2
        )


# ---- the others, for comparison -----------------------------------------------------------------------------


def one_rank(make_model, batches):
    """Train on whole batches with torch's Adam, as one rank would; return the parameters."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), LR, BETAS, EPS)
    for text in batches:
        optimizer.zero_grad()
        language_loss(model, text).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


class Ddp:
    """Torch's DDP with Adam: everything on every rank."""

    def __init__(self, model):
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), LR, BETAS, EPS)
        self.kept = 0

    def train_step(self, text):
        """Train one step on this rank's samples; return the loss."""
        self.optimizer.zero_grad()
        loss = language_loss(self.model, text)
        loss.backward()
        self.optimizer.step()
        self.kept = sum(
            _bytes(p) + _bytes(p.grad) + _bytes(*_moments(self.optimizer, p)) for p in self.model.parameters()
        )
        return loss.detach()

    def full_parameters(self):
        """Return all parameters."""
        return [parameter.detach() for parameter in self.model.parameters()]


class Fsdp(Ddp):
    """Torch's FSDP2 with Adam: sharded as in stage 3, and written in C++ and Python by a team."""

    def __init__(self, model):
        # The embeddings, the last norm and the head belong to the root. It would keep them gathered from the forward to
        # the backward; here it frees them too, as stage 3 does.
        for block in model.blocks:
            fully_shard(block)
        self.model = fully_shard(model, reshard_after_forward=True)
        self.optimizer = torch.optim.Adam(self.model.parameters(), LR, BETAS, EPS)
        self.kept = 0

    def full_parameters(self):
        """Return all parameters, gathered."""
        return [parameter.full_tensor().detach() for parameter in self.model.parameters()]


def _moments(optimizer, parameter):
    state = optimizer.state[parameter]
    return state["exp_avg"], state["exp_avg_sq"]


def _bytes(*tensors):
    locals_ = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in locals_)


# ---- main ---------------------------------------------------------------------------------------------------


def volume(calls):
    """Return the bytes that were moved. An all-reduce is a reduce-scatter and an all-gather: it counts twice."""
    return 2 * calls.bytes("all_reduce") + calls.bytes("reduce_scatter") + calls.bytes("all_gather")


def run(trainer, batches, rank, world):
    """Train on this rank's rows of each batch. Return (parameters, volume of one step, seconds of one step)."""
    for number, text in enumerate(batches):
        rows = text.chunk(world)[rank]
        start = time.perf_counter()
        if number == len(batches) - 1:
            with CountCollectives() as calls:
                trainer.train_step(rows)
        else:
            trainer.train_step(rows)
        seconds = time.perf_counter() - start
    return trainer.full_parameters(), volume(calls), seconds


def difference(mine, theirs):
    """Return the largest difference between two lists of parameters."""
    return max(float((a.cpu() - b.cpu()).abs().max()) for a, b in zip(mine, theirs, strict=True))


def main():
    """Train the same GPT in every way, and compare parameters, bytes and time."""
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    dist.init_process_group(backend())
    place, rank, world = device(), dist.get_rank(), dist.get_world_size()
    rounding = 1e-6 if place.type == "cpu" else 1e-5  # a GPU adds in another order in every run
    layers, width, length = (8, 512, 64) if OPTIONS.full else (2, 64, 32)
    checks = Checks(f"ZeRO on {world} ranks, a GPT of {layers} layers, width {width}")

    def make_model():
        torch.manual_seed(0)
        return gpt(layers, width=width, length=length).to(place)

    data = MarkovText(8 * world * 5, length=length)
    batches = [torch.stack([data[i] for i in range(n * 8 * world, (n + 1) * 8 * world)]).to(place) for n in range(5)]
    reference = one_rank(make_model, batches)

    # In float32, where only rounding may differ from one rank.
    trainers = {
        "DDP": Ddp,
        "stage 1": lambda m: Zero(m, 1),
        "stage 2": lambda m: Zero(m, 2),
        "stage 3": lambda m: Zero(m, 3),
        "FSDP2": Fsdp,
    }
    numbers = sum(parameter.numel() for parameter in reference)
    rows = {}
    results = {}
    for stage, (name, make) in enumerate(trainers.items()):
        trainer = make(make_model())
        parameters, moved, seconds = run(trainer, batches, rank, world)
        results[name] = parameters
        rows[name] = (trainer.kept / numbers, moved / (4 * numbers), seconds)
        if name == "stage 3":
            most = max(unit.most_gathered for unit in trainer.units)
            checks.true(f"{name}: layers that were gathered at the same time, at most 2", 1 <= most <= 2, most)
        checks.less(
            f"{name}: largest difference from Adam on one rank after {len(batches)} steps",
            difference(parameters, reference),
            rounding,
        )
        expected = bytes_per_parameter(min(stage, 3), world, mixed=False)
        padding = 3 if name == "FSDP2" else 1  # it pads each parameter to whole rows, we pad a layer by single numbers
        checks.near(f"{name}: bytes per parameter and rank, float32", trainer.kept / numbers, expected, percent=padding)
        checks.near(f"{name}: volume of a step, in D", moved / (4 * numbers), [2, 2, 2, 3, 3][stage], percent=padding)
    checks.less("stage 3: largest difference from FSDP2", difference(results["stage 3"], results["FSDP2"]), rounding)

    # In mixed precision the bytes are those of the paper, and all stages compute the same.
    mixed = {}
    for stage in (1, 2, 3):
        trainer = Zero(make_model(), stage, torch.bfloat16)
        mixed[stage], *_ = run(trainer, batches, rank, world)
        expected = bytes_per_parameter(stage, world)
        # Stage 3 frees the gathered parameters; its own shard of them is what is left.
        checks.near(
            f"stage {stage}: bytes per parameter and rank, bf16 + float32", trainer.kept / numbers, expected, percent=1
        )
    checks.equal(
        "bf16: largest difference between stages 1 and 2, and 2 and 3",
        (difference(mixed[1], mixed[2]), difference(mixed[2], mixed[3])),
        (0.0, 0.0),
    )
    check_paper(checks)

    if rank == 0:
        print(f"\n  {numbers:,} parameters, {world} ranks, float32")
        print(f"  {'':10} {'bytes/parameter':>16} {'volume':>8} {'ms/step':>9}")
        for name, (kept, moved, seconds) in rows.items():
            print(f"  {name:10} {kept:16.2f} {moved:7.2f}D {1e3 * seconds:9.1f}")
        print()
        measured = trainer.kept / numbers * world / 64
        reveal("b1", QUESTIONS[0], computed=16 / 64, measured=measured)
        reveal("b1", QUESTIONS[1], computed=1.5, measured=rows["stage 3"][1] / rows["DDP"][1])
        draw()
    checks.finish()


def draw():
    """Draw the bytes per parameter by stage and number of ranks."""
    made = plots.figure(8, 4)
    if made is None:
        return
    picture, axes = made
    worlds = [1, 2, 4, 8, 16, 32, 64]
    names = ["DDP", "stage 1: optimizer sharded", "stage 2: and gradients", "stage 3: and parameters"]
    for stage, name in enumerate(names):
        gigabytes = [7.5 * bytes_per_parameter(stage, world) for world in worlds]
        axes.plot(worlds, gigabytes, "o-", label=name)
        axes.annotate(
            f"{gigabytes[-1]:.1f}", (64, gigabytes[-1]), textcoords="offset points", xytext=(8, -3), fontsize=8
        )
    axes.axhline(80, color="grey", linewidth=0.8, linestyle="--")
    axes.text(1, 82, "a GPU of 80 GB", fontsize=8, color="grey")
    axes.set_xscale("log", base=2)
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.set_xlabel("ranks")
    axes.set_ylabel("GB per rank, 7.5 billion parameters")
    axes.legend(fontsize=8)
    plots.save(picture, "b1_zero")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="a GPT of 25 million parameters")
    parser.add_argument("--local-rank", help=argparse.SUPPRESS)  # torch.distributed.launch passes it
    OPTIONS = parser.parse_args()
    ask("b1", QUESTIONS)
    run_ranks(main, nproc=2)
