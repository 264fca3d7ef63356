"""Weak and strong scaling: throughput against the number of ranks, in rounds in which all of them take turns.

Beside each team runs a control: as many ranks that compute the same and exchange nothing. What the control loses is
lost to the machine, such as shared caches and clock rates; only the rest is lost to communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any

from lockstep.bench.hardware import OtherLoad, RankPlacement, describe, disturbance
from lockstep.bench.intervals import Estimate, estimate, ratio, spread_text
from lockstep.bench.options import BenchOptions
from lockstep.bench.pool import Pool, RanksEnded, Team, cpu_seconds, wall_seconds
from lockstep.bench.results import Column, Section, judged, middle
from lockstep.errors import UserError

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


# What ranks answered: by number of ranks, round and rank.
Turns = dict[int, list[list[dict[str, float]]]]


@dataclass(frozen=True)
class Measured:
    """What was measured, by number of ranks."""

    facts: dict[int, dict[str, Any]]  # of rank 0
    turns: Turns
    apart: Turns  # of the controls, which exchange nothing
    traces: dict[int, list[dict[str, Any]]]  # by rank
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
        turns, apart = _rounds(mode, teams, controls, options.repeats, report)
        busy = others.cores(_total_cpu_seconds(turns) + _total_cpu_seconds(apart))

        # The trace disturbs the step, so it has a turn of its own, after the others.
        traces = {world: team.ask("trace") for world, team in teams.items()}

    measured = Measured(facts, turns, apart, traces, busy)
    placement = teams[options.worlds[-1]].placed(measured.last_facts["device"])
    section = _section(mode, options, measured, placement, pool.cores_per_rank)
    section.notes += missing
    return section


def _control(pool: Pool, options: BenchOptions, world: int, global_batch: int) -> Team | None:
    """Start as many ranks that exchange nothing; each trains the batch that a rank of the team has.

    There is none for one rank, and for a batch that its ranks cannot share evenly. Raises RanksEnded.
    """
    if world == 1 or global_batch % world:
        return None

    arguments = {**options.arguments(mode="weak"), "batch": global_batch // world}
    control = pool.start("scaling:measure", world, arguments, alone=True)
    control.ready()
    return control


def _rounds(
    mode: str, teams: dict[int, Team], controls: dict[int, Team], repeats: int, report: Callable[[str], None]
) -> tuple[Turns, Turns]:
    """Let all teams take turns, each followed by its control. Returns the turns of both."""
    turns: Turns = {world: [] for world in teams}
    apart: Turns = {world: [] for world in controls}
    for number in range(repeats):
        # The order alternates, so that a machine that gets slower or faster favours no number of ranks.
        for world in list(teams)[:: -1 if number % 2 else 1]:
            report(f"{mode}: round {number + 1} of {repeats}, {world} rank(s)")
            turns[world].append(teams[world].ask())
            if world in controls:
                apart[world].append(controls[world].ask())

    return turns, apart


def _total_cpu_seconds(turns: Turns) -> float:
    return sum(sum(cpu_seconds(rounds)) for rounds in turns.values())


def _section(
    mode: str, options: BenchOptions, measured: Measured, placement: RankPlacement, cores_per_rank: int
) -> Section:
    """Make the section: a row for each number of ranks, the verdict on the largest, and how it was measured."""
    rates = {world: measured.rates(world, options.block) for world in options.worlds}
    rows = [_row(world, options, measured, rates) for world in options.worlds]

    # One number of ranks has no efficiency to judge.
    last, target = rows[-1], TARGETS[mode]
    refusal = _refusal(placement.shared, measured.busy, options)
    verdicts = []
    if len(rows) > 1:
        text = f"{mode} scaling efficiency at {last['world']} ranks >= {target:.0%}"
        verdicts.append(judged(text, last["scaling_efficiency"], target, True, refusal))

    what = "the same batch on every rank" if mode == "weak" else "the same batch on all ranks together"
    facts = measured.last_facts
    return Section(
        mode,
        f"{mode.capitalize()} scaling of {options.target}: {what}",
        COLUMNS,
        rows,
        [
            f"{facts['parameters']:,} parameters, strategy {facts['strategy']}, {facts['backend']}, "
            f"{facts['precision']}; {describe(placement, cores_per_rank)}; {options.repeats} rounds of {options.block} "
            f"steps in which all numbers of ranks take turns; {spread_text(options.repeats)}.",
            "scaling_efficiency is speed-up / ideal speed-up; compute_fraction is computation / (computation + exposed "
            "communication), from a trace of one block.",
            "The machine limit is the efficiency of as many ranks that compute the same at the same time and exchange "
            "nothing: what it lacks is lost to shared caches, memory and clock rates (and in strong scaling to smaller "
            "batches), not to communication. efficiency / limit is what communication and waiting leave.",
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
    limit, of_limit = _limits(world, base, rates, measured.apart.get(world), batch * options.block)

    traced = measured.traces[world]
    return {
        "world": world,
        "global_batch": batch,
        "throughput": estimate(rates[world]),
        "step_ms": step_ms,
        "speedup": speedup,
        "scaling_efficiency": efficiency,
        "machine_limit": limit,
        "of_machine_limit": of_limit,
        "compute_fraction": _mean(traced, "compute_fraction"),
        "overlap_fraction": _mean(traced, "overlap_fraction"),
        "megabytes_per_step": traced[0]["bytes_per_step"] / 1e6,
        "collectives": len(traced[0]["collectives"]),
        "breakdown_ms": _breakdown(traced),
    }


def _limits(
    world: int, base: int, rates: dict[int, list[float]], apart: list[list[dict[str, float]]] | None, samples: int
) -> tuple[Estimate | None, Estimate | None]:
    """Return the efficiency of ranks that exchange nothing, and that of the real ranks against it.

    `samples` is how many samples all ranks together train in a turn.
    """
    if apart is None:
        return None, None

    # None of them waits for the slowest, so their rates are added.
    share = samples / world
    free = [sum(share / rank["seconds"] for rank in ranks) for ranks in apart]
    limit = ratio(free, rates[base], lambda value: value / (world / base))
    return limit, ratio(rates[world], free)


def _mean(ranks: Sequence[dict[str, Any]], key: str) -> float:
    return sum(rank[key] for rank in ranks) / len(ranks)


def _breakdown(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the milliseconds of a step by kind, averaged over ranks."""
    found = {}
    for kind in ranks[0]["kinds"]:
        per_step = [rank["kinds"][kind] / max(1, rank["steps"]) for rank in ranks]
        found[kind] = 1e3 * sum(per_step) / len(ranks)

    return found


def _refusal(shared: str, busy: float | None, options: BenchOptions) -> str:
    """Return why efficiency cannot be judged, or nothing."""
    if shared:
        return shared
    if options.worlds[0] != 1:
        return "one rank was not measured"
    return disturbance(busy)


def _note_on_load(busy: float | None) -> list[str]:
    if busy is None:
        return ["How busy other processes kept the machine is not known."]
    return [f"Other processes used {busy:.2f} cores meanwhile."]


# ---- as functions ----


def scaling_results(mode: str, num_gpus: Sequence[int], **settings: Any) -> dict[int, dict[str, Any]]:
    """Return the medians of `mode` by number of ranks, and whether it was a fair test."""
    known = {item.name for item in fields(BenchOptions)} - {"worlds"}
    if unknown := sorted(settings.keys() - known):
        raise UserError(f"there is no option {unknown[0]}", "", f"use some of {', '.join(sorted(known))}")

    options = BenchOptions(worlds=list(num_gpus), **settings)
    with Pool(options.cores_per_rank) as pool:
        section = run(mode, pool, options, lambda _: None)

    # Whoever uses the numbers must see whether they mean anything here.
    refusal = section.extra["refusal"]
    fairness = {"fair_test": not refusal, "unfair_because": refusal}
    return {row["world"]: _medians(row) | fairness for row in section.rows}


def _medians(row: dict[str, Any]) -> dict[str, Any]:
    names = ("throughput", "speedup", "scaling_efficiency", "machine_limit")
    return {name: middle(row[name]) for name in names} | {"compute_fraction": row["compute_fraction"]}
