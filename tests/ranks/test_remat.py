"""Computing blocks again changes memory and time, and not one bit of the gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.activation_checkpointing import checkpoint_activations
from lockstep.parallel.caches import disable_kv_cache
from pool import Pool
from ranks.support import ALL_PAIRS, configured
from ranks.test_strategies import STRATEGIES, assert_close, final, single

__all__ = ["single"]  # a fixture

KINDS = ["full", "selective", "every-2"]


class Layer(nn.Module):
    """Dropout before, inside and after what `selective` keeps: a shifted random stream would show."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, float]:
        self.calls += 1
        q, k, v = self.mix(F.dropout(self.norm(x), 0.2)).chunk(3, dim=-1)
        x = x + F.dropout(F.scaled_dot_product_attention(q, k, v, dropout_p=0.3), 0.4)
        return x + scale * F.dropout(torch.tanh(self.out(x)), 0.1), scale


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x, scale=0.5)
        return self.head(x).sum()


def stack(remat: str, make: Callable[[], nn.Module] = Stack, **more: Any) -> Any:
    torch.manual_seed(0)
    model = make()
    disable_kv_cache(model, always=False)
    checkpoint_activations(model, RunConfig(remat=remat, **more))
    return model


def gradients(model: nn.Module, bf16: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        total = model(x)
    torch.manual_seed(2)  # whatever happened to the generator in between
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Named(nn.Module):
    """Takes a keyword that torch's own checkpoint would take for its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, *, x: Tensor, debug: float) -> Tensor:
        return torch.tanh(self.linear(x)) * debug


class NamedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Named() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x=x, debug=0.5)
        return x.sum()


def calls(model: Any) -> list[int]:
    return [layer.calls for layer in model.layers]


def test_a_second_call_under_autocast_recomputes_what_it_did_itself() -> None:
    """The weights are converted by then, and are not converted again."""
    model = stack("selective")
    with torch.autocast("cpu", torch.bfloat16):
        total = model(torch.ones(2, 3, 8)) + model(torch.full((2, 3, 8), 0.5))
    total.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_bits_with_dropout_inside(kind: str, bf16: bool) -> None:
    expected = gradients(stack("none"), bf16)
    model = stack(kind)
    found = gradients(model, bf16)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert calls(model) == ([2, 1, 2, 1] if kind == "every-2" else [2, 2, 2, 2])


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_classes_stay(kind: str) -> None:
    plain, model = stack("none"), stack(kind)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


def test_nothing_is_kept_or_computed_again_without_gradients() -> None:
    model = stack("full")
    with torch.no_grad():
        model(torch.randn(2, 5, 8))
    assert calls(model) == [1, 1, 1, 1]


def kept_bytes(model: nn.Module) -> int:
    """What the forward leaves for the backward, outside of the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage()
        if place.data_ptr() not in own:
            kept[place.data_ptr()] = place.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(2, 5, 8))
    return sum(kept.values())


def test_less_is_kept() -> None:
    whole, half, little = (kept_bytes(stack(kind)) for kind in ("none", "every-2", "full"))
    assert little < half < whole


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    model = stack("full")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    expected = gradients(stack("none"))
    found = gradients(twin)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_somebody_put_in_the_place_of_forward_still_runs() -> None:
    torch.manual_seed(0)
    model, seen = Stack(), []
    inner = model.layers[0].forward
    model.layers[0].forward = lambda *args, **kwargs: seen.append(1) or inner(*args, **kwargs)
    checkpoint_activations(model, RunConfig(remat="full"))
    gradients(model)
    assert seen == [1, 1]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_blocks_that_take_keywords(kind: str, compiled: bool) -> None:
    """Compiled: as one graph, whose random numbers are not those of the eager model, so without dropout."""
    plain, model = stack("none", NamedStack), stack(kind, NamedStack)
    if compiled:
        model.compile(backend="aot_eager", fullgraph=True)
    expected, found = gradients(plain), gradients(model)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("world", [1, 2] if ALL_PAIRS else [2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp-grads"] if ALL_PAIRS else ["ddp", "fsdp-grads"])
def test_with_every_strategy(pool: Pool, single: dict[str, Any], name: str, kind: str, world: int) -> None:
    for found in pool.run(final, STRATEGIES[name] | {"remat": kind}, world=world):
        assert_close(found["weights"], single["weights"])


def test_blocks_of_a_class_by_name() -> None:
    model = stack("full", lambda: nn.Sequential(Layer(), nn.Identity()), blocks=["Layer"])
    assert "forward" in vars(model[0])


@pytest.mark.parametrize(
    ("make", "values", "words"),
    [
        (lambda: nn.Linear(2, 2), {}, ["remat=full", "no blocks in Linear", "remat=none"]),
        (lambda: nn.Sequential(nn.Linear(2, 9), Layer()), {}, ["blocks=[Layer]"]),
        (lambda: nn.Sequential(Layer(), Layer()), {"blocks": ["Layr"]}, ["blocks=[Layr]", "Layer"]),
        (
            lambda: nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))),
            {},
            ["Sequential.1 count every batch twice", "a BatchNorm1d", "GroupNorm"],
        ),
    ],
)
def test_refused(make: Callable[[], nn.Module], values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        stack("full", make, **values)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def tiny_bart() -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {"vocab_size": 9, "d_model": 8, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    return BartForConditionalGeneration(BartConfig(**sizes, **heads))


def test_a_cache_that_the_loss_asks_for_is_refused() -> None:
    model = stack("full", tiny_bart)
    words = torch.ones(1, 4, dtype=torch.int64)
    assert model(input_ids=words).past_key_values is None
    with pytest.raises(UserError, match="would fill the KV cache of BartDecoderLayer twice") as caught:
        model(input_ids=words, use_cache=True)
    assert "leave both out of the call" in caught.value.fix


def test_the_config_of_a_model_stays_as_it_is() -> None:
    model: Any = stack("full", tiny_bart)
    words = torch.ones(1, 4, dtype=torch.int64)
    for one in (model, copy.deepcopy(model)):
        assert one(input_ids=words).past_key_values is None
        assert one.config.use_cache
        with torch.no_grad():
            assert one(input_ids=words).past_key_values is not None
        assert one.eval().generate(words, max_length=6).shape[1] > 1


@dataclass(frozen=True)
class FrozenConfig:
    use_cache: bool = True


class Cache:
    """A class of the user's, which has nothing to do with transformers."""


class Cached(nn.Linear):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        return super().forward(x)


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = FrozenConfig()
        self.layers = nn.ModuleList([Cached(4, 4), Cached(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, Cache())
        return x


def test_a_config_and_a_cache_of_the_users_own_are_left_alone() -> None:
    model = stack("full", Configured)
    model(torch.ones(3, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(("typed", "taken"), [(None, "none"), ("every-3", "every-3"), ("selective", "selective")])
def test_what_can_be_typed(typed: Any, taken: str) -> None:
    assert configured({"remat": typed}).config.remat == taken


@pytest.mark.parametrize("wrong", ["every-0", "every", "fully", 2])
def test_what_cannot_be_typed(wrong: Any) -> None:
    with pytest.raises(UserError, match="'none', 'full', 'selective' or 'every-2'"):
        configured({"remat": wrong})
