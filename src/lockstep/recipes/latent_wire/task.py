"""The task: train the wire so that two different frozen readers answer from it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ConfigError, UserError
from lockstep.recipes.eager import run_eagerly
from lockstep.recipes.latent_wire.data import MODES, WireData, collate
from lockstep.recipes.latent_wire.frozen import frozen_reader
from lockstep.recipes.latent_wire.measures import LETTERS, compression, table
from lockstep.recipes.latent_wire.presets import PRESETS
from lockstep.recipes.latent_wire.reader import Reader, ReaderShape
from lockstep.recipes.latent_wire.school import Schooling
from lockstep.recipes.latent_wire.tokens import TOKENIZERS, Tokenizer
from lockstep.recipes.latent_wire.topics import TopicWorld
from lockstep.recipes.latent_wire.wire import Read, WireModel, WireShape, from_text
from lockstep.recipes.latent_wire.world import KINDS, NAMES, FactWorld
from lockstep.task import Loss, OnlyWith, Task, without_effect

TEACHER_TEMPERATURE, TEACHER_TOKENS = 2.0, 4
WORLDS = ("facts", "topics")
GIST, DRIFT = 0.1, 0.05  # weights of the extra costs
OF_FACTS = ("facts", "questions", "reader_questions", "reader_curriculum")


class LatentWire(Task):
    """Bytes of a text -> M vectors -> two frozen language models answer questions about the text.

    The loss is the mean over questions of the readers' cross entropies, added. `a_exact` and `b_exact` are the shares
    of whole answers that are right, `*_f1` the tokens that are; `*_text` reads the text itself, `*_replay` its
    embeddings in place of the wire, `*_none` no context, `*_cut` as many tokens of text as the wire has vectors,
    `*_other` a wire that carries another sample's context.
    """

    unit = "question"
    defaults = {
        "preset": "cpu",
        "clip": {"norm": 1.0},
        "lr": {"schedule": "cosine", "min_ratio": 0.05},
        "checkpoint": {"frozen": False},  # readers are kept where they were trained; a checkpoint has their digests
    }
    presets = PRESETS
    frozen_advice = (
        "set task.frozen to the folder with the readers of that run; one from before 2026-11-15 goes on only with the "
        "Lockstep that wrote it: since then readers are trained otherwise, and on other contexts"
    )
    option_rules = (
        OnlyWith(OF_FACTS, "world", ("facts",), found="sentences without facts, and one question about each"),
        OnlyWith(("reader_curriculum",), "facts", never=(1,), found="nothing easier to begin with"),
    )

    def __init__(
        self,
        *,
        world: str = "facts",
        mode: str = "context",
        facts: int = 1,
        questions: int = 2,
        vectors: int = 2,
        private: int = 0,
        width: int = 64,
        layers: int = 1,
        heads: int = 4,
        near: int = 0,
        spread: bool = False,
        refiner: int = 0,
        deep_prefix: bool = False,
        latent_adapter: list[int] | None = None,
        lora: int = 0,
        gist: bool = False,
        film: bool = False,
        colour: bool = False,
        teacher: float = 0.0,
        size: int = 20_000,
        eval_size: int = 512,
        readers: list[list[Any]] | None = None,
        reader_steps: int = 1500,
        reader_accuracy: float = 0.985,
        reader_batch: int = 64,
        reader_rate: float = 3e-3,
        reader_questions: int | None = None,
        reader_curriculum: bool = False,
        reader_homes: list[str] | None = None,
        frozen: str = "runs/latent_wire/frozen",
        world_seed: int = 0,
    ):
        """`world`: facts, of which there are `facts` in a context, with `questions` about each; or topics. `mode`:
        context, or prompt: the question goes through the wire, too. `vectors` for all readers, and `private` ones for
        each. `near`: how many positions a layer of the encoder mixes before it attends; `spread`: each vector sees a
        part of the text best. `refiner` layers over the wire, `deep_prefix` keys and values for every layer of a
        reader, `latent_adapter` its layers that look at the wire, `lora` the rank of a change to its attention, `gist`
        its text rebuilt, `film` a scale and shift by the wire, `colour` those of its embeddings; `teacher`: weight of
        the KL to the reader that sees the text.
        `readers`: for each its tokens (words, pieces, bytes), width, layers, heads, and, if not none, how many
        positions near each other a layer mixes; trained on text until `reader_accuracy`, for at most `reader_steps` of
        `reader_batch` contexts with `reader_questions` questions (`reader_curriculum`: about one fact first, then two,
        then four), and kept in `frozen`. `reader_homes`: the device of each, if not this rank's (cuda:1, cpu)."""
        idle = without_effect(self, LatentWire, locals())
        self.kind, self.mode = world, mode
        self.world = TopicWorld(world_seed) if world == "topics" else FactWorld(facts, questions, world_seed)
        looks = tuple(latent_adapter or ())
        self.shape = WireShape(
            width, vectors, layers, heads, refiner, deep_prefix, gist, film, colour, private, looks, lora, near, spread
        )
        given = readers if readers is not None else [["words", 64, 2, 4], ["pieces", 96, 2, 4]]
        self.teacher, self.size, self.eval_size = teacher, size, eval_size
        warmup = max(20, reader_steps // 80)
        self.schooling = Schooling(reader_accuracy, reader_steps, reader_batch, reader_rate, warmup, reader_curriculum)
        self.frozen = Path(frozen)
        self.school_questions = reader_questions or self.world.questions
        self._check([*idle, *wrong_readers(given, reader_homes, looks)])
        self.readers = [ReaderShape(*shape) for shape in given]
        self.homes: list[str | None] = list(reader_homes) if reader_homes else [None] * len(given)

    def model(self) -> WireModel:
        school = replace(self.world, questions=self.school_questions)
        readers = [
            frozen_reader(self.frozen, shape, school, self.schooling, home)
            for shape, home in zip(self.readers, self.homes, strict=True)
        ]
        lengths = [self.data()[0][f"text_{number}"].shape[0] for number in range(len(readers))]
        return WireModel(self.shape, readers, lengths)

    def data(self) -> WireData:
        return WireData(self.world, "train", self.size, self._tokenizers(), self.mode)

    def eval_data(self) -> WireData:
        return WireData(self.world, "test", self.eval_size, self._tokenizers(), self.mode)

    def collate(self, samples: Any) -> dict[str, Tensor]:
        return collate(samples)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01, fused=True)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        total, rows, _ = self._cost(model, batch)
        return Loss(total, rows)

    def eval_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        blanks = [tokenizer.blank for tokenizer in self._tokenizers()]
        with run_eagerly(model):  # six ways to ask, each of another length
            total, rows, mine = self._cost(model, batch, write=True)
            return Loss(total, rows, table(_readers(model), batch, mine, model(batch, "other"), blanks, self.shape))

    def show(self, model: nn.Module) -> str:
        """How much smaller the wire is than what it carries."""
        return compression(self.eval_data(), self.shape)

    def _cost(self, model: nn.Module, batch: dict[str, Tensor], write: bool = False) -> tuple[Tensor, int, list[Read]]:
        """The sum over questions, their number, and what each reader said."""
        read = model(batch, write=write)
        rows = read[0].answered.cost.shape[0]
        device = batch["context"].device
        total = torch.zeros((), device=device)
        for number, one in enumerate(read):
            total = total + one.answered.cost.sum().to(device) + DRIFT * rows * one.drift.to(device)
            if one.gist is not None:
                total = total + GIST * rows * one.gist.mean().to(device)  # of wires, which may be fewer than questions
            if self.teacher and torch.is_grad_enabled():
                total = total + self.teacher * self._from_teacher(model, batch, number, one).to(device)
        return total, rows, read

    def _from_teacher(self, model: nn.Module, batch: dict[str, Tensor], number: int, one: Read) -> Tensor:
        """KL(teacher || student), the teacher being the same reader with the text before it, on the first tokens of the
        answers; a sum over rows."""
        reader = list(_readers(model))[number]
        taught = from_text(reader, batch, number).logits[:, :TEACHER_TOKENS] / TEACHER_TEMPERATURE
        said = one.answered.logits[:, :TEACHER_TOKENS] / TEACHER_TEMPERATURE
        kl = F.kl_div(said.log_softmax(-1), taught.log_softmax(-1), reduction="none", log_target=True)
        return kl.sum(-1).mean(1).sum() * TEACHER_TEMPERATURE**2

    def _tokenizers(self) -> list[Tokenizer]:
        return [TOKENIZERS[shape.tokens](self.world.words) for shape in self.readers]

    def _check(self, others: list[UserError]) -> None:
        """Every wrong option at once."""
        if problems := [*self._wrong_world(), *self._wrong_shape(), *others]:
            raise ConfigError(problems)

    def _wrong_world(self) -> Iterator[UserError]:
        for option, value, known in (("world", self.kind, WORLDS), ("mode", self.mode, MODES)):
            if value not in known:
                near = difflib.get_close_matches(value, known, 1, 0.0)[0]
                yield UserError(f"task.{option}={value}", f"known are {', '.join(known)}", f"type task.{option}={near}")
        if isinstance(self.world, TopicWorld):
            return
        if not 1 <= self.world.facts <= len(NAMES):
            yield UserError(f"task.facts={self.world.facts}", f"{len(NAMES)} people to tell of", "type task.facts=1")
            return
        most = KINDS * self.world.facts
        for option, count in (("questions", self.world.questions), ("reader_questions", self.school_questions)):
            if not 1 <= count <= most:
                yield UserError(
                    f"task.{option}={count}",
                    f"{most} different questions about {self.world.facts} facts",
                    f"type task.{option}={most} or less",
                )

    def _wrong_shape(self) -> Iterator[UserError]:
        shape = self.shape
        if shape.heads < 1 or shape.width % (2 * shape.heads):
            yield UserError(
                f"task.width={shape.width} with task.heads={shape.heads}",
                "each head needs the same even number of channels",
                "type a task.width that is a multiple of twice task.heads",
            )
        for option, count in (("private", shape.private), ("lora", shape.rank), ("near", shape.near)):
            if count < 0:
                yield UserError(f"task.{option}={count}", "less than nothing", f"type task.{option}=0 for none")
        if len(set(shape.looks)) < len(shape.looks):
            yield UserError(f"task.latent_adapter={list(shape.looks)}", "a layer twice", "name each layer once")


def wrong_readers(readers: list[list[Any]], homes: list[str] | None, looks: tuple[int, ...]) -> Iterator[UserError]:
    if not 1 <= len(readers) <= len(LETTERS):
        yield UserError(f"task.readers with {len(readers)} of them", "one or two are supported", "give one or two")
    for shape in readers:
        if not _fits(shape):
            example = '[["words", 64, 2, 4], ["pieces", 96, 2, 4]]'
            yield UserError(
                f"a reader {shape}",
                f"not [tokens, width, layers, heads] or [.., near], tokens of {', '.join(TOKENIZERS)}, "
                "width a multiple of twice the heads",
                f"type task.readers='{example}'",
            )
    layers = min((shape[2] for shape in readers if _fits(shape)), default=None)
    if layers is not None and not all(0 <= layer < layers for layer in looks):
        yield UserError(
            f"task.latent_adapter={list(looks)}",
            f"a reader with the layers 0 to {layers - 1}",
            f"type task.latent_adapter='[{layers - 1}]'",
        )
    if homes is not None and len(homes) != len(readers):
        yield UserError(f"task.reader_homes={homes}", f"{len(readers)} readers", "give one device for each reader")


def _fits(shape: list[Any]) -> bool:
    tokens, *sizes = shape or [None]
    if tokens not in TOKENIZERS or len(sizes) not in (3, 4) or not all(isinstance(size, int) for size in sizes):
        return False
    return min(sizes[:3]) > 0 and min(sizes) >= 0 and sizes[0] % (2 * sizes[2]) == 0


def _readers(model: nn.Module) -> list[Reader]:
    return list(model.readers)  # pyrefly: ignore[bad-argument-type, bad-return]
