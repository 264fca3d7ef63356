"""The folder of a run's checkpoints: which ones are committed, and whose turn it is to write. No torch here."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from lockstep.checkpoint.durable import replace_file, sync_folder

_STEP = re.compile(r"step-(\d{8,18})")
_STAGED = re.compile(r"step-\d{8,18}\.tmp-([0-9A-Za-z]+)(-\w+)?")


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a committed checkpoint's folder, None for every other name."""
    match = _STEP.fullmatch(name)
    step = int(match.group(1)) if match else None
    return step if step is not None and folder_name(step) == name else None


def step_number(path: Path) -> int:
    """The step of a path that `Store.committed` has returned."""
    step = step_of(path.name)
    assert step is not None, path
    return step


class Store:
    def __init__(self, root: Path):
        self.root = Path(root)

    def committed(self) -> list[Path]:
        """The newest step first. Only the names: whether the bytes are right, `load.find` knows."""
        found = [(step_of(path.name), path) for path in self._paths()]
        steps = [(step, path) for step, path in found if step is not None and path.is_dir()]
        return [path for _, path in sorted(steps, reverse=True)]

    def staged(self, step: int, token: str, suffix: str) -> Path:
        """Where a checkpoint grows. The token keeps late writers of an earlier attempt out of it."""
        return self.root / f"{folder_name(step)}.tmp-{token}-{suffix}"

    def claim(self, token: str) -> None:
        """From now on only the attempt with this token commits."""
        self.root.mkdir(parents=True, exist_ok=True)
        replace_file(self.root / "owner", token.encode())

    def owner(self) -> str | None:
        return _text(self.root / "owner")

    def clean(self, token: str) -> None:
        """Remove what other attempts have left half written, or half deleted."""
        for path in self._paths():
            match = _STAGED.fullmatch(path.name)
            if match and match.group(1) != token:
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith((".latest.", ".owner.")):  # a draft whose writer was killed
                path.unlink(missing_ok=True)

    def move_latest(self) -> None:
        """Let `latest` name the newest committed one."""
        newest = self.committed()[:1]
        if newest:
            replace_file(self.root / "latest", newest[0].name.encode() + b"\n")
        else:
            (self.root / "latest").unlink(missing_ok=True)

    def set_aside(self, path: Path, why: str) -> Path:
        """Rename a checkpoint to `step-X.damaged` or `step-X.undone`: out of the way, and not lost."""
        taken = {other.name for other in self._paths()}
        names = (f"{path.name}.{why}{number or ''}" for number in range(len(taken) + 1))
        target = path.with_name(next(name for name in names if name not in taken))
        os.rename(path, target)
        sync_folder(self.root)
        self.move_latest()
        return target

    def set_aside_after(self, step: int) -> list[Path]:
        """The run goes back to `step` on purpose: what came later is undone."""
        return [self.set_aside(path, "undone") for path in self.committed() if step_number(path) > step]

    def remove(self, path: Path, token: str) -> None:
        """Delete a committed checkpoint. It first loses its name, so that nobody finds half of one."""
        doomed = self.root / f"{path.name}.tmp-{token}-gone{secrets.token_hex(4)}"
        os.rename(path, doomed)
        sync_folder(self.root)
        shutil.rmtree(doomed)

    def _paths(self) -> list[Path]:
        return list(self.root.iterdir()) if self.root.is_dir() else []


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
