"""The readers' weights: trained once on text, kept with their digest, and never changed again."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import default_collate

from lockstep.errors import UserError
from lockstep.recipes.latent_wire.reader import Answered, Reader, ReaderShape, answer
from lockstep.recipes.latent_wire.world import TOKENIZERS, FactData, FactWorld

BATCH, LOOK_EVERY, LOOK_AT = 64, 25, 256
VERSION = 1  # of how they are trained


@dataclass(frozen=True)
class Schooling:
    """How a reader is trained: until it answers `enough` of the questions about unseen facts right from the text."""

    enough: float = 0.985
    most_steps: int = 1500


def frozen_reader(
    folder: Path, shape: ReaderShape, world: FactWorld, schooling: Schooling, home: str | None = None
) -> Reader:
    """From `folder`; trained first if it is not there. Of several processes one trains, the others wait."""
    settings = {
        "version": VERSION,
        "shape": asdict(shape),
        "world": asdict(world),
        "enough": schooling.enough,
        "torch": torch.__version__,
    }
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    weights, about = folder / f"{name}.safetensors", folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(), _alone(folder / f"{name}.lock"):
        torch.manual_seed(world.seed)
        reader = Reader(TOKENIZERS[shape.tokens]().size, shape)
        if not about.exists():
            facts = train(reader, world, schooling)
            save_file({key: tensor.cpu().contiguous() for key, tensor in reader.state_dict().items()}, weights)
            staged = about.with_suffix(".tmp")
            staged.write_text(json.dumps({"sha256": _digest(weights), **settings, **facts}, indent=2))
            os.replace(staged, about)
    _check(weights, about)
    reader.cpu().load_state_dict(load_file(weights))
    return reader.settle(home)


def train(reader: Reader, world: FactWorld, schooling: Schooling) -> dict[str, float]:
    """On answers to questions about the text."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = TOKENIZERS[reader.shape.tokens]()
    optimizer = torch.optim.AdamW(reader.to(device).parameters(), lr=3e-3, weight_decay=0.01)
    training = FactData(world, "train", 10**9, [tokenizer])
    test = _rows(FactData(world, "test", LOOK_AT, [tokenizer]), range(LOOK_AT), device)
    accuracy = 0.0
    for step in range(schooling.most_steps):
        rows = _rows(training, range(step * BATCH, (step + 1) * BATCH), device)
        optimizer.zero_grad()
        read(reader, rows).cost.mean().backward()
        torch.nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % LOOK_EVERY == 0:
            with torch.no_grad():
                accuracy = float(read(reader, test).right.mean())
            if accuracy >= schooling.enough:
                return {"steps": step + 1, "text_accuracy": accuracy}
    raise UserError(
        f"a reader that answers {schooling.enough:.1%} of questions from the text",
        f"{accuracy:.1%} after {schooling.most_steps} steps ({reader.shape})",
        "type more task.reader_steps, or fewer task.facts: in-context lookup among several facts is learned late",
    )


def read(reader: Reader, rows: dict[str, Tensor]) -> Answered:
    """Questions with the text before them: what the wire is measured against."""
    text, question = rows["text_0"], rows["question_0"]
    count, asked = question.shape[:2]
    before = torch.cat((reader.beginning(count), reader.embed(text)), 1)
    return answer(reader, before.repeat_interleave(asked, 0), question.flatten(0, 1), rows["answer_0"].flatten(0, 1))


def _rows(data: FactData, ids: range, device: str) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in default_collate([data[i] for i in ids]).items()}


def _check(weights: Path, about: Path) -> None:
    expected = json.loads(about.read_text())["sha256"]
    if not weights.exists() or _digest(weights) != expected:
        raise UserError(
            f"the frozen reader {weights}",
            "its bytes are not those that were trained (sha256)" if weights.exists() else "the file is gone",
            f"remove {about} to train it again; a wire that was trained with the old one does not fit the new one",
        )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
