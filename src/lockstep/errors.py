"""Errors for people: what was asked, what was found, and the exact thing to type."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend. Shown without a traceback.

    Our own mistakes are `assert`s and ordinary exceptions; they keep their traceback.
    """

    def __init__(self, asked: str, found: str, fix: str):
        super().__init__(asked, found, fix)
        self.asked, self.found, self.fix = asked, found, fix

    def __str__(self) -> str:
        return f"{self.asked}\n  found: {self.found}\n  do:    {self.fix}"


class ConfigError(UserError):
    """Every problem of a configuration at once, so that nobody fixes them one run at a time."""

    def __init__(self, problems: list[UserError]):
        noun = "problem" if len(problems) == 1 else "problems"
        super().__init__(
            f"the configuration has {len(problems)} {noun}",
            "; ".join(problem.found for problem in problems),
            "; ".join(problem.fix for problem in problems),
        )
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join([self.asked + ":", *(f"- {problem}" for problem in self.problems)])

    def __reduce__(self) -> tuple:
        return ConfigError, (self.problems,)


class RanksFailed(UserError):
    """Of processes that `lockstep.fit` has started: their launcher has shown why, a script need not say it again."""


class SmallerMicroBatch(Exception):
    """Out of memory under micro_batch=auto: a note with a smaller size has been left, so trying again makes sense."""


class Preempted(SystemExit):
    """The run was asked to leave (SIGTERM, SIGUSR1, Ctrl-C), and has saved its state. Uncaught, it is the exit code."""

    CODE = 75  # "temporary failure": run it again
    INTERRUPTED = 130

    def __init__(self, step: int, signal: str, checkpoint: str | None):
        super().__init__(self.INTERRUPTED if signal == "SIGINT" else self.CODE)
        self.step, self.signal, self.checkpoint = step, signal, checkpoint


def some_names(names: list[str], most: int = 5) -> str:
    """Return the first few names, and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
