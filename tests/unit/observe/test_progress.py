"""The terminal: right lines, and never in the way of training."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from start_record import START

from lockstep.errors import UserError
from lockstep.observe.console import RECENT_STEPS, Display, event_line, fact_lines, open_display
from lockstep.task import Task

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


def test_the_time_left_is_the_median_of_recent_steps_without_the_first_record():
    display = Display(400, "token", io.StringIO())
    assert display.seconds_left is None
    display.track({"step": 10, "step_s": 9.0})
    assert display.seconds_left is None, "one slow record says nothing"
    display.track({"step": 20, "step_s": 0.5})
    assert display.seconds_left == pytest.approx(380 * 0.5)
    display.track({"step": 30, "step_s": 60.0})  # a recompilation
    display.track({"step": 40, "step_s": 0.25})
    assert display.seconds_left == pytest.approx(360 * 0.5)
    for step in range(50, 50 + 10 * RECENT_STEPS, 10):  # older records no longer count
        display.track({"step": step, "step_s": 0.1})
    assert display.seconds_left == pytest.approx((400 - step) * 0.1)
    display.track({"step": 500, "step_s": 0.1})
    assert display.seconds_left == 0


def plain_lines(*calls: tuple[str, Any], unit: str = "token") -> list[str]:
    stream = io.StringIO()
    display = open_display("plain", 400, unit, stream)
    for method, argument in calls:
        getattr(display, method)(argument)
    display.close()
    assert display.failure is None
    return stream.getvalue().splitlines()


def test_plain_lines():
    later = {**RECORD, "step": 130, "skipped": 2, "weight_per_s": 1.05e6, "memory_mb": 81_408.0}
    assert plain_lines(
        ("start", START),
        ("event", START),
        ("update", RECORD),
        ("update", later),
        ("event", {"time": 1.0, "event": "eval", "step": 130, "loss": 2.5, "metrics": {"acc": 0.31}, "samples": 101}),
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


def test_samples_are_counted_where_a_task_names_no_unit():
    """What its weights are is not known: it may be anything."""
    (line,) = plain_lines(("update", RECORD), unit=Task.unit)
    assert "  900 sample/s  " in line


def test_long_lines_are_broken_between_their_parts():
    saved = {"event": "checkpoint", "step": 40, "path": "runs/" + "a" * 50, "mb": 0.379, "stall_s": 0.5}
    ended = {"event": "end", "step": 40, "seconds": 1.0, "loss": 2.5, "eval_metrics": {"a" * 30: 0.5, "b" * 30: 0.5}}
    warned = {"event": "warning", "reason": "word " * 30}
    assert plain_lines(("event", saved), ("event", ended), ("event", warned)) == [
        f"checkpoint  step 40  path runs/{'a' * 50}  mb 0.3790",
        "         stall_s 0.5000",
        f"end      step 40  1.0 s  loss 2.500  {'a' * 30} 0.5000",
        f"         {'b' * 30} 0.5000",
        f"warning  {'word ' * 30}".rstrip(),  # a sentence stays in one piece, to be searched for
    ]
    batch = "global 8 (as asked) = 2 micro-batches of 4 (global_batch 8 / 2 ranks), at most 1 per rank"
    assert fact_lines("batch", batch).splitlines() == [
        "  batch          global 8 (as asked) = 2 micro-batches of 4 (global_batch 8 / 2 ranks), at most 1",
        "                 per rank",
    ]


def test_plain_lines_are_aligned():
    values = [0.0123, 2.5, 12.3456, 1234.5, math.nan]
    records = [{**RECORD, "loss": x, "grad_norm": x, "weight_per_s": 30.5**n} for n, x in enumerate(values)]
    lines = plain_lines(*(("update", record) for record in records))
    for column in ("loss", "lr", "norm", "token/s", "mem"):
        assert len({line.index(column) for line in lines}) == 1, lines
    assert "loss    nan" in lines[-1]


def test_missing_keys_are_dashes():
    (line,) = plain_lines(("update", {}))
    assert " ".join(line.split()) == "step -/400 loss - lr - norm - - mem - eta -"


def test_the_end_is_one_line_with_the_folder_and_without_the_options():
    end = {"event": "end", "task": {"width": 64}, "world": 2, "step": 20, "applied": 19, "skipped": 1, "seconds": 1.84}
    end |= {"loss": 1.3448, "eval_loss": None, "eval_metrics": {"acc": 0.39}}
    expected = "end      step 20  applied 19  skipped 1  1.8 s  loss 1.345  acc 0.3900"
    assert plain_lines(("event", end)) == [expected]
    assert plain_lines(("event", {**end, "run_dir": "runs/a"})) == [f"{expected}  run_dir runs/a"]
    assert plain_lines(("start", {**START, "run_dir": "runs/b"}), ("event", end))[1] == f"{expected}  run_dir runs/b"


def test_the_last_line_has_the_best_checkpoint():
    best = {"metric": "eval_loss", "value": 0.20341, "step": 30, "checkpoint": "runs/a/checkpoints/step-00000030"}
    assert "best eval_loss 0.2034 at step 30" in event_line({"event": "end", "step": 50, "best": best})
    assert "best" not in event_line({"event": "end", "step": 50})


def test_a_list_is_shown_as_words():
    skipped = {"event": "skip", "step": 3, "blame": ["rank 0: loss nan", "rank 1: loss nan"], "cause": ""}
    assert event_line(skipped) == "skip     step 3  blame rank 0: loss nan; rank 1: loss nan"


def test_text_cannot_steer_the_terminal():
    lines = plain_lines(("message", "a\x1b[2Jb\r\nc"), ("event", {"event": "sample", "text": "one\n\x07two"}))
    assert lines == [r"a\x1b[2Jb", "c", "sample:", "one", r"\x07two"]
    assert "\n" not in event_line({"event": "odd\n", "k\ney": "v\nw", "more": {"x": [1, 2]}})


# ---- progress: never in the way ----


@pytest.mark.parametrize("strange", [None, 3, "text", [], {"metrics": 3}, {"step": "x", "loss": []}, {"event": {}}])
@pytest.mark.parametrize("mode", ["plain", "off"])
def test_strange_records_do_not_raise(mode, strange):
    display = open_display(mode, 10, "sample", io.StringIO())
    for method in (display.start, display.update, display.event, display.message):
        method(strange)
    display.update(RECORD)
    display.close()


def test_a_closed_stream_does_not_raise():
    closed, missing = io.StringIO(), None  # Python's stdout is None where the shell closed it
    closed.close()
    for stream in (closed, missing):
        display = open_display("auto", 10, "sample", stream)  # type: ignore[arg-type]
        display.message("into the void")
        display.update(RECORD)
        display.close()
        assert display.failure is not None


def test_a_reader_that_leaves_does_not_change_the_exit_status():
    """`lockstep train ... | head -1` must not look like a failed rank."""
    program = (
        "import sys\n"
        "from lockstep.observe.console import open_display\n"
        "display = open_display('auto', 10, 'sample', sys.stdout)\n"
        "for step in range(3000): display.update({'step': step})\n"
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
    display = open_display("plain", 10, "sample", io.TextIOWrapper(raw, encoding="ascii"))
    display.message("naïve")
    assert raw.getvalue() == b"na?ve\n"


def test_off_shows_nothing_and_unknown_modes_are_refused():
    stream = io.StringIO()
    display = open_display("off", 10, "sample", stream)
    display.start(START)
    display.update(RECORD)
    display.message("x")
    assert stream.getvalue() == ""
    with pytest.raises(UserError, match=r"log\.progress=loud"):
        open_display("loud", 10, "sample", stream)  # type: ignore[arg-type]


def test_live_without_a_terminal_says_so_and_is_plain():
    stream = io.StringIO()
    open_display("live", 10, "sample", stream).update({"step": 3})
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
        calls(open_display("auto", 400, "token", stream))
    reader.join(timeout=60)
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
    assert re.search(r"━+.*120/400  30%  \d:\d\d elapsed", frame[1])
    assert frame[2].rstrip() == "loss 2.000   eval 2.750 at 120"
    assert frame[3].rstrip() == "lr 1.0e-03   norm 0.831   skipped 1"
    assert frame[4].rstrip() == "57.6k token/s   900 sample/s   mem 512 MB"
    # rich stops its thread without waiting for it.
    limit = time.monotonic() + 60
    while threading.active_count() > before[0] and time.monotonic() < limit:
        time.sleep(0.01)
    assert (threading.active_count(), sys.stdout) == before


def test_prints_scroll_above_the_live_display_but_forked_workers_print_directly(tmp_path):
    program = (
        "import os, sys\n"
        "from lockstep.observe.console import open_display\n"
        "display = open_display('live', 10, 'sample', sys.stdout)\n"
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
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "PYTHONUTF8": "1"}
    subprocess.run([sys.executable, "-c", program], stdout=slave, stderr=slave, env=environment, check=True, timeout=60)
    output = os.read(master, 65536).decode()
    os.close(slave)
    os.close(master)
    assert (tmp_path / "parent").read_text() == "FileProxy TextIOWrapper"
    assert (tmp_path / "child").read_text() == "TextIOWrapper"
    assert output.index("a print of the task") < output.rindex("waiting for the first step")
