"""Find the newest valid checkpoint. All ranks agree on it before any of them changes a weight.

Every byte is verified against its digest before a tensor is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from lockstep.checkpoint.integrity import deleted_error, verify_checkpoint
from lockstep.checkpoint.manifest import (
    Damaged,
    Forbidden,
    InvalidCheckpoint,
    Manifest,
    Missing,
    Unreadable,
    WrongFormat,
)
from lockstep.checkpoint.reader import CheckpointReader, unreadable_error
from lockstep.checkpoint.storage.folder import Checkpoint, CheckpointStorage, list_checkpoints
from lockstep.checkpoint.storage.retry import Gather, retry_together, run_on_all_ranks
from lockstep.checkpoint.storage.transitions import owner_of
from lockstep.errors import UserError, shell_word
from lockstep.run_folder.checkpoint_names import step_in
from lockstep.runtime.context import Runtime

# How many invalid checkpoints in a row are examined before giving up.
MAX_INVALID = 50

# How many checkpoints in a row may be deleted by their run while they are examined.
MAX_DELETED = 10

# How many times ranks look at the folder before they conclude that their disks are separate, and the pause between two
# looks. NFS may show a directory as it was up to a minute ago.
MAX_LOOKS = 14
LOOK_PAUSE_S = 5.0


@dataclass(frozen=True)
class VerifyingRanks:
    """The ranks that look for a checkpoint and verify it together, from the point of view of one rank."""

    rank: int
    world_size: int
    gather: Gather
    beat: Callable[[], None] = lambda: None  # called after each chunk that is read

    @classmethod
    def of(cls, runtime: Runtime) -> VerifyingRanks:
        """Return all ranks of a run. The heartbeat shows that they advance."""
        world = runtime.world
        return cls(world.rank, world.size, runtime.collectives.all_gather_json, runtime.heartbeat.keep_alive)

    @classmethod
    def alone(cls, beat: Callable[[], None] = lambda: None) -> VerifyingRanks:
        """Return this process alone, which asks no other rank."""
        return cls(0, 1, lambda value: [value], beat)


class Found(NamedTuple):
    """The newest valid checkpoint, and the problem of each newer one, all of which are damaged."""

    reader: CheckpointReader
    skipped: list[Damaged]


class ReportedProblem(NamedTuple):
    """An `InvalidCheckpoint`, as ranks send it to each other."""

    label: str  # of its class
    file: str
    why: str
    missing: bool = False


def wait_for_newest_valid(
    storage: CheckpointStorage, runtime: Runtime, timeout_s: float, only: str | None = None
) -> Found | None:
    """Call `newest_valid` until all files can be read, for `timeout_s` seconds; then let StorageUnavailable pass.

    The reader waits as long. Collective.
    """
    ranks = VerifyingRanks.of(runtime)
    return retry_together(partial(newest_valid, storage, ranks, only, reader_timeout_s=timeout_s), runtime, timeout_s)


def newest_valid(
    storage: CheckpointStorage, ranks: VerifyingRanks, only: str | None = None, reader_timeout_s: float | None = None
) -> Found | None:
    """Return the newest valid checkpoint, or the one named `only`; None if there is no checkpoint.

    Collective: each rank verifies every byte of its share of the files, and all ranks get the same result. Damaged
    checkpoints are skipped. If a live run deletes the newest meanwhile, the checkpoints are listed again.

    All ranks raise StorageUnavailable if any of them cannot list the checkpoints or read a file, or does not see a file
    that another rank sees, and a UserError if the newest that is not damaged was written by another version of
    Lockstep.
    """
    # The newest checkpoint comes first.
    names = _agreed_names(storage, ranks, only)
    damaged: dict[str, Damaged] = {}
    deleted_in_a_row = 0

    while remaining := [name for name in names if name not in damaged]:
        checkpoint = Checkpoint(storage, remaining[0])
        manifest, problems = _verify_together(checkpoint, ranks)
        if manifest is not None and not problems:
            newer = names[: names.index(checkpoint.name)]
            reader = CheckpointReader(checkpoint, manifest, ranks.beat, reader_timeout_s)
            return Found(reader, [damaged[name] for name in newer])

        # A live run may have deleted it meanwhile. Then it is not damaged, and there is a newer checkpoint now.
        exists = run_on_all_ranks(ranks.gather, checkpoint.exists, _cannot_list(storage))
        if not exists[0]:
            deleted_in_a_row += 1
            if only or deleted_in_a_row == MAX_DELETED:
                raise deleted_error(checkpoint)

            names = _agreed_names(storage, ranks, only)
            continue

        # Only a damaged checkpoint is lost. If this one is not, an older checkpoint would lose progress.
        problem = _combined(checkpoint, _with_late_files_unreadable(checkpoint, problems, ranks.gather))
        if not isinstance(problem, Damaged):
            older = names[names.index(checkpoint.name) + 1 :]
            raise _cannot_use_error(problem, Checkpoint(storage, older[0]) if older else None)

        damaged[checkpoint.name] = problem
        deleted_in_a_row = 0

        # A bad disk damages a few checkpoints. Examining thousands of them would take too long.
        if len(damaged) >= MAX_INVALID and len(names) > MAX_INVALID:
            raise UserError(
                f"none of the newest {MAX_INVALID} of {len(names)} checkpoints in {storage.root} is valid",
                str(next(iter(damaged.values()))),
                "delete them, or name the checkpoint to use: --resume RUN/checkpoints/step-NNNNNNNN",
            )

    if damaged:
        raise _all_damaged_error(storage, list(damaged.values()), only)

    return None


def _verify_together(checkpoint: Checkpoint, ranks: VerifyingRanks) -> tuple[Manifest | None, list[ReportedProblem]]:
    """Verify this rank's share of the files. Return the manifest, and the problems that any rank has found."""
    manifest, problems = verify_checkpoint(checkpoint, ranks.rank, ranks.world_size, ranks.beat)
    found = [
        ReportedProblem(problem.label, problem.file, problem.why, isinstance(problem, Missing)) for problem in problems
    ]
    results = ranks.gather([found, manifest.digest if manifest else None])

    # Each problem once, in the same order on every rank.
    found_by_any = sorted({ReportedProblem(*fields) for rank_problems, _ in results for fields in rank_problems})

    # The digests show whether all ranks read the same manifest.
    if not found_by_any and len({digest for _, digest in results}) > 1:
        raise _not_shared_error("the ranks read different manifests there")

    return manifest, found_by_any


def _with_late_files_unreadable(
    checkpoint: Checkpoint, problems: list[ReportedProblem], gather: Gather
) -> list[ReportedProblem]:
    """Return the problems. A missing file that any rank sees is only unreadable now: it is not lost. Collective."""
    missing = [problem.file for problem in problems if problem.missing]
    if not missing:
        return problems

    problem = f"the files of {checkpoint.path} cannot be looked up"
    seen = run_on_all_ranks(gather, lambda: [file for file in missing if checkpoint.has(file)], problem)
    late = {file for files in seen for file in files}
    why = "some ranks see it, and others do not see it yet"
    return [
        ReportedProblem(Unreadable.label, reported.file, why)
        if reported.missing and reported.file in late
        else reported
        for reported in problems
    ]


def _agreed_names(storage: CheckpointStorage, ranks: VerifyingRanks, only: str | None) -> list[str]:
    """Return the names of the checkpoints that all ranks examine: what rank 0 lists, or `only` this one. Collective.

    Raise a UserError if the ranks have separate disks: they would resume separately. A rank has a different disk if

    - it does not see what rank 0 listed,
    - it lists a newer checkpoint than rank 0, or
    - it reads a different owner's token.

    All ranks raise StorageUnavailable if any of them cannot look.
    """
    ask_all = partial(run_on_all_ranks, ranks.gather, problem=_cannot_list(storage))
    differing: list[int] = []
    for look in range(MAX_LOOKS):
        # A rank may have an old listing of the directory. All ranks know what each has seen, so all of them look again.
        if look > 0:
            time.sleep(LOOK_PAUSE_S)

        # This is also a barrier: rank 0 has claimed the folder before.
        listed = ask_all(partial(_listed_names, storage, only))
        names = listed[0]

        seen = ask_all(partial(_seen_here, storage, names, listed[ranks.rank]))
        differing = [rank for rank, found in enumerate(seen) if found != seen[0]]
        if not differing:
            return names

    raise _not_shared_error(f"rank {differing[0]} finds different files there than rank 0")


def _cannot_list(storage: CheckpointStorage) -> str:
    return f"the checkpoints in {storage.root} cannot be listed"


def _listed_names(storage: CheckpointStorage, only: str | None) -> list[str]:
    return [only] if only else [checkpoint.name for checkpoint in list_checkpoints(storage)]


def _seen_here(storage: CheckpointStorage, names: list[str], listed: list[str]) -> list[Any]:
    """Return which of rank 0's `names` this rank sees, whether it has `listed` a newer one, and the owner."""
    visible = sorted(set(names) & set(storage.folders()))

    # Both lists begin with the newest.
    return [visible, _step_of_first(listed) > _step_of_first(names), owner_of(storage)]


def _step_of_first(names: list[str]) -> int:
    """Return the step of the newest checkpoint of a list; -1 if it has none."""
    step = step_in(names[0]) if names else None
    return -1 if step is None else step


def _combined(checkpoint: Checkpoint, problems: Sequence[ReportedProblem]) -> InvalidCheckpoint:
    """Return one error for all problems of a checkpoint."""
    # Ranks may find problems of different kinds. The first kind in this list that any rank has found counts.
    labels = {problem.label for problem in problems}
    kind = next(kind for kind in (Damaged, Forbidden, Unreadable, WrongFormat) if kind.label in labels)

    # The error names the first file, and its reason lists the rest.
    first = problems[0].file
    reasons = "; ".join(f"{problem.file}: {problem.why}" for problem in problems)
    return kind(checkpoint, first, reasons.removeprefix(f"{first}: "))


def _cannot_use_error(problem: InvalidCheckpoint, older: Checkpoint | None) -> UserError:
    """Return the error for a checkpoint that may be intact, but cannot be loaded. `older` is the one before it."""
    otherwise = ""
    if older:
        path = shell_word(older.path)
        otherwise = f"; or name the checkpoint before it: --resume {path}, or init_from={path}"

    if isinstance(problem, Unreadable):
        return unreadable_error(problem, otherwise)

    fix = "use the version of Lockstep that wrote it, or choose another one: lockstep ckpt ls RUN"
    return UserError(f"the checkpoint {problem.checkpoint.path} {problem.predicate}", str(problem), f"{fix}{otherwise}")


def _all_damaged_error(storage: CheckpointStorage, damaged: Sequence[Damaged], only: str | None) -> UserError:
    """Return the error for a run whose checkpoints are all damaged, or for a damaged one that the user named."""
    what = f"the checkpoint {damaged[0].checkpoint.path}" if only else f"every checkpoint in {storage.root}"
    way_out = "choose another checkpoint: lockstep ckpt ls RUN" if only else "start again in a new run_dir"
    found = "; ".join(map(str, damaged))
    return UserError(f"{what} {Damaged.predicate}", found, f"restore the files, or {way_out}")


def _not_shared_error(found: str) -> UserError:
    """Return the error for ranks that find different checkpoints."""
    return UserError(
        "run_dir is not on a file system that all ranks share",
        found,
        "set run_dir to a folder on a file system that all machines share",
    )
