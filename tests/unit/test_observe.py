"""What a run writes and shows: JSON lines, the terminal, and the report."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import resource
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lockstep.errors import UserError
from lockstep.observe import progress as shown
from lockstep.observe import report
from lockstep.observe.progress import Tracker, event_line, make_progress, sparkline, step_line
from lockstep.observe.report import Series, line_chart, write_report
from lockstep.observe.sinks import JsonlSink, read_jsonl

RECORD: dict[str, Any] = {
    "time": 1763179421.5,
    "step": 120,
    "epoch": 0.12,
    "loss": 2.3141,
    "lr": 0.001,
    "grad_norm": 0.8312,
    "samples": 7680,
    "weight": 491520,
    "samples_per_s": 900.1,
    "weight_per_s": 57600.0,
    "step_s": 0.15,
    "data_wait_s": 0.001,
    "memory_mb": 512.0,
    "skipped": 0,
}
START = {
    "time": 1763179400.0,
    "event": "start",
    "task": "char_lm",
    "world": 2,
    "device": "cpu",
    "precision": "fp32",
    "parameters": 10_812_000,
    "unit": "token",
    "steps": 400,
}


# ---- sinks ----


def test_records_come_back_as_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonlSink(path) as sink:
        sink.write(RECORD)
        assert read_jsonl(path) == [RECORD], "a reader sees the line before the file is closed"
        sink.write({"text": "two\nlines \u2028 é", "none": None})
    assert len(path.read_text().split("\n")) == 3
    assert read_jsonl(path)[1] == {"text": "two\nlines \u2028 é", "none": None}


def test_nonfinite_numbers_are_null_with_a_mark(tmp_path):
    path = tmp_path / "metrics.jsonl"
    record = {"loss": math.nan, "none": None, "metrics": {"a": math.inf, "b": 1.0}, "list": [2.0, -math.inf]}
    with JsonlSink(path) as sink:
        sink.write(record)

    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    raw = json.loads(path.read_text(), parse_constant=no_constants)
    assert raw["loss"] is None
    assert raw["_nonfinite"] == {"loss": "nan", "metrics.a": "inf", "list.1": "-inf"}
    (back,) = read_jsonl(path)
    assert math.isnan(back.pop("loss"))
    assert back == {"none": None, "metrics": {"a": math.inf, "b": 1.0}, "list": [2.0, -math.inf]}


def test_numpy_scalars_and_paths_can_be_written(tmp_path):
    numpy = pytest.importorskip("numpy")
    with JsonlSink(tmp_path / "x.jsonl") as sink:
        sink.write({"a": numpy.float32(1.5), "b": numpy.int64(3), "c": Path("x/y"), "d": numpy.float32("nan")})
    (back,) = read_jsonl(tmp_path / "x.jsonl")
    assert (back["a"], back["b"], back["c"]) == (1.5, 3, "x/y")
    assert math.isnan(back["d"])


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_truncated_last_line_is_left_out_and_then_mended(tmp_path, cut):
    path = tmp_path / "events.jsonl"
    whole = b'{"a": 1}\n{"b": 22}\n'
    path.write_bytes(whole[:-cut])
    kept = [{"a": 1}, {"b": 22}] if cut == 1 else [{"a": 1}]
    assert read_jsonl(path) == kept
    with JsonlSink(path) as sink:
        sink.write({"c": 3})
    assert read_jsonl(path) == [*kept, {"c": 3}]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_torn_line_longer_than_a_block_is_mended(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n{"text": "' + "x" * 200_000)
    with JsonlSink(path) as sink:
        sink.write({"b": 2})
    assert read_jsonl(path) == [{"a": 1}, {"b": 2}]


def test_damage_in_the_middle_is_said_with_its_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n{"b": \n{"c": 3}\n')
    with pytest.raises(UserError, match=r"line 2 is not a JSON object"):
        read_jsonl(path)


def test_a_full_disk_raises_and_leaves_whole_lines(tmp_path):
    path = tmp_path / "events.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with JsonlSink(path) as sink:
        sink.write({"a": 1})
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30, limits[1]))
            with pytest.raises(OSError, match="File too large"):
                sink.write({"text": "x" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sink.write({"b": 2})
    assert read_jsonl(path) == [{"a": 1}, {"b": 2}]


def test_a_closed_sink_refuses(tmp_path):
    sink = JsonlSink(tmp_path / "x.jsonl")
    sink.close()
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.write({})


# ---- progress: numbers and lines ----


def test_the_time_left_is_the_median_of_recent_steps_without_the_first_record():
    tracker = Tracker(total_steps=400, unit="token")
    assert tracker.seconds_left() is None
    tracker.update({"step": 10, "step_s": 9.0})
    assert tracker.seconds_left() is None, "one slow record says nothing"
    tracker.update({"step": 20, "step_s": 0.5})
    assert tracker.seconds_left() == pytest.approx(380 * 0.5)
    tracker.update({"step": 30, "step_s": 60.0})  # a recompilation
    tracker.update({"step": 40, "step_s": 0.25})
    assert tracker.seconds_left() == pytest.approx(360 * 0.5)
    for step in range(50, 50 + 10 * shown.RECENT_STEPS, 10):  # older records no longer count
        tracker.update({"step": step, "step_s": 0.1})
    assert tracker.seconds_left() == pytest.approx((400 - step) * 0.1)
    tracker.update({"step": 500, "step_s": 0.1})
    assert tracker.seconds_left() == 0


def plain_lines(*calls: tuple[str, Any], total: int | None = 400, unit: str = "token") -> list[str]:
    stream = io.StringIO()
    display = make_progress("plain", total, unit, stream)
    for method, argument in calls:
        getattr(display, method)(argument)
    display.close()
    assert display.failure is None  # type: ignore[attr-defined]
    return stream.getvalue().splitlines()


def test_plain_lines():
    later = {**RECORD, "step": 130, "skipped": 2, "weight_per_s": 1.05e6, "memory_mb": 81_408.0}
    assert plain_lines(
        ("start", START),
        ("event", START),
        ("update", RECORD),
        ("update", later),
        (
            "event",
            {
                "time": 1.0,
                "event": "eval",
                "step": 130,
                "loss": 2.5,
                "metrics": {"acc": 0.31},
                "samples": 101,
            },
        ),
        ("event", {"time": 1.0, "event": "skip", "step": 131, "reason": "the gradient norm\nis inf"}),
        ("message", "hello"),
    ) == [
        "char_lm  2 ranks  cpu  fp32  10.8M parameters",
        "step   120/400  loss  2.314  lr 1.0e-03  norm  0.831  57.6k token/s  mem  512 MB  eta -",
        "step   130/400  loss  2.314  lr 1.0e-03  norm  0.831  1.05M token/s  mem 79.5 GB  eta 0:40  skipped 2",
        "eval     step 130  loss 2.500  acc 0.3100  samples 101",
        "skip     step 131  the gradient norm is inf",
        "hello",
    ]


def test_plain_lines_are_aligned():
    values = [0.0123, 2.5, 12.3456, 1234.5, math.nan]
    lines = plain_lines(*(("update", {**RECORD, "loss": x, "grad_norm": x, "weight_per_s": 10 * x}) for x in values))
    for column in ("loss", "lr", "norm", "token/s", "mem"):
        assert len({line.index(column) for line in lines}) == 1, lines
    assert "loss    nan" in lines[-1]


def test_missing_keys_are_dashes():
    (line,) = plain_lines(("update", {}), total=None)
    assert " ".join(line.split()) == "step - loss - lr - norm - - token/s mem - eta -"


def test_total_steps_may_come_from_the_start_event():
    lines = plain_lines(("start", START), ("update", RECORD), total=None)
    assert "120/400" in lines[1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (42.4, "0:42"), (3723, "1:02:03"), (176_523, "2d 01:02:03"), (None, "-"), (math.nan, "-")],
)
def test_duration(seconds, text):
    assert shown.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (57600, "57.6k"),
        (999.7, "1k"),
        (0.25, "0.25"),
        (7.2e9, "7.2B"),
        (3e20, "3.0e+20"),
        ("x", "-"),
        (None, "-"),
    ],
)
def test_compact(value, text):
    assert shown.compact(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.3141, "2.314"),
        (12.341, "12.34"),
        (0.0123, "0.0123"),
        (0, "0.000"),
        (1.5e-7, "1.5e-07"),
        (2.5e9, "2.5e+09"),
        (-3.0, "-3.000"),
        (math.inf, "inf"),
        (10**400, "-"),
        (True, "-"),
    ],
)
def test_figures(value, text):
    assert shown.figures(value, 4) == text


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([3.0, 3.0]) == "▄▄"
    assert sparkline([0.0, 7.0, 3.0, math.nan]) == "▁█▄!"
    assert sparkline([-1.7e308, 1.7e308]) == "▁█"


def test_text_cannot_steer_the_terminal():
    lines = plain_lines(("message", "a\x1b[2Jb\r\nc"), ("event", {"event": "sample", "text": "one\n\x07two"}))
    assert lines == ["a\ufffd[2Jb", "c", "sample:", "one", "\ufffdtwo"]
    assert "\n" not in event_line({"event": "odd\n", "k\ney": "v\nw", "more": {"x": [1, 2]}})


# ---- progress: never in the way ----


@pytest.mark.parametrize("strange", [None, 3, "text", [], {"metrics": 3}, {"step": "x", "loss": []}, {"event": {}}])
@pytest.mark.parametrize("mode", ["plain", "off"])
def test_strange_records_do_not_raise(mode, strange):
    display = make_progress(mode, 10, "sample", io.StringIO())
    for method in (display.start, display.update, display.event, display.message):
        method(strange)
    display.update(RECORD)
    display.close()


def test_a_closed_stream_does_not_raise():
    stream = io.StringIO()
    display = make_progress("auto", 10, "sample", stream)
    stream.close()
    display.message("into the void")
    display.update(RECORD)
    display.close()


def test_a_reader_that_leaves_does_not_change_the_exit_status():
    """`lockstep train ... | head -1` must not look like a failed rank."""
    program = (
        "import sys\n"
        "from lockstep.observe.progress import make_progress\n"
        "display = make_progress('auto', 10, 'sample', sys.stdout)\n"
        "for step in range(20000): display.update({'step': step})\n"
        "display.close(); print('after')\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait() == 0


def test_a_stream_that_cannot_encode_gets_question_marks():
    raw = io.BytesIO()
    display = make_progress("plain", 10, "sample", io.TextIOWrapper(raw, encoding="ascii"))
    display.message("naïve")
    assert raw.getvalue() == b"na?ve\n"


def test_off_shows_nothing_and_unknown_modes_are_refused():
    stream = io.StringIO()
    display = make_progress("off", 10, "sample", stream)
    display.start(START)
    display.update(RECORD)
    display.message("x")
    assert stream.getvalue() == ""
    with pytest.raises(UserError, match=r"log\.progress=loud"):
        make_progress("loud", 10, "sample", stream)  # type: ignore[arg-type]


def test_live_without_a_terminal_says_so_and_is_plain():
    stream = io.StringIO()
    make_progress("live", 10, "sample", stream).update({"step": 3})
    note, line = stream.getvalue().splitlines()
    assert note == "log.progress=live: the output is not a terminal; showing plain lines"
    assert line.startswith("step     3/10 ")


def live_output(monkeypatch, calls) -> str:
    """What a terminal of 100 columns receives from a live display."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    master, slave = pty.openpty()
    received = bytearray()

    def read() -> None:
        while True:
            try:
                received.extend(os.read(master, 65536))
            except OSError:  # the other side closed
                return

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        calls(make_progress("auto", 400, "token", stream))
    reader.join(timeout=10)
    os.close(master)
    return received.decode()


def last_frame(output: str) -> list[str]:
    """The lines drawn since the cursor last went up and erased, without colours."""
    last = output.rpartition("\x1b[2K")[2]
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", last).rstrip("\n").split("\n")


def test_live_display(monkeypatch):
    before = threading.active_count(), sys.stdout

    def calls(display):
        display.start(START)
        for step in range(10, 130, 10):
            loss = math.nan if step == 50 else 5 - step / 40
            display.update({**RECORD, "step": step, "loss": loss, "skipped": 1, "scale": 1024.0})
        display.event({"event": "eval", "step": 120, "loss": 2.75})
        display.event({"event": "skip", "step": 50, "reason": "not finite"})
        display.message("a [red]message[/red]")
        display.update({})
        display.update({**RECORD, "skipped": 1, "loss": 2.0})
        time.sleep(0.3)  # one refresh by rich's own thread
        display.close()
        assert display.failure is None

    output = live_output(monkeypatch, calls)
    assert "a [red]message[/red]" in output
    assert "skip     step 50  not finite" in output
    frame = last_frame(output)
    assert len(frame) == 5
    assert frame[0].rstrip() == "char_lm · 2 ranks · cpu · fp32 · 10.8M parameters"
    assert re.search(r"━+.*120/400  30%  0:0\d elapsed", frame[1])
    assert frame[2].rstrip() == "loss 2.000   █▇▇▆!▅▄▄▃▂▂▁!▁   eval 2.750 at 120"
    assert frame[3].rstrip() == "lr 1.0e-03   norm 0.831   skipped 1"
    assert frame[4].rstrip() == "57.6k token/s   900 sample/s   mem 512 MB"
    assert (threading.active_count(), sys.stdout) == before


def test_prints_scroll_above_the_live_display_but_forked_workers_print_directly(tmp_path):
    program = (
        "import os, sys\n"
        "from lockstep.observe.progress import make_progress\n"
        "display = make_progress('live', 10, 'sample', sys.stdout)\n"
        "display.start({})\n"
        "kinds = [type(sys.stdout).__name__]\n"
        "print('a print of the task')\n"
        "if os.fork() == 0:\n"
        f"    open({str(tmp_path / 'child')!r}, 'w').write(type(sys.stdout).__name__)\n"
        "    os._exit(0)\n"
        "os.wait(); display.close()\n"
        "kinds.append(type(sys.stdout).__name__)\n"
        f"open({str(tmp_path / 'parent')!r}, 'w').write(' '.join(kinds))\n"
    )
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    subprocess.run([sys.executable, "-c", program], stdout=slave, stderr=slave, env=environment, check=True, timeout=60)
    output = os.read(master, 65536).decode()
    os.close(slave)
    os.close(master)
    assert (tmp_path / "parent").read_text() == "FileProxy TextIOWrapper"
    assert (tmp_path / "child").read_text() == "TextIOWrapper"
    assert output.index("a print of the task") < output.rindex("waiting for the first step")


def test_nothing_heavy_is_imported():
    program = (
        "import sys, lockstep.observe.sinks, lockstep.observe.progress, lockstep.observe.report\n"
        "print([name for name in ('torch', 'rich', 'yaml', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# ---- charts ----


def parse(svg: str) -> ET.Element:
    """The tree of a chart, after checking that nothing is drawn outside its picture."""
    root = ET.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root.iter():
        for key, limit in (
            ("x", width),
            ("x1", width),
            ("x2", width),
            ("cx", width),
            ("y", height),
            ("cy", height),
        ):
            if key in element.attrib:
                assert -0.1 <= float(element.attrib[key]) <= limit + 0.1, (element.tag, element.attrib)
        for x, y in re.findall(r"[ML]([-\d.a-z]+) ([-\d.a-z]+?)(?=[LMl]|$)", element.attrib.get("d", "")):
            assert 0 <= float(x) <= width, element.attrib["d"]
            assert 0 <= float(y) <= height, element.attrib["d"]
    return root


def having(root: ET.Element, style: str) -> list[ET.Element]:
    return [element for element in root.iter() if style in element.attrib.get("class", "").split()]


def labels(root: ET.Element, axis: str) -> list[str]:
    return [element.text or "" for element in having(root, "tick") if axis in element.attrib["class"].split()]


def test_a_curve_goes_where_its_values_say():
    root = parse(line_chart([Series("loss", [0, 50, 100], [0.0, 5.0, 10.0])], "Loss", "nat"))
    assert labels(root, "y") == ["0", "2", "4", "6", "8", "10"]
    assert labels(root, "x") == ["0", "20", "40", "60", "80", "100"]
    (path,) = having(root, "main")
    points = [tuple(map(float, pair.split())) for pair in re.findall(r"[ML]([\d.]+ [\d.]+)", path.attrib["d"])]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert y2 < y0, "up is up"
    titles = [element.findtext("{*}title") for element in having(root, "hover")]
    assert titles == ["step 0: loss 0 nat", "step 50: loss 5 nat", "step 100: loss 10 nat"]


def test_a_nan_is_a_gap_with_a_mark():
    ys = [1.0, 2.0, math.nan, 3.0, math.inf, 4.0]
    root = parse(line_chart([Series("loss", list(range(6)), ys)], "Loss", ""))
    assert having(root, "main")[0].attrib["d"].count("M") == 3, "three strokes around two gaps"
    assert [mark.findtext("{*}title") for mark in having(root, "mark")] == [
        "loss is not a number at step 2",
        "loss is not a number at step 4",
    ]


@pytest.mark.parametrize("ys", [[], [math.nan], [math.nan, math.inf, 1.7e308]])
def test_no_values_are_said(ys):
    root = parse(line_chart([Series("loss", list(range(len(ys))), ys)], "Loss", ""))
    assert having(root, "empty")[0].text == "no values"


@pytest.mark.parametrize(
    ("ys", "expected"),
    [
        ([3.0], ["1", "2", "3", "4", "5"]),
        ([0.0, 0.0], ["-1.0", "-0.5", "0", "0.5", "1.0"]),
        ([1e-5, 1e-5], ["0.5e-5", "1.0e-5", "1.5e-5"]),
        ([2e6, 3e6], ["2.0M", "2.2M", "2.4M", "2.6M", "2.8M", "3.0M"]),
        ([0.0, 25_000.0], ["0", "5k", "10k", "15k", "20k", "25k"]),
        ([3e-4, 5e-4], ["3.0e-4", "3.5e-4", "4.0e-4", "4.5e-4", "5.0e-4"]),
        ([-2.0, 2.0], ["-2", "-1", "0", "1", "2"]),
        ([0.0, 2e20], ["0", "0.5e20", "1.0e20", "1.5e20", "2.0e20"]),
        ([-1e290, 1e290], None),
        ([1e290], None),
        ([1e-290], None),
        ([5e-324], ["-1.0", "-0.5", "0", "0.5", "1.0"]),
        ([1e12, 1e12 + 1], None),
    ],
)
def test_y_ticks(ys, expected):
    root = parse(line_chart([Series("loss", list(range(len(ys))), ys)], "Loss", ""))
    found = labels(root, "y")
    assert len(set(found)) == len(found) >= 2
    assert expected is None or found == expected


def test_a_wide_range_is_logarithmic_and_a_scale_counts_in_twos():
    root = parse(line_chart([Series("norm", [1, 2, 3], [0.05, 3.0, 800.0])], "Norm", "", log="auto"))
    assert labels(root, "y") == ["0.01", "0.1", "1", "10", "100", "1000"]
    assert "log scale" in "".join(root.itertext())
    narrow = parse(line_chart([Series("norm", [1, 2], [0.5, 3.0])], "Norm", "", log="auto"))
    assert "log scale" not in "".join(narrow.itertext())
    scale = parse(line_chart([Series("scale", [1, 2], [1024.0, 4096.0])], "Scale", "", log="two"))
    assert labels(scale, "y") == ["2¹⁰", "2¹¹", "2¹²"]


NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=150, deadline=None)
@given(ys=st.lists(NUMBERS, max_size=12), zero=st.booleans(), log=st.sampled_from(["no", "auto", "two"]))
def test_any_numbers_make_a_chart(ys, zero, log):
    parse(line_chart([Series("y", [7 * n for n in range(len(ys))], ys)], "Any", "", zero=zero, log=log))


@settings(max_examples=150, deadline=None)
@given(low=st.floats(-1e12, 1e12), span=st.floats(1e-6, 1e12))
def test_ticks_are_round_inside_and_told_apart(low, span):
    assume(span > 1e-6 * abs(low))
    high = low + span
    ticks = report.round_ticks(low, high, 5)
    assert 2 <= len(ticks) <= 6
    assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in ticks)
    assert len(set(report.tick_labels(ticks))) == len(ticks)


def test_a_long_run_keeps_its_peaks_in_few_points():
    xs = list(range(100_000))
    ys = [1.0] * len(xs)
    ys[54_321], ys[77_777] = 99.0, math.nan
    points = report.thinned(xs, ys, 600)
    assert len(points) < 1000
    assert (54_321, 99.0) in points
    assert any(math.isnan(y) for _, y in points)
    assert len(line_chart([Series("y", xs, ys)], "Long", "")) < 60_000


def test_smoothing_keeps_level_gaps_and_the_first_value():
    flat = report.moving_average([2.0] * 5 + [math.nan] + [2.0] * 5, 3)
    assert math.isnan(flat[5])
    assert [value for value in flat if not math.isnan(value)] == [2.0] * 10
    assert report.moving_average([9.0, 3.0, 3.0, 3.0, 6.0], 1) == [9.0, 5.0, 3.0, 4.0, 4.5]


# ---- the report ----


class Outline(HTMLParser):
    """Collects what a browser would: tags, and the text below each heading."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def outline(path: Path) -> Outline:
    found = Outline()
    found.feed(path.read_text(encoding="utf-8"))
    return found


def tree(path: Path) -> ET.Element:
    return ET.fromstring(path.read_text(encoding="utf-8").removeprefix("<!DOCTYPE html>\n"))


def cards(page: ET.Element) -> dict[str, tuple[str, str]]:
    found = {}
    for card in having(page, "card"):
        value = card.find("dd")
        assert value is not None
        found[card.findtext("dt") or ""] = (value.text or "", value.findtext("small") or "")
    return found


def run_folder(folder: Path, *, end: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    with JsonlSink(folder / "metrics.jsonl") as metrics, JsonlSink(folder / "events.jsonl") as events:
        events.write(START)
        for step in range(10, 401, 10):
            loss = math.nan if step == 200 else 1 + 3 * math.exp(-step / 80)
            rate = {"samples_per_s": 640.0, "weight_per_s": 40_960.0, "step_s": 0.1}
            if step == 10:
                rate = {"samples_per_s": 6.4, "weight_per_s": 409.6, "step_s": 10.0}
            counts = {"samples": 640, "weight": 40_960, "skipped": int(step >= 200)}  # of ten steps
            metrics.write({**RECORD, **rate, **counts, "step": step, "loss": loss, "metrics": {"acc": step / 400}})
            if step % 100 == 0:
                loss = {100: 2.0, 200: 1.5, 300: 1.25, 400: 1.375}[step]
                events.write({"time": 1763179400.0 + step, "event": "eval", "step": step, "loss": loss})
        events.write({"time": 1763179600.0, "event": "skip", "step": 200, "reason": "the norm is nan"})
        events.write({"time": 1763179601.0, "event": "sample", "text": "<script>alert('&')</script>\x00\ud800"})
        if end:
            done = {
                "step": 400,
                "applied": 399,
                "skipped": 1,
                "seconds": 75.0,
                "loss": 1.02,
                "eval_loss": 1.375,
            }
            events.write({"time": 1763179800.0, "event": "end", **done})
            (folder / "summary.json").write_text(json.dumps({"loss": 1.02}))
    (folder / "config.yaml").write_text("steps: 400\nseed: 0\nlr:\n  peak: 0.001\ntask:\n  text: <i>\n")
    sources = {"steps": "command line", "seed": "default", "lr.peak": "file a.yaml", "task": "preset tiny"}
    (folder / "config.sources.json").write_text(json.dumps(sources))
    (folder / "plan.json").write_text(json.dumps({"local_batch": 32, "reasons": {"local_batch": "64 over 2 ranks"}}))
    return folder


def test_report_of_a_finished_run(tmp_path):
    path = write_report(run_folder(tmp_path / "run"))
    assert path == tmp_path / "run" / "report.html"
    assert not (tmp_path / "run" / "report.html.tmp").exists()
    page = tree(path)
    assert having(page, "badge")[0].text == "finished"
    assert cards(page) == {
        "Final loss": ("1.020", ""),
        "Best eval loss": ("1.250", "step 300"),
        "Last eval loss": ("1.375", "step 400"),
        "Steps": ("400 / 400", "399 applied · 1 skipped"),
        "Samples": ("25.6k", "1.64M token"),
        "Wall time": ("1:15", ""),
        "Mean rate": ("41k", "token/s · 640 sample/s"),  # without the slow first record
        "Peak memory": ("512 MB", "the largest logged"),
        "World": ("2", "ranks"),
        "Device": ("cpu", ""),
        "Precision": ("fp32", ""),
        "Parameters": ("10.8M", ""),
    }
    charts = {chart.attrib["aria-label"]: chart for chart in having(page, "chart")}
    assert list(charts) == ["Loss", "Throughput", "Learning rate", "Gradient norm", "Memory", "acc"]
    for chart in charts.values():
        parse(ET.tostring(chart, encoding="unicode"))
    assert len(having(charts["Loss"], "dot")) == 4, "one per evaluation"
    assert len(having(page, "warn")) == 1, "the skip is highlighted"


def test_report_is_self_contained_and_escaped(tmp_path):
    path = write_report(run_folder(tmp_path / "<b>run"))
    found = outline(path)
    assert not {"script", "link", "img", "iframe", "b", "i"} & set(found.tags)
    assert not re.search(r"(src|href)=|url\(|@import", path.read_text(encoding="utf-8"))
    words = "".join(found.words)
    assert "<script>alert('&')</script>\ufffd\ufffd" in words
    assert "<b>run" in words


def test_config_table_puts_chosen_values_first(tmp_path):
    page = tree(write_report(run_folder(tmp_path / "run")))
    rows = [[cell.text for cell in row.findall("td")] for row in page.iter("tr")]
    found = [row for row in rows if row and row[0] in ("steps", "seed", "lr.peak", "task.text")]
    assert found == [
        ["steps", "400", "command line"],
        ["lr.peak", "0.001", "file a.yaml"],
        ["task.text", "<i>", "preset tiny"],
        ["seed", "0", "default"],
    ]
    assert ["local_batch", "32", "64 over 2 ranks"] in rows


def test_an_empty_folder_says_what_is_missing(tmp_path):
    path = write_report(tmp_path)
    words = "".join(outline(path).words)
    for file in (
        "metrics.jsonl",
        "events.jsonl",
        "config.yaml",
        "config.sources.json",
        "plan.json",
        "summary.json",
    ):
        assert f"{file} is not there" in words
    assert having(tree(path), "badge")[0].text == "no end recorded"
    assert set(cards(tree(path)).values()) == {("-", "")}


@pytest.mark.parametrize(
    "file",
    ["metrics.jsonl", "events.jsonl", "config.yaml", "config.sources.json", "plan.json", "summary.json"],
)
@pytest.mark.parametrize("damage", [None, b"", b"{", b"\xff\xfe\n{}\n", b"[1, 2]\n", b": : :\n- [\n"])
def test_one_missing_or_damaged_file_costs_only_its_part(tmp_path, file, damage):
    folder = run_folder(tmp_path / "run")
    (folder / file).unlink()
    if damage is not None:
        (folder / file).write_bytes(damage)
    page = tree(write_report(folder))
    assert len(list(page.iter("section"))) >= 4
    if damage is None:
        assert f"{file} is not there" in "".join(page.itertext())


def test_strange_records_do_not_stop_the_report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"loss": 2}\n{"step": "x"}\n{"step": 3, "metrics": 4}\n')
    strange = [
        {},
        {"event": {"a": 1}, "time": 1e300},
        {"event": "start", "time": 1e300, "facts": 3},
        {"event": "eval"},
        {"event": "eval", "step": 3, "loss": None},
        {"event": "skip"},
        {"event": "sample"},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in strange))
    assert tree(write_report(tmp_path)) is not None


def test_a_failed_run_says_so(tmp_path):
    folder = run_folder(tmp_path / "run", end=False)
    assert having(tree(write_report(folder)), "badge")[0].text == "no end recorded"
    with JsonlSink(folder / "events.jsonl") as events:
        events.write({"time": 1763179900.0, "event": "error", "rank": 1, "error": "rank 1 ran out of memory"})
    page = tree(write_report(folder))
    assert having(page, "badge")[0].text == "failed"
    assert having(page, "reason")[0].text == "rank 1 ran out of memory"
    with JsonlSink(folder / "events.jsonl") as events:  # resumed, and it went well
        events.write({**START, "time": 1763180000.0})
        events.write({"time": 1763180100.0, "event": "end", "step": 400})
    assert having(tree(write_report(folder)), "badge")[0].text == "finished"
    (folder / "summary.json").write_text('{"status": "failed"}')
    page = tree(write_report(folder))
    assert (having(page, "badge")[0].text, having(page, "reason")[0].text) == (
        "failed",
        "No reason was recorded.",
    )


def test_steps_repeated_after_a_resume_are_drawn_once(tmp_path):
    records = [{"step": step, "loss": loss} for step, loss in ((10, 5.0), (20, 4.0), (30, 9.0), (20, 3.0), (25, 2.0))]
    assert [(record["step"], record["loss"]) for record in report.without_undone(records)] == [
        (10, 5.0),
        (20, 3.0),
        (25, 2.0),
    ]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        write_report(tmp_path / "nothing")


def test_the_rate_counts_each_record_for_its_time():
    records = [
        {"weight_per_s": 100.0, "step_s": 3.0},
        {"weight_per_s": 200.0, "step_s": 1.0},
        {"step_s": 9.0},
    ]
    assert report.mean_rate(records, "weight_per_s") == pytest.approx(125.0)
    assert report.mean_rate([], "weight_per_s") is None


def test_step_line_has_no_total_when_none_is_known():
    tracker = Tracker(None, "sample")
    tracker.update(RECORD)
    assert step_line(tracker).startswith("step   120  loss  2.314")
