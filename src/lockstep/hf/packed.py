"""Attention within documents, for models of transformers that are trained on packed rows.

Where a model takes a mask it also takes the bounds of the documents: a mask with four dimensions goes unchanged to the
attention, and there `cu_seqlens` as (1, 1, 1, documents + 1) int32 is no mask but bounds. So any model that uses
transformers' attention interface can be trained with torch's `varlen_attn`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.packing import packed_attention
from lockstep.errors import UserError
from lockstep.hf.local import package

NAME = "lockstep_packed"  # the name of the attention, in transformers


def attend_within_documents(model: Any) -> Any:
    """Change the attention of a model of transformers, in place: `packed_inputs` of a batch may then be passed to it.

    Other calls are as before. A model whose documents would still see each other is refused.
    """
    interface = package("transformers.modeling_utils").AttentionInterface
    masks = package("transformers.masking_utils").AttentionMaskInterface
    interface.register(NAME, _attention)
    masks.register(NAME, package("transformers.masking_utils").sdpa_mask)

    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise _refusal(model, "its attention cannot be replaced: it does not use transformers' attention interface")

    # A model without weights yet cannot be probed.
    if not any(parameter.is_meta for parameter in model.parameters()):
        _check_apart(model)

    return model


def packed_inputs(batch: Any) -> dict[str, Tensor]:
    """Return the arguments of the model for a batch of `packed_batch`."""
    bounds = batch["cu_seqlens"][None, None, None]
    return {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "attention_mask": bounds}


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' interface asks: query (rows, heads, length, size) to (rows, length, heads, size)."""
    if attention_mask is None or attention_mask.dtype != torch.int32:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )  # pyrefly: ignore

    if dropout or kwargs.get("softcap") is not None:
        what = f"attention dropout {dropout}" if dropout else f"softcap {kwargs['softcap']}"
        raise _refusal(module, f"its attention has {what}, which variable-length attention has not")

    # Heads of keys and values that are shared by a group of queries are repeated.
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))

    out = packed_attention(query, key, value, None, attention_mask.flatten(), scale=scaling, window=sliding_window)
    return out.transpose(1, 2).contiguous(), None


@torch.no_grad()
def _check_apart(model: Any) -> None:
    """Refuse a model in which a document's logits depend on the one before it: by a convolution or a recurrence."""
    device = model.device

    # Two documents of three tokens in one row of shape (1, 6): the second must not see the first.
    tokens = torch.arange(6, device=device)[None] % model.config.vocab_size
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=device)
    bounds = torch.tensor([0, 3, 6], dtype=torch.int32, device=device)

    training = model.training
    model.eval()

    try:
        # The logits (1, 3, vocabulary) of the second document, with the first before it and alone.
        batch = {"input_ids": tokens, "position_ids": positions, "cu_seqlens": bounds}
        packed = model(**packed_inputs(batch), use_cache=False).logits[:, 3:]
        alone = model(tokens[:, 3:], use_cache=False).logits
    finally:
        model.train(training)

    if (packed - alone).abs().max() > 1e-3 * alone.abs().max():
        raise _refusal(model, "in a probe, its logits for a document changed with the document before it in the row")


def _refusal(model: nn.Module, why: str) -> UserError:
    return UserError(
        f"{type(model).__name__} cannot be trained on packed rows",
        why,
        "leave task.row_length out; data.balance=length avoids most of the padding (docs/ragged.md)",
    )
