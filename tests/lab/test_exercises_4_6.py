"""Exercises 4 to 6: the scripts pass their own checks, and the grader tells a solution from each seeded mistake."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import preloaded
from lockstep.lab.course import GRADERS
from lockstep.lab.grading import Finding, grade
from ports import free_port

ROOT = Path(__file__).parent.parent.parent
TORCHRUN = ("-m", "torch.distributed.run")

# By exercise: a text of the solution, what a mistake makes of it, and words of the explanation.
MISTAKES = {
    "4": [
        ("with torch.autocast(batch.device.type, dtype):", "if True:", "everything is float32"),
        ("torch.autocast(batch.device.type, dtype)", "torch.autocast(batch.device.type)", "Pass the dtype"),
        (
            "    optimizer.zero_grad()\n\n    # Autocast",
            "    optimizer.zero_grad()\n    model.to(dtype)\n    # Autocast",
            "rounds away",
        ),
        ("(loss * scaler.scale).backward()", "loss.backward()", "never multiplied by it"),
        ("gradient /= self.scale", "gradient /= 1.0", "still contain the scale"),
        (
            "    finite = scaler.unscale(model.parameters())",
            "    nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n"
            "    finite = scaler.unscale(model.parameters())",
            "First unscale, then clip",
        ),
        ("    if finite:\n        nn.utils", "    if True:\n        nn.utils", "inf or nan, for good"),
        ("            self.scale /= 2\n", "            pass\n", "overflows again"),
        (
            "    if finite:\n        nn.utils",
            "    if not finite:\n        return False\n    if finite:\n        nn.utils",
            "also in one that is skipped",
        ),
        (
            "            self.scale /= 2\n            self.good_steps = 0",
            "            self.scale /= 2",
            "grew too early",
        ),
        ("            self.scale *= 2", "            pass", "only falls"),
        (
            "if self.good_steps == self.interval:\n            self.scale *= 2\n            self.good_steps = 0",
            "if self.good_steps >= self.interval:\n            self.scale *= 2",
            "Doubling must begin the count",
        ),
        ("self.scale *= 2", "self.scale = min(2 * self.scale, 1024.0)", "grow beyond it"),
        ("self.scale *= 2", "self.scale /= 2", "fell after good steps"),
        (
            "torch.stack([gradient.isfinite().all() for gradient in gradients]).all()",
            "gradients[-1].isfinite().all()",
            "not only of the last one",
        ),
        ("gradient.isfinite().all()", "~gradient.isinf().any()", "torch.isfinite is False for both"),
        (
            "    finite = scaler.unscale(model.parameters())",
            "    finite = scaler.unscale(model.parameters()) or bool(loss.isfinite())",
            "and not at the loss",
        ),
        (
            "loss = loss_of(model, batch)\n\n    # Backward",
            "loss = loss_of(getattr(model, 'module', model), batch)\n\n    # Backward",
            "after DDP has averaged them",
        ),
    ],
    "5": [
        ("first = step * GLOBAL_BATCH\n", "first = step * GLOBAL_BATCH * world\n", "on the step, but not"),
        (
            "return range(first + rank, first + GLOBAL_BATCH, world)",
            "return range(first + rank * GLOBAL_BATCH, first + (rank + 1) * GLOBAL_BATCH)",
            "the batch must stay",
        ),
        (
            "return range(first + rank, first + GLOBAL_BATCH, world)",
            "return range(first, first + GLOBAL_BATCH // world)",
            "counts twice",
        ),
        ("first = step * GLOBAL_BATCH\n", "first = 0\n", "never sees the others"),
        (
            "return range(first + rank, first + GLOBAL_BATCH, world)",
            "return range(first + rank, first + 6, world)",
            "chosen for the global batch",
        ),
        ('folder / f"step-{step:06}.pt.new"', 'folder / f"step-{step:06}.pt"', "rename at the end"),
        (
            "except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:",
            "except ZeroDivisionError as error:",
            "one bad file",
        ),
        ('    model.load_state_dict(state["model"])\n', "", "model.load_state_dict is missing"),
        ('    optimizer.load_state_dict(state["optimizer"])\n', "", "the first steps after a resume are others"),
        (
            "    if dist.get_rank() == 0:\n        state =",
            "    if dist.get_rank() >= 0:\n        state =",
            "the same file at the same time",
        ),
        ("    dist.broadcast_object_list(found)\n", "", "Every rank must load"),
        (
            'reduction="sum") / GLOBAL_BATCH',
            'reduction="mean")',
            "divided once by the global batch",
        ),
        (
            'F.cross_entropy(model(pictures.to(device())), classes.to(device()), reduction="sum") / GLOBAL_BATCH',
            "F.cross_entropy(model(pictures.to(device())), classes.to(device())) / world",
            "The mean of the ranks' means",
        ),
        ('f"step-{step:06}.pt")', 'f"step-{step}.pt")', "Without leading zeros"),
        ("save(folder, step + 1, model, optimizer)", "save(folder, step, model, optimizer)", "twice or never"),
        ("weights = 1 / t", "weights = torch.ones_like(t)", "the largest message decides alone"),
    ],
    "6": [
        (
            "for parameter in reversed(parameters):",
            "for parameter in parameters:",
            "Backward begins with the last layer",
        ),
        ("if bytes_of(buckets[-1]) >= bucket_bytes:", "if False:", "begin another one"),
        (
            "            buckets.append([])\n        buckets[-1].append(parameter)",
            "            buckets.append([])\n        else:\n            buckets[-1].append(parameter)",
            "never averaged",
        ),
        ("            flat /= dist.get_world_size()\n", "", "not divided by their number"),
        (
            "        self._sent.clear()\n        self._missing = [len(bucket) for bucket in self.buckets]\n",
            "        self._sent.clear()\n",
            "The first step is right",
        ),
        ("        self._sent.clear()\n", "", "grow with every step"),
        (
            "self._sent.append((index, flat, work))",
            "self._sent.append((index, flat, work)), work.wait()",
            "stands still",
        ),
        ("            work.wait()\n", "", "may still be changing"),
        (
            "            self._sent.append((index, flat, work))",
            "            while not work.is_completed():\n                pass\n"
            "            self._sent.append((index, flat, work))",
            "a loop over is_completed()",
        ),
        ("flat /= dist.get_world_size()", "flat /= 2", "divide by dist.get_world_size()"),
        ("                offset += parameter.numel()\n", "", "move on by the size"),
        (
            '            self.events.append(Event("all_reduce", flat.numel() * flat.element_size()))\n',
            "",
            "overlap() reads the events",
        ),
        (
            "return (length(compute + communication) - length(compute)) / step",
            "return (max(end for _, end in communication) - max(end for _, end in compute)) / step",
            "at several places",
        ),
        ('    return (\n        f"warning:', '    return "x" or (\n        f"warning:', "says what to change"),
        ("if place < last) / sum", ") / sum", "come before the last gradient"),
        (
            "return (length(compute + communication) - length(compute)) / step",
            "return length(communication) / step",
            "Only the part that no compute hides",
        ),
        ("if fraction <= 0.20:", "if fraction <= 0.40:", "rule of thumb"),
    ],
}


# Another mistake is found by the same check.
LONG = {"at several places", "says what to change", "a loop over is_completed()", "overlap() reads the events"}

# By exercise: forms that are right as well.
RIGHT = {
    "4": [
        ("return bool(torch.stack", "return (torch.stack"),
        (
            "    (loss * scaler.scale).backward()",
            "    scaler = scaler if dtype is torch.float16 else LossScaler(1.0)\n    (loss * scaler.scale).backward()",
        ),
    ],
    "6": [
        ("            work.wait()\n", "            work.get_future().wait()\n"),
        (
            "            work = dist.all_reduce(flat, async_op=True)",
            "            work = reduce_all(flat, async_op=True)",
        ),
    ],
}


# ---- The scripts ----------------------------------------------------------------------------------------------


def run_script(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` in the checkout, with its guesses and pictures in `folder`."""
    env = os.environ | {"LAB_FOLDER": str(folder), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    env["PET_MASTER_PORT"] = str(free_port())  # torchrun's own choice is always the same one
    return preloaded.run_python(*words, env=env, cwd=ROOT)


def checks_of(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return statement -> what was found, for the checks that a script printed; all of them must hold."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    return dict(re.findall(r"^  ok   (.+?): (.*)$", done.stdout, re.M))


def test_mixed_precision(tmp_path):
    done = run_script("lab/solution/04_mixed_precision.py", folder=tmp_path)
    found = checks_of(done)
    assert found["skipped"].startswith("the step with the infinite gradient")
    assert "same bits in 12 steps" in done.stdout
    assert "fp16: a gradient of 1e-8 becomes 0: 0.0" in done.stdout
    assert "1e-4, the course's example of an underflow, is kept" in done.stdout
    assert "one rank overflows: every rank skips that step: [True, False, True]" in done.stdout
    assert (tmp_path / "04_mixed_precision.svg").exists()


def test_several_nodes(tmp_path):
    done = run_script("lab/solution/05_multi_node.py", folder=tmp_path)
    found = checks_of(done)
    assert found["node 1 was killed, node 0 went on"] == "[0, -9]"
    assert found["worlds of the last two attempts"] == "[2, 1]"
    assert found["resumed on two nodes, the weights have the same bits"] == "same bits"
    assert "fit: latency a = " in done.stdout
    assert (tmp_path / "05_multi_node.svg").exists()


def test_several_nodes_with_two_torchruns(tmp_path):
    """What the script's first lines tell a learner to type in two terminals."""
    env = os.environ | {"LAB_FOLDER": str(tmp_path), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    port, commands = free_port(), []
    for node in (2, 3):
        words = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "lab"]
        words += ["--rdzv-endpoint", f"127.0.0.2:{port}", "--local-addr", f"127.0.0.{node}"]
        words += ["--rdzv-conf", f"is_host={node == 2}", "lab/solution/05_multi_node.py"]
        with (tmp_path / f"{node}.txt").open("w") as log:
            commands.append(preloaded.start_python(*TORCHRUN, *words, env=env, cwd=ROOT, stdout=log, stderr=log))

    def said() -> str:
        return "".join((tmp_path / f"{node}.txt").read_text() for node in (2, 3))

    for command in commands:
        assert preloaded.wait(command, 240, said) == 0, said()
    assert "trained from step 0 to 10 on 2 ranks" in said()


def test_profiling(tmp_path):
    done = run_script("lab/solution/06_profiling.py", folder=tmp_path)
    found = checks_of(done)
    assert found["one flat bucket"].startswith("no overlap: 0.0")
    assert "64 KB: overlap is above 0: 84 %" in done.stdout
    assert "without workers no batch is read ahead: 0" in done.stdout
    assert (tmp_path / "06_trace.json").exists()
    assert (tmp_path / "06_profiling.svg").exists()
    assert (tmp_path / "busy.json").exists()


LAUNCH = ("-m", "torch.distributed.launch", "--use-env")


@pytest.mark.long
@pytest.mark.parametrize("launcher", [TORCHRUN, LAUNCH], ids=["torchrun", "launch"])
@pytest.mark.parametrize("script", ["04_mixed_precision", "06_profiling"])
def test_launchers(launcher, script, tmp_path):
    checks_of(run_script(*launcher, "--nproc-per-node", "2", f"lab/solution/{script}.py", folder=tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("ranks", ["1", "3"])
@pytest.mark.parametrize("script", ["04_mixed_precision", "06_profiling"])
def test_other_numbers_of_ranks(script, ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("LAB_NPROC", ranks)
    checks_of(run_script(f"lab/solution/{script}.py", folder=tmp_path))


# ---- The grader -----------------------------------------------------------------------------------------------


def failures(number: str, path: Path) -> list[Finding]:
    return [finding for finding in grade(number, path) if not finding.passed]


@pytest.mark.parametrize("number", MISTAKES)
def test_the_grader_passes_the_solution_and_not_the_starter(number):
    assert failures(number, ROOT / GRADERS[number].script) == []
    assert failures(number, ROOT / GRADERS[number].file) != []


@pytest.mark.parametrize(
    ("number", "old", "new", "words"),
    [
        pytest.param(number, *mistake, marks=[pytest.mark.long] if mistake[2] in LONG else [])
        for number, mistakes in MISTAKES.items()
        for mistake in mistakes
    ],
    ids=[f"{number}-{words}" for number, mistakes in MISTAKES.items() for _, _, words in mistakes],
)
def test_the_grader_explains_a_mistake(number, old, new, words, tmp_path):
    text = (ROOT / GRADERS[number].script).read_text()
    assert text.count(old) == 1
    path = tmp_path / "learner.py"
    path.write_text(text.replace(old, new))
    found = failures(number, path)
    assert any(words in finding.why for finding in found), found


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "usual", "other"), [(number, *form) for number, forms in RIGHT.items() for form in forms]
)
def test_other_right_forms_pass(number, usual, other, tmp_path):
    text = (ROOT / GRADERS[number].script).read_text()
    assert text.count(usual) == 1
    if "reduce_all" in other:
        text = text.replace(
            "import lockstep\n", "from torch.distributed import all_reduce as reduce_all\nimport lockstep\n", 1
        )
    path = tmp_path / "learner.py"
    path.write_text(text.replace(usual, other))
    assert failures(number, path) == []
