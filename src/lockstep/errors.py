"""Errors for people: the problem in one sentence, what was found, and the exact thing to type.

`UserError` is for what the user can fix and is shown without a traceback. Bugs of Lockstep itself are `assert`s and
ordinary exceptions; they keep their traceback.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from enum import IntEnum
from pathlib import Path
from typing import Any
from unicodedata import category

# Characters that change the direction of the text after them: a name may look like another name.
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class ExitCode(IntEnum):
    """The exit codes of `lockstep train`, for the platform that runs it.

    Any other code, such as 137 after SIGKILL, means that the launcher itself was killed: it is restarted, as often as
    the platform was allowed to.
    """

    FINISHED = 0
    FAILED = 1
    REFUSED = 2
    RESTART = 75  # EX_TEMPFAIL of sysexits.h
    INTERRUPTED = 130  # 128 + SIGINT, as a shell reports Ctrl-C

    @property
    def advice(self) -> str:
        """What a platform should do: "finished", "restart" or "never restart"."""
        return EXIT_CODES[self][0]

    @property
    def meaning(self) -> str:
        return EXIT_CODES[self][1]


# Code -> what a platform should do, and what has happened. docs/multi_node.md has the same table.
EXIT_CODES: dict[ExitCode, tuple[str, str]] = {
    ExitCode.FINISHED: ("finished", "the run ended as planned"),
    ExitCode.FAILED: ("never restart", "it failed, and was restarted as often as makes sense"),
    ExitCode.REFUSED: ("never restart", "a mistake that you can fix, which the same command would make again"),
    ExitCode.RESTART: ("restart", "it was preempted by a signal, or machines are missing"),
    ExitCode.INTERRUPTED: ("never restart", "it was stopped by Ctrl-C"),
}


def final_codes(elastic: bool) -> list[int]:
    """Return the codes with which one launcher ends the whole job, whatever the other launchers say.

    In an elastic job, a launcher that fails may have failed alone: the others continue.
    """
    codes = [code.value for code in ExitCode if code.advice == "never restart"]
    return [code for code in codes if not (elastic and code == ExitCode.FAILED)]


# `srun` returns the highest exit code of its tasks. Codes that must win over 75, and over those of signals (up to 192),
# are given as these numbers if the variable lists them: the batch script translates them back.
SRUN_CODES = {ExitCode.INTERRUPTED: 241, ExitCode.REFUSED: 242, ExitCode.FAILED: 243}
FINAL_CODES = "LOCKSTEP_FINAL_CODES"


def code_for_srun(code: Any, final: str) -> Any:
    """Return the exit code of a task of srun, raised if it is one of the `final` ones: "1 2 130"."""
    return SRUN_CODES[ExitCode(code)] if str(code) in final.split() else code


class UserError(Exception):
    """A problem that the user can fix.

    problem  a sentence that states the problem with its value, without a period
    found    what was found instead, if that adds something; "" leaves the line out
    fix      the exact thing to type or to change
    cause    the mistake, if `lockstep verify` can name it: a key of `causes.CAUSES`
    """

    # The exit code of a command that ends with this error.
    exit_code = ExitCode.REFUSED

    def __init__(self, problem: str, found: str, fix: str, cause: str = ""):
        # All are passed on, so that the error can be pickled, or raised on another rank: UserError(*error.args).
        super().__init__(problem, found, fix, *filter(None, [cause]))
        self.problem = problem
        self.found = found
        self.fix = fix
        self.cause = cause

    def __str__(self) -> str:
        found = f"\n  found: {self.found}" if self.found else ""
        return f"{self.problem}{found}\n  do:    {self.fix}"


class DeviceLostError(UserError):
    """The same, after an error that leaves this process without its GPU. Freeing a tensor would abort the process."""


class ConfigError(UserError):
    """All problems of a configuration, reported together instead of one per attempt."""

    def __init__(self, problems: list[UserError]):
        single = len(problems) == 1
        super().__init__(
            problems[0].problem if single else f"the configuration has {len(problems)} problems",
            "; ".join(problem.found for problem in problems if problem.found),
            "; ".join(problem.fix for problem in problems),
        )
        self.problems = problems

    # One entry for each problem, with its own found and do lines.
    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        return "\n".join([self.problem + ":", *(f"- {problem}" for problem in self.problems)])

    # Pickling would call the constructor with the three texts.
    def __reduce__(self) -> tuple:
        return ConfigError, (self.problems,)


class PeersMissing(UserError):
    """Other ranks or machines did not come in time. They may come if the command runs again."""

    exit_code = ExitCode.RESTART


class RanksFailed(UserError):
    """Ranks that `lockstep.fit` started failed. Their launcher already showed the reason."""


class OutOfStep(RuntimeError):
    """The ranks are not in the same collective. `ranks` are out of step; this rank has only noticed it."""

    def __init__(self, message: str, ranks: Sequence[int] = ()):
        super().__init__(message)
        self.ranks = list(ranks)


class SmallerMicroBatch(Exception):
    """The device ran out of memory under micro_batch=auto. A smaller size was recorded, so a restart makes sense."""


class Preempted(SystemExit):
    """The run was preempted (SIGTERM, SIGUSR1 or Ctrl-C), after a save. Uncaught, it sets the exit code."""

    def __init__(self, step: int, signal: str, checkpoint: str | None, save_failed: bool = False):
        super().__init__(self.code_of(signal))
        self.step = step
        self.signal = signal
        self.checkpoint = checkpoint  # the path of the newest one; None if there is none, or if the save failed
        self.save_failed = save_failed  # what was trained since the newest checkpoint is lost

    @staticmethod
    def code_of(signal: str | None) -> int:
        """Return the exit code of a run that this signal has preempted."""
        return (ExitCode.INTERRUPTED if signal == "SIGINT" else ExitCode.RESTART).value


def printable(value: object) -> str:
    """Return text that cannot steer a terminal or mislead a reader: control characters are written as escapes.

    Text from the wire, from files, exceptions and logs passes through here before it is shown. Characters that change
    the direction of text, and surrogates, which no terminal can show, are written as escapes too.
    """
    text = str(value)
    # Most text is harmless: a report has hundreds of such cells.
    if text.isascii() and text.isprintable():
        return text

    text = text.replace("\r\n", "\n")
    unsafe = {c for c in set(text) - {"\n", "\t"} if category(c) in ("Cc", "Cs") or c in _DIRECTIONS}
    for character in unsafe:
        text = text.replace(character, character.encode("unicode_escape").decode())

    return text


def message_of(error: BaseException) -> str:
    """Return the message of an error; its type if it has none, as a TimeoutError often does. Never empty."""
    return str(error) or type(error).__name__


def some_names(names: list[str], most: int = 5) -> str:
    """Return the first few names, and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def likeness(typed: str, name: str) -> float:
    """Return how much a name is like what was typed: from 0 to 1, and above 1 if at most one letter was mistyped."""
    typed, name = typed.casefold(), name.casefold()
    ratio = SequenceMatcher(None, typed, name).ratio()
    if typed == name:
        return 3 + ratio

    # A wrong letter, or two in the wrong order, are likelier than a letter too many: dpp is ddp, not pp. A slip leaves
    # too little of a word of one or two letters.
    is_slip = min(len(typed), len(name)) >= 2 and max(len(typed), len(name)) >= 3 and _is_one_slip(typed, name)
    return 1 + (len(typed) == len(name)) + ratio if is_slip else ratio


def _is_one_slip(typed: str, name: str) -> bool:
    """Return whether one letter is missing, superfluous or wrong, or two that follow each other were swapped."""
    shorter, longer = sorted((typed, name), key=len)
    start = next((at for at, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(shorter))
    one, other = shorter[start:], longer[start:]

    if len(one) < len(other):
        return one == other[1:]

    return one[1:] == other[1:] or (one[:2] == other[1::-1] and one[2:] == other[2:])


def nearest_name(typed: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name that is most like what was typed; None if none is as like as `cutoff`. With 0, one always is."""
    best = max(names, key=lambda name: likeness(typed, name), default=None)
    return best if best is not None and likeness(typed, best) >= cutoff else None


def unknown_name(key: str, name: object, known: Iterable[str], is_list: bool = False) -> UserError:
    """Return the error for a setting whose value is not one of the `known` names, or not a list of them."""
    names = list(known)
    nearest = nearest_name(str(name), names, cutoff=0.0)
    found, fix = (f"[{name}]", f"[{nearest}]") if is_list else (name, nearest)
    return UserError(f"{key}={found} is not known", f"{key} takes {', '.join(names)}", f"set {key}={fix}")


def shell_word(value: object) -> str:
    """Return a path or a target as it is typed in a shell, in quotes if it needs any."""
    text = str(value)
    # A shell takes letters of all alphabets, and shlex.quote only those of ASCII.
    plain = "".join("a" if character.isalnum() else character for character in text)
    return text if shlex.quote(plain) == plain else shlex.quote(text)


def plural(count: int, one: str, many: str = "") -> str:
    """Return "1 rank" or "2 ranks"; `many` is for what needs more than an s."""
    return f"{count} {one}" if count == 1 else f"{count} {many or one + 's'}"


def pip_install(extra: str) -> str:
    """Return the command that installs an extra of this package, from where the package itself has come."""
    # Here, because every command imports this module.
    import json
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    # An installation from an index has no such file.
    try:
        origin = json.loads(metadata.distribution("lockstep-train").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        origin = {}

    # A checkout. With -e a change of its files needs no further installation.
    if "dir_info" in origin:
        folder = Path(unquote(urlsplit(origin["url"]).path))
        place = "." if folder == Path.cwd() else folder
        option = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {option}'{place}[{extra}]'"

    if "vcs_info" in origin:
        return f"pip install 'lockstep-train[{extra}] @ {origin['vcs_info']['vcs']}+{origin['url']}'"

    return f"pip install 'lockstep-train[{extra}]'"


# More ranks than this are listed as ranges, and no more ranges than this.
MOST_RANKS_LISTED = 16


def listed_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1", or "ranks 0, 2"; of many ranks the ranges, "ranks 0 to 7, 9 to 99", and of these the first."""
    texts = list(map(str, ranks))
    if len(ranks) > MOST_RANKS_LISTED:
        # A range goes on as long as a rank is one above the rank before it.
        ordered = sorted(ranks)
        firsts = [rank for rank, before in zip(ordered, [None, *ordered], strict=False) if before != rank - 1]
        lasts = [rank for rank, after in zip(ordered, [*ordered[1:], None], strict=True) if after != rank + 1]
        texts = [str(a) if a == b else f"{a} to {b}" for a, b in zip(firsts, lasts, strict=True)]

    return f"{'ranks' if len(ranks) > 1 else 'rank'} {some_names(texts, MOST_RANKS_LISTED)}"
