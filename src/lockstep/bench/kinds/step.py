"""The cost of a step against a hand-written loop: Lockstep's loops, and loops of other libraries where installed.

All loops live in the same ranks and take turns of a few steps, so that noise hits them alike. The hand-written loop
takes part twice; how far it differs from itself is the noise of the measurement.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.bench.hardware import OtherLoad, disturbance
from lockstep.bench.intervals import estimate, ratio, spread_text
from lockstep.bench.options import BenchOptions, why_no_step
from lockstep.bench.pool import Pool, Team, cpu_seconds, wall_seconds
from lockstep.bench.results import Column, Section, Verdict, judged
from lockstep.errors import plural

OVERHEAD = 1.15  # the most that a step may cost against the hand-written loop
SHORT_SHARE = 3  # rounds of turns for each round of whole runs, which take much longer
MICRO_BATCH = {"mlp": 32, "gpt": 4}
TITLE = "Cost of a step against a hand-written loop"
BASE, NOISE = "by hand", "by hand again"

COLUMNS = [
    Column("case", "case"),
    Column("loop", "loop"),
    Column("step_us", "step", "µs"),
    Column("wall_ratio", "time / by hand"),
    Column("cpu_ratio", "CPU time / by hand"),
    Column("short_ratio", "run of 60 steps / by hand"),
]

Rounds = list[list[dict[str, dict[str, float]]]]  # the figures of each round, rank and loop


@dataclass(frozen=True)
class MeasuredCase:
    """The measurements of the ranks in one case."""

    facts: dict[str, Any]  # the facts that rank 0 reports
    rounds: Rounds  # each loop takes turns of a few steps
    shorts: Rounds  # whole runs of 60 steps
    busy: float | None  # cores that other processes used during `rounds`


def run(pool: Pool, options: BenchOptions, report: Callable[[str], None], peers: bool = True) -> Section:
    """Measure each number of ranks with each accumulation."""
    if refusal := why_no_step(options.target, options.layers):
        return Section("step", TITLE, COLUMNS, [], [f"Left out: {refusal}."])

    rows: list[dict[str, Any]] = []
    verdicts: list[Verdict] = []
    place, facts = "", {}
    for world, accumulation in itertools.product(options.worlds, options.accumulation):
        # One case has all its loops in one team of ranks.
        case = f"{options.target}, {plural(world, 'rank')} x {accumulation}"
        arguments = options.arguments(micro_batch=MICRO_BATCH[options.target], accumulation=accumulation, peers=peers)
        with pool.start("step:measure", world, arguments) as team:
            measured = _measure(case, team, options.repeats, report)

        found = {"case": case, "world": world, "accumulation": accumulation}
        rows += [{**found, **_row(name, measured, options.block)} for name in measured.facts["loops"]]

        facts = measured.facts
        placement = team.placed(facts["device"])
        place = str(placement)
        verdicts.append(_verdict(case, measured, placement.shared))

    notes = [
        f"{place}.",
        f"A case is a model, the number of ranks and the micro-batches per step; {options.repeats} rounds of "
        f"{options.block} steps in which all loops take turns in one process; {spread_text(options.repeats)}. "
        "The target is judged by time. CPU time is that of all threads of all ranks.",
        f"A run of 60 steps is a whole one, from building the model to its end, "
        f"{plural(short_rounds(options.repeats), 'round')}. fit and the own "
        "loop also check the start of the training, save a checkpoint and the weights, and write a report; the loop by "
        f"hand and the other libraries only train. '{NOISE}' is the hand-written loop a second time: its ratio shows "
        "the noise of the measurement.",
    ]
    return Section(
        "step",
        TITLE,
        COLUMNS,
        rows,
        notes,
        verdicts,
        {"facts": facts, "refusal": next((verdict.refusal for verdict in verdicts if verdict.refusal), "")},
    )


def _measure(case: str, team: Team, repeats: int, report: Callable[[str], None]) -> MeasuredCase:
    """Let all loops of a team take turns, and then whole runs."""
    report(f"step: {case}: starting")
    facts = team.ready()[0]

    # Only these rounds are judged, so only they must be undisturbed.
    others = OtherLoad()
    rounds: Rounds = []
    for number in range(repeats):
        report(f"step: {case}: round {number + 1} of {repeats}")
        rounds.append(team.ask())

    busy = others.cores(sum(sum(cpu_seconds(_of(rounds, name))) for name in facts["loops"]))

    shorts: Rounds = []
    for number in range(short_rounds(repeats)):
        report(f"step: {case}: 60 steps, {number + 1} of {short_rounds(repeats)}")
        shorts.append(team.ask("short"))

    return MeasuredCase(facts, rounds, shorts, busy)


def _row(name: str, measured: MeasuredCase, block: int) -> dict[str, Any]:
    """Return the times of one loop, and its ratios to the hand-written one."""
    mine, base = _of(measured.rounds, name), _of(measured.rounds, BASE)
    shorts, base_shorts = _of(measured.shorts, name), _of(measured.shorts, BASE)
    return {
        "loop": name,
        "step_us": estimate([1e6 * wall / block for wall in wall_seconds(mine)]),
        "wall_ratio": ratio(wall_seconds(mine), wall_seconds(base)),
        "cpu_ratio": ratio(cpu_seconds(mine), cpu_seconds(base)),
        "short_ratio": ratio(wall_seconds(shorts), wall_seconds(base_shorts)),
    }


def _verdict(case: str, measured: MeasuredCase, shared: str) -> Verdict:
    """Return the verdict on `fit`. `shared` names the hardware that the ranks share, if any."""
    overhead = ratio(wall_seconds(_of(measured.rounds, "fit")), wall_seconds(_of(measured.rounds, BASE)))
    refusal = shared or disturbance(measured.busy)
    return judged(f"{case}: time of fit / by hand <= {OVERHEAD}", overhead, OVERHEAD, False, refusal)


def short_rounds(repeats: int) -> int:
    """Return how often whole runs are measured, for this many rounds of turns."""
    return max(1, round(repeats / SHORT_SHARE))


def _of(rounds: Rounds, name: str) -> list[list[dict[str, float]]]:
    """Return the figures of one loop, by round and rank."""
    return [[rank[name] for rank in ranks] for ranks in rounds]
