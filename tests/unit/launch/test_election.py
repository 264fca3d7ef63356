"""Which node coordinates a job, by the files in its run folder, without any process or clock."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from lockstep.launch import election
from lockstep.launch.election import CounterWatch, TakeoverWatch, Term, TermFile, begin_term


def test_a_term_begins_once(tmp_path):
    first = begin_term(tmp_path, None, "host-a", "10.0.0.1:29400")
    assert election.newest_term(tmp_path) == first.term == Term(1, "host-a", "10.0.0.1:29400")
    assert begin_term(tmp_path, 0, "host-b", "10.0.0.2:29400") is None
    assert not first.superseded()


def test_the_next_term_supersedes_the_last(tmp_path):
    first = begin_term(tmp_path, None, "host-a", "10.0.0.1:29400")
    rank = TermFile(first.path)
    second = begin_term(tmp_path, 1, "host-b", "10.0.0.2:29400")
    assert begin_term(tmp_path, 1, "host-c", "10.0.0.3:29400") is None
    assert first.superseded()
    assert rank.superseded()
    assert not second.superseded()
    assert election.newest_term(tmp_path).host == "host-b"
    second.end()
    assert election.newest_term(tmp_path) is None


def test_a_node_that_slept_through_two_terms_begins_none(tmp_path):
    for number, host in enumerate("abc"):
        last = begin_term(tmp_path, number or None, host, "10.0.0.1:29400")
    (tmp_path / ".coordinator-2").unlink(missing_ok=True)
    assert begin_term(tmp_path, 1, "host-d", "10.0.0.4:29400") is None
    assert not last.superseded()


def test_a_job_that_has_ended_is_not_continued(tmp_path):
    first = begin_term(tmp_path, None, "host-a", "10.0.0.1:29400")
    first.end()
    assert begin_term(tmp_path, first.term.number, "host-b", "10.0.0.2:29400") is None
    assert election.newest_term(tmp_path) is None


def test_a_disk_that_fails_at_the_end_does_not_change_how_the_job_ended(tmp_path, monkeypatch):
    """The launcher of a job that had finished ended with a traceback, and exit code 1."""
    term = begin_term(tmp_path, None, "host-a", "10.0.0.1:29400")

    def fail(path, missing_ok=False):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "unlink", fail)
    term.end()


def test_a_job_may_end_between_the_look_and_the_link(tmp_path, monkeypatch):
    begin_term(tmp_path, None, "a", "10.0.0.1:29400")
    seen = iter([[1], [2]])
    monkeypatch.setattr(election, "_term_numbers", lambda run: next(seen))
    assert begin_term(tmp_path, 1, "b", "10.0.0.2:29400") is None
    assert not (tmp_path / ".coordinator-2").exists()


def test_a_faster_node_may_come_between_the_look_and_the_link(tmp_path, monkeypatch):
    begin_term(tmp_path, None, "a", "10.0.0.1:29400")
    seen = iter([[1], [1, 3]])  # term 2 has come and gone, and term 3 has begun
    monkeypatch.setattr(election, "_term_numbers", lambda run: next(seen))
    assert begin_term(tmp_path, 1, "b", "10.0.0.2:29400") is None
    assert not (tmp_path / ".coordinator-2").exists()


def test_the_count_grows_in_place(tmp_path):
    term = begin_term(tmp_path, None, "host-a", "10.0.0.1:29400")
    before = election.read_counter(tmp_path, 1)
    term.renew()
    assert not term.superseded()
    assert int(election.read_counter(tmp_path, 1)) == int(before) + 1
    assert election.newest_term(tmp_path) == term.term


def test_a_folder_that_was_removed_is_another_matter(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    term = begin_term(run, None, "host-a", "10.0.0.1:29400")
    shutil.rmtree(run)
    assert not term.superseded()


@pytest.mark.parametrize("text", ["", "x", "0" * 20 + "[]", "0" * 20 + '{"host": 1, "address": "a:1"}'])
def test_a_term_file_that_no_launcher_wrote(tmp_path, text):
    (tmp_path / ".coordinator-7").write_text(text)
    assert election.newest_term(tmp_path) is None
    assert begin_term(tmp_path, None, "host-a", "10.0.0.1:29400").term.number == 8


def test_a_takeover_between_the_list_and_the_look(tmp_path, monkeypatch):
    begin_term(tmp_path, None, "a", "10.0.0.1:29400")
    listed = election._term_numbers

    def slow(run):
        found = listed(run)
        monkeypatch.setattr(election, "_term_numbers", listed)
        begin_term(run, 1, "b", "10.0.0.2:29400")
        return found

    monkeypatch.setattr(election, "_term_numbers", slow)
    assert election.newest_term(tmp_path).host == "b"


def test_a_missing_term_file_differs_from_an_unreadable_one(tmp_path, monkeypatch):
    assert election.newest_term(tmp_path) is None
    assert election.newest_term(tmp_path / "missing") is None
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        election.newest_term(tmp_path / "file")
    os.mkfifo(tmp_path / ".coordinator-8")
    assert election.newest_term(tmp_path) is None
    monkeypatch.setattr(
        election, "_term_numbers", lambda run: [9]
    )  # a list that a network file system keeps for too long
    with pytest.raises(FileNotFoundError):
        election.newest_term(tmp_path)


# When a node takes over


def watch(number: int, nodes: list[int]) -> TakeoverWatch:
    made = TakeoverWatch(number, nodes, patience=5.0, stagger=2.0)
    made.note(1, "0", 100.0)
    return made


def test_a_dead_coordinator_is_replaced_by_the_lowest_number():
    made = {number: watch(number, [0, 2, 3, 7]) for number in (2, 3, 7)}
    due = {
        number: next(now for now in range(100, 120) if one.reason_to_take_over(set(), now))
        for number, one in made.items()
    }
    assert due == {2: 105, 3: 107, 7: 109}
    assert "no sign of life in the run folder for 5 s" in made[2].reason_to_take_over(set(), 105.0)
    assert "no sign of life in the run folder for 7 s" in made[3].reason_to_take_over(set(), 107.0)


def test_the_last_of_many_nodes_does_not_wait_for_minutes():
    """If the nodes with lower numbers are lost as well, a node of a large job still takes over soon."""
    last, nodes = watch(1000, list(range(1001))), set(range(1001))
    assert last.reason_to_take_over(set(), 124.0) is None
    assert "no sign of life" in last.reason_to_take_over(set(), 125.0)

    # The coordinator lives, but no node can reach it.
    last.note(1, "1", 126.0)
    assert last.reason_to_take_over(nodes, 126.0) is None
    for second in range(127, 146):
        last.note(1, str(second), float(second))
        assert last.reason_to_take_over(nodes, float(second)) is None
    last.note(1, "146", 146.0)
    assert last.reason_to_take_over(nodes, 146.0) == "most nodes cannot reach it"


def test_a_coordinator_that_lives_is_not_replaced_by_one_that_is_cut_off():
    made = watch(1, [0, 1])
    for second in range(1, 60):
        made.note(1, str(second), 100.0 + second)
        assert made.is_alive(100.0 + second)
        assert made.reason_to_take_over({1}, 100.0 + second) is None


def test_a_coordinator_that_most_cannot_reach_is_replaced():
    first, second = watch(1, [0, 1, 2]), watch(2, [0, 1, 2])
    for one in (first, second):
        one.note(1, "1", 101.0)
        assert one.reason_to_take_over({1}, 101.0) is None
    assert first.reason_to_take_over({1, 2}, 101.5) == "most nodes cannot reach it"
    assert second.reason_to_take_over({1, 2}, 101.5) is None  # the lower number goes first
    assert second.reason_to_take_over({1, 2, 9}, 103.5) == "most nodes cannot reach it"  # 9 is no member


def test_a_successor_that_is_lost_as_well_is_waited_for_anew():
    made = watch(3, [0, 2, 3])
    made.note(2, "0", 106.0)
    assert made.reason_to_take_over(set(), 112.0) is None
    assert made.reason_to_take_over(set(), 113.0)


def test_who_cannot_reach_the_coordinator(tmp_path):
    begin_term(tmp_path, None, "a", "10.0.0.1:29400")
    election.write_cut_off_file(tmp_path, 1, 4)
    election.write_cut_off_file(tmp_path, 1, 5)
    election.remove_cut_off_file(tmp_path, 1, 4)
    assert election.cut_off_nodes(tmp_path, 1) == {5}
    begin_term(tmp_path, 1, "b", "10.0.0.2:29400")
    assert not list(tmp_path.glob(".cut-off-*"))


def test_a_job_inherits_no_reports_of_an_earlier_one(tmp_path):
    """Its terms have the same numbers; and one node that is cut off would seem to be most of them."""
    term = begin_term(tmp_path, None, "a", "10.0.0.1:29400")
    election.write_cut_off_file(tmp_path, 1, 1)
    election.write_cut_off_file(tmp_path, 2, 1)
    term.end()
    assert election.cut_off_nodes(tmp_path, 1) == set()
    assert election.cut_off_nodes(tmp_path, 2) == {1}  # of a successor that this one does not know yet
    election.write_cut_off_file(tmp_path, 1, 2)  # by a node that has not seen the end
    begin_term(tmp_path, None, "a", "10.0.0.1:29400")
    assert election.cut_off_nodes(tmp_path, 1) == set()


def test_a_counter_that_has_stopped_is_no_sign_of_life():
    made = watch(1, [0, 1])
    made.note(1, "1", 101.0)
    assert made.is_alive(105.9)
    made.note(1, "1", 106.0)
    assert not made.is_alive(106.0)


def test_a_count_that_cannot_be_read_stands_for_nothing():
    made = watch(1, [0, 1])
    made.note(1, "", 104.0)
    assert made.reason_to_take_over(set(), 200.0) is None
    made.note(1, "0", 200.0)
    assert not made.has_grown
    assert made.reason_to_take_over(set(), 204.0) is None
    assert made.reason_to_take_over(set(), 205.0)


def test_for_how_long_a_count_is_known_to_stand_still():
    made = CounterWatch()
    assert made.still_for(100.0) == 0.0
    made.note(1, "0", 100.0)
    assert made.still_for(104.0) == 4.0
    made.note(1, "1", 105.0)  # it grows
    assert made.still_for(106.0) == 1.0
    made.note(2, "1", 107.0)  # another term
    assert made.still_for(109.0) == 2.0
    made.note(2, "", 110.0)  # it cannot be read
    assert made.still_for(150.0) == 0.0


def test_a_counter_that_cannot_be_read_is_no_sign_of_life():
    """It grew before. Now nothing is known of it, and a node must not be told that it is cut off from a live one."""
    made = watch(1, [0, 1])
    made.note(1, "1", 101.0)
    assert made.has_grown
    made.note(1, "", 102.0)
    assert not made.has_grown
    made.note(1, "1", 103.0)
    assert not made.has_grown
    made.note(1, "2", 104.0)
    assert made.has_grown
    made.reset()
    assert not made.has_grown
