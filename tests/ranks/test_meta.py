"""A model made without memory starts with the same bits as one made in it, and says what it cannot make."""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.config import RunConfig
from lockstep.engine.end import full_state
from lockstep.engine.own_loop import OwnRun
from lockstep.errors import UserError
from lockstep.parallel.meta import recording
from lockstep.parallel.meta.init import check_init, fill_model, init_as_configured
from lockstep.recipes.char_lm.model import GPT
from lockstep.recipes.hrm.model import HierarchicalReasoningModel, ModelConfig
from lockstep.recipes.pixel_llm.model import Captioner, Sizes
from lockstep.runtime import context
from lockstep.runtime.seeds import derive, seed_everything
from lockstep.runtime.world import World
from pool import Pool
from ranks.support import ALL_PAIRS, configured, open_watched
from ranks.test_strategies import STRATEGIES, Small, assert_close, final, single

__all__ = ["single"]  # a fixture

META = RunConfig(init="meta", strategy="fsdp")


class Zoo(nn.Module):
    """Modules whose weights are made in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.recurrent = nn.LSTM(8, 8, num_layers=2)
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.GroupNorm(2, 8)])
        self.shared = self.norms[1]
        self.small = Small()


def made(make: Callable[[], nn.Module]) -> nn.Module:
    seed_everything(derive(0, "init"))
    return make()


def empty(make: Callable[[], nn.Module]) -> nn.Module:
    with init_as_configured(META):
        return made(make)


def filled(make: Callable[[], nn.Module], cut: Callable[[nn.Module], Any] = lambda _: None) -> nn.Module:
    model = empty(make)
    check_init(model, META)
    with context.start(World(0, 1, 0, 1), configured({}).config) as runtime:
        blocks = [block for block in model.modules() if type(block).__name__ == "Block"]
        fill_model(model, blocks, cut, runtime)
    return model


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def check_same_bits(make: Callable[[], nn.Module]) -> None:
    expected = made(make)
    after = torch.rand(1), np.random.rand()
    torch.manual_seed(99)
    found = filled(make)
    assert (torch.rand(1), np.random.rand()) == after  # the generators are left where they would have been
    assert list(found.state_dict()) == list(expected.state_dict())
    assert tensors(found).keys() == tensors(expected).keys()
    for name, tensor in tensors(expected).items():
        other = tensors(found)[name]
        assert (other.dtype, other.requires_grad) == (tensor.dtype, tensor.requires_grad)
        assert torch.equal(other.nan_to_num(), tensor.nan_to_num()), name


def test_tied_weights_stay_tied() -> None:
    model: Any = filled(Small)
    assert model.head.weight is model.embed.weight


def test_a_recurrent_module_runs_on_its_new_weights() -> None:
    expected, found = made(lambda: nn.LSTM(8, 8)), filled(lambda: nn.LSTM(8, 8))
    x = torch.randn(3, 2, 8)
    assert torch.equal(found(x)[0], expected(x)[0])


# ---- memory ---------------------------------------------------------------------------------------------


def test_a_block_is_cut_before_the_next_one_is_filled() -> None:
    """So that only one of them is whole at any time."""
    still_empty: list[int] = []
    model: Any = None

    def make() -> nn.Module:
        nonlocal model
        model = Small()
        return model

    filled(make, lambda block: still_empty.append(sum(b.up.weight.is_meta for b in model.blocks)))
    assert still_empty == [3, 2, 1, 0]


def test_what_is_whole_is_let_go_when_it_is_cut() -> None:
    whole: list[Any] = []

    def cut(block: Any) -> None:
        whole.append(ref(block.up.weight))
        block.up.weight = nn.Parameter(block.up.weight.detach()[:1].clone())
        assert [each() for each in whole] == [None] * len(whole)

    filled(Small, cut)
    assert len(whole) == 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(100, 100, bias=False)
        self.down = nn.Parameter(torch.randn(100, 100))
        assert numbers_held() <= 20_000, "the constructor holds more than one block"


def numbers_held() -> int:
    """How many numbers of weights are in memory, wherever they are."""
    found = [t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    sizes = {storage._cdata: storage.nbytes() for storage in found if storage.device.type == "cpu"}
    return list(sizes.values()).count(4 * 100 * 100) * 100 * 100


def test_no_more_than_a_block_is_ever_held() -> None:
    """Although the model changes all of its weights once it is complete."""

    def make() -> nn.Module:
        model = nn.Sequential(*(Block() for _ in range(6)))
        model.extend(copy.deepcopy(model[0]) for _ in range(2))
        for block in model:
            nn.init.trunc_normal_(block.up.weight)  # pyrefly: ignore
        torch._foreach_mul_([p.data for p in model.parameters()], 0.5)
        return model

    held: list[int] = []

    def cut(block: Any) -> None:
        held.append(numbers_held())
        block.up.weight, block.down = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    filled(make, cut)
    assert held == [20_000] * 8
    assert not recording.memories._known  # nor what it would take to make them again


# ---- the same bits --------------------------------------------------------------------------------------


class Tabled(nn.Module):
    """Buffers and attributes of all kinds, some of them random; and a parameter in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(4.0).cos(), persistent=False)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())
        self.register_buffer("spoiled", torch.tensor([torch.nan, -torch.inf]))
        self.register_buffer("noise", torch.rand(30))
        self.table = torch.arange(4)
        self.inner = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        shared = nn.Parameter(torch.randn(4))
        self.inner.bias, self.again.bias = shared, shared
        self.register_buffer("first", self.inner.weight.detach().clone())
        self.scaled = self.inner.weight.detach() * 2


def test_buffers_and_attributes_are_those_of_the_constructor() -> None:
    check_same_bits(Tabled)
    expected, found = made(Tabled), filled(Tabled)
    assert torch.equal(found.table, torch.arange(4))  # pyrefly: ignore[bad-argument-type]
    assert torch.equal(found.scaled, expected.scaled)  # pyrefly: ignore[bad-argument-type]
    assert found.inner.bias is found.again.bias  # pyrefly: ignore[missing-attribute]


class Swapped(nn.Module):
    """Its modules are assigned in another order than they are made in."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second, self.first = second, first


class OwnFirst(nn.Module):
    """Draws its own parameter before its child is made, and sets it once more when the child is there."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(33))
        self.prior = nn.Parameter(torch.full((3,), -2.0))
        self.child = nn.Linear(3, 30)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale.data[:20].normal_()


class FromNumpy(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)
        with torch.no_grad():
            self.weight.copy_(torch.from_numpy(np.random.rand(*self.weight.shape)))


class Numbered(nn.Linear):
    made = 0

    def reset_parameters(self) -> None:
        Numbered.made += 1
        nn.init.constant_(self.weight, Numbered.made)
        nn.init.zeros_(self.bias)


class PastTorch(nn.Module):
    """A few rows of large tensors, changed by others than torch, before and between the uses of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        for name, view in {"numpy": Tensor.numpy, "array": np.asarray, "dlpack": np.from_dlpack}.items():
            table = torch.randn(5000, 16)
            view(table)[1] = 0
            self.register_parameter(name, nn.Parameter(table))

        table = torch.randn(5000, 16)
        ctypes.memset(table.data_ptr() + 64, 0, 64)
        self.scaled = nn.Parameter(table * 2)

        array = np.zeros((5000, 16))
        table = torch.from_numpy(array)
        self.first, self.second = (nn.Parameter(torch.empty(5000, 16)) for _ in range(2))
        self.first.data.copy_(table)
        array[1] = 1
        self.second.data.copy_(table)


def numbered() -> nn.Module:
    Numbered.made = 0
    return nn.Sequential(Numbered(3, 3), Numbered(3, 3))


def seeded() -> nn.Module:
    torch.manual_seed(3)
    np.random.seed(3)
    return nn.Sequential(Small(), FromNumpy(3, 3))


def seeded_for_a_moment() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        inner = Small()
    return nn.Sequential(inner, Small())


def copied() -> nn.Module:
    layer = nn.Linear(9, 9)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2)
    return nn.Sequential(layer, copy.deepcopy(layer), encoder, nn.Linear(9, 9))


def sliced() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 30), nn.Linear(30, 3), nn.Linear(3, 30))[1:]


def with_own_generator() -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    model = nn.Linear(9, 9)
    nn.init.normal_(model.weight, generator=generator)
    nn.init.trunc_normal_(model.weight[:3], generator=generator)
    return model


def in_one_memory() -> nn.Module:
    """Parameters that are parts of one tensor, which is changed after they were made."""
    model, both = nn.Module(), torch.empty(4, 30)
    model.first, model.second = nn.Parameter(both[:2]), nn.Parameter(both[2:].t())
    both.normal_()
    return model


def changed_by(*changes: Callable[[nn.Parameter], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
        with torch.no_grad():
            for change in changes:
                change(model[1].weight)  # pyrefly: ignore[bad-argument-type]
        return model.append(nn.Linear(20, 20))  # whose numbers come after those of the change

    return make


def by_elements(p: nn.Parameter) -> None:
    p[0] = 1.0
    p[:, 1] = 0
    p[p > 0.1] = 0.5
    p[torch.tensor([1, 2]), torch.tensor([3, 4])] = 7


def by_its_own_numbers(p: nn.Parameter) -> None:
    p.div_(p.norm().item())
    p.data = p.data * 0.5
    p.add_(torch.randn_like(p)).mul_(torch.bernoulli(torch.full_like(p, 0.5)))
    p.add_(torch.poisson(p.abs() * 10)).add_(torch.randn(20, 20, device=p.device))


CASES: dict[str, Callable[[], nn.Module]] = {
    "modules": Small,
    "kinds": Zoo,
    "swapped": Swapped,
    "own first": OwnFirst,
    "numpy": lambda: nn.Sequential(FromNumpy(3, 3), FromNumpy(3, 3)),
    "past torch": PastTorch,
    "numbered": numbered,
    "seeded": seeded,
    "seeded for a moment": seeded_for_a_moment,
    "double": lambda: Small().double(),
    "bf16": lambda: Small().to("cpu", torch.bfloat16),
    "copied": copied,
    "sliced": sliced,
    "own generator": with_own_generator,
    "one memory": in_one_memory,
    "trunc_normal_": changed_by(lambda p: nn.init.trunc_normal_(p, std=0.02, a=-0.02, b=0.02), nn.init.trunc_normal_),
    "orthogonal_": changed_by(lambda p: nn.init.orthogonal_(p)),
    "sparse_": changed_by(lambda p: nn.init.sparse_(p, 0.5)),
    "foreach": changed_by(lambda p: torch._foreach_mul_([p, p.data[0]], 0.5), lambda p: torch._foreach_zero_([p[1]])),
    "out": changed_by(lambda p: torch.add(p, p, out=p), lambda p: torch.zeros(20, out=p[3])),
    "elements": changed_by(by_elements),
    "own numbers": changed_by(by_its_own_numbers),
    "loaded": changed_by(lambda p: nn.Linear(20, 20).load_state_dict({"weight": p, "bias": p[0]})),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(9, 9)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(9, 9)),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_the_same_bits_whatever_a_constructor_does(make: Callable[[], nn.Module]) -> None:
    check_same_bits(make)


SIZES = Sizes(image=32, stem="conv", patch=8, width=32, heads=2, vision_layers=1, text_layers=2, words=6, vocabulary=9)
RECIPES = {
    "char_lm": lambda: GPT(symbols=7, width=64, layers=2, heads=2, context=8),
    "pixel_llm": lambda: Captioner(SIZES),
    "hrm": lambda: HierarchicalReasoningModel(ModelConfig(symbols=5, cells=16, width=64, heads=2, layers=2)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_start_with_the_same_bits(name: str) -> None:
    check_same_bits(RECIPES[name])


def of_transformers(name: str) -> nn.Module:
    """Whole models, which set all their weights once more when they are complete."""
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    config = getattr(transformers, f"{name}Config")(vocab_size=9, pad_token_id=0, **sizes)
    return getattr(transformers, f"{name}Model")(config)


@pytest.mark.parametrize("name", ["Bert", "Llama", "ViT"])
def test_models_of_transformers_start_with_the_same_bits(name: str) -> None:
    check_same_bits(lambda: of_transformers(name))


@pytest.mark.parametrize(
    ("name", "world"),
    list(itertools.product(["fsdp", "fsdp-grads", "hsdp"], [1, 2, 4]))
    if ALL_PAIRS
    else [("fsdp", 1), ("fsdp", 4), ("fsdp-grads", 2), ("hsdp", 4)],
)
def test_training_ends_with_the_same_parameters(pool: Pool, single: dict[str, Any], name: str, world: int) -> None:
    for found in pool.run(final, STRATEGIES[name] | {"init": "meta"}, world=world):
        assert_close(found["weights"], single["weights"])


def start_of(world: World, store: Any, values: dict[str, Any]) -> dict[str, Tensor]:
    """A job: the weights before the first step, in a custom loop."""
    with open_watched(world, store, {"strategy": "fsdp", "global_batch": 4, "steps": 1} | values) as builder:
        run = OwnRun(builder)
        with run.init_module():
            model = of_transformers("Bert")
            teacher = made(Small).requires_grad_(False)
        assert torch.equal(run.setup(teacher).embed.weight.cpu(), made(Small).embed.weight)  # pyrefly: ignore
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        run.setup(model, optimizer)
        driver = builder.driver
        weights, _ = full_state(driver, keep=True)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in driver.parameters.values()}
        return {name: tensor.clone() for name, tensor in weights.items()}


def test_in_a_loop_of_ones_own_every_rank_starts_with_the_same_bits(pool: Pool) -> None:
    expected = made(lambda: of_transformers("Bert")).state_dict()
    pool.preload("transformers.models.bert.modeling_bert")
    for found in pool.run(start_of, {"init": "meta"}, world=2):
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


# ---- refused --------------------------------------------------------------------------------------------


def past_torch() -> nn.Module:
    model, numbers = nn.Module(), torch.zeros(3)
    ctypes.memset(numbers.untyped_storage().data_ptr(), 1, numbers.nbytes)
    model.scale = nn.Parameter(numbers)
    return model


def written_late() -> nn.Module:
    model, numbers = nn.Module(), torch.zeros(50_000)
    array = numbers.numpy()
    model.scale = nn.Parameter(numbers)
    array[1] = 1
    return model


def unset() -> nn.Module:
    model = nn.Linear(3, 3)
    model.bias = nn.Parameter(torch.empty(3))
    return model


def from_outside() -> nn.Module:
    model = nn.Module()
    model.table = nn.Parameter(torch.from_numpy(np.zeros(recording.MAX_SAVED_BYTES // 8 + 1)))
    return model


def by_all_others() -> nn.Module:
    model = Small()
    whole = torch.cat([p.detach().flatten() for p in model.parameters()])
    model.blocks[0].up.weight.data.div_(whole.norm())
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (past_torch, ["different weights", "shape [3]", "numpy", "torch.from_numpy"]),
        (written_late, ["different weights", "numpy", "after a module has registered it", "or with torch"]),
        (unset, ["'bias'", "uninitialised", "set all of them"]),
        (from_outside, ["64 MiB", "numpy, or from a file"]),
        (lambda: nn.Sequential(nn.LazyLinear(3)), ["'0.weight' of Sequential has no shape"]),
        (by_all_others, ["'blocks.0.up.weight'", "many other weights", "each block independently"]),
    ],
)
def test_what_cannot_be_made_again_is_refused(
    make: Callable[[], nn.Module], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.parallel.meta.init.SMALL_BYTES", 0)
    check_named(words, lambda: filled(make))


def test_a_model_that_was_made_unseen_is_refused() -> None:
    with torch.device("meta"):
        model = Small()
    words = ["different weights", "'embed.weight' of Small", "run.init_module()"]
    check_named(words, lambda: check_init(model, META))
    check_named(["already has weights", "run.init_module()"], lambda: check_init(Small(), META))
    with pytest.raises(UserError, match="set init=meta"):
        check_init(model, RunConfig())


def start_apart(world: World, store: Any) -> None:
    """A job: the constructor gives each rank other weights."""
    values = {"strategy": "fsdp", "init": "meta", "global_batch": 4, "steps": 1}
    with open_watched(world, store, values) as builder:
        run = OwnRun(builder)
        with run.init_module():
            model = Small()
            nn.init.constant_(model.blocks[2].up.weight, world.rank)
        with pytest.raises(UserError, match="model\\(\\) gives rank 1 different weights than rank 0"):
            run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_ranks_that_make_other_weights_are_refused(pool: Pool) -> None:
    """With init=host rank 0 sends its weights to all."""
    pool.run(start_apart, world=2)


def check_named(words: list[str], attempt: Callable[[], Any]) -> None:
    with pytest.raises(UserError) as caught:
        attempt()
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("values", [{"strategy": "ddp"}, {"strategy": "zero1"}, {"strategy": "fsdp", "mesh.tp": 2}])
def test_only_where_the_model_is_cut(values: dict[str, Any]) -> None:
    with (
        pytest.raises(UserError, match="strategy=fsdp"),
        init_as_configured(configured({"init": "meta"} | values).config),
    ):
        Small()


def test_an_error_in_a_constructor_says_what_to_type() -> None:
    with pytest.raises(TypeError) as error:
        empty(lambda: nn.Linear(3, 3).weight.numpy())
    assert any("init=host" in note for note in error.value.__notes__)
