"""The verb `lockstep launch`: what all platforms have in common.

A platform is a module with three functions (`Platform`): its options, the files that describe a job to it, and their
submission. What was typed is checked here first, as `lockstep train` does it: a job that waits for hours in a queue
must not fail in its first second because of a misspelt key.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from lockstep import targets
from lockstep.clusters.request import JobRequest
from lockstep.errors import UserError
from lockstep.launch.job import parse_nnodes, parse_nproc


class Platform(Protocol):
    """The functions of a module of this package. They import what only this platform needs themselves."""

    # What `lockstep launch --help` says about it.
    HELP: str

    # False if the run folder is a path of other machines, where this one cannot write. True if it is left out.
    SEES_RUN_DIR: bool

    # True if only this user may read the files. False if it is left out.
    PRIVATE: bool

    # False if the platform starts a job only once. True if it is left out.
    STARTS_AGAIN: bool

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that only this platform has."""
        ...

    def render(self, request: JobRequest, options: argparse.Namespace) -> dict[str, str]:
        """Return the files that describe the job to the platform: name -> text. Raises a UserError if it cannot."""
        ...

    def submit(self, request: JobRequest, options: argparse.Namespace, files: dict[str, Path]) -> int:
        """Hand the written files to the platform. Return an exit code."""
        ...


# In the order in which `lockstep launch --help` lists them. A new platform is a module and a name here.
PLATFORMS: tuple[str, ...] = ("slurm", "ray", "kubernetes", "nodes")


def platform(name: str) -> Platform:
    return cast(Platform, import_module(f"lockstep.clusters.{name}"))


def add_options(parser: argparse.ArgumentParser) -> None:
    platforms = parser.add_subparsers(dest="platform", required=True, metavar="PLATFORM")
    for name in PLATFORMS:
        module = platform(name)
        one = platforms.add_parser(name, help=module.HELP, description=module.HELP)
        _add_common_options(one)
        module.add_options(one)


def _add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all platforms have."""
    parser.add_argument("target", metavar="TARGET", help="a recipe's name, FILE.py:CLASS, MODULE:CLASS, or SCRIPT.py")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="settings, such as steps=100")
    parser.add_argument("--config", action="append", default=[], metavar="F.yaml", help="a file of settings")
    parser.add_argument("--nproc", default="auto", metavar="N|auto", help="processes on each machine (default auto)")
    parser.add_argument("--nnodes", default="1", metavar="M|1:4", help="number of machines, or a range (default 1)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the files here (default: print them)")
    parser.add_argument("--submit", action="store_true", help="submit the job, instead of printing it")


def main(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Render a job for a platform; print it, write it, or submit it. Return an exit code."""
    chosen = platform(options.platform)
    request = make_request(options, overrides)
    if getattr(chosen, "STARTS_AGAIN", True):
        _refuse_other_resume(request)

    texts = chosen.render(request, options)

    if options.out is None and not options.submit:
        for name, text in texts.items():
            if len(texts) > 1:
                print(f"# ---- {name} ----")

            print(text, end="" if text.endswith("\n") else "\n")

        print("lockstep: not submitted; add --submit, or --out DIR to write it to files", file=sys.stderr)
        return 0

    folder = request.run_dir if getattr(chosen, "SEES_RUN_DIR", True) else Path("runs") / request.name
    files = write(texts, options.out or folder / "launch", getattr(chosen, "PRIVATE", False)) if texts else {}
    return chosen.submit(request, options, files) if options.submit else 0


def make_request(options: argparse.Namespace, overrides: Sequence[str]) -> JobRequest:
    """Check what was typed, as `lockstep train` does before it starts a process, and give the job its run folder."""
    # `lockstep --help` must not wait for pydantic.
    from lockstep.config import check, read_layers, strongest_value
    from lockstep.engine.checks.names import check_names
    from lockstep.run_folder.run_dir import new_run_dir

    layers = read_layers(options.config, overrides)
    targets.check(options.target)
    check(layers)
    check_names(layers)
    parse_nproc(options.nproc)
    nodes = parse_nnodes(options.nnodes)

    # All machines, and every restart of the job, need the same folder: it is chosen once, here.
    asked = strongest_value(layers, "run_dir")
    run_dir = Path(asked) if asked else new_run_dir(targets.name_of(options.target))
    rest = tuple(word for word in overrides if not word.startswith("run_dir="))
    return JobRequest(
        target=options.target,
        overrides=rest,
        config_files=tuple(options.config),
        script_arguments=tuple(options.script_arguments),
        run_dir=run_dir,
        nproc=options.nproc,
        nnodes=nodes,
        resume=strongest_value(layers, "resume") or "auto",
    )


def _refuse_other_resume(request: JobRequest) -> None:
    """Refuse to begin anew, or with another run's checkpoint, at every start of a job that is started again."""
    if request.resume != "auto":
        raise UserError(
            f"resume={request.resume} would hold for every start of this job",
            "the platform starts it again after a preemption, and it must continue in its run_dir then",
            "leave resume out, and set a run_dir of its own to begin a new run; to begin with a checkpoint of another "
            "run, first type: lockstep train ... --resume PATH run_dir=NEW, and stop it with Ctrl-C",
        )


def write(texts: dict[str, str], folder: Path, private: bool = False) -> dict[str, Path]:
    """Write the files of a job into a folder. Return name -> path."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            if private:
                (folder / name).touch(mode=0o600)
                (folder / name).chmod(0o600)  # it may have been there

            (folder / name).write_text(text)
    except OSError as error:
        raise UserError(
            f"the job's files cannot be written to {folder}", error.strerror or str(error), "use --out DIR"
        ) from error

    for name in texts:
        print(f"lockstep: wrote {folder / name}", file=sys.stderr)

    return {name: folder / name for name in texts}
