"""What the decisions know about a job from outside: its command, the settings of its task, and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.launch.job import Job, LauncherSettings
from lockstep.run_folder.checkpoint_facts import CheckpointFacts


@dataclass
class JobFacts:
    """Facts about a job. Only `JobStateMachine` changes them, when something is reported to it."""

    job: Job
    settings: LauncherSettings  # the defaults until rank 0 has read those of the task
    checkpoints: CheckpointFacts

    @property
    def newest_step(self) -> int | None:
        """The step of the newest checkpoint; None if there is none."""
        return self.checkpoints.newest_step

    @property
    def where_to_resume(self) -> str:
        """Where the next attempt begins: "the beginning", or a checkpoint."""
        return "the beginning" if self.newest_step is None else f"the checkpoint of step {self.newest_step}"

    @property
    def how_to_resume(self) -> str:
        """The command to type after the end of the job, in a sentence."""
        return f"To resume from {self.where_to_resume}: {self.job.resume_command}"
