"""When a job counts as hanging, who is named, and above all when there must be no alarm."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

import preloaded
from lockstep.config.sections import HangConfig
from lockstep.files import typed_json
from lockstep.launch.failure import FailureTraits, LauncherFailure
from lockstep.launch.frames import line_of
from lockstep.launch.hangs import watchdog
from lockstep.launch.hangs.explanation import Evidence, explain
from lockstep.launch.hangs.flight_recorder import Findings
from lockstep.launch.hangs.stacks import _WORKER_END, collect, group, main_thread, worker_pids, workers
from lockstep.launch.hangs.suspicion import Peers, RankView, suspect, timeout_of, view_of
from lockstep.launch.hangs.watchdog import Answers, Watchdog
from lockstep.runtime.heartbeat import PHASES, Heartbeat

LONGEST = {"data": 0.1, "compute": 0.5, "all-reduce": 0.2, "update": 0.1, "collective": 0.1}
LONGEST |= {"evaluate": 20.0, "snapshot": 0.5}


def view(rank, phase, age, step=41, state="S", detail="", host="node-a", **longest):
    known = dict.fromkeys(PHASES, 0.0) | LONGEST | longest
    process = {"rank": rank, "host": host, "pid": 1000 + rank, "state": state}
    return RankView(beats=100, age=age, step=step, steps_here=30, phase=phase, detail=detail, longest=known, **process)


# suspect


def test_no_alarm_while_all_ranks_advance():
    assert suspect([view(0, "all-reduce", 0.3), view(1, "data", 0.1)], HangConfig()) is None


def test_no_alarm_without_ranks():
    assert suspect([], HangConfig()) is None


def test_a_rank_stuck_in_its_computation_is_named():
    views = [view(0, "all-reduce", 8.5), view(1, "compute", 8.0), view(2, "all-reduce", 8.4)]
    suspicion = suspect(views, HangConfig())
    assert suspicion.awaited == [1]
    assert suspicion.reason == "no rank has advanced for 8.0 s (timeout 5.0 s, by hang.least)"


def test_the_age_and_the_timeout_that_are_named_are_those_of_one_rank():
    """The age of rank 0 stood beside the timeout of rank 1: no rank had advanced for 10 s, of 900 s."""
    suspicion = suspect([view(0, "all-reduce", 10.0), view(1, "user code", 901.0)], HangConfig())
    assert suspicion.reason == "rank 1 has been in phase user code for 901.0 s (timeout 900.0 s, by hang.first)"


def test_one_rank_within_its_own_limit_is_enough_to_wait():
    waiting = [view(0, "all-reduce", 20.0), view(2, "all-reduce", 20.0)]
    assert suspect([*waiting, view(1, "data", 20.0)], HangConfig()) is None
    assert suspect([*waiting, view(1, "data", 31.0)], HangConfig()).awaited == [1]


def test_limits_grow_with_what_was_seen_on_any_rank():
    stuck = [view(0, "all-reduce", 40.0), view(1, "compute", 40.0)]
    assert suspect(stuck, HangConfig()) is not None
    assert suspect([stuck[0], view(1, "compute", 40.0, compute=9.0)], HangConfig()) is None
    assert suspect([view(0, "all-reduce", 40.0, compute=9.0), stuck[1]], HangConfig()) is None
    assert suspect([view(0, "all-reduce", 40.0, data=9.0), stuck[1]], HangConfig()) is None
    limit = timeout_of(stuck[0], Peers([*stuck, view(2, "data", 0.0, compute=9.0)]), HangConfig())
    assert limit == (45.0, "hang.factor", 5.0)


def test_limits_come_from_the_configuration():
    stuck = [view(0, "all-reduce", 2.0, compute=0.1), view(1, "compute", 2.0, compute=0.1)]
    assert suspect(stuck, HangConfig()) is None
    assert suspect(stuck, HangConfig(least=1.0)) is not None
    assert suspect(stuck, HangConfig(least=1.0, factor=50.0)) is None


@pytest.mark.parametrize("phase", ["start", "join", "build", "load", "compile", "end", "user code"])
def test_phases_without_a_history_have_the_long_limit(phase):
    """Rank 0 writes its report, or the user's own loop draws pictures now and then, while the others wait."""
    usual = {} if phase != "user code" else {"user code": 0.001}
    others = [view(0, "collective", 899.0), view(2, "collective", 899.0)]
    assert suspect([*others, view(1, phase, 899.0, **usual)], HangConfig()) is None
    assert suspect([*others, view(1, phase, 901.0, **usual)], HangConfig()).awaited == [1]


def test_the_first_evaluation_may_take_long():
    others = view(0, "collective", 600.0)
    assert suspect([others, view(1, "evaluate", 600.0, evaluate=0.0)], HangConfig()) is None
    assert suspect([others, view(1, "evaluate", 101.0)], HangConfig()).awaited == [1]  # five times twenty seconds


def test_the_first_step_may_compile():
    first = replace(view(0, "compute", 600.0, step=1, state="R"), steps_here=0)
    assert suspect([first, view(1, "all-reduce", 600.0)], HangConfig()) is None


def test_a_long_save_on_one_rank_is_no_hang():
    assert suspect([view(0, "snapshot", 25.0), view(1, "all-reduce", 25.0)], HangConfig()) is None
    assert suspect([view(0, "snapshot", 31.0), view(1, "all-reduce", 31.0)], HangConfig()).awaited == [0]


def test_hangs_raise_timeouts_to_hang_first_and_not_further():
    stuck = [view(0, "all-reduce", 901.0), view(1, "data", 901.0)]
    for hangs in (1, 10, 10_000):
        assert suspect(stuck, HangConfig(), hangs) is not None
    assert suspect([replace(rank, age=899.0) for rank in stuck], HangConfig(), 10_000) is None


def test_ranks_that_have_finished_do_not_count():
    done = view(1, "after run", 50.0, state="")
    assert suspect([done], HangConfig()) is None
    assert suspect([view(0, "end", 50.0), done], HangConfig()) is None


@pytest.mark.parametrize("state", ["S", "T"])
def test_what_a_program_does_after_its_run_is_not_judged(state):
    exports = view(0, "after run", 90_000.0, state=state)
    assert suspect([replace(exports, halted_s=10.0)], HangConfig()) is None
    assert suspect([exports, view(1, "snapshot", 901.0)], HangConfig()).awaited == [1]


@pytest.mark.parametrize("phase", ["snapshot", "commit", "evaluate", "end"])
def test_a_hang_at_the_end_of_a_run_is_noticed(phase):
    """All steps are done, and rank 1 never ends its last save, evaluation or report."""
    assert suspect([view(0, "collective", 901.0), view(1, phase, 901.0)], HangConfig()).awaited == [1]


def test_a_debugger_is_not_disturbed():
    assert suspect([view(0, "all-reduce", 999.0), view(1, "compute", 999.0, state="t")], HangConfig()) is None


# the awaited rank


def test_a_rank_behind_is_odd_even_when_it_waits():
    assert suspect([view(0, "all-reduce", 9.0), view(1, "all-reduce", 9.0, step=40)], HangConfig()).awaited == [1]


def test_the_one_in_another_collective_is_odd():
    views = [
        view(0, "collective", 9.0, detail="metrics"),
        view(1, "collective", 9.0, detail="stop"),
        view(2, "all-reduce", 9.0),
    ]
    assert suspect(views, HangConfig()).awaited == []
    views[1] = view(1, "all-reduce", 9.0)
    assert suspect(views, HangConfig()).awaited == [0]


def test_no_rank_is_blamed_when_all_wait_in_the_same_collective():
    suspicion = suspect([view(0, "all-reduce", 9.0), view(1, "all-reduce", 9.5)], HangConfig())
    assert suspicion.awaited == []
    assert "cannot tell which rank is at fault" in explain(suspicion, Evidence()).message


def test_stacks_tell_who_is_odd_when_phases_do_not():
    suspicion = suspect([view(rank, "all-reduce", 9.0) for rank in range(3)], HangConfig())
    stacks = {0: stack(("/u/train.py", 7, "f")), 1: stack(("/u/train.py", 9, "g")), 2: stack(("/u/train.py", 7, "f"))}
    assert explain(suspicion, Evidence(stacks)).rank == 1


def entries(*numbers, done=True):
    """The default group's collectives of these numbers, all of one size; the last has ended if `done`."""
    common = {"profiling_name": "gloo:all_reduce", "input_sizes": [[4]], "process_group": ["0", "default_pg"]}
    return [{**common, "collective_seq_id": n, "retired": done or n != numbers[-1]} for n in numbers]


def judged(views, stacks, collectives):
    watch = Watchdog(HangConfig())
    for second in range(12):
        suspicion = look(watch, [replace(seen, age=float(second)) for seen in views], now=second)
        if suspicion:
            break
    return watch.verdict(suspicion, Answers(stacks, collectives))


def test_a_hang_in_the_last_backward_is_attributed_between_two_ranks():
    """Both are in the phase all-reduce and their stacks differ, one each: only the collectives tell them apart."""
    waits, works = stack(("/u/driver.py", 7, "backward")), stack(("/u/layer.py", 9, "backward"))
    views = [view(0, "all-reduce", 9.0), view(1, "all-reduce", 9.0)]
    failure = judged(views, {0: waits, 1: works}, {0: entries(1, 2, done=False), 1: entries(1)})
    assert failure.rank == 1
    assert "the others are waiting for rank 1" in failure.message
    assert failure.traceback.startswith("rank 1 is at: /u/layer.py:9 backward")


def test_a_rank_that_holds_the_gil_is_not_in_the_collective():
    waits, works = stack(("/u/driver.py", 7, "backward")), stack(("/u/layer.py", 9, "backward"))
    views = [view(0, "all-reduce", 9.0), view(1, "all-reduce", 9.0, state="R")]
    failure = judged(views, {0: waits, 1: works}, {0: entries(1, 2, done=False)})
    assert failure.rank == 1
    assert "rank 1 shows its stack but not its collectives: most likely it holds Python's lock" in failure.traceback


def test_a_rank_that_calls_a_collective_of_its_own_is_ahead_although_its_step_is_behind():
    views = [
        view(0, "all-reduce", 9.0, step=25),
        view(1, "collective", 9.0, step=49),
        view(2, "collective", 9.0, step=49),
    ]
    collectives = {0: entries(95, 96, done=False), 1: entries(95), 2: entries(95)}
    failure = judged(views, dict.fromkeys(range(3), ""), collectives)
    assert failure.rank == 0
    assert "rank 0 is ahead: 96 collectives by step 25, rank 1 95 by step 49" in failure.message
    assert "Look for a collective that not every rank calls" in failure.message


def test_a_rank_that_is_behind_in_both_is_just_late():
    views = [view(0, "all-reduce", 9.0, step=40), view(1, "all-reduce", 9.0, step=41)]
    failure = judged(views, {0: "", 1: ""}, {0: entries(40), 1: entries(40, 41, done=False)})
    assert "the others are waiting for rank 0" in failure.message


def test_the_stack_of_a_rank_whose_run_is_closed_does_not_end_the_launcher():
    """Its process may still export something: it is no part of the hang, but it answers as well."""
    waits, exports = stack(("/u/driver.py", 7, "backward")), stack(("/u/export.py", 9, "main"))
    views = [view(0, "all-reduce", 40.0), view(1, "after run", 40.0)]
    failure = judged(views, {0: waits, 1: exports}, {0: entries(1, 2, done=False), 1: entries(1)})
    assert failure.rank == 0


# watch


def look(watch, views, now):
    watch.note_views(0, views)
    return watch.find_suspicion({view.rank for view in views}, now)


def test_a_stopped_rank_is_noticed_after_three_seconds_and_not_before():
    watch = Watchdog(HangConfig())
    seen = [look(watch, [view(0, "all-reduce", s), view(1, "data", s, state="T")], now=s) for s in range(6)]
    assert [bool(suspicion) for suspicion in seen] == [False] * 4 + [True] * 2
    assert seen[4].awaited == [1]
    assert "suspended by a signal" in seen[4].reason


def test_a_rank_stopped_for_a_moment_is_forgiven():
    watch = Watchdog(HangConfig())
    states = ["S", "T", "T", "S", "T", "T", "T", "S"]
    assert not any(look(watch, [view(0, "data", 9.0, state=state)], now=n) for n, state in enumerate(states))


def test_a_rank_that_is_gone_is_noticed():
    watch = Watchdog(HangConfig())
    seen = [look(watch, [view(0, "all-reduce", 0.1), view(1, "data", s, state="Z")], now=s) for s in range(5)]
    assert seen[-1].awaited == [1]
    assert not any(seen[:-1])


def test_after_the_launcher_itself_was_stopped_all_ranks_get_the_full_time_again():
    watch = Watchdog(HangConfig())
    hanging = [view(0, "all-reduce", 3600.0, state="T"), view(1, "compute", 3600.0, state="T")]
    assert not look(watch, hanging, now=0.0)
    going_on = [view(0, "all-reduce", 3600.0), view(1, "compute", 3600.0)]
    assert not any(look(watch, going_on, now=3600.0 + s) for s in range(6))
    assert look(watch, going_on, now=3606.0).awaited == [1]


def test_compiling_again_is_no_hang_but_not_for_ever():
    compiling = 'File "/x/site-packages/torch/_dynamo/convert_frame.py", line 9 in _compile\n'
    backward = 'File "/x/site-packages/torch/_inductor/compile_fx.py", line 9 in fx_codegen_and_compile\n'
    running = 'File "/x/site-packages/torch/_dynamo/eval_frame.py", line 9 in compile_wrapper\n'
    views = [view(0, "all-reduce", 60.0), view(1, "compute", 60.0)]

    def compiles(config, stack):
        watch = Watchdog(config)
        return watch._is_compiling(suspect(views, HangConfig()), Answers({0: "", 1: stack}))

    assert not compiles(HangConfig(), running)
    assert not compiles(HangConfig(first=50.0), compiling)
    for text in (compiling, backward):
        assert compiles(HangConfig(), text)


def test_a_rank_that_compiles_is_no_excuse_for_one_that_is_stopped():
    watch = Watchdog(HangConfig())
    views = [view(0, "compute", 1.0), view(1, "data", 9.0, state="T")]
    suspicion = [look(watch, views, now=second) for second in range(5)][-1]
    answers = Answers({0: 'File "/x/torch/_dynamo/convert_frame.py", line 9 in _compile'})
    assert not watch._is_compiling(suspicion, answers)


def test_a_rank_that_compiles_is_left_alone_for_a_while():
    watch = Watchdog(HangConfig())
    views = [view(0, "all-reduce", 60.0), view(1, "compute", 60.0)]
    alarms = [look(watch, views, now=second) for second in range(7)]
    assert alarms[-1]
    answers = Answers({1: 'File "/x/torch/_dynamo/convert_frame.py", line 9 in _compile'})
    assert watch.verdict(alarms[-1], answers) is None
    later = [look(watch, views, now=second) for second in range(7, 17)]
    assert [bool(alarm) for alarm in later] == [False] * 9 + [True]


# stacks


def stack(*frames, threads=""):
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
    return threads + "\n".join(["Current thread 0x00007fb685846b80 (most recent call first):", *lines, ""])


OTHER = 'Thread 0x00007fb684cfc6c0 [worker] (most recent call first):\n  File "/u/other.py", line 1 in run\n\n'


def test_ranks_are_grouped_by_their_main_threads():
    torch = ("/venv/lib/python3.11/site-packages/torch/autograd/graph.py", 5, "backward")
    waits = stack(torch, ("/u/train.py", 40, "step"), threads=OTHER)
    stacks = {0: waits, 1: stack(("/u/data.py", 3, "read"), threads=OTHER), 2: waits, 3: ""}
    groups = group(stacks)
    assert [ranks for _, ranks in groups] == [[1], [0, 2]]
    assert [str(frame) for frame in groups[1][0]] == ["/u/train.py:40 step"]


def test_the_explanation_begins_with_the_odd_rank_and_its_line():
    package = os.path.dirname(watchdog.__file__).removesuffix("launch/hangs")
    waits = stack((package + "parallel/ddp/driver.py", 131, "backward"), (package + "engine/step.py", 9, "run"))
    reads = stack(
        ("/venv/lib/python3.11/site-packages/urllib3/pool.py", 77, "urlopen"),
        ("/u/data.py", 3, "read"),
        ("/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 5, "next"),
        (package + "data/loader.py", 50, "batches"),
    )
    views = [view(rank, "all-reduce", 38.0) for rank in range(4)]
    views[1] = view(1, "data", 37.0, state="S")
    evidence = Evidence({0: waits, 1: reads, 2: waits, 3: waits}, Findings(["rank 1 never entered it"]))
    failure = explain(suspect(views, HangConfig()), evidence)
    assert (failure.kind, failure.rank, failure.host) == ("hang", 1, "node-a")
    assert (failure.step, failure.phase) == (41, "data")
    assert failure.message == (
        "no rank has advanced for 37.0 s (timeout 30.0 s, by hang.least); "
        "the others are waiting for rank 1 on node-a (step 41, phase data, process sleeping)"
    )
    assert failure.traceback.splitlines() == [
        "rank 1 is at: /u/data.py:3 read",
        "  urllib3/pool.py:77 urlopen",
        "  /u/data.py:3 read",
        "  lockstep/data/loader.py:50 batches",
        "3 ranks wait at: lockstep/parallel/ddp/driver.py:131 backward (ranks 0, 2, 3), phase all-reduce",
        "rank 1 never entered it",
        "if this is slow work, not a hang: hang.least=10",
    ]


def test_a_stopped_rank_shows_no_stack_and_the_explanation_says_why():
    watch = Watchdog(HangConfig())
    views = [view(0, "all-reduce", 9.0), view(1, "data", 9.0, state="T")]
    suspicion = [look(watch, views, now=second) for second in range(5)][-1]
    failure = explain(suspicion, Evidence({0: stack(("/u/train.py", 1, "f")), 1: ""}))
    assert "process suspended" in failure.message
    assert "SIGCONT" in failure.traceback
    assert "1 rank waits at: /u/train.py:1 f (rank 0), phase all-reduce" in failure.traceback


def stall(watch, views):
    """Look once a second until the ranks have stalled for as long as the views say."""
    for second in range(int(views[0].age) + 1):
        suspicion = look(watch, [replace(seen, age=float(second)) for seen in views], now=second)
        if suspicion:
            break
    return suspicion


def test_within_the_limits_ranks_are_only_asked_where_they_are():
    watch = Watchdog(HangConfig())
    views = [view(0, "all-reduce", 50.0), view(1, "compute", 50.0, state="R")]
    suspicion = stall(watch, views)
    assert suspicion.kind == "stall"
    answers = Answers({0: stack(("/u/driver.py", 7, "backward")), 1: stack(("/u/layer.py", 9, "forward"))})
    assert watch.verdict(suspicion, answers) is None
    text = watch.take_stall_report(suspicion, answers)
    assert "rank 1 has been in phase compute of step 41 for 45 s; the timeout is 60 s, by hang.least" in text
    assert "rank 1 is at: /u/layer.py:9 forward" in text
    assert "1 rank waits at: /u/driver.py:7 backward (rank 0)" in text
    assert look(watch, views, now=46.0) is None  # asked once for each stall
    assert watch.take_stall_report(suspicion, answers) is None


def test_a_stall_that_was_shown_does_not_put_off_the_timeout():
    watch = Watchdog(HangConfig())
    views = [view(0, "all-reduce", 45.0), view(1, "compute", 45.0, state="R")]
    assert watch.take_stall_report(stall(watch, views), Answers())
    kinds = []
    for second in range(46, 65):
        suspicion = look(watch, [replace(seen, age=float(second)) for seen in views], now=second)
        kinds.append(suspicion and suspicion.kind)
    assert kinds[-1] == "timeout"


def test_later_stalls_are_shown_but_not_each_step_of_a_slow_program():
    watch = Watchdog(HangConfig())
    shown = []
    for number in range(25):
        begin = number * 50.0
        for second in range(50):
            views = [replace(view(rank, "compute", float(second), state="R"), beats=number) for rank in (0, 1)]
            suspicion = look(watch, views, now=begin + second)
            if suspicion and watch.take_stall_report(suspicion, Answers()):
                shown.append(number)
    assert shown == [0, 12, 24]


def test_a_barrier_on_one_rank_is_proof_long_before_the_limit_of_user_code():
    watch = Watchdog(HangConfig())
    views = [view(0, "user code", 50.0), view(1, "all-reduce", 50.0), view(2, "all-reduce", 50.0)]
    suspicion = stall(watch, views)
    assert suspicion.kind == "stall"
    reduces = entries(100, 101, done=False)
    stacks = {0: stack(("/u/task.py", 12, "after_step")), 1: "", 2: ""}
    mismatch = [*entries(100), reduces[1] | {"profiling_name": "gloo:barrier"}]
    failure = watch.verdict(suspicion, Answers(stacks, {0: mismatch, 1: reduces, 2: reduces}))
    assert failure.traceback.splitlines()[-1].startswith("do: make the same calls on all ranks")
    assert "slow work" not in failure.traceback
    assert failure.rank == 0
    assert "rank 0 is at: /u/task.py:12 after_step" in failure.traceback
    assert "collective 101 differs: rank 0 did barrier" in failure.traceback
    assert failure.message.startswith("no rank has advanced for 45 s, and none can: they wait in different collectives")


@pytest.mark.parametrize("change", [{"profiling_name": None}, {"collective_seq_id": "101"}], ids=str)
def test_if_torch_changes_its_format_a_hang_is_explained_by_the_stacks(change):
    watch = Watchdog(HangConfig())
    suspicion = stall(watch, [view(0, "all-reduce", 9.0), view(1, "all-reduce", 9.0)])
    (entry,) = entries(100)
    other = entry | {"profiling_name": "gloo:barrier"}
    stacks = {0: stack(("/u/task.py", 12, "after_step")), 1: ""}
    failure = watch.verdict(suspicion, Answers(stacks, {0: [entry | change], 1: [other | change]}))
    assert "/u/task.py:12 after_step" in failure.traceback
    assert "process group" not in failure.traceback


@pytest.mark.parametrize("name", ["gloo:all_reduce", "gloo:barrier"])
def test_a_proven_deadlock_is_told_from_a_hang(name):
    """More time would not help, so it raises no limit."""
    watch = Watchdog(HangConfig())
    suspicion = stall(watch, [view(0, "all-reduce", 9.0), view(1, "all-reduce", 9.0)])
    assert suspicion.kind == "timeout"
    reduces = entries(100, 101, done=False)
    collectives = {0: [reduces[0], reduces[1] | {"profiling_name": name}], 1: reduces}
    failure = watch.verdict(suspicion, Answers({0: "", 1: ""}, collectives))
    assert failure.noticed_as(LauncherFailure.HANG if name == "gloo:all_reduce" else LauncherFailure.DEADLOCK)


def test_limits_are_raised_by_each_hang_up_to_that_of_a_phase_without_a_history():
    stuck = [view(0, "all-reduce", 40.0), view(1, "data", 40.0)]
    assert suspect(stuck, HangConfig()) is not None
    assert suspect(stuck, HangConfig(), 1) is None
    later = [replace(seen, age=121.0) for seen in stuck]
    assert suspect(later, HangConfig(), 1) is not None
    assert suspect(later, HangConfig(), 2) is None
    assert suspect([replace(seen, age=901.0) for seen in stuck], HangConfig(), 9) is not None


@pytest.mark.parametrize(
    ("phase", "longest", "setting"),
    [("data", 0.1, "hang.least"), ("data", 20.0, "hang.factor"), ("build", 0.0, "hang.first")],
)
def test_the_setting_that_applies_is_named(phase, longest, setting):
    stuck = [view(0, "all-reduce", 999.0), view(1, phase, 999.0, **{phase: longest})]
    assert f"by {setting})" in suspect(stuck, HangConfig()).reason


def test_ranks_that_have_ended_no_step_have_nothing_to_save():
    watch = Watchdog(HangConfig())
    starting = [replace(view(rank, "compile", 500.0), steps_here=0) for rank in (0, 1)]
    watch.note_views(0, starting)
    assert watch.nothing_to_save({0, 1})
    assert not watch.nothing_to_save({0, 1, 2})  # nothing is known of rank 2

    watch.note_views(0, [starting[0], replace(starting[1], steps_here=1)])
    assert not watch.nothing_to_save({0, 1})
    watch.note_views(0, [starting[0], replace(starting[1], phase="commit")])  # of its first step
    assert not watch.nothing_to_save({0, 1})


@pytest.mark.parametrize("name", ["gloo:all_reduce", "gloo:barrier"])
def test_ranks_that_take_too_long_to_save_do_not_hang_and_will_not_repeat_it(name):
    """With the traits of a deadlock, the job gave up the resize that had asked them to save."""
    watch = Watchdog(HangConfig())
    watch.note_views(0, [view(0, "all-reduce", 9.0), view(1, "all-reduce", 9.0)])
    reduces = entries(100, 101, done=False)
    collectives = {0: [reduces[0], reduces[1] | {"profiling_name": name}], 1: reduces}
    failure = watch.grace_exceeded({0: "node-a", 1: "node-a"}, "30 s", Answers({0: "", 1: ""}, collectives))
    assert failure.noticed_as(LauncherFailure.GRACE_EXCEEDED)
    assert failure.traits == FailureTraits()


def test_many_odd_ranks_are_not_all_described():
    failure = explain(suspect([view(rank, "data", 99.0) for rank in range(20)], HangConfig()), Evidence())
    assert "no rank is waiting for another" in failure.message
    assert failure.message.endswith("12 more")
    assert len(failure.traceback.splitlines()) == 8 + 1  # and the setting


# with real processes

RANK = """
import re, sys, threading, time
from pathlib import Path
from lockstep.launch.hangs import stacks
from lockstep.launch.frames import line_of
from lockstep.runtime.heartbeat import Heartbeat
folder, kind = Path(sys.argv[1]), sys.argv[2]
heartbeat = Heartbeat(folder / f"heartbeat-{sys.argv[3]}")
heartbeat.beat("data", 7)
if kind == "deaf":
    print("ready", flush=True)
    time.sleep(600)
stacks.register(folder / f"stacks-{sys.argv[3]}")
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
def sleeps():
    print("ready", flush=True)
    time.sleep(600)
def holds_the_gil():
    print("ready", flush=True)
    re.match("(a+)+$", "a" * 60 + "b")
{"sleeps": sleeps, "busy": holds_the_gil}[kind]()
"""


@pytest.fixture
def ranks(tmp_path):
    """One sleeps, one holds the GIL in C, one has not registered yet, one is stopped."""
    kinds = ["sleeps", "busy", "deaf", "sleeps"]
    started = []
    for rank, kind in enumerate(kinds):
        command = [sys.executable, "-c", RANK, str(tmp_path), kind, str(rank)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
    for process in started:
        assert process.stdout.readline() == b"ready\n"
    os.kill(started[3].pid, signal.SIGSTOP)
    os.waitpid(started[3].pid, os.WUNTRACED)
    yield started
    for process in started:
        process.kill()
        process.communicate()


LOADERS = """
import os, sys, time
from pathlib import Path
from lockstep.launch.hangs import stacks
stacks.register(Path(sys.argv[1]) / "stacks-0")
def reads_a_sample():
    os.write(1, b"ready\\n"); time.sleep(600)
def waits_for_a_batch():
    os.write(1, b"ready\\n"); time.sleep(600)
if os.fork() == 0:
    reads_a_sample()
waits_for_a_batch()
"""


def test_loader_processes_show_their_stacks(tmp_path):
    command = [sys.executable, "-c", LOADERS, str(tmp_path)]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert [rank.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
        (worker,) = worker_pids(rank.pid)
        text = collect(tmp_path, {0: rank.pid}, timeout=60.0)[0]
    finally:
        os.killpg(rank.pid, signal.SIGKILL)
        rank.communicate()
    assert line_of(main_thread(text)).endswith("waits_for_a_batch")
    assert line_of(workers(text)[worker]).endswith("reads_a_sample")
    waiting = suspect([view(0, "data", 99.0)], HangConfig())
    assert f"worker {worker} is at: <string>:7 reads_a_sample" in explain(waiting, Evidence({0: text})).traceback


FIRST_BATCH = """
import os, sys, time
from pathlib import Path
import torch
from lockstep.config import DataConfig
from lockstep.data.dataset_source import SourceOptions
from lockstep.data.sources import open_source
from lockstep.launch.hangs import stacks
from lockstep.runtime.world import World
class Deadlocked:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        os.write(1, b"ready\\n"); time.sleep(600)
stacks.register(Path(sys.argv[1]) / "stacks-0")
calls = dict.fromkeys(("gather_states", "log_event", "beat", "check_state"), print)
options = SourceOptions(4, 4, "short", DataConfig(workers=1), 0, World(), torch.device("cpu"), **calls)
next(iter(open_source(Deadlocked(), list, options).take().micro_batches))
"""


def test_a_loader_that_deadlocks_at_the_first_batch_shows_its_stack(tmp_path):
    # The first batch is read in the phase build, of which all but the reading of data needs no worker.
    reading, writing = os.pipe()
    words = ("-c", FIRST_BATCH, str(tmp_path))
    rank = preloaded.start_python(*words, env=os.environ, cwd=tmp_path, stdout=writing, stderr=None, spares=0)
    os.close(writing)
    try:
        with open(reading, "rb") as said:
            assert said.readline() == b"ready\n"
        (worker,) = worker_pids(rank.pid)
        text = collect(tmp_path, {0: rank.pid}, timeout=60.0)[0]
    finally:
        os.killpg(rank.pid, signal.SIGKILL)
        rank.wait(60)
    building = suspect([view(0, "build", 2000.0)], HangConfig())
    told = explain(building, Evidence({0: text})).traceback
    assert f"worker {worker} is at: <string>:14 __getitem__" in told

    # Elsewhere in that phase the rank waits for no worker.
    of_worker, end, _ = text.partition(_WORKER_END)
    elsewhere = f"{of_worker}{end}\n" + stack(("/u/model.py", 3, "model"))
    assert worker in workers(elsewhere)
    assert "__getitem__" not in explain(building, Evidence({0: elsewhere})).traceback


def test_stacks_of_real_processes(ranks, tmp_path):
    (tmp_path / "stacks-0").write_text("an older dump\n")
    pids = {rank: process.pid for rank, process in enumerate(ranks)}
    begin = time.monotonic()
    stacks = collect(tmp_path, pids, timeout=120.0)
    assert time.monotonic() - begin < 119.0  # it does not wait for ranks that cannot answer
    places = {line_of(frames).split()[-1]: members for frames, members in group(stacks)}
    assert places == {"sleeps": [0], "holds_the_gil": [1]}
    assert "older" not in stacks[0]
    assert stacks[2] == stacks[3] == ""
    assert ranks[2].poll() is None  # it would have died of the signal


def test_views_of_real_processes(ranks, tmp_path):
    for rank, state in ((0, "S"), (1, "R")):
        while view_of(rank, "here", ranks[rank].pid, tmp_path).state != state:
            time.sleep(0.01)  # it has only just said that it is ready
    views = [view_of(rank, "here", process.pid, tmp_path) for rank, process in enumerate(ranks)]
    assert [seen.phase for seen in views] == ["data"] * 4
    assert [seen.step for seen in views] == [7] * 4
    assert views[1].state == "R"
    assert views[3].state == "T"
    assert typed_json.parse(RankView, json.loads(json.dumps(asdict(views[0])))) == views[0]
    ranks[0].kill()
    ranks[0].wait()
    assert view_of(0, "here", ranks[0].pid, tmp_path).state == ""


@pytest.mark.parametrize(
    "wrong", [{"age": "8"}, {"rank": None}, {"longest": {"data": "1"}}, {"longest": []}, {"more": 1}, {"phase": 3}]
)
def test_a_view_that_came_damaged_is_refused(wrong):
    with pytest.raises(ValueError, match=r"not a valid RankView|instead of a value of type"):
        typed_json.parse(RankView, asdict(view(0, "data", 8.0)) | wrong)
    with pytest.raises(ValueError, match="not a valid RankView"):
        typed_json.parse(RankView, {"rank": 0})


def test_nothing_is_known_of_ranks_whose_folder_is_gone(tmp_path):
    assert view_of(0, "node-a", os.getpid(), tmp_path) is not None
    assert view_of(0, "node-a", os.getpid(), tmp_path / "gone") is None


def test_a_process_without_a_heartbeat_is_in_its_start(tmp_path):
    process = subprocess.Popen(["sleep", "60"])
    time.sleep(0.3)
    seen = view_of(5, "here", process.pid, tmp_path)
    assert (seen.phase, seen.beats) == ("start", 0)
    assert 0.1 < seen.age < 60.0
    process.kill()
    process.wait()
    assert view_of(5, "here", process.pid, tmp_path) is None


def test_a_heartbeat_of_our_own_is_judged(tmp_path):
    """The two sides fit: what a heartbeat learns is what the limits need."""
    heartbeat = Heartbeat(tmp_path / "heartbeat-0")
    for step in range(1, 5):
        for phase in ("data", "compute", "all-reduce", "update"):
            heartbeat.beat(phase, step)
    heartbeat.beat("compute")
    seen = view_of(0, "here", os.getpid(), tmp_path)
    assert timeout_of(seen, Peers([seen]), HangConfig()).seconds == max(5.0, 5.0 * max(seen.longest.values()))
    while not (suspicion := suspect([view_of(0, "here", os.getpid(), tmp_path)], HangConfig(least=0.005))):
        time.sleep(0.01)  # at the latest after five times the longest beat, whatever that was
    assert suspicion.awaited == [0]


def test_a_rank_that_visibly_works_gets_more_time():
    """One long batch is no hang; a rank that sleeps while the others wait for it is."""
    views = [view(0, "all-reduce", 20.0), view(1, "compute", 20.0, state="R")]
    assert suspect(views, HangConfig()) is None
    assert suspect([views[0], view(1, "compute", 20.0, state="S")], HangConfig()).awaited == [1]
    assert suspect([view(0, "all-reduce", 70.0), view(1, "compute", 70.0, state="R")], HangConfig()).awaited == [1]
    assert suspect([view(0, "compute", 20.0, state="S"), view(1, "compute", 20.0, state="S")], HangConfig()) is None
