"""Pictures and captions in a folder, read and written.

A folder holds either a list, `captions.json` = [{"image": "0001.png", "caption": "a red square"}, ...], or a caption
`x.txt` for every picture `x.png`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset

from lockstep.errors import UserError
from lockstep.recipes.pixel_llm.png import read_png, write_png
from lockstep.recipes.pixel_llm.scenes import COMP, IID, KINDS, TRAIN, Sample, ShapeScenes, hashed
from lockstep.recipes.pixel_llm.words import Words

LIST = "captions.json"
LIST_FORM = '[{"image": "x.png", "caption": "..."}]'


@dataclass(frozen=True)
class Entry:
    image: Path
    caption: str

    @property
    def held_out(self) -> bool:
        """Whether it is for evaluation, as one in ten is. Its name decides: other pictures may come and go."""
        return hashed(self.image.name) % 10 == 0


@dataclass(eq=False)
class ImageFolder(Dataset[Sample]):
    """Pictures of a folder, all resized to `size` pixels on each side."""

    entries: list[Entry]
    words: Words
    size: int

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Sample:
        entry = self.entries[index]
        image = torch.from_numpy(read_png(entry.image))

        # The bytes of an exported scene stay as they are.
        if image.shape[1:] != (self.size, self.size):
            scaled = torch.nn.functional.interpolate(
                image[None].float(), (self.size, self.size), mode="bilinear", antialias=True
            )
            image = scaled[0].round().clamp(0, 255).to(torch.uint8)

        ids = torch.tensor(self.words.ids(entry.caption.split()), dtype=torch.int32)

        # We do not know which words the picture decides, or how many things it shows.
        no_slots = torch.zeros(self.words.length, dtype=torch.int64)
        return Sample(image, ids, no_slots, torch.tensor(False), torch.tensor(0))


def read_folder(folder: Path) -> list[Entry]:
    """Return all pictures with their captions, in the order of the list, or of their names."""
    # If there are both, the list counts.
    if (folder / LIST).exists():
        entries = _from_list(folder / LIST)
    else:
        # By name: the order of a folder differs from machine to machine.
        entries = [Entry(text.with_suffix(".png"), text.read_text().strip()) for text in sorted(folder.glob("*.txt"))]

    fix = f"give a folder with {LIST} ({LIST_FORM}), or with pairs x.png and x.txt"
    if not entries:
        raise UserError(f"task.folder={folder} holds no picture with a caption", "", fix)

    missing = [entry.image for entry in entries if not entry.image.exists()]
    if missing:
        raise UserError(
            f"task.folder={folder} lacks {len(missing)} of {len(entries)} pictures, first {missing[0]}", "", fix
        )

    return entries


def _from_list(path: Path) -> list[Entry]:
    try:
        return [Entry(path.parent / row["image"], row["caption"]) for row in json.loads(path.read_text())]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not a list of pictures and captions: {type(error).__name__}: {error}",
            "",
            f"write {LIST_FORM}",
        ) from None


def export(data: ShapeScenes, folder: Path, form: str = "json") -> None:
    """Write generated scenes as files that `read_folder` reads: the same pictures, byte by byte."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index in range(len(data)):
        name = f"{data.split}-{index:06d}.png"
        caption = " ".join(data.scene(index).caption)
        write_png(folder / name, data[index].image.numpy())

        rows.append({"image": name, "caption": caption})

        # One text for each picture, or one list for all of them.
        if form == "txt":
            (folder / name).with_suffix(".txt").write_text(f"{caption}\n")

    if form == "json":
        (folder / LIST).write_text(json.dumps(rows, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lockstep.recipes.pixel_llm.folder", description=export.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--scenes", choices=sorted(KINDS), default="one")
    parser.add_argument("--image", type=int, default=32, help="pixels on each side")
    parser.add_argument("--split", choices=[TRAIN, IID, COMP], default=TRAIN)
    parser.add_argument("--form", choices=["json", "txt"], default="json")
    options = parser.parse_args()

    scenes = ShapeScenes(KINDS[options.scenes], options.image, options.split, options.count)
    export(scenes, options.folder, options.form)
    print(f"{options.count} pictures in {options.folder}")


if __name__ == "__main__":
    main()
