"""The exit codes of a job, which platforms act on, and the line that names them."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep import api, cli
from lockstep.errors import EXIT_CODES, ExitCode, PeersMissing, Preempted
from lockstep.launch.failure import Failure, Kind
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
    assert (Preempted.CODE, Preempted.INTERRUPTED) == (75, 130)


def test_the_last_line_names_code_and_reason() -> None:
    failure = Failure(1, "host", 0.0, "SIGKILL", "killed\nlong ago", origin="signal")
    assert api._describe_exit(JobEnd(1, failure)) == "exit code 1 (never restart): rank 1: SIGKILL: killed"
    lost = Failure.noticed(Kind.NODE, "only 1 node came within 300 s")
    assert api._describe_exit(JobEnd(75, lost)) == "exit code 75 (restart): node: only 1 node came within 300 s"
    assert api._describe_exit(JobEnd(75)) == "exit code 75 (restart): it was preempted by a signal"


def test_a_command_whose_peers_are_missing_may_be_restarted(monkeypatch, capsys) -> None:
    def fail(*_: object) -> int:
        raise PeersMissing("no answer within 5 minutes", "connection refused", "start the other node")

    monkeypatch.setitem(cli.VERBS, "recipes", fail)
    assert cli.main(["recipes"]) == ExitCode.RESTART
    assert "no answer within 5 minutes" in capsys.readouterr().err
