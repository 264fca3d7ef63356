"""Counts, addresses, and what nodes must agree on."""

from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.launch import job as module
from lockstep.launch.job import Bounds, Job, parse_address, parse_nnodes, parse_nproc
from lockstep.launch.validation import refusal_of
from lockstep.launch.wire.messages import Hello
from lockstep.runtime.host.resources import visible_gpus
from saved import newest_step


@pytest.mark.parametrize("asked", ["0", "-1", "two", "1.5", "1..", "..2", "4..2", "0..2", "1...2", "", "²"])
def test_wrong_process_counts_are_refused(asked):
    with pytest.raises(UserError, match="--nproc"):
        parse_nproc(asked)


@pytest.mark.parametrize("asked", ["0", "two", "2:1", "1...2", ":2", "0:2"])
def test_wrong_node_counts_are_refused(asked):
    with pytest.raises(UserError, match="--nnodes"):
        parse_nnodes(asked)


@pytest.mark.parametrize("asked", ["host", "host:", ":1", "host:0", "host:65536", "host:http"])
def test_wrong_addresses_are_refused(asked):
    with pytest.raises(UserError, match="--join"):
        parse_address(asked)


def test_nodes_may_meet_at_several_addresses():
    def addresses(join: str) -> list[str]:
        return Job({}, Path("runs/a"), Bounds(1, 1), join=join).addresses

    assert addresses("10.0.0.1:29400") == ["10.0.0.1:29400"]
    assert addresses("10.0.0.1:29400, [::1]:29401") == ["10.0.0.1:29400", "[::1]:29401"]
    with pytest.raises(UserError, match="--join host is not an address"):
        addresses("10.0.0.1:29400,host")


def test_counts(monkeypatch):
    assert parse_nproc(None) == Bounds(1, 1)
    assert parse_nproc(3) == parse_nproc("3") == Bounds(3, 3)
    assert parse_nnodes(None) == Bounds(1, 1)
    assert parse_nnodes("2") == Bounds(2, 2)
    assert parse_nnodes("1:4") == parse_nnodes("1..4") == parse_nnodes(str(Bounds(1, 4))) == Bounds(1, 4)
    assert parse_address("10.0.0.1:29400") == ("10.0.0.1", 29400)
    assert parse_address("[::1]:29400") == ("::1", 29400)
    for gpus, cores, first in [(4, 2, 4), (0, 2, 2), (16, 2, 8), (0, 1, 1)]:
        monkeypatch.setattr(module, "visible_gpus", lambda gpus=gpus: gpus)
        monkeypatch.setattr(module, "available_cores", lambda cores=cores: cores)
        assert parse_nproc("1..8") == Bounds(1, 8, first)
        assert parse_nproc("auto").initial == (gpus or min(2, cores))
    assert parse_nproc("4..8").initial == 4  # one core, and at least four asked for


def test_gpus_are_counted_without_torch():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0


def test_nodes_agree_on_everything_but_paths_and_the_run_folder():
    def job(run_dir: str = "runs/a", **spec) -> Job:
        layers = [("command line", {"steps": 3})]
        spec = {"target": "x", "layers": layers, "path": ["/a"], **spec}
        return Job(spec, Path(run_dir), Bounds(1, 1), run_dir_was_chosen=True, resume_command=f"with {run_dir}")

    assert job().identity == job(path=["/b"], run_dir="runs/b").identity
    assert job().identity != job(target="y").identity
    assert job().identity != job(layers=[("command line", {"steps": 4})]).identity


def test_a_run_folder_that_is_typed_on_one_node_only_is_refused():
    """Ranks would read it from their settings on that node, and from the launcher on the others."""
    typed = Job({"layers": [("command line", {"steps": 3, "run_dir": "runs/a"})]}, Path("runs/a"), Bounds(1, 1))
    chosen = Job({"layers": [("command line", {"steps": 3})]}, Path("runs/a"), Bounds(1, 1), run_dir_was_chosen=True)
    for ours, theirs in ((typed, chosen), (chosen, typed)):
        refused = refusal_of(Hello("host-b", Bounds(1, 1), theirs.identity), ours, full=False)
        assert refused is not None
        assert "'run_dir': 'runs/a'" in refused.found


def test_ranks_get_the_run_folder_from_the_launcher_only_if_the_user_has_named_none():
    spec = {"layers": []}
    assert Job(spec, Path("runs/a"), Bounds(1, 1)).spec_for_ranks == spec
    chosen = Job(spec, Path("runs/a"), Bounds(1, 1), run_dir_was_chosen=True)
    assert chosen.spec_for_ranks == {"layers": [], "run_dir": "runs/a"}


@pytest.mark.parametrize(
    ("text", "step"),
    [("step-00000040\n", 40), ("step-0", None), ("", None), ("step-x", None), ("../step-00000004", None)],
)
def test_the_checkpoint_to_go_back_to_is_read_from_a_text_file(tmp_path, text, step):
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step-00000050").mkdir(parents=True)
    (checkpoints / "latest").write_text("step-00000050")
    (tmp_path / ".going-back").write_text(text)
    assert newest_step(checkpoints) == step
    (tmp_path / ".going-back").unlink()
    assert newest_step(checkpoints) == 50


def test_the_newest_checkpoint_is_found_in_the_folder(tmp_path):
    """A kill between a commit and its last write leaves the text file stale."""
    checkpoints = tmp_path / "checkpoints"
    assert newest_step(checkpoints) is None
    checkpoints.mkdir()
    (checkpoints / "latest").write_text("step-00000040\n")
    assert newest_step(checkpoints) is None
    others = ["step-00000090.tmp-abc", "step-00000080.damaged", "step-000000095", "step-70", "old"]
    for name in ["step-00000040", "step-00000050", *others]:
        (checkpoints / name).mkdir()
    (checkpoints / "step-00000099").touch()
    assert newest_step(checkpoints) == 50
    (checkpoints / "step-100000000").mkdir()
    assert newest_step(checkpoints) == 100_000_000
