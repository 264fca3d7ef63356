"""Weak and strong scaling: throughput against the number of ranks, in rounds in which all of them take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from lockstep.bench.hardware import OtherLoad, describe, disturbance
from lockstep.bench.intervals import Estimate, estimate, ratio, spread_text
from lockstep.bench.options import BenchOptions
from lockstep.bench.pool import Pool, RanksEnded, Team
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


def run(mode: str, pool: Pool, options: BenchOptions, report: Callable[[str], None]) -> Section:
    """Measure `mode`, "weak" or "strong", on each number of ranks."""
    worlds = options.worlds
    arguments = options.arguments(mode=mode)
    teams: list[Team] = []
    controls: dict[int, Team] = {}  # as many ranks that exchange nothing
    missing: list[str] = []
    try:
        facts = []
        for world in worlds:
            report(f"{mode}: starting {world} rank(s)")
            teams.append(pool.start("scaling:measure", world, arguments))
            facts.append(teams[-1].ready()[0])
            if world > 1 and facts[-1]["global_batch"] % world == 0:
                # Each of them trains the batch that a rank of the team has.
                alone = {**arguments, "mode": "weak", "batch": facts[-1]["global_batch"] // world}
                control = pool.start("scaling:measure", world, alone, alone=True)
                try:
                    control.ready()
                except RanksEnded as error:
                    # The measurement itself goes on: it only has no control.
                    missing.append(f"{world} ranks have no control: {error.found.partition(chr(10))[0]}.")
                else:
                    controls[world] = control

        # The order alternates, so that a machine that gets slower or faster favours no number of ranks.
        others = OtherLoad()
        turns: dict[int, list[list[dict[str, float]]]] = {world: [] for world in worlds}
        apart: dict[int, list[list[dict[str, float]]]] = {world: [] for world in controls}
        for number in range(options.repeats):
            for team in teams[:: -1 if number % 2 else 1]:
                report(f"{mode}: round {number + 1} of {options.repeats}, {team.world} rank(s)")
                turns[team.world].append(team.ask())
                if team.world in controls:
                    apart[team.world].append(controls[team.world].ask())
        ours = [rank["cpu_seconds"] for each in (*turns.values(), *apart.values()) for turn in each for rank in turn]
        busy = others.cores(sum(ours))

        # The trace disturbs the step, so it has a turn of its own, after the others.
        traces = {team.world: team.ask("trace") for team in teams}
    finally:
        for team in (*teams, *controls.values()):
            team.close()

    section = _section(mode, options, pool, teams, facts, turns, apart, traces, busy)
    section.notes += missing
    return section


def _section(
    mode: str,
    options: BenchOptions,
    pool: Pool,
    teams: Sequence[Team],
    facts: Sequence[dict[str, Any]],
    turns: dict[int, list[list[dict[str, float]]]],
    apart: dict[int, list[list[dict[str, float]]]],
    traces: dict[int, list[dict[str, Any]]],
    busy: float | None,
) -> Section:
    # A step takes as long as its slowest rank.
    rates = {
        world: [fact["global_batch"] * options.block / max(rank["seconds"] for rank in turn) for turn in turns[world]]
        for world, fact in zip(options.worlds, facts, strict=True)
    }
    base = options.worlds[0]
    rows: list[dict[str, Any]] = []
    for world, fact in zip(options.worlds, facts, strict=True):
        speedup = ratio(rates[world], rates[base])
        ideal = world / base
        efficiency = ratio(rates[world], rates[base], lambda value, ideal=ideal: value / ideal)
        limit, of_limit = _limits(world, base, rates, apart.get(world), fact["global_batch"] * options.block)
        traced = traces[world]
        rows.append(
            {
                "world": world,
                "global_batch": fact["global_batch"],
                "throughput": estimate(rates[world]).as_dict(),
                "step_ms": estimate([1e3 * fact["global_batch"] / rate for rate in rates[world]]).as_dict(),
                "speedup": speedup.as_dict(),
                "scaling_efficiency": efficiency.as_dict(),
                "machine_limit": limit and limit.as_dict(),
                "of_machine_limit": of_limit and of_limit.as_dict(),
                "compute_fraction": _mean(traced, "compute_fraction"),
                "overlap_fraction": _mean(traced, "overlap_fraction"),
                "megabytes_per_step": traced[0]["bytes_per_step"] / 1e6,
                "collectives": len(traced[0]["collectives"]),
                "breakdown_ms": _breakdown(traced),
            }
        )

    last = rows[-1]
    placement = teams[-1].placed(facts[-1]["device"])
    refusal = _refusal(placement.shared, busy, options)
    target = TARGETS[mode]
    verdicts = []
    if options.worlds[-1] > base:
        text = f"{mode} scaling efficiency at {last['world']} ranks >= {target:.0%}"
        verdicts.append(judged(text, last["scaling_efficiency"], target, True, refusal))

    what = "the same batch on every rank" if mode == "weak" else "the same batch on all ranks together"
    fact = facts[-1]
    return Section(
        mode,
        f"{mode.capitalize()} scaling of {options.target}: {what}",
        COLUMNS,
        rows,
        [
            f"{fact['parameters']:,} parameters, strategy {fact['strategy']}, {fact['backend']}, {fact['precision']}; "
            f"{describe(placement, pool.cores_per_rank)}; {options.repeats} rounds of {options.block} "
            f"steps in which all numbers of ranks take turns; {spread_text(options.repeats)}.",
            "scaling_efficiency is speed-up / ideal speed-up; compute_fraction is computation / (computation + exposed "
            "communication), from a trace of one block.",
            "The machine limit is the efficiency of as many ranks that compute the same at the same time and exchange "
            "nothing: what it lacks is lost to shared caches, memory and clock rates (and in strong scaling to smaller "
            "batches), not to communication. efficiency / limit is what communication and waiting leave.",
            *_note_on_load(busy),
        ],
        verdicts,
        {"facts": fact, "batch": options.batch, "refusal": refusal, "busy_elsewhere": busy},
    )


def _limits(
    world: int, base: int, rates: dict[int, list[float]], apart: list[list[dict[str, float]]] | None, samples: int
) -> tuple[Estimate | None, Estimate | None]:
    """Return the efficiency of ranks that exchange nothing, and that of the real ranks against it."""
    if apart is None:
        return None, None
    # Nobody waits for the slowest of them, so their rates are added.
    free = [sum(samples / world / rank["seconds"] for rank in turn) for turn in apart]
    return ratio(free, rates[base], lambda value: value / (world / base)), ratio(rates[world], free)


def _mean(ranks: Sequence[dict[str, Any]], key: str) -> float:
    return sum(rank[key] for rank in ranks) / len(ranks)


def _breakdown(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the milliseconds of a step by kind, averaged over ranks."""
    kinds = ranks[0]["kinds"]
    return {kind: 1e3 * sum(r["kinds"][kind] / max(1, r["steps"]) for r in ranks) / len(ranks) for kind in kinds}


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
    refusal = section.extra["refusal"]
    return {row["world"]: _medians(row) | {"fair_test": not refusal, "unfair_because": refusal} for row in section.rows}


def _medians(row: dict[str, Any]) -> dict[str, Any]:
    names = ("throughput", "speedup", "scaling_efficiency", "machine_limit")
    return {name: middle(row[name]) for name in names} | {"compute_fraction": row["compute_fraction"]}
