"""The report: it says what the folder says, and survives what the folder lacks."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from start_record import START

from lockstep.errors import UserError
from lockstep.observe.report import mean_rate, without_undone, write_report
from lockstep.observe.sinks import JsonlSink

FILES = ["metrics.jsonl", "events.jsonl", "config.yaml", "config.sources.json", "plan.json", "summary.json"]


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


def having(root: ET.Element, style: str) -> list[ET.Element]:
    return [element for element in root.iter() if style in element.attrib.get("class", "").split()]


def metrics_record(step: int) -> dict:
    """Ten steps; the first record is a hundred times slower, and step 200 has no loss."""
    slow = 100 if step == 10 else 1
    return {
        "time": 1763179400.0 + step,
        "step": step,
        "loss": math.nan if step == 200 else 1 + 3 * math.exp(-step / 80),
        "lr": 0.001,
        "grad_norm": 0.8,
        "samples": 640,
        "weight": 40_960,
        "samples_per_s": 640.0 / slow,
        "weight_per_s": 40_960.0 / slow,
        "memory_mb": 512.0,
        "skipped": int(step >= 200),
        "scale": 32768.0,
        "metrics": {"acc": step / 400},
    }


def run_folder(folder: Path, *, end: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    with JsonlSink(folder / "metrics.jsonl") as metrics, JsonlSink(folder / "events.jsonl") as events:
        events.write(START)
        for step in range(10, 401, 10):
            metrics.write(metrics_record(step))
        for step, loss in ((100, 2.0), (200, 1.5), (300, 1.25), (400, 1.375)):
            events.write({"time": 1763179400.0 + step, "event": "eval", "step": step, "loss": loss})
        events.write({"time": 1763179600.0, "event": "skip", "step": 200, "reason": "the norm is nan"})
        events.write({"time": 1763179601.0, "event": "sample", "text": "<script>alert('&')</script>\x00\ud800"})
        if end:
            done = {"step": 400, "applied": 399, "skipped": 1, "seconds": 75.0, "loss": 1.02, "eval_loss": 1.375}
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
    assert not list((tmp_path / "run").glob(".report*"))
    page = tree(path)
    assert having(page, "badge")[0].text == "finished"
    assert cards(page) == {
        "Final loss": ("1.020", ""),
        "Best eval loss": ("1.250", "step 300"),
        "Last eval loss": ("1.375", "step 400"),
        "Steps": ("400 / 400", "399 applied · 1 skipped"),
        "Samples": ("25.6k", "1.64M token"),
        "Wall time": ("1:15", ""),
        "Mean rate": ("41k token/s", "640 sample/s"),  # without the slow first record
        "Peak memory": ("512 MB", ""),
        "World": ("2 ranks", ""),
        "Device": ("cpu", ""),
        "Precision": ("fp32", ""),
        "Parameters": ("10.8M", ""),
    }
    charts = {chart.attrib["aria-label"]: chart for chart in having(page, "chart")}
    assert list(charts) == [
        "Loss",
        "Throughput",
        "Learning rate",
        "Gradient norm",
        "Memory",
        "Loss scale (fp16)",
        "acc",
    ]
    assert len(having(charts["Loss"], "dot")) == 4, "one per evaluation"
    assert [mark.findtext("{*}title") for mark in having(charts["Loss"], "mark")] == [
        "step 200: train nan",
        "step 200: skipped step",
    ]
    assert len(having(page, "warn")) == 1, "the skip is highlighted"


def test_report_is_self_contained_and_escaped(tmp_path):
    path = write_report(run_folder(tmp_path / "<b>run"))
    found = outline(path)
    assert not {"script", "link", "img", "iframe", "b", "i"} & set(found.tags)
    assert not re.search(r"(src|href)=|url\(|@import", path.read_text(encoding="utf-8"))
    words = "".join(found.words)
    assert "<script>alert('&')</script>\\x00\\ud800" in words
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
    for file in FILES:
        assert f"{file} is not there" in words
    assert having(tree(path), "badge")[0].text == "no end recorded"
    assert set(cards(tree(path)).values()) == {("-", "")}


@pytest.mark.parametrize("file", FILES)
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


@pytest.mark.parametrize("depth", [100, 900, 100_000])
@pytest.mark.parametrize("file", ["metrics.jsonl", "events.jsonl", "plan.json", "summary.json", "config.yaml"])
def test_nesting_does_not_stop_the_report(tmp_path, file, depth):
    """Not even nesting that can be parsed, but not walked through."""
    if file == "config.yaml" and depth > 1000:
        depth = 5000  # PyYAML is slow
    run_folder(tmp_path)
    (tmp_path / file).write_text('{"step": 1, "event": "start", "facts": ' * depth + "1" + "}" * depth + "\n")
    text = write_report(tmp_path).read_text()
    assert f"{file} could not be read" in text or f"{file}: line 1 is not a JSON object" in text


def test_a_configuration_that_unfolds_without_end_is_not_unfolded(tmp_path):
    run_folder(tmp_path)
    lines = [f"a{i}: &amp{i} {{x: *amp{i - 1}, y: *amp{i - 1}}}" for i in range(1, 60)]
    (tmp_path / "config.yaml").write_text("\n".join(["a0: &amp0 {x: 1}", *lines]))
    assert "config.yaml could not be read: an alias" in write_report(tmp_path).read_text()


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
        events.write({"time": 1763179900.0, "event": "error", "type": "OSError", "message": "out of memory"})
    page = tree(write_report(folder))
    assert having(page, "badge")[0].text == "failed"
    assert having(page, "reason")[0].text == "out of memory"
    with JsonlSink(folder / "events.jsonl") as events:  # resumed, and it went well
        events.write({**START, "time": 1763180000.0})
        events.write({"time": 1763180100.0, "event": "end", "step": 400})
    assert having(tree(write_report(folder)), "badge")[0].text == "finished"


def test_steps_repeated_after_a_resume_are_drawn_once():
    records = [{"step": step, "loss": loss} for step, loss in ((10, 5.0), (20, 4.0), (30, 9.0), (20, 3.0), (25, 2.0))]
    kept = [(record["step"], record["loss"]) for record in without_undone(records)]
    assert kept == [(10, 5.0), (20, 3.0), (25, 2.0)]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"there is no folder .*nothing to report on"):
        write_report(tmp_path / "nothing")


def test_the_rate_is_work_over_time_without_the_first_record():
    warm_up = {"weight": 100, "weight_per_s": 1.0}
    records = [{"weight": 300, "weight_per_s": 100.0}, {"weight": 200, "weight_per_s": 200.0}, {"weight": 9}]
    assert mean_rate([warm_up, *records], "weight") == pytest.approx(125.0)
    assert mean_rate([warm_up], "weight") == 1.0
    assert mean_rate([], "weight") is None


def test_nothing_heavy_is_imported():
    program = (
        "import sys, lockstep.observe.sinks, lockstep.observe.console, lockstep.observe.report\n"
        "print([name for name in ('torch', 'rich', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
