"""Exercises 1 to 3 of the course: the scripts run, the grader passes the solutions and explains each mistake."""

from __future__ import annotations

import os
import re
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

import preloaded
from lockstep.errors import UserError
from lockstep.lab.course import GRADERS
from lockstep.lab.grading import Finding, grade
from ports import free_port

ROOT = Path(__file__).parent.parent.parent
SOLUTIONS = {
    "1": ROOT / "lab" / "solution" / "01_ddp_basic.py",
    "2": ROOT / "lab" / "solution" / "02_gradient_accumulation.py",
    "3": ROOT / "lab" / "solution" / "03_fsdp.py",
}


# ---- the scripts ----------------------------------------------------------------------------------------


def run_script(folder: Path, *words: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "LAB_FOLDER": str(folder / "lab"), "LAB_NPROC": str(ranks)}
    env["PET_MASTER_PORT"] = str(free_port())  # torchrun's own choice is always the same one
    return preloaded.run_python(*words, env=env, cwd=folder)


def statements(text: str) -> list[str]:
    """Return what the checks say, without the numbers."""
    return re.findall(r"^  (?:ok  |FAIL) ([^:]+):", text, re.M)


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
LAUNCH = ("-m", "torch.distributed.launch", "--nproc-per-node", "2")
CASES = [
    pytest.param("1", TORCHRUN, 2, id="1-torchrun"),
    pytest.param("2", (), 2, id="2-python"),
    pytest.param("3", (), 2, id="3-python"),
    pytest.param("1", LAUNCH, 2, id="1-launch", marks=pytest.mark.long),
    pytest.param("1", (), 3, id="1-three", marks=pytest.mark.long),
    pytest.param("2", TORCHRUN, 2, id="2-torchrun", marks=pytest.mark.long),
    pytest.param("3", TORCHRUN, 2, id="3-torchrun", marks=pytest.mark.long),
    pytest.param("3", (), 3, id="3-three", marks=pytest.mark.long),
    pytest.param("3", (), 4, id="3-four", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("number", "launcher", "ranks"), CASES)
def test_a_solution_shows_what_its_page_says(number, launcher, ranks, tmp_path):
    script = SOLUTIONS[number]
    done = run_script(tmp_path, *launcher, str(script), ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    assert (tmp_path / "lab" / f"{script.stem}.svg").exists()

    # The page shows the output of the default number of ranks; a statement may name that number.
    page = (ROOT / "docs" / "lab" / f"{script.stem}.md").read_text()
    shown = {re.sub(r"\d+", "N", line) for line in statements(page)}
    printed = {re.sub(r"\d+", "N", line) for line in statements(done.stdout)}
    assert len(shown) >= 9
    assert printed == shown or (number == "3" and printed < shown)


def test_help_of_every_solution_names_the_larger_sizes(tmp_path):
    for number, script in SOLUTIONS.items():
        done = run_script(tmp_path, str(script), "--help")
        assert done.returncode == 0
        assert "--full" in done.stdout
        assert ("--large" in done.stdout) == (number == "3")


# ---- the grader -----------------------------------------------------------------------------------------


def first_failure(number: str, path: Path) -> Finding:
    return next(finding for finding in grade(number, path, limit=timedelta(seconds=240)) if not finding.passed)


@pytest.mark.parametrize("number", SOLUTIONS)
def test_solutions_pass(number):
    findings = list(grade(number, SOLUTIONS[number]))
    assert len(findings) >= 9
    assert [finding for finding in findings if not finding.passed] == []


@pytest.mark.parametrize("number", SOLUTIONS)
def test_starters_fail(number):
    found = first_failure(number, ROOT / GRADERS[number].file)
    assert found.why or "still to do" in found.found


# (exercise, text of the solution, the mistake in its place, words of the explanation)
MISTAKES = {
    "wrong world": (
        "1",
        "dist.init_process_group(backend())",
        "dist.init_process_group(backend(), rank=0, world_size=1)",
        "trains alone",
    ),
    "no broadcast": (
        "1",
        "            dist.broadcast(tensor, src=0)\n",
        "            pass\n",
        "broadcast every parameter",
    ),
    "no buffers": ("1", "in module.state_dict().values():", "in module.parameters():", "leaves out buffers"),
    "a sum": ("1", "gradient /= dist.get_world_size()", "gradient /= 1", "all_reduce adds"),
    "no hooks": ("1", "for parameter in self.trained:\n", "for parameter in []:\n", "register a hook"),
    "no sampler": ("1", ", sampler=sampler)", ", shuffle=True)", "give the loader a DistributedSampler"),
    "global batch": ("1", "batch_size=batch,", "batch_size=batch // 2,", "the part of one rank"),
    "no set_epoch": ("1", "        loader.sampler.set_epoch(epoch)\n", "", "set_epoch(epoch) before each epoch"),
    "no zero_grad": (
        "1",
        "            optimizer.zero_grad()\n            loss = ",
        "            loss = ",
        "zero_grad() in every",
    ),
    "no step": (
        "1",
        "            loss.backward()\n            optimizer.step()\n",
        "            loss.backward()\n",
        "did not change",
    ),
    "cleared too late": (
        "1",
        "            loss.backward()\n            optimizer.step()\n",
        "            loss.backward()\n            optimizer.zero_grad()\n            optimizer.step()\n",
        "found no gradients",
    ),
    "shuffled twice": ("1", ", sampler=sampler)", ", sampler=sampler, shuffle=True)", "leave shuffle out"),
    "own difference": ("1", "    dist.all_reduce(largest, op=dist.ReduceOp.MAX)\n", "", "ReduceOp.MAX"),
    "divided by 2": ("1", "gradient /= dist.get_world_size()", "gradient /= 2", "divide by dist.get_world_size()"),
    "epoch by rank": ("1", "set_epoch(epoch)\n", "set_epoch(epoch + dist.get_rank())\n", "number on all ranks"),
    "first parameter only": (
        "1",
        "(parameter.detach() - first).abs().max().to(largest))\n",
        "(parameter.detach() - first).abs().max().to(largest))\n        break\n",
        "compare all parameters",
    ),
    "no abs": ("1", ".abs().max().to(largest)", ".max().to(largest)", "either sign"),
    "healed": ("1", "dist.broadcast(first, src=0)", "dist.broadcast(parameter.data, src=0)", "hides the mistake"),
    "unscaled": ("2", "(loss * len(labels) / samples).backward()", "loss.backward()", "scale each loss"),
    "sums": (
        "2",
        "(loss * len(labels) / samples).backward()",
        "(loss * len(labels)).backward()",
        "32 samples were summed",
    ),
    "no_sync without DDP": ("2", "if last or not isinstance(model, DDP) else", "if last else", "only if it is a DDP"),
    "by count": ("2", "loss * len(labels) / samples", "loss / len(micro_batches)", "counts by its samples"),
    "stale": ("2", "    optimizer.zero_grad()\n    for number", "    for number", "gradients of the first update"),
    "no no_sync": ("2", "if last or not isinstance(model, DDP) else", "if True else", "4 times the traffic"),
    "never sync": (
        "2",
        "if last or not isinstance(model, DDP)",
        "if not isinstance(model, DDP)",
        "no gradient was exchanged",
    ),
    "sync once": (
        "2",
        "last = number == len(micro_batches) - 1\n",
        "seen = optimizer.param_groups[0].setdefault('seen', [])\n"
        "        last = number == len(micro_batches) - 1 and (seen.append(1) or len(seen) == 1)\n",
        "only some updates exchanged",
    ),
    "empty window": ("2", "    if window:\n", "    if True:\n", "with an empty window"),
    "other product": (
        "2",
        "return micro_batch * accumulate * ranks",
        "return micro_batch * accumulate * accumulate",
        "multiply all three",
    ),
    "lost rest": ("2", "    if window:\n", "    if False:\n", "the last 2 micro-batches were lost"),
    "forgot to count": ("2", "    return updates\n", "", "return it"),
    "no ranks": (
        "2",
        "return micro_batch * accumulate * ranks",
        "return micro_batch * accumulate",
        "multiply all three",
    ),
    "one unit": ("3", "    for block in model.blocks:\n        fully_shard(block, **options)\n", "", "every block"),
    "all blocks stay": (
        "3",
        "        fully_shard(block, **options)\n",
        "        fully_shard(block, **options, reshard_after_forward=False)\n",
        "with reshard_after_forward=False",
    ),
    "bytes by formula": (
        "3",
        "    return {name: sum(local(t).numel() * t.element_size() for t in tensors) for name, tensors",
        "    n = sum(p.numel() * p.element_size() for p in parameters) // dist.get_world_size()\n"
        "    return {'parameters': n, 'gradients': n, 'optimizer': 2 * n}\n    return {name: 0 for name, tensors",
        "rather than what a formula expects",
    ),
    "bf16 sums": ("3", ", reduce_dtype=torch.float32)", ")", "reduce_dtype=torch.float32"),
    "no root": ("3", "    return fully_shard(model, **options)", "    return model", "what the blocks have left"),
    "model before blocks": (
        "3",
        "    for block in model.blocks:\n        fully_shard(block, **options)\n"
        "    return fully_shard(model, **options)",
        "    fully_shard(model, **options)\n    for block in model.blocks:\n        fully_shard(block, **options)\n"
        "    return model",
        "on every block first",
    ),
    "options for the model only": (
        "3",
        "        fully_shard(block, **options)\n",
        "        fully_shard(block)\n",
        "on to every fully_shard",
    ),
    "early optimizer": (
        "3",
        "    model = shard(model, **options)\n    return model, torch.optim.AdamW(model.parameters(), lr=lr)",
        "    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)\n    return shard(model, **options), optimizer",
        "shard first",
    ),
    "whole bytes": ("3", "sum(local(t).numel()", "sum(t.numel()", "count to_local()"),
    "no policy": (
        "3",
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
        "MixedPrecisionPolicy()",
        "pass mp_policy",
    ),
    "bf16 shards": (
        "3",
        "    model = shard(model, **options)\n",
        "    model = shard(model.bfloat16(), **options)\n",
        "within 1e-5",
    ),
    "all write": (
        "3",
        "    if dist.get_rank() == 0:\n        torch.save(state, path)",
        "    torch.save(state, path)",
        "at the same time",
    ),
    "shards only": (
        "3",
        "options=StateDictOptions(full_state_dict=True, cpu_offload=True)",
        "options=StateDictOptions()",
        "full_state_dict=True",
    ),
    "forgot Adam": (
        "3",
        'dcp.load({"model": weights, "optimizer": states},',
        'dcp.load({"model": weights},',
        "Adam began",
    ),
    "not set": (
        "3",
        "    set_state_dict(model, optimizer, model_state_dict",
        "    return\n    set_state_dict(model, optimizer, model_state_dict",
        "Plain numbers, such as the learning rate",
    ),
}
# Found only after seconds of grading.
LATE = {"no policy", "bf16 shards", "all write", "shards only", "forgot Adam", "bytes by formula", "bf16 sums"}
LATE |= {"first parameter only", "no abs", "other product", "not set", "options for the model only"}
LATE |= {"cleared too late"}


def with_mistake(name: str, folder: Path) -> tuple[str, Path]:
    number, right, wrong, _ = MISTAKES[name]
    text = SOLUTIONS[number].read_text()
    assert text.count(right) >= 1, f"the solution does not contain {right!r}"
    path = folder / "mine.py"
    path.write_text(text.replace(right, wrong, 1))
    return number, path


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LATE else n for n in MISTAKES])
def test_each_mistake_is_explained(name, tmp_path):
    number, path = with_mistake(name, tmp_path)
    found = first_failure(number, path)
    assert MISTAKES[name][3] in f"{found.statement} {found.found} {found.why}", found


# Forms that are right as well: (exercise, text of the solution, another right text in its place).
RIGHT = {
    "a worker": ("1", ", sampler=sampler)", ", sampler=sampler, num_workers=1)"),
    "a tensor": ("1", "return largest.item()", "return largest"),
    "by assignment": ("1", "# ---- 4. the loop ----\n", "make_loader = loader_of\n\n# ---- 4. the loop ----\n"),
    "one call per parameter": (
        "2",
        "    optimizer.step()\n",
        "    if isinstance(model, DDP):\n"
        "        for parameter in model.parameters():\n"
        "            dist.all_reduce(parameter.grad)\n"
        "            parameter.grad /= dist.get_world_size()\n"
        "    optimizer.step()\n",
    ),
    "the embedding by itself": (
        "3",
        "    return fully_shard(model, **options)",
        "    fully_shard(next(m for m in model.modules() if isinstance(m, nn.Embedding)), **options)\n"
        "    return fully_shard(model, **options)",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", RIGHT)
def test_other_right_forms_pass(name, tmp_path):
    number, usual, other = RIGHT[name]
    text = SOLUTIONS[number].read_text()
    assert usual in text
    if name == "one call per parameter":
        text = text.replace("if last or not isinstance(model, DDP)", "if not isinstance(model, DDP)")
    if name == "by assignment":
        text = text.replace("def make_loader(", "def loader_of(")
    path = tmp_path / "mine.py"
    path.write_text(text.replace(usual, other, 1))
    assert [finding for finding in grade(number, path) if not finding.passed] == []


@pytest.mark.long
def test_one_mistake_is_named_once(tmp_path):
    """What follows from a mistake would only hide it: the loop is not judged with gradients that are wrong."""
    number, path = with_mistake("a sum", tmp_path)
    assert len([finding for finding in grade(number, path) if not finding.passed]) == 1


def test_names_bound_by_assignment_or_import_are_defined(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from other import setup, Wrapper as OwnDDP\nmake_loader = train = setup\n")
    (found,) = grade("1", path)
    assert found.statement == "the file defines replica_difference"


GATHER = """    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(state, path)
"""
ON_RANK_0 = """    if dist.get_rank() == 0:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        torch.save(state, path)
"""


@pytest.mark.long
def test_gathering_on_rank_0_alone_is_found_as_a_hang(tmp_path):
    path = tmp_path / "mine.py"
    text = SOLUTIONS["3"].read_text()
    assert GATHER in text
    path.write_text(text.replace(GATHER, ON_RANK_0))
    failed = [finding for finding in grade("3", path, limit=timedelta(seconds=15)) if not finding.passed]
    assert "mine.py" in failed[0].found
    assert "all ranks call it" in failed[0].why


# ---- files that nobody planned for ----------------------------------------------------------------------


def starter_with(old: str, new: str, folder: Path) -> Path:
    text = SOLUTIONS["1"].read_text()
    assert old in text
    path = folder / "mine.py"
    path.write_text(text.replace(old, new, 1))
    return path


def test_a_file_that_is_not_python(tmp_path):
    path = starter_with("def setup()", "def setup(", tmp_path)
    with pytest.raises(UserError, match=r"mine.py is not valid Python: invalid syntax\n.*line \d+: def setup"):
        list(grade("1", path))


def test_a_hang_names_the_rank_and_the_line(tmp_path):
    wait = "__import__('time').sleep(0.05)"
    hang = f"        while dist.get_rank() == 1:\n            {wait}\n        return self.module(*inputs)"
    path = starter_with("        return self.module(*inputs)", hang, tmp_path)
    found = list(grade("1", path, limit=timedelta(seconds=15)))[-1]
    line = 1 + path.read_text().split("while dist")[0].count("\n")
    # The other ranks may have returned, or wait for rank 1.
    assert re.search(rf"rank 1 in mine.py:({line}|{line + 1})\b.* did not end within 15 s", found.found), found


def test_a_script_that_only_prints(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text('print("passed")\n')
    (found,) = grade("1", path)
    assert found.statement == "the file defines setup, OwnDDP, make_loader, train, replica_difference"
    assert not found.passed
    assert "keep its names" in found.why


def test_an_error_of_rank_1_is_the_one_that_is_reported(tmp_path):
    crash = """        if dist.get_rank() == 1:
            raise ValueError("out of luck")
        return self.module(*inputs)"""
    found = first_failure("1", starter_with("        return self.module(*inputs)", crash, tmp_path))
    assert re.match(r"rank 1 raised ValueError: out of luck, mine.py:\d+: raise ValueError", found.found), found


def test_a_process_that_dies_is_named(tmp_path):
    die = "        __import__('os')._exit(3)"
    found = first_failure("1", starter_with("        return self.module(*inputs)", die, tmp_path))
    assert "died before the function returned" in found.found
