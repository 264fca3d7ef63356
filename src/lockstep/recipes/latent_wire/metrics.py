"""The metrics of an evaluation: each question put in several ways, and whether answers still differ."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.recipes.latent_wire.data import WireData
from lockstep.recipes.latent_wire.reader import Reader
from lockstep.recipes.latent_wire.wire import Read, WireShape, from_replay, from_text
from lockstep.task import Metric

LETTERS = "ab"  # the readers' names


def evaluation_metrics(
    readers: list[Reader],
    batch: dict[str, Tensor],
    reads: list[Read],
    controls: list[Read],
    blanks: list[int | None],
    shape: WireShape,
) -> dict[str, Metric]:
    """Return sums over questions, named by the reader's letter.

    reads     what each reader made of the batch
    controls  the same with a wire that carries another sample's context
    blanks    the padding token of each reader
    """
    # The cosine of the wires of neighbouring samples: near 1 they have collapsed.
    wires, neighbours = (read.seen.flatten(1).float() for read in (reads[0], controls[0]))
    metrics: dict[str, Metric] = {"alike": (F.cosine_similarity(wires, neighbours).sum(), len(wires))}

    for number, reader in enumerate(readers):
        wrong_context = controls[number].answered.right
        sums = _sums_of_reader(reader, number, batch, reads[number], wrong_context, blanks[number], shape)
        metrics |= {f"{LETTERS[number]}_{name}": value for name, value in sums.items()}

    return metrics


def _sums_of_reader(
    reader: Reader,
    number: int,
    batch: dict[str, Tensor],
    read: Read,
    wrong_context: Tensor,
    blank: int | None,
    shape: WireShape,
) -> dict[str, Metric]:
    """Return the sums of one reader; `wrong_context` is 1 where it is right with the context of another sample."""
    assert read.written is not None
    expected = batch[f"answer_{number}"].flatten(0, 1).to(read.written.device)

    # The same questions with the text and without it.
    text = from_text(reader, batch, number).right
    none = from_text(reader, batch, number, most=0).right
    exact = read.answered.right

    return {
        "exact": exact.sum(),
        "first": read.answered.first.sum(),
        "f1": f1(read.written, expected, blank).sum(),
        "text": text.sum(),
        "replay": from_replay(reader, batch, number).right.sum(),
        "none": none.sum(),
        # With as many tokens of the text as the wire has vectors.
        "cut": from_text(reader, batch, number, most=shape.read).right.sum(),
        "other": wrong_context.sum(),
        "other_above_none": (wrong_context - none).sum(),
        "of_text": (exact.sum(), text.sum()),
        "variety": (float(distinct(read.written)), distinct(expected)),
    }


def f1(written: Tensor, expected: Tensor, blank: int | None) -> Tensor:
    """Return the F1 score (rows,) of the tokens of answers (rows, tokens), in any order and without blanks."""
    size = int(max(written.max(), expected.max())) + 1
    # How often each token occurs, in what was written and in what was expected.
    counts = [F.one_hot(ids, size).sum(1) for ids in (written, expected)]
    if blank is not None and blank < size:
        for count in counts:
            count[:, blank] = 0

    # Twice the tokens in common, over all tokens.
    return 2 * torch.minimum(*counts).sum(1) / (counts[0].sum(1) + counts[1].sum(1))


def distinct(answers: Tensor) -> int:
    """Count the different answers: a wire that has collapsed gives few. The host waits for the device."""
    return len(answers.unique(dim=0))


def compression(data: WireData, shape: WireShape) -> str:
    """Describe how much smaller the wire is than what it carries: bytes of plain text, and tokens of each reader."""
    drawn = data.world.draw(data.split, np.arange(min(len(data), 256)))
    readers = len(data.tokenizers)

    # In mode `prompt` every question has its own wire, which carries the context again.
    words, wires = [drawn.context], drawn.context.shape[0]
    if data.mode == "prompt":
        words, wires = [*words * drawn.question.shape[1], drawn.question], drawn.answer.size

    # A word and the space after it.
    lengths = np.array([len(word) + 1 for word in data.world.words])
    text = sum(float(lengths[numbers].sum()) for numbers in words) / wires
    tokens = [sum(tokenizer.encode(numbers).size for numbers in words) / wires for tokenizer in data.tokenizers]

    # Readers share the common vectors, which are sent once.
    vectors = shape.sent(readers)
    size = vectors * shape.width  # numbers in the wire
    ratios = " and ".join(f"{count / shape.read:.1f}" for count in tokens)
    return (
        f"carried: {text:.0f} bytes of text, {' and '.join(f'{count:.0f}' for count in tokens)} tokens\n"
        f"wire: {vectors} vectors, {2 * size} bytes in bf16, {size} in 8 bits "
        f"({text / (2 * size):.2f} and {text / size:.2f} bytes of text per byte)\n"
        f"tokens per vector: {ratios}, read by {readers} frozen models"
    )
