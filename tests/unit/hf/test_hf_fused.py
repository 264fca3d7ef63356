"""The loss without logits is the loss with them, and so is its gradient; models that do more are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import UserError
from lockstep.hf import CausalLM, fuse_loss

transformers = pytest.importorskip("transformers")

WORDS = 61  # no multiple of anything
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}


def llama(**changes: Any) -> Any:
    config = transformers.LlamaConfig(**SMALL, **TOKENS, num_key_value_heads=1, tie_word_embeddings=False)
    config.update(changes)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    """Its head is tied to its embeddings."""
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **TOKENS))


def phi() -> Any:
    """Its head has a bias."""
    return transformers.PhiForCausalLM(transformers.PhiConfig(**SMALL, **TOKENS, resid_pdrop=0.0))


def gemma2() -> Any:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, **TOKENS, num_key_value_heads=1))


def cohere() -> Any:
    return transformers.CohereForCausalLM(transformers.CohereConfig(**SMALL, **TOKENS))


def tokens_and_labels() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, WORDS, (3, 7), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, :3] = labels[2, 5:] = -100
    return tokens, labels


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("build", [gpt2, llama, pytest.param(phi, marks=pytest.mark.long)])
def test_the_loss_and_its_gradient(build: Any) -> None:
    torch.manual_seed(0)
    model, (tokens, labels) = build().double(), tokens_and_labels()
    logits = model(tokens).logits
    right = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    expected = gradients(model, right)
    names = list(model.state_dict())

    fuse_loss(model)
    found = model(tokens, labels=labels).loss
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(gradients(model, found), expected)
    assert list(model.state_dict()) == names
    assert torch.equal(model(tokens).logits, logits)  # without labels, it is the model that it was


def test_it_never_makes_logits() -> None:
    model, (tokens, labels) = fuse_loss(llama()), tokens_and_labels()
    model.lm_head.register_forward_hook(lambda *_: pytest.fail("the head was called"))
    assert model(tokens, labels=labels).loss.isfinite()


class Capped(transformers.LlamaForCausalLM):
    """As Gemma 2, without its imports."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = 30 * torch.tanh(output.logits / 30)
        return output


class Scaled(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / 8
        return output


@pytest.mark.parametrize("kind", [Capped, Scaled])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_logits_that_are_changed_after_the_head_are_refused(kind: Any, device: str) -> None:
    with torch.device(device):
        model = kind(llama().config)
    with pytest.raises(UserError, match=f"the loss of {kind.__name__} cannot be computed without its logits"):
        fuse_loss(model)


@pytest.mark.long
@pytest.mark.parametrize("build", [gemma2, cohere])
def test_public_models_that_change_their_logits(build: Any) -> None:
    with pytest.raises(UserError, match="by a cap or a scale"):
        fuse_loss(build())


def test_a_model_on_meta_is_accepted() -> None:
    with torch.device("meta"):
        fuse_loss(llama())


def test_a_head_that_is_not_linear() -> None:
    model = llama()
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(16, WORDS))
    with pytest.raises(UserError, match="its head is a Sequential"):
        fuse_loss(model)

    # As an adapter on the head would be.
    model = fuse_loss(llama())
    tokens, labels = tokens_and_labels()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(UserError, match="its head has become a Sequential"):
        model(tokens, labels=labels)


def test_adapters_reach_it() -> None:
    """peft passes labels on to the model below it."""
    pytest.importorskip("peft")
    rows = [{"input_ids": row.tolist()} for row in tokens_and_labels()[0]]
    losses = []
    for fused in (False, True):
        torch.manual_seed(0)
        task = CausalLM(llama().config, rows, fused_loss=fused, lora={"r": 2, "target_modules": ["q_proj"]})
        losses.append(task.loss(task.model(), task.collate([task.data()[index] for index in range(3)])))
    assert losses[0].weight == losses[1].weight
    torch.testing.assert_close(losses[0].total, losses[1].total)
