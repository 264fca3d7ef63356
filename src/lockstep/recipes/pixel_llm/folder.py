"""Pictures and captions in a folder, read and written.

Either one list, `captions.json` = [{"image": "0001.png", "caption": "a red square"}, ...], or beside every `x.png` its
caption in `x.txt`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from lockstep.errors import UserError
from lockstep.recipes.pixel_llm.png import read_png, write_png
from lockstep.recipes.pixel_llm.scenes import COMP, IID, KINDS, TRAIN, Sample, ShapeScenes
from lockstep.recipes.pixel_llm.words import Words

LIST = "captions.json"
HELD_OUT = 10  # one picture in ten is for evaluation


@dataclass(frozen=True)
class Entry:
    image: Path
    caption: str

    @property
    def held_out(self) -> bool:
        """By its name: the same picture stays on its side when others come or go."""
        digest = blake2b(self.image.name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % HELD_OUT == 0


class ImageFolder(Dataset[Sample]):
    """Its pictures at one size, whatever size they have on disk."""

    def __init__(self, entries: list[Entry], words: Words, size: int):
        self.entries, self.words, self.size = entries, words, size

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Sample:
        entry = self.entries[index]
        image = torch.from_numpy(read_png(entry.image))
        if image.shape[1:] != (self.size, self.size):
            image = _resized(image, self.size)
        ids = self.words.encode(entry.caption.split())
        nothing = torch.zeros(self.words.length, dtype=torch.int64)  # nobody has said which words are slots
        return Sample(image, ids, nothing, torch.tensor(False), torch.tensor(0))


def _resized(image: torch.Tensor, size: int) -> torch.Tensor:
    scaled = F.interpolate(image[None].float(), (size, size), mode="bilinear", antialias=True)
    return scaled[0].round().clamp(0, 255).to(torch.uint8)


def read_folder(folder: Path) -> list[Entry]:
    """All pictures with their captions, in the order of the list, or of their names."""
    listed = folder / LIST
    entries = _from_list(listed) if listed.exists() else _from_pairs(folder)
    missing = [entry.image for entry in entries if not entry.image.exists()]
    if missing or not entries:
        found = f"{len(missing)} of {len(entries)} pictures missing, first {missing[0]}" if missing else "no picture"
        raise UserError(
            f"task.folder={folder}",
            found,
            f'a folder with {LIST} ([{{"image": "x.png", "caption": "..."}}]), or with pairs x.png and x.txt',
        )
    return entries


def _from_list(path: Path) -> list[Entry]:
    try:
        return [Entry(path.parent / row["image"], row["caption"]) for row in json.loads(path.read_text())]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"the captions in {path}",
            f"{type(error).__name__}: {error}",
            'write [{"image": "x.png", "caption": "..."}]',
        ) from None


def _from_pairs(folder: Path) -> list[Entry]:
    texts = sorted(folder.glob("*.txt"))
    return [Entry(text.with_suffix(".png"), text.read_text().strip()) for text in texts]


def export(data: ShapeScenes, folder: Path, form: str = "json") -> None:
    """Write generated scenes as the files that `read_folder` reads: the same pictures, byte by byte."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(len(data)):
        name = f"{data.split}-{index:06d}.png"
        sample, caption = data[index], " ".join(data.scene(index).caption)
        write_png(folder / name, sample.image.numpy())
        rows.append({"image": name, "caption": caption})
        if form == "txt":
            (folder / name).with_suffix(".txt").write_text(f"{caption}\n")
    if form == "json":
        (folder / LIST).write_text(json.dumps(rows, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lockstep.recipes.pixel_llm.folder", description=export.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--scenes", choices=sorted(KINDS), default="one")
    parser.add_argument("--image", type=int, default=32, help="pixels of a side")
    parser.add_argument("--split", choices=[TRAIN, IID, COMP], default=TRAIN)
    parser.add_argument("--form", choices=["json", "txt"], default="json")
    asked = parser.parse_args()
    export(ShapeScenes(KINDS[asked.scenes], asked.image, asked.split, asked.count), asked.folder, asked.form)
    print(f"{asked.count} pictures in {asked.folder}")


if __name__ == "__main__":
    main()
