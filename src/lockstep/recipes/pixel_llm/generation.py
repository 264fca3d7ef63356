"""Writing captions, one word at a time: the likeliest word, a drawn one, or the likeliest caption of a beam."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.eager import run_eagerly
from lockstep.recipes.pixel_llm.model import Cache
from lockstep.recipes.pixel_llm.words import BOS, EOS, PAD

Choose = Callable[[Tensor], Tensor]  # logits (B, V) to the next word (B,)


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
    """Captions (B, max_len) without <bos>, <pad> after <eos>. Temperature 0 takes the likeliest word each time."""
    assert beam == 1 or temperature == 0.0, "a beam looks for the likeliest caption: there is nothing to draw"
    with run_eagerly(model):
        if beam > 1:
            return _beam(model, images, max_len, beam)

        def choose(logits: Tensor) -> Tensor:
            return logits.argmax(-1) if temperature == 0.0 else _drawn(logits, temperature, top_k, top_p, generator)

        return _one_by_one(model, images, max_len, choose)


def next_word(logits: Tensor) -> Tensor:
    """(B, T, V) to those of the last position (B, V). <pad> and <bos> are no words: nobody has trained theirs."""
    last = logits[:, -1].float()
    last[:, [PAD, BOS]] = float("-inf")
    return last


def _one_by_one(model: nn.Module, images: Tensor, max_len: int, choose: Choose) -> Tensor:
    cache = Cache()
    word = images.new_full((len(images), 1), BOS, dtype=torch.int64)
    ended = torch.zeros_like(word, dtype=torch.bool)
    written = []
    for _ in range(max_len):
        word = choose(next_word(model(images, word, cache)))[:, None]
        word = word.masked_fill(ended, PAD)
        ended = ended | (word == EOS)
        written.append(word)
    return torch.cat(written, dim=1)


def _drawn(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """On the CPU in float32, so that one generator serves every device."""
    logits = logits.cpu() / temperature
    if top_k is not None and top_k < logits.shape[1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    chance, order = F.softmax(logits, dim=-1).sort(dim=-1, descending=True)
    if top_p is not None:  # the fewest likeliest words that make up `top_p`; always at least one
        chance = chance.masked_fill(chance.cumsum(-1) - chance >= top_p, 0.0)
    place = torch.multinomial(chance, 1, generator=generator)
    return order.gather(1, place)[:, 0].to(logits.device)


def _beam(model: nn.Module, images: Tensor, max_len: int, beam: int) -> Tensor:
    """The likeliest of the captions that were among the best `beam` after every word. No prize for length."""
    batch, device = len(images), images.device
    cache = Cache()
    first = next_word(model(images, images.new_full((batch, 1), BOS, dtype=torch.int64), cache))
    score, word = first.log_softmax(-1).topk(beam)  # (B, beam)
    rows = torch.arange(batch, device=device)[:, None]
    cache.pick(rows.expand(batch, beam).flatten())
    written = word[:, :, None]  # (B, beam, words so far)
    for _ in range(max_len - 1):
        logits = next_word(model(images, word.reshape(-1, 1), cache)).log_softmax(-1)
        vocabulary = logits.shape[-1]
        ended = (word == EOS) | (word == PAD)
        after = logits.view(batch, beam, vocabulary).masked_fill(ended[:, :, None], float("-inf"))
        after[:, :, PAD] = torch.where(ended, 0.0, after[:, :, PAD])  # an ended caption stays as likely as it is
        score, best = (score[:, :, None] + after).flatten(1).topk(beam)
        came_from, word = best // vocabulary, best % vocabulary
        written = torch.cat((written[rows, came_from], word[:, :, None]), dim=2)
        cache.pick((rows * beam + came_from).flatten())
    return written[:, 0]
