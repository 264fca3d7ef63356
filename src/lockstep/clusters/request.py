"""What `lockstep launch` was asked to run, before a platform has given it a shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.launch.job import Bounds


@dataclass(frozen=True)
class JobRequest:
    """One training job: the words of `lockstep train`, and on how many machines and processes it runs."""

    target: str
    overrides: tuple[str, ...]  # key=value, without run_dir
    config_files: tuple[str, ...]
    script_arguments: tuple[str, ...]  # what follows -- on the command line
    run_dir: Path
    nproc: str  # processes on each machine, as typed: a count, a range or auto
    nnodes: Bounds
    resume: str | None = "auto"  # as the settings say; auto without them: a node that starts again resumes

    @property
    def name(self) -> str:
        """The job's name, for people and for queues."""
        return self.run_dir.name

    def train_command(self, *options: str, program: Sequence[str] = ("lockstep",)) -> list[str]:
        """Return the words of the command for one machine.

        `options` are added as they are, such as `--join HOST:PORT`.
        """
        size = ["--nproc", self.nproc, "--nnodes", str(self.nnodes).replace("..", ":")]
        return self.rank_command(*size, *options, program=program)

    def rank_command(self, *options: str, program: Sequence[str] = ("lockstep",)) -> list[str]:
        """Return the words of the command that trains as one rank, for a platform that starts the ranks itself."""
        resume = [] if self.resume is None else ["--resume", self.resume]
        return [*program, "train", *self.target_words, *options, *resume, *self.last_words]

    @property
    def target_words(self) -> list[str]:
        """The target with its settings, and the files of settings."""
        files = [word for path in self.config_files for word in ("--config", path)]
        return [self.target, *self.overrides, f"run_dir={self.run_dir}", *files]

    @property
    def last_words(self) -> list[str]:
        """The arguments of a script, which end a command."""
        return ["--", *self.script_arguments] if self.script_arguments else []
