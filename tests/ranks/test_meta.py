"""A model made without memory starts with the same bits as one made in it, and says what it cannot fill."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint.run_state import full_state
from lockstep.config import RunConfig
from lockstep.engine.own_loop import OwnRun
from lockstep.errors import UserError
from lockstep.parallel.meta_init import check_made_as_asked, fill, make_model
from lockstep.recipes.char_lm.model import GPT
from lockstep.recipes.hrm.model import HierarchicalReasoningModel, ModelConfig
from lockstep.recipes.pixel_llm.model import Captioner, Sizes
from lockstep.runtime import context
from lockstep.runtime.seeds import derive, seed_everything, seed_torch
from lockstep.runtime.world import World
from pool import Pool
from ranks.support import ALL_PAIRS, configured, open_watched
from ranks.test_strategies import STRATEGIES, Small, assert_close, final, single
from zoo import SLOW_TO_IMPORT

__all__ = ["single"]  # a fixture

CPU = torch.device("cpu")
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
    seed_torch(derive(0, "init"), CPU)
    return make()


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """As in a loop of the user's own."""
    with torch.device("meta"):
        return make()


facts: dict[str, str] = {}  # what the banner would say of the model that was filled last


def filled(
    make: Callable[[], nn.Module],
    cut: Callable[[nn.Module], Any] = lambda _: None,
    made_by: Callable[[Callable[[], nn.Module]], nn.Module] = lambda make: make_model(make, META),
) -> nn.Module:
    model = made_by(make)
    assert all(p.is_meta for p in model.parameters())
    with context.start(World(0, 1, 0, 1), configured({}).config) as runtime:
        blocks = [block for block in model.modules() if type(block).__name__ == "Block"]
        facts.clear()
        facts.update(fill(model, blocks, cut, 0, runtime))
    return model


@pytest.mark.parametrize("make", [Small, Zoo])
def test_the_same_bits_as_without(make: Callable[[], nn.Module], tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    expected = made(make)
    after = torch.rand(1)
    torch.manual_seed(99)
    found = filled(make)
    assert torch.equal(torch.rand(1), after)  # and the generator is left where it would have been
    assert list(found.state_dict()) == list(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert [p.requires_grad for p in found.parameters()] == [p.requires_grad for p in expected.parameters()]


def test_tied_weights_stay_tied() -> None:
    model: Any = filled(Small)
    assert model.head.weight is model.embed.weight


def test_a_recurrent_module_runs_on_its_new_weights() -> None:
    expected, found = made(lambda: nn.LSTM(8, 8)), filled(lambda: nn.LSTM(8, 8))
    x = torch.randn(3, 2, 8)
    assert torch.equal(found(x)[0], expected(x)[0])


def test_a_block_is_cut_before_the_next_one_is_filled() -> None:
    """So that only one of them is whole at any time."""
    empty: list[int] = []
    model: Any = None

    def make() -> nn.Module:
        nonlocal model
        model = Small()
        return model

    filled(make, lambda block: empty.append(sum(b.up.weight.is_meta for b in model.blocks)))
    assert empty == [3, 2, 1, 0]


def test_what_is_whole_is_let_go_when_it_is_cut() -> None:
    whole: list[Any] = []

    def cut(block: Any) -> None:
        whole.append(ref(block.up.weight))
        block.up.weight = nn.Parameter(block.up.weight.detach()[:1].clone())
        assert [each() for each in whole] == [None] * len(whole)

    filled(Small, cut)
    assert len(whole) == 4


class Tabled(nn.Module):
    """Buffers and attributes of all kinds, which nobody but the constructor can make; and a parameter in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(4.0).cos(), persistent=False)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())
        self.register_buffer("spoiled", torch.tensor([torch.nan, -torch.inf]))
        self.table = torch.arange(4)
        self.inner = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        shared = nn.Parameter(torch.randn(4))
        self.inner.bias, self.again.bias = shared, shared


def test_buffers_are_those_of_the_constructor() -> None:
    expected, found = made(Tabled), filled(Tabled)
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffer.nan_to_num(), dict(found.named_buffers())[name].nan_to_num()), name
    assert torch.equal(found.table, torch.arange(4))  # pyrefly: ignore[bad-argument-type]
    assert found.inner.bias is found.again.bias  # pyrefly: ignore[missing-attribute]


# ---- recipes --------------------------------------------------------------------------------------------


SIZES = Sizes(image=32, stem="conv", patch=8, width=32, heads=2, vision_layers=1, text_layers=2, words=6, vocabulary=9)
RECIPES = {
    "char_lm": lambda: GPT(symbols=7, width=64, layers=2, heads=2, context=8),
    "pixel_llm": lambda: Captioner(SIZES),
    "hrm": lambda: HierarchicalReasoningModel(ModelConfig(symbols=5, cells=16, width=64, heads=2, layers=2)),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_start_as_their_constructors_have_them(name: str) -> None:
    """With other random numbers: of every tensor the same mean and spread, and the same zeros."""
    expected, found = made(RECIPES[name]), filled(RECIPES[name])
    here, there = ({name: t.detach() for name, t in _tensors(model)} for model in (found, expected))
    assert list(here) == list(there)
    for key, tensor in here.items():
        if tensor.numel() < 50 or torch.equal(tensor, there[key]):
            continue
        spread = float(there[key].std())
        assert float(tensor.std()) == pytest.approx(spread, rel=0.35), key
        assert float(tensor.mean()) == pytest.approx(float(there[key].mean()), abs=spread), key


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


@pytest.mark.parametrize(
    ("name", "world"),
    list(itertools.product(["fsdp", "fsdp-grads", "hsdp"], [1, 2, 4]))
    if ALL_PAIRS
    else [("fsdp", 1), ("fsdp", 4), ("fsdp-grads", 2), ("hsdp", 4)],
)
def test_training_ends_with_the_same_parameters(pool: Pool, single: dict[str, Any], name: str, world: int) -> None:
    for found in pool.run(final, STRATEGIES[name] | {"init": "meta"}, world=world):
        assert_close(found["weights"], single["weights"])


def layers_of_bert() -> nn.Module:
    """Layers of transformers. Its whole models set their weights once more when they are complete."""
    from transformers.models.bert.modeling_bert import BertConfig, BertLayer

    config = BertConfig(hidden_size=8, num_attention_heads=2, intermediate_size=12)
    return nn.Sequential(nn.Embedding(7, 8), *(BertLayer(config) for _ in range(3)), nn.Linear(8, 7))


def start_of(world: World, store: Any, values: dict[str, Any]) -> dict[str, Tensor]:
    """A job: the weights before the first step, in a loop of the user's own."""
    with open_watched(world, store, {"strategy": "fsdp", "global_batch": 4, "steps": 1} | values) as builder:
        with torch.device("meta"):
            model = layers_of_bert()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        OwnRun(builder).setup(model, optimizer)
        driver = builder.driver
        weights, _ = full_state(driver.model, keep=True, fetch=driver.fetch)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in driver.parameters}
        return {name: tensor.clone() for name, tensor in weights.items()}


def test_in_a_loop_of_ones_own_every_rank_starts_with_the_same_bits(pool: Pool) -> None:
    expected = made(layers_of_bert).state_dict()
    pool.preload(*SLOW_TO_IMPORT)
    for found in pool.run(start_of, {"init": "meta"}, world=2):
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


# ---- refused --------------------------------------------------------------------------------------------


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Half(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(4.0))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(4.0)


class Overreaching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Small()

    def reset_parameters(self) -> None:
        for p in self.inner.parameters():
            nn.init.zeros_(p)


class Applied(nn.Sequential):
    """Its constructor changes what its modules have set."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), nn.Linear(3, 3))
        nn.init.zeros_(self[1].bias)  # pyrefly: ignore[bad-argument-type]


class Mended(Applied):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self[1].bias)  # pyrefly: ignore[bad-argument-type]


def whole_bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12))


def test_what_a_block_sets_again() -> None:
    assert not filled(Mended)[1].bias.any()  # pyrefly: ignore


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.ModuleDict({"a": Bare()}), ["Bare (a) has none", "write one that sets scale"]),
        (Overreaching, ["Overreaching sets blocks that have been sharded already"]),
        (whole_bert, ["does not set weight as a constructor does", "reset_parameters() of its block"]),
        (Applied, ["Linear (1) does not set bias as a constructor does", "reset_parameters() of its block"]),
    ],
)
def test_what_cannot_be_filled_is_named(make: Callable[[], nn.Module], words: list[str]) -> None:
    check_named(words, lambda: filled(make))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Sequential(Half()), ["Half (0) leaves angles unset", "set angles in it"]),
        (lambda: nn.Sequential(Masked()), ["Masked (0) keeps mask"]),
        (lambda: nn.Sequential(Attribute()), ["Attribute (0) keeps table"]),
    ],
)
def test_what_is_lost_in_a_model_that_is_made_by_hand_is_named(make: Callable[[], nn.Module], words: list[str]) -> None:
    check_named(words, lambda: filled(make, made_by=on_meta))


class Swapped(nn.Module):
    """Its modules are assigned in another order than they are made in."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second, self.first = second, first


class FromNumpy(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)
        with torch.no_grad():
            self.weight.copy_(torch.from_numpy(np.random.rand(*self.weight.shape)))


class ByData(nn.Linear):
    """A reset that writes past torch's count of versions."""

    def reset_parameters(self) -> None:
        self.weight.data.normal_()
        self.bias.data.zero_()


@pytest.mark.parametrize(
    "make",
    [Swapped, lambda: nn.Sequential(FromNumpy(3, 3), FromNumpy(3, 3)), lambda: nn.Sequential(ByData(3, 3), Small())],
)
def test_the_same_bits_whatever_the_modules_draw_from(make: Callable[[], nn.Module]) -> None:
    seed_everything(derive(0, "init"))
    expected = make().state_dict()
    seed_everything(derive(0, "init"))
    found = filled(make).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def seeded() -> nn.Module:
    torch.manual_seed(3)
    return Small()


def seeded_for_a_moment() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return Small()


def applied_by_data() -> nn.Module:
    model = Small()
    model.blocks[0].up.weight.data.normal_(0, 0.02)
    return model


def halved() -> nn.Module:
    model = Small()
    model.blocks[0].up.weight.data = model.blocks[0].up.weight.data * 0.5
    return model


def with_a_prior() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].bias = nn.Parameter(torch.full((3,), -2.0))
    return model


def drawn_from_numpy() -> nn.Module:
    np.random.seed(3)
    return FromNumpy(3, 3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (seeded, ["other weights", "torch.manual_seed", "seed=..."]),
        (seeded_for_a_moment, ["other weights", "torch.manual_seed"]),
        (lambda: Small().double(), ["other weights", "'embed.weight'", "float64", "set_default_dtype"]),
        (halved, ["other weights", "'blocks.0.up.weight'", "replaces its data"]),
        (applied_by_data, ["Linear (blocks.0.up) does not set weight as a constructor does"]),
        (with_a_prior, ["Linear (1) does not give bias the values that model() gives it"]),
        (drawn_from_numpy, ["other weights", "numpy"]),
    ],
)
def test_other_weights_are_refused(make: Callable[[], nn.Module], words: list[str]) -> None:
    check_named(words, lambda: filled(make))


def test_the_banner_says_when_buffers_take_random_numbers_from_the_weights() -> None:
    filled(Small)
    assert facts == {}
    filled(Tabled)
    assert "not those of init=host" in facts["init"]


def test_other_weights_of_a_model_made_by_hand_are_refused() -> None:
    made(lambda: check_made_as_asked(on_meta(Small), META))
    words = ["other weights", "lockstep.start", "torch.manual_seed"]
    check_named(words, lambda: made(lambda: check_made_as_asked(on_meta(seeded), META)))
    words = ["other weights", "'embed.weight'", "set_default_dtype"]
    check_named(words, lambda: made(lambda: check_made_as_asked(on_meta(lambda: Small().double()), META)))


def check_named(words: list[str], attempt: Callable[[], Any]) -> None:
    with pytest.raises(UserError) as caught:
        attempt()
    assert all(word in str(caught.value) for word in [*words, "init=host"]), str(caught.value)


@pytest.mark.parametrize("values", [{"strategy": "ddp"}, {"strategy": "zero1"}, {"strategy": "fsdp", "mesh.tp": 2}])
def test_only_where_the_model_is_cut(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="strategy=fsdp"):
        make_model(Small, configured({"init": "meta"} | values).config)


def test_a_model_made_otherwise_than_asked() -> None:
    with pytest.raises(UserError, match="already has weights"):
        check_made_as_asked(Small(), META)
    with torch.device("meta"):
        empty = Small()
    with pytest.raises(UserError, match="type init=meta"):
        check_made_as_asked(empty, RunConfig())
