"""What an evaluation tells of a wire: each question put in several ways, and whether answers still differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.recipes.latent_wire.wire import Read, WireShape, from_replay, from_text

if TYPE_CHECKING:
    from lockstep.recipes.latent_wire.data import WireData
    from lockstep.recipes.latent_wire.reader import Reader
    from lockstep.task import Metric

LETTERS = "ab"  # the readers' names


def table(
    readers: list[Reader], batch: dict[str, Tensor], mine: list[Read], other: list[Read], blanks: list[int | None],
    shape: WireShape,
) -> dict[str, Metric]:  # fmt: skip
    """Sums over questions, by the reader's letter."""
    found: dict[str, Metric] = {"alike": alike(mine[0], other[0])}
    for number, reader in enumerate(readers):
        exact, written = mine[number].answered, mine[number].written
        assert written is not None
        expected = batch[f"answer_{number}"].flatten(0, 1).to(written.device)
        text, none = from_text(reader, batch, number).right, from_text(reader, batch, number, most=0).right
        replayed, wrong = from_replay(reader, batch, number).right, other[number].answered.right
        told: dict[str, Metric] = {
            "exact": exact.right.sum(),
            "first": exact.first.sum(),
            "f1": f1(written, expected, blanks[number]).sum(),
            "text": text.sum(),
            "replay": replayed.sum(),
            "none": none.sum(),
            "cut": from_text(reader, batch, number, most=shape.read).right.sum(),
            "other": wrong.sum(),
            "other_above_none": (wrong - none).sum(),
            "of_text": (exact.right.sum(), text.sum()),
            "variety": (float(distinct(written)), distinct(expected)),
        }
        found |= {f"{LETTERS[number]}_{name}": value for name, value in told.items()}
    return found


def f1(said: Tensor, expected: Tensor, blank: int | None) -> Tensor:
    """Of the tokens of an answer, in any order: (rows, tokens) ids to (rows,). What only fills up does not count."""
    size = int(max(said.max(), expected.max())) + 1
    counts = [F.one_hot(ids, size).sum(1) for ids in (said, expected)]
    if blank is not None and blank < size:
        for count in counts:
            count[:, blank] = 0
    common = torch.minimum(*counts).sum(1)
    return 2 * common / (counts[0].sum(1) + counts[1].sum(1))


def distinct(answers: Tensor) -> int:
    """How many different answers there are: a wire that has collapsed gives few. The host waits for the device."""
    return len(answers.unique(dim=0))


def alike(mine: Read, other: Read) -> tuple[Tensor, int]:
    """Cosine of the wires of neighbouring samples: near 1 they have collapsed into one."""
    return F.cosine_similarity(mine.seen.flatten(1).float(), other.seen.flatten(1).float()).sum(), len(mine.seen)


def compression(data: WireData, shape: WireShape) -> str:
    """How much smaller the wire is than what it carries: bytes of plain text, and tokens of each reader."""
    drawn, readers = data.world.draw(data.split, np.arange(min(len(data), 256))), len(data.tokenizers)
    lengths = np.array([len(word) + 1 for word in data.world.words])
    words, wires = [drawn.context], drawn.context.shape[0]
    if data.mode == "prompt":
        words, wires = [*words * drawn.question.shape[1], drawn.question], drawn.answer.size
    text = sum(float(lengths[some].sum()) for some in words) / wires
    tokens = [sum(tokenizer.encode(some).size for some in words) / wires for tokenizer in data.tokenizers]
    numbers = shape.sent(readers) * shape.width
    ratios = " and ".join(f"{count / shape.read:.1f}" for count in tokens)
    return (
        f"carried: {text:.0f} bytes of text, {' and '.join(f'{count:.0f}' for count in tokens)} tokens\n"
        f"wire: {shape.sent(readers)} vectors, {2 * numbers} bytes in bf16, {numbers} in 8 bits "
        f"({text / (2 * numbers):.2f} and {text / numbers:.2f} bytes of text per byte)\n"
        f"tokens per vector: {ratios}, read by {readers} frozen models"
    )
