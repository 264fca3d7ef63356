"""Layers cut over ranks that share their samples: the same numbers, counted once; and what cannot be cut is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.data import IterableDataset, TensorDataset

from lockstep.checkpoint.loading.search import VerifyingRanks, newest_valid
from lockstep.checkpoint.saving.draft import SaveContext
from lockstep.checkpoint.saving.outcome import Committed
from lockstep.checkpoint.saving.save import Saver
from lockstep.checkpoint.state.encoding import CapturedTensor
from lockstep.checkpoint.state.reshard import RankContents, shards_to_write
from lockstep.checkpoint.storage.folder import CheckpointStorage
from lockstep.checkpoint.storage.transitions import claim
from lockstep.config.sections import CheckpointConfig
from lockstep.engine import loop
from lockstep.engine.end import full_state
from lockstep.engine.own_loop import OwnRun
from lockstep.engine.run import Run
from lockstep.engine.setup import open_run
from lockstep.errors import UserError
from lockstep.parallel.gradients import redistribute_gradient
from lockstep.parallel.mesh import Axes, Mesh
from lockstep.parallel.tensor.plans import choose_plan, recognise
from lockstep.recipes.char_lm.model import GPT
from lockstep.runtime import context
from lockstep.runtime.shards import LocalShard, to_local
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import ALL_PAIRS, assert_user_errors, configured, train_by_hand

WIDTH, HEADS, VOCABULARY, LENGTH = 8, 4, 11, 22

# ---- models ---------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, masked: bool):
        super().__init__()
        self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # a bias of the keys changes nothing: its gradient is noise
        self.o = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(6, 6).tril().bool() if masked else None)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (layer(x).view(B, T, HEADS, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-1, -2)).masked_fill(~self.mask[:T, :T], float("-inf"))
            y = scores.softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(B, T, WIDTH))


class Transformer(nn.Module):
    """Separate queries, keys and values; dropout where nothing is cut; tied weights; a layer that only some
    micro-batches use, and one that none does."""

    def __init__(self, masked: bool = False, hidden: int = 12, sometimes: bool = True):
        super().__init__()
        self.sometimes = sometimes
        self.used: list[bool] = []  # the adapter, in every micro-batch of training
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = Attention(masked)
        self.fc1, self.fc2 = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.adapter, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.drop(self.attention(x))
        x = x + self.fc2(torch.relu(self.fc1(x)))
        uses = self.sometimes and bool(tokens[0, 0] % 2)
        if self.training:
            self.used.append(uses)
        if uses:
            x = x + self.adapter(x)
        return self.head(x)


class Tokens(Task):
    def __init__(self, network: Callable[[], nn.Module], plan: dict[str, Any] | None = None, fused: bool = True):
        self.network, self.plan, self.fused = network, plan, fused

    def model(self) -> nn.Module:
        return self.network()

    def tensor_plan(self, model: nn.Module) -> dict[str, Any] | None:
        return self.plan

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.003, fused=self.fused, foreach=None if self.fused else True)

    def data(self) -> Any:
        g = torch.Generator().manual_seed(2)  # so that one of two copies uses the adapter in a step, and not the other
        tokens = torch.randint(0, VOCABULARY, (LENGTH, 7), generator=g)
        return TensorDataset(tokens, torch.arange(6) < torch.randint(0, 7, (LENGTH,), generator=g)[:, None])

    def eval_data(self) -> Any:
        return self.data()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, mask = batch
        logits = model(tokens[:, :-1])
        each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none") * mask.flatten()
        return Loss(each.sum(), mask.sum(), {"worst": (each.max(), 1)})

    def show(self, model: nn.Module) -> str:
        return str(tuple(model(torch.zeros(1, 3, dtype=torch.long)).shape))


def gpt() -> nn.Module:
    torch.manual_seed(0)
    model = GPT(VOCABULARY, WIDTH, layers=2, heads=HEADS, context=6)
    for block in model.blocks:
        nn.init.normal_(block.attention.out.weight, std=0.3)
        nn.init.normal_(block.down.weight, std=0.3)
    return model


GATHERED = {"attention.[qkv]": "gathered", "attention.o": "rowwise", "fc1": "gathered"}
MODELS: dict[str, Callable[[], Task]] = {
    "q k v o": lambda: Tokens(Transformer),
    "foreach": lambda: Tokens(Transformer, fused=False),
    "fused qkv": lambda: Tokens(gpt),
    "a mask": lambda: Tokens(lambda: Transformer(masked=True), GATHERED),
    "always used": lambda: Tokens(lambda: Transformer(sometimes=False)),
    "uneven parts": lambda: Tokens(lambda: Transformer(sometimes=False, hidden=10)),
}
BASE = {"global_batch": 8, "micro_batch": 2, "steps": 4, "clip.norm": 0.5, "log.every": 2, "evaluate.batch": 6}

# ---- jobs -----------------------------------------------------------------------------------------------


def train(world: World, store: Any, task: Task, values: dict[str, Any]) -> dict[str, Any]:
    resolved = configured(BASE | {"ddp.find_unused_parameters": True} | values)
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test")
        summary = loop.fit(task, builder)
        return _outcome(builder.run, summary)


def by_hand(world: World, store: Any, task: Tokens, values: dict[str, Any]) -> dict[str, Any]:
    resolved = configured(BASE | {"ddp.find_unused_parameters": True} | values)
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test")
        own = OwnRun(builder)
        train_by_hand(own, task)
        found = own.evaluate(task.eval_data(), task.loss)
        own.close()
        return _outcome(builder.run, {"eval_loss": found["loss"]})


def _outcome(run: Run | None, summary: dict[str, Any]) -> dict[str, Any]:
    assert run is not None
    weights, _ = full_state(run.driver, keep=True)
    lines = (run.folder.path / "metrics.jsonl").read_text().splitlines()
    parameters = dict(run.driver.model.named_parameters())
    return {
        "weights": {name: tensor.clone() for name, tensor in weights.items()},
        "summary": summary,
        "evaluated": run.evaluations.newest and run.evaluations.newest.samples,
        "lines": [json.loads(line) for line in lines],
        "used": getattr(run.driver.model, "used", []),
        "bytes": {name: (p.to_local() if isinstance(p, DTensor) else p).nbytes for name, p in parameters.items()},
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        error = float((found["weights"][name].float() - tensor.float()).norm() / tensor.float().norm().clamp(min=1e-9))
        assert error <= 1e-5, f"{name}: off by {error:.1e}"
    assert found["evaluated"] == expected["evaluated"] == LENGTH
    assert found["summary"]["eval_loss"] == pytest.approx(expected["summary"]["eval_loss"], rel=1e-5)


@pytest.fixture(scope="module")
def single(pool: Pool) -> Callable[..., dict[str, Any]]:
    known: dict[str, dict[str, Any]] = {}

    def of(name: str, **values: Any) -> dict[str, Any]:
        key = f"{name} {values}"
        if key not in known:
            known[key] = pool.run(train, MODELS[name](), values, world=1)[0]
        return known[key]

    return of


# ---- the same numbers -----------------------------------------------------------------------------------


TP, DDP_TP, FSDP_TP = {"strategy": "tp"}, {"mesh.tp": 2}, {"strategy": "fsdp", "mesh.tp": 2}
CASES = [
    ("q k v o", TP, 2),
    ("q k v o", DDP_TP, 4),  # different parameters unused on the two copies
    ("foreach", DDP_TP, 4),
    ("fused qkv", TP, 4),
    ("fused qkv", FSDP_TP, 4),
    ("a mask", DDP_TP, 4),
    ("always used", FSDP_TP, 2),  # dp = 1
    ("uneven parts", FSDP_TP | {"strategy": "fsdp-grads"}, 4),
]
CASES += [("uneven parts", FSDP_TP, 4)] if ALL_PAIRS else []


def by_step(used: list[bool]) -> list[bool]:
    """Of one of two copies: whether some micro-batch of a step did."""
    size = BASE["global_batch"] // BASE["micro_batch"] // 2
    return [any(used[i : i + size]) for i in range(0, len(used), size)]


@pytest.mark.parametrize(("name", "values", "world"), CASES)
def test_cut_layers_train_the_same_model(
    pool: Pool, single: Callable[..., dict[str, Any]], name: str, values: dict[str, Any], world: int
) -> None:
    expected = single(name)
    outcomes = pool.run(train, MODELS[name](), values, world=world)
    for found in outcomes:
        assert_same(found, expected)
    if name == "q k v o" and values == DDP_TP:
        one, other = (by_step(found["used"]) for found in (outcomes[0], outcomes[-1]))
        assert one != other, "both copies use the same layers in every step"
    for line, reference in zip(outcomes[0]["lines"], expected["lines"], strict=True):
        for key in ("loss", "grad_norm", "weight"):
            assert line[key] == pytest.approx(reference[key], rel=1e-4), key
        assert line["metrics"] == pytest.approx(reference["metrics"], rel=1e-4)


CLIPS = [(DDP_TP, "clip.adaptive"), (FSDP_TP, "clip.value")]
EVERY_CLIP = list(itertools.product((DDP_TP, FSDP_TP), ("clip.adaptive", "clip.value")))


@pytest.mark.parametrize(("values", "way"), EVERY_CLIP if ALL_PAIRS else CLIPS)
def test_other_ways_of_clipping(
    pool: Pool, single: Callable[..., dict[str, Any]], values: dict[str, Any], way: str
) -> None:
    clip = {"clip.norm": None, way: 0.01}
    expected = single("always used", **clip)
    for found in pool.run(train, MODELS["always used"](), values | clip, world=4):
        assert_same(found, expected)


def test_a_loop_of_the_users_own(pool: Pool, single: Callable[..., dict[str, Any]]) -> None:
    for found in pool.run(by_hand, MODELS["q k v o"](), DDP_TP, world=4):
        assert_same(found, single("q k v o"))


BITS = [(DDP_TP, "fp16"), (FSDP_TP, "bf16")]
EVERY_BITS = list(itertools.product((DDP_TP, FSDP_TP), ("fp16", "bf16")))


@pytest.mark.parametrize(("values", "precision"), EVERY_BITS if ALL_PAIRS else BITS)
def test_in_fewer_bits(
    pool: Pool, single: Callable[..., dict[str, Any]], values: dict[str, Any], precision: str
) -> None:
    expected = single("always used", precision=precision)
    for found in pool.run(train, MODELS["always used"](), values | {"precision": precision}, world=4):
        assert found["summary"]["applied"] == expected["summary"]["applied"]
        assert found["summary"]["eval_loss"] == pytest.approx(expected["summary"]["eval_loss"], rel=1e-3)


def test_every_rank_holds_its_part_only(pool: Pool) -> None:
    for found in pool.run(train, MODELS["always used"](), TP | {"steps": 1}, world=2):
        whole = {name: tensor.nbytes for name, tensor in found["weights"].items()}
        cut = {name for name, size in found["bytes"].items() if size < whole[name]}
        opening = {f"{name}.weight" for name in ("attention.q", "attention.k", "attention.v", "fc1")}
        opening |= {f"{name}.bias" for name in ("attention.q", "attention.v", "fc1")}
        assert cut == opening | {"attention.o.weight", "fc2.weight"}
        assert all(found["bytes"][name] * 2 == whole[name] for name in cut)


def stopped_and_resumed(world: World, store: Any, values: dict[str, Any], steps: int) -> dict[str, Any]:
    return train(world, store, MODELS["uneven parts"](), values | {"steps": steps, "lr.schedule": "constant"})


@pytest.mark.parametrize(("before", "after"), [(FSDP_TP, {}), ({}, FSDP_TP), (FSDP_TP, TP)])
def test_uneven_parts_come_back_from_a_checkpoint(
    pool: Pool, single: Callable[..., dict[str, Any]], tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    folder = {"run_dir": str(tmp_path), "resume": "auto"}
    pool.run(stopped_and_resumed, before | folder, 2, world=4)
    for found in pool.run(stopped_and_resumed, after | folder, 4, world=2):
        assert_same(found, single("uneven parts"))


def written(world: World, store: Any, values: dict[str, Any]) -> dict[str, int]:
    """A job: how many numbers of each tensor this rank would write into a checkpoint, and how many there are."""
    resolved = configured(BASE | values)
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test")
        loop.fit(MODELS["always used"](), builder)
        run = builder.run
        assert run is not None
        tensors = run.checkpoints.state.capture().tensors
        shards = run.checkpoints.state.shards_of(tensors, runtime)
        mine = {name: shard.local.numel() for name, shard in shards.items()}
        return {name: found.tensor.numel() - world.size * mine.get(name, 0) for name, found in tensors.items()}


@pytest.mark.parametrize("values", [DDP_TP, FSDP_TP])
def test_every_number_is_written_once(pool: Pool, values: dict[str, Any]) -> None:
    everybody = pool.run(written, values | {"steps": 1}, world=4)
    assert {name: sum(rank[name] for rank in everybody) for name in everybody[0]} == dict.fromkeys(everybody[0], 0)


def written_if_empty(world: World, store: Any) -> dict[str, LocalShard]:
    with context.start(world, configured({}).config, store=store) as runtime:
        mesh = Axes(Mesh({"pp": 1, "dp": 1, "tp": world.size}, world.rank), runtime).device_mesh["tp"]
        tensors: dict[str, Tensor] = {
            "model.rows": DTensor.from_local(torch.zeros(0, 3), mesh, [Shard(0)]),
            "model.copies": DTensor.from_local(torch.zeros(0), mesh, [Replicate()]),
            "model.one_row": DTensor.from_local(
                torch.ones(1 - world.rank, 3), mesh, [Shard(0)], shape=torch.Size((1, 3)), stride=(3, 1)
            ),
        }
        captured = {name: CapturedTensor(tensor) for name, tensor in tensors.items()}
        return shards_to_write(captured, world.rank, [{}] * world.size)


def test_a_tensor_without_elements_is_in_the_checkpoint_too(pool: Pool, tmp_path: Path) -> None:
    """Otherwise it would be missing when the run resumes. An empty shard of another tensor is not written."""
    first, second = pool.run(written_if_empty, world=2)
    assert {*first, *second} == {"model.rows", "model.copies", "model.one_row"}
    assert "model.one_row" not in second

    storage = CheckpointStorage(tmp_path)
    claim(storage, "token")
    team = [Saver(SaveContext(storage, rank, 2, "token", CheckpointConfig())) for rank in range(2)]
    save, _ = [
        saver.copy_and_write(1, RankContents(shards)) for saver, shards in zip(team, (first, second), strict=True)
    ]
    save.wait()
    assert isinstance(save.outcome, Committed), save.outcome
    found = newest_valid(storage, VerifyingRanks.alone())
    assert found is not None
    reader = found.reader
    assert {name: tuple(reader.read(name).shape) for name in reader.names()} == {
        "model.rows": (0, 3),
        "model.copies": (0,),
        "model.one_row": (1, 3),
    }


def settled(world: World, store: Any) -> list[float]:
    with context.start(world, configured({}).config, store=store) as runtime:
        mesh = Axes(Mesh({"pp": 1, "dp": 1, "tp": world.size}, world.rank), runtime).device_mesh["tp"]
        parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
        parameter.grad = DTensor.from_local(torch.full((2,), 1.0 + world.rank), mesh, [Partial()])
        redistribute_gradient(parameter)
        return to_local(parameter.grad).tolist()


def test_a_gradient_that_is_still_a_sum_is_added_up(pool: Pool) -> None:
    assert pool.run(settled, world=2) == [[3.0, 3.0]] * 2


# ---- who does what --------------------------------------------------------------------------------------


def test_a_plan_is_found_by_the_names_of_layers() -> None:
    assert recognise(gpt()) == {
        f"blocks.{number}.{layer}": cut
        for number in range(2)
        for layer, cut in {
            "attention.qkv": "gathered",
            "attention.out": "rowwise",
            "up": "colwise",
            "down": "rowwise",
        }.items()
    }
    assert choose_plan(Transformer(), Tokens(Transformer, {"attention.?": "gathered"}), 2) == {
        f"attention.{name}": "gathered" for name in "qvko"
    }


def tower() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))


UNCUT = [
    (tower, None, "no layers to shard in Sequential", "def tensor_plan(self, model)"),
    (tower, {}, "tensor_plan(model) is empty", "strategy=fsdp"),
    (tower, {"0": "diagonal"}, "no style 'diagonal'", "colwise, rowwise, gathered"),
    (tower, {"hidden": "colwise"}, "'hidden' in tensor_plan matches no layer", "such as 0, 2"),
    (tower, {"1": "colwise"}, "a ReLU", "name the nn.Linear layers"),
    (tower, {"0": "colwise", "2": "rowwise"}, "6 output features, which 4 does not divide", "set mesh.tp=2"),
    (Transformer, {"head": "gathered"}, "is tied to 'embed.weight'", "leave 'head' out"),
]


@pytest.mark.parametrize(("network", "plan", "found", "fix"), UNCUT)
def test_layers_that_cannot_be_cut_are_refused_by_name(
    network: Callable[[], nn.Module], plan: dict[str, Any] | None, found: str, fix: str
) -> None:
    model = network()
    with pytest.raises(UserError) as refusal:
        choose_plan(model, Tokens(network, plan), 4)
    assert found in str(refusal.value)
    assert fix in refusal.value.fix


def test_an_operation_that_needs_the_whole_names_the_way_out(pool: Pool) -> None:
    task = Tokens(lambda: Transformer(masked=True), {"attention.[qkv]": "colwise", "attention.o": "rowwise"})
    assert_user_errors(pool.errors(train, task, TP, world=2), "torch cannot shard an operation", '"gathered"')


class PerRank(IterableDataset):
    """Splits itself, and knows nothing of tp."""

    def __iter__(self) -> Any:
        g = torch.Generator().manual_seed(torch.distributed.get_rank())
        while True:
            yield torch.randint(0, VOCABULARY, (7,), generator=g), torch.ones(6, dtype=torch.bool)


class SplitByRank(Tokens):
    def data(self) -> Any:
        return PerRank()

    def eval_data(self) -> None:
        return None


def test_ranks_of_one_group_must_read_the_same_samples(pool: Pool) -> None:
    errors = pool.errors(train, SplitByRank(Transformer), TP | {"data.sharding": "own"}, world=2)
    assert_user_errors(errors, "rank 1 read a different first batch", "no split by RANK")
