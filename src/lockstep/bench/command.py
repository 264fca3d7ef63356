"""`lockstep bench`: measures what was asked for, prints tables, and writes results, plots and a report.

One command measures one kind, or all of them. The kinds are modules of `bench/kinds`, which ask teams of ranks
(`bench/pool.py`) for turns; what a rank does in a turn is in `bench/ranks`. Every kind returns sections, which are
written after each kind, so that an interrupted `bench all` leaves what it has found.

This process imports no torch: it must not take cores or memory from the ranks that it measures.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.bench.cores import MEASURE, SIBLINGS, SYSTEM, Cores, find_cores
from lockstep.errors import ExitCode, UserError, pip_install, printable

if TYPE_CHECKING:
    from lockstep.bench.options import BenchOptions
    from lockstep.bench.pool import Pool
    from lockstep.bench.results import Result, Section

# The kinds of measurement, in the order of `bench all`.
KINDS = {
    "weak": "throughput against the number of ranks, with the same batch on every rank",
    "strong": "throughput against the number of ranks, with the same batch on all ranks together",
    "comm": "collectives from 1 KB to 256 MB, and the communication of a step, with buckets and hooks",
    "memory": "what a rank holds, by category and number of ranks; and whether it grows",
    "step": "cost of a step against a hand-written loop, and against other libraries where installed",
    "data": "samples per second of the loader, against what the model takes",
    "checkpoint": "how long training waits for a checkpoint, write and load rates, against torch.save and DCP",
    "start": "from the command to the first step, against torchrun with a script written by hand",
    "recovery": "how long training stands still after a rank was killed",
}
SETTINGS = "time and memory of a step with other settings (--way), in turns; not part of `all`"

# Sizes, unless they are typed: of one kind, and of `bench all`, which ends in minutes.
SIZES: dict[str, tuple[Any, Any]] = {
    "repeats": (9, 5),
    "block": (10, 5),
    "max_mb": (256.0, 16.0),
    "megabytes": (400, 100),
    "accumulation": ("1,4", "1"),
    "steps": (500, 150),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the verbs of `lockstep bench`."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, text in {**KINDS, "all": "everything above, with smaller sizes", "settings": SETTINGS}.items():
        _add_measuring(kinds.add_parser(name, help=text))

    compare = kinds.add_parser("compare", help="compare two results: what got faster, and what slower")
    compare.add_argument("before", type=Path, metavar="A")
    compare.add_argument("after", type=Path, metavar="B")

    again = kinds.add_parser("report", help="make plots and report.html again, from the results of a folder")
    again.add_argument("folder", type=Path, metavar="D")


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    """Add the options of all kinds. An option that a kind would ignore is refused later (`options.check_kind`)."""
    parser.add_argument(
        "target", nargs="?", default="gpt", metavar="TARGET", help="gpt, mlp, a recipe, or FILE.py:CLASS (default gpt)"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="settings of the target")
    parser.add_argument("--config", action="append", default=[], metavar="F.yaml", help="a file of settings")

    # Ranks, and how long each of them is measured.
    parser.add_argument("--worlds", metavar="1,2,4,8", help="numbers of ranks (default: what this machine has)")
    parser.add_argument("--backend", metavar="nccl,gloo", help="backends to compare (comm)")
    parser.add_argument("--repeats", type=int, metavar="N", help="rounds in which everything takes a turn")
    parser.add_argument("--seconds", type=float, metavar="S", help="as many rounds as fit into them (weak, strong)")
    parser.add_argument("--block", type=int, metavar="N", help="steps of a turn (default 10; all: 5)")
    parser.add_argument(
        "--batch", type=int, metavar="B", help="samples per step; weak: of a rank, strong: of all ranks"
    )
    parser.add_argument(
        "--cores-per-rank", type=int, default=0, metavar="N", help="physical cores (default: cores / largest world)"
    )
    parser.add_argument(
        "--siblings",
        choices=SIBLINGS,
        default=SYSTEM,
        help="which CPUs share a core: what the system says, measure it, or 2i and 2i + 1, i and i + half, none",
    )

    # Options of single kinds, which are named in their help.
    parser.add_argument("--accumulation", metavar="1,4", help="micro-batches per step (step)")
    parser.add_argument("--max-mb", type=float, metavar="MB", help="largest message (comm)")
    parser.add_argument("--megabytes", type=int, metavar="MB", help="size of the state (checkpoint)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of the leak check (memory)")
    parser.add_argument("--way", action="append", default=[], metavar="WORDS", help="settings to compare (settings)")
    parser.add_argument("--no-peers", action="store_true", help="leave other libraries out (step)")

    parser.add_argument("--out", type=Path, metavar="D", help="folder of the result (default: bench/KIND-TIME)")


def main(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Carry out `lockstep bench`. Returns 1 if a target was judged and missed."""
    if options.kind == "compare":
        from lockstep.bench.compare import compare

        print(printable(compare(options.before, options.after)))
        return ExitCode.FINISHED

    if options.kind == "report":
        from lockstep.bench.page import write_pictures_and_page
        from lockstep.bench.results import read

        print(write_pictures_and_page(read(options.folder), options.folder))
        _explain_missing_plots(options.folder)
        return ExitCode.FINISHED

    return _measure(options, overrides)


def _measure(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Measure the kinds that were asked for, one after the other, and write everything."""
    from lockstep.bench import results
    from lockstep.bench.hardware import as_record, this_machine
    from lockstep.bench.page import write_pictures_and_page
    from lockstep.bench.pool import Pool
    from lockstep.bench.projection import section_of

    # All mistakes of the command are found here, before anything is started.
    asked = _options(options, overrides, find_cores(options.siblings))

    folder = asked.out
    assert folder is not None
    result = results.begin(folder, shlex.join(["lockstep", *options.arguments]), as_record(this_machine()))
    print(printable(f"hardware  {result.hardware['text']}"))

    # The cores that the ranks share out are known only now.
    if options.siblings == MEASURE:
        cores = _measured_cores(result)
        asked = replace(_options(options, overrides, cores), out=folder)

    # A kind that cannot be measured is reported, and the others go on.
    names = list(KINDS) if options.kind == "all" else [options.kind]
    failed = False
    with _ending_on_sigterm(), Pool(asked.cores_per_rank, asked.cores, ["lockstep.bench.ranks.scaling"]) as pool:
        for name in names:
            sections = _sections(name, pool, asked, peers=not options.no_peers)
            failed |= not sections

            # Shown at once: the next kind may take minutes.
            for section in sections:
                section.settings = _settings(section, asked)
                result.put(section)
                _add_facts(result, section)
                failed |= section.failed
                print(printable(results.text_of(section)) + "\n", flush=True)

            # After each kind, so that an interrupted measurement leaves its results.
            results.write(result, folder)

    # It needs the sections of several kinds, also sections that an earlier command left in the folder.
    if projected := section_of(result):
        result.put(projected)
        print(printable(results.text_of(projected)) + "\n", flush=True)
        results.write(result, folder)

    if result.sections:
        print(printable(f"report    {write_pictures_and_page(result, folder)}"))
        _explain_missing_plots(folder)

    return ExitCode.FAILED if failed else ExitCode.FINISHED


def _measured_cores(result: Result) -> Cores:
    """Measure which CPUs share a core, and add that to the result."""
    from lockstep.bench.kinds.siblings import cores_of
    from lockstep.bench.results import text_of

    progress = ProgressLine()
    with _ending_on_sigterm():
        cores, sections = cores_of(MEASURE, progress.show)

    progress.clear()
    for section in sections:
        result.put(section)
        print(printable(text_of(section)) + "\n", flush=True)

    return cores


def _explain_missing_plots(folder: Path) -> None:
    """Say how to get plots if there is no matplotlib."""
    from lockstep.bench import plots

    if not plots.available():
        again = shlex.join(["lockstep", "bench", "report", str(folder)])
        said = f"no plots: matplotlib is not installed; {pip_install('bench')}, then {again}"
        print(printable(f"lockstep: {said}"), file=sys.stderr)


def _sections(name: str, pool: Pool, asked: BenchOptions, peers: bool) -> list[Section]:
    """Measure one kind. One that cannot be measured here has no sections, and does not keep `all` from the others."""
    from lockstep.bench.hardware import OtherLoad, disturbance
    from lockstep.bench.pool import RanksEnded

    # Kinds use the machine alone, if they can: the load of others is measured, too.
    others = OtherLoad()
    used = pool.cpu_seconds()
    progress = ProgressLine()
    try:
        sections = _kind(name, peers)(pool, asked, progress.show)
    except RanksEnded as error:
        progress.clear()
        print(printable(f"lockstep: bench {name}: {error}"), file=sys.stderr)
        return []

    # Kinds that judge by times know more exactly whether their rounds were disturbed. A leak does not depend on other
    # processes.
    progress.clear()
    disturbed = disturbance(others.cores(pool.cpu_seconds() - used))
    for section in sections:
        if section.name not in ("weak", "strong", "step", "leak") and not section.extra.get("refusal"):
            section.extra["refusal"] = disturbed

    return sections


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """End this process on SIGTERM as on Ctrl-C: its ranks end, and its temporary folders are removed."""

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _settings(section: Section, asked: BenchOptions) -> dict[str, Any]:
    """Return the settings that two results must share to be compared."""
    # Checkpoints, starts and recoveries have a workload of their own, whatever the target is.
    facts = section.extra.get("facts", {})
    if section.name == "checkpoint":
        return {"megabytes": asked.megabytes}
    if section.name in ("start", "recovery"):
        return {}

    known: dict[str, Any] = {"target": asked.target, "batch": asked.batch, "precision": facts.get("precision")}

    # The sources are left out: a setting from a file equals the same one typed. Later layers win.
    known["settings"] = {key: value for _, values in asked.layers for key, value in values.items()}
    if section.name == "settings":
        known["ways"] = asked.ways

    return known


def _kind(name: str, peers: bool) -> Callable[[Pool, BenchOptions, Callable[[str], None]], list[Section]]:
    """Return the function that measures a kind.

    Its arguments are the pool, the options, and a function that shows what is being measured.
    """
    # Each module is imported when its kind is measured.
    if name in ("weak", "strong"):
        from lockstep.bench.kinds import scaling

        return lambda pool, asked, report: [scaling.run(name, pool, asked, report)]

    if name == "step":
        from lockstep.bench.kinds import step

        return lambda pool, asked, report: [step.run(pool, asked, report, peers=peers)]

    return importlib.import_module(f"lockstep.bench.kinds.{name}").run


def _add_facts(result: Result, section: Section) -> None:
    """Keep the facts of the report about the whole measurement."""
    facts = section.extra.get("facts", {})
    result.facts |= {key: facts[key] for key in ("torch", "device") if key in facts}


def _options(options: argparse.Namespace, overrides: Sequence[str], cores: Cores) -> BenchOptions:
    """Check the options that were typed, and fill in the rest."""
    from lockstep.bench import options as known
    from lockstep.config import read_layers

    # A word with "=" is a setting; the target may be left out before it.
    target = options.target
    words = list(overrides)
    if "=" in target:
        words = [target, *words]
        target = "gpt"

    layers = read_layers(options.config, words)
    known.check_kind(options.kind, vars(options))
    known.check_settings(options.kind, target, layers, options.way)

    # The size that was typed, or else the usual one of this kind.
    sizes = {}
    for key, (of_one_kind, of_all) in SIZES.items():
        typed = getattr(options, key)
        usual = of_all if options.kind == "all" else of_one_kind
        sizes[key] = usual if typed is None else typed

    if options.out and options.out.exists() and not options.out.is_dir():
        raise UserError(f"--out {options.out} is a file", "", "name a folder")

    return known.BenchOptions(
        target=target,
        layers=layers,
        worlds=known.parse_worlds(options.worlds, cores.usable),
        backends=known.parse_backends(options.backend),
        repeats=sizes["repeats"],
        seconds=options.seconds,
        block=sizes["block"],
        batch=options.batch,
        cores_per_rank=options.cores_per_rank,
        cores=cores,
        max_mb=sizes["max_mb"],
        accumulation=known.parse_numbers("--accumulation", sizes["accumulation"]),
        megabytes=sizes["megabytes"],
        steps=sizes["steps"],
        ways=options.way,
        out=options.out or Path("bench") / f"{options.kind}-{time.strftime('%Y%m%d-%H%M%S')}",
    )


class ProgressLine:
    """Shows the current measurement: one line that is overwritten on a terminal, and nothing elsewhere."""

    def __init__(self) -> None:
        self._shown = 0
        self._since = time.monotonic()

    def show(self, text: str) -> None:
        """Replace the line. The seconds since the beginning come first."""
        if sys.stderr.isatty():
            # Padded with spaces to the length of the line before it, which would show through otherwise.
            line = f"{time.monotonic() - self._since:5.0f} s  {text}"[:110]
            sys.stderr.write("\r" + line.ljust(self._shown))
            sys.stderr.flush()
            self._shown = len(line)

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r" + " " * self._shown + "\r")
            sys.stderr.flush()
            self._shown = 0
