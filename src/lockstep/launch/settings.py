"""The settings of the task that the launcher needs."""

from __future__ import annotations

from lockstep.config.sections import HangConfig, RestartConfig
from lockstep.config.value_types import ConfigSection
from lockstep.errors import ExitCode


class Settings(ConfigSection):
    """The settings of the task that the launcher needs: when ranks count as hanging, and how often a job restarts.

    Until rank 0 has read them, the defaults apply.
    """

    hang: HangConfig = HangConfig()
    restart: RestartConfig = RestartConfig()

    @property
    def code_if_nodes_are_missing(self) -> ExitCode:
        """The platform may have other machines, unless the user wants no restart at all."""
        return ExitCode.RESTART if self.restart.per_hour else ExitCode.FAILED
