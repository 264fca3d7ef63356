"""The options of `lockstep bench`, checked.

An option that a kind would ignore is refused, and so is a setting that the benchmark sets itself. The same checks hold
for callers in Python, so they are made by the options, not by the parser.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import targets
from lockstep.bench.cores import Cores, find_cores
from lockstep.config import flatten, read_layers
from lockstep.errors import UserError
from lockstep.runtime.host.resources import visible_gpus

# Settings that belong to the ranks of a measurement, or that every kind sets itself.
OF_THE_PROCESS = ("device", "backend", "threads", "steps", "epochs", "global_batch", "local_batch", "run_dir", "resume")

# Settings that a benchmark makes for its ranks, which only train. In a file of settings they are passed over.
SET_HERE = (
    "steps",
    "epochs",
    "resume",
    "run_dir",
    "threads",
    "log.progress",
    "evaluate",
    "checkpoint",
    "stop",
    "goals",
)

SET_BY_KIND = {"memory": ("micro_batch",), "data": ("data.workers",)}
BUILT_IN_TARGETS = ("gpt", "mlp")  # see `ranks/workload.py`


@dataclass
class BenchOptions:
    """The choice of measurements, and their lengths.

    Made from the command line, or by a caller in Python; both are checked alike when it is made. Sizes and counts that
    are not named have the defaults of the command.
    """

    target: str = "gpt"
    layers: list[Any] = field(default_factory=list)  # (source, values), as for `lockstep train`
    worlds: list[int] = field(default_factory=lambda: [1, 2])
    backends: list[str] = field(default_factory=list)  # backends of collectives; empty: the one for this machine
    repeats: int = 9  # rounds
    seconds: float | None = None  # as many rounds as fit into them, instead of `repeats` (weak and strong)
    block: int = 10  # steps of a turn
    batch: int | None = None  # samples per step: of a rank (weak), or of all ranks (strong); None: the target's own
    cores_per_rank: int = 0  # physical cores; 0: as many as the largest world allows
    cores: Cores = field(default_factory=find_cores)  # that the ranks share out
    max_mb: float = 256.0  # the largest message, in MB
    accumulation: list[int] = field(default_factory=lambda: [1, 4])
    megabytes: int = 400  # the size of a checkpoint
    steps: int = 500  # steps of the leak check
    ways: list[str] = field(default_factory=list)  # settings to compare with the target as it is, as words
    out: Path | None = None

    def __post_init__(self) -> None:
        """Refuse a measurement that is impossible, and choose the cores of a rank."""
        self._check_target()
        self._check_sizes()

        self.worlds = sorted(set(self.worlds))
        if not self.cores_per_rank:
            self.cores_per_rank = max(1, self.cores.usable // max(self.worlds))

    def _check_target(self) -> None:
        """Refuse a target that does not exist, or whose steps cannot be taken one by one."""
        if self.target in BUILT_IN_TARGETS:
            return

        targets.check(self.target)
        if targets.is_script(self.target):
            raise UserError(
                f"{self.target} is a script, whose loop cannot be stopped after a block of steps",
                "",
                "name a task: a recipe, or FILE.py:CLASS",
            )

    def _check_sizes(self) -> None:
        """Refuse numbers that make no sense. They may come from Python, so types are checked as well."""
        for name in ("repeats", "seconds", "block", "batch", "max_mb", "megabytes", "steps"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or value <= 0):
                raise UserError(f"--{name.replace('_', '-')} must be above 0", str(value), "use 1 or more")

        if not self.worlds or not all(isinstance(world, int) and world > 0 for world in self.worlds):
            raise UserError("the numbers of ranks are not numbers above 0", str(self.worlds), "use 1,2,4")

        cores = self.cores.usable
        if not isinstance(self.cores_per_rank, int) or not 0 <= self.cores_per_rank <= cores:
            raise UserError(
                f"--cores-per-rank {self.cores_per_rank} is not possible",
                f"this process may use {self.cores}",
                f"use 1 to {cores}, or 0 to share them out",
            )

    def arguments(self, **more: Any) -> dict[str, Any]:
        """Return the options for ranks that train the target, and `more`."""
        return {
            "target": self.target,
            "layers": self.layers,
            "batch": self.batch,
            "block": self.block,
            "threads": self.cores_per_rank,
            **more,
        }


def parse_worlds(text: str | None, cores: int) -> list[int]:
    """Return numbers of ranks; by default powers of two up to the number of devices or `cores`."""
    if text is None:
        most = visible_gpus() or cores
        return [world for world in (1, 2, 4, 8) if world <= max(2, most)]

    return sorted(set(parse_numbers("--worlds", text)))


def parse_numbers(option: str, text: str) -> list[int]:
    """Return the numbers of a list with commas. Raises a UserError."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"{option} {text} is not a list of numbers above 0", "", f"use {option} 1,2,4")
    return [int(word) for word in words]


def parse_backends(text: str | None) -> list[str]:
    """Return the names of a list with commas. Raises a UserError."""
    names = text.split(",") if text else []
    if unknown := [name for name in names if name not in ("nccl", "gloo")]:
        raise UserError(f"there is no backend {unknown[0]}", "", "use --backend nccl,gloo")
    return names


# The kinds that an option is for. All other kinds refuse it: they would ignore it.
FOR_KINDS = {
    "worlds": ("weak", "strong", "comm", "memory", "step", "checkpoint", "start", "recovery", "settings"),
    "backend": ("comm",),
    "seconds": ("weak", "strong"),
    "block": ("weak", "strong", "comm", "memory", "step", "data", "settings"),
    "batch": ("weak", "strong", "comm", "memory", "data", "settings"),
    "accumulation": ("memory", "step"),
    "max_mb": ("comm",),
    "megabytes": ("checkpoint",),
    "steps": ("memory",),
    "no_peers": ("step",),
    "way": ("settings",),
}


def check_kind(kind: str, typed: Mapping[str, Any]) -> None:
    """Refuse options that are for other kinds of benchmarks."""
    for name, kinds in FOR_KINDS.items():
        given = typed.get(name) not in (None, False, [])
        if given and kind not in (*kinds, "all"):
            option = f"--{name.replace('_', '-')}"
            raise UserError(
                f"bench {kind} has no option {option}", f"it is for {', '.join(kinds)}", f"leave {option} out"
            )

    if typed.get("seconds") and typed.get("repeats"):
        raise UserError("--seconds and --repeats both say how many rounds there are", "", "leave one of them out")


# The kinds that measure something of their own, with the advice for a user who names a target.
WITHOUT_TARGET = {
    "checkpoint": ("saves tensors of its own", "set their size with --megabytes"),
    "start": ("starts a script of its own", "leave them out"),
    "recovery": ("trains a small model of its own", "leave them out"),
}


def check_settings(
    kind: str, target: str, layers: Sequence[tuple[str, Mapping[str, Any]]], ways: Sequence[str] = ()
) -> None:
    """Refuse a target and settings that a kind of benchmark would ignore."""
    # A benchmark with a workload of its own takes nothing; "gpt" is what the parser fills in.
    keys = [key for _, values in layers for key in values]
    if kind in WITHOUT_TARGET and (target != "gpt" or keys):
        what, advice = WITHOUT_TARGET[kind]
        found = keys[0] if keys else target
        raise UserError(f"bench {kind} {what}, and takes no target and no settings", found, advice)

    if kind == "settings" and not ways:
        raise UserError(
            "bench settings has nothing to compare the target with",
            "",
            'name other settings with --way, once or more: --way exact=true --way "graph=auto compile=true"',
        )

    # The settings of all rows, and then the settings of each way alone.
    _check_typed(kind, layers)
    for way in ways:
        _check_way(way, target)
        _check_typed(kind, layers_of(way))

    if kind == "step" and (refusal := why_no_step(target, layers)):
        raise UserError(refusal, "", f"name one of its models: {', '.join(BUILT_IN_TARGETS)}, without settings")


def _check_typed(kind: str, layers: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse an option that was typed and would be passed over."""
    set_here = (*SET_HERE, *SET_BY_KIND.get(kind, ()))
    for source, values in layers:
        # Training may use the same file, so its other settings are passed over silently.
        if source != "command line":
            continue

        for key in flatten(values):
            in_section = key.startswith(tuple(f"{name}." for name in set_here))
            if in_section or key in set_here:
                raise UserError(
                    f"bench {kind} sets {key} itself",
                    "it only trains, on ranks with cores and folders of their own",
                    "set the cores with --cores-per-rank" if key == "threads" else f"leave {key} out",
                )


def _check_way(way: str, target: str) -> None:
    """Refuse a --way that changes a setting which all ways must share."""
    for _, values in layers_of(way):
        for key in flatten(values):
            if key in OF_THE_PROCESS:
                raise UserError(
                    f"--way cannot change {key}: all rows are measured on the same ranks",
                    "",
                    f"set {key} for all of them: lockstep bench settings {target} {key}=VALUE --way ...",
                )


def layers_of(way: str) -> list[Any]:
    """Return the settings of a --way, as layers. Raises a UserError if they are not settings."""
    try:
        words = shlex.split(way)
    except ValueError as error:
        raise UserError(f"--way {way} cannot be read: {error}", "", "use --way 'key=value key=value'") from None

    return read_layers([], words)


def why_no_step(target: str, layers: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return why `bench step` cannot measure this, or nothing: its loops are written for models of its own."""
    if target not in BUILT_IN_TARGETS:
        return f"bench step compares loops that are written for its own models, not {target}"

    # The hand-written loop knows the device and the model's own options, and nothing else.
    for _, values in layers:
        for key in values:
            if key.partition(".")[0] not in ("device", "task"):
                return f"bench step compares loops with settings of their own, and takes no {key}"

    return ""
