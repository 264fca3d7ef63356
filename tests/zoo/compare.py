"""Train every public model by plain PyTorch and by Lockstep, and print how far apart they end.

    make zoo                                      # all models, all ways: takes minutes
    cd tests
    python -m zoo.compare GPT2 T5                 # some models
    python -m zoo.compare --ways fsdp exact       # some ways to execute them

An error is relative to the length of a parameter, the largest over all parameters, in float64 after three steps with
ragged weights. `exact` trains on 1, 2 and 3 ranks under ddp and fsdp, and counts the different results: 1 is right.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import default_collate

from lockstep.engine import loop
from lockstep.engine.end import full_state
from lockstep.engine.setup import open_run
from lockstep.errors import UserError
from lockstep.runtime import context
from lockstep.runtime.world import World
from pool import Pool
from ranks.support import configured, windows
from zoo import SLOW_TO_IMPORT
from zoo.public import SAMPLES, TASKS, TRANSFORMERS

STEPS, BATCH = 3, 8
BASE = {"global_batch": BATCH, "micro_batch": 2, "steps": STEPS, "lr.schedule": "constant", "checkpoint.at_end": False}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "tp": {"strategy": "tp"},
    "pp": {"strategy": "pp"},
    "remat": {"strategy": "fsdp", "remat": "full"},
}
EXACT = [(1, "ddp"), (2, "ddp"), (3, "ddp"), (2, "fsdp"), (3, "fsdp")]
UNUSED = {"DINOv2"}  # ddp must be told of parameters that no sample uses

Weights = dict[str, Tensor]


def trained(world: World, store: Any, name: str, values: dict[str, Any]) -> tuple[Weights, Weights]:
    """A job: the weights before the first step and after the last."""
    task = TASKS[name]()
    made = task.model
    initial: Weights = {}

    def model() -> torch.nn.Module:
        network = made()
        initial.update({key: tensor.clone() for key, tensor in network.state_dict().items()})
        return network

    task.model = model  # type: ignore[method-assign]
    resolved = configured(BASE | values)
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "zoo")
        loop.fit(task, builder)
        run = builder.run
        assert run is not None
        weights, _ = full_state(run.driver, keep=True)
        return initial, {key: tensor.cpu().clone() for key, tensor in weights.items()}


def by_hand(name: str, initial: Weights) -> Weights:
    """The same steps by plain PyTorch: the sum of a batch's losses divided by its weight.

    BatchNorm's statistics are those of a micro-batch, so there it is the sum over micro-batches.
    """
    task = TASKS[name]()
    model = task.model()
    model.load_state_dict(initial)
    optimizer = task.optimizer(model)
    data = task.data()
    size = BASE["micro_batch"] if any(isinstance(module, _BatchNorm) for module in model.modules()) else BATCH
    for ids in windows(SAMPLES, BATCH, "short", STEPS):
        pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
        losses = [task.loss(model, default_collate([data[i] for i in piece])) for piece in pieces]
        optimizer.zero_grad()
        (sum(loss.total for loss in losses) / sum(loss.weight for loss in losses)).backward()
        optimizer.step()
    return model.state_dict()


def error(found: Weights, expected: Weights) -> float:
    """The largest error of any tensor, relative to its length, or to 0.01 if it is shorter (a bias that began at 0)."""
    errors = [
        float((found[key].double() - expected[key].double()).norm() / expected[key].double().norm().clamp(min=1e-2))
        for key in found  # tied tensors may be listed once only
    ]
    return max(errors)


def values_of(name: str, way: str) -> dict[str, Any]:
    finds_unused = name in UNUSED and way in ("ddp", "zero1")
    return WAYS[way] | ({"ddp.find_unused_parameters": True} if finds_unused else {})


def digest(weights: Weights) -> str:
    return hashlib.sha256(b"".join(weights[key].numpy().tobytes() for key in sorted(weights))).hexdigest()


def compared(pool: Pool, name: str, way: str) -> str:
    """The cell of one model and one way: an error, a number of results, or the refusal."""
    if way in ("tp", "pp") and name not in TRANSFORMERS:
        return "-"
    try:
        if way == "exact":
            runs = [pool.run(trained, name, values_of(name, way) | {"exact": True}, world=n)[0][1] for n, way in EXACT]
            return str(len({digest(weights) for weights in runs}))
        initial, found = pool.run(trained, name, values_of(name, way), world=2)[0]
        return f"{error(found, by_hand(name, initial)):.0e}"
    except UserError as refusal:
        print(f"{name} {way}: {refusal}", file=sys.stderr)
        return "refused"
    except Exception as failure:
        print(f"{name} {way}: {type(failure).__name__}: {str(failure)[:300]}", file=sys.stderr)
        return "FAILED"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(TASKS))
    parser.add_argument("--ways", nargs="*", default=[*WAYS, "exact"])
    asked = parser.parse_args()
    pool = Pool()
    pool.preload(*SLOW_TO_IMPORT)
    print(f"{'model':18}" + "".join(f"{way:>10}" for way in asked.ways))
    for name in asked.models:
        cells = [compared(pool, name, way) for way in asked.ways]
        print(f"{name:18}" + "".join(f"{cell:>10}" for cell in cells), flush=True)
    pool.close()


if __name__ == "__main__":
    main()
