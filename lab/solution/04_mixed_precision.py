"""Exercise 4: mixed precision. Half the bytes for most numbers, and a scale that keeps small gradients alive.

python lab/solution/04_mixed_precision.py
torchrun --nproc-per-node 2 lab/solution/04_mixed_precision.py

On a GPU it also measures speed and memory of fp32, tf32, fp16 and bf16, with larger models.
"""

import argparse
import copy
import math
import os
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.lab import plots, predictions
from lockstep.lab.checks import Checks
from lockstep.lab.predictions import Question
from lockstep.lab.ranks import backend, device, run_ranks
from lockstep.lab.workload.data import MarkovText
from lockstep.lab.workload.models import gpt, language_loss

SMALLEST_SCALE = Question(
    "smallest_scale",
    "Which is the smallest power of two that keeps a gradient of 1e-8 from becoming 0 in fp16?",
    "",
    "the first power of two above 2^-25 / 1e-8",
)
ACTIVATIONS = Question(
    "activations",
    "How many bytes does a bf16 forward keep for its backward, in percent of fp32?",
    "%",
    "2 bytes instead of 4, if every tensor were bf16",
)
QUESTIONS = [SMALLEST_SCALE, ACTIVATIONS]

LossOf = Callable[[nn.Module, Tensor], Tensor]  # loss_of(model, batch)


# ---- 1. The formats -------------------------------------------------------------------------------------------


def formats(checks: Checks) -> None:
    """Show which gradients fp16 loses. It has 5 bits for the exponent; bf16 has 8, as many as fp32."""
    say("\n  value     fp16         bf16         fp16 after * 1024 and / 1024")
    for value in (1e-4, 1e-6, 1e-8):
        half, brain = torch.tensor(value).half().item(), torch.tensor(value).bfloat16().item()
        scaled = (torch.tensor(value) * 1024).half().float().item() / 1024
        say(f"  {value:<8.0e}  {half:<11.4e}  {brain:<11.4e}  {scaled:.4e}")

    # Normal numbers end at 6.1e-5. Below them come subnormal ones, with fewer and fewer digits, down to 6.0e-8.
    smallest = 2.0**-24
    checks.equal("fp16: 2^-24 (6.0e-8) is the smallest number", torch.tensor(smallest).half().item(), smallest)
    checks.equal("fp16: 2^-25 (3.0e-8) becomes 0", torch.tensor(smallest / 2).half().item(), 0.0)
    checks.equal("fp16: a gradient of 1e-8 becomes 0", torch.tensor(1e-8).half().item(), 0.0)
    checks.less("bf16: the same gradient is kept to 1 %", abs(torch.tensor(1e-8).bfloat16().item() / 1e-8 - 1), 0.01)

    # The course's example was 1e-4. That is a normal number of fp16, so the example was wrong: nothing underflows.
    kept = torch.tensor(1e-4).half().item()
    checks.less("fp16: 1e-4, the course's example of an underflow, is kept to 0.1 %", abs(kept / 1e-4 - 1), 1e-3)
    checks.equal("fp16: 65504 is the largest number, 70000 is infinite", torch.tensor(70000.0).half().item(), math.inf)


def gradient_through_half(scale: float) -> float:
    """Return the gradient that arrives at a weight when 1e-8, times `scale`, flows back through an fp16 tensor."""
    weight = torch.ones(1, requires_grad=True)
    # The backward of .float() casts the incoming gradient, 1e-8 * scale, to fp16: here it survives or not.
    loss = weight.half().float() * 1e-8
    (loss * scale).backward()
    assert weight.grad is not None
    return weight.grad.item() / scale


# ---- 2. The scaler --------------------------------------------------------------------------------------------


class LossScaler:
    """Multiplies the loss, so that its gradients are large enough for fp16, and finds the factor by itself.

    Too large a factor makes gradients infinite. That step is skipped and the factor halved. After `interval` good steps
    in a row it is doubled again.
    """

    def __init__(self, scale: float = 65536.0, *, interval: int = 2000):
        self.scale, self.interval = scale, interval
        self.good_steps = 0

    def unscale(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Divide the gradients by the scale, and return whether all of them are finite."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for gradient in gradients:
            gradient /= self.scale
        # One question for all gradients: on a GPU each answer makes the host wait.
        return bool(torch.stack([gradient.isfinite().all() for gradient in gradients]).all())

    def update(self, finite: bool) -> None:
        """Halve the scale after an overflow; double it after `interval` good steps in a row."""
        if not finite:
            self.scale /= 2
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.scale *= 2
            self.good_steps = 0


def train_step(
    model: nn.Module,
    loss_of: LossOf,
    batch: Tensor,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    dtype: torch.dtype,
    max_norm: float = math.inf,
) -> bool:
    """Do one step in mixed precision; return False if it was skipped. The weights stay float32."""
    optimizer.zero_grad()

    # Autocast chooses a format for each operation: products in `dtype`, sums such as a loss or a softmax in float32.
    with torch.autocast(batch.device.type, dtype):
        loss = loss_of(model, batch)

    # Backward outside of autocast: it uses the formats that the forward has chosen.
    (loss * scaler.scale).backward()

    # First unscale, then clip: max_norm is meant for the real gradients. DDP has averaged them, so that an infinite
    # gradient of one rank is infinite, or not a number, on all: all ranks skip, or none does.
    finite = scaler.unscale(model.parameters())
    if finite:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    scaler.update(finite)
    return finite


# ---- 3. The scaler at work ------------------------------------------------------------------------------------


def overflows(checks: Checks) -> list[float]:
    """Inject an infinite gradient, and compare our scaler with torch's. Returns the scale after each step."""

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).float().square().mean()

    torch.manual_seed(0)
    ours = nn.Linear(4, 4)
    theirs = copy.deepcopy(ours)
    own_scaler = LossScaler(1024.0, interval=4)
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    own_optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    torch_optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)

    scales, same, applied = [], True, []
    for step in range(12):
        batch = torch.randn(8, 4)
        if step == 3:
            batch[0, 0] = math.inf

        before = ours.weight.detach().clone()
        applied.append(train_step(ours, loss_of, batch, own_optimizer, own_scaler, torch.bfloat16))
        scales.append(own_scaler.scale)
        if step == 3:
            checks.true("an infinite gradient: no weight changes", torch.equal(before, ours.weight), "same bits")

        # The same with torch.amp.GradScaler: step() unscales, and skips by itself.
        torch_optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(theirs, batch)
        torch_scaler.scale(loss).backward()
        torch_scaler.step(torch_optimizer)
        torch_scaler.update()
        same &= torch.equal(ours.weight, theirs.weight) and torch_scaler.get_scale() == own_scaler.scale

    expected = [1024.0] * 3 + [512.0] * 4 + [1024.0] * 4 + [2048.0]
    checks.equal("skipped: the step with the infinite gradient, no other", applied.count(False), 1)
    checks.equal("the scale is halved after it, and doubled after 4 good steps", scales, expected)
    checks.true("torch.amp.GradScaler has the same scales and the same weights", same, "same bits in 12 steps")
    return scales


def one_rank_overflows(checks: Checks) -> None:
    """Let rank 1 alone overflow: all ranks must skip, or the replicas differ from then on."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), LossScaler(1024.0)
    applied = []
    for step in range(3):
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step * 10 + dist.get_rank()))
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            batch[0, 0] = math.inf
        applied.append(
            train_step(model, lambda m, b: m(b).float().square().mean(), batch, optimizer, scaler, torch.bfloat16)
        )
    checks.equal("one rank overflows: every rank skips that step", applied, [True, False, True])

    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everywhere = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, weights)
    checks.true("and all replicas keep the same bits", all(torch.equal(weights, other) for other in everywhere), "")


def instability(checks: Checks) -> None:
    """Show the overflow that no scale fixes: a forward whose own numbers are too large for fp16."""

    def forward(dtype: torch.dtype) -> Tensor:
        with torch.autocast("cpu", dtype):
            return nn.functional.linear(torch.full((1, 4), 300.0), torch.full((1, 4), 300.0))

    checks.true(
        "4 * 300 * 300 is too large for fp16", not forward(torch.float16).isfinite(), forward(torch.float16).item()
    )
    checks.true("bf16 holds it", bool(forward(torch.bfloat16).isfinite()), f"{forward(torch.bfloat16).item():.4g}")

    # The scaler only sees that nothing is finite, whatever the scale: watch the scale, it falls with every step.
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 300.0)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-4), LossScaler(1024.0)
    for _ in range(10):
        train_step(
            model,
            lambda m, b: m(b).float().square().mean(),
            torch.full((1, 4), 300.0),
            optimizer,
            scaler,
            torch.float16,
        )
    checks.equal("after 10 such steps the scale is down to", scaler.scale, 1.0)


# ---- 4. What it saves, and what it costs ----------------------------------------------------------------------


def saved_bytes(model: nn.Module, loss_of: LossOf, batch: Tensor, dtype: torch.dtype | None) -> int:
    """Return the bytes that a forward keeps for its backward, parameters not counted."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast(batch.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of(model, batch)
        del loss
    return sum(kept.values())


def precisions(checks: Checks) -> None:
    """Train the same GPT in each format, and print loss, kept bytes and time."""
    here = device()
    large = here.type == "cuda"
    steps, layers, width, length, samples = (30, 12, 1024, 512, 16) if large else (6, 2, 64, 32, 8)
    text = MarkovText(samples, length=length)
    batch = torch.stack([text[index] for index in range(samples)]).to(here)

    formats = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
    if large:
        formats = {"fp32": None, "tf32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
    losses, kept, spent = {}, {}, {}
    say(f"\n  format  loss after {steps} steps  against fp32  kept for backward  ms per step")
    for name, dtype in formats.items():
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        torch.manual_seed(0)
        model = gpt(layers, width=width, length=length).to(here)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if not large else 1e-4)
        kept[name] = saved_bytes(model, language_loss, batch, dtype)

        # fp32, tf32 and bf16 need no scale: a scale of 1 that never grows changes nothing.
        half = dtype is torch.float16
        scaler = LossScaler(2.0**16) if half else LossScaler(1.0, interval=10**9)
        for step in range(steps):
            if step == 2:  # the first steps choose algorithms
                begun = _now()
            if dtype is None:
                optimizer.zero_grad()
                language_loss(model, batch).backward()
                optimizer.step()
            else:
                train_step(model, language_loss, batch, optimizer, scaler, dtype)
        spent[name] = (_now() - begun) / (steps - 2) * 1000
        with torch.no_grad():
            losses[name] = language_loss(model, batch).item()
        say(
            f"  {name:<6}  {losses[name]:<19.5f}  {losses[name] - losses['fp32']:<+12.1e}  "
            f"{kept[name] / 1e6:<14.2f} MB  {spent[name]:.1f}"
        )
        checks.equal(f"{name}: the weights are float32", {p.dtype for p in model.parameters()}, {torch.float32})
        checks.less(f"{name}: the loss is that of fp32 within 2 %", abs(losses[name] / losses["fp32"] - 1), 0.02)
    torch.set_float32_matmul_precision("highest")

    # Weights, gradients and AdamW's two averages are float32 in every row.
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"  the state takes 16 bytes per parameter in every format: {16 * parameters / 1e6:.1f} MB")
    share = 100 * kept["bf16"] / kept["fp32"]
    if dist.get_rank() == 0:
        predictions.reveal("4", ACTIVATIONS, computed=50.0, measured=share)
    checks.less("bf16 keeps fewer bytes for backward than 80 % of fp32's [%]", share, 80)
    if large:
        # Products are twice as fast, but norms, softmax, the loss and AdamW still read and write float32.
        checks.less("bf16 takes less than 80 % of tf32's time per step", spent["bf16"] / spent["tf32"], 0.8)


def _now() -> float:
    """Return the time, after the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def matmul_speed(checks: Checks) -> None:
    """Measure the speed of large matrix products on a GPU."""
    size, rates = 8192, {}
    for name, dtype in {"fp32": None, "tf32": None, "fp16": torch.float16, "bf16": torch.bfloat16}.items():
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        a = torch.randn(size, size, device="cuda", dtype=dtype or torch.float32)
        repeat = 3 if name == "fp32" else 20
        for _ in range(3):
            a @ a
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeat):
            a @ a
        end.record()
        torch.cuda.synchronize()
        rates[name] = 2 * size**3 * repeat / start.elapsed_time(end) / 1e9
        say(f"  {name}: {rates[name]:.0f} TFLOP/s")
    torch.set_float32_matmul_precision("highest")
    checks.true(
        "bf16 products are at least 1.5 times as fast as tf32",
        rates["bf16"] >= 1.5 * rates["tf32"],
        rates["bf16"] / rates["tf32"],
    )


# ---- 5. The same with Lockstep --------------------------------------------------------------------------------


def with_lockstep(checks: Checks) -> None:
    """Train under Lockstep in fp32 and fp16: one setting chooses the format, and the scale comes with it."""
    text, norms = MarkovText(16, length=16), {}
    for precision in ("fp32", "fp16"):
        with lockstep.start(
            global_batch=8,
            steps=3,
            compile=False,  # for three steps it would take longer than they do
            precision=precision,
            run_dir=str(predictions.folder() / f"04_{precision}_{os.environ['MASTER_PORT']}"),
            log={"progress": "off"},
            checkpoint={"at_end": False},
        ) as run:
            model = gpt(1, width=64, length=16)
            model, _ = run.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
            for step in run.steps(text):
                for batch in step:
                    step.backward(language_loss(model, batch) * len(batch), weight=len(batch))
                result = step.apply()
        norms[precision] = result.grad_norm if result else math.nan
    checks.less(
        f"Lockstep: the norm of the last gradient in fp16, {norms['fp16']:.4f}, is that in fp32 within 2 %",
        abs(norms["fp16"] / norms["fp32"] - 1),
        0.02,
    )


# ---- The script -----------------------------------------------------------------------------------------------


def draw(scales: list[float]) -> None:
    """Draw the loss scale over the steps."""
    drawn = plots.figure(7, 3)
    if drawn is None:
        return
    picture, axes = drawn
    axes.step(range(1, len(scales) + 1), scales, where="mid")
    axes.plot([4], [scales[3]], "x", color="tab:red", markersize=10, label="infinite gradient: skipped, scale halved")
    axes.set_yscale("log", base=2)
    axes.set(xlabel="step", ylabel="loss scale", title="The scaler: skip, halve, grow again (interval 4)")
    axes.legend()
    plots.save(picture, "04_mixed_precision")


def say(line: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    """Run all parts on this rank."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if backend() == "nccl" else "gloo")
    checks = Checks("Exercise 4: mixed precision")

    formats(checks)
    checks.equal("a gradient of 1e-8 through an fp16 tensor is lost without a scale", gradient_through_half(1.0), 0.0)
    checks.near("and arrives with a scale of 65536", gradient_through_half(65536.0), 1e-8, percent=0.1)
    scale = next(2.0**power for power in range(24) if gradient_through_half(2.0**power) > 0)
    computed = next(2.0**power for power in range(24) if 2.0**power * 1e-8 > 2.0**-25)
    checks.equal("the smallest scale that keeps it", scale, computed)
    if dist.get_rank() == 0:
        predictions.reveal("4", SMALLEST_SCALE, computed=computed, measured=scale)

    scales = overflows(checks)
    one_rank_overflows(checks)
    instability(checks)
    if device().type == "cuda":
        matmul_speed(checks)
    precisions(checks)
    with_lockstep(checks)
    if dist.get_rank() == 0:
        draw(scales)
    checks.finish()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    predictions.ask("4", QUESTIONS)
    run_ranks(main)
