"""The plots of a result: PNG files for the page and for screens, and PDF files for a paper.

They need matplotlib: `pip install 'lockstep-train[bench]'`.

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
    "pdf.fonttype": 42,  # letters that can be searched and edited
}


def available() -> bool:
    """Return whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def write(result: Result, folder: Path) -> dict[str, Path]:
    """Write the plots of each section and return their PNG files by section. Without matplotlib there are none."""
    if not available():
        return {}

    import matplotlib  # slow to import, and not always installed

    drawn = [section for section in result.sections if section.name in FIGURES and section.rows]
    found = {section.name: folder / f"{section.name}.png" for section in drawn}
    with matplotlib.rc_context(STYLE):
        for section in drawn:
            figure = FIGURES[section.name](section)
            _name_hardware(figure, result, section)

            # No date, so the same numbers give the same file.
            figure.savefig(found[section.name], metadata={"Software": None})
            pdf = found[section.name].with_suffix(".pdf")
            figure.savefig(pdf, metadata={"Creator": None, "Producer": None, "CreationDate": None})

    return found


def _figure(columns: int, width: float, height: float = 3.9) -> tuple[Any, list[Any]]:
    """Return a figure of this size in inches, and its panels from left to right."""
    from matplotlib.figure import Figure

    # No pyplot: it would keep state, and look for a display.
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _name_hardware(figure: Any, result: Result, section: Section) -> None:
    """Write the last line of a figure: the hardware, the versions and the date of the measurement."""
    torch = section.extra.get("facts", {}).get("torch") or result.facts.get("torch", "")
    stamp = section.stamp or {"version": result.version, "time": result.time}
    text = f"{result.hardware['text']} · torch {torch} · Lockstep {stamp['version']} · {stamp['time']}"
    if refusal := section.extra.get("refusal", ""):
        text += f" · not a fair test: {refusal}"

    # About 14 letters to the inch.
    lines = textwrap.wrap(text, int(14 * figure.get_figwidth()))
    figure.supxlabel("\n".join(lines), fontsize=7, color=GREY, ha="center")


# ---- values with error bars ----


def _column(rows: Sequence[dict[str, Any]], key: str) -> list[Any]:
    """Return the values of one column; a value that a row lacks is 0."""
    return [row.get(key) or 0.0 for row in rows]


def _errors(values: Sequence[Any]) -> tuple[list[float], list[list[float]]]:
    """Return medians, and the distances to both ends of their intervals."""
    # Matplotlib takes the distances as [lengths downwards, lengths upwards].
    medians = [float(middle(value) or 0.0) for value in values]
    low = [value["median"] - value["low"] if is_estimate(value) else 0.0 for value in values]
    high = [value["high"] - value["median"] if is_estimate(value) else 0.0 for value in values]
    return medians, [low, high]


def _top(values: Sequence[Any]) -> float:
    """Return the upper end of an axis from 0 that shows 1 and every error bar whole."""
    ends = [value["high"] if is_estimate(value) else value for value in values if value is not None]
    return 1.05 * max([1.07, *ends])


def _line(axes: Any, xs: Sequence[float], values: Sequence[Any], colour: str, label: str, marker: str = "o") -> None:
    """Draw a line with error bars."""
    medians, spread = _errors(values)
    axes.errorbar(xs, medians, yerr=spread, color=colour, marker=marker, label=label)


def _ranks_axis(axes: Any, worlds: Sequence[int]) -> None:
    """Label the numbers of ranks, each twice the one before."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.minorticks_off()
    axes.set_xlabel("ranks")


# ---- scaling ----


def scaling(section: Section) -> Any:
    """Draw the throughput, the efficiency and the breakdown of a step over the number of ranks."""
    # Three panels: rate, efficiency, and where the time of a step goes.
    figure, (rate, efficiency, parts) = _figure(3, width=11.5)
    rows = section.rows
    worlds = [row["world"] for row in rows]

    # Against a throughput that grows with the ranks.
    _line(rate, worlds, _column(rows, "throughput"), COLOURS[0], "measured")
    first = rows[0]["throughput"]["median"] / worlds[0]
    rate.plot(worlds, [first * world for world in worlds], color=GREY, linestyle=":", label="ideal")
    rate.set(
        title="Throughput",
        xticks=worlds,
        xlabel="ranks",
        ylabel="throughput (samples/s)",
    )
    rate.set_ylim(bottom=0)
    rate.legend(loc="upper left")

    _draw_efficiency(efficiency, section, worlds)

    # One bar for each number of ranks, from a traced block. A kind of time that never reaches half a per cent is not
    # worth a colour; the others have the same one in every figure.
    breakdowns = [row["breakdown_ms"] for row in rows]
    used = [kind for kind in KINDS if any(each.get(kind, 0.0) > 0.005 * sum(each.values()) for each in breakdowns)]
    heights = {kind: [each.get(kind, 0.0) for each in breakdowns] for kind in used}
    colours = [COLOURS[KINDS.index(kind) % len(COLOURS)] for kind in used]
    _stacked(parts, [str(world) for world in worlds], heights, colours)
    parts.set(title="Where a step goes (traced)", xlabel="ranks", ylabel="ms per step")
    figure.suptitle(section.title, fontsize=11)
    return figure


def _draw_efficiency(axes: Any, section: Section, worlds: list[int]) -> None:
    """Draw the efficiency with its bounds: the share of computing, the target, and the machine itself."""
    rows = section.rows
    found = _column(rows, "scaling_efficiency")
    label = "scaling efficiency"
    if len(worlds) > 1:
        label += f" ({middle(found[-1]):.2f} at {worlds[-1]})"

    _line(axes, worlds, found, COLOURS[0], label)
    axes.plot(worlds, _column(rows, "compute_fraction"), color=COLOURS[1], marker="s", label="compute fraction")

    # Sections of one rank have no target.
    limit = section.verdicts[0].limit if section.verdicts else None
    if limit:
        axes.axhline(limit, color=COLOURS[2], linestyle="--", linewidth=1, label=f"target {limit:.0%}")

    # Ranks that train side by side without any exchange show how much their cores or caches allow.
    limited = [row for row in rows if row.get("machine_limit")]
    if limited:
        # A little to the right, so that its error bars do not hide the others.
        alone = [1.05 * row["world"] for row in limited]
        _line(axes, alone, _column(limited, "machine_limit"), GREY, "machine limit (no exchange)", "^")

    # The axis shows all error bars whole.
    shown = [*_column(rows, "scaling_efficiency"), *_column(limited, "machine_limit")]
    axes.set(title="Efficiency", ylabel="fraction", ylim=(0, _top(shown)))
    axes.legend(loc="lower left")
    _ranks_axis(axes, worlds)


def _plain_log_labels(axes: Any) -> None:
    """Write 0.1 and 10 on a logarithmic axis, and not powers of ten."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e4 else f"{value:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _stacked(axes: Any, labels: Sequence[str], parts: dict[str, list[float]], colours: Sequence[str]) -> None:
    """Draw a bar for each label, with the parts on top of each other."""
    bottom = [0.0] * len(labels)
    for (name, heights), colour in zip(parts.items(), colours, strict=False):
        axes.bar(labels, heights, bottom=bottom, label=name, color=colour, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]

    axes.grid(axis="x", visible=False)

    # The legend has the order of the bars, from top to bottom.
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))


# ---- step ----


STEP_PANELS = {
    "wall_ratio": "Wall time, long runs",
    "cpu_ratio": "CPU time, long runs",
    "short_ratio": "Wall time, whole runs of 60 steps",
}


def step(section: Section) -> Any:
    """Draw each loop's time relative to the hand-written one."""
    # In the order of the rows. The hand-written loop is the unit of all ratios, so it has no points.
    cases = list(dict.fromkeys(row["case"] for row in section.rows))
    loops = [name for name in dict.fromkeys(row["loop"] for row in section.rows) if name != "by hand"]
    figure, panels = _figure(3, width=11.5, height=1.9 + 0.3 * len(cases) * len(loops))

    # One panel for each ratio; all have the same cases.
    for axes, (key, title) in zip(panels, STEP_PANELS.items(), strict=True):
        _ratio_points(axes, section, cases, loops, key)
        axes.axvline(1.0, color="#333333", linewidth=1)
        axes.set(title=title, xlabel="relative to the hand-written loop")

    # The target is one of wall time; the names of the cases stand once.
    panels[0].axvline(1.15, color=COLOURS[2], linestyle="--", linewidth=1, label="target 1.15")
    for axes in panels[1:]:
        axes.set_yticklabels([])

    # One legend for all panels, above them.
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))
    figure.suptitle(section.title, fontsize=11, x=0.01, ha="left")
    return figure


def _ratio_points(axes: Any, section: Section, cases: list[str], loops: list[str], key: str) -> None:
    """Draw a point for each loop of each case. Not bars: the axis begins near 1, where the differences are."""
    height = 0.8 / len(loops)
    for index, loop in enumerate(loops):
        rows = {row["case"]: row for row in section.rows if row["loop"] == loop}
        mine = [(number, rows[case][key]) for number, case in enumerate(cases) if case in rows]
        medians, spread = _errors([value for _, value in mine])

        # The loops of a case lie below each other, around the number of the case.
        places = [number + (index - (len(loops) - 1) / 2) * height for number, _ in mine]

        noise = loop == "by hand again"
        axes.errorbar(
            medians,
            places,
            xerr=spread,
            color=GREY if noise else COLOURS[index % len(COLOURS)],
            label="by hand, again (noise)" if noise else loop,
            marker="o",
            linestyle="none",
        )

    # Bands keep the loops of a case together.
    for number in range(0, len(cases), 2):
        axes.axhspan(number - 0.5, number + 0.5, color="#f5f5f5", linewidth=0, zorder=0)

    # The first case is at the top.
    axes.set_yticks(range(len(cases)), cases)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


# ---- communication ----


def collectives(section: Section) -> Any:
    """Draw the time and the bus bandwidth of each operation over the size of its message."""
    figure, (times, rates) = _figure(2, width=11)

    # Each operation and backend once, in the order of the rows.
    keys = list(dict.fromkeys((row["operation"], row["backend"]) for row in section.rows))
    operations = list(dict.fromkeys(operation for operation, _ in keys))
    backends = list(dict.fromkeys(backend for _, backend in keys))

    # An operation has a colour, and a backend a marker.
    for operation, backend in keys:
        mine = [row for row in section.rows if (row["operation"], row["backend"]) == (operation, backend)]
        sizes = [row["bytes"] for row in mine]
        colour = COLOURS[operations.index(operation) % len(COLOURS)]
        label = f"{operation} ({backend})" if len(backends) > 1 else operation
        marker = "o" if backend == backends[0] else "s"

        _line(times, sizes, _column(mine, "milliseconds"), colour, label, marker)
        _line(rates, sizes, _column(mine, "bus_gb_s"), colour, label, marker)

        # The dotted line is the fit of latency and bandwidth.
        latency, bandwidth = fit(sizes, [row["milliseconds"]["median"] / 1e3 for row in mine])
        fitted = [1e3 * (latency + size / bandwidth) for size in sizes]
        times.plot(sizes, fitted, color=colour, linestyle=":", linewidth=1)

    times.set(title="Time of a collective (dotted: latency + size / bandwidth)", ylabel="time (ms)")
    rates.set(title="Bus bandwidth", ylabel="bus bandwidth (GB/s)")

    # Times go from microseconds to seconds, so both axes are logarithmic.
    for axes in (times, rates):
        _byte_axis(axes, sorted({row["bytes"] for row in section.rows}))
        axes.set_yscale("log")
        _plain_log_labels(axes)

    times.legend()
    figure.suptitle(f"{section.title} ({', '.join(backends)})", fontsize=11)
    return figure


def _byte_axis(axes: Any, sizes: Sequence[int]) -> None:
    """Label every other size: they are powers of four."""
    from lockstep.bench.kinds.comm import human

    shown = sizes[::2]
    axes.set_xscale("log", base=2)
    axes.set_xlabel("message size")
    axes.set_xticks(shown, [human(size) for size in shown], rotation=30)
    axes.minorticks_off()


def step_communication(section: Section) -> Any:
    """Draw how much of a step's communication is hidden behind computing, and the time of the step."""
    figure, (communication, overlap, time) = _figure(3, width=11.5, height=3.4)
    rows = section.rows
    names = [row["what"] for row in rows]
    places = range(len(names))

    # A step waits for exposed communication; the rest runs beside computing.
    exposed = _column(rows, "exposed_ms")
    hidden = [row["communication_ms"] - row["exposed_ms"] for row in rows]
    communication.barh(places, exposed, color=COLOURS[1], label="exposed")
    communication.barh(places, hidden, left=exposed, color=COLOURS[5], label="hidden")
    communication.set(title="Communication, traced", xlabel="communication (ms per step)")
    communication.legend()

    # Each bar shows its number, because a bar of length 0 looks like one that is missing.
    bars = overlap.barh(places, _column(rows, "overlap_fraction"), color=COLOURS[2])
    overlap.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    overlap.set(title="Overlap", xlabel="fraction of communication hidden", xlim=(0, 1.1))

    # Timed without the tracer, in contrast to the other panels.
    medians, spread = _errors(_column(rows, "step_ms"))
    time.barh(places, medians, xerr=spread, color=COLOURS[0], ecolor="#333333")
    time.set(title="Time of a step", xlabel="step (ms)")

    # The names stand once, on the left.
    for axes in (communication, overlap, time):
        axes.set_yticks(places, names if axes is communication else [""] * len(names))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)

    figure.suptitle(section.title, fontsize=11)
    return figure


# ---- memory ----


def memory(section: Section) -> Any:
    """Draw the memory of a rank by category, and the cost of a micro-batch as their number grows."""
    figure, (held, time) = _figure(2, width=9.5)
    rows = section.rows
    labels = [f"{row['world']} x {row['accumulation']}" for row in rows]

    categories = ("parameters", "gradients", "optimizer", "activations")
    _stacked(held, labels, {name: _column(rows, f"{name}_mb") for name in categories}, COLOURS)
    held.set(title="Memory by category", ylabel="memory of the fullest rank (MB)")

    # Gradients are exchanged once in a step, so a micro-batch costs less if there are more of them.
    _grouped(time, labels, {"": _column(rows, "ms_per_micro_batch")})
    time.set(title="Cost of accumulation", ylabel="time per micro-batch (ms)")

    # A single bar would fill the whole panel.
    for axes in (held, time):
        axes.set_xlabel("ranks x micro-batches per step")
        axes.set_xlim(-0.8, max(2.0, len(labels)) - 0.2)

    figure.suptitle(section.title, fontsize=11)
    return figure


def leak(section: Section) -> Any:
    """Draw the memory of a process over the steps. Both axes begin at 0, so that a flat line looks flat."""
    figure, (bytes_held, count) = _figure(2, width=9.5, height=3.2)
    steps = _column(section.rows, "step")

    # Without a GPU nothing is on the device, and no line is drawn for it.
    kinds = {"resident_mb": "process", "tensor_mb": "live tensors", "device_mb": "device"}
    for colour, (key, label) in zip(COLOURS, kinds.items(), strict=False):
        values = _column(section.rows, key)
        if any(values):
            bytes_held.plot(steps, values, marker="o", color=colour, label=label)

    bytes_held.set(title="Memory over the steps", ylabel="memory (MB)")
    bytes_held.legend(loc="center right")

    count.plot(steps, _column(section.rows, "tensors"), marker="o", color=COLOURS[3])
    count.set(title="Live tensors over the steps", ylabel="live tensors")

    for axes in (bytes_held, count):
        axes.set_xlabel("step")
        axes.locator_params(axis="x", integer=True)
        axes.set_ylim(0, 1.15 * axes.dataLim.ymax)

    figure.suptitle(section.title, fontsize=11)
    return figure


# ---- data and checkpoints ----


def data(section: Section) -> Any:
    """Draw how fast loaders are, beside how fast the model takes samples. Points: a logarithmic axis has no zero."""
    figure, (axes,) = _figure(1, width=7)
    groups = {
        "Lockstep's loader": _column(section.rows, "loader"),
        "torch DataLoader": _column(section.rows, "torch_loader"),
        "the model takes": _column(section.rows, "need"),
    }
    for index, (name, values) in enumerate(groups.items()):
        # Side by side, so that error bars do not hide each other.
        places = [number + 0.12 * (index - 1) for number in range(len(values))]
        medians, spread = _errors(values)

        # torch has no rate for a dataset without a length.
        if all(medians):
            axes.errorbar(places, medians, yerr=spread, color=COLOURS[index], label=name, marker="o", linestyle="none")

    axes.set(title=section.title, xlabel="worker processes", ylabel="samples/s", yscale="log")
    axes.set_xticks(range(len(section.rows)), [str(row["workers"]) for row in section.rows])
    axes.set_xlim(-0.5, len(section.rows) - 0.5)
    _plain_log_labels(axes)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def checkpoint(section: Section) -> Any:
    """Draw how long a save holds up training and takes in all, and the rates of writing and loading."""
    figure, (waits, rates) = _figure(2, width=11, height=3.4)
    rows = section.rows
    names = [row["way"] for row in rows]

    times = {"training waits": _column(rows, "stall_s"), "written after": _column(rows, "written_s")}
    _grouped(waits, names, times)
    waits.set(title="Time of a save", ylabel="seconds")

    # Rates have another unit, and so a panel of their own.
    _grouped(rates, names, {"write rate": _column(rows, "write_mb_s"), "load rate": _column(rows, "load_mb_s")})
    rates.set(title="Rates", ylabel="MB/s")

    for axes in (waits, rates):
        axes.tick_params(axis="x", rotation=20)
        axes.legend()

    figure.suptitle(section.title, fontsize=11)
    return figure


def start(section: Section) -> Any:
    """Draw how long both commands take to their first step, and to their end."""
    figure, (axes,) = _figure(1, width=7, height=3.4)
    names = [row["way"] for row in section.rows]
    columns = {"first step": "first_s", "end of the command": "end_s"}
    _grouped(axes, names, {label: _column(section.rows, key) for label, key in columns.items()})
    axes.set(title=section.title, ylabel="seconds after the command")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def recovery(section: Section) -> Any:
    """Draw how long training stands still after a kill, beside how long the first start took."""
    figure, (axes,) = _figure(1, width=7, height=3.4)

    # There is one row: all kills of all rounds.
    row = section.rows[0]
    bars = {"first start": "start_s", "next step after a kill": "again_s", "kill noticed": "noticed_s"}
    _grouped(axes, list(bars), {"": [row[key] for key in bars.values()]})
    axes.bar_label(axes.containers[-1], fmt="%.2f s", padding=8)
    axes.margins(y=0.15)  # room for the numbers
    axes.set(title=section.title, ylabel="seconds")
    return figure


def _grouped(axes: Any, labels: Sequence[str], groups: dict[str, list[Any]]) -> None:
    """Draw bars side by side, one of each group for each label."""
    # The bars of a label share 0.8 of the distance to the next one.
    width = 0.8 / len(groups)
    for index, (name, values) in enumerate(groups.items()):
        medians, spread = _errors(values)
        places = [number + (index - (len(groups) - 1) / 2) * width for number in range(len(labels))]
        axes.bar(places, medians, width * 0.92, yerr=spread, label=name, color=COLOURS[index], ecolor="#333333")

    axes.set_xticks(range(len(labels)), labels)
    axes.grid(axis="x", visible=False)


# ---- projection ----


def projection(section: Section) -> Any:
    """Draw the measured efficiency, and dashed the projection by the model of the links."""
    figure, (axes,) = _figure(1, width=7)

    # Every kind of scaling has a colour: a solid line for the measurement, a dashed one for the projection.
    for colour, mode in zip(COLOURS, dict.fromkeys(row["what"] for row in section.rows), strict=False):
        measured = section.extra["measured"].get(mode, [])
        mine = [row for row in section.rows if row["what"] == mode]
        if measured:
            worlds = [row["world"] for row in measured]
            _line(axes, worlds, _column(measured, "scaling_efficiency"), colour, f"{mode}, measured")

        # The dashed line begins at one rank, so that it can be compared with the measurement.
        points = [(1, 1.0), *((row["ranks"], row["efficiency"]) for row in mine)]
        axes.plot(
            *zip(*points, strict=True),
            color=colour,
            linestyle="--",
            marker="D",
            markerfacecolor="white",
            label=f"{mode}, projection",
        )

    # The axis has the ranks of both, and shows every error bar whole.
    rows = [row for rows in section.extra["measured"].values() for row in rows]
    worlds = {row["world"] for row in rows} | {row["ranks"] for row in section.rows}
    _ranks_axis(axes, sorted(worlds))
    axes.set(
        title="Scaling efficiency: measured, and projected (dashed)",
        ylabel="scaling efficiency",
        ylim=(0, _top(_column(rows, "scaling_efficiency"))),
    )
    axes.legend(loc="upper right", handlelength=4)
    return figure


# By the name of a section. Sections without an entry have a table only.
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
    "start": start,
    "recovery": recovery,
    "projection": projection,
}
