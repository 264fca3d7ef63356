"""Writing captions word by word: the likeliest word, a sampled one, or the likeliest caption of a beam."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import lockstep
from lockstep.recipes.pixel_llm.model import Cache
from lockstep.recipes.pixel_llm.words import BOS, EOS, PAD


@torch.no_grad()
def generate(
    model: nn.Module,
    images: Tensor,
    max_len: int,
    beam: int = 1,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return captions (B, max_len) of images (B, 3, S, S), without <bos>, and with <pad> after <eos>.

    Temperature 0 takes the likeliest word each time.
    """
    assert beam == 1 or temperature == 0.0, "a beam looks for the likeliest caption: there is nothing to sample"

    with lockstep.run_eagerly(model):
        if beam > 1:
            return _beam_search(model, images, max_len, beam)

        # With a cache the model reads only the newest word.
        cache = Cache()
        word = images.new_full((len(images), 1), BOS, dtype=torch.int64)
        ended = torch.zeros_like(word, dtype=torch.bool)
        written = []

        for _ in range(max_len):
            logits = next_word(model(images, word, cache))
            chosen = _sampled(logits, temperature, top_k, top_p, generator) if temperature else logits.argmax(-1)

            # Every caption is written to the end: a batch ends as a whole.
            word = chosen[:, None].masked_fill(ended, PAD)
            ended = ended | (word == EOS)
            written.append(word)

        return torch.cat(written, dim=1)


def next_word(logits: Tensor) -> Tensor:
    """Return the logits of the last position, (B, T, V) -> (B, V)."""
    last = logits[:, -1].float()

    # These are not words, and their logits were never trained.
    last[:, [PAD, BOS]] = float("-inf")
    return last


def _sampled(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Sample a word (B,) from logits (B, V), on the CPU in float32: one generator serves every device."""
    device = logits.device
    logits = logits.cpu() / temperature
    if top_k is not None and top_k < logits.shape[1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))

    # The fewest likeliest words that make up `top_p`; always at least one.
    chance, order = nn.functional.softmax(logits, dim=-1).sort(dim=-1, descending=True)
    if top_p is not None:
        chance = chance.masked_fill(chance.cumsum(-1) - chance >= top_p, 0.0)

    return order.gather(1, torch.multinomial(chance, 1, generator=generator))[:, 0].to(device)


def _beam_search(model: nn.Module, images: Tensor, max_len: int, beam: int) -> Tensor:
    """Return the likeliest of the captions that were among the best `beam` after every word; length is not rewarded."""
    batch, device = len(images), images.device
    cache = Cache()
    first = next_word(model(images, images.new_full((batch, 1), BOS, dtype=torch.int64), cache))
    score, word = first.log_softmax(-1).topk(beam)  # (B, beam)

    # From here on the model's batch has B * beam rows.
    rows = torch.arange(batch, device=device)[:, None]
    cache.pick(rows.expand(batch, beam).flatten())
    written = word[:, :, None]  # (B, beam, words so far)

    for _ in range(max_len - 1):
        logits = next_word(model(images, word.reshape(-1, 1), cache)).log_softmax(-1)
        vocabulary = logits.shape[-1]

        # A caption that has ended continues with <pad> only and keeps its likelihood.
        ended = (word == EOS) | (word == PAD)
        after = logits.view(batch, beam, vocabulary).masked_fill(ended[:, :, None], float("-inf"))
        after[:, :, PAD] = torch.where(ended, 0.0, after[:, :, PAD])

        score, best = (score[:, :, None] + after).flatten(1).topk(beam)
        came_from, word = best // vocabulary, best % vocabulary
        written = torch.cat((written[rows, came_from], word[:, :, None]), dim=2)
        cache.pick((rows * beam + came_from).flatten())

    return written[:, 0]
