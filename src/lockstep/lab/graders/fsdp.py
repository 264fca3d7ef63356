"""Grades exercise 3: what is sharded, by what units, what the optimizer sees, and whether checkpoints are complete.

Whether a block is gathered by itself, and freed after its forward, is seen from the all-gathers that it causes. What
trains like DDP, counts bytes of shards and saves whole tensors has understood the rest.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from lockstep.lab.counting import CountCollectives
from lockstep.lab.grading import Finding
from lockstep.lab.learner import Learner, LearnerFailed
from lockstep.lab.workload.models import GPT, language_loss

FUNCTIONS = ("shard", "build", "bytes_per_rank", "save_full", "load_full", "save_sharded", "load_sharded")
ERRORS = {
    "Invariant encountered": "the model took the parameters of its blocks: call fully_shard on every block first, and "
    "on the model at the end",
    "must have the same dtype": "some units compute in bfloat16 and others in float32: pass the options that shard() "
    "gets on to every fully_shard",
}
RANKS, LAYERS = 2, 3
OTHER_LR = 2e-3  # than the one that was saved


def grade(learner: Learner) -> Iterator[Finding]:
    """Yield the findings, in the order in which the file is written."""
    sharded = yield from _sharding(learner)
    if not sharded:
        return

    yield from _training(learner)
    yield from _bytes(learner)
    yield from _precision(learner)
    with tempfile.TemporaryDirectory() as folder:
        yield from _full(learner, Path(folder))
        yield from _resharded(learner, Path(folder))


def _model() -> GPT:
    """Return the same small GPT every time, in float64: differences are mistakes, not rounding."""
    torch.manual_seed(0)
    return GPT(layers=LAYERS, width=16, heads=2, symbols=16, length=8).double()


def _text(rank: int) -> Tensor:
    """Return text of a rank, [2, 9] symbols."""
    return torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(rank))


def _whole(model: nn.Module) -> dict[str, Tensor]:
    """Return full weights by name. Collective, if they are sharded."""
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def _off(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Return the largest difference of two states."""
    return max((first[name] - second[name]).abs().max().item() for name in second)


# ---- shard ----


def _sharding(learner: Learner) -> Iterator[Finding]:
    """Judge what is sharded, and when blocks are gathered and freed. Returns whether everything is sharded."""
    plain, gathers, again = learner.run(_shard, world=RANKS)[0]
    yield Finding(
        "every parameter is sharded",
        not plain,
        f"{plain[0]} is whole on each rank" if plain else "",
        "call fully_shard(model) after its blocks: it takes what the blocks have left, such as the embedding",
    )
    if plain:
        return False

    yield Finding(
        "each block is gathered by itself",
        gathers > LAYERS,
        f"{gathers} all-gathers in a forward pass, expected {LAYERS + 1} or more",
        "the whole model is gathered at once, so the peak of memory is that of DDP: call fully_shard on every block "
        "before the model",
    )

    yield Finding(
        "and freed after its forward: the backward gathers it again",
        again >= LAYERS,
        f"{again} all-gathers in a backward pass, expected {LAYERS} or more",
        "with reshard_after_forward=False all blocks stay whole from the forward to the backward, so the peak of "
        "memory is that of DDP: leave it out, and pass on the options that shard() gets",
    )
    return True


def _shard(module: ModuleType) -> tuple[list[str], int, int]:
    """Return the parameters that are not sharded, and the all-gathers of a forward and of a backward."""
    model = module.shard(_model())
    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    with CountCollectives() as counted:
        loss = language_loss(model, _text(0))

    with CountCollectives() as again:
        loss.backward()

    return plain, counted.count("all_gather"), again.count("all_gather")


# ---- build ----


def _training(learner: Learner) -> Iterator[Finding]:
    """Judge three steps against DDP."""
    found = learner.run(_train, world=RANKS)
    off, still = max(rank[0] for rank in found), found[0][1]
    yield Finding(
        "3 steps give the weights of DDP within 1e-5",
        off < 1e-5,
        "the weights did not change" if still else f"off by {off:.2g}",
        "the optimizer holds the parameters of before fully_shard, which the model no longer uses: shard first, then "
        "make the optimizer"
        if still
        else "train with AdamW and the learning rate that build() gets",
    )


def _train(module: ModuleType) -> tuple[float, bool]:
    """Train a DDP replica and the learner's model alike; return how far they are apart, and whether nothing changed."""
    first = _model()
    replica = DDP(copy.deepcopy(first))
    ours = torch.optim.AdamW(replica.parameters(), lr=1e-3)
    model, optimizer = module.build(copy.deepcopy(first), lr=1e-3)

    for step in range(3):
        for net, its in ((replica, ours), (model, optimizer)):
            its.zero_grad()
            language_loss(net, _text(step * RANKS + dist.get_rank())).backward()
            its.step()

    weights = _whole(model)
    return _off(weights, _whole(replica.module)), _off(weights, _whole(first)) == 0


# ---- bytes_per_rank ----


def _bytes(learner: Learner) -> Iterator[Finding]:
    """Judge the bytes: before the first step, and after it."""
    before, counted, share = learner.run(_count, world=RANKS)[0]
    names = ("parameters", "gradients", "optimizer")
    if not isinstance(counted, dict) or set(counted) != set(names):
        yield Finding("bytes_per_rank returns the three kinds", False, f"{counted!r}", f"return a dict of {names}")
        return

    yield Finding(
        "before the first step there are no gradients and no states",
        (before["gradients"], before["optimizer"]) == (0, 0),
        f"{before['gradients']:,} and {before['optimizer']:,} bytes",
        "count the tensors that are there (.grad, optimizer.state), rather than what a formula expects",
    )

    # Only the local shard counts. The size of a DTensor is that of the whole tensor.
    for name, expected in share.items():
        times = counted[name] / expected if expected else 0.0
        why = "count what this rank holds"
        if abs(times - RANKS) < 0.2:
            why = "numel() of a DTensor is that of the whole tensor: count to_local()"

        yield Finding(
            f"bytes of {name} on a rank are 1 / {RANKS} of all",
            abs(times - 1) < 0.01,
            f"{counted[name]:,}, expected {expected:,}",
            why,
        )


def _count(module: ModuleType) -> tuple[Any, Any, dict[str, int]]:
    """Count the bytes before and after a step; return both, and what is right after it."""
    first = _model()
    model, optimizer = module.build(copy.deepcopy(first), lr=1e-3)
    before = module.bytes_per_rank(model, optimizer)
    language_loss(model, _text(0)).backward()
    optimizer.step()

    share = sum(parameter.numel() * parameter.element_size() for parameter in first.parameters()) // RANKS

    # AdamW keeps two averages of each parameter.
    expected = {"parameters": share, "gradients": share, "optimizer": 2 * share}
    return before, module.bytes_per_rank(model, optimizer), expected


# ---- BF16 ----


def _precision(learner: Learner) -> Iterator[Finding]:
    """Judge three formats: of the shards, of the computation, and of the sums of gradients."""
    kept, computed, reduced = learner.run(_compute, world=RANKS)[0]
    yield Finding(
        "under BF16 the shards stay in float32",
        kept == "torch.float32",
        kept,
        "an update of 0.1 % is lost in bfloat16: leave the model in float32, the policy converts what is gathered",
    )
    yield Finding(
        "and the blocks compute in bfloat16",
        computed == "torch.bfloat16",
        computed,
        "pass mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, ...) on to every fully_shard",
    )
    yield Finding(
        "and gradients are added up in float32",
        reduced == "torch.float32",
        reduced,
        "without reduce_dtype gradients are added in bfloat16, 8 bits: on many ranks small ones are lost. Give the "
        "policy reduce_dtype=torch.float32",
    )


def _compute(module: ModuleType) -> tuple[str, str, str]:
    """Return the formats of the shards, of what the layers inside of blocks compute, and of the sums."""
    model, _ = module.build(_model().float(), lr=1e-3, mp_policy=module.BF16)
    stored, formats = str(next(model.parameters()).dtype), set()
    for layer in model.blocks.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda module, inputs, output: formats.add(str(output.dtype)))

    model(_text(0)[:, :-1])
    return stored, " and ".join(sorted(formats)), str(module.BF16.reduce_dtype)


# ---- checkpoints ----


def _full(learner: Learner, folder: Path) -> Iterator[Finding]:
    """Judge the full checkpoint: who writes it, what is in it, and whether it can be loaded."""
    path = folder / "full.pt"
    try:
        found = learner.run(_save_full, path, world=RANKS)
    except LearnerFailed as failure:
        waits = "did not end" in str(failure)
        why = (
            "gathering the state is a collective: all ranks call it, and only the writing is rank 0's" if waits else ""
        )
        yield Finding("save_full ends on all ranks", False, str(failure), why)
        return

    writes = [rank[0] for rank in found]
    alone = writes == [1] + [0] * (RANKS - 1)
    yield Finding(
        "rank 0 alone writes the full checkpoint",
        alone,
        f"files written: {writes}",
        "ranks that write one file at the same time destroy it: torch.save under `if dist.get_rank() == 0`",
    )

    # A file that several ranks have written holds what the last of them had, which says nothing more.
    if not alone:
        return

    if not path.exists():
        yield Finding("it writes the path that it is given", False, "no file", "")
        return

    # Not weights_only: a wrong file holds DTensors, which the grader must name. The learner's own code just wrote it.
    state = torch.load(path, weights_only=False)
    whole = found[0][1]
    complete = set(whole) <= set(state) and not any(isinstance(value, DTensor) for value in state.values())
    yield Finding(
        "it holds whole tensors",
        complete and _off(state, whole) == 0,
        "" if complete else "shards, or names are missing",
        "a file of shards of one rank is not a model: StateDictOptions(full_state_dict=True)",
    )
    if complete:
        off = max(learner.run(_load_full, path, whole, world=RANKS))
        yield Finding("load_full brings the weights back", off == 0, f"off by {off:.2g}", "all ranks set their part")


def _save_full(module: ModuleType, path: Path) -> tuple[int, dict[str, Tensor]]:
    """Save on all ranks; return how many files this rank has written, and the full weights."""
    writes = []
    save = torch.save
    torch.save = lambda *args, **named: (writes.append(1), save(*args, **named))  # pyrefly: ignore
    model, _ = _stepped(module)
    module.save_full(model, path)
    return len(writes), _whole(model)


def _load_full(module: ModuleType, path: Path, whole: dict[str, Tensor]) -> float:
    """Load into a fresh model; return how far its weights are from those that were saved."""
    model, _ = module.build(_model(), lr=1e-3)
    module.load_full(model, path)
    return _off(_whole(model), whole)


def _stepped(module: ModuleType) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the learner's model after one step, so that the optimizer has a state."""
    model, optimizer = module.build(_model(), lr=1e-3)
    language_loss(model, _text(0)).backward()
    optimizer.step()
    return model, optimizer


def _resharded(learner: Learner, folder: Path) -> Iterator[Finding]:
    """Judge the sharded checkpoint: written by 2 ranks, read by 1 and by 3."""
    expected = learner.run(_save_sharded, folder / "sharded", world=2)[0]
    for world in (1, 3):
        loaded = learner.run(_load_sharded, folder / "sharded", expected, world=world)
        off, moments, lr = max(rank[0] for rank in loaded), loaded[0][1], loaded[0][2]
        yield Finding(
            f"saved on 2 ranks, loaded on {world}: the next step is the same",
            off < 1e-9,
            f"off by {off:.2g}",
            _explain_resharded(off, moments, lr),
        )
        if off >= 1e-9:
            return


def _explain_resharded(off: float, moments: bool, lr: float) -> str:
    """Return what a load has left out, by the weights after the next step, Adam's moments and the learning rate."""
    if moments and lr == OTHER_LR:
        return (
            "dcp.load fills the tensors of the dictionary that it gets. Plain numbers, such as the learning rate, and "
            "tensors that were copied come back with set_state_dict only: call it afterwards"
        )

    if off < 0.01:
        return "the weights came back, but Adam began again: save and load the optimizer's state as well"
    return "dcp.load fills the tensors of the dictionary that it gets: give it to set_state_dict afterwards"


def _next(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Take a step in which all ranks have the same text, so that it does not depend on their number."""
    optimizer.zero_grad()
    language_loss(model, _text(7)).backward()
    optimizer.step()
    return _whole(model)


def _save_sharded(module: ModuleType, folder: Path) -> dict[str, Tensor]:
    """Save, and return the weights after the next step."""
    model, optimizer = _stepped(module)
    module.save_sharded(model, optimizer, folder)
    return _next(model, optimizer)


def _load_sharded(module: ModuleType, folder: Path, expected: dict[str, Tensor]) -> tuple[float, bool, float]:
    """Load; return how far the next step's weights are from those of the run that saved, and what of Adam is back."""
    model, optimizer = module.build(_model(), lr=OTHER_LR)

    # Another rate and other weights than those that were saved: a load that does nothing must not pass.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)

    module.load_sharded(model, optimizer, folder)
    moments = any(bool(state["exp_avg"].to_local().any()) for state in optimizer.state.values())
    return _off(_next(model, optimizer), expected), moments, optimizer.param_groups[0]["lr"]
