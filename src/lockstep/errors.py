"""Errors for people: the problem in one sentence, what was found, and the exact thing to type.

`UserError` is for what the user can fix and is shown without a traceback. Bugs of Lockstep itself are `assert`s and
ordinary exceptions; they keep their traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """A problem that the user can fix.

    problem  a sentence that states the problem with its value, without a period
    found    what was found instead, if that adds something; "" leaves the line out
    fix      the exact thing to type or to change
    """

    def __init__(self, problem: str, found: str, fix: str):
        # All three are passed on, so that the error survives pickling between processes.
        super().__init__(problem, found, fix)
        self.problem = problem
        self.found = found
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.problem]
        if self.found:
            lines.append(f"  found: {self.found}")
        lines.append(f"  do:    {self.fix}")
        return "\n".join(lines)


class ConfigError(UserError):
    """All problems of a configuration, reported together instead of one run at a time."""

    def __init__(self, problems: list[UserError]):
        noun = "problem" if len(problems) == 1 else "problems"
        super().__init__(
            f"the configuration has {len(problems)} {noun}",
            "; ".join(problem.found for problem in problems if problem.found),
            "; ".join(problem.fix for problem in problems),
        )
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join([self.problem + ":", *(f"- {problem}" for problem in self.problems)])

    def __reduce__(self) -> tuple:
        return ConfigError, (self.problems,)


class RanksFailed(UserError):
    """Ranks that `lockstep.fit` has started failed. Their launcher has already shown the reason."""


class SmallerMicroBatch(Exception):
    """The device ran out of memory under micro_batch=auto, and a smaller size was recorded: a restart makes sense."""


class Preempted(SystemExit):
    """The run was preempted (SIGTERM, SIGUSR1 or Ctrl-C) and has saved its state. Uncaught, it sets the exit code."""

    CODE = 75  # EX_TEMPFAIL of sysexits.h: a scheduler may run the command again
    INTERRUPTED = 130  # 128 + SIGINT, as a shell reports Ctrl-C

    def __init__(self, step: int, signal: str, checkpoint: str | None):
        super().__init__(self.INTERRUPTED if signal == "SIGINT" else self.CODE)
        self.step = step
        self.signal = signal
        self.checkpoint = checkpoint  # the path of the newest one; None if there is none
