"""The run folder: where a run leaves everything it knows."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.config import Resolved, RunConfig, to_yaml
from lockstep.errors import UserError
from lockstep.launch.run_dir import (
    choose_run_dir,
    holds_a_run,
    is_checkpoint,
    lock,
    prepare,
    refuse_another_run,
    run_of,
)
from lockstep.runtime.context import Runtime

ATTEMPTS = ("LOCKSTEP_ATTEMPT", "TORCHELASTIC_RESTART_COUNT")  # set by our launcher, by torchrun


@dataclass
class RunFolder:
    path: Path
    shown: str  # as the user knows it
    origin: Path | None  # a checkpoint, or another run, to begin from; None: from scratch, or from this run's own
    continues: bool  # this run's own checkpoints count
    attempt: int  # 0, or how often the launcher has already started this run anew
    token: str  # of this attempt: what an earlier one still writes can be told apart
    lock: Any = None  # held open by rank 0

    def as_shown(self, path: Path) -> str:
        """A path in this folder, or any other, as the user would write it."""
        return str(Path(self.shown) / path.relative_to(self.path)) if path.is_relative_to(self.path) else str(path)

    def let_go(self) -> None:
        if self.lock is not None:
            self.lock.close()
            self.lock = None


def open_run_dir(config: RunConfig, name: str, runtime: Runtime) -> RunFolder:
    """The folder, chosen by rank 0 and agreed by all: the default name holds a time, which differs between ranks."""
    folder: RunFolder | None = None

    def prepare() -> dict[str, Any]:
        nonlocal folder
        folder = _prepare(config, name)
        return {
            "path": str(folder.path),
            "shown": folder.shown,
            "origin": folder.origin and str(folder.origin),
            "continues": folder.continues,
            "attempt": folder.attempt,
            "token": folder.token,
        }

    told = on_main(prepare, runtime)
    if folder is None:
        origin = Path(told["origin"]) if told["origin"] else None
        continues, attempt, token = told["continues"], told["attempt"], told["token"]
        folder = RunFolder(Path(told["path"]), told["shown"], origin, continues, attempt, token)
    blind = runtime.collectives.gather_json(not _mark(folder).exists())
    if runtime.is_main:
        _mark(folder).unlink()
    if any(blind):
        raise UserError(
            f"run_dir={folder.path}, seen by all ranks",
            f"rank {blind.index(True)} does not see what rank 0 has written there",
            "type run_dir=FOLDER on a file system that all machines share",
        )
    return folder


def on_main(act: Callable[[], Any], runtime: Runtime) -> Any:
    """What `act` returns on rank 0, on every rank; or the UserError that it raised, on every rank."""
    result, error = None, None
    if runtime.is_main:
        try:
            result = act()
        except UserError as problem:
            error = problem
    told = runtime.collectives.gather_json([result, error and [error.problem, error.found, error.fix]])[0]
    if told[1]:
        raise error or UserError(*told[1])
    return told[0]


def _prepare(config: RunConfig, name: str) -> RunFolder:
    attempt = max(int(os.environ.get(key, 0)) for key in ATTEMPTS)
    shown = choose_run_dir(config.run_dir, config.resume, name)
    path = Path(os.path.abspath(shown))  # the user's code may change the working folder
    if attempt == 0:
        refuse_another_run(shown, config.resume)
    origin = None if config.resume in ("auto", "never") else Path(config.resume)
    if origin is not None:
        run_of(origin)  # or an error that says what it is not
    here = origin is not None and run_of(origin).resolve() == path.resolve()
    if attempt == 0 and origin is not None and not here and holds_a_run(path):
        raise UserError(
            f"--resume {origin} run_dir={shown}",
            f"a folder that already holds another run: {shown}",
            f"type another run_dir; or --resume {shown} to go on with the run that is there",
        )
    own = origin is not None and here and not is_checkpoint(origin)
    if own:
        origin = None
    continues = attempt > 0 or own or config.resume == "auto"
    folder = RunFolder(path, str(shown), origin, continues, attempt, secrets.token_hex(4))
    try:
        prepare(path)
        (path / "checkpoints").mkdir(exist_ok=True)
        folder.lock = lock(path)
        for old in path.glob(".seen-*"):
            old.unlink()
        _mark(folder).touch()
    except OSError as error:
        raise UserError(
            f"run_dir={path}",
            f"{error.strerror}: {error.filename or path}",
            "type run_dir=FOLDER, one that you may write to",
        ) from error
    return folder


def _mark(folder: RunFolder) -> Path:
    return folder.path / f".seen-{folder.token}"


def write_head(run_dir: Path, resolved: Resolved, plan: dict[str, Any]) -> None:
    """What is known before the first step."""
    (run_dir / "config.yaml").write_text(to_yaml(resolved.config))
    (run_dir / "config.sources.json").write_text(json.dumps(resolved.sources, indent=2))
    (run_dir / "plan.json").write_text(json.dumps(plan, indent=2))
    (run_dir / "summary.json").unlink(missing_ok=True)  # of an earlier end: the run goes on


def finite(value: Any) -> Any:
    """JSON has no NaN: a number that is none becomes null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_weights(run_dir: Path, weights: dict[str, Tensor], aliases: dict[str, str]) -> None:
    """Under the model's own names; tied weights are stored once. An older file is replaced whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    staged = run_dir / "model.safetensors.tmp"
    try:
        save_file(weights, str(staged), metadata={"format": "pt", **aliases})
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(staged, run_dir / "model.safetensors")
    except (OSError, SafetensorError) as error:
        staged.unlink(missing_ok=True)
        raise UserError(
            f"to write the final weights to {run_dir}",
            str(error),
            f"make room, then add --resume {run_dir} to the same command: it goes on from the last checkpoint",
        ) from error


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    (run_dir / "summary.json").write_text(json.dumps(finite(summary), indent=2))
