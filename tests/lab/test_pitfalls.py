"""Pitfalls, demos, calculators and the ten lines of "You're ready when"."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import preloaded
from lockstep import cli
from lockstep.errors import UserError
from lockstep.lab import calculators, course, readiness
from lockstep.lab.calculators import GB

ROOT = Path(__file__).parent.parent.parent


def run_script(path: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"LAB_FOLDER": str(folder), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return preloaded.run_python(path, env=env, cwd=ROOT)


# ---- Pitfalls and demos ---------------------------------------------------------------------------------------


def test_every_bad_form_is_caught_and_every_good_form_passes(tmp_path):
    done = run_script("lab/pitfalls/verdict.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = dict(re.findall(r"^  ok   (\S+) +(caught|passes)", done.stdout, re.M))
    names = ["1_set_epoch", "2_loss_scale", "3_synchronise", "4_learning_rate"]
    assert verdicts == {f"{name}_bad.py": "caught" for name in names} | {f"{name}_good.py": "passes" for name in names}
    assert "ratio - 1): 3 is not" in done.stdout  # 4 times too large
    assert "all-reduces by rank: [101, 100]" in done.stdout


def test_a_bad_form_that_is_not_caught_is_a_wrong_verdict(tmp_path):
    (tmp_path / "verdict.py").write_text((ROOT / "lab/pitfalls/verdict.py").read_text())
    good = (ROOT / "lab/pitfalls/1_set_epoch_good.py").read_text()
    (tmp_path / "1_set_epoch_bad.py").write_text(good)
    (tmp_path / "1_set_epoch_good.py").write_text("raise SystemExit(1)")
    done = run_script(str(tmp_path / "verdict.py"), tmp_path)
    assert done.returncode == 1
    assert "2 verdicts are wrong" in done.stdout


def test_learning_rates_of_a_large_batch(tmp_path):
    done = run_script("lab/demos/lr_scaling.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nearest to the small batch: linear, warm-up" in done.stdout
    assert (tmp_path / "lr_scaling.svg").exists()


def test_data_parallel_against_ddp(tmp_path):
    done = run_script("lab/demos/dp_vs_ddp.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DataParallel itself needs at least 2 GPUs, this machine has 0" in done.stdout
    assert "DDP all-reduces every gradient once, and nothing else: 534560" in done.stdout


# ---- Calculators ----------------------------------------------------------------------------------------------


def test_the_tables_of_the_course_and_their_corrections():
    replicated, sharded = calculators.memory(70e9, 4, "ddp", "course"), calculators.memory(70e9, 4, "fsdp", "course")
    assert (4 * replicated.total / GB, 4 * sharded.total / GB) == (2240, 560)
    assert (sharded.parameters / GB, sharded.gradients / GB, sharded.optimizer / GB) == (35, 35, 70)
    assert calculators.memory(70e9, 4, "fsdp").total / GB == 280
    assert calculators.fewest_gpus(70e9, 80 * GB) == 14

    rows = {row.what: row for row in [*calculators.memory_rows(), *calculators.cost_rows()]}
    wrong = {what for what, row in rows.items() if row.wrong}
    rounded = {"230+ days", "about 2 D", "not said"}
    right = [row for row in rows.values() if not row.wrong and row.course not in rounded]
    assert len(right) >= 12
    assert [row.computed for row in right] == [row.course for row in right]
    assert rows["90 % busy instead of 60 % costs less by"].computed == "33 %"
    assert rows["the week of $672K then costs"].computed == "$448K"
    assert rows["1000 GPUs, a week"].computed == "$336K-672K"
    assert rows["FSDP, total on 4 GPUs"].computed == "1,120 GB"
    assert rows["2 trillion tokens at 100,000 per second"].computed == "231 days"
    assert {"90 % busy instead of 60 % costs less by", "FSDP, AdamW per GPU", "A100 in fp32"} <= wrong
    assert "GPT-3, 175 billion parameters in fp32" not in wrong


def test_zero_as_published():
    """7.5 billion parameters on 64 GPUs, the example of the ZeRO paper."""
    found = [calculators.memory(7.5e9, 64, strategy).total / GB for strategy in calculators.STRATEGIES]
    assert [round(gigabytes, 1) for gigabytes in found] == [120.0, 31.4, 16.6, 1.9]


def test_the_commands(capsys):
    assert cli.main(["lab", "memory"]) == 0
    assert "WRONG in the original" in capsys.readouterr().out
    assert cli.main(["lab", "memory", "--parameters", "7.5e9", "--gpus", "64"]) == 0
    assert re.search(r"zero2 +15.0 +0.2 +1.4 +16.6", capsys.readouterr().out)
    assert cli.main(["lab", "cost", "--gpus", "8", "--hours", "24", "--price", "2", "--busy", "0.6"]) == 0
    said = capsys.readouterr().out
    assert "$384" in said
    assert "$154 of it pay for waiting" in said
    assert cli.main(["lab", "cost"]) == 0
    assert "$448K" in capsys.readouterr().out
    assert cli.main(["lab", "cost", "--gpus", "8", "--busy", "60"]) == 2


# ---- Readiness ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LAB_FOLDER", str(tmp_path))
    return tmp_path


QUIZZES = [number for number, line in enumerate(readiness.LINES, start=1) if line.quiz]


def test_the_lines_are_those_of_the_course():
    assert len(readiness.LINES) == 10
    assert QUIZZES == [1, 3, 5, 8]
    assert [line.exercise for line in readiness.LINES if line.exercise] == ["1", "2", "3", "4", "6"]


def test_nobody_is_ready_at_the_start(folder, capsys):
    assert cli.main(["lab", "ready"]) == 1
    said = capsys.readouterr().out
    assert said.count("open ") == 10
    assert "0 of 10" in said
    assert "lockstep lab check 3 lab/exercises/03_fsdp.py" in said


def test_ten_of_ten(folder, capsys):
    for number in ("1", "2", "3", "4", "6"):
        course.remember_passed(number)
    (folder / "busy.json").write_text('{"device": "cuda", "busy": 0.93}')
    answers = readiness.Answers.load()
    right = {number: answers.question(number)[1] for number in QUIZZES}
    assert cli.main(["lab", "ready", *(f"{number}={value!r}" for number, value in right.items())]) == 0
    said = capsys.readouterr().out
    assert "10 of 10" in said
    assert "93 % of the time on this cuda" in said


def test_a_wrong_answer_is_explained_and_the_numbers_change(folder):
    before = readiness.Answers.load().question(5)
    said = readiness.answer(5, before[1] * 1.1)
    assert "reduce-scatter, then all-gather" in said
    assert not readiness.states()[4].ready
    assert readiness.Answers.load().question(5) != before
    assert readiness.answer(5, readiness.Answers.load().question(5)[1]) == "line 5: right"
    assert readiness.states()[4].ready


def test_a_gpu_that_waits_is_not_ready(folder):
    (folder / "busy.json").write_text('{"device": "cuda", "busy": 0.6}')
    assert not readiness.states()[9].ready


@pytest.mark.parametrize("number", [0, 11, 2])
def test_a_line_without_a_question_takes_no_answer(folder, number):
    with pytest.raises(UserError):
        readiness.answer(number, 1.0)


def test_answers_follow_the_formulas(folder):
    """The numbers are in the question: recompute the answer from its text."""
    answers = readiness.Answers(7, [])
    text, right = answers.question(5)
    megabytes, ranks = map(int, re.findall(r"\d+", text))
    assert right == pytest.approx(2 * (ranks - 1) / ranks * megabytes)
    text, right = answers.question(1)
    gradients = list(map(int, re.findall(r"gradients (.+?) for", text)[0].split(", ")))
    assert right == pytest.approx(1 - 0.1 * sum(gradients) / len(gradients))
    text, right = answers.question(3)
    gpus, megabytes, *_ = map(int, re.findall(r"\d+", text))
    assert right == 2 * (gpus - 1) * megabytes
    text, right = answers.question(8)
    batch = int(re.findall(r"batch is (\d+)", text)[0])
    warm, step = int(re.findall(r"first (\d+) steps", text)[0]), int(re.findall(r"in step (\d+)", text)[0])
    assert right == pytest.approx(0.001 * batch / 32 * step / warm)
