"""Which CPUs share a core, and which rank gets which cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.bench import cores
from lockstep.bench.cores import Cores, alike, find_cores, judge_probe, paired, place, probe_sets
from lockstep.bench.kinds import siblings as kind
from lockstep.bench.options import BenchOptions, parse_worlds
from lockstep.bench.ranks import siblings as ranks


@pytest.fixture(autouse=True)
def sixteen_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 16 CPUs, no quota and no GPU."""
    monkeypatch.setattr(cores, "available_cores", lambda: 16)
    monkeypatch.setattr(cores, "visible_gpus", lambda: 0)
    monkeypatch.setattr(cores.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(cores.os, "sched_setaffinity", lambda *_: None, raising=False)


def system(root: Path, groups: list[list[int]], flags: str = "fpu avx2") -> Cores:
    """What the files of a machine with these cores say."""
    for group in groups:
        for cpu in group:
            folder = root / f"cpu{cpu}" / "topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(",".join(map(str, group)))

    (root / "cpuinfo").write_text(f"flags : {flags}\n")
    return find_cores(allowed=[cpu for group in groups for cpu in group], root=root, cpuinfo=root / "cpuinfo")


def test_hardware_threads_of_one_core_are_one_group(tmp_path: Path) -> None:
    found = system(tmp_path, [[0, 2], [1, 3]])
    assert (found.cpus, found.threads, found.doubt) == ([[0, 2], [1, 3]], 2, "")
    assert str(found) == "2 cores with 2 hardware threads each (CPUs 0+2, 1+3), as the system says"


def test_a_system_that_may_hide_siblings_is_doubted(tmp_path: Path) -> None:
    (tmp_path / "virtual").mkdir()
    (tmp_path / "real").mkdir()
    singles = [[0], [1], [2], [3]]
    assert "--siblings measure" in system(tmp_path / "virtual", singles, "fpu hypervisor").doubt
    assert system(tmp_path / "real", singles).doubt == ""

    # A virtual machine that shows siblings hides nothing, and one CPU has none.
    (tmp_path / "open").mkdir()
    (tmp_path / "single").mkdir()
    assert system(tmp_path / "open", [[0, 1], [2, 3]], "hypervisor").doubt == ""
    assert system(tmp_path / "single", [[0]], "hypervisor").doubt == ""

    # Without the files, every CPU counts as a core, and nobody knows.
    unknown = find_cores(allowed=[7, 8], root=tmp_path / "nowhere", cpuinfo=tmp_path / "nowhere")
    assert unknown.cpus == [[7], [8]]
    assert "does not say which CPUs share a core" in unknown.doubt

    # What the user says is not doubted.
    assert find_cores("none", allowed=[0, 1]).doubt == ""


@pytest.mark.parametrize(
    ("siblings", "allowed", "total", "groups"),
    [
        ("none", range(3), 3, [[0], [1], [2]]),
        ("adjacent", range(6), 6, [[0, 1], [2, 3], [4, 5]]),
        ("halves", range(6), 6, [[0, 3], [1, 4], [2, 5]]),
        # Odd numbers leave one CPU alone.
        ("adjacent", range(5), 5, [[0, 1], [2, 3], [4]]),
        ("halves", range(5), 5, [[0, 3], [1, 4], [2]]),
        # CPUs are numbered over the whole machine, whichever of them this process may use.
        ("halves", [0, 1, 8, 10], 16, [[0, 8], [1], [10]]),
        ("adjacent", [1, 2, 3], 16, [[1], [2, 3]]),
    ],
)
def test_pairs_of_cpus(siblings: str, allowed: list[int], total: int, groups: list[list[int]]) -> None:
    assert paired(allowed, siblings, total) == groups


def test_all_cores_have_as_many_hardware_threads() -> None:
    assert alike([[0, 8], [1], [10]]) == [[0], [1], [10]]
    assert find_cores("halves", allowed=[0, 1, 8]).cpus == [[0], [1]]


@pytest.mark.parametrize("total", [2, 3, 4, 6, 8, 10, 16, 64])
def test_a_probe_keeps_pairs_of_one_kind_busy_and_none_of_the_other(total: int) -> None:
    sets = probe_sets(range(total), total)
    assert "adjacent" in sets
    for way, busy in sets.items():
        assert {len(core) for core in paired(busy, way, total)} == {2}
        if total > 2:
            (other,) = {"adjacent", "halves"} - {way}
            assert {len(core) for core in paired(busy, other, total)} == {1}


def test_a_probe_has_no_pairs_that_the_process_may_not_use() -> None:
    assert probe_sets([0, 1, 2, 3], 16) == {"adjacent": [0, 1, 2, 3]}
    assert probe_sets([0, 3, 6], 16) == {}
    assert probe_sets([1], 2) == {}


def test_a_rank_of_the_probe_computes_only_if_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    rank = ranks.measure({"seconds": 0.01})
    assert next(rank) is None
    assert rank.send("0,10,11") is None
    assert (rank.send("0,1") or 0.0) > 0


class TwoOnOneCore:
    """A pool of four CPUs of which 0 and 2, and 1 and 3, share a core."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> TwoOnOneCore:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self, measure: str, world: int, arguments: dict[str, float]) -> TwoOnOneCore:
        return self

    def ready(self) -> None: ...

    def ask(self, command: str) -> list[float | None]:
        busy = set(map(int, command.split(",")))
        rate = {cpu: 1.0 if (cpu + 2) % 4 not in busy else 0.5 for cpu in busy}
        return [rate.get(cpu) for cpu in range(4)]


def test_a_probe_finds_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "Pool", TwoOnOneCore)
    monkeypatch.setattr(kind, "allowed_cpus", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(cores.os, "cpu_count", lambda: 4)
    found, (section,) = kind.cores_of("measure", lambda _: None)
    assert found.cpus == [[0, 2], [1, 3]]
    assert [row["rate"]["median"] for row in section.rows] == [1.0, 0.5, 0.5]
    assert "2 cores with 2 hardware threads each (CPUs 0+2, 1+3), as measured (halves)." in section.notes

    # What is not measured has no section.
    assert kind.cores_of("none", lambda _: None)[1] == []


EACH = [[cpu] for cpu in range(16)]
FIRST_HALF = [[cpu] for cpu in range(8)]


@pytest.mark.parametrize(
    ("rates", "groups", "known"),
    [
        ({"adjacent": 0.99, "halves": 0.52, "all": 0.5}, [[cpu, cpu + 8] for cpu in range(8)], True),
        ({"adjacent": 0.54, "halves": 1.02, "all": 0.5}, [[cpu, cpu + 1] for cpu in range(0, 16, 2)], True),
        # All CPUs busy have lower clock rates, which is no reason to count half of them.
        ({"adjacent": 0.93, "halves": 0.95, "all": 0.83}, EACH, True),
        # No pair is slow, but all together are: the host moves them from core to core.
        ({"adjacent": 0.97, "halves": 0.96, "all": 0.55}, FIRST_HALF, True),
        # Everything is slow: other processes, or four threads in a core.
        ({"adjacent": 0.51, "halves": 0.55, "all": 0.3}, EACH, False),
    ],
)
def test_rates_say_which_cpus_share_a_core(rates: dict[str, float], groups: list[list[int]], known: bool) -> None:
    found = judge_probe(range(16), rates, 16)
    assert found.cpus == groups
    assert (found.doubt == "") == known


def test_two_cpus_may_be_one_core() -> None:
    assert judge_probe([0, 1], {"adjacent": 0.5, "all": 0.5}, 2).cpus == [[0, 1]]
    assert judge_probe([0, 1], {"adjacent": 0.95, "all": 0.95}, 2).cpus == [[0], [1]]


@pytest.mark.parametrize("siblings", ["halves", "adjacent"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_a_rank_has_the_same_hardware_at_every_number_of_ranks(siblings: str, world: int) -> None:
    found = find_cores(siblings, allowed=range(16))
    placed = place(world, 1, found)
    assert placed.cpus == found.cpus[:world]
    assert placed.shared == ""
    said = f"each rank has 1 core of its own (2 hardware threads, --siblings {siblings}) and computes with 1 thread"
    assert str(placed) == said


def test_ranks_share_cores_if_they_must() -> None:
    four = find_cores("halves", allowed=[0, 1, 8, 9])
    assert place(2, 1, four).cpus == [[0, 8], [1, 9]]
    assert place(1, 2, four).cpus == [[0, 1, 8, 9]]
    assert place(3, 1, four).cpus == [[0, 8], [1, 9], [0, 8]]
    assert str(place(3, 1, four)) == place(3, 1, four).shared == "3 ranks of 1 core share 2 cores"
    assert place(2, 2, four).shared == "2 ranks of 2 cores share 2 cores"
    assert str(place(4, 2, find_cores("none", allowed=range(8)))) == "each rank has 2 cores of its own"


def test_a_quota_counts_as_fewer_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda: 2)
    found = find_cores("none", allowed=range(16))
    assert found.usable == 2
    assert place(4, 1, found).shared == "4 ranks of 1 core share 2 cores"


def test_with_gpus_it_is_the_gpus_that_count() -> None:
    doubted = Cores([[0], [1]], "", doubt="nobody knows")
    assert (place(2, 1, doubted, gpus=2).shared, place(2, 1, doubted, gpus=2).doubt) == ("", "")
    assert place(3, 1, doubted, gpus=2).shared == "3 ranks share 2 GPUs"
    assert place(2, 1, doubted, gpus=0).doubt == "nobody knows"


def test_a_system_without_affinities_cannot_give_ranks_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cores.os, "sched_setaffinity")
    assert place(1, 1, Cores([[0]], "")).shared == "this system cannot give ranks cores of their own"


def test_options_count_physical_cores() -> None:
    found = find_cores("halves", allowed=range(16))
    assert BenchOptions(worlds=[1, 2, 4, 8], cores=found).cores_per_rank == 1
    assert BenchOptions(worlds=[1, 2], cores=found).cores_per_rank == 4
    assert BenchOptions(worlds=[8], cores=find_cores("none", allowed=range(16))).cores_per_rank == 2
    assert parse_worlds(None, 4) == [1, 2, 4]
