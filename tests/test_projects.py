"""The projects in examples/projects: the same model on any number of ranks and after a kill, in the fewest lines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import preloaded
from lockstep.testing import Fault, faults_environment
from pages import ROOT

PROJECTS = ROOT / "examples" / "projects"
TARGETS = {
    "classifier": "classifier.py:Classifier",
    "finetune": "finetune.py:Finetune",
    "gan": "gan.py",
    "contrastive": "contrastive.py:Contrastive",
    "packed_stream": "packed_stream.py:PackedStream",
}
PACKAGES = {"classifier": ["tensorboard"], "finetune": ["transformers", "peft", "wandb"]}
PATH = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH, "WANDB_MODE": "offline"}

sys.path.insert(0, str(ROOT / "examples" / "ports"))
lines_of_code = __import__("compare").lines_of_code


def trained(name: str, nproc: int, folder: Path, *settings: str, kill: int | None = None) -> dict[str, torch.Tensor]:
    """Train a project, and return its weights. `kill`: the step in which the last rank is killed, once."""
    for package in PACKAGES.get(name, []):
        pytest.importorskip(package)

    run = folder / f"{nproc}-{kill}"
    run.mkdir()
    environment = dict(ENVIRONMENT)
    if kill is not None:
        environment |= faults_environment(run, Fault("kill", rank=nproc - 1, step=kill))

    words = ["--nproc", str(nproc), f"run_dir={run}/run", "checkpoint.every=4", *settings]
    done = preloaded.run("train", str(PROJECTS / TARGETS[name]), *words, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("restarting" in done.stderr + done.stdout) == (kill is not None)
    return load_file(run / "run" / "model.safetensors")


def far_apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


@pytest.mark.parametrize("name", ["contrastive", "packed_stream"])
def test_two_ranks_and_a_kill_train_the_model_of_one_rank(name, tmp_path):
    quick = ("steps=8", "log.sinks=[]")
    one = trained(name, 1, tmp_path, *quick)
    two = trained(name, 2, tmp_path, *quick, kill=6)
    assert far_apart(one, two) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_number_of_ranks_trains_the_same_model_and_a_kill_changes_no_bit(name, tmp_path):
    weights = {nproc: trained(name, nproc, tmp_path) for nproc in (1, 2, 3)}
    assert far_apart(weights[1], weights[2]) < 2e-4
    assert far_apart(weights[1], weights[3]) < 2e-4
    for nproc in (2, 3):
        assert far_apart(weights[nproc], trained(name, nproc, tmp_path, kill=9)) == 0.0


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_preempted_run_goes_on_with_fewer_ranks(name, tmp_path):
    undisturbed = trained(name, 1, tmp_path)
    run = f"run_dir={tmp_path}/parts"
    leave = faults_environment(tmp_path / "faults", Fault("term", rank=0, step=9))
    words = ("train", str(PROJECTS / TARGETS[name]), "--nproc")
    left = preloaded.run(*words, "3", run, cwd=tmp_path, env=ENVIRONMENT | leave)
    assert left.returncode == 75, left.stdout + left.stderr

    done = preloaded.run(*words, "2", run, "--resume", "auto", cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed" in done.stdout
    assert far_apart(undisturbed, load_file(tmp_path / "parts" / "model.safetensors")) < 2e-4


@pytest.mark.long
def test_the_adapters_are_reloaded_with_from_pretrained(tmp_path):
    weights = trained("finetune", 2, tmp_path)
    words = ("ckpt", "export", f"{tmp_path}/2-None/run", "--format", "hf", "--out", f"{tmp_path}/adapters")
    done = preloaded.run(*words, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tuned = PeftModel.from_pretrained(base, tmp_path / "adapters")
    adapters = {name: value for name, value in tuned.state_dict().items() if "lora_" in name}
    assert far_apart(weights, adapters) == 0.0


@pytest.mark.long
@pytest.mark.parametrize("tool", ["accelerate", "lightning"])
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_the_versions_beside_it_train(name, tool, tmp_path):
    for package in [tool, *PACKAGES.get(name, [])]:
        pytest.importorskip(package)
    done = preloaded.run_python(str(PROJECTS / f"{name}_{tool}.py"), cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_it_has_the_fewest_lines_and_the_page_has_them(name):
    ours, *others = (lines_of_code(f"{name}{tool}", PROJECTS) for tool in ("", "_accelerate", "_lightning"))
    assert ours < min(others)
    row = f"| [{ours}](../examples/projects/{name}.py) | {others[0]} | {others[1]} |"
    assert row in (ROOT / "docs" / "projects.md").read_text()
