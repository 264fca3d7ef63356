"""A batch 8 times as large: which learning rate? None, square-root and linear scaling, with and without a warm-up.

python lab/demos/lr_scaling.py

One process is enough: how many ranks share a batch does not change what it teaches. The setting was chosen because it
shows the linear rule, with one seed. In other settings the square root does as well: this is no proof of the rule.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.lab import Checks, plots

SAMPLES, BATCH, RATE, TIMES = 8192, 16, 0.05, 8
FACTORS = {"none": 1.0, "sqrt": math.sqrt(TIMES), "linear": float(TIMES)}
WARM_UP = 0.25  # of the steps


def make_data() -> tuple[Tensor, Tensor]:
    """Return inputs [samples, 16], and the class that a random network gives each of them."""
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 16)
    torch.manual_seed(5)
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter *= 3
        return inputs, teacher(inputs).argmax(dim=1)


def make_model() -> nn.Module:
    """Return an MLP whose first weights are large, so that the loss is steep where the training begins."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for width in (16, 64, 64):
        layers += [nn.Linear(width, 64), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(64, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 3
    return model


def train(batch: int, rate: float, warm_up: float) -> tuple[list[float], float]:
    """Train over all samples once; return the loss of each step, and the loss on all samples at the end."""
    inputs, labels = make_data()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    steps, losses = SAMPLES // batch, []
    rising = round(warm_up * steps)
    for step in range(steps):
        # The first step must not have a rate of 0, as in the course's formula: it would teach nothing.
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / rising) if rising else rate
        mine = slice(step * batch, (step + 1) * batch)
        loss = F.cross_entropy(model(inputs[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, F.cross_entropy(model(inputs), labels).item()


def main() -> None:
    """Train all forms, and compare them with the small batch."""
    torch.set_num_threads(1)
    small, target = train(BATCH, RATE, 0.0)
    print(f"  batch {BATCH}, rate {RATE}: loss {target:.3f} after {SAMPLES} samples\n")
    print(f"  batch {BATCH * TIMES}      rate    warm-up  loss   highest loss on the way")
    curves, finals, peaks = {}, {}, {}
    for name, factor in FACTORS.items():
        for warm_up in (0.0, WARM_UP):
            key = f"{name}{', warm-up' if warm_up else ''}"
            curves[key], finals[key] = train(BATCH * TIMES, RATE * factor, warm_up)
            peaks[key] = max(curves[key])
            warmed = "yes" if warm_up else "no"
            print(f"  {name:<12}  {RATE * factor:<6.3f}  {warmed:<7}  {finals[key]:.3f}  {peaks[key]:.1f}")

    checks = Checks("Learning rate and batch: 8 times as many samples in a step")
    first = curves["none"][0]
    behind = finals["none"] / target
    checks.true(
        "the old rate learns too little: the loss is higher by more than 20 %", behind > 1.2, f"{behind:.2f} times"
    )
    checks.true("the square root is better than nothing", finals["sqrt"] < finals["none"], f"{finals['sqrt']:.3f}")
    best = min(finals, key=lambda key: abs(finals[key] - target))
    checks.equal("nearest to the small batch", best, "linear, warm-up")
    checks.less("it is higher by", finals[best] / target - 1, 0.10)
    jump = peaks["linear"] / first
    checks.true(
        "without a warm-up the linear rule first makes the loss larger", jump > 2, f"{jump:.1f} times the first loss"
    )
    checks.less("with a warm-up it does not", peaks["linear, warm-up"] / first, 1.2)
    draw(small, curves)
    checks.finish()


def draw(small: list[float], curves: dict[str, list[float]]) -> None:
    """Draw the loss over the samples."""
    drawn = plots.figure(8, 4)
    if drawn is None:
        return
    picture, axes = drawn
    # The loss of 8 small steps is averaged, to have as many points.
    means = [sum(small[step : step + TIMES]) / TIMES for step in range(0, len(small), TIMES)]
    places = [BATCH * TIMES * (step + 1) for step in range(len(means))]
    axes.plot(places, means, color="black", linewidth=2, label=f"batch {BATCH}")
    for key, losses in curves.items():
        axes.plot(places, losses, "--" if "warm-up" in key else "-", linewidth=1, label=key)
    axes.set(xlabel="samples", ylabel="loss", yscale="log", title=f"Batch {BATCH * TIMES}: scaling the learning rate")
    axes.legend(ncols=2)
    plots.save(picture, "lr_scaling")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
