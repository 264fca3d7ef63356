"""The plots of a result, as PNG files. They need matplotlib: `pip install 'lockstep-train[bench]'`.

Every figure has a title, axes with units, error bars (95 % confidence intervals, or the range of fewer than six rounds)
and the hardware in its last line, with what speaks against a fair test.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.bench.projection import fit
from lockstep.bench.results import Result, Section, is_estimate, middle
from lockstep.observe.profile.timeline import KINDS

# Colours that stay distinct for readers with colour blindness and in print (Okabe and Ito, and two more).
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999", "#F0E442", "#882255"]
GREY = "#777777"

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "errorbar.capsize": 3,
    "savefig.dpi": 170,
}


def available() -> bool:
    """Return whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def write(result: Result, folder: Path) -> dict[str, Path]:
    """Write the plots of each section and return their files by section. Without matplotlib there are none."""
    if not available():
        return {}
    import matplotlib

    found = {}
    with matplotlib.rc_context(STYLE):
        for section in result.sections:
            draw = FIGURES.get(section.name)
            if draw and section.rows:
                figure = draw(section)
                _name_hardware(figure, result, section)
                found[section.name] = folder / f"{section.name}.png"
                # No date, so the same numbers give the same file.
                figure.savefig(found[section.name], metadata={"Software": None})
    return found


def _figure(columns: int, width: float = 9.5, height: float = 3.9) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    # No pyplot: it would keep state, and look for a display.
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _name_hardware(figure: Any, result: Result, section: Section) -> None:
    torch = section.extra.get("facts", {}).get("torch") or result.facts.get("torch", "")
    stamp = section.stamp or {"version": result.version, "time": result.time}
    text = f"{result.hardware['text']} · torch {torch} · Lockstep {stamp['version']} · {stamp['time']}"
    if refusal := section.extra.get("refusal", ""):
        text += f" · not a fair test: {refusal}"
    figure.supxlabel(_wrapped(text, figure), fontsize=7, color=GREY, ha="center")


def _wrapped(text: str, figure: Any) -> str:
    return "\n".join(textwrap.wrap(text, int(14 * figure.get_figwidth())))  # about 14 letters to the inch


# ---- values with error bars ----


def _errors(values: Sequence[Any]) -> tuple[list[float], list[list[float]]]:
    """Return medians, and the distances to both ends of their intervals."""
    medians = [float(middle(value) or 0.0) for value in values]
    low = [value["median"] - value["low"] if is_estimate(value) else 0.0 for value in values]
    high = [value["high"] - value["median"] if is_estimate(value) else 0.0 for value in values]
    return medians, [low, high]


def _top(values: Sequence[Any]) -> float:
    """Return the upper end of an axis from 0 that shows 1 and every error bar whole."""
    ends = [value["high"] if is_estimate(value) else value for value in values if value is not None]
    return 1.05 * max([1.07, *ends])


def _line(axes: Any, xs: Sequence[float], values: Sequence[Any], colour: str, label: str, marker: str = "o") -> None:
    medians, spread = _errors(values)
    axes.errorbar(xs, medians, yerr=spread, color=colour, marker=marker, label=label)


def _ranks_axis(axes: Any, worlds: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.minorticks_off()
    axes.set_xlabel("ranks")


# ---- scaling ----


def scaling(section: Section) -> Any:
    figure, (rate, efficiency, parts) = _figure(3, width=11.5)
    worlds = [row["world"] for row in section.rows]

    _line(rate, worlds, [row["throughput"] for row in section.rows], COLOURS[0], "measured")
    first = section.rows[0]["throughput"]["median"] / worlds[0]
    rate.plot(worlds, [first * world for world in worlds], color=GREY, linestyle=":", label="ideal")
    rate.set_xticks(worlds)
    rate.set_xlabel("ranks")
    rate.set_ylim(bottom=0)
    rate.set_ylabel("throughput (samples/s)")
    rate.set_title("Throughput")
    rate.legend(loc="upper left")

    _line(efficiency, worlds, [row["scaling_efficiency"] for row in section.rows], COLOURS[0], "scaling efficiency")
    fractions = [row["compute_fraction"] for row in section.rows]
    efficiency.plot(worlds, fractions, color=COLOURS[1], marker="s", label="compute fraction")
    limit = section.verdicts[0].limit if section.verdicts else None
    if limit:
        efficiency.axhline(limit, color=COLOURS[2], linestyle="--", linewidth=1, label=f"target {limit:.0%}")
    limited = [row for row in section.rows if row.get("machine_limit")]
    if limited:
        limits = [row["machine_limit"] for row in limited]
        _line(efficiency, [row["world"] for row in limited], limits, GREY, "machine limit (no exchange)", "^")
    shown = [row[key] for row in section.rows for key in ("scaling_efficiency", "machine_limit") if row.get(key)]
    efficiency.set_ylim(0, _top(shown))
    efficiency.set_ylabel("fraction")
    efficiency.set_title("Efficiency")
    efficiency.legend(loc="lower left")
    _ranks_axis(efficiency, worlds)

    _stacked(parts, [str(world) for world in worlds], [row["breakdown_ms"] for row in section.rows])
    parts.set_xlabel("ranks")
    parts.set_title("Where a step goes (traced)")
    figure.suptitle(section.title, fontsize=11)
    return figure


def _plain_log_labels(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _stacked(axes: Any, labels: Sequence[str], breakdowns: Sequence[dict[str, float]]) -> None:
    """Draw a bar for each breakdown, in milliseconds. Kinds that take no time are left out."""
    bottom = [0.0] * len(labels)
    used = [kind for kind in KINDS if any(each.get(kind, 0.0) > 0.005 * sum(each.values()) for each in breakdowns)]
    for kind in used:
        heights = [each.get(kind, 0.0) for each in breakdowns]
        colour = COLOURS[KINDS.index(kind) % len(COLOURS)]
        axes.bar(labels, heights, bottom=bottom, label=kind, color=colour, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_ylabel("ms per step")
    axes.grid(axis="x", visible=False)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))


# ---- step ----


def step(section: Section) -> Any:
    cases = list(dict.fromkeys(row["case"] for row in section.rows))
    loops = [name for name in dict.fromkeys(row["loop"] for row in section.rows) if name != "by hand"]
    figure, panels = _figure(3, width=11.5, height=1.9 + 0.3 * len(cases) * len(loops))
    for axes, key, title in zip(
        panels,
        ("wall_ratio", "cpu_ratio", "short_ratio"),
        ("Wall time, long runs", "CPU time, long runs", "Wall time, whole runs of 60 steps"),
        strict=True,
    ):
        _ratio_bars(axes, section, cases, loops, key)
        axes.set_title(title)
        axes.axvline(1.0, color="#333333", linewidth=1)
        axes.set_xlabel("relative to the hand-written loop")
    panels[0].axvline(1.15, color=COLOURS[2], linestyle="--", linewidth=1, label="target 1.15")
    for axes in panels[1:]:
        axes.set_yticklabels([])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))
    figure.suptitle(section.title, fontsize=11, x=0.01, ha="left")
    return figure


def _ratio_bars(axes: Any, section: Section, cases: list[str], loops: list[str], key: str) -> None:
    height = 0.8 / len(loops)
    for index, loop in enumerate(loops):
        rows = {row["case"]: row for row in section.rows if row["loop"] == loop}
        mine = [(number, rows[case][key]) for number, case in enumerate(cases) if case in rows]
        medians, spread = _errors([value for _, value in mine])
        places = [number + (index - (len(loops) - 1) / 2) * height for number, _ in mine]
        colour = GREY if loop == "by hand again" else COLOURS[index % len(COLOURS)]
        label = "by hand, again (noise)" if loop == "by hand again" else loop
        # Points and not bars: the axis begins near 1, where the differences are.
        axes.errorbar(medians, places, xerr=spread, color=colour, label=label, marker="o", linestyle="none")
    axes.set_yticks(range(len(cases)), cases)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


# ---- communication ----


def collectives(section: Section) -> Any:
    figure, (times, rates) = _figure(2, width=11)
    keys = list(dict.fromkeys((row["operation"], row["backend"]) for row in section.rows))
    several = len({backend for _, backend in keys}) > 1
    operations = list(dict.fromkeys(operation for operation, _ in keys))
    for operation, backend in keys:
        mine = [row for row in section.rows if (row["operation"], row["backend"]) == (operation, backend)]
        sizes = [row["bytes"] for row in mine]
        colour = COLOURS[operations.index(operation) % len(COLOURS)]
        label = f"{operation} ({backend})" if several else operation
        marker = "o" if backend == keys[0][1] else "s"
        _line(times, sizes, [row["milliseconds"] for row in mine], colour, label, marker)
        _line(rates, sizes, [row["bus_gb_s"] for row in mine], colour, label, marker)
        latency, bandwidth = fit(sizes, [row["milliseconds"]["median"] / 1e3 for row in mine])
        fitted = [1e3 * (latency + size / bandwidth) for size in sizes]
        times.plot(sizes, fitted, color=colour, linestyle=":", linewidth=1)
    for axes in (times, rates):
        axes.set_xscale("log", base=2)
        _byte_axis(axes, sorted({row["bytes"] for row in section.rows}))
        axes.set_yscale("log")
        axes.set_xlabel("message size")
    times.set_ylabel("time (ms)")
    times.set_title("Time of a collective (dotted: latency + size / bandwidth)")
    rates.set_ylabel("bus bandwidth (GB/s)")
    rates.set_title("Bus bandwidth")
    _plain_log_labels(times)
    times.legend()
    figure.suptitle(f"{section.title} ({', '.join(dict.fromkeys(backend for _, backend in keys))})", fontsize=11)
    return figure


def _byte_axis(axes: Any, sizes: Sequence[int]) -> None:
    from lockstep.bench.kinds.comm import human

    # Every other size has a label: they are powers of four.
    shown = sizes[::2]
    axes.set_xticks(shown, [human(size) for size in shown], rotation=30)
    axes.minorticks_off()


def step_communication(section: Section) -> Any:
    figure, (exposed, overlap, sent) = _figure(3, width=11.5, height=3.4)
    names = [row["what"] for row in section.rows]
    places = range(len(names))
    hidden = [row["communication_ms"] - row["exposed_ms"] for row in section.rows]
    exposed.barh(places, [row["exposed_ms"] for row in section.rows], color=COLOURS[1], label="exposed")
    exposed.barh(places, hidden, left=[row["exposed_ms"] for row in section.rows], color=COLOURS[5], label="hidden")
    exposed.set_xlabel("communication (ms per step)")
    exposed.set_title("Communication, traced")
    exposed.legend()
    overlap.barh(places, [row["overlap_fraction"] for row in section.rows], color=COLOURS[2])
    overlap.set_xlim(0, 1)
    overlap.set_xlabel("fraction of communication hidden")
    overlap.set_title("Overlap")
    medians, spread = _errors([row["step_ms"] for row in section.rows])
    sent.barh(places, medians, xerr=spread, color=COLOURS[0], ecolor="#333333")
    sent.set_xlabel("step (ms)")
    sent.set_title("Time of a step")
    for axes in (exposed, overlap, sent):
        axes.set_yticks(places, names if axes is exposed else [""] * len(names))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    figure.suptitle(section.title, fontsize=11)
    return figure


# ---- memory ----


def memory(section: Section) -> Any:
    figure, (held, time) = _figure(2, width=9.5)
    labels = [f"{row['world']} x {row['accumulation']}" for row in section.rows]
    bottom = [0.0] * len(labels)
    for index, name in enumerate(("parameters", "gradients", "optimizer", "activations")):
        heights = [row[f"{name}_mb"] for row in section.rows]
        held.bar(labels, heights, bottom=bottom, label=name, color=COLOURS[index], width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    held.set_ylabel("memory of the fullest rank (MB)")
    held.set_title("Memory by category")
    held.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    medians, spread = _errors([row["ms_per_micro_batch"] for row in section.rows])
    time.bar(labels, medians, yerr=spread, color=COLOURS[0], width=0.6, ecolor="#333333")
    time.set_ylabel("time per micro-batch (ms)")
    time.set_title("Cost of accumulation")
    for axes in (held, time):
        axes.set_xlabel("ranks x micro-batches per step")
        axes.grid(axis="x", visible=False)
    figure.suptitle(section.title, fontsize=11)
    return figure


def leak(section: Section) -> Any:
    figure, (bytes_held, count) = _figure(2, width=9.5, height=3.2)
    steps = [row["step"] for row in section.rows]
    for key, label, colour in (
        ("resident_mb", "process", COLOURS[0]),
        ("tensor_mb", "live tensors", COLOURS[1]),
        ("device_mb", "device", COLOURS[2]),
    ):
        values = [row[key] for row in section.rows]
        if any(values):
            bytes_held.plot(steps, values, marker="o", color=colour, label=label)
    bytes_held.set_ylim(bottom=0)
    bytes_held.set_ylabel("memory (MB)")
    bytes_held.set_title("Memory over the steps")
    bytes_held.legend(loc="center right")
    count.plot(steps, [row["tensors"] for row in section.rows], marker="o", color=COLOURS[3])
    count.set_ylim(bottom=0)
    count.set_ylabel("live tensors")
    count.set_title("Live tensors over the steps")
    for axes in (bytes_held, count):
        axes.set_xlabel("step")
    figure.suptitle(section.title, fontsize=11)
    return figure


# ---- data and checkpoints ----


def data(section: Section) -> Any:
    figure, (axes,) = _figure(1, width=7)
    labels = [str(row["workers"]) for row in section.rows]
    _grouped(
        axes,
        labels,
        {
            "Lockstep's loader": [row["loader"] for row in section.rows],
            "torch DataLoader": [row["torch_loader"] or 0.0 for row in section.rows],
            "the model takes": [row["need"] for row in section.rows],
        },
    )
    axes.set_yscale("log")
    axes.set_xlabel("worker processes")
    axes.set_ylabel("samples/s")
    axes.set_title(section.title)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def checkpoint(section: Section) -> Any:
    figure, (waits, rates) = _figure(2, width=11, height=3.4)
    names = [row["way"] for row in section.rows]
    for axes, left, right, unit in (
        (waits, ("training waits", "stall_s"), ("written after", "written_s"), "seconds"),
        (rates, ("write rate", "write_mb_s"), ("load rate", "load_mb_s"), "MB/s"),
    ):
        groups = {label: [row.get(key) or 0.0 for row in section.rows] for label, key in (left, right)}
        _grouped(axes, names, groups)
        axes.set_ylabel(unit)
        axes.tick_params(axis="x", rotation=20)
        axes.legend()
    waits.set_title("Time of a save")
    rates.set_title("Rates")
    figure.suptitle(section.title, fontsize=11)
    return figure


def _grouped(axes: Any, labels: Sequence[str], groups: dict[str, list[Any]]) -> None:
    """Draw bars side by side, one of each group for each label."""
    width = 0.8 / len(groups)
    for index, (name, values) in enumerate(groups.items()):
        medians, spread = _errors(values)
        places = [number + (index - (len(groups) - 1) / 2) * width for number in range(len(labels))]
        axes.bar(places, medians, width * 0.92, yerr=spread, label=name, color=COLOURS[index], ecolor="#333333")
    axes.set_xticks(range(len(labels)), labels)
    axes.grid(axis="x", visible=False)


# ---- projection ----


def projection(section: Section) -> Any:
    figure, (axes,) = _figure(1, width=7)
    for index, mode in enumerate(dict.fromkeys(row["what"] for row in section.rows)):
        measured = section.extra["measured"].get(mode, [])
        mine = [row for row in section.rows if row["what"] == mode]
        colour = COLOURS[index]
        if measured:
            worlds = [row["world"] for row in measured]
            _line(axes, worlds, [row["scaling_efficiency"] for row in measured], colour, f"{mode}, measured")
        # The dashed line begins at one rank, so that it can be compared with what was measured.
        points = [(1, 1.0), *((row["ranks"], row["efficiency"]) for row in mine)]
        axes.plot(
            *zip(*points, strict=True),
            color=colour,
            linestyle="--",
            marker="D",
            markerfacecolor="white",
            label=f"{mode}, projection",
        )
    rows = [row for rows in section.extra["measured"].values() for row in rows]
    measured_worlds = {row["world"] for row in rows}
    _ranks_axis(axes, sorted({row["ranks"] for row in section.rows} | measured_worlds))
    axes.set_ylim(0, _top([row["scaling_efficiency"] for row in rows]))
    axes.set_ylabel("scaling efficiency")
    axes.set_title("Scaling efficiency: measured, and projected (dashed)")
    axes.legend(loc="upper right", handlelength=4)
    return figure


FIGURES: dict[str, Callable[[Section], Any]] = {
    "weak": scaling,
    "strong": scaling,
    "comm": collectives,
    "comm_step": step_communication,
    "memory": memory,
    "leak": leak,
    "step": step,
    "data": data,
    "checkpoint": checkpoint,
    "projection": projection,
}
