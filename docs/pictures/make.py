"""Make the pictures of the README from real runs: `make pictures`.

terminal.svg   the terminal at the end of `lockstep train char_lm preset=tiny --nproc 2`, exported by rich
report.png     the report of a longer run, rendered by a headless Chromium

Nothing is drawn by hand. The report's picture is left as it is where no Chromium is installed.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

HERE = Path(__file__).parent
COLUMNS, ROWS = 104, 60
COMMAND = "lockstep train char_lm preset=tiny --nproc 2"

# A longer run, so that the report has curves to show.
REPORTED = ["preset=tiny", "steps=400", "log.every=10", "evaluate.every=50", "checkpoint.every=50", "run_dir=run"]

# The run erases its live display and prints a sample after the last step. The text that a model has learned to write
# in 40 steps is no sight, so the picture is taken right before.
AFTER_TRAINING = re.compile(r"(\r|\x1b\[2K|\x1b\[1A)+sample:")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WINDOW = "1200,1366"  # ends between two rows of charts


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        picture_terminal(Path(folder))
        picture_report(Path(folder))
    return 0


# ---- the terminal ----


def picture_terminal(folder: Path) -> None:
    """Write terminal.svg: the screen after the last step."""
    written = AFTER_TRAINING.split(run_in_terminal(lockstep(COMMAND.split()[1:]), folder))[0]
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(f"[bold green]$[/] {COMMAND}", highlight=False)
    for line in screen_after(written):
        console.print(Text.from_ansi(line))
    console.save_svg(str(HERE / "terminal.svg"), title="two processes", theme=MONOKAI)


def lockstep(words: list[str]) -> list[str]:
    """Return the command with this Python, whether or not the package is installed in it."""
    return [sys.executable, "-m", "lockstep", *words]


def run_in_terminal(command: list[str], folder: Path) -> str:
    """Run `command` in a terminal of its own, and return everything that was written to it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=folder, env=env)
    os.close(theirs)

    # On Linux the last read of a terminal whose other side is closed raises OSError.
    written = b""
    try:
        while data := os.read(ours, 65536):
            written += data
    except OSError:
        pass
    os.close(ours)

    if process.wait():
        raise SystemExit(f"{' '.join(command)} failed:\n{written.decode()}")
    return written.decode()


def screen_after(written: str) -> list[str]:
    """Return the lines that stay on the screen, with their colours.

    Only what rich's live display uses is understood: next line, one line up, erase this line. It redraws whole
    lines, so no column need be counted.
    """
    lines, row = [""], 0
    for part in re.split(r"(\n|\x1b\[1A|\x1b\[2K|\x1b\[\?25[lh]|\r)", written):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row = max(0, row - 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part != "\r" and not part.startswith("\x1b[?25"):
            lines[row] += part
    return lines[: len(lines) - (lines[-1] == "")]


# ---- the report ----


def picture_report(folder: Path) -> None:
    """Write report.png, if there is a browser for it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"report.png is left as it is: none of {', '.join(BROWSERS)} was found (apt-get install chromium)")
        return

    command = lockstep(["train", "char_lm", "--nproc", "2", *REPORTED])
    subprocess.run(command, cwd=folder, check=True)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WINDOW}"]
    page = (folder / "run" / "report.html").as_uri()
    subprocess.run([browser, *options, f"--screenshot={HERE / 'report.png'}", page], check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
