"""Packed rows of texts: the gradient of a model of transformers is that of the texts one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.data.packing import document_positions, packed_batch
from lockstep.errors import UserError
from lockstep.hf import CausalLM, attend_within_documents, packed_inputs

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
LENGTHS = [5, 31, 3, 17, 2, 12, 9]


def llama() -> Any:
    """Two query heads share one of keys and values."""
    return transformers.LlamaConfig(**SMALL, **TOKENS, num_key_value_heads=1)


def gpt2() -> Any:
    """Learned positions; its blocks do not know them."""
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return transformers.GPT2Config(**sizes, **TOKENS)


def mistral() -> Any:
    return transformers.MistralConfig(**SMALL, **TOKENS, num_key_value_heads=1, sliding_window=4)


def rows() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1, 61, (length,), generator=draw).tolist()} for length in LENGTHS]


def gradient(task: CausalLM, model: Any, batches: list[Any]) -> tuple[float, int, Tensor]:
    model.zero_grad()
    total, weight = 0.0, 0
    for batch in batches:
        loss = task.loss(model, batch)
        loss.total.backward()
        total, weight = total + loss.total.item(), weight + int(loss.weight)
    return total, weight, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("config", [llama, gpt2, pytest.param(mistral, marks=pytest.mark.long)])
def test_the_gradient_is_that_of_the_texts_one_by_one(config: Any, fused: bool) -> None:
    torch.manual_seed(0)
    plain, packed = CausalLM(config(), rows()), CausalLM(config(), rows(), row_length=32, fused_loss=fused)
    model = plain.model().double()
    alone = gradient(plain, model, [plain.collate([row]) for row in plain.data()])

    state, model = model.state_dict(), packed.model().double()
    model.load_state_dict(state)
    data = packed.data()
    assert len(data) == 3  # 79 tokens
    found = gradient(packed, model, [packed.collate([data[0], data[1]]), packed.collate([data[2]])])
    assert found[1] == alone[1] == sum(LENGTHS) - len(LENGTHS)
    assert found[0] == pytest.approx(alone[0], rel=1e-6)  # logits are summed up in float32
    assert (found[2] - alone[2]).norm() < 1e-6 * alone[2].norm()


@pytest.mark.long
def test_with_its_loss_it_is_one_graph() -> None:
    task = CausalLM(llama(), rows(), row_length=32, fused_loss=True)
    model, batch = task.model(), task.collate([task.data()[0]])
    compiled = torch.compile(lambda batch: task.loss(model, batch).total, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(batch), task.loss(model, batch).total)


def test_other_calls_are_as_before() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama()).eval()
    tokens = torch.randint(1, 61, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        before = model(tokens, attention_mask=mask).logits
        after = attend_within_documents(model)(tokens, attention_mask=mask).logits
    assert torch.equal(before, after)


def test_bounds_are_filled_up_with_empty_documents() -> None:
    documents = [row["input_ids"] for row in rows()]
    batch, filled = packed_batch(documents, 32), packed_batch(documents, 32, bounds=16)
    assert len(filled["cu_seqlens"]) == 16
    assert filled["cu_seqlens"].unique().tolist() == batch["cu_seqlens"].tolist()
    positions = document_positions(filled["cu_seqlens"], *batch["input_ids"].shape)
    assert torch.equal(positions, batch["position_ids"])
    assert packed_inputs(filled)["attention_mask"].shape == (1, 1, 1, 16)


class Mixing(transformers.LlamaForCausalLM):
    """Adds to each output what lies before it in the row, as a recurrence does."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.cumsum(dim=1)
        return output


class Own(transformers.LlamaForCausalLM):
    """Has an attention of its own."""

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """Does not use it."""


@pytest.mark.parametrize(("kind", "says"), [(Mixing, "its logits for a document changed"), (Own, "cannot be replaced")])
def test_models_that_would_mix_documents_are_refused(kind: Any, says: str) -> None:
    with pytest.raises(UserError, match=f"{kind.__name__} cannot be trained on packed rows") as error:
        attend_within_documents(kind(llama()))
    assert says in str(error.value)


def test_dropout_in_the_attention_is_refused() -> None:
    config = llama()
    config.attention_dropout = 0.1
    task = CausalLM(config, rows(), row_length=32)
    with pytest.raises(UserError, match=r"attention dropout 0\.1"):
        task.loss(task.model(), task.collate([task.data()[0]]))


def test_one_kind_of_packing() -> None:
    with pytest.raises(UserError, match=r"task\.row_length=32 excludes task\.pack=16"):
        CausalLM(llama(), rows(), row_length=32, pack=16)
