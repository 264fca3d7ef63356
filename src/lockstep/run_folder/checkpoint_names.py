"""The names of files and folders in RUN/checkpoints. `lockstep.checkpoint` describes what they are.

This module imports no torch: the launcher uses it before any rank exists.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Container, Iterable
from typing import Literal

from lockstep.user_classes import CLASS_NAME

# A folder with this file is a complete checkpoint.
MANIFEST = "manifest.json"

# A file with the metrics of a step that was evaluated.
STEP_METRICS = "metrics.json"

# How the names of files with tensors end. All other files are small.
TENSOR_SUFFIX = ".safetensors"

# Two files next to the checkpoints: `latest` names the newest, and `owner` has the token of the only attempt that may
# commit.
LATEST = "latest"
OWNER = "owner"

_COMMITTED = re.compile("step-([0-9]{8}|[1-9][0-9]{8,17})")
_SET_ASIDE = re.compile(r"step-\d{8,18}\.(damaged|rewound)\d*")
_REPLACED = ".replaced"
_OF_ATTEMPT = re.compile(r"step-\d{8,18}\.tmp-([0-9A-Za-z]+)(-\w+)?")
_CONFIRMATION = re.compile(r"rank-\d+\.json")
_OBJECT = re.compile(
    rf"([a-z0-9+]+|{CLASS_NAME})://[^\s:*?/]*(:\d+)?(/[^\s:*?/]*)*"
    r"/step-\d{8,18}/rank-\d{5,}-[0-9a-f]{16}\.safetensors"
)

# How the last part of an attempt's name begins if the folder is an old checkpoint that is being deleted. Otherwise the
# folder is a draft: a save that is not committed yet.
_DELETING = "gone"


# ---- committed checkpoints ----


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_in(name: str) -> int | None:
    """Return the step whose checkpoint has this name; None if no step has it."""
    # A step has only one name, padded to eight digits: "step-000000007" is not a name of step 7.
    match = _COMMITTED.fullmatch(name)
    return int(match[1]) if match else None


def committed_names(folders: Iterable[str]) -> list[str]:
    """Return the names of committed checkpoints among the names of `folders`, the newest first."""
    steps = {step: name for name in folders if (step := step_in(name)) is not None}
    return [steps[step] for step in sorted(steps, reverse=True)]


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}{TENSOR_SUFFIX}"


def aside_name(name: str, suffix: Literal["damaged", "rewound"], taken: Container[str]) -> str:
    """Return the first name that is not `taken` for a checkpoint that is set aside."""
    # The same step may have been set aside before.
    candidates = (f"{name}.{suffix}{number or ''}" for number in itertools.count())
    return next(candidate for candidate in candidates if candidate not in taken)


def is_set_aside(name: str) -> bool:
    return _SET_ASIDE.fullmatch(name) is not None


def replaced_name(name: str) -> str:
    """Return the name that a checkpoint gets when another checkpoint of its step is about to take its place."""
    return f"{name}{_REPLACED}"


def name_before_replacement(name: str) -> str | None:
    """Undo `replaced_name`. Return None for any other name."""
    before = name.removesuffix(_REPLACED)
    return before if before != name and step_in(before) is not None else None


# ---- names of attempts: of their drafts, and of the checkpoints that they delete ----


def draft_name(step: int, token: str, number: int) -> str:
    """Return the name of the folder of a save that is not committed yet."""
    # The token keeps writers of an earlier attempt out of the folder, and the number keeps out writers of an earlier
    # save of the same step.
    return f"{folder_name(step)}.tmp-{token}-{number}"


def deleting_name(name: str, token: str) -> str:
    """Return a new name for a checkpoint that is about to be deleted."""
    return f"{name}.tmp-{token}-{_DELETING}{secrets.token_hex(4)}"


def token_in(name: str) -> str | None:
    """Return the token of the attempt that writes or deletes this folder; None if it is not such a folder."""
    match = _OF_ATTEMPT.fullmatch(name)
    return match[1] if match else None


def is_draft(name: str) -> bool:
    """Return whether a folder is a save that is not committed yet."""
    return token_in(name) is not None and not is_half_deleted(name)


def is_half_deleted(name: str) -> bool:
    """Return whether a folder is a checkpoint that is being deleted, or could not be deleted as a whole."""
    match = _OF_ATTEMPT.fullmatch(name)
    return match is not None and (match[2] or "").startswith(f"-{_DELETING}")


def confirmation_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def is_confirmation(name: str) -> bool:
    return _CONFIRMATION.fullmatch(name) is not None


# ---- objects in a store, and the files that hold their URLs (`checkpoint/storage/folder.py`) ----

# The end of the name of a file that holds the URL of an object, and how it begins once the object is to be deleted.
URL_SUFFIX = ".object"
DELETED_PREFIX = "deleted-"


def object_url(store: str, run: str, folder: str, file: str) -> str:
    """Return a URL that was never used for a file of a checkpoint, with names in it that people recognize."""
    run = re.sub(r"[^\w.-]", "_", run)
    step = folder.partition(".")[0]
    return f"{store}/{run}/{step}/{file.removesuffix(TENSOR_SUFFIX)}-{secrets.token_hex(8)}{TENSOR_SUFFIX}"


def is_object_url(url: str) -> bool:
    """Return whether `object_url` makes such URLs."""
    return _OBJECT.fullmatch(url) is not None
