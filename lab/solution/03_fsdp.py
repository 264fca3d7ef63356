"""Exercise 3: a model that is too large for one rank.

DDP keeps all parameters, gradients and optimizer states on every rank. Fully sharded data parallelism (FSDP) keeps one
part of each on every rank, and gathers the parameters of one block at a time, just before that block needs them.

    python lab/solution/03_fsdp.py
    torchrun --nproc-per-node 4 lab/solution/03_fsdp.py
    LAB_NPROC=1 python lab/solution/03_fsdp.py --large      on a GPU: a GPT that does not fit into a memory cap
"""

import argparse
import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import lockstep
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
        "share",
        "What share of DDP's bytes (weights, gradients, Adam) does a rank hold under FSDP, on 4 ranks (or LAB_NPROC)?",
        "%",
        "100 / N",
    ),
    Question(
        "traffic",
        "DDP all-reduces D bytes in a step, which makes a rank send 2 D (N-1)/N. How many times that does FSDP send?",
        "x",
        "2 all-gathers and 1 reduce-scatter: 3 D / 2 D",
    ),
]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# ---- 1. shard ----


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Shard each block, then what is left: a block is what is gathered, used and freed at one time.

    `reshard_after_forward=False` keeps what was gathered until the backward pass (ZeRO-2, SHARD_GRAD_OP). A `mesh` of
    two dimensions replicates over the first and shards over the second (HYBRID_SHARD). `mp_policy` computes in another
    precision, and `offload_policy` keeps the shards in the host's memory.
    """
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def build(model: nn.Module, lr: float, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the sharded model and its optimizer. The optimizer comes second: it must see the shards."""
    model = shard(model, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


# ---- 2. count ----


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds. `numel()` of a DTensor would be that of the whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_per_rank(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes that this rank holds between two steps."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    kinds = {"parameters": parameters, "gradients": gradients, "optimizer": states}
    return {name: sum(local(t).numel() * t.element_size() for t in tensors) for name, tensors in kinds.items()}


# ---- 3. save and load ----


def save_full(model: nn.Module, path: Path) -> None:
    """Write one file with whole tensors, which any program can read."""
    # All ranks gather: under `if rank == 0` the gather would wait for the other ranks forever. Only the writing is
    # rank 0's.
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


def load_full(model: nn.Module, path: Path) -> None:
    """Read such a file on rank 0, and give each rank its part."""
    state = torch.load(path) if dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def save_sharded(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, group: Any = None) -> None:
    """Write the shards of all ranks of the group: nothing is gathered, and every rank writes its own file."""
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder, process_group=group)


def load_sharded(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, group: Any = None) -> None:
    """Read a checkpoint on any number of ranks: each reads the pieces of files that it needs."""
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder, process_group=group)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


# ---- the comparison: every way of sharding = DDP ----

STEPS, LENGTH, BATCH = 3, 16, 4  # BATCH: texts of a rank in a step


def place() -> torch.device:
    """Return where the comparison runs: ranks that share a GPU talk over gloo, which gathers on the CPU only."""
    return device() if dist.get_backend() == "nccl" else torch.device("cpu")


def texts(step: int) -> Tensor:
    """Return this rank's texts of a step, [BATCH, LENGTH + 1]."""
    text = MarkovText(length=LENGTH)
    first = (step * dist.get_world_size() + dist.get_rank()) * BATCH
    return torch.stack([text[index] for index in range(first, first + BATCH)]).to(place())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> float:
    """Train some steps as with DDP: FSDP works in hooks. Returns tokens per second on all ranks together."""
    batches = [texts(step) for step in steps]
    began = time.perf_counter()
    for batch in batches:
        optimizer.zero_grad()
        language_loss(model, batch).backward()
        optimizer.step()
    return len(steps) * BATCH * LENGTH * dist.get_world_size() / (time.perf_counter() - began)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights as whole tensors, on all ranks."""
    options = StateDictOptions(full_state_dict=True)
    return get_model_state_dict(model.module if isinstance(model, DDP) else model, options=options)


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Return the largest difference between tensors of the same name. A rank's part may be empty."""
    pairs = [(first[name].double(), second[name].double()) for name in second if second[name].numel()]
    return max((a - b).abs().max().item() for a, b in pairs)


def compare(checks: Checks, first: nn.Module) -> dict[str, dict[str, Any]]:
    """Train one model in six ways, in float64, and compare with DDP. Returns a table: bytes, traffic, speed."""
    ranks, kind = dist.get_world_size(), place().type
    half = 2 if ranks % 2 == 0 else 1
    ways: dict[str, dict[str, Any]] = {
        "full shard": {"reshard_after_forward": True},
        "grad-op shard": {"reshard_after_forward": False},
        "no shard": {"mesh": init_device_mesh(kind, (ranks, 1), mesh_dim_names=("replicate", "shard"))},
        f"hybrid {half} x {ranks // half}": {
            "mesh": init_device_mesh(kind, (half, ranks // half), mesh_dim_names=("replicate", "shard"))
        },
        "CPU offload": {"offload_policy": CPUOffloadPolicy(pin_memory=kind == "cuda")},
    }

    replica = DDP(copy.deepcopy(first))
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-3)
    speed = train(replica, optimizer)
    expected = whole(replica)
    table = {"DDP": {"speed": speed, "mesh": (ranks, 1)}}
    table["DDP"] |= {"bytes": bytes_per_rank(replica, optimizer), "traffic": traffic(replica)}
    for name, options in ways.items():
        model, optimizer = build(copy.deepcopy(first), lr=1e-3, **options)
        speed = train(model, optimizer)
        checks.less(f"{name} = DDP after {STEPS} steps", difference(whole(model), expected), 1e-5)
        mesh = options["mesh"].shape if "mesh" in options else (1, ranks)
        table[name] = {"speed": speed, "mesh": mesh}
        table[name] |= {"bytes": bytes_per_rank(model, optimizer), "traffic": traffic(model)}

    # Rows are dealt out whole, so that shards may be a little larger than their share: of 64 rows, one of 3 ranks has
    # 22, and the messages of all ranks are as long as the largest one.
    #
    # Full shard gathers each block twice, grad-op shard once; DDP's all-reduce is a reduce-scatter and an all-gather.
    if ranks > 1:
        by_ddp = sent(table["DDP"])
        checks.near("full shard sends 1.5 times DDP's bytes", sent(table["full shard"]) / by_ddp, 1.5, percent=5)
        checks.near("grad-op shard sends as much as DDP", sent(table["grad-op shard"]) / by_ddp, 1, percent=5)

    # What a rank holds.
    ddp, full = (sum(table[name]["bytes"].values()) for name in ("DDP", "full shard"))
    checks.near("bytes of a rank under full shard, against DDP / ranks", full, ddp / ranks, percent=5)
    return table


def traffic(model: nn.Module) -> dict[str, int]:
    """Return the bytes of each collective in one step, and how often it was called."""
    with CountCollectives() as counted:
        language_loss(model, texts(0)).backward()
    names = ("all_gather", "reduce_scatter", "all_reduce")
    return {name: counted.bytes(name) for name in names} | {f"{name}s": counted.count(name) for name in names}


def sent(row: dict[str, Any]) -> float:
    """Return the bytes that a rank sends in a step if each collective sends as little as possible."""
    replicas, parts, step = *row["mesh"], row["traffic"]
    sharding = (step["all_gather"] + step["reduce_scatter"]) * (parts - 1) / parts
    return sharding + 2 * step["all_reduce"] * (replicas - 1) / replicas


def compare_precision(checks: Checks, first: nn.Module) -> None:
    """Compute in bf16: the shards and the optimizer stay in float32, and the all-gathers move half the bytes."""
    model, optimizer = build(copy.deepcopy(first).float(), lr=1e-3)
    in_fp32 = traffic(model)
    model, optimizer = build(copy.deepcopy(first).float(), lr=1e-3, mp_policy=BF16)
    in_bf16 = traffic(model)
    train(model, optimizer)
    checks.equal("dtype of the shards under the bf16 policy", next(model.parameters()).dtype, torch.float32)
    checks.equal("dtype of what it computes", model(texts(0)[:, :-1]).dtype, torch.bfloat16)
    checks.near("bytes gathered, bf16 against float32", in_bf16["all_gather"] / in_fp32["all_gather"], 0.5, percent=1)


def compare_recomputation(checks: Checks, first: nn.Module) -> None:
    """Keep only the inputs of blocks, and run each block again in the backward pass (activation checkpointing)."""
    batch = texts(0)
    kept, gradients = [], []
    for recompute in (False, True):
        model = copy.deepcopy(first)
        if recompute:
            for block in model.blocks:
                block.forward = _recomputed(block.forward)
        model = shard(model)
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = language_loss(model, batch)
        loss.backward()
        kept.append(sum(sizes.values()))
        gradients.append({name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None})
    checks.less("gradients with and without recomputation", difference(*gradients), 1e-12)
    checks.less("bytes kept with recomputation, against without", kept[1] / kept[0], 0.6)


def _recomputed(forward: Any) -> Any:
    return lambda tokens: checkpoint(forward, tokens, use_reentrant=False)


def compare_checkpoints(checks: Checks, first: nn.Module, folder: Path) -> None:
    """Save on 2 ranks, load on 1, 2 and 3 of them, and train one step further: all end alike."""
    ranks = dist.get_world_size()
    model, optimizer = build(copy.deepcopy(first), lr=1e-3)
    train(model, optimizer)
    save_full(model, folder / "full.pt")
    other, _ = build(copy.deepcopy(first), lr=1e-3)
    load_full(other, folder / "full.pt")
    checks.equal("a full checkpoint brings the weights back", difference(whole(other), whole(model)), 0.0)

    if ranks < 2:
        return

    # Some ranks of the group are a mesh of their own. All ranks must make it; only its members use it.
    for count in [count for count in (2, 1, 3) if count <= ranks]:
        mesh = DeviceMesh(place().type, list(range(count)))
        if dist.get_rank() < count:
            model, optimizer = build(copy.deepcopy(first), lr=1e-3, mesh=mesh)
            if count == 2:
                _same_step(model, optimizer)
                save_sharded(model, optimizer, folder / "sharded", mesh.get_group())
            else:
                load_sharded(model, optimizer, folder / "sharded", mesh.get_group())
            _same_step(model, optimizer)
            weights = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
            if dist.get_rank() == 0:
                torch.save(weights, folder / f"after_{count}.pt")

        # The next mesh may have a rank that did not save: it must not look for files that are still being written.
        dist.barrier()

    reference = torch.load(folder / "after_2.pt")
    for count in [count for count in (1, 3) if count <= ranks]:
        off = difference(torch.load(folder / f"after_{count}.pt"), reference)
        checks.less(f"saved on 2 ranks, loaded on {count}, one step later", off, 1e-12)


def _same_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step in which all ranks have the same texts, so that its result does not depend on their number."""
    text = MarkovText(length=LENGTH)
    optimizer.zero_grad()
    language_loss(model, torch.stack([text[index] for index in range(BATCH)]).to(place())).backward()
    optimizer.step()


def compare_lockstep(checks: Checks, first: nn.Module) -> None:
    """Shard with Lockstep: `strategy="fsdp"` is a setting. A step on 1 x the global batch gives the same model."""
    ranks = dist.get_world_size()
    settings = {"strategy": "fsdp", "global_batch": BATCH * ranks, "steps": 1, "data": {"shuffle": False}}
    text = MarkovText(BATCH * ranks, length=LENGTH)
    with lockstep.start(**settings, compile=False, log={"progress": "off"}) as run:
        model = copy.deepcopy(first)
        model, _ = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(text):
            for batch in step:
                step.backward(language_loss(model, batch) * batch[:, 1:].numel(), weight=batch[:, 1:].numel())
            step.apply()
        trained = {name: p.full_tensor().detach() for name, p in model.named_parameters() if isinstance(p, DTensor)}

    alone = copy.deepcopy(first)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    language_loss(alone, torch.stack([text[index] for index in range(len(text))]).to(place())).backward()
    optimizer.step()
    expected = {name: parameter.detach() for name, parameter in alone.named_parameters()}
    checks.less("Lockstep with strategy=fsdp = one process", difference(trained, expected), 1e-5)


# ---- on a GPU: larger than memory ----


def train_large(checks: Checks) -> None:
    """Train a GPT of 1.3 billion parameters under a cap of 20 GB, which its 21 GB of weights and Adam states exceed."""
    total = torch.cuda.get_device_properties(device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, OPTIONS.cap * 1e9 / total))
    for offload in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            seconds = _steps_of_large(offload)
            found = f"{seconds:.1f} s a step, peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB on the GPU"
        except torch.OutOfMemoryError:
            found = "out of memory"
        fits = found != "out of memory"
        text = f"1.3 billion parameters {'train with CPU offload' if offload else 'do not train without offload'}"
        checks.true(f"{text} under {OPTIONS.cap:g} GB", fits == offload, found)


def _steps_of_large(offload: bool, steps: int = 2) -> float:
    with torch.device("meta"):
        model = gpt(26, width=2048, length=256)
    options = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    model = shard(model, **options)
    model.to_empty(device="cpu" if offload else device())
    for parameter in model.parameters():
        nn.init.normal_(local(parameter.detach()), std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=not offload, fused=offload)
    batch = torch.stack([MarkovText(length=256)[index] for index in range(2)]).to(device())
    for step in range(steps):
        if step == steps - 1:
            torch.cuda.synchronize()
            began = time.perf_counter()
        optimizer.zero_grad()
        language_loss(model, batch).backward()
        optimizer.step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


# ---- what is shown ----


def show(table: dict[str, dict[str, Any]]) -> None:
    """Print and draw what each way of sharding holds and moves."""
    ranks = dist.get_world_size()
    for name, row in table.items():
        held = ", ".join(f"{kind} {count / 1e3:.0f}" for kind, count in row["bytes"].items())
        sends = f"sends {sent(row) / 1e3:.0f} kB"
        print(f"  {name:16} holds {held} kB, {sends}, {row['speed']:,.0f} tokens/s")
    drawn = plots.figure(11, 4, columns=2)
    if drawn is None:
        return
    picture, (left, right) = drawn
    bottom = [0.0] * len(table)
    for kind in ("parameters", "gradients", "optimizer"):
        heights = [row["bytes"][kind] / 1e3 for row in table.values()]
        left.bar(list(table), heights, bottom=bottom, label=kind)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    left.set(ylabel="kB on a rank", title=f"memory by strategy, {ranks} ranks")
    left.legend()
    right.bar(list(table), [sent(row) / 1e3 for row in table.values()], color="tab:gray")
    right.set(ylabel="kB that a rank sends in a step", title="traffic by strategy")
    for axes in (left, right):
        axes.tick_params("x", rotation=30)
    plots.save(picture, "03_fsdp")


def main() -> None:
    dist.init_process_group(backend())
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    torch.manual_seed(0)
    checks = Checks("Exercise 3: FSDP")
    if OPTIONS.large:
        train_large(checks)
        checks.finish()
        return

    width = 512 if OPTIONS.full else 64
    first = gpt(2, width=width, length=LENGTH).double().to(place())
    table = compare(checks, first)
    compare_precision(checks, first)
    compare_recomputation(checks, first)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    compare_checkpoints(checks, first, Path(folder[0]))
    compare_lockstep(checks, first)

    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        ddp, full = table["DDP"], table["full shard"]
        share = 100 * sum(full["bytes"].values()) / sum(ddp["bytes"].values())
        reveal("3", QUESTIONS[0], computed=100 / ranks, measured=share)
        if ranks > 1:
            reveal("3", QUESTIONS[1], computed=1.5, measured=sent(full) / sent(ddp))
        show(table)
    checks.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="a wider model")
    parser.add_argument("--large", action="store_true", help="on a GPU: a GPT that does not fit without offload")
    parser.add_argument("--cap", type=float, default=20, metavar="GB", help="memory cap of --large (default 20)")
    parser.add_argument("--local-rank", help=argparse.SUPPRESS)  # torch.distributed.launch passes it
    OPTIONS = parser.parse_args()
    ask("3", QUESTIONS)
    run_ranks(main, nproc=4)
