"""Notebooks, with a kernel that is only pretended: tests/test_notebook.py has a real one."""

from __future__ import annotations

import io
import json
import math
import sys
import types
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from lockstep.api import RunResult
from lockstep.observe import console
from lockstep.observe.console import Display, PlainDisplay, open_display
from lockstep.observe.notebook import display as notebook_display
from lockstep.observe.notebook.curve import curve_svg, sparkline
from lockstep.observe.notebook.display import NotebookDisplay
from lockstep.observe.notebook.follower import Follower, following
from lockstep.observe.notebook.kernel import JUPYTER_PATH, VSCODE_PATH, notebook_name, shell

START = {"task": "line", "world": 2, "device": "cpu", "precision": "fp32", "parameters": 2, "steps": 40}


class Cell:
    """The output of a notebook's cell: what was shown, and what it was replaced by."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []
        self.handles = 0
        self.shell = types.SimpleNamespace(kernel=object(), user_ns={})

    def display(self, data: dict[str, str], raw: bool, display_id: bool) -> Cell:
        assert raw
        assert display_id
        self.handles += 1
        self.update(data, raw)
        return self

    def update(self, data: dict[str, str], raw: bool) -> None:
        assert raw
        self.shown.append(data)


@pytest.fixture
def cell(monkeypatch) -> Cell:
    cell = Cell()
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: cell.shell
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.display = cell.display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    monkeypatch.delenv(JUPYTER_PATH, raising=False)
    return cell


def show(display: Display, steps: int = 3) -> None:
    display.start(START)
    display.message("  batch          global <16>")
    for step in range(1, steps + 1):
        display.update({"step": step, "loss": 1.0 / step, "lr": 0.1, "step_s": 0.01})
    display.event({"event": "eval", "step": steps, "loss": 0.25})
    display.event({"event": "error", "message": "raised anyway"})
    display.close()
    assert display.failure is None


def test_the_display_redraws_one_output_in_place(cell, monkeypatch):
    monkeypatch.setattr(notebook_display, "REDRAW_S", 0.0)
    display = open_display("auto", 40, "sample", sys.stdout)
    assert isinstance(display, NotebookDisplay)
    show(display)
    assert cell.handles == 1
    assert len(cell.shown) == 7  # start, message, three steps, an evaluation, close
    text, html = cell.shown[-1]["text/plain"], cell.shown[-1]["text/html"]
    assert "step     3/40" in text
    assert "loss  █" in text
    assert "global <16>" in text
    assert "raised anyway" not in text
    assert "global &lt;16&gt;" in html
    assert 'value="3"' in html
    root = ET.fromstring(html)
    assert len(root.findall(".//{http://www.w3.org/2000/svg}polyline")) == 2


def test_many_records_make_few_pictures(cell):
    display = NotebookDisplay(1000, "sample", sys.stdout)
    show(display, steps=1000)
    assert len(cell.shown) < 10
    assert "step  1000/1000" in cell.shown[-1]["text/plain"]


def test_outside_a_notebook_nothing_changes(cell, monkeypatch):
    assert isinstance(open_display("auto", 1, "sample", io.StringIO()), PlainDisplay)  # a log
    assert isinstance(open_display("plain", 1, "sample", sys.stdout), PlainDisplay)
    assert type(open_display("off", 1, "sample", sys.stdout)) is Display
    cell.shell = types.SimpleNamespace()  # IPython in a terminal has no kernel
    assert shell() is None
    assert not isinstance(open_display("auto", 1, "sample", sys.stdout), NotebookDisplay)
    monkeypatch.delitem(sys.modules, "IPython")
    assert console.kernel.shell() is None


@pytest.mark.parametrize(
    ("path", "name"),
    [("a/b/My Birds (2).ipynb", "my-birds-2"), ("", None), ("6b0c-uuid", None), ("...ipynb", None)],
)
def test_the_name_of_the_notebook(cell, monkeypatch, path, name):
    monkeypatch.setenv(JUPYTER_PATH, path)
    assert notebook_name() == name
    cell.shell.user_ns[VSCODE_PATH] = "/home/me/other.ipynb"
    assert notebook_name() == "other"
    cell.shell = None
    assert notebook_name() is None


def test_records_of_other_processes_are_followed(cell, tmp_path, monkeypatch):
    monkeypatch.setattr(notebook_display, "REDRAW_S", 0.0)
    metrics, events = tmp_path / "metrics.jsonl", tmp_path / "events.jsonl"
    metrics.write_text('{"step": 1, "loss": 9.0, "time": 1}\n')  # before a resume
    follower = Follower(tmp_path)

    def append(path, record: dict[str, Any], end: str = "\n") -> None:
        with path.open("a") as file:
            file.write(json.dumps(record) + end)

    append(events, {**START, "event": "start", "time": 2, "facts": {"batch": "global 16"}})
    append(metrics, {"step": 2, "loss": 0.5, "time": 3})
    append(metrics, {"step": 4, "loss": 0.4, "time": 4}, end="")  # is being written
    follower.look()
    text = cell.shown[-1]["text/plain"]
    assert "global 16" in text
    assert "step     2/40" in text
    append(metrics, {}, end="\n")  # glued to the torn line, which is left out
    append(metrics, {"step": 6, "loss": 0.3, "time": 5})
    append(events, {**START, "event": "start", "time": 6})  # restarted
    follower.look()
    follower.close()
    assert "step     6/40" in cell.shown[-1]["text/plain"]
    assert cell.handles == 1


def test_the_last_records_are_shown_when_the_run_has_ended(cell, tmp_path):
    with following(tmp_path):
        (tmp_path / "events.jsonl").write_text(json.dumps({**START, "event": "start", "time": 2}) + "\n")
        (tmp_path / "metrics.jsonl").write_text('{"step": 40, "loss": 0.5, "time": 3}\n')
    assert "step    40/40" in cell.shown[-1]["text/plain"]


def test_a_sparkline_is_as_long_as_its_values_or_as_its_width():
    assert sparkline([]) == ""
    assert sparkline([1.0]) == "▁"
    assert sparkline([3.0, 2.0, math.nan, 1.0]) == "█▅ ▁"
    assert sparkline([float(n) for n in range(800)], width=8) == "▁▂▃▄▅▆▇█"


def test_a_curve_is_whole_xml_whatever_its_values():
    assert curve_svg({"loss": []}) == ""
    assert curve_svg({"loss": [(1.0, math.nan)]}) == ""
    for points in ([(1.0, 2.0)], [(1.0, 2.0), (2.0, 2.0)], [(float(n), 1e300 * (n % 2)) for n in range(5000)]):
        root = ET.fromstring(curve_svg({"<loss>": points, "eval": []}))
        assert root[1].text.startswith("<loss>")


def test_a_result_shows_a_curve_for_each_evaluation_set(tmp_path):
    evaluations = [
        {"event": "eval", "step": step, "set": name, "loss": loss, "metrics": {"accuracy": 0.5}}
        for step in (1, 2)
        for name, loss in (("val", 1.0 / step), ("clean", 2.0 / step))
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in evaluations))
    lines = repr(RunResult(tmp_path, {"step": 2}, task=None)).splitlines()
    assert lines[1:] == ["  val/loss   █▁  1.000 to 0.5000", "  clean/loss █▁  2.000 to 1.000"]


def test_a_result_shows_its_curve_and_survives_a_missing_folder(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "loss": {9 - n}}}\n' for n in range(1, 9)))
    (tmp_path / "events.jsonl").write_text('{"event": "eval", "step": 8, "loss": 2.5, "metrics": {}}\n')
    summary = {"step": 8, "loss": 1.0, "eval_loss": 2.5, "eval_metrics": {"accuracy": 0.75}, "world": 2, "seconds": 62}
    result = RunResult(tmp_path, summary, task=None)
    assert repr(result).splitlines() == [
        f"RunResult {tmp_path}: 8 steps, loss 1.000, eval_loss 2.500, accuracy 0.7500, 2 processes, 1:02",
        "  loss       █▇▆▅▄▃▂▁  8.000 to 1.000",
        "  eval_loss  ▁  2.500 to 2.500",
    ]
    assert len(ET.fromstring(result._repr_html_()).findall(".//{http://www.w3.org/2000/svg}polyline")) == 2
    (tmp_path / "metrics.jsonl").write_text("nonsense\n{}\n")
    assert len(repr(result).splitlines()) == 1
    gone = RunResult(tmp_path / "gone", {}, task=None)
    assert repr(gone) == f"RunResult {tmp_path / 'gone'}: - steps, 1 process, -"
    assert "<svg" not in gone._repr_html_()
