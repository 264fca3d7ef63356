"""Llamas of transformers, and texts of many lengths for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from public.cases import SPECIAL


@dataclass(frozen=True)
class Ragged:
    """A Llama and texts of many lengths."""

    config: Any
    rows: list[dict[str, Any]]
    longest: int  # tokens of a text, and of a packed row
    batch: int  # texts of a step
    micro_batch: int


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{"num_hidden_layers": 4, "tie_word_embeddings": False, **SPECIAL, **changes})


def texts(shortest: int, longest: int, words: int, count: int) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=draw).tolist()
    return [{"input_ids": torch.randint(3, words, (length,), generator=draw).tolist()} for length in lengths]


def short_texts(count: int, tiny: bool = False) -> Ragged:
    """A Llama of width 128 on texts of 3 to 64 tokens, in 4 micro-batches of 4: launching its kernels takes longest."""
    small = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "vocab_size": 1000}
    if tiny:
        small |= {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return Ragged(llama(**small), texts(3, 64, 1000, count), 64, batch=16, micro_batch=4)


def long_texts(count: int, tiny: bool = False) -> Ragged:
    """A Llama of width 1024 on texts of 16 to 1,024 tokens, in 4 micro-batches of 8."""
    if tiny:
        return short_texts(count, tiny)
    large = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "vocab_size": 32_000}
    return Ragged(llama(**large), texts(16, 1024, 32_000, count), 1024, batch=32, micro_batch=8)
