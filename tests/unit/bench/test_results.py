"""Results of benchmarks: intervals, verdicts, files, the page, and the comparison of two of them."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.bench import benchmark_weak_scaling, plots, results
from lockstep.bench.compare import compare
from lockstep.bench.cores import RankPlacement
from lockstep.bench.intervals import estimate, ratio, spread_text
from lockstep.bench.kinds import comm, settings, start, step
from lockstep.bench.kinds.memory import judge, judge_ranks, worst_rank
from lockstep.bench.kinds.scaling import limits_of, numbers_within
from lockstep.bench.options import BenchOptions
from lockstep.bench.page import write_pictures_and_page
from lockstep.bench.pool import RanksEnded, rounds_of
from lockstep.bench.results import Column, Result, Section, Verdict, judged
from lockstep.cli import main
from lockstep.errors import UserError


def result(throughput: list[float], hardware: str = "a <machine>") -> Result:
    rows = [
        {
            "world": world,
            "throughput": estimate([world * rate for rate in throughput]),
            "scaling_efficiency": estimate([1.0, 0.99]),
            "compute_fraction": 0.9,
            "breakdown_ms": {"forward": 3.0, "backward": 5.0, "exposed communication": 1.0},
        }
        for world in (1, 2)
    ]
    columns = [Column("world", "ranks"), Column("throughput", "throughput", "samples/s")]
    verdict = Verdict("efficiency >= 90 %", 0.95, 0.9, refusal="2 ranks share 1 core")
    section = Section("weak", "Weak <scaling>", columns, rows, ["a note"], [verdict])
    about = {"text": hardware, "cpus": 2, "hardware_threads": 2, "gpus": [], "memory_gb": 8.0, "system": "", "load": 0}
    return Result("lockstep bench weak", about, {"torch": "2.13"}, [section])


def test_an_interval_holds_its_median_and_narrows_with_more_values() -> None:
    few, many = estimate([1.0, 2.0, 3.0, 4.0, 5.0]), estimate([1.0, 2.0, 3.0, 4.0, 5.0] * 20)
    for found in (few, many):
        assert found["low"] <= found["median"] == 3.0 <= found["high"]
    assert many["high"] - many["low"] < few["high"] - few["low"]
    # Fewer than six values have no interval at this level: they have their range. Nine leave out one at either end.
    assert (few["low"], few["high"]) == (1.0, 5.0)
    assert estimate(range(6))["low"] == 0
    assert (estimate(range(9))["low"], estimate(range(9))["high"]) == (1, 7)
    assert spread_text(5) == "medians with the range of 5 rounds"
    assert "95 %" in spread_text(6)
    assert estimate([7.0]) == {"median": 7.0, "low": 7.0, "high": 7.0, "count": 1}
    # Rounds are compared one by one: a slow round counts for both.
    assert ratio([2.0, 20.0, 4.0], [1.0, 10.0, 2.0])["median"] == 2.0


def test_a_target_is_judged_only_if_nothing_speaks_against_it() -> None:
    assert Verdict("", 0.95, 0.9).passed is True
    assert Verdict("", 0.85, 0.9).passed is False
    assert Verdict("", 1.2, 1.15, higher_is_better=False).passed is False
    assert Verdict("", 0.1, 0.9, refusal="2 ranks share 1 GPU").passed is None
    undecided = judged("", estimate([0.85, 0.89, 0.91]), 0.9, True, "")
    assert undecided.passed is None
    assert str(undecided).startswith("undecided")
    assert judged("", estimate([0.91, 0.93, 0.95]), 0.9, True, "").passed is True
    assert "not judged" in str(Verdict("", 0.1, 0.9, refusal="2 ranks share 1 GPU"))


def test_results_are_written_and_read_back(tmp_path: Path) -> None:
    written = result([10.0, 11.0, 12.0])
    results.write(written, tmp_path)
    assert results.read(tmp_path) == results.read(tmp_path / "results.json") == written
    rows = list(csv.DictReader((tmp_path / "weak.csv").open()))
    assert [row["throughput"] for row in rows] == ["11.0", "22.0"]
    assert float(rows[0]["throughput_low"]) <= 11.0 <= float(rows[0]["throughput_high"])

    # A second measurement in the same folder keeps what it does not measure again, on the same machine only.
    assert results.begin(tmp_path, "again", written.hardware).sections == written.sections
    with pytest.raises(UserError, match="holds results of other hardware"):
        results.begin(tmp_path, "again", {**written.hardware, "text": "another"})
    # Each section says when and how it was measured.
    written.put(written.sections[0])
    assert written.sections[0].stamp["command"] == "lockstep bench weak"
    with pytest.raises(UserError, match="is not the result of a benchmark"):
        results.read(tmp_path / "nothing")


def test_the_page_is_complete_by_itself_and_escapes_what_it_shows(tmp_path: Path) -> None:
    page = write_pictures_and_page(result([10.0, 11.0, 12.0]), tmp_path).read_text()
    assert "Weak &lt;scaling&gt;" in page
    assert "<scaling>" not in page
    assert "not judged: efficiency" in page
    # Nothing is loaded from elsewhere.
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert ("data:image/png;base64," in page) == plots.available()


def test_without_matplotlib_there_is_a_page_without_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)
    results.write(result([10.0, 11.0]), tmp_path)
    assert main(["bench", "report", str(tmp_path)]) == 0
    assert f"then lockstep bench report {tmp_path}" in capsys.readouterr().err
    assert "lockstep bench report" in (tmp_path / "report.html").read_text()
    assert not list(tmp_path.glob("*.png"))


def test_a_comparison_tells_changes_from_noise(tmp_path: Path) -> None:
    rates = {"a": [10.0, 10.1, 10.2], "b": [20.0, 20.1, 20.2], "c": [10.0, 10.15, 10.3]}
    for name, values in rates.items():
        results.write(result(values * 2), tmp_path / name)
        results.write(result(values), tmp_path / f"few-{name}")
    changed, same = compare(tmp_path / "a", tmp_path / "b"), compare(tmp_path / "a", tmp_path / "c")
    assert re.search(r"world 1 +throughput \[samples/s\] .*\+99\.0% +better", changed)
    assert re.search(r"world 1 +throughput .* worse", compare(tmp_path / "b", tmp_path / "a"))
    assert re.search(r"world 1 +throughput \[samples/s\] .* within the noise", same)
    assert re.search(r"throughput .* fewer than 6 rounds", compare(tmp_path / "few-a", tmp_path / "few-b"))
    other = replace(result([10.0]), sections=[])
    results.write(other, tmp_path / "other")
    with pytest.raises(UserError, match=r"nothing in common(.|\n)*A has weak, B has nothing"):
        compare(tmp_path / "a", tmp_path / "other")
    results.write(result([10.0], "another machine"), tmp_path / "d")
    assert "hardware differs" in compare(tmp_path / "a", tmp_path / "d")


def test_a_result_does_not_differ_from_itself_and_is_not_compared_with_another_target(tmp_path: Path) -> None:
    one = result([10.0, 11.0, 12.0])
    columns = [Column("step", "step"), Column("tensor_mb", "live tensors", "MB")]
    one.put(Section("leak", "Leak check", columns, leak_rows(0.1, 1)[1:]))
    results.write(one, tmp_path / "one")
    lines = [line for line in compare(tmp_path / "one", tmp_path / "one").splitlines() if "%" in line]
    assert len(lines) == 2 + 39
    assert all("+0.0%" in line and line.endswith("the same") for line in lines)

    one.sections[0].settings = {"target": "mlp", "batch": 8}
    results.write(one, tmp_path / "two")
    with pytest.raises(UserError, match="measured different things in weak"):
        compare(tmp_path / "one", tmp_path / "two")


def leak_rows(per_step: float, tensors: int) -> list[dict[str, Any]]:
    return [
        {"step": n, "tensors": 50 + tensors * n, "tensor_mb": per_step * n, "resident_mb": 300.0, "device_mb": 0.0}
        for n in range(40)
    ]


def test_growth_is_a_leak_and_a_high_level_is_not() -> None:
    assert all(verdict.passed for verdict in judge(leak_rows(0.0, 0)))
    assert [verdict.passed for verdict in judge(leak_rows(0.1, 1))] == [False, False, True, True]


def test_a_leak_of_one_rank_is_found() -> None:
    ranks = [leak_rows(0.0, 0), leak_rows(0.1, 1), leak_rows(0.0, 0)]
    assert worst_rank(ranks) == 1
    assert [verdict.passed for verdict in judge_ranks(ranks)] == [False, False, True, True]


def test_what_asks_ranks_to_measure_does_not_import_torch() -> None:
    code = (
        "import argparse, sys\n"
        "from lockstep.bench import command\n"
        "command.add_options(parser := argparse.ArgumentParser())\n"
        "from lockstep.bench import kinds, page\n"
        "from lockstep.bench.kinds import checkpoint, comm, data, memory, scaling, settings, step\n"
        "print(parser.format_help(), 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.endswith(" False\n")
    assert all(kind in said for kind in ("weak", "strong", "comm", "memory", "step", "data", "checkpoint", "compare"))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["weak", "nosuch"], "the target nosuch is not a recipe"),
        (["weak", "--worlds", "1,x"], "is not a list of numbers"),
        (["comm", "--backend", "mpi"], "there is no backend mpi"),
        (["weak", "stepz=1"], "there is no key stepz"),
        (["weak", "--block", "0"], "--block must be above 0"),
        (["step", "char_lm"], "compares loops that are written for its own models"),
        (["step", "precision=bf16"], "takes no precision"),
        (["weak", "--backend", "nccl"], "bench weak has no option --backend"),
        (["data", "--worlds", "1,2"], "bench data has no option --worlds"),
        (["checkpoint", "mlp"], "takes no target"),
        (["settings", "mlp"], "nothing to compare the target with"),
        (["settings", "--way", "device=cuda"], "--way cannot change device"),
        (["settings", "--way", "stepz=1"], "there is no key stepz"),
        (["settings", "--way", "lr.peak='1"], "cannot be read: No closing quotation"),
        (["weak", "--way", "exact=true"], "bench weak has no option --way"),
        (["weak", "--cores-per-rank", "100000"], "--cores-per-rank 100000 is not possible"),
        (["weak", "--seconds", "0"], "--seconds must be above 0"),
        (["weak", "--seconds", "5", "--repeats", "7"], "--seconds and --repeats both say how many rounds"),
        (["memory", "--seconds", "5"], "bench memory has no option --seconds"),
        (["start", "mlp"], "bench start starts a script of its own, and takes no target"),
        (["recovery", "lr.peak=1"], "bench recovery trains a small model of its own"),
        (["weak", "steps=5"], "bench weak sets steps itself"),
        (["weak", "threads=5"], "--cores-per-rank"),
        (["data", "data.workers=5"], "bench data sets data.workers itself"),
        (["settings", "--way", "checkpoint.every=3"], "bench settings sets checkpoint.every itself"),
        (["compare", "here", "there"], "is not the result of a benchmark"),
    ],
)
def test_mistakes_are_refused_before_anything_is_measured(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 2
    assert problem in capsys.readouterr().err
    assert json.dumps([str(path) for path in tmp_path.iterdir()]) == "[]"


def test_functions_refuse_what_they_do_not_know() -> None:
    with pytest.raises(UserError, match="there is no option repeat"):
        benchmark_weak_scaling([1, 2], repeat=3)
    with pytest.raises(UserError, match="siblings=twins is not known"):
        benchmark_weak_scaling([1, 2], siblings="twins")
    for worlds in ([], [0, 1], ["2"]):
        with pytest.raises(UserError, match="numbers of ranks"):
            benchmark_weak_scaling(worlds)


class NoTeam:
    """A pool and its team, whose ranks fail at once."""

    cores_per_rank = 1

    def start(self, *_: Any) -> NoTeam:
        return self

    def ready(self) -> None:
        raise RanksEnded("rank 0 of 2 failed", "there is no NCCL here", "")


def test_a_benchmark_of_nothing_is_an_error() -> None:
    pool: Any = NoTeam()
    with pytest.raises(RanksEnded, match="no collective was measured"):
        comm.run(pool, BenchOptions(backends=["nccl"], worlds=[2], cores_per_rank=1), lambda _: None)
    # A backend that was named and failed is a failure, though another one was measured.
    assert Section("comm", "", [], [], extra={"not_measured": {"nccl": "there is no NCCL here"}}).failed


def test_bench_all_leaves_out_the_step_of_other_targets() -> None:
    pool: Any = NoTeam()
    options = BenchOptions(layers=[("command line", {"precision": "bf16"})], cores_per_rank=1)
    assert step.run(pool, options, lambda _: None).notes == [
        "Left out: bench step compares loops with settings of their own, and takes no precision."
    ]


class Answering:
    """A pool whose teams answer at once: a turn takes as long as the learning rate says."""

    cores_per_rank = 1

    def start(self, measure: str, world: int, arguments: dict[str, Any]) -> Any:
        seconds = next((v["lr"]["peak"] for _, v in reversed(arguments["layers"]) if "lr" in v), 1.0)
        turn = {"seconds": seconds, "cpu_seconds": 2 * seconds, "peak_bytes": 0}
        facts = {"parameters": 7, "global_batch": 32, "device": "cpu"}
        placed = RankPlacement([[0]] * world)
        team = SimpleNamespace(ready=lambda: [facts] * world, ask=lambda: [turn] * world, placed=lambda _: placed)
        return nullcontext(team)


def test_starts_are_compared_round_by_round_after_one_to_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {start.BASE: iter([99.0, 4.0, 8.0, 6.0]), start.OURS: iter([99.0, 3.0, 4.0, 3.0])}
    monkeypatch.setattr(start, "first_step", lambda way, *_: (seconds := next(taken[way]), seconds + 1))
    (found,) = start.run(pool_of_one(), BenchOptions(repeats=3, worlds=[1, 2], cores_per_rank=1), lambda _: None)

    torchrun, ours = found.rows
    assert (torchrun["way"], torchrun["world"], torchrun["first_s"]["median"]) == ("torchrun", 2, 6.0)
    assert ours["first_ratio"]["median"] == 0.5  # of 0.75, 0.5 and 0.5, not 3 / 6 by chance
    assert ours["end_s"]["median"] == 4.0


def pool_of_one() -> Any:
    return SimpleNamespace(cores_per_rank=1)


def test_settings_are_compared_with_the_target_as_it_is() -> None:
    pool: Any = Answering()
    options = BenchOptions(worlds=[1, 2], repeats=3, block=4, ways=["lr.peak=3 clip.norm=1"], cores_per_rank=1)
    (section,) = settings.run(pool, options, lambda _: None)
    found = [
        (row["world"], row["way"], row["wall_ratio"]["median"], row["cpu_ratio"]["median"]) for row in section.rows
    ]
    ways = [("as it is", 1.0, 1.0), ("lr.peak=3 clip.norm=1", 3.0, 3.0), ("as it is, again", 1.0, 1.0)]
    assert found == [(world, *way) for world in (1, 2) for way in ways]
    assert section.rows[1]["step_ms"]["median"] == 750.0


def test_teams_take_turns_and_who_begins_alternates() -> None:
    order: list[str] = []
    teams: Any = {name: SimpleNamespace(ask=lambda name=name: order.append(name) or [name]) for name in "ab"}
    assert rounds_of(teams, 3, lambda _: None) == {"a": [["a"]] * 3, "b": [["b"]] * 3}
    assert "".join(order) == "abbaab"


def test_rounds_end_before_the_time_is_over() -> None:
    # Each round takes as many seconds as its number says, and the last one that would fit on average is the third.
    clock = iter([0.0, 0.0, 1.0, 3.0, 6.0])
    assert list(numbers_within(7.0, lambda: next(clock))) == [0, 1, 2]
    late = iter([0.0, 0.0, 100.0])
    assert list(numbers_within(7.0, lambda: next(late))) == [0]


def test_the_machine_limit_waits_for_the_slowest_rank_in_every_step() -> None:
    # Two ranks that are slow in turn: each takes 4 s for two steps, but together they would take 6.
    ranks = [{"seconds": 4.0, "step_seconds": [1.0, 3.0]}, {"seconds": 4.0, "step_seconds": [3.0, 1.0]}]
    rates = {1: [8 / 3.0], 2: [16 / 8.0]}  # 8 samples of a rank in a turn of 3 s, alone, and of 8 s, together
    found = limits_of(2, 1, rates, [ranks], samples=16)
    middles = {name: value["median"] for name, value in found.items() if value}
    assert middles == pytest.approx({"machine_limit": 3 / 6, "of_machine_limit": 6 / 8, "limit_without_waiting": 3 / 4})
    assert set(limits_of(1, 1, rates, None, samples=8).values()) == {None}


def test_the_efficiency_axis_shows_whole_error_bars() -> None:
    assert plots._top([0.9]) == pytest.approx(1.05 * 1.07)
    assert plots._top([{"median": 1.2, "low": 1.0, "high": 1.5}, None]) > 1.5
