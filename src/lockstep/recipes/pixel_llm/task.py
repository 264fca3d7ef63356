"""The task: describe a generated scene, or a picture of a folder, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, default_collate

import lockstep
from lockstep.errors import UserError
from lockstep.recipes.options import OnlyWith, check_options, takes_options, warn_unused
from lockstep.recipes.pixel_llm.generation import generate
from lockstep.recipes.pixel_llm.model import Captioner, CaptionerOptions, Sizes
from lockstep.recipes.pixel_llm.presets import PRESETS
from lockstep.recipes.pixel_llm.scenes import COMP, IID, KINDS, SLOT_NUMBERS, TRAIN, Sample, ShapeScenes
from lockstep.recipes.pixel_llm.words import PAD, Words
from lockstep.task import Loss, Metric, Task

# `folder` is also a command, and `python -m` warns of a module that its package already imported.
if TYPE_CHECKING:
    from lockstep.recipes.pixel_llm.folder import ImageFolder

SCENE_OPTIONS = ("scenes", "train_size", "eval_size", "data_seed", "unrelated_captions")
CHOICES = {"scenes": tuple(KINDS), "stem": ("conv", "patch")}

# The smallest values of options that count something.
COUNTS = dict.fromkeys(
    ("image", "patch", "width", "heads", "vision_layers", "text_layers", "train_size", "eval_size"), 1
)


@dataclass(frozen=True)
class DataOptions:
    # The kind of generated scenes: few, one, pair or many.
    scenes: str = "one"

    # Scenes to train on.
    train_size: int = 57_600

    # Scenes of each test set: combinations that training shows, and held-out ones.
    eval_size: int = 500

    # The seed of the scenes.
    data_seed: int = 0

    # Give every picture the caption of another one: a control that must learn nothing from pictures.
    unrelated_captions: bool = False

    # A folder with your own pictures and captions, instead of generated scenes.
    folder: Path | None = None


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
        OnlyWith(SCENE_OPTIONS, "folder", (None,), found="a folder with pictures and captions of its own"),
        OnlyWith(("patch",), "stem", ("patch",), found="convolutions, whose tokens are 8 pixels wide"),
    )

    @takes_options(DataOptions, CaptionerOptions)
    def __init__(self, data: DataOptions, model: CaptionerOptions):
        from lockstep.recipes.pixel_llm.folder import read_folder

        options = vars(data) | vars(model)
        warn_unused(PixelLLM, self.option_rules, options)

        # The vocabulary of a preset is for the words of scenes; a folder brings words of its own.
        preset_sizes = {preset.get("task", {}).get("vocabulary") for preset in PRESETS.values()}
        if data.folder is not None and model.vocabulary in preset_sizes:
            model = replace(model, vocabulary=None)

        check_options(options, _shape_problems(model), CHOICES, COUNTS)

        self.data_options = data
        self.model_options = model
        self.entries = read_folder(data.folder) if data.folder is not None else None
        self.kind = KINDS[data.scenes]
        self.words = Words.of([entry.caption for entry in self.entries]) if self.entries else self.kind.words
        if model.vocabulary is not None and model.vocabulary < len(self.words):
            raise UserError(
                f"task.vocabulary={model.vocabulary} is less than the {len(self.words)} words to write",
                "",
                f"set task.vocabulary=null, or {len(self.words)} or more",
            )

    def model(self) -> Captioner:
        vocabulary = self.model_options.vocabulary or len(self.words)
        return Captioner(Sizes(**vars(self.model_options) | {"vocabulary": vocabulary, "words": self.words.length}))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW. Only matrices decay: no norm, no bias, no vector that stands for a word or a position."""
        decay = [m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]

        # By identity, since comparing parameters would compare their numbers.
        decaying = {id(p) for p in decay}
        rest = [p for p in model.parameters() if id(p) not in decaying]
        groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def data(self) -> Any:
        if self.entries is not None:
            return self._pictures(held_out=False)
        return self._scenes(TRAIN, self.data_options.train_size, self.data_options.unrelated_captions)

    def eval_data(self) -> Any:
        if self.entries is not None:
            return self._pictures(held_out=True)
        return ConcatDataset([self._scenes(split, self.data_options.eval_size) for split in (IID, COMP)])

    def collate(self, samples: Any) -> Any:
        """Collate pictures of a folder; scenes come as collated batches."""
        return samples if isinstance(samples, Sample) else default_collate(samples)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return a sum and a count, so that every word of the global batch weighs the same."""
        return Loss(*self._cross_entropy(model, Sample(*batch)))

    def eval_loss(self, model: nn.Module, batch: Any) -> Loss:
        sample = Sample(*batch)
        # Eager, because there are only a few batches, and their size is not that of training.
        with lockstep.run_eagerly(model):
            total, weight = self._cross_entropy(model, sample)

        # What the model writes by itself, not what it would write after the right words.
        written = generate(model, sample.image, self.words.length)
        return Loss(total, weight, self._score(written, sample))

    def _cross_entropy(self, model: nn.Module, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return the summed cross entropy of the words to write, and their number. <pad> does not count."""
        targets = sample.ids[:, 1:].long().flatten()
        logits = model(sample.image, sample.ids[:, :-1]).float().flatten(0, 1)  # (B * T, V)
        return nn.functional.cross_entropy(logits, targets, ignore_index=PAD, reduction="sum"), (targets != PAD).sum()

    def _score(self, written: Tensor, sample: Sample) -> dict[str, Metric]:
        """Count right captions and right words of each slot in `written` (B, T), by split."""
        right = written == sample.ids[:, 1:]
        exact = right.all(1)
        if self.entries is not None:
            return {"exact": (exact.sum(), len(exact))}

        scores: dict[str, Metric] = {}
        counts = range(self.kind.fewest, self.kind.most + 1) if self.kind.most > 1 else ()
        for split, rows in ((IID, ~sample.held_out), (COMP, sample.held_out)):
            scores[f"{split}_exact"] = ((exact & rows).sum(), rows.sum())

            # A slot is judged at the positions where the right caption has it.
            for slot in self.kind.slots:
                places = (sample.slots == SLOT_NUMBERS[slot]) & rows[:, None]
                scores[f"{split}_{slot}"] = ((right & places).sum(), places.sum())

            for count in counts:
                with_count = rows & (sample.things == count)
                scores[f"{split}_exact_{count}"] = ((exact & with_count).sum(), with_count.sum())

        return scores

    def show(self, model: nn.Module) -> str:
        """Return captions that the model writes for pictures it was not trained on."""
        data = self._pictures(held_out=True) if self.entries is not None else self._scenes(COMP, 4)
        samples = [data[index] for index in range(min(4, len(data)))]
        images = torch.stack([sample.image for sample in samples]).to(next(model.parameters()).device)
        captions = generate(model, images, self.words.length).cpu()

        decode = self.words.decode
        pairs = zip(samples, captions, strict=True)
        return "\n".join(f"{decode(sample.ids[1:]):40} written: {decode(caption)}" for sample, caption in pairs)

    def _scenes(self, split: str, length: int, unrelated: bool = False) -> ShapeScenes:
        return ShapeScenes(self.kind, self.model_options.image, split, length, self.data_options.data_seed, unrelated)

    def _pictures(self, held_out: bool) -> ImageFolder:
        from lockstep.recipes.pixel_llm.folder import ImageFolder

        assert self.entries is not None
        chosen = [entry for entry in self.entries if entry.held_out == held_out]
        if not chosen:
            raise UserError(
                f"task.folder has no picture for {'evaluation' if held_out else 'training'}",
                f"{len(self.entries)} pictures, whose names decide what they are for",
                "add pictures: about one in ten is for evaluation",
            )

        return ImageFolder(chosen, self.words, self.model_options.image)


def _shape_problems(model: CaptionerOptions) -> Iterator[UserError]:
    # The picture must divide into tokens. A token or head that is too small has been reported already.
    step = model.pixels_per_token
    if step >= 1 and (model.image < step or model.image % step):
        yield UserError(
            f"task.image={model.image} is not a multiple of {step}, the pixels of a token",
            "",
            f"set task.image={max(1, round(model.image / step)) * step}",
        )

    # The convolutional stem normalises its channels in groups of 8.
    groups = 8 if model.stem == "conv" else 1
    if model.heads >= 1 and (model.width % model.heads or model.width % groups):
        multiple = math.lcm(model.heads, groups)
        yield UserError(
            f"task.width={model.width} is not a multiple of {multiple}",
            f"task.heads={model.heads}" + ", and a stem that normalises groups of 8 channels" * (groups > 1),
            f"set task.width={-(-max(1, model.width) // multiple) * multiple}",
        )
