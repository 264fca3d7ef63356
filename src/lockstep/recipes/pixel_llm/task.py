"""The task: describe a generated scene in words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, default_collate

from lockstep.errors import ConfigError, UserError
from lockstep.recipes.eager import run_eagerly
from lockstep.recipes.options import OnlyWith, warn_unused
from lockstep.recipes.pixel_llm.generation import generate
from lockstep.recipes.pixel_llm.model import Captioner, Sizes
from lockstep.recipes.pixel_llm.presets import PRESETS
from lockstep.recipes.pixel_llm.scenes import COMP, IID, KINDS, SLOTS, TRAIN, Sample, ShapeScenes
from lockstep.recipes.pixel_llm.words import PAD, Words
from lockstep.task import Loss, Metric, Task

if TYPE_CHECKING:  # a command too: `python -m` warns of a module that its package has imported already
    from lockstep.recipes.pixel_llm.folder import ImageFolder


OF_SCENES = ("scenes", "train_size", "eval_size", "data_seed", "unrelated_captions")


class PixelLLM(Task):
    """Captions for pictures of shapes; its loss is in nats per word."""

    unit = "word"
    defaults = {
        "preset": "cpu",
        "clip": {"norm": 1.0},
        "lr": {"schedule": "cosine", "min_ratio": 0.05},
    }
    presets = PRESETS
    option_rules = (
        OnlyWith(OF_SCENES, "folder", (None,), found="a folder with pictures and captions of its own"),
        OnlyWith(("patch",), "stem", ("patch",), found="convolutions, whose tokens are 8 pixels wide"),
    )

    def __init__(
        self,
        *,
        scenes: str = "one",
        image: int = 32,
        stem: str = "conv",
        patch: int = 8,
        width: int = 96,
        heads: int = 4,
        vision_layers: int = 2,
        text_layers: int = 2,
        vocabulary: int | None = None,
        spatial_pool: bool = False,
        place_std: float = 0.02,
        train_size: int = 57_600,
        eval_size: int = 500,
        data_seed: int = 0,
        unrelated_captions: bool = False,
        folder: Path | None = None,
    ):
        """`vocabulary` makes the embedding larger than the words need; `place_std` is how much the vectors for the
        places of a picture differ at the start; `eval_size` counts pictures of each kind, seen and held-out
        combinations; `unrelated_captions` is the control, which must learn nothing from pictures; `folder` has pictures
        and captions of your own instead of scenes."""
        from lockstep.recipes.pixel_llm.folder import read_folder

        warn_unused(PixelLLM, self.option_rules, locals())
        self.scenes, self.image, self.stem, self.patch = scenes, image, stem, patch
        self.width, self.heads = width, heads
        self.vision_layers, self.text_layers = vision_layers, text_layers
        self.vocabulary, self.spatial_pool, self.place_std = vocabulary, spatial_pool, place_std
        self.train_size, self.eval_size, self.data_seed = train_size, eval_size, data_seed
        self.unrelated_captions = unrelated_captions
        self._check()
        self.entries = read_folder(folder) if folder is not None else None
        self.kind = KINDS[scenes]
        self.words = Words.of([entry.caption for entry in self.entries]) if self.entries else self.kind.words
        if vocabulary is not None and vocabulary < len(self.words):
            raise UserError(
                f"task.vocabulary={vocabulary}",
                f"{len(self.words)} words to write",
                f"type task.vocabulary=null, or {len(self.words)} or more",
            )

    def model(self) -> Captioner:
        return Captioner(
            Sizes(
                self.image, self.stem, self.patch, self.width, self.heads, self.vision_layers, self.text_layers,
                self.vocabulary or len(self.words), self.words.length, self.spatial_pool, self.place_std,
            )
        )  # fmt: skip

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW. Only matrices decay: no norm, no bias, no vector that stands for a word or a place."""
        decay = [m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        inside = {id(p) for p in decay}
        rest = [p for p in model.parameters() if id(p) not in inside]
        groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def data(self) -> Any:
        if self.entries is not None:
            return self._pictures(held_out=False)
        return self._scenes(TRAIN, self.train_size, self.unrelated_captions)

    def eval_data(self) -> Any:
        if self.entries is not None:
            return self._pictures(held_out=True)
        return ConcatDataset([self._scenes(split, self.eval_size) for split in (IID, COMP)])

    def collate(self, samples: Any) -> Any:
        """Scenes come as whole batches, files one by one."""
        return samples if isinstance(samples, Sample) else default_collate(samples)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """The mean over all words of the global batch, whoever has the long captions: a sum and a count."""
        sample = Sample(*batch)
        return Loss(*self._cost(model, sample))

    def eval_loss(self, model: nn.Module, batch: Any) -> Loss:
        sample = Sample(*batch)
        with run_eagerly(model):  # few batches, of another size than those of the training
            total, weight = self._cost(model, sample)
        written = generate(model, sample.image, self.words.length)
        return Loss(total, weight, self._score(written, sample))

    def _score(self, written: Tensor, sample: Sample) -> dict[str, Metric]:
        """Whole captions and single slots, for seen and held-out combinations apart."""
        right = written == sample.ids[:, 1:]
        exact = right.all(1)
        if self.entries is not None:
            return {"exact": (exact.sum(), len(exact))}
        found: dict[str, Metric] = {}
        for split, rows in ((IID, ~sample.held_out), (COMP, sample.held_out)):
            found[f"{split}_exact"] = ((exact & rows).sum(), rows.sum())
            for slot in self.kind.slots:
                places = (sample.slots == 1 + SLOTS.index(slot)) & rows[:, None]
                found[f"{split}_{slot}"] = ((right & places).sum(), places.sum())
            for count in range(self.kind.fewest, self.kind.most + 1) if self.kind.most > 1 else ():
                these = rows & (sample.things == count)
                found[f"{split}_exact_{count}"] = ((exact & these).sum(), these.sum())
        return found

    def show(self, model: nn.Module) -> str:
        """What it says about the first pictures that it has not been trained on."""
        data = self._pictures(held_out=True) if self.entries is not None else self._scenes(COMP, 4)
        samples = [data[index] for index in range(min(4, len(data)))]
        device = next(model.parameters()).device
        written = generate(model, torch.stack([sample.image for sample in samples]).to(device), self.words.length)
        lines = [
            f"{self.words.decode(sample.ids[1:]):40} written: {self.words.decode(caption)}"
            for sample, caption in zip(samples, written.cpu(), strict=True)
        ]
        return "\n".join(lines)

    def _scenes(self, split: str, length: int, unrelated: bool = False) -> ShapeScenes:
        return ShapeScenes(self.kind, self.image, split, length, self.data_seed, unrelated)

    def _cost(self, model: nn.Module, sample: Sample) -> tuple[Tensor, Tensor]:
        """Summed cross entropy of the words to write, and how many those are; <pad> is none of them."""
        targets = sample.ids[:, 1:].long()
        logits = model(sample.image, sample.ids[:, :-1]).float()  # (B, T, V)
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
        return total, (targets != PAD).sum()

    def _pictures(self, held_out: bool) -> ImageFolder:
        from lockstep.recipes.pixel_llm.folder import ImageFolder

        assert self.entries is not None
        chosen = [entry for entry in self.entries if entry.held_out == held_out]
        if not chosen:
            side = "evaluation" if held_out else "training"
            raise UserError(
                f"task.folder with pictures for {side}",
                f"{len(self.entries)} pictures, and by their names none of them is for {side}",
                "add pictures: about one in ten is for evaluation",
            )
        return ImageFolder(chosen, self.words, self.image)

    def _check(self) -> None:
        """Every wrong option at once."""
        counts = ("image", "patch", "width", "heads", "vision_layers", "text_layers", "train_size", "eval_size")
        problems = [
            UserError(f"task.{name}={getattr(self, name)}", "less than 1", f"type task.{name}=1 or more")
            for name in counts
            if getattr(self, name) < 1
        ]
        for name, value, known in (("scenes", self.scenes, tuple(KINDS)), ("stem", self.stem, ("conv", "patch"))):
            if value not in known:
                problems.append(UserError(f"task.{name}={value}", "no such word", f"type one of {', '.join(known)}"))
        step = 8 if self.stem == "conv" else self.patch
        if step >= 1 and (self.image < step or self.image % step):
            fix = f"type task.image={max(1, round(self.image / step)) * step}"
            problems.append(UserError(f"task.image={self.image}", f"no multiple of {step}, the pixels of a token", fix))
        if self.heads >= 1 and (self.width % self.heads or (self.stem == "conv" and self.width % 8)):
            parts = math.lcm(self.heads, 8 if self.stem == "conv" else 1)
            problems.append(
                UserError(
                    f"task.width={self.width} with task.heads={self.heads}",
                    "heads of equal width, and groups of 8 channels in the stem, do not fit",
                    f"type task.width={-(-max(1, self.width) // parts) * parts}",
                )
            )
        if problems:
            raise ConfigError(problems)
