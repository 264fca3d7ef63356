"""The request of `lockstep resize`: a file in the run folder with a number, which the launcher reads and removes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from lockstep import files
from lockstep.errors import UserError, shell_word
from lockstep.run_folder.locks import has_launcher
from lockstep.run_folder.names import LOCK, RESIZE_REQUEST


def ask_for_size(run_dir: Path, count: int) -> None:
    """Leave a file in `run_dir` that asks its launcher to continue with `count` processes."""
    asked = f"lockstep resize {run_dir} {count}"
    if not (run_dir / LOCK).exists():
        raise UserError(
            f"{asked}: {run_dir} is not the folder of a run", "no file .lock in it", "run `lockstep resize RUN N`"
        )

    if count < 1:
        raise UserError(f"{asked}: {count} is not a number of processes", f"{count}", "use 1 or more")

    # The lock of rank 0 does not count: between two attempts there is no rank, and the request is still valid.
    if not has_launcher(run_dir):
        raise UserError(
            f"{asked}: the run is not running",
            "no launcher (lockstep train --nproc) holds its folder",
            f"resume it: --nproc {count} --resume {shell_word(run_dir)}",
        )

    # The launcher looks for the file once a second.
    files.write(run_dir / RESIZE_REQUEST, f"{count}\n")


# ---- in the launcher ----


def take_request(run_dir: Path) -> str | None:
    """Return the text of the request and remove it; None if there is none yet, or if the disk fails for the moment."""
    request = run_dir / RESIZE_REQUEST
    try:
        text = files.read_bytes(request, most=4096).decode(errors="replace").strip()
    except OSError:
        return None

    # `echo` in a shell makes the file before it writes the number: the next look finds it.
    if not text:
        return None

    with suppress(OSError):
        request.unlink()

    return text


def size_in(text: str) -> int | None:
    """Return the number of processes that a request asks for; None if it holds no number."""
    # The file may hold anything: people may write it with `echo`.
    return int(text) if text.isascii() and text.isdigit() else None


def remove_old_requests(run_dir: Path) -> None:
    """Remove a request that an earlier job did not carry out."""
    (run_dir / RESIZE_REQUEST).unlink(missing_ok=True)
