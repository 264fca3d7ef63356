"""The training of the readers: once, on questions about text; then they are stored with their digest and stay frozen.

Shapes in comments: N contexts, Q questions each, S tokens of a sequence.
"""

from __future__ import annotations

import fcntl
import hashlib
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

import lockstep
from lockstep.errors import UserError
from lockstep.recipes.latent_wire.data import TOKENIZERS, Tokenizer, WireData
from lockstep.recipes.latent_wire.reader import Reader, ReaderShape
from lockstep.recipes.latent_wire.wire import from_text
from lockstep.recipes.latent_wire.worlds import Drawn, World

VERSION = 3  # the version of the training: part of the key under which a reader is stored
VALIDATION_CONTEXTS = 256
STEPS_PER_DRAW = 16  # steps whose sequences are drawn together


@dataclass(frozen=True)
class TrainingOptions:
    # The training ends when the reader answers this share of the questions, on contexts that it is not trained on.
    accuracy: float = 0.985

    most_steps: int = 1500
    batch: int = 64  # contexts of a step
    lr: float = 3e-3  # falls to a tenth in `most_steps`
    warmup: int = 20  # steps in which the learning rate rises
    easier_first: bool = False  # begin with easier worlds

    # Steps between two validations, and between two saves.
    validate_every: int = 25
    save_every: int = 1000


# ---- stored readers -------------------------------------------------------------------------------------


def frozen_reader(
    folder: Path, shape: ReaderShape, world: World, options: TrainingOptions, device: str | None = None
) -> Reader:
    """Load a reader from `folder` and train it first if it is not there.

    If several processes need it, one trains and the others wait.
    """
    # Everything that changes the weights is part of the name; how often the training saves does not.
    settings = {
        "version": VERSION,
        "shape": asdict(shape),
        "world": {"kind": type(world).__name__, **asdict(world)},
        "training": {key: value for key, value in asdict(options).items() if key != "save_every"},
        "torch": torch.__version__,
    }
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    weights = folder / f"{name}.safetensors"
    about = folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)

    # The random state of the run around must not depend on whether the reader had to be trained.
    with torch.random.fork_rng(), open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        torch.manual_seed(world.seed)
        if not about.exists():
            reader = _new_reader(shape, world)
            facts = ReaderTraining(reader, world, options, folder / f"{name}.training").run()

            save_file({key: tensor.cpu().contiguous() for key, tensor in reader.state_dict().items()}, weights)

            # `about` is written last and atomically: if it exists, the weights are complete.
            draft = about.with_suffix(".tmp")
            draft.write_text(json.dumps({"sha256": _digest(weights), **settings, **facts}, indent=2))
            os.replace(draft, about)

    # Loaded even if it was just trained, so that a new reader and a stored one are the same.
    _check_digest(weights, about)
    reader = _new_reader(shape, world)
    reader.load_state_dict(load_file(weights))
    return reader.freeze(device)


def _new_reader(shape: ReaderShape, world: World) -> Reader:
    return Reader(TOKENIZERS[shape.tokens](world.words).size, shape)


def _check_digest(weights: Path, about: Path) -> None:
    fix = f"remove {about} to train it again; a wire that was trained with the old one does not fit the new one"
    if not weights.exists():
        raise UserError(f"the frozen reader {weights} is missing", "", fix)

    if _digest(weights) != json.loads(about.read_text())["sha256"]:
        raise UserError(
            f"the frozen reader {weights} has changed", "its bytes are not those that were trained (sha256)", fix
        )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- training -------------------------------------------------------------------------------------------


@dataclass
class ReaderProgress:
    step: int = 0
    stage: int = 0  # the world of the curriculum, the easiest first
    accuracy: float = 0.0


class ReaderTraining:
    """Trains a reader on answers to questions about text.

    Its progress is stored in the file `saved`, from which an interrupted training resumes.
    """

    def __init__(self, reader: Reader, world: World, options: TrainingOptions, saved: Path):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.reader = reader.to(self.device)
        self.options = options
        self.saved = saved
        self.worlds = [*world.easier(), world] if options.easier_first else [world]

        self.optimizer = torch.optim.AdamW(reader.parameters(), lr=options.lr, weight_decay=0.01, fused=True)
        # Restores the optimizer, which therefore comes first.
        self.progress = load_progress(reader, self.optimizer, saved)
        self._enter_stage()

    def run(self) -> dict[str, float]:
        """Train until the accuracy is reached. Return the steps and the accuracy."""
        progress = self.progress
        options = self.options
        while progress.step < options.most_steps:
            self._step()

            # A reader that is good enough is finished.
            if progress.step % options.validate_every == 0 and self._validate():
                self.saved.unlink(missing_ok=True)
                return {"steps": progress.step, "text_accuracy": progress.accuracy}

            if progress.step % options.save_every == 0:
                save_progress(self.reader, self.optimizer, progress, self.saved)

        raise UserError(
            f"a reader answers {progress.accuracy:.1%} of questions from the text after {progress.step} steps, and "
            f"should answer {options.accuracy:.1%}",
            f"world {progress.stage + 1} of {len(self.worlds)} ({self.reader.shape})",
            "set more task.reader_steps, or fewer task.facts: in-context lookup among several facts is learned late",
        )

    def _enter_stage(self) -> None:
        world = self.worlds[self.progress.stage]
        tokenizer = TOKENIZERS[self.reader.shape.tokens](world.words)
        self.validation = _validation_batch(world, tokenizer, self.device)
        self.batches = training_batches(world, tokenizer, self.options.batch, self.progress.step, self.device)

        # One graph serves all blocks. The earlier worlds end too soon for compiling to pay off.
        self.in_last_stage = self.progress.stage == len(self.worlds) - 1
        if self.device == "cuda" and self.in_last_stage:
            for block in self.reader.blocks:
                block.compile(dynamic=False)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    def _step(self) -> None:
        with self._autocast():
            loss = sequence_loss(self.reader, *next(self.batches))

        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.reader.parameters(), 1.0)

        # A function of the step alone, so that a resumed training continues with the same rate.
        options = self.options
        step = self.progress.step
        for group in self.optimizer.param_groups:
            group["lr"] = options.lr * min((step + 1) / options.warmup, 1.0) * (1.0 - 0.9 * step / options.most_steps)

        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.step += 1

    def _validate(self) -> bool:
        """Return whether the training is finished. The host waits for the device."""
        # Eagerly: the shapes differ from those in training, and each would be compiled for.
        with self._autocast(), lockstep.run_eagerly(self.reader):
            accuracy = float(from_text(self.reader, self.validation, 0).right.mean())

        self.progress.accuracy = accuracy

        # Only the last world ends the training.
        if self.in_last_stage:
            return accuracy >= self.options.accuracy

        # An easier world needs less.
        if accuracy >= min(0.95, self.options.accuracy):
            self.progress.stage += 1
            self._enter_stage()

        return False


def save_progress(reader: Reader, optimizer: torch.optim.Optimizer, progress: ReaderProgress, path: Path) -> None:
    tensors = {f"reader.{name}": tensor for name, tensor in reader.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{number}.{name}": tensor for name, tensor in state.items()}

    # Replaced atomically, so that a kill while writing leaves the older file.
    draft = path.with_suffix(".tmp")
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(stored, draft, {"progress": json.dumps(asdict(progress))})
    os.replace(draft, path)


def load_progress(reader: Reader, optimizer: torch.optim.Optimizer, path: Path) -> ReaderProgress:
    if not path.exists():
        return ReaderProgress()

    with safe_open(path, "pt") as file:
        progress = json.loads(file.metadata()["progress"])

    # Names are reader.NAME, or adam.PARAMETER.NAME.
    weights = {}
    state = defaultdict(dict)
    for name, tensor in load_file(path).items():
        match name.split("."):
            case ["adam", number, kind]:
                state[int(number)][kind] = tensor
            case _:
                weights[name.removeprefix("reader.")] = tensor

    reader.load_state_dict(weights)
    # The groups stay those of the new optimizer: the learning rate follows from the step.
    optimizer.load_state_dict({"state": dict(state), "param_groups": optimizer.state_dict()["param_groups"]})
    return ReaderProgress(**progress)


# ---- its sequences --------------------------------------------------------------------------------------


def training_batches(
    world: World, tokenizer: Tokenizer, batch: int, first: int, device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids (N, S) and the positions of the answers' tokens in them, step by step from step `first` on.

    The next ones are drawn in a thread while the current ones are trained on. Words become tokens on the device, so
    that the host does not wait.
    """

    def draw(step: int) -> Drawn:
        return world.draw("train", np.arange(step * batch, (step + STEPS_PER_DRAW) * batch))

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(draw, first)

        # Every sequence has the same layout, so the first draw gives it for all.
        columns, positions = (
            torch.from_numpy(indices).to(device) for indices in sequence_layout(coming.result(), tokenizer)
        )
        table = torch.from_numpy(tokenizer.table).to(device)

        while True:
            # The next draw starts before these are used.
            words = torch.from_numpy(sequence_words(coming.result()))
            first += STEPS_PER_DRAW
            coming = pool.submit(draw, first)

            sent = words.pin_memory().to(device, non_blocking=True) if device == "cuda" else words
            ids = F.pad(table[sent].flatten(1)[:, columns], (1, 0))  # 0 begins a sequence
            for step_ids in ids.split(batch):
                yield step_ids, positions


def sequence_words(drawn: Drawn) -> np.ndarray:
    """Return text, question, answer, question, answer, ...: each context is read once for all questions about it."""
    pairs = np.concatenate([drawn.question, drawn.answer[..., None]], -1)  # (N, Q, words)
    return np.concatenate([drawn.context, pairs.reshape(len(pairs), -1)], 1)


def sequence_layout(drawn: Drawn, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return the tensors that are the same in every sequence.

    That is the columns of the tokenizer's table that are tokens (a mark has fewer than a word), and the positions of
    the answers' tokens in a sequence.
    """
    words = sequence_words(drawn)[0]
    # After the context come Q groups of equal length, each ending with its answer.
    answers = np.zeros(len(words), bool)
    answers[drawn.context.shape[1] :].reshape(drawn.answer.shape[1], -1)[:, -1] = True

    used = tokenizer.used(words)  # (words, tokens of a word)
    return np.flatnonzero(used), 1 + np.flatnonzero(np.broadcast_to(answers[:, None], used.shape)[used])


def sequence_loss(reader: Reader, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the mean cross entropy of the answers' tokens, at `positions` of ids (N, S)."""
    logits = reader(reader.embed(ids[:, :-1]))[:, positions - 1]
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, positions].flatten())


def _validation_batch(world: World, tokenizer: Tokenizer, device: str) -> dict[str, Tensor]:
    """Make questions about contexts that are neither trained on nor tested with, two about each."""
    rows = WireData(world, "validation", VALIDATION_CONTEXTS, [tokenizer]).__getitems__(range(VALIDATION_CONTEXTS))
    batch = {"question_0": rows["question_0"][:, :2], "answer_0": rows["answer_0"][:, :2], "text_0": rows["text_0"]}
    return {name: tensor.to(device) for name, tensor in batch.items()}
