"""The exit codes of a job, which platforms act on, and the line that names them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lockstep import api, cli
from lockstep.errors import EXIT_CODES, FINAL_CODES, ExitCode, PeersMissing, Preempted, final_codes
from lockstep.launch.failure import Failure, LauncherFailure
from lockstep.launch.supervisor import Outcome
from lockstep.launch.wire.messages import JobEnd

PAGE = Path(__file__).parents[2] / "docs" / "multi_node.md"


def test_the_page_has_the_table_of_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert {int(code): (advice, text) for code, advice, text in rows} == EXIT_CODES


def test_every_code_has_one_of_three_answers() -> None:
    assert EXIT_CODES.keys() == set(ExitCode)
    assert {code: code.advice for code in ExitCode if code.advice != "never restart"} == {
        ExitCode.FINISHED: "finished",
        ExitCode.RESTART: "restart",
    }
    assert [Preempted.code_of(signal) for signal in ("SIGTERM", "SIGUSR1", "SIGINT")] == [75, 75, 130]


def test_the_last_line_names_code_and_reason() -> None:
    failure = Failure(1, "host", 0.0, "SIGKILL", "killed\nlong ago", origin="signal")
    assert api._describe_exit(JobEnd(1, failure)) == "exit code 1 (never restart): rank 1: SIGKILL: killed"
    lost = Failure.by_launcher(LauncherFailure.NODE, "only 1 node came within 300 s")
    assert api._describe_exit(JobEnd(75, lost)) == "exit code 75 (restart): node: only 1 node came within 300 s"
    mistake = Failure(1, "host", 0.0, "ConfigError", "no key stepz\n  do:    set steps=1", for_user=True)
    assert api._describe_exit(JobEnd(2, mistake)) == f"exit code 2 (never restart): {ExitCode.REFUSED.meaning}"
    assert api._describe_exit(JobEnd(75)) == "exit code 75 (restart): it was preempted by a signal"


def test_a_command_whose_peers_are_missing_may_be_restarted(monkeypatch, capsys) -> None:
    def fail(*_: object) -> int:
        raise PeersMissing("no answer within 5 minutes", "connection refused", "start the other node")

    monkeypatch.setitem(cli.VERBS, "recipes", fail)
    assert cli.main(["recipes"]) == ExitCode.RESTART
    assert "no answer within 5 minutes" in capsys.readouterr().err


@pytest.mark.parametrize(("one_log", "ended_here", "lines"), [(True, True, 1), (True, False, 0), (False, False, 1)])
def test_the_line_is_printed_once_if_all_nodes_have_one_log(
    monkeypatch, capsys, tmp_path, one_log, ended_here, lines
) -> None:
    monkeypatch.setattr(api, "supervise", lambda job: Outcome(JobEnd(75), ended_here))
    if one_log:
        monkeypatch.setenv("LOCKSTEP_ONE_LOG", "1")
    assert cli.main(["train", "char_lm", f"run_dir={tmp_path / 'run'}", "--nproc", "2"]) == 75
    assert capsys.readouterr().err.count("exit code 75 (restart)") == lines


def test_all_pages_agree_about_the_codes_that_end_a_job() -> None:
    assert final_codes(elastic=False) == [1, 2, 130]
    assert final_codes(elastic=True) == [2, 130]
    for page in ("slurm.md", "kubernetes.md", "multi_node.md"):
        text = PAGE.with_name(page).read_text()
        rows = [row for row in text.splitlines() if row.startswith("|") and "never" in row]
        codes = {int(number) for row in rows for number in re.findall(r"\b(?:1|2|75|130|137)\b", row)}
        assert codes == {1, 2, 130}, page


def test_a_final_code_is_raised_for_srun_alone(monkeypatch, capsys) -> None:
    """Commands that a rank starts must not have it."""

    def ends(*_: object) -> int:
        assert FINAL_CODES not in os.environ
        return next(codes)

    monkeypatch.setitem(cli.VERBS, "recipes", ends)
    expected = {0: 0, 1: 243, 2: 242, 75: 75, 130: 241}
    codes = iter(expected)
    for raised in expected.values():
        monkeypatch.setenv(FINAL_CODES, "1 2 130")
        assert cli.main(["recipes"]) == raised

    monkeypatch.setenv(FINAL_CODES, "1 2 130")
    with pytest.raises(SystemExit) as ending:
        cli.main(["nothing"])
    assert ending.value.code == 242
