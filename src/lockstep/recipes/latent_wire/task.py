"""The task of latent_wire: train the wire so that two different frozen readers answer from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import UserError
from lockstep.recipes.latent_wire.data import MODES, TOKENIZERS, Tokenizer, WireData, collate
from lockstep.recipes.latent_wire.metrics import LETTERS, compression, evaluation_metrics
from lockstep.recipes.latent_wire.presets import PRESETS
from lockstep.recipes.latent_wire.reader import ReaderShape
from lockstep.recipes.latent_wire.reader_training import TrainingOptions, frozen_reader
from lockstep.recipes.latent_wire.wire import Read, WireModel, WireShape, from_text
from lockstep.recipes.latent_wire.worlds import KINDS, NAMES, FactWorld, TopicWorld, World
from lockstep.recipes.options import OnlyWith, check_options, takes_options, uneven_heads, warn_unused
from lockstep.task import Loss, Task

CHOICES = {"world": ("facts", "topics"), "mode": MODES}
DEFAULT_READERS: list[list[Any]] = [["words", 64, 2, 4], ["pieces", 96, 2, 4]]

# The teacher is softened, and only the first tokens of an answer are compared with it.
TEACHER_TEMPERATURE = 2.0
TEACHER_TOKENS = 4
# Weights of the extra losses.
GIST = 0.1
DRIFT = 0.05

OF_FACTS = ("facts", "questions", "reader_questions", "reader_curriculum")  # options that have no effect on topics


@dataclass(frozen=True, kw_only=True)
class WorldOptions:
    # Contexts are facts or topics.
    world: str = "facts"

    # context, or prompt: the question also goes through the wire.
    mode: str = "context"

    # Facts of a context, and questions about each context.
    facts: int = 1
    questions: int = 2

    # The number of contexts for training and for evaluation, and the seed that they are drawn from.
    size: int = 20_000
    eval_size: int = 512
    world_seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ReaderOptions:
    # The weight of the KL to the reader that sees the text.
    teacher: float = 0.0

    # For each reader [tokens, width, layers, heads], and optionally near. Tokens are words, pieces or bytes.
    readers: list[list[Any]] | None = None

    # They are trained on text until they reach this accuracy, for at most this many steps.
    reader_accuracy: float = 0.985
    reader_steps: int = 1500

    # Contexts of a step, the learning rate, and questions about each context (None: as many as for the wire).
    reader_batch: int = 64
    reader_rate: float = 3e-3
    reader_questions: int | None = None

    # Train on one fact first, then on two, then on four.
    reader_curriculum: bool = False

    # The device of each reader, if not this rank's (cuda:1, cpu).
    reader_homes: list[str] | None = None

    # The folder of trained readers.
    frozen: str = "runs/latent_wire/frozen"

    def training(self) -> TrainingOptions:
        return TrainingOptions(
            accuracy=self.reader_accuracy,
            most_steps=self.reader_steps,
            batch=self.reader_batch,
            lr=self.reader_rate,
            warmup=max(20, self.reader_steps // 80),
            easier_first=self.reader_curriculum,
        )


class LatentWire(Task):
    """Bytes of a text -> M vectors -> two frozen language models answer questions about the text.

    The loss is the mean over questions of the readers' cross entropies, added. `a_exact` and `b_exact` are the shares
    of answers that are entirely right, `*_f1` the tokens that are right; `*_text` reads the text itself, `*_replay` its
    embeddings instead of the wire, `*_none` no context, `*_cut` as many tokens of text as the wire has vectors, and
    `*_other` a wire that carries another sample's context.
    """

    unit = "question"
    defaults = {
        "preset": "cpu",
        "clip": {"norm": 1.0},
        "lr": {"schedule": "cosine", "min_ratio": 0.05},
        "checkpoint": {"frozen": False},  # readers stay in their folder; a checkpoint has their digests
    }
    presets = PRESETS
    frozen_advice = (
        "set task.frozen to the folder with the readers of that run; a run from before 2026-11-15 resumes only with "
        "the Lockstep that wrote it: since then readers are trained otherwise, and on other contexts"
    )
    option_rules = (
        OnlyWith(OF_FACTS, "world", ("facts",), found="sentences without facts, and one question about each"),
        OnlyWith(("reader_curriculum",), "facts", never=(1,), found="nothing easier to begin with"),
    )

    collate = staticmethod(collate)

    @takes_options(WorldOptions, WireShape, ReaderOptions)
    def __init__(self, questions: WorldOptions, wire: WireShape, readers: ReaderOptions):
        options = vars(questions) | vars(wire) | vars(readers)
        warn_unused(LatentWire, self.option_rules, options)
        self.questions = questions
        self.world: World = FactWorld(questions.facts, questions.questions, questions.world_seed)

        # A preset may hold options of facts for a world of topics.
        if questions.world == "topics":
            self.world = TopicWorld(questions.world_seed)
            readers = replace(readers, reader_questions=None, reader_curriculum=False)

        self.shape = wire
        self.teacher = readers.teacher
        self.reader_folder = Path(readers.frozen)
        self.reader_training = readers.training()
        self.reader_questions = readers.reader_questions or self.world.questions

        shapes = DEFAULT_READERS if readers.readers is None else readers.readers
        wrong_readers = _reader_problems(shapes, readers.reader_homes, wire.latent_adapter or [])
        check_options(options, [*self._world_problems(), *_shape_problems(wire), *wrong_readers], CHOICES)
        self.readers = [ReaderShape(*shape) for shape in shapes]
        self.devices: list[str | None] = [*readers.reader_homes] if readers.reader_homes else [None] * len(shapes)

    # ---- what to train ----

    def model(self) -> WireModel:
        # The readers may be trained with more questions about a context than the wire.
        world = replace(self.world, questions=self.reader_questions)
        readers = [
            frozen_reader(self.reader_folder, shape, world, self.reader_training, device)
            for shape, device in zip(self.readers, self.devices, strict=True)
        ]

        # Texts of a world have the same number of tokens, so the first one tells all.
        sample = self.data()[0]
        return WireModel(self.shape, readers, [len(sample[f"text_{number}"]) for number in range(len(readers))])

    def data(self) -> WireData:
        return WireData(self.world, "train", self.questions.size, self._tokenizers(), self.questions.mode)

    def eval_data(self) -> WireData:
        return WireData(self.world, "test", self.questions.eval_size, self._tokenizers(), self.questions.mode)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01, fused=True)

    def _tokenizers(self) -> list[Tokenizer]:
        return [TOKENIZERS[shape.tokens](self.world.words) for shape in self.readers]

    # ---- the loss ----

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        total, rows, _ = self._total(model, batch)
        return Loss(total, rows)

    def eval_loss(self, model: Any, batch: dict[str, Tensor]) -> Loss:
        blanks = [tokenizer.blank for tokenizer in self._tokenizers()]
        # Each question is put in six ways, and each has another length: compiling for all would take too long.
        with lockstep.run_eagerly(model):
            total, rows, reads = self._total(model, batch, write=True)
            metrics = evaluation_metrics(list(model.readers), batch, reads, model(batch, "other"), blanks, self.shape)

        return Loss(total, rows, metrics)

    def show(self, model: nn.Module) -> str:
        return compression(self.eval_data(), self.shape)

    def _total(self, model: Any, batch: dict[str, Tensor], write: bool = False) -> tuple[Tensor, int, list[Read]]:
        """Return the loss as a sum over questions, their number, and what each reader made of the batch."""
        reads = model(batch, write=write)
        rows = len(reads[0].answered.cost)
        device = batch["context"].device
        total = torch.zeros((), device=device)

        for number, read in enumerate(reads):
            total = total + read.answered.cost.sum().to(device) + DRIFT * rows * read.drift.to(device)

            # A mean over wires: there may be fewer of them than questions.
            if read.gist is not None:
                total = total + GIST * rows * read.gist.mean().to(device)
            if self.teacher and torch.is_grad_enabled():
                total = total + self.teacher * self._from_teacher(model, batch, number, read).to(device)

        return total, rows, reads

    def _from_teacher(self, model: Any, batch: dict[str, Tensor], number: int, read: Read) -> Tensor:
        """Return KL(teacher || student), summed over rows. The teacher is the same reader with the text before it."""
        # The gradient of a softened KL shrinks with the square of the temperature, which the last factor undoes.
        taught = from_text(model.readers[number], batch, number).logits[:, :TEACHER_TOKENS] / TEACHER_TEMPERATURE
        student = read.answered.logits[:, :TEACHER_TOKENS] / TEACHER_TEMPERATURE
        kl = nn.functional.kl_div(student.log_softmax(-1), taught.log_softmax(-1), reduction="none", log_target=True)
        return kl.sum(-1).mean(1).sum() * TEACHER_TEMPERATURE**2

    # ---- wrong options ----

    def _world_problems(self) -> Iterator[UserError]:
        if isinstance(self.world, TopicWorld):
            return

        facts = self.world.facts
        if not 1 <= facts <= len(NAMES):
            yield UserError(f"task.facts={facts} is not between 1 and {len(NAMES)}", "", "set task.facts=1")
            return

        most = KINDS * facts
        for name, count in (("questions", self.world.questions), ("reader_questions", self.reader_questions)):
            if not 1 <= count <= most:
                yield UserError(
                    f"task.{name}={count} is not between 1 and {most}",
                    f"a context with task.facts={facts} has {most} different questions",
                    f"set task.{name}={most} or less",
                )


def _shape_problems(shape: WireShape) -> Iterator[UserError]:
    yield from uneven_heads(shape.width, shape.heads)
    for name in ("private", "lora", "near"):
        if getattr(shape, name) < 0:
            yield UserError(f"task.{name}={getattr(shape, name)} is negative", "", f"set task.{name}=0 for none")

    looks = shape.latent_adapter or []
    if len(set(looks)) < len(looks):
        yield UserError(f"task.latent_adapter={looks} names a layer twice", "", "name each layer once")


def _reader_problems(readers: list[list[Any]], devices: list[str] | None, looks: list[int]) -> Iterator[UserError]:
    if not 1 <= len(readers) <= len(LETTERS):
        yield UserError(f"task.readers has {len(readers)} readers, and one or two are supported", "", "give one or two")

    for shape in readers:
        if not _is_reader(shape):
            yield UserError(
                f"the reader {shape} is not [tokens, width, layers, heads] or [tokens, width, layers, heads, near]",
                f"tokens are one of {', '.join(TOKENIZERS)}, and the width is a multiple of twice the heads",
                f"set task.readers='{json.dumps(DEFAULT_READERS)}'",
            )

    layers = min((shape[2] for shape in readers if _is_reader(shape)), default=None)
    if layers is not None and not all(0 <= layer < layers for layer in looks):
        yield UserError(
            f"task.latent_adapter={looks} names a layer that a reader does not have",
            f"a reader with the layers 0 to {layers - 1}",
            f"set task.latent_adapter='[{layers - 1}]'",
        )

    if devices is not None and len(devices) != len(readers):
        yield UserError(
            f"task.reader_homes={devices} has {len(devices)} devices for {len(readers)} readers",
            "",
            "give one device for each reader",
        )


def _is_reader(shape: list[Any]) -> bool:
    tokens, *sizes = shape or [None]
    if tokens not in TOKENIZERS or len(sizes) not in (3, 4) or not all(isinstance(size, int) for size in sizes):
        return False

    width, _, heads = sizes[:3]
    return min(sizes[:3]) > 0 and min(sizes) >= 0 and width % (2 * heads) == 0
