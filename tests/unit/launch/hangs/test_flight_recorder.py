"""What torch's flight recorder says about ranks that wait for each other."""

import os
import shutil
import time
from pathlib import Path

import pytest

import preloaded
from lockstep.launch.hangs import flight_recorder


def analyse(dumps):
    return flight_recorder.analyse(dumps).lines


def entry(number, op="all_reduce", sizes=(4,), dtype="Float", done=True, group=("0", "default_pg")):
    return {
        "collective_seq_id": number,
        "profiling_name": f"gloo:{op}",
        "input_sizes": [list(sizes)],
        "input_dtypes": [dtype],
        "process_group": list(group),
        "is_p2p": False,
        "retired": done,
        "state": "scheduled",
    }


def test_nothing_to_say_when_all_is_done():
    assert analyse({0: [entry(1), entry(2)], 1: [entry(1), entry(2)]}) == []
    assert analyse({}) == []


def test_a_rank_that_never_entered():
    line = analyse({0: [entry(1), entry(2, done=False)], 1: [entry(1)], 2: [entry(1), entry(2, done=False)]})
    assert line == [
        "process group default_pg: ranks 0, 2 wait in collective 2, all_reduce of [4] Float; "
        "rank 1 never entered it (its last was 1, all_reduce of [4] Float)"
    ]


def test_a_rank_that_is_through_does_not_wait():
    """The source of a broadcast need not stay."""
    source, waiting = entry(1, "broadcast"), entry(1, "broadcast", done=False)
    (line,) = analyse({0: [source], 1: [], 2: [waiting]})
    assert "rank 2 waits in collective 1" in line


def test_a_rank_that_entered_nothing_at_all():
    (line,) = analyse({0: [entry(1, done=False)], 1: []})
    assert line.endswith("rank 1 never entered it (it entered none)")


@pytest.mark.parametrize("other", [{"op": "broadcast"}, {"sizes": (5,)}, {"dtype": "Long"}])
def test_ranks_that_did_different_things(other):
    (line,) = analyse(
        {0: [entry(1), entry(2, done=False)], 1: [entry(1), entry(2, done=False, **other)], 2: [entry(1)]}
    )
    assert "collective 2 differs: rank 0 did all_reduce of [4] Float; rank 1 did" in line


def test_a_mismatch_is_a_deadlock_only_while_a_rank_waits_and_only_among_all_ranks():
    """Groups of one name may have different members, each with its own sizes."""

    def deadlock(done, group=("0", "default_pg")):
        pair = {0: [entry(2, done=done, group=group)], 1: [entry(2, "barrier", done=done, group=group)]}
        return flight_recorder.analyse(pair).deadlock

    assert deadlock(done=False)
    assert not deadlock(done=True)
    assert not deadlock(done=False, group=("1", "tensor"))


def test_the_earliest_difference_is_the_one_reported():
    """Ranks whose order is swapped get garbage from gloo, and hang only much later."""
    a, b = entry(1, sizes=(1,)), entry(1, sizes=(2,))
    (line,) = analyse({0: [a, entry(2, done=False)], 1: [b]})
    assert "collective 1 differs" in line


def test_sizes_that_may_differ():
    assert analyse({0: [entry(1, "gather", (4,))], 1: [entry(1, "gather", (5,))]}) == []


def test_all_inside_and_no_end():
    (line,) = analyse({0: [entry(1, done=False)], 1: [entry(1, done=False)]})
    assert "all ranks have entered collective 1" in line


def test_process_groups_are_apart():
    mine, pair = ("0", "default_pg"), ("1", "tensor")
    lines = analyse(
        {
            0: [entry(1, group=mine), entry(1, done=False, group=pair)],
            1: [entry(1, group=mine), entry(1, group=pair), entry(2, done=False, group=pair)],
            2: [entry(1, group=mine)],
        }
    )
    assert len(lines) == 1
    assert lines[0].startswith("process group tensor")
    assert "rank 2" not in lines[0]


def test_who_is_late_is_not_one_that_waits_elsewhere():
    """Rank 0 waits for rank 1 in the pair's collective, and rank 1 for rank 2 in that of all."""
    pair = ("1", "tensor")
    dumps = {
        0: [entry(1, group=pair), entry(2, done=False, group=pair), entry(1)],
        1: [entry(1, group=pair), entry(1), entry(2, done=False)],
        2: [entry(1)],
    }
    found = flight_recorder.analyse(dumps)
    assert (found.late, found.deadlock, found.entered) == ([2], False, {0: 1, 1: 2, 2: 1})


def test_the_environment_keeps_the_dumps_with_the_logs(tmp_path):
    values = flight_recorder.environment(tmp_path)
    assert int(values["TORCH_FR_BUFFER_SIZE"]) >= 2000
    assert values["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert Path(values["TORCH_FR_DUMP_TEMP_FILE"]).parent == tmp_path


RANK = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from lockstep.launch.hangs import flight_recorder
folder, rank, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
flight_recorder.serve(folder, rank)
store = dist.FileStore(str(folder / "store"), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
numbers = torch.ones(4)
dist.all_reduce(numbers)
print("ready", flush=True)
if rank == 0:
    dist.all_reduce(numbers)
elif kind == "missing":
    time.sleep(600)
else:
    dist.broadcast(numbers, src=0)
time.sleep(600)
"""


@pytest.fixture
def pair(tmp_path, request):
    started = []
    for rank in (0, 1):
        with (tmp_path / f"said-{rank}").open("wb") as output:
            words = ("-c", RANK, str(tmp_path), str(rank), request.param)
            started.append(preloaded.start_python(*words, env=os.environ, cwd=tmp_path, stdout=output, stderr=output))
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"said-{rank}").read_text().endswith("ready\n") for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield tmp_path
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("missing", "rank 0 waits in collective 2, all_reduce of [4] Float; rank 1 never entered it"),
        ("ops", "collective 2 differs: rank 0 did all_reduce of [4] Float; rank 1 did broadcast of [4] Float"),
    ],
    indirect=["pair"],
)
def test_real_ranks_that_hang_in_gloo(pair, expected):
    first = flight_recorder.collect(pair, [0, 1], timeout=120.0)
    assert len(first) == 2
    (line,) = analyse(flight_recorder.collect(pair, [0, 1], timeout=120.0))  # asked twice, answered twice
    assert expected in line


def test_a_rank_that_does_not_answer_is_missing(tmp_path):
    assert flight_recorder.collect(tmp_path, [0], timeout=0.1) == {}


@pytest.mark.parametrize("error", [OSError("full"), ValueError("bad dump"), RuntimeError("no recorder")])
def test_a_rank_that_cannot_answer_once_answers_the_next_request(tmp_path, monkeypatch, error):
    outcomes = [error, []]

    def recorded():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(flight_recorder, "recorded", recorded)
    monkeypatch.setattr(flight_recorder, "REQUEST_POLL_S", 0.02)
    folder = tmp_path / "attempt"
    folder.mkdir()
    flight_recorder.serve(folder, 0)
    while len(outcomes) == 2:  # on a busy machine the thread may need longer for the first request
        assert flight_recorder.collect(folder, [0], timeout=0.3) == {}
    assert flight_recorder.collect(folder, [0], timeout=120.0) == {0: []}
    shutil.rmtree(folder)  # ends the thread
