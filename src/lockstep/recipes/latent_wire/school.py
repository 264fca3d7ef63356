"""How a reader learns to read: by questions about text, at once or first about shorter ones.

Shapes in comments: N contexts, Q questions each, S tokens of a lesson.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.errors import UserError
from lockstep.recipes.eager import run_eagerly
from lockstep.recipes.latent_wire.data import WireData
from lockstep.recipes.latent_wire.reader import Reader
from lockstep.recipes.latent_wire.tokens import TOKENIZERS, Tokenizer
from lockstep.recipes.latent_wire.wire import from_text
from lockstep.recipes.latent_wire.world import Drawn, World

LOOK_AT = 256  # contexts
PASSED = 0.95  # what lets a reader leave an easier world
AT_ONCE = 16  # steps whose lessons are drawn together


@dataclass(frozen=True)
class Schooling:
    """A reader is trained until it answers `enough` of the questions about unseen contexts right from the text, for at
    most `most_steps`; the rate falls to a tenth in that time."""

    enough: float = 0.985
    most_steps: int = 1500
    batch: int = 64
    rate: float = 3e-3
    warmup: int = 20
    easier_first: bool = False  # or at once in the world that is asked for
    look_every: int = 25
    save_every: int = 1000

    def rate_at(self, step: int) -> float:
        return self.rate * min((step + 1) / self.warmup, 1.0) * (1.0 - 0.9 * step / self.most_steps)


@dataclass
class Progress:
    step: int = 0
    stage: int = 0  # which world, the easiest first
    accuracy: float = 0.0


class School:
    """Trains a reader on answers to questions about the text. What has been reached is kept in the file `kept`, and
    gone on from."""

    def __init__(self, reader: Reader, world: World, schooling: Schooling, kept: Path):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.reader, self.schooling, self.kept = reader.to(self.device), schooling, kept
        self.worlds = [*world.easier(), world] if schooling.easier_first else [world]
        self.optimizer = torch.optim.AdamW(reader.parameters(), lr=schooling.rate, weight_decay=0.01, fused=True)
        self.progress = go_on(reader, self.optimizer, kept)
        self._enter()

    def run(self) -> dict[str, float]:
        now, every = self.progress, self.schooling
        while now.step < every.most_steps:
            self._step()
            if now.step % every.look_every == 0 and self._look():
                self.kept.unlink(missing_ok=True)
                return {"steps": now.step, "text_accuracy": now.accuracy}
            if now.step % every.save_every == 0:
                keep(self.reader, self.optimizer, now, self.kept)
        raise UserError(
            f"a reader that answers {every.enough:.1%} of questions from the text",
            f"{now.accuracy:.1%} after {now.step} steps, in world {now.stage + 1} of {len(self.worlds)} "
            f"({self.reader.shape})",
            "type more task.reader_steps, or fewer task.facts: in-context lookup among several facts is learned late",
        )

    def _enter(self) -> None:
        """The world of the current stage."""
        world = self.worlds[self.progress.stage]
        tokenizer = TOKENIZERS[self.reader.shape.tokens](world.words)
        self.unseen = _unseen(world, tokenizer, self.device)
        self.lessons = lessons_of(world, tokenizer, self.schooling.batch, self.progress.step, self.device)
        if self.device == "cuda" and self._last:
            for block in self.reader.blocks:
                block.compile(dynamic=False)  # one graph for all of them; the worlds before are left too soon

    @property
    def _last(self) -> bool:
        return self.progress.stage == len(self.worlds) - 1

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    def _step(self) -> None:
        with self._autocast():
            cost = lesson_cost(self.reader, *next(self.lessons))
        cost.backward()
        torch.nn.utils.clip_grad_norm_(self.reader.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.schooling.rate_at(self.progress.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.step += 1

    def _look(self) -> bool:
        """Whether the reader has learned enough. The host waits for the device."""
        now, enough = self.progress, self.schooling.enough
        with self._autocast(), run_eagerly(self.reader):  # no second graph for a look
            now.accuracy = float(from_text(self.reader, self.unseen, 0).right.mean())
        if self._last:
            return now.accuracy >= enough
        if now.accuracy >= min(PASSED, enough):
            now.stage += 1
            self._enter()
        return False


def lessons_of(
    world: World, tokenizer: Tokenizer, batch: int, first: int, device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Step by step, from step `first` on: ids (N, S) and the places of the answers' tokens in them. The next ones are
    drawn while those at hand are learned, and become tokens on the device, where nothing makes the host wait."""

    def draw(step: int) -> Drawn:
        return world.draw("train", np.arange(step * batch, (step + AT_ONCE) * batch))

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(draw, first)
        columns, places = (torch.from_numpy(found).to(device) for found in layout(coming.result(), tokenizer))
        table = torch.from_numpy(tokenizer.table).to(device)
        while True:
            words = torch.from_numpy(lesson_words(coming.result()))
            first += AT_ONCE
            coming = pool.submit(draw, first)
            sent = words.pin_memory().to(device, non_blocking=True) if device == "cuda" else words
            ids = F.pad(table[sent].flatten(1)[:, columns], (1, 0))  # 0 begins a sequence
            for part in ids.split(batch):
                yield part, places


def lesson_words(drawn: Drawn) -> np.ndarray:
    """Text, question, answer, question, answer, ...: every context is read once for all questions about it."""
    pairs = np.concatenate([drawn.question, drawn.answer[..., None]], -1)  # (N, Q, words)
    return np.concatenate([drawn.context, pairs.reshape(len(pairs), -1)], 1)


def layout(drawn: Drawn, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """The same in every lesson: which columns of the tokenizer's table are tokens (a mark has fewer than a word), and
    the places of the answers' tokens in a sequence."""
    words, context = lesson_words(drawn)[:1], drawn.context.shape[1]
    answers = np.zeros(words.shape[1], bool)
    answers[context:].reshape(drawn.answer.shape[1], -1)[:, -1] = True
    keep = tokenizer.lengths[words[0]][:, None] > np.arange(tokenizer.table.shape[1])  # (words, tokens of a word)
    return np.flatnonzero(keep), 1 + np.flatnonzero(np.broadcast_to(answers[:, None], keep.shape)[keep])


def lesson_cost(reader: Reader, ids: Tensor, places: Tensor) -> Tensor:
    logits = reader(reader.embed(ids[:, :-1]))[:, places - 1]
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, places].flatten())


def _unseen(world: World, tokenizer: Tokenizer, device: str) -> dict[str, Tensor]:
    """Questions about contexts that are neither trained on nor tested with, two about each."""
    rows = WireData(world, "validation", LOOK_AT, [tokenizer]).__getitems__(range(LOOK_AT))
    asked = {"question_0", "answer_0"}
    return {name: (rows[name][:, :2] if name in asked else rows[name]).to(device) for name in (*asked, "text_0")}


# ---- a school that can be interrupted ----


def keep(reader: Reader, optimizer: torch.optim.Optimizer, progress: Progress, path: Path) -> None:
    tensors = {f"reader.{name}": tensor for name, tensor in reader.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{number}.{name}": tensor for name, tensor in state.items()}
    staged = path.with_suffix(".tmp")
    told = {"progress": json.dumps(asdict(progress))}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, staged, told)
    os.replace(staged, path)


def go_on(reader: Reader, optimizer: torch.optim.Optimizer, path: Path) -> Progress:
    if not path.exists():
        return Progress()
    weights, state = {}, defaultdict(dict)
    with safe_open(path, "pt") as file:
        told = json.loads(file.metadata()["progress"])
    for name, tensor in load_file(path).items():
        part, rest = name.split(".", 1)
        if part == "reader":
            weights[rest] = tensor
        else:
            number, kind = rest.split(".")
            state[int(number)][kind] = tensor
    reader.load_state_dict(weights)
    optimizer.load_state_dict({"state": dict(state), "param_groups": optimizer.state_dict()["param_groups"]})
    return Progress(**told)
