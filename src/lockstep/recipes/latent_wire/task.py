"""The task: train the wire so that two different frozen readers answer from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ConfigError, UserError
from lockstep.recipes.latent_wire.frozen import Schooling, frozen_reader
from lockstep.recipes.latent_wire.reader import Reader, ReaderShape
from lockstep.recipes.latent_wire.wire import Read, WireModel, WireShape, from_text
from lockstep.recipes.latent_wire.world import NAMES, TOKENIZERS, FactData, FactWorld, Tokenizer
from lockstep.task import Loss, Task

LETTERS = "ab"  # the readers' names
TEACHER_TEMPERATURE, TEACHER_TOKENS = 2.0, 4
GIST, DRIFT = 0.1, 0.05  # weights of the extra costs


class LatentWire(Task):
    """Bytes of facts -> M vectors -> two frozen language models answer questions about the facts.

    The loss is the mean over questions of the readers' cross entropies, added. `a_exact` and `b_exact` are the shares
    of whole answers that are right; `*_text` reads the text itself, `*_none` no context, `*_cut` as many tokens of text
    as the wire has vectors, `*_other` a wire that carries another sample's facts.
    """

    unit = "question"
    defaults = {
        "preset": "cpu",
        "clip": {"norm": 1.0},
        "lr": {"schedule": "cosine", "min_ratio": 0.05},
        "checkpoint": {"frozen": False},  # readers are kept where they were trained; a checkpoint has their digests
    }
    presets = {
        "tiny": {
            "steps": 20,
            "global_batch": 16,
            "lr": {"peak": 2e-3, "warmup": 5},
            "evaluate": {"every": 20, "batch": 32},
            "task": {
                "size": 512, "eval_size": 64, "width": 32,
                "readers": [["words", 32, 1, 2], ["pieces", 48, 1, 2]], "reader_accuracy": 0.0,
            },
        },
        "cpu": {
            "steps": 400,
            "global_batch": 64,
            "lr": {"peak": 1e-3, "warmup": 50},
            "evaluate": {"every": 100, "batch": 128},
            "goals": [
                "a_exact >= 0.90", "b_exact >= 0.90", "a_text >= 0.98", "b_text >= 0.98", "a_none <= 0.25",
                "b_none <= 0.25", "a_other_above_none <= 0.05", "b_other_above_none <= 0.05",
            ],
            "task": {},
        },
        "gpu": {
            "steps": 10_000,
            "global_batch": 512,
            "lr": {"peak": 3e-4, "warmup": 500},
            "data": {"workers": 8},  # a sample takes longer to write than to read
            "evaluate": {"every": 500, "batch": 512},
            "task": {
                "facts": 4, "vectors": 8, "width": 256, "layers": 6, "heads": 8, "size": 4_000_000, "eval_size": 2048,
                "readers": [["words", 256, 6, 8], ["bytes", 384, 4, 8]], "reader_steps": 20_000, "teacher": 1.0,
            },
        },
    }  # fmt: skip

    def __init__(
        self,
        *,
        facts: int = 1,
        questions: int = 2,
        vectors: int = 2,
        width: int = 64,
        layers: int = 1,
        heads: int = 4,
        refiner: int = 0,
        deep_prefix: bool = False,
        gist: bool = False,
        film: bool = False,
        teacher: float = 0.0,
        size: int = 20_000,
        eval_size: int = 512,
        readers: list[list[Any]] | None = None,
        reader_steps: int = 1500,
        reader_accuracy: float = 0.985,
        reader_homes: list[str] | None = None,
        frozen: str = "runs/latent_wire/frozen",
        world_seed: int = 0,
    ):
        """`readers`: for each its tokens (words, pieces, bytes), width, layers and heads; trained on text until
        `reader_accuracy`, for at most `reader_steps`, and kept in `frozen`. `reader_homes`: the device of each, if not
        this rank's (cuda:1, cpu). `refiner` layers over the wire, `deep_prefix` keys and values for every layer of a
        reader, `gist` its text rebuilt, `film` a scale and shift by the wire; `teacher`: weight of the KL to the
        reader that sees the text."""
        self.world = FactWorld(facts, questions, world_seed)
        self.shape = WireShape(width, vectors, layers, heads, refiner, deep_prefix, gist, film)
        given = readers or [["words", 64, 2, 4], ["pieces", 96, 2, 4]]
        self.teacher, self.size, self.eval_size = teacher, size, eval_size
        self.schooling, self.frozen = Schooling(reader_accuracy, reader_steps), Path(frozen)
        self._check(given, reader_homes)
        self.readers = [ReaderShape(*shape) for shape in given]
        self.homes: list[str | None] = list(reader_homes) if reader_homes else [None] * len(given)

    def model(self) -> WireModel:
        readers = [
            frozen_reader(self.frozen, shape, self.world, self.schooling, home)
            for shape, home in zip(self.readers, self.homes, strict=True)
        ]
        lengths = [self.data()[0][f"text_{number}"].shape[0] for number in range(len(readers))]
        return WireModel(self.shape, readers, lengths)

    def data(self) -> FactData:
        return FactData(self.world, "train", self.size, self._tokenizers())

    def eval_data(self) -> FactData:
        return FactData(self.world, "test", self.eval_size, self._tokenizers())

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01, fused=True)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        total, rows, _ = self._cost(model, batch)
        return Loss(total, rows)

    def eval_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        total, rows, through_wire = self._cost(model, batch)
        of_another = model(batch, "other")
        metrics: dict[str, Tensor] = {}
        for number, reader in enumerate(_readers(model)):
            name = LETTERS[number]
            exact, other = through_wire[number].answered, of_another[number].answered
            none = from_text(reader, batch, number, most=0)
            metrics |= {
                f"{name}_exact": exact.right.sum(),
                f"{name}_first": exact.first.sum(),
                f"{name}_text": from_text(reader, batch, number).right.sum(),
                f"{name}_none": none.right.sum(),
                f"{name}_cut": from_text(reader, batch, number, most=self.shape.vectors).right.sum(),
                f"{name}_other": other.right.sum(),
                f"{name}_other_above_none": (other.right - none.right).sum(),
            }
        return Loss(total, rows, {**metrics, "alike": self._alike(model, batch)})

    def show(self, model: nn.Module) -> str:
        """How much smaller the wire is than what it carries."""
        sample = self.data()[0]
        text, wire = sample["context"].numel(), self.shape.vectors * self.shape.width * 2
        tokens = " and ".join(str(sample[f"text_{n}"].numel()) for n in range(len(self.readers)))
        return (
            f"context: {text} bytes, {tokens} tokens; wire: {self.shape.vectors} vectors "
            f"({wire} bytes in bf16), read by {len(self.readers)} frozen models"
        )

    def _cost(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, list[Read]]:
        """The sum over questions, their number, and what each reader said."""
        read = model(batch)
        rows, asked = read[0].answered.cost.shape[0], self.world.questions
        device = batch["context"].device
        total = torch.zeros((), device=device)
        for number, one in enumerate(read):
            total = total + one.answered.cost.sum().to(device) + DRIFT * rows * one.drift.to(device)
            if one.gist is not None:
                total = total + GIST * asked * one.gist.sum().to(device)
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

    def _alike(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        """Cosine of the wires of neighbouring samples: near 1 they have collapsed into one."""
        wire: WireModel = model  # pyrefly: ignore[bad-assignment]
        mine, other = (wire.latents(batch[name]).flatten(1).float() for name in ("context", "other"))
        return F.cosine_similarity(mine, other).sum(), len(mine)

    def _tokenizers(self) -> list[Tokenizer]:
        return [TOKENIZERS[shape.tokens]() for shape in self.readers]

    def _check(self, readers: list[list[Any]], homes: list[str] | None) -> None:
        problems = []
        world = self.world
        if not 1 <= world.facts <= len(NAMES):
            problems.append(
                UserError(f"task.facts={world.facts}", f"{len(NAMES)} people to tell of", "type task.facts=1")
            )
        elif not 1 <= world.questions <= 4 * world.facts:
            problems.append(
                UserError(
                    f"task.questions={world.questions}",
                    f"{4 * world.facts} different questions about {world.facts} facts",
                    f"type task.questions={4 * world.facts} or less",
                )
            )
        if self.shape.heads < 1 or self.shape.width % (2 * self.shape.heads):
            problems.append(
                UserError(
                    f"task.width={self.shape.width} with task.heads={self.shape.heads}",
                    "each head needs the same even number of channels",
                    "type a task.width that is a multiple of twice task.heads",
                )
            )
        if not 1 <= len(readers) <= len(LETTERS):
            problems.append(UserError(f"{len(readers)} readers", "one or two are supported", "give one or two"))
        for shape in readers:
            if len(shape) != 4 or shape[0] not in TOKENIZERS or min(shape[1:]) < 1 or shape[1] % (2 * shape[3]):
                example = '[["words", 64, 2, 4], ["pieces", 96, 2, 4]]'
                problems.append(
                    UserError(
                        f"a reader {shape}",
                        f"not [tokens, width, layers, heads], tokens of {', '.join(TOKENIZERS)}, "
                        "width a multiple of twice the heads",
                        f"type task.readers='{example}'",
                    )
                )
        if homes is not None and len(homes) != len(readers):
            problems.append(
                UserError(f"task.reader_homes={homes}", f"{len(readers)} readers", "give one device for each reader")
            )
        if problems:
            raise ConfigError(problems)


def _readers(model: nn.Module) -> list[Reader]:
    return list(model.readers)  # pyrefly: ignore[bad-argument-type, bad-return]
