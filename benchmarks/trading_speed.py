"""Where an update of the recipe clstm_ppo spends its time, piece by piece.

    python benchmarks/trading_speed.py                 # the preset gpu, on a GPU
    python benchmarks/trading_speed.py --preset cpu    # anywhere

`rollout` is trading alone, `collect` the same with advantages and their norms; a minibatch is one optimizer step's
forward and backward, of which `windows` is the first LSTM and `days` the second. Kernels are counted by the profiler.
The ratio says how far the policy that learns is from the one that traded, before the first step: rounding alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lockstep.recipes.clstm_ppo import ClstmPpo
from lockstep.recipes.clstm_ppo.rollout import log_probs
from lockstep.task import SourceContext

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seconds(piece: Callable[[], object], times: int = 3) -> float:
    piece()
    _wait()
    began = time.perf_counter()
    for _ in range(times):
        piece()
    _wait()
    return (time.perf_counter() - began) / times


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def kernels(piece: Callable[[], object]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        piece()
        _wait()
    return sum("cuda" in str(event.device_type).lower() for event in profile.events())


def backward(found: Tensor) -> None:
    found.float().sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(ClstmPpo.presets), default="gpu")
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), default="tf32", help="bf16: of the update")
    asked = parser.parse_args()
    torch.set_float32_matmul_precision("highest" if asked.precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = asked.precision != "fp32"
    torch.manual_seed(0)
    values = ClstmPpo.presets[asked.preset]
    task, places = ClstmPpo(**values["task"]), values["global_batch"]
    agent, source, options = task.model().to(DEVICE), task.source, task.source.options
    nn.init.normal_(agent.policy.weight, std=0.05)  # with opinions, or every ratio would be 1
    source.attach(SourceContext(agent, DEVICE, 0, places, places, range(1), 1, False, lambda values: values))
    cohort, environments = source.cohorts[0], source.environments

    took = seconds(lambda: cohort.trade(agent, options.rollout, 0, 0, 1.0), times=1)
    days = environments * options.rollout
    print(f"rollout of {environments} x {options.rollout}: {took:.3f} s, {days / took:,.0f} days/s")
    if DEVICE.type == "cuda":
        few, more = (kernels(lambda days=days: cohort.trade(agent, days, 0, 0, 1.0)) for days in (2, 6))
        print(f"kernels a day: {(more - few) / 4:.0f}")
    collected = seconds(source._collect, times=1)
    print(f"collect: {collected:.3f} s")

    (micro,) = source.take()
    data = micro.data
    days = {name: data[name].transpose(0, 1) for name in ("windows", "starts", "actions", "logp")}
    state, windows = (data["hidden"], data["cell"]), days["windows"].flatten(0, 1)
    cast = torch.autocast(DEVICE.type, torch.bfloat16, enabled=asked.precision == "bf16")
    with cast, torch.no_grad():
        logits, *_ = agent(days["windows"], state, days["starts"])
        seen = agent.look(windows).unflatten(0, days["starts"].shape)
    chances = log_probs(logits, days["actions"])
    off = (((chances if agent.shape.value_per_asset else chances.sum(-1)) - days["logp"]).exp() - 1).abs()
    print(f"|ratio - 1|: at most {off.max():.1e}, mean {off.mean():.1e}")

    def whole() -> None:
        with cast:
            loss = task.loss(agent, data)
        loss.total.backward()

    def read() -> None:
        with cast:
            found = agent.look(windows)
        backward(found)

    def recall() -> None:
        with cast:
            found, _ = (agent.recall_at_once if DEVICE.type == "cuda" else agent.recall_daily)(
                seen.detach().requires_grad_(), state, days["starts"]
            )
        backward(found)

    pieces = {"minibatch": whole, "windows": read, "days": recall}
    for name, piece in pieces.items():
        print(f"{name}, forward and backward: {seconds(piece) * 1e3:.1f} ms")
    update = collected + options.steps * seconds(whole)
    print(f"update: about {update:.2f} s, {environments * options.rollout / update:,.0f} days/s, without the optimizer")
    if DEVICE.type == "cuda":
        print(f"memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most")


if __name__ == "__main__":
    main()
