"""Packed rows: every document once, no attention between documents, and the gradient of the documents one by one."""

import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.data import packing
from lockstep.data.packing import PackedDataset, RowPacker, attention_mask, flex_mask, pack_all, packed_batch
from lockstep.errors import UserError

WORDS, WIDTH, HEADS = 50, 16, 2


def documents(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]


# ---- rows ----


@given(sizes=st.lists(st.integers(1, 16), max_size=60), open_rows=st.integers(1, 8), cut=st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_every_item_is_in_one_row_and_a_saved_packer_goes_on_alike(sizes, open_rows, cut):
    rows = pack_all(sizes, 16, open_rows)
    assert sorted(item for row in rows for item in row) == list(range(len(sizes)))
    assert all(0 < sum(sizes[item] for item in row) <= 16 for row in rows)

    first, second = RowPacker(16, open_rows), RowPacker(16, open_rows)
    again = [row for item, size in enumerate(sizes[:cut]) for row in first.add(item, size)]
    second.load_state_dict(first.state_dict())
    again += [row for item, size in enumerate(sizes[cut:], min(cut, len(sizes))) for row in second.add(item, size)]
    assert again + second.flush() == rows


def test_rows_are_well_filled():
    sizes = torch.randint(3, 65, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    assert sum(sizes) / (64 * len(pack_all(sizes, 64))) > 0.96
    assert sum(sizes) / (256 * len(pack_all(sizes, 256))) > 0.98


@pytest.mark.parametrize("size", [0, 17])
def test_what_does_not_fit_is_refused(size):
    with pytest.raises(UserError, match=f"a document of {size} tokens does not fit into a row of 16"):
        RowPacker(16).add("document", size)


def test_the_state_is_a_copy():
    packer = RowPacker(16)
    packer.add("a", 3)
    state = packer.state_dict()
    packer.add("b", 3)
    assert state == {"rows": [["a"]], "room": [13]}


# ---- batches ----


def test_a_packed_batch():
    batch = packed_batch([[1, 2, 3], {"input_ids": [4, 5], "labels": [-100, 9]}, [6, 7, 8, 9]], row_length=6, pad=99)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 99], [6, 7, 8, 9, 99, 99]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 9, -100], [-100, 7, 8, 9, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5, 6, 10, 12]
    unshifted = packed_batch([[1, 2, 3], [4, 5]], row_length=6, shifted=False)
    assert unshifted["labels"].tolist() == [[1, 2, 3, 4, 5, -100]]


def test_positions_of_padding_are_not_beyond_those_of_documents():
    """A model may have no more positions than its longest document."""
    batch = packed_batch([[1, 2, 3]], row_length=8)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 2, 3, *[-100] * 5]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 6, 8]


def test_a_packed_dataset_holds_every_document_once():
    dataset = documents([5, 9, 3, 16, 7, 2, 8, 1])
    for packed in (PackedDataset(dataset, 16), PackedDataset(dataset, 16, lengths=[5, 9, 3, 16, 7, 2, 8, 1])):
        assert len(packed) == 4
        batch = packed_batch([packed[index] for index in range(4)], row_length=16)
        assert batch["input_ids"].shape == (4, 16)
        assert sorted(batch["input_ids"].flatten().tolist()) == sorted([*torch.cat(dataset).tolist(), *[0] * (64 - 51)])


def test_a_document_of_two_dimensions_is_refused():
    with pytest.raises(UserError, match="a document must have one dimension, and a label for each token"):
        packed_batch([torch.ones(2, 2)], row_length=4)


# ---- attention ----


class Decoder(nn.Module):
    """Two layers of causal attention, with learned positions."""

    def __init__(self, dtype):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS)
        self.to(dtype)

    def forward(self, input_ids, position_ids):
        x = self.words(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in layer(x).chunk(3, dim=-1))
            x = x + packing.packed_attention(q, k, v, position_ids).transpose(1, 2).flatten(-2)

        return self.head(x)


def gradient(model, batches):
    """The sum of the loss over batches of (input_ids, position_ids, labels), its weight, and all gradients."""
    model.zero_grad()
    total, weight = 0.0, 0
    for input_ids, position_ids, labels in batches:
        logits = model(input_ids, position_ids)[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        loss.backward()
        total, weight = total + loss.item(), weight + int((labels[:, 1:] != -100).sum())

    return total, weight, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_the_gradient_is_that_of_the_documents_one_by_one(dtype, tolerance):
    torch.manual_seed(0)
    model = Decoder(dtype)
    tokens = documents([5, 31, 3, 17, 2, 64, 12, 9, 1])
    alone = gradient(model, [(d[None], torch.arange(len(d))[None], d[None]) for d in tokens])
    batch = packed_batch(tokens, row_length=64)
    packed = gradient(model, [(batch["input_ids"], batch["position_ids"], batch["labels"])])
    assert packed[1] == alone[1] == sum(len(d) - 1 for d in tokens)
    assert packed[0] == pytest.approx(alone[0], rel=tolerance)
    assert (packed[2] - alone[2]).norm() <= tolerance * alone[2].norm()


def test_without_the_mask_the_gradient_differs(monkeypatch):
    """The test above can fail."""
    torch.manual_seed(0)
    model = Decoder(torch.float64)
    batch = packed_batch(documents([5, 31, 3]), row_length=64)
    right = gradient(model, [(batch["input_ids"], batch["position_ids"], batch["labels"])])
    monkeypatch.setattr(packing, "attention_mask", lambda p, causal: torch.ones(64, 64, dtype=torch.bool).tril())
    wrong = gradient(model, [(batch["input_ids"], batch["position_ids"], batch["labels"])])
    assert (wrong[2] - right[2]).norm() > 1e-3 * right[2].norm()


@pytest.mark.parametrize("causal", [True, False])
def test_attention_by_document_bounds(monkeypatch, causal):
    """`varlen_attn` runs on GPUs only: here its place is taken by attention over one document after another."""

    def document_by_document(q, k, v, bounds, key_bounds, longest, longest_key, window_size, scale):
        assert bounds is key_bounds
        assert bounds.dtype == torch.int32
        assert int(bounds.diff().max()) <= longest == longest_key
        outs = []
        for start, stop in pairwise(bounds.tolist()):
            part = [tensor[start:stop].transpose(0, 1) for tensor in (q, k, v)]
            out = F.scaled_dot_product_attention(*part, is_causal=window_size == (-1, 0), scale=scale)
            outs.append(out.transpose(0, 1))
        return torch.cat(outs)

    batch = packed_batch(documents([5, 31, 3, 17, 2]), row_length=32)
    rows = len(batch["input_ids"])
    q, k, v = torch.randn(3, rows, HEADS, 32, 16, generator=torch.Generator().manual_seed(0)).unbind()
    masked = packing.packed_attention(q, k, v, batch["position_ids"], causal=causal)
    assert masked.isfinite().all()

    monkeypatch.setattr(packing, "_has_varlen", lambda query: True)
    # Importing the real module takes seconds.
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=document_by_document))
    by_bounds = packing.packed_attention(q, k, v, batch["position_ids"], batch["cu_seqlens"], causal)
    torch.testing.assert_close(by_bounds, masked)


def test_the_mask_keeps_documents_apart():
    mask = attention_mask(torch.tensor([[0, 1, 0, 1, 2, 0]]))[0, 0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.long
@pytest.mark.parametrize("causal", [True, False])
def test_flex_attention_agrees(causal):
    from torch.nn.attention.flex_attention import flex_attention

    batch = packed_batch(documents([5, 31, 3, 17, 2]), row_length=32)
    shape = (3, len(batch["input_ids"]), HEADS, 32, 16)
    q, k, v = torch.randn(shape, generator=torch.Generator().manual_seed(0)).unbind()
    flex = flex_attention(q, k, v, block_mask=flex_mask(batch["position_ids"], causal))
    torch.testing.assert_close(flex, packing.packed_attention(q, k, v, batch["position_ids"], causal=causal))


@pytest.mark.long
def test_a_llama_of_transformers_needs_the_mask():
    """Its gradient is that of the documents one by one. With position_ids alone it would not be."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **sizes)).double()

    class Called(nn.Module):
        def __init__(self, masked):
            super().__init__()
            self.inner, self.masked = llama, masked

        def forward(self, input_ids, position_ids):
            mask = attention_mask(position_ids) if self.masked else None
            return self.inner(input_ids, attention_mask=mask, position_ids=position_ids).logits

    tokens = documents([5, 31, 3, 17, 2, 12])
    _, weight, alone = gradient(Called(False), [(d[None], torch.arange(len(d))[None], d[None]) for d in tokens])
    batch = packed_batch(tokens, row_length=32)
    rows = [(batch["input_ids"], batch["position_ids"], batch["labels"])]
    assert gradient(Called(True), rows)[1] == weight
    assert (gradient(Called(True), rows)[2] - alone).norm() <= 1e-12 * alone.norm()
    assert (gradient(Called(False), rows)[2] - alone).norm() > 1e-2 * alone.norm()


def test_lengths_that_are_not_those_of_the_documents_are_refused():
    with pytest.raises(UserError, match="there are 2 lengths for 3 documents"):
        PackedDataset([[1], [2], [3]], row_length=4, lengths=[1, 1])
    rows = PackedDataset([[1, 2, 3]] * 2, row_length=4, lengths=[2, 2])
    with pytest.raises(UserError, match="the documents of a row have 6 tokens, and a row has 4"):
        packed_batch([rows[0]], row_length=4)
