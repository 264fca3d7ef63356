"""The number of processes and the device of each frozen model, by the GPUs of a machine; the scripts of latent_wire."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import preloaded
from lockstep.classic import ElasticGPUConfig
from lockstep.classic.elastic_gpu_config import GPU
from lockstep.classic.train_script import main
from lockstep.errors import UserError
from lockstep.recipes.latent_wire.reader import Reader, ReaderShape
from lockstep.runtime.context import join

ROOT = Path(__file__).parent.parent.parent
SYSTEM = ROOT / "systems" / "latent_wire"
BIN = str(Path(sys.executable).parent)
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "PATH": f"{BIN}:{os.environ['PATH']}"}


def of(count, memory, name="any", **more):
    return ElasticGPUConfig([GPU(name, memory)] * count, **more)


# ---- the plan -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "large", "small"),  # GPUs of 80 and of 40 GB; the documented table, and on to 8
    [
        (1, ("single", 1), ("single", 1)),
        (2, ("ddp", 2), ("split", 1)),
        (3, ("hybrid", 2), ("hybrid", 2)),
        (4, ("ddp", 4), ("hybrid", 2)),
        (5, ("ddp", 4), ("hybrid", 2)),
        (6, ("ddp", 4), ("hybrid", 2)),
        (7, ("ddp", 4), ("hybrid", 2)),
        (8, ("ddp", 8), ("hybrid", 4)),
    ],
)
def test_the_documented_strategies(count, large, small):
    for memory, expected in ((79.1, large), (39.4, small)):
        plan = of(count, memory).plan()
        assert (plan.strategy, plan.processes) == expected
        assert plan.effective_batch == 64  # whatever the hardware


def test_memory_decides_and_no_name():
    """An unknown name must not fall into the branch of a smaller GPU."""
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA H200", "")
    assert len({of(2, 79.1, name).plan() for name in names}) == 1
    assert of(2, 139.0, "NVIDIA H200").plan().strategy == "ddp"
    mixed = ElasticGPUConfig([GPU("", 79.1), GPU("", 39.4)])
    assert mixed.plan() == of(2, 39.4).plan()  # the smaller one must hold its part too


def test_more_memory_means_larger_micro_batches_and_fewer_of_them():
    small, large = of(1, 39.4).plan(), of(1, 79.1).plan()
    assert (small.batch_size, small.grad_accum) == (16, 4)  # 5.4 GiB are left of 37.4
    assert (large.batch_size, large.grad_accum) == (64, 1)
    assert of(2, 79.1, base_batch_size=32, per_gpu=True).plan().effective_batch == 64
    assert of(3, 79.1, base_batch_size=32, per_gpu=True).plan().strategy == "ddp"


def test_the_device_of_the_last_reader():
    homes = {
        (2, 39.4): ["cuda:+0", "cuda:1"],
        (3, 39.4): ["cuda:+0", "cuda:2"],
        (4, 39.4): ["cuda:+0", "cuda:+2"],
    }
    for (count, memory), expected in homes.items():
        config = of(count, memory)
        assert config.settings(config.plan())["task.reader_homes"] == expected
    config = of(4, 79.1)
    assert config.settings(config.plan()) == {"micro_batch": 16}
    unknown = of(4, 79.1, sample_gb=None)
    assert unknown.settings(unknown.plan()) == {"micro_batch": "auto"}


def test_a_device_relative_to_the_ranks_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(Reader, "to", lambda self, device: self)
    assert Reader(9, ReaderShape("words", 16, 1, 2)).freeze("cuda:+2").fixed_device == "cuda:3"


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match="use two GPUs"):
        of(1, 24.0).plan()
    with pytest.raises(UserError, match="more memory"):
        of(4, 20.0).plan()
    with pytest.raises(UserError, match="strategy=fsdp"):
        of(4, 39.4, reader_gb=(), trained_gb=60.0).plan()


def test_ranks_that_were_started_are_neither_invented_nor_ignored():
    assert of(4, 79.1).plan(processes=2).processes == 2
    assert of(1, 139.0).plan(processes=2).strategy == "ddp"  # two on one GPU
    assert of(0, 0.0).plan(processes=2).processes == 2
    assert of(0, 0.0).plan().processes == 1
    with pytest.raises(UserError, match="start 1 process, with two"):
        of(2, 39.4).plan(processes=2)
    with pytest.raises(UserError, match="global_batch=66"):
        of(3, 79.1).plan(processes=3)


# ---- the command --------------------------------------------------------------------------------------------

READERS, SPLIT = ["--elastic_reader_gb", "25", "25"], ["cuda:+0", "cuda:1"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--elastic_gpu"], (2, {"micro_batch": "auto"})),
        (["--elastic_gpu", "--elastic_sample_gb", "4"], (2, {"micro_batch": 8})),
        (
            ["--elastic_gpu", "--elastic_reader_gb", "50", "50"],
            (1, {"task.reader_homes": SPLIT, "micro_batch": "auto"}),
        ),
        (["--elastic_gpu", *READERS], (2, {"micro_batch": "auto"})),
        (
            ["--elastic_gpu", *READERS, "--elastic_target_util", "0.5"],
            (1, {"task.reader_homes": SPLIT, "micro_batch": "auto"}),
        ),
        (
            ["--elastic_gpu", *READERS, "--elastic_trained_gb", "20"],
            (1, {"task.reader_homes": SPLIT, "micro_batch": "auto"}),
        ),
        (["--batch_size", "4", "--grad_accum_steps", "3"], (None, {"local_batch": 12, "micro_batch": 4})),
        (["--save_every", "7", "--auto_resume"], (None, {"checkpoint.every": 7, "resume": "auto"})),
        (
            ["--local-rank=1", "--save_every", "7"],
            (None, {"checkpoint.every": 7}),
        ),  # as torch.distributed.launch adds it
        (["--local_rank", "1", "micro_batch=2"], (None, {"micro_batch": 2})),
        (["--elastic_gpu", "micro_batch=2"], (2, {"micro_batch": 2})),  # typed words are stronger
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_become_settings(words, expected, monkeypatch):
    called = []
    monkeypatch.setattr(
        "lockstep.api.train", lambda target, layers, command, nproc: called.append((layers, nproc)) or 0
    )
    monkeypatch.setattr("lockstep.classic.elastic_gpu_config.detected", lambda: [GPU("any", 79.1)] * 2)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert main("latent_wire", [*words, "preset=tiny"], readers=2) == 0
    assert "WORLD_SIZE" not in os.environ  # never made up: a rank that believes in others waits for them
    layers, nproc = called[0]
    merged = {key: value for _, values in layers for key, value in values.items()}
    assert nproc == expected[0]
    assert merged.items() >= expected[1].items()


def test_ranks_of_another_launcher_do_not_try_sizes_out(monkeypatch):
    """That launcher would not start them again with a smaller size."""
    called = []
    monkeypatch.setattr(
        "lockstep.api.train", lambda target, layers, command, nproc: called.append((layers, nproc)) or 0
    )
    monkeypatch.setattr("lockstep.classic.elastic_gpu_config.detected", lambda: [GPU("any", 79.1)] * 2)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert main("latent_wire", ["--elastic_gpu", "preset=tiny"], readers=2) == 0
    layers, nproc = called[0]
    assert nproc is None
    assert not any("micro_batch" in values for _, values in layers)


def test_a_batch_that_the_nodes_cannot_share_is_refused(monkeypatch, capsys):
    """16 samples on three machines of two processes: none of them has a whole number."""
    called = []
    monkeypatch.setattr("lockstep.api.train", lambda target, layers, command, nproc: called.append(layers) or 0)
    monkeypatch.setattr("lockstep.classic.elastic_gpu_config.detected", lambda: [GPU("any", 79.1)] * 2)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "6"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert main("latent_wire", ["--elastic_gpu", "preset=tiny"], readers=2) == 2
    assert "set global_batch=18" in capsys.readouterr().err
    assert main("latent_wire", ["--elastic_gpu", "preset=tiny", "global_batch=18"], readers=2) == 0
    assert "2 x 3 x 1 = 6 samples" in capsys.readouterr().out  # of this machine
    assert len(called) == 1


@pytest.mark.parametrize("words", [["--elastic_sample_gb", "4"], ["--elastic_target_util", "0.5"], READERS])
def test_sizes_without_elastic_gpu_are_refused(words, capsys):
    assert main("latent_wire", words, readers=2) == 2
    assert "add --elastic_gpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch_size", "8", "--grad_accum_steps", "2", "global_batch=64"], "--batch_size and global_batch=64"),
        (["--batch_size", "8", "micro_batch=2"], "--batch_size and micro_batch=2"),
        (["--save_every", "3", "checkpoint.every=7"], "--save_every and checkpoint.every=7"),
        (["--auto_resume", "resume=never"], "--auto_resume and resume=never"),
        (["--auto_resume"], "add run_dir=FOLDER"),
    ],
)
def test_flags_that_would_be_ignored_or_ignore_others_are_refused(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main("pixel_llm", [*words, "preset=tiny"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_accumulation_of_nothing_is_refused(capsys):
    assert main("latent_wire", ["--grad_accum_steps", "3"], readers=2) == 2
    assert "--batch_size N" in capsys.readouterr().err


# ---- the scripts --------------------------------------------------------------------------------------------


def run(folder, *words, **env):
    words = ["bash", *words, "preset=tiny", "evaluate.at_end=false"]
    done = subprocess.run(words, cwd=folder, env=ENV | env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_launch_script_starts_ranks_and_a_slurm_job_resumes(tmp_path, monkeypatch):
    """Started from the system's folder; the run folder of the job exists already, as if it had been requeued."""
    (tmp_path / "bin").mkdir()
    if not preloaded.fresh():
        preloaded.shims(preloaded.server(), tmp_path / "bin")
    stand_in(tmp_path / "bin" / "srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    monkeypatch.setitem(ENV, "PATH", os.pathsep.join([str(tmp_path / "bin"), ENV["PATH"]]))
    (tmp_path / "latentwire").symlink_to(SYSTEM / "latentwire")
    launch, job = SYSTEM / "finalization/launch_ddp_training.sh", SYSTEM / "telepathy/submit_ddp_training.slurm"
    said = run(tmp_path, str(launch), "steps=2", "run_dir=runs/ddp_training_7", NUM_GPUS="2")
    assert "ddp, 2 processes, 2 x 8 x 1 = 16 samples a step" in said
    assert said.count("latent_wire  2 ranks") == 1

    said = run(tmp_path, str(job), "steps=3", SLURM_JOB_ID="7", SLURM_SUBMIT_DIR=str(tmp_path))
    assert "0 GPUs here; single, 1 process" in said
    assert "resumed        at step 2" in said
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", job.read_text(), re.M))
    assert asked["output"].replace("%j", "7") == "runs/ddp_training_7.log"


def stand_in(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_the_launch_script_counts_the_gpus(tmp_path):
    """A script stands in for Python, except where Python counts."""
    stand_in(tmp_path / "python", f'if [ "$1" = -c ]; then exec {sys.executable} "$@"; fi; echo "$@"')
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    env = {key: value for key, value in os.environ.items() if key != "NUM_GPUS"}
    env |= {"PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    script = ["bash", str(SYSTEM / "finalization/launch_ddp_training.sh")]
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "--nproc_per_node=1 " in done.stdout


@pytest.mark.parametrize(("code", "queued"), [(75, "requeue 7\n"), (1, ""), (0, "")])
def test_a_preempted_job_is_requeued(tmp_path, code, queued):
    """Scripts stand in for Slurm: exit code 75 means saved, and not at the end. tests/cluster has the real one."""
    stand_in(tmp_path / "srun", f"echo $@ > asked; exit {code}")
    stand_in(tmp_path / "scontrol", "echo $@ > queued")
    (tmp_path / "queued").touch()
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    job = ["bash", SYSTEM / "telepathy/submit_ddp_training.slurm", "steps=3"]
    assert subprocess.run(job, cwd=tmp_path, env=env, timeout=240).returncode == code
    assert (tmp_path / "queued").read_text() == queued
    asked = (tmp_path / "asked").read_text().split()
    assert {"--auto_resume", "run_dir=runs/ddp_training_7", "steps=3"} <= set(asked)


def check_manager(world, store):
    """A job: `finalization/test_ddp.py`, which prints on rank 0 only."""
    join(world, torch.device("cpu"), store)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(SYSTEM / "finalization" / "test_ddp.py"), run_name="__main__")
    return said.getvalue()


def test_the_check_of_the_manager_alone_and_on_two_ranks(pool):
    (alone,), two = pool.run(check_manager, world=1), pool.run(check_manager, world=2)
    assert "ok: 1 ranks, cpu" in alone
    assert "ok: 2 ranks, cpu, gloo" in two[0]
    assert two[1] == ""
