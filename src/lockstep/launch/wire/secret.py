"""The secret that the nodes of a job share: where it comes from, and who may read it.

A node proves that it knows the secret before any message of it is accepted (`runtime/rendezvous/handshake.py`).
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

from lockstep import files
from lockstep.errors import UserError
from lockstep.runtime.rendezvous.handshake import Secret

# The secret itself, or a file that holds it, for nodes without a shared disk.
SECRET = "LOCKSTEP_SECRET"
SECRET_FILE = "LOCKSTEP_SECRET_FILE"

# A shorter text could be guessed.
SHORTEST = 16


def find_secret(path: Path) -> Secret:
    """Return the job's secret: from the environment, or from the file `path`, which the first node makes."""
    text = os.environ.get(SECRET)
    if text:
        return _checked(text, f"the environment variable {SECRET}")

    named = os.environ.get(SECRET_FILE)
    if named:
        return _read_secret(Path(named))

    try:
        _make_secret(path)
    except OSError as error:
        raise UserError(
            f"the job's secret cannot be written to {path}",
            error.strerror or str(error),
            f"set a run_dir that you may write to, or set {SECRET} to the same text on every node",
        ) from None

    return _read_secret(path)


def _make_secret(path: Path) -> None:
    """Make the file if there is none. Several nodes may try at once: the secret of the fastest is then read by all."""
    if os.path.lexists(path):
        return

    # Readable by this user alone.
    path.parent.mkdir(parents=True, exist_ok=True)
    files.create_once(path, f"{secrets.token_hex(32)}\n".encode(), mode=0o600)


def _read_secret(path: Path) -> Secret:
    """Read the secret from a file that only this user can read. Raises a UserError for any other file."""
    # O_NONBLOCK: opening a pipe must not wait for a writer.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        why = "a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise UserError(
            f"the job's secret cannot be read from {path}",
            f"{why}",
            f"set {SECRET_FILE} to a file that you may read, or remove {path}",
        ) from None

    # The open file is examined, not its path, which another user might exchange in between.
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        private = status.st_uid == os.geteuid() and not status.st_mode & 0o077

        # A user who can read the file can join the job.
        if not stat.S_ISREG(status.st_mode) or not private:
            raise UserError(
                f"the job's secret in {path} is not private",
                f"owner {status.st_uid}, mode {stat.filemode(status.st_mode)}",
                f"chmod 600 {path} if it is yours; remove it if it is not; where neither helps, set {SECRET}",
            )

        return _checked(file.read(4096).decode(errors="replace"), str(path))


def _checked(text: str, source: str) -> Secret:
    """Return a secret, or raise if it is so short that it could be guessed. `source` says where it comes from."""
    text = text.strip()
    if len(text) < SHORTEST:
        raise UserError(
            f"the job's secret in {source} is too short",
            f"{len(text)} characters",
            f"use {SHORTEST} or more, for example: openssl rand -hex 32",
        )

    return Secret(text.encode(), source)
