"""Padding, bucketing, balancing and packing of ragged token sequences, on one CPU thread.

    python benchmarks/ragged.py
    python benchmarks/ragged.py --ranks 4
    python benchmarks/ragged.py --model llama --micro-batch 4

A small causal model trains on sequences of 3 to 64 tokens, of uniformly distributed lengths. Each way of making batches
trains about the same number of sequences, in turns, so that noise hits all alike. With several ranks, the work of every
rank is done in this process, one after the other, and a step takes as long as its slowest rank.

waste       padding among all tokens that the model computes
tokens/s    tokens without padding, divided by the time of the slowest rank of each step; the median of the turns
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lockstep.config import DataConfig
from lockstep.data.dataset_source import SourceOptions
from lockstep.data.packing import PackedDataset, attention_mask, packed_batch
from lockstep.data.samplers import BucketedSampler, Sampled
from lockstep.data.sources import open_source
from lockstep.runtime.context import log_nothing
from lockstep.runtime.world import World

WORDS, WIDTH, HEADS, LAYERS = 1000, 128, 4, 4
LONGEST = 64
PAD, IGNORED = 0, -100  # a token, and a label


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.first_norm(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, position_ids: Tensor, packed: bool) -> Tensor:
        mask = attention_mask(position_ids) if packed else None
        x = self.words(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


class Llama(nn.Module):
    """A Llama of transformers, as large as the Decoder."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=LONGEST,
        )
        self.inner = LlamaForCausalLM(config)

    def forward(self, input_ids: Tensor, position_ids: Tensor, packed: bool) -> Tensor:
        mask = attention_mask(position_ids) if packed else None
        return self.inner(input_ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits


def padded(samples: list[Tensor]) -> dict[str, Tensor]:
    """Fill up to the longest sample. Causal attention never looks at the padding behind a sample."""
    input_ids = pad_sequence(samples, batch_first=True)
    positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    return {"input_ids": input_ids, "labels": pad_sequence(samples, True, IGNORED), "position_ids": positions}


@dataclass
class Way:
    """One way of making batches of `sequences`."""

    data: Any
    collate: Callable[[list[Any]], dict[str, Tensor]]
    config: DataConfig
    packed: bool
    samples_per_batch: float  # sequences in one sample of the data: more than one in a packed row


def ways(sequences: list[Tensor], lengths: np.ndarray, micro_batch: int, row: int) -> dict[str, Way]:
    plain, balanced = DataConfig(), DataConfig(balance="length")
    rows = PackedDataset(sequences, row, lengths)

    def collate_packed(samples: list[Any]) -> dict[str, Tensor]:
        return packed_batch(samples, row)

    bucketed = Sampled(sequences, BucketedSampler(lengths, batch=micro_batch))
    return {
        "shuffled, padded": Way(sequences, padded, plain, False, 1),
        "BucketedSampler": Way(bucketed, padded, plain, False, 1),
        "data.balance=length": Way(Sampled(sequences, lengths=lengths), padded, balanced, False, 1),
        "packed by collate": Way(sequences, collate_packed, plain, True, 1),
        "PackedDataset": Way(rows, collate_packed, plain, True, len(sequences) / len(rows)),
    }


def train(way: Way, model: nn.Module, batch: int, micro_batch: int, ranks: int, steps: int) -> tuple[float, int, int]:
    """Return (seconds of the slowest ranks, tokens without padding, tokens with it)."""
    # A sample may hold several sequences, and then a batch needs fewer samples.
    batch = max(ranks, round(batch / way.samples_per_batch))
    micro_batch = max(1, min(batch // ranks, round(micro_batch / way.samples_per_batch)))
    sources = []
    for rank in range(ranks):
        options = SourceOptions(
            global_batch=batch,
            micro_batch_size=micro_batch,
            tail="short",
            config=way.config,
            seed=0,
            data_world=World(rank, ranks),
            device=torch.device("cpu"),
            # There is no run to call.
            gather_states=lambda state: [state],
            log_event=log_nothing,
            beat=lambda: None,
            check_state=lambda state: None,
        )
        sources.append(open_source(way.data, way.collate, options))

    seconds, counted, computed = 0.0, 0, 0
    for _ in range(steps):
        times = []
        for source in sources:
            began = time.perf_counter()
            batches = source.take()
            for micro in batches:
                labels = micro.data["labels"][:, 1:]
                logits = model(micro.data["input_ids"], micro.data["position_ids"], way.packed)[:, :-1]
                F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
                counted += int((micro.data["input_ids"] != PAD).sum())
                computed += micro.data["input_ids"].numel()
            source.commit(batches, None)
            times.append(time.perf_counter() - began)
        seconds += max(times)

    return seconds, counted, computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["decoder", "llama"], default="decoder", help="llama: that of transformers")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step, on all ranks")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--row", type=int, default=LONGEST, help="tokens of a packed row")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, LONGEST + 1, (2048,), generator=generator)
    sequences = [torch.randint(1, WORDS, (int(length),), generator=generator) for length in lengths]
    model = Llama() if arguments.model == "llama" else Decoder()
    found = ways(sequences, lengths.numpy(), arguments.micro_batch, arguments.row)
    rates: dict[str, list[float]] = {name: [] for name in found}
    waste: dict[str, float] = {}
    for turn in range(arguments.turns + 1):
        for name, way in found.items():
            options = arguments.batch, arguments.micro_batch, arguments.ranks, arguments.steps
            seconds, counted, computed = train(way, model, *options)
            model.zero_grad()
            waste[name] = 1 - counted / computed
            if turn:  # the first one warms up
                rates[name].append(counted / seconds)

    base = statistics.median(rates["shuffled, padded"])
    print(f"ranks {arguments.ranks}, batch {arguments.batch}, micro-batch {arguments.micro_batch}, row {arguments.row}")
    for name, values in rates.items():
        rate = statistics.median(values)
        print(f"{name:20} waste {100 * waste[name]:5.1f} %   {rate:8.0f} tokens/s   {rate / base:5.2f} x")


if __name__ == "__main__":
    main()
