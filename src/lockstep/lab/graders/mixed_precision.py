"""Grades exercise 4: what a step in mixed precision does to weights, gradients and the scale.

The gradients of its losses are known in advance, and some of them are made infinite or nan on purpose. What a step does
to weights, momentum and scale then shows each mistake by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.lab.grading import Finding
from lockstep.lab.learner import Learner

FUNCTIONS = ("LossScaler", "train_step")
ERRORS = {
    "to have the same dtype": "the model was converted, and its input was not. Autocast converts both where they are "
    "used, and the weights stay float32: do not call .to(dtype), .half() or .bfloat16() on the model",
}
SCALE = 1024.0


def grade(learner: Learner) -> Iterator[Finding]:
    """Call `train_step` with losses whose gradients are known, and with an infinite one."""
    found = learner.run(_one_rank, world=1)[0]
    alone = [*_formats(found), *_gradients(found), *_overflow(found), *_scales(found)]
    yield from alone

    # What one rank does wrong would only show again on two.
    if not all(finding.passed for finding in alone):
        return

    applied, same = zip(*learner.run(_two_ranks), strict=True)
    together = applied[0] == applied[1] and all(same)
    yield Finding(
        "when rank 1 alone overflows, both ranks skip the step",
        together,
        "" if together else f"rank 0 applied {applied[0]}, rank 1 applied {applied[1]}",
        "Ranks must decide by the gradients, after DDP has averaged them: an infinite one is then infinite everywhere. "
        "The loss is each rank's own. Replicas that decide differently have different weights from then on.",
    )


# ---- What is measured on the ranks ----------------------------------------------------------------------------


def _mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().mean()


def _tiny(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().sum() * 1e-8


def _one_rank(module: Any) -> dict[str, Any]:
    """Do steps whose results are known. Return what came out, by name."""
    return {
        **_formats_found(module),
        **_tiny_update(module),
        "clipped norm": _clipped_norm(module),
        # What no optimizer may use. In fp16: in bf16 a step may do without the scaler.
        "overflows": {
            "an infinite loss": _overflowed(module, math.inf, ()),
            "an infinite gradient of the first layer alone": _overflowed(module, math.inf, (0,)),
            "a gradient that is nan": _overflowed(module, math.nan, (0, 1)),
        },
        "scales": _scales_found(module),
    }


def _formats_found(module: Any) -> dict[str, Any]:
    """Do a step in bf16. The gradient of the mean over 2 x 4 outputs is 2 * 0.5 / 8 for each weight."""
    model, optimizer, batch = _setup()
    formats = _noted_formats(model)
    before = model.weight.detach().clone()
    module.train_step(model, _mean, batch, optimizer, module.LossScaler(SCALE), torch.bfloat16)
    return {
        "bf16 computed in": formats[-1],
        "stored in": model.weight.dtype,
        "share of the gradient": ((before - model.weight) / 0.125).mean().item(),
    }


def _noted_formats(model: nn.Module) -> list[torch.dtype]:
    """Return a list to which each forward of the model adds the format of its output."""
    formats: list[torch.dtype] = []

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        formats.append(output.dtype)

    model.register_forward_hook(note)
    return formats


def _clipped_norm(module: Any) -> float:
    """Clip: the norm of the gradient is 0.5, and the update may have a norm of 0.1."""
    model, optimizer, batch = _setup()
    before = model.weight.detach().clone()
    module.train_step(model, _mean, batch, optimizer, module.LossScaler(SCALE), torch.bfloat16, 0.1)
    return (before - model.weight).norm().item()


def _tiny_update(module: Any) -> dict[str, Any]:
    """Do a step in fp16, with a gradient that is lost without a scale."""
    model, optimizer, batch = _setup()
    nn.init.zeros_(model.weight)
    formats = _noted_formats(model)
    module.train_step(model, _tiny, batch, optimizer, module.LossScaler(65536.0), torch.float16)
    return {"fp16 computed in": formats[-1], "tiny update": -model.weight.mean().item()}


def _scales_found(module: Any) -> list[float]:
    """Return the scale over good steps and one overflow, which must begin the count again."""
    model, optimizer, batch = _setup()
    scaler = module.LossScaler(SCALE, interval=3)
    scales = []
    for factor in (1.0, 1.0, math.inf, *[1.0] * 8):
        module.train_step(model, _mean, batch * factor, optimizer, scaler, torch.float16)
        scales.append(float(scaler.scale))

    return scales


def _overflowed(module: Any, value: float, layers: tuple[int, ...]) -> dict[str, Any]:
    """Do a step that fills the momentum, and one in which the gradients of these layers are inf or nan.

    Without layers the batch is infinite, and with it the loss and all gradients.
    """
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    weights = list(model.parameters())
    for weight in weights:
        nn.init.constant_(weight, 0.25)

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scaler, batch = module.LossScaler(SCALE), torch.full((2, 4), 0.5)
    applied = module.train_step(model, _mean, batch, optimizer, scaler, torch.float16)

    def tensors() -> list[Tensor]:
        momentum = [optimizer.state[weight].get("momentum_buffer") for weight in model.parameters()]
        return [tensor.detach().clone() for tensor in (*model.parameters(), *momentum) if tensor is not None]

    before = tensors()
    for place in layers:
        weights[place].register_hook(lambda gradient: gradient * value)

    batch = batch if layers else batch * value
    reported = module.train_step(model, _mean, batch, optimizer, scaler, torch.float16)
    after = tensors()
    return {
        "applied": bool(applied),
        "reported": bool(reported),
        "finite": all(bool(tensor.isfinite().all()) for tensor in after),
        "untouched": all(torch.equal(old, new) for old, new in zip(before, after, strict=True)),
    }


def _setup() -> tuple[nn.Linear, torch.optim.SGD, Tensor]:
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, 0.25)
    return model, torch.optim.SGD(model.parameters(), lr=1.0), torch.full((2, 4), 0.5)


def _two_ranks(module: Any) -> tuple[list[bool], bool]:
    model, _, batch = _setup()
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=1.0)
    scaler = module.LossScaler(SCALE)
    applied = []
    for step in range(3):
        overflows = step == 1 and dist.get_rank() == 1
        bad = batch * math.inf if overflows else batch
        applied.append(bool(module.train_step(replica, _mean, bad, optimizer, scaler, torch.float16)))

    weights = [torch.empty_like(model.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, model.weight.detach())
    return applied, torch.equal(weights[0], weights[1])


# ---- What it means --------------------------------------------------------------------------------------------


def _formats(found: dict[str, Any]) -> Iterator[Finding]:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        computed = found[f"{name} computed in"]
        yield Finding(
            f"the forward computes in {name} when {name} is asked for",
            computed is dtype,
            str(computed),
            "The forward and its loss belong into `with torch.autocast(device_type, dtype):`. Without it "
            "everything is float32."
            if computed is torch.float32
            else "Pass the dtype that train_step gets on to autocast: its own default is bf16 on a CPU, fp16 on a GPU.",
        )
        if computed is not dtype:
            return

    stored = found["stored in"] is torch.float32
    yield Finding(
        "the weights stay float32",
        stored,
        str(found["stored in"]),
        "A weight in bf16 has 8 bits: an update below 1/256 of it rounds away. Autocast makes half-precision copies by "
        "itself, so do not call .half() or .bfloat16() on the model.",
    )


def _gradients(found: dict[str, Any]) -> Iterator[Finding]:
    share = found["share of the gradient"]
    right = abs(share - 1) < 0.02
    why = "The update is the gradient times the learning rate, and the scale must not show in it."
    if abs(share / SCALE - 1) < 0.02:
        why = "The gradients still contain the scale: divide each of them by it before optimizer.step()."
    elif abs(share * SCALE - 1) < 0.02:
        why = "The gradients are divided by the scale, but the loss was never multiplied by it: (loss * scale)."

    yield Finding("the update is that of the unscaled gradient", right, f"{share:.4g} times as large", why)
    if not right:
        return

    norm = found["clipped norm"]
    why = "Clipping compares the norm with max_norm."
    if abs(norm * SCALE / 0.1 - 1) < 0.02:
        why = (
            "Gradients are clipped while they still contain the scale, so all of them are clipped to almost nothing. "
            "First unscale, then clip."
        )

    yield Finding("clipping sees unscaled gradients", abs(norm / 0.1 - 1) < 0.02, f"norm {norm:.3g} of 0.1", why)

    tiny = found["tiny update"]
    yield Finding(
        "a gradient of 1e-8 survives fp16",
        abs(tiny / 1e-8 - 1) < 0.02,
        f"{tiny:.2g} arrived",
        "fp16 has no number between 0 and 6e-8. The loss must be multiplied by the scale before backward().",
    )


def _overflow(found: dict[str, Any]) -> Iterator[Finding]:
    for name, seen in found["overflows"].items():
        why = "The optimizer stepped, or changed its momentum: call optimizer.step() only if all gradients are finite."
        if not seen["finite"]:
            why = "The optimizer stepped with it: weights or momentum are inf or nan, for good."
            if "first layer" in name:
                why += " Look at the gradients of all parameters, not only of the last one, and not at the loss."
            elif "nan" in name:
                why += " inf - inf and 0 * inf are nan: torch.isfinite is False for both, torch.isinf is not."

        yield Finding(f"{name} changes no weight and no momentum", seen["untouched"], "", why)
        if not seen["untouched"]:
            return

    states = found["overflows"].values()
    skipped = not any(seen["reported"] for seen in states)
    yield Finding(
        "train_step returns False for the skipped step",
        skipped,
        "" if skipped else "it returned True",
        "The caller must know that no step was done: the schedule of the learning rate must not move on either.",
    )
    applied = all(seen["applied"] for seen in states)
    yield Finding(
        "and True for a good one", applied, "" if applied else "it returned False", "Return what unscale found."
    )


def _scales(found: dict[str, Any]) -> Iterator[Finding]:
    scales, half = found["scales"], SCALE / 2
    yield Finding(
        "an overflow halves the scale",
        scales[2] == half,
        f"{scales[1]:g} became {scales[2]:g}",
        "With the same scale the next step overflows again, and no step is ever done. Call scaler.update() in every "
        "step, also in one that is skipped.",
    )
    if scales[2] != half:
        return

    expected = [SCALE, SCALE, half, half, half, SCALE, SCALE, SCALE, 2 * SCALE, 2 * SCALE, 2 * SCALE]
    yield Finding(
        "3 good steps in a row double it, and 3 more again",
        scales == expected,
        f"{[f'{scale:g}' for scale in scales]}",
        _explain_scales(scales, half),
    )


def _explain_scales(scales: list[float], half: float) -> str:
    """Return what is wrong with the scales after good steps, an overflow in step 3, and good steps again."""
    if scales[2] == half and scales[3] > half:
        return "An overflow must begin the count of good steps again: the scale grew too early."

    if any(later < earlier for earlier, later in pairwise(scales[2:])):
        return (
            "The scale fell after good steps: halve it only after an overflow, and call optimizer.zero_grad() in every "
            "step, or the infinite gradient is still there in the next one."
        )

    if scales[6] > scales[5] > half:
        return "Doubling must begin the count of good steps again: here the scale grew in every later step."
    if scales[5] == SCALE and scales[-1] == SCALE:
        return "The scale came back to its first value and stayed there: it must be able to grow beyond it."
    return "After `interval` good steps in a row the scale is doubled: a scale that only falls loses small gradients."
