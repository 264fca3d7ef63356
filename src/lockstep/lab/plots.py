"""Pictures of the lab, as SVG and PNG. Needs matplotlib: `pip install 'lockstep-train[lab]'`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.errors import pip_install
from lockstep.lab import predictions


def figure(width: float = 8, height: float = 4, *, columns: int = 1) -> tuple[Any, Any] | None:
    """Return a new figure and its axes, an array of them if there are several columns.

    Without matplotlib it prints a line that says so and returns None.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"  no picture: matplotlib is missing ({pip_install('lab')})")
        return None

    # No pyplot: it would keep state, and look for a display.
    picture = Figure(figsize=(width, height), layout="constrained")
    return picture, picture.subplots(1, columns)


def save(picture: Any, name: str) -> Path:
    """Write NAME.svg and NAME.png to the lab's folder, and say where."""
    from matplotlib import rc_context

    folder = predictions.folder()
    folder.mkdir(parents=True, exist_ok=True)
    # No date and no random names, so the same picture is the same file; letters as text, which is a tenth of the size.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lab"}):
        picture.savefig(folder / f"{name}.svg", metadata={"Date": None})
        picture.savefig(folder / f"{name}.png", dpi=120)

    print(f"  picture: {folder / name}.svg")
    return folder / f"{name}.svg"
