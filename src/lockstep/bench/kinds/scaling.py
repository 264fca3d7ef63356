"""Weak and strong scaling: throughput against the number of ranks, in rounds in which all of them take turns.

Beside each team runs a control: as many ranks that compute the same and exchange nothing. What the control loses is
lost to the machine, such as shared caches, clock rates and cores that are held up; only the rest is lost to
communication.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any

from lockstep.bench.cores import SIBLINGS, SYSTEM, RankPlacement
from lockstep.bench.hardware import OtherLoad, disturbance
from lockstep.bench.intervals import Estimate, estimate, ratio, spread_text
from lockstep.bench.kinds.siblings import cores_of
from lockstep.bench.options import BenchOptions
from lockstep.bench.pool import Pool, RanksEnded, Team, cpu_seconds, wall_seconds
from lockstep.bench.results import Column, Section, cell, judged, middle
from lockstep.errors import UserError, plural
from lockstep.observe.profile.merge import mean_over_ranks

TARGETS = {"weak": 0.90, "strong": 0.80}

COLUMNS = [
    Column("world", "ranks"),
    Column("throughput", "throughput", "samples/s"),
    Column("step_ms", "step", "ms"),
    Column("speedup", "speed-up"),
    Column("scaling_efficiency", "scaling_efficiency"),
    Column("machine_limit", "machine limit"),
    Column("of_machine_limit", "efficiency / limit"),
    Column("compute_fraction", "compute_fraction"),
    Column("overlap_fraction", "overlap"),
    Column("megabytes_per_step", "sent", "MB/step"),
]


# The answers by number of ranks, round and rank.
Turns = dict[int, list[list[dict[str, Any]]]]


@dataclass(frozen=True)
class Measured:
    """The measurements by number of ranks."""

    facts: dict[int, dict[str, Any]]  # the facts that rank 0 reports
    turns: Turns
    apart: Turns  # the controls, which exchange nothing
    traces: dict[int, list[dict[str, Any]]]  # the breakdowns of all ranks
    busy: float | None  # cores that other processes used meanwhile

    @property
    def last_facts(self) -> dict[str, Any]:
        """The facts of the largest number of ranks."""
        return self.facts[max(self.facts)]

    def rates(self, world: int, block: int) -> list[float]:
        """Return the samples per second of each round."""
        samples = self.facts[world]["global_batch"] * block
        return [samples / seconds for seconds in wall_seconds(self.turns[world])]


def run(mode: str, pool: Pool, options: BenchOptions, report: Callable[[str], None]) -> Section:
    """Measure `mode`, "weak" or "strong", on each number of ranks."""
    teams: dict[int, Team] = {}
    controls: dict[int, Team] = {}  # as many ranks that exchange nothing
    facts: dict[int, dict[str, Any]] = {}
    missing: list[str] = []
    with ExitStack() as stack:
        for world in options.worlds:
            report(f"{mode}: starting {world} rank(s)")
            team = stack.enter_context(pool.start("scaling:measure", world, options.arguments(mode=mode)))
            teams[world] = team
            facts[world] = team.ready()[0]
            try:
                if control := _control(pool, options, world, facts[world]["global_batch"]):
                    controls[world] = stack.enter_context(control)
            except RanksEnded as error:
                # The measurement itself goes on: it only has no control.
                missing.append(f"{world} ranks have no control: {error.found.partition(chr(10))[0]}.")

        others = OtherLoad()
        turns, apart = _rounds(mode, teams, controls, options, report)
        busy = others.cores(_total_cpu_seconds(turns) + _total_cpu_seconds(apart))

        # The trace disturbs the step, so it has a turn of its own, after the others.
        traces = {world: team.ask("trace") for world, team in teams.items()}

    measured = Measured(facts, turns, apart, traces, busy)
    placement = teams[options.worlds[-1]].placed(measured.last_facts["device"])
    section = _section(mode, options, measured, placement)
    section.notes += missing
    return section


def _control(pool: Pool, options: BenchOptions, world: int, global_batch: int) -> Team | None:
    """Start as many ranks that exchange nothing; each trains the batch that a rank of the team has.

    There is none for one rank, and for a batch that its ranks cannot share evenly. Raises RanksEnded.
    """
    if world == 1 or global_batch % world:
        return None

    arguments = {**options.arguments(mode="weak"), "batch": global_batch // world}
    control = pool.start("scaling:measure_apart", world, arguments, alone=True)
    control.ready()
    return control


def _rounds(
    mode: str, teams: dict[int, Team], controls: dict[int, Team], options: BenchOptions, report: Callable[[str], None]
) -> tuple[Turns, Turns]:
    """Let all teams take turns, each followed by its control. Returns the turns of both."""
    turns: Turns = {world: [] for world in teams}
    apart: Turns = {world: [] for world in controls}
    for number in range(options.repeats) if options.seconds is None else numbers_within(options.seconds):
        # The order alternates, so that a machine that gets slower or faster favours no number of ranks.
        for world in list(teams)[:: -1 if number % 2 else 1]:
            report(f"{mode}: round {number + 1}, {world} rank(s)")
            turns[world].append(teams[world].ask())
            if world in controls:
                apart[world].append(controls[world].ask())

    return turns, apart


def numbers_within(seconds: float, clock: Callable[[], float] = time.monotonic) -> Iterator[int]:
    """Count rounds for as long as one more of average length fits into the time. The first one always does."""
    began = clock()
    for number in itertools.count():
        passed = clock() - began
        if number and passed + passed / number > seconds:
            return

        yield number


def _total_cpu_seconds(turns: Turns) -> float:
    return sum(sum(cpu_seconds(rounds)) for rounds in turns.values())


def _section(mode: str, options: BenchOptions, measured: Measured, placement: RankPlacement) -> Section:
    """Make the section: a row for each number of ranks, the verdict on the largest, and how it was measured."""
    rates = {world: measured.rates(world, options.block) for world in options.worlds}
    rows = [_row(world, options, measured, rates) for world in options.worlds]

    # One number of ranks has no efficiency to judge.
    last, target = rows[-1], TARGETS[mode]
    refusal = _refusal(placement, measured.busy, options)
    verdicts = []
    if len(rows) > 1:
        text = f"{mode} scaling efficiency at {last['world']} ranks >= {target:.0%}"
        verdicts.append(judged(text, last["scaling_efficiency"], target, True, refusal))

    what = "the same batch on every rank" if mode == "weak" else "the same batch on all ranks together"
    facts = measured.last_facts
    rounds = len(measured.turns[last["world"]])
    return Section(
        mode,
        f"{mode.capitalize()} scaling of {options.target}: {what}",
        COLUMNS,
        rows,
        [
            f"{facts['parameters']:,} parameters, strategy {facts['strategy']}, {facts['backend']}, "
            f"{facts['precision']}; {placement}; {plural(rounds, 'round')} of {plural(options.block, 'step')} in which "
            f"all numbers of ranks take turns; {spread_text(rounds)}.",
            "scaling_efficiency is speed-up / ideal speed-up; compute_fraction is computation / (computation + exposed "
            "communication), from a trace of one block.",
            "The machine limit is the efficiency of as many ranks that compute the same at the same time and exchange "
            "nothing, if each of their steps takes as long as on the slowest rank: what it lacks is lost to shared "
            "caches, memory, clock rates and slow cores (and in strong scaling to smaller batches). efficiency / limit "
            "is what communication leaves of it.",
            *_note_on_waiting(last),
            *_note_on_load(measured.busy),
        ],
        verdicts,
        {"facts": facts, "batch": options.batch, "refusal": refusal, "busy_elsewhere": measured.busy},
    )


def _row(world: int, options: BenchOptions, measured: Measured, rates: dict[int, list[float]]) -> dict[str, Any]:
    """Return the row of one number of ranks. `rates` has samples per second, by number of ranks and round."""
    base = options.worlds[0]
    ideal = world / base
    speedup = ratio(rates[world], rates[base])
    efficiency = ratio(rates[world], rates[base], lambda value: value / ideal)

    batch = measured.facts[world]["global_batch"]
    step_ms = estimate([1e3 * batch / rate for rate in rates[world]])
    limits = limits_of(world, base, rates, measured.apart.get(world), batch * options.block)

    traced = measured.traces[world]
    return {
        "world": world,
        "global_batch": batch,
        "throughput": estimate(rates[world]),
        "step_ms": step_ms,
        "speedup": speedup,
        "scaling_efficiency": efficiency,
        **limits,
        "compute_fraction": mean_over_ranks(traced, "compute_fraction"),
        "overlap_fraction": mean_over_ranks(traced, "overlap_fraction"),
        "megabytes_per_step": traced[0]["bytes_per_step"] / 1e6,
        "collectives": len(traced[0]["collectives"]),
        "breakdown_ms": _breakdown(traced),
    }


def limits_of(
    world: int, base: int, rates: dict[int, list[float]], apart: list[list[dict[str, Any]]] | None, samples: int
) -> dict[str, Estimate | None]:
    """Return the efficiency of ranks that exchange nothing, and the real ranks' efficiency against it.

    `samples` is how many samples all ranks together train in a turn.
    """
    if apart is None:
        return dict.fromkeys(("machine_limit", "of_machine_limit", "limit_without_waiting"))

    def efficiency(found: list[float]) -> Estimate:
        return ratio(found, rates[base], lambda value: value / (world / base))

    # Training waits for the slowest rank in every step. These ranks do not, so their rates could be added as well.
    waiting = [samples / _slowest_seconds(ranks) for ranks in apart]
    free = [sum(samples / world / rank["seconds"] for rank in ranks) for ranks in apart]
    return {
        "machine_limit": efficiency(waiting),
        "of_machine_limit": ratio(rates[world], waiting),
        "limit_without_waiting": efficiency(free),
    }


def _slowest_seconds(ranks: list[dict[str, Any]]) -> float:
    """Return how long a turn would take if every step took as long as on its slowest rank."""
    steps = zip(*(rank["step_seconds"] for rank in ranks), strict=True)
    return math.fsum(map(max, steps))


def _breakdown(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the milliseconds of a step by kind, averaged over ranks."""
    found = {}
    for kind in ranks[0]["kinds"]:
        per_step = [rank["kinds"][kind] / max(1, rank["steps"]) for rank in ranks]
        found[kind] = 1e3 * sum(per_step) / len(ranks)

    return found


def _refusal(placement: RankPlacement, busy: float | None, options: BenchOptions) -> str:
    """Return why efficiency cannot be judged, or nothing."""
    if unfair := placement.shared or placement.doubt:
        return unfair
    if options.worlds[0] != 1:
        return "one rank was not measured"
    return disturbance(busy)


def _note_on_waiting(row: dict[str, Any]) -> list[str]:
    """Return the machine limit if no rank waited for another: the rest is lost to slow ranks."""
    if not (free := row["limit_without_waiting"]):
        return []
    return [f"If no rank waited for the slowest, the machine limit at {row['world']} ranks would be {cell(free)}."]


def _note_on_load(busy: float | None) -> list[str]:
    if busy is None:
        return ["How busy other processes kept the machine is not known."]
    return [f"Other processes used {busy:.2f} cores meanwhile."]


# ---- as functions ----


def scaling_results(
    mode: str, num_gpus: Sequence[int], siblings: str = SYSTEM, **settings: Any
) -> dict[int, dict[str, Any]]:
    """Return the medians of `mode` by number of ranks, and whether it was a fair test."""
    known = {item.name for item in fields(BenchOptions)} - {"worlds", "cores"}
    if unknown := sorted(settings.keys() - known):
        names = ", ".join(sorted({*known, "siblings"}))
        raise UserError(f"there is no option {unknown[0]}", "", f"use some of {names}")
    if siblings not in SIBLINGS:
        raise UserError(f"siblings={siblings} is not known", "", f"use one of {', '.join(SIBLINGS)}")

    options = BenchOptions(worlds=list(num_gpus), **settings)
    if siblings != SYSTEM:
        cores, _ = cores_of(siblings, lambda _: None)
        options = BenchOptions(worlds=list(num_gpus), cores=cores, **settings)

    with Pool(options.cores_per_rank, options.cores) as pool:
        section = run(mode, pool, options, lambda _: None)

    # A caller must see whether the numbers mean anything on this machine.
    refusal = section.extra["refusal"]
    fairness = {"fair_test": not refusal, "unfair_because": refusal}
    return {row["world"]: _medians(row) | fairness for row in section.rows}


def _medians(row: dict[str, Any]) -> dict[str, Any]:
    names = ("throughput", "speedup", "scaling_efficiency", "machine_limit")
    return {name: middle(row[name]) for name in names} | {"compute_fraction": row["compute_fraction"]}
