"""The frame of the course: its contents, guesses without a terminal, the page, what a learner has passed."""

from __future__ import annotations

import ast
import gc
import json
import re
import weakref
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep.cli import main
from lockstep.errors import UserError
from lockstep.lab import course, predictions, ranks
from lockstep.lab.predictions import Question
from lockstep.lab.workload.data import HUES, ShapeClass

ROOT = Path(__file__).parent.parent.parent
BYTES = Question("megabytes", "How much is sent?", "MB", "4 bytes x parameters")


@pytest.fixture(autouse=True)
def lab(tmp_path, monkeypatch):
    """A folder for the guesses, and the repository as the folder in which commands are typed."""
    monkeypatch.setenv("LAB_FOLDER", str(tmp_path))
    monkeypatch.chdir(ROOT)
    return tmp_path


def test_every_script_of_the_course_is_in_its_contents():
    there = {
        str(path.relative_to(ROOT))
        for folder in ("exercises", "bonus", "beyond")
        for path in (ROOT / "lab" / folder).glob("*.py")
    }
    assert len(there) >= 3
    assert there == {name for exercise in course.GRADERS.values() for name in (exercise.file, exercise.script)} - {
        exercise.script for exercise in course.GRADERS.values() if exercise.script.startswith("lab/solution/")
    }
    assert [exercise.script for exercise in course.GRADERS.values() if not (ROOT / exercise.script).exists()] == []


def test_contents_say_what_is_next(capsys):
    assert main(["lab"]) == 0
    shown = capsys.readouterr().out
    assert "0 of 9 graded exercises passed" in shown
    assert "lockstep lab check 1 lab/exercises/01_ddp_basic.py" in shown

    course.remember_passed("1")
    assert main(["lab"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^ +1  DDP by hand .* passed$", shown, re.M)
    assert "lockstep lab check 2 lab/exercises/02_gradient_accumulation.py" in shown


def test_a_check_that_passes_is_remembered_and_one_that_fails_is_not(capsys):
    assert main(["lab", "check", "2", "lab/exercises/02_gradient_accumulation.py"]) == 1
    assert "scale each loss" in capsys.readouterr().out
    assert course.passed() == set()

    assert main(["lab", "check", "02", "lab/solution/02_gradient_accumulation.py"]) == 0
    shown = capsys.readouterr().out
    assert "\npassed\n" in shown
    assert "Next: edit lab/exercises/01_ddp_basic.py" in shown
    assert course.passed() == {"2"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "77", "x.py"], "there is no exercise 77"),
        (["check", "1", "nothing.py"], "there is no file"),
        (["check", "b1", "x.py"], "exercise b1 has no grader: its script checks itself"),
        (["predict", "1", "megabyte=3"], "exercise 1 has no question megabyte"),
        (["predict", "1", "megabytes=much"], "the guess megabytes=much is not a number"),
    ],
    ids=["number", "file", "no grader", "question", "not a number"],
)
def test_what_is_refused(words, said, capsys):
    assert main(["lab", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_guess_is_kept_and_cannot_be_changed_after_the_answer(lab, capsys):
    assert main(["lab", "predict", "1", "megabytes=3"]) == 0
    shown = capsys.readouterr().out
    assert "your guess: 3" in shown
    assert "no guess yet" in shown
    assert "To guess: lockstep lab predict 1 speedup=NUMBER\n" in shown
    assert json.loads((lab / "predictions.json").read_text())[0]["guess"] == 3

    predictions.reveal("1", BYTES, computed=0.7, measured=0.7005)
    assert "guess 3, formula 4 bytes x parameters = 0.7, measured 0.7005 MB" in capsys.readouterr().out
    assert main(["lab", "predict", "1", "megabytes=0.7"]) == 2
    assert "has been shown already" in capsys.readouterr().err


def test_the_page_lays_guess_formula_and_measurement_over_each_other(lab):
    predictions.commit("1", BYTES, 3)
    predictions.reveal("1", BYTES, computed=0.7, measured=0.7005)
    hidden = Question("traffic", "And how often?", "x", "a formula that gives it away")
    predictions.commit("3", hidden, 2)
    (lab / "01_ddp_basic.svg").write_text("<svg/>")
    assert main(["lab", "page"]) == 0

    page = (lab / "lab.html").read_text()
    row = page[page.index("How much is sent?") :].partition("</tr>")[0]
    assert [mark in row for mark in ('class="guess"', 'class="formula"', 'class="measured"')] == [True] * 3
    assert "0.7005" in row
    assert "data:image/svg+xml;base64," in page  # the picture is inside
    assert "And how often?" in page
    assert "gives it away" not in page  # not before it was measured
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert sources
    assert all(source.startswith("data:") for source in sources)  # one file, which needs no other
    assert "python lab/solution/02_gradient_accumulation.py" in page  # not run yet


def test_make_lab_names_files_that_are_there():
    rule = re.search(r"^lab: .*?(?=^\S)", (ROOT / "Makefile").read_text() + "\n.", re.M | re.S)
    assert rule
    files = re.findall(r"(?:lab|docs)/[\w/]+\.(?:py|md)", rule[0])
    assert len(files) >= 3
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_no_script_destroys_the_group_of_a_model_that_it_holds():
    """Freeing a DDP after its group waits for a thread of gloo, which may wait for Python: the rank then hangs."""
    functions = [
        node
        for path in (ROOT / "lab").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    called = [
        {ast.unparse(call.func).rpartition(".")[2] for call in ast.walk(function) if isinstance(call, ast.Call)}
        for function in functions
    ]
    assert any("destroy_process_group" in names for names in called)
    assert not [
        names for names in called if "destroy_process_group" in names and names & {"DDP", "DistributedDataParallel"}
    ]


@pytest.mark.parametrize("left", [False, True])
def test_garbage_is_collected_only_while_the_group_exists(left):
    """It may hold a DDP: `main` may leave the group, but then its garbage must stay."""
    collected = []

    def main():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        garbage = Garbage()
        garbage.itself = garbage
        weakref.finalize(garbage, lambda: collected.append(dist.is_initialized()))
        if left:
            dist.destroy_process_group()

    gc.disable()
    try:
        ranks._run_and_leave(main)
        assert not dist.is_initialized()
        assert collected == ([] if left else [True])
    finally:
        gc.enable()


class Garbage:
    itself: Garbage


def test_the_number_of_ranks_is_asked_for(monkeypatch):
    assert ranks._asked("3") == 3
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert ranks._asked("gpu") == 8
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for wrong in ("gpu", "0", "-1", "many"):
        with pytest.raises(UserError, match=f"LAB_NPROC={wrong} is no number of ranks"):
            ranks._asked(wrong)


def test_a_hundred_classes_of_shapes():
    shapes = ShapeClass(2000, classes=100, pixels=8)
    labels = [shapes[index][1] for index in range(len(shapes))]
    assert set(labels) == set(range(100))
    assert len({shapes._kind(label) for label in range(100)}) == 100

    # What is drawn has the hue of its class: the brightest pixels of a class have one largest colour.
    red = [shapes[index][0] for index, label in enumerate(labels) if label % HUES == 0]
    assert all(picture.amax((1, 2)).argmax() == 0 for picture in red)
    with pytest.raises(UserError, match="there are no 10 classes"):
        ShapeClass(classes=10)
