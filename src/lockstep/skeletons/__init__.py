"""The command `lockstep init`: a file to start from, which trains on generated data until it has your own.

The other modules of this folder are these files. They are written as a user would write them, and import only what
the package offers to users.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UserError, shell_word


@dataclass(frozen=True)
class Skeleton:
    """A file to start from. `class_name` is the task in it; a script with its own loop has none."""

    module: str
    class_name: str | None
    about: str


SKELETONS = {
    "classifier": Skeleton("classifier", "Classifier", "a task: pictures and their classes, with an evaluation"),
    "lm": Skeleton("lm", "LanguageModel", "a task: a language model on sequences of different lengths"),
    "own_loop": Skeleton("own_loop", None, "a script with its own loop"),
}


def init(kind: str, name: str | None) -> str:
    """Write the file NAME.py and return what to type next. An existing file is refused."""
    skeleton = SKELETONS[kind]
    path = Path(name or kind)
    if path.suffix != ".py":
        path = path.with_name(f"{path.name}.py")

    source = Path(__file__).with_name(f"{skeleton.module}.py").read_text()
    target = str(path)

    if skeleton.class_name:
        class_name = _class_name(path, source, skeleton.class_name)
        source = re.sub(rf"\b{skeleton.class_name}\b", class_name, source)
        target = f"{path}:{class_name}"

    # A folder is made too, and that is said: its name may have been mistyped.
    made = "" if path.parent.exists() else f", and made the folder {path.parent}"

    # The commands in the docstring can be copied.
    _write_new(path, source.replace(" FILE", f" {shell_word(path)}"))
    quoted = shell_word(target)
    return (
        f"wrote {path}{made}\n"
        f"  train it    lockstep train {quoted} --nproc 2\n"
        f"  check it    lockstep verify {quoted} --worlds 1,2\n"
        f"then replace the parts marked YOURS"
    )


def _class_name(path: Path, source: str, default: str) -> str:
    """Return the name of the task in a file: CatsAndDogs for cats-and-dogs.py."""
    name = "".join(word[:1].upper() + word[1:] for word in re.split(r"[\W_]+", path.stem))
    if path.stem in SKELETONS:
        return default

    if not name.isidentifier() or keyword.iskeyword(name):
        raise UserError(
            f"no class can be named after {path.name}",
            f"{name!r}" if name else "no letters in it",
            "use a NAME of letters and digits that begins with a letter, such as birds",
        )

    # A file task.py gets a class MyTask, because the name Task is taken.
    return f"My{name}" if re.search(rf"\b{name}\b", source) else name


def _write_new(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists already", "", "give another NAME: lockstep init KIND NAME") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written", f"{error.strerror}", "give another NAME") from None
